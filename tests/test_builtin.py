"""The built-in corpus: prose only, no paragraph twice, held-out packages share nothing with the others; labelled data."""

import ast
import json
from collections import Counter

import datasets
import pytest

from hf_tiny.data import builtin, conllu, python_trees
from hf_tiny.data.tagged import LinkArguments, read_trees

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
        patch.setattr(builtin, "_write", lambda *_: pytest.fail("written again"))
        assert builtin.corpus_files() == first
    (packages / "site/beta-1.0.dist-info/METADATA").write_text("Name: beta\nVersion: 2.0\n")
    assert builtin.corpus_files() != first
    assert len(list((packages / "cache" / "hf_tiny_builtin").iterdir())) == 2


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
    monkeypatch.setattr(python_trees, "MOST", 60)
    module = ast.parse(CODE)
    names, statements = python_trees.module_names(module), python_trees.statements(module)
    trees = [python_trees.tree(statement, names) for statement in statements]
    assert names == {"path", "sys"} and len(trees) == 16
    for tree in trees:
        rows = [
            [str(n), word, *"____", str(head)]
            for n, (word, head) in enumerate(zip(tree.words, tree.heads, strict=True), 1)
        ]
        assert conllu.heads(rows, "a sentence", "here").count(0) == 1
        assert [r for r, head in zip(tree.relations, tree.heads, strict=True) if not head] == ["root"]
        assert not any(" " in word for word in tree.words)
    tree = python_trees.tree(ast.parse("sys.exit(code=x[1] + 2)").body[0], {"sys"})
    assert " ".join(tree.words) == "sys . exit ( code = x [ 1 ] + 2 )"
    assert " ".join(tree.roles) == (
        "module punctuation function punctuation argument operator variable punctuation number punctuation operator "
        "number punctuation"
    )
    assert tree.heads == (3, 3, 0, 3, 3, 5, 11, 7, 7, 7, 5, 11, 3)
    assert " ".join(tree.relations) == "value punct root punct keyword part left punct slice punct value right punct"
    tree = python_trees.tree(ast.parse("from a.b import c as d").body[0], set())
    assert tree.roles == ("keyword", "module", "punctuation", "module", "keyword", "variable", "keyword", "variable")
    assert tree.heads == (0, 1, 1, 1, 1, 1, 6, 6)
    assert tree.relations == ("root", "part", "punct", "part", "mark", "name", "mark", "part")
    too_long = f"x = [{', '.join('1' * 40)}]"
    assert [python_trees.tree(ast.parse(text).body[0], set()) for text in ("x", "é = 1", too_long)] == [None] * 3


def test_labelled_data_is_made_of_modules_that_are_apart(packages, monkeypatch):
    monkeypatch.setattr(builtin, "CLASSES", {"beta": ("beta",), "gamma": ("gamma",)})
    monkeypatch.setattr(builtin, "CLASS_SIZES", {"train": 3, "validation": 2})
    monkeypatch.setattr(builtin, "PARAGRAPH_LENGTHS", range(20, 500))
    monkeypatch.setattr(builtin, "HELD_OUT_MODULES", 0.5)
    monkeypatch.setattr(builtin, "TREEBANK_SIZES", {"train": 20, "validation": 3})
    for number in range(8):
        for name in ("beta", "gamma"):
            words = " ".join(f"{name[0]}{letter * 3}" for letter in "abcdefgh"[: number + 1])
            (packages / f"site/{name}/more{number}.py").write_text(
                f'"""The {name.title()} package has {words} in it too."""'
            )
        lines = [f"value_{line} = call(argument, {line})" for line in range(number, number + 3)]
        (packages / f"lib/more{number}.py").write_text("\n".join(["import sys", *lines]))
    first = builtin.classified_files(), builtin.treebank_files()
    (train, validation), (trees, held_out_trees) = first
    rows = {split: read(path) for split, (path,) in (("train", train), ("validation", validation))}
    assert {split: Counter(row["label"] for row in found) for split, found in rows.items()} == {
        "train": {"beta": 3, "gamma": 3},
        "validation": {"beta": 2, "gamma": 2},
    }
    assert not any(
        name in row["text"].lower() for found in rows.values() for row in found for name in ("beta", "gamma")
    )
    assert not {row["text"] for row in rows["train"]} & {row["text"] for row in rows["validation"]}
    arguments = LinkArguments(train_file=trees, validation_file=held_out_trees)
    splits = read_trees(arguments)
    modules = [{sentence.name.split(":")[0] for sentence in splits[split]} for split in ("train", "validation")]
    assert all(modules) and not modules[0] & modules[1]
    words = [sentence.words for split in splits.values() for sentence in split]
    assert len(set(words)) == len(words)
    for written in ("_write_classified", "_write_treebank"):
        monkeypatch.setattr(builtin, written, lambda *_: pytest.fail("written again"))
    assert (builtin.classified_files(), builtin.treebank_files()) == first
