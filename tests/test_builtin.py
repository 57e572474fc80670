"""The built-in corpus: prose only, no paragraph twice, held-out packages share nothing with the others."""

import json

import datasets
import pytest

from hf_tiny.data import builtin

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
