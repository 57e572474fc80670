"""The built-in data: prose only, no paragraph twice, what is held out shares nothing with the rest; files that are valid."""

import ast
import gzip
import json
import tomllib
from collections import Counter
from datetime import date
from pathlib import Path

import datasets
import pytest
from fixtures import modules

from hf_tiny.data import builtin, conllu, sources
from hf_tiny.data.encoding import Decoding

DOCSTRING = """Fit the model to the training data that was given.

Parameters
----------
X : array of shape (n_samples, n_features)
    Training vectors, one row for each
    of the samples in the set, without missing values.

>>> print("this is not prose but it looks like it does")
this is not prose but it looks like it

```python
this code has words but is not prose either
```

f(x) = 0.5 * a[0] ** 2 + b[1] - c[2] / (1 + d[3])

Too short to keep.
"""


def test_paragraphs_are_prose():
    assert builtin.paragraphs(DOCSTRING) == [
        "Fit the model to the training data that was given.",
        "X : array of shape (n_samples, n_features) Training vectors, one row for each of the samples in the set, "
        "without missing values.",
    ]


SHARED = "This paragraph 1 is in every package that there is."
MODULE = '''"""{first}

{second}
"""
raise ImportError("never imported")


class Thing:
    """The things of {name} are described here in words."""

    async def act(self):
        """What a thing of {name} does when it is told to act."""
'''


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Three packages and a standard library of one module and one package."""
    roots = {"alpha": "site/alpha", "beta": "site/beta", "gamma": "site/gamma", "delta": "lib/delta", "module": "lib"}
    for name, folder in roots.items():
        second = f"Only {name} says this about the matter at hand."
        source = MODULE.format(name=name, first=SHARED.replace("1", str(len(name))), second=second)
        (tmp_path / folder / "tests").mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "module.py").write_text(source)
        (tmp_path / folder / "broken.py").write_text("def {{ name }}")
        (tmp_path / folder / "tests" / "a.py").write_text('"""Tests are not part of the corpus at all."""')
        (tmp_path / f"site/{name}-1.0.dist-info").mkdir()
        (tmp_path / f"site/{name}-1.0.dist-info/METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(builtin, "PACKAGES", ("alpha", "beta", "gamma", "not_installed"))
    monkeypatch.setattr(builtin, "HELD_OUT", ("alpha", "delta"))
    monkeypatch.setattr(builtin.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def read(path: str) -> list[dict]:
    with open(path) as file:
        return [json.loads(line) for line in file]


def name_of(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".jsonl")


def test_whole_packages_are_held_out_and_nothing_is_said_twice(packages):
    train, held_out = builtin.corpus_files()
    assert list(map(name_of, train)) == ["beta", "gamma", "python"]
    assert list(map(name_of, held_out)) == ["alpha", "delta"]
    paragraphs = [text for path in train + held_out for row in read(path) for text in row["text"].split("\n")]
    assert len({text.casefold() for text in paragraphs}) == len(paragraphs)
    assert sum("every package" in text for text in paragraphs) == 1
    assert not any("every package" in row["text"] for path in held_out for row in read(path))
    assert not any(text.startswith("Tests are not part") for text in paragraphs)
    assert [row["source"] for row in read(held_out[0])] == ["alpha.module"] * 3
    assert read(held_out[0])[0]["text"] == "Only alpha says this about the matter at hand."
    assert any(row["source"].startswith("pydoc_data.topics.") for row in read(train[2]))
    assert any("module does when it is told" in row["text"] for row in read(train[2]))


def test_it_is_written_once_per_set_of_versions(packages, monkeypatch):
    first = builtin.corpus_files()
    with monkeypatch.context() as patch:
        patch.setattr(builtin, "_corpus", lambda *_: pytest.fail("written again"))
        assert builtin.corpus_files() == first
    (packages / "site/beta-1.0.dist-info/METADATA").write_text("Name: beta\nVersion: 2.0\n")
    assert builtin.corpus_files() != first
    assert len(list((packages / "cache" / "hf_tiny_builtin").iterdir())) == 2


def test_a_damaged_one_is_said_and_written_again(packages, caplog):
    train, _ = first = builtin.corpus_files()
    content = Path(train[0]).read_bytes()
    for spoil in (lambda path: path.write_bytes(content[:-20]), Path.unlink):
        spoil(Path(train[0]))
        assert builtin.corpus_files() == first and Path(train[0]).read_bytes() == content
    assert caplog.text.count(f"{Path(train[0]).parent} is damaged (beta.jsonl: ") == 2


def test_real_docstrings_become_prose(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "PACKAGES", ("accelerate", "evaluate"))
    monkeypatch.setattr(builtin, "HELD_OUT", ("evaluate",))
    monkeypatch.setattr(builtin.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    train, held_out = builtin.corpus_files()
    texts = [row["text"] for path in train + held_out for row in read(path)]
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n")]
    assert len(texts) > 400 and sum(map(len, texts)) > 200_000
    assert all(len(paragraph.split()) >= 6 for paragraph in paragraphs)
    letters = sum(character.isalpha() or character == " " for text in texts for character in text)
    assert letters / sum(map(len, texts)) > 0.9
    assert not any(mark in text for text in texts for mark in (">>>", "```"))


make_builtin = modules.load("benchmarks/make_builtin.py")
CODE = '''"""Docstrings are no statements."""
import os.path as path, sys
from . import a as b
from ..c.d import *
x: int = 3
y: "list"
z = w = (1, 2) + (-x) ** 2 * f(*g, k=1, **h)[1:2, ::3].attribute
a, b = b, {1: 2, **c}
text = f"{x} is a long text with blanks" + 'and\\n"quotes"' + b"bytes"
value = [i + j for i in range(3) if i if not j for j in k] or {**m} or {n: o for n, o in p}
total += (q if r is not s else t) not in {1, ...}
check = lambda u, *v, w=1: u(await_) and 1 < u <= 3
del x, y[0]
assert sys.path, "message"


async def function():
    raise ValueError(sys.argv[-1]) from error
    return (yield (await sys.exit(code := 3)))
    yield from (i for i in j)
'''


def test_statements_become_trees(monkeypatch):
    monkeypatch.setattr(make_builtin, "MOST", 60)
    module = ast.parse(CODE)
    names, statements = make_builtin.module_names(module), make_builtin.statements(module)
    trees = [make_builtin.tree(statement, names) for statement in statements]
    assert names == {"path", "sys"} and len(trees) == 16
    for tree in trees:
        rows = [
            [str(n), word, *"____", str(head)]
            for n, (word, head) in enumerate(zip(tree.words, tree.heads, strict=True), 1)
        ]
        assert conllu.heads(rows, "here: a sentence").count(0) == 1
        assert [r for r, head in zip(tree.relations, tree.heads, strict=True) if not head] == ["root"]
        assert not any(" " in word for word in tree.words)
    tree = make_builtin.tree(ast.parse("sys.exit(code=x[1] + 2)").body[0], {"sys"})
    assert " ".join(tree.words) == "sys . exit ( code = x [ 1 ] + 2 )"
    assert " ".join(tree.roles) == (
        "module punctuation function punctuation argument operator variable punctuation number punctuation operator "
        "number punctuation"
    )
    assert tree.heads == (3, 3, 0, 3, 3, 5, 11, 7, 7, 7, 5, 11, 3)
    assert " ".join(tree.relations) == "value punct root punct keyword part left punct slice punct value right punct"
    tree = make_builtin.tree(ast.parse("from a.b import c as d").body[0], set())
    assert tree.roles == ("keyword", "module", "punctuation", "module", "keyword", "variable", "keyword", "variable")
    assert tree.heads == (0, 1, 1, 1, 1, 1, 6, 6)
    assert tree.relations == ("root", "part", "punct", "part", "mark", "name", "mark", "part")
    too_long = f"x = [{', '.join('1' * 40)}]"
    assert [make_builtin.tree(ast.parse(text).body[0], set()) for text in ("x", "é = 1", too_long)] == [None] * 3


def test_classified_paragraphs_are_of_modules_that_are_apart(packages, monkeypatch):
    monkeypatch.setattr(builtin, "CLASSES", {"beta": ("beta",), "gamma": ("gamma",)})
    monkeypatch.setattr(builtin, "CLASS_SIZES", {"train": 3, "validation": 2})
    monkeypatch.setattr(builtin, "PARAGRAPH_LENGTHS", range(20, 500))
    monkeypatch.setattr(builtin, "HELD_OUT_MODULES", 0.5)
    for number in range(8):
        for name in ("beta", "gamma"):
            words = " ".join(f"{name[0]}{letter * 3}" for letter in "abcdefgh"[: number + 1])
            (packages / f"site/{name}/more{number}.py").write_text(
                f'"""The {name.title()} package has {words} in it too."""'
            )
    first = builtin.classified_files()
    rows = {split: read(path) for split, (path,) in zip(("train", "validation"), first, strict=True)}
    assert {split: Counter(row["label"] for row in found) for split, found in rows.items()} == {
        "train": {"beta": 3, "gamma": 3},
        "validation": {"beta": 2, "gamma": 2},
    }
    assert not any(
        name in row["text"].lower() for found in rows.values() for row in found for name in ("beta", "gamma")
    )
    assert not {row["text"] for row in rows["train"]} & {row["text"] for row in rows["validation"]}
    monkeypatch.setattr(builtin, "_classified", lambda *_: pytest.fail("written again"))
    assert builtin.classified_files() == first


def test_a_treebank_is_made_of_modules_that_are_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "HELD_OUT_MODULES", 0.5)
    monkeypatch.setattr(make_builtin, "TREEBANK_SIZES", {"train": 20, "validation": 3})
    for number in range(8):
        lines = [f"value_{line} = call(argument, {line})" for line in range(2 * number, 2 * number + 3)]
        (tmp_path / f"more{number}.py").write_text("\n".join(["import sys", *lines]))
    (tmp_path / "broken.py").write_text("def {{ name }}")
    texts = make_builtin.treebank(tmp_path)
    lines = {split: text.splitlines() for split, text in texts.items()}
    names = {split: [line.split(":")[0] for line in found if "sent_id" in line] for split, found in lines.items()}
    assert len(names["validation"]) == 3 and len(names["train"]) > 3
    assert set(names["train"]).isdisjoint(names["validation"])
    sentences = [line for found in lines.values() for line in found if line.startswith("# text")]
    assert len(set(sentences)) == len(sentences)  # though each module but one begins as the one before it ends


def trees(path: str) -> list[tuple]:
    """The words, their heads and the labels of each sentence of a file."""
    found = []
    for block in conllu.blocks(sources.numbered_lines(path, Decoding())):
        rows = conllu.words(block, path)
        heads = conllu.heads(rows, f"{path}: a sentence")
        assert heads.count(0) == 1
        labels = {label for row in rows for label in (row[conllu.UPOS], row[conllu.DEPREL])}
        (module,) = (line.split("= ")[1].split(":")[0] for _, line in block if line.startswith("# sent_id"))
        found.append((tuple(row[conllu.FORM] for row in rows), module, labels))
    return found


def test_the_shipped_treebank_is_valid():
    """No module and no sentence is in both parts, and what has to be predicted was there to learn."""
    train, validation = (trees(path) for (path,) in builtin.treebank_files())
    assert (len(train), len(validation)) == (3000, 500)
    words = [sentence for sentence, _, _ in train + validation]
    assert len(set(words)) == 3500 and all(3 <= len(sentence) <= 25 for sentence in words)
    assert {name for _, name, _ in train}.isdisjoint(name for _, name, _ in validation)
    known = set().union(*(labels for *_, labels in train))
    assert known >= set().union(*(labels for *_, labels in validation)) and {"root", "punct", "function"} <= known


@pytest.mark.parametrize(
    ("day", "form", "expected"),
    [
        ((2026, 11, 16), 0, ("Monday, November sixteenth, twenty twenty-six", "이천이십육년 십일월 십육일 월요일")),
        ((1905, 6, 12), 1, ("Monday the twelfth of June nineteen oh five", "천구백오년 유월 십이일 월요일")),
        ((2000, 10, 31), 2, ("the thirty-first of October, two thousand, a Tuesday", "이천년 시월 삼십일일 화요일")),
        ((1900, 1, 20), 2, ("the twentieth of January, nineteen hundred, a Saturday", "천구백년 일월 이십일 토요일")),
        ((2007, 8, 8), 1, ("Wednesday the eighth of August two thousand seven", "이천칠년 팔월 팔일 수요일")),
        ((2010, 5, 5), 0, ("Wednesday, May fifth, twenty ten", "이천십년 오월 오일 수요일")),
    ],
)
def test_dates(day, form, expected):
    assert make_builtin.pair(date(*day), form) == expected


def test_the_shipped_pairs_are_those_of_the_generator():
    rows = {}
    for split, (path,) in zip(("train", "validation"), builtin.pair_files(), strict=True):
        assert gzip.decompress(Path(path).read_bytes()).decode() == make_builtin.pairs()[split]
        rows[split] = [row for _, row in sources.table_rows(path, Decoding())]
    assert {split: len(found) for split, found in rows.items()} == {"train": 5000, "validation": 500}
    targets = {split: {row["target"] for row in found} for split, found in rows.items()}
    assert [len(found) for found in targets.values()] == [5000, 500]
    assert targets["train"].isdisjoint(targets["validation"])
    words = {split: {word for row in found for word in row["source"].split()} for split, found in rows.items()}
    assert words["validation"] <= words["train"]
    forms = Counter(row["source"].startswith("the ") for row in rows["train"])
    assert all(count > 1000 for count in forms.values())


def test_the_files_are_small_and_in_the_package():
    files = [Path(path) for paths in (*builtin.treebank_files(), *builtin.pair_files()) for path in paths]
    assert sum(path.stat().st_size for path in files) < 300_000
    project = tomllib.loads((modules.ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["hf_tiny.data.builtin"]
    assert all(any(path.match(pattern) for pattern in patterns) for path in files)
