"""The built-in corpus: prose only, no paragraph twice, held-out packages share nothing with the others."""

import json

import datasets
import pytest

from hf_tiny.data import builtin

NUMPY_STYLE = """Fit the model to the *training* data.

The solver :class:`~package.Newton` needs ``second`` derivatives; see `the guide <https://example.org>`_ [1]_.

.. versionadded:: 1.2

.. math::
    f(x) = a x + b with a formula in words

Parameters
----------
X : {array-like, sparse matrix} of shape (n_samples, n_features)
    Training vectors, one row for each
    of the samples in the set.
y : Ignored
    Not used.

Examples
--------
>>> from package import Newton as the name of a class
>>> print("this is not prose but it looks like it")
this is not prose but it looks like it

Call it like this::

    this code has words but is not prose either

======  ==============================
column  what this column of the table says
======  ==============================
"""
GOOGLE_STYLE = """
Args:
    hidden_size (`int`, *optional*, defaults to 768):
        Dimensionality of the encoder layers and of the pooler.
    drop_last (bool): If ``True``, the sampler will drop the last batch if
        it would be smaller than the others.
    :param name: the name under which the thing is known

Example:

```python
this code has words but is not prose either
```
"""


def test_paragraphs_are_prose():
    assert builtin.paragraphs(NUMPY_STYLE) == [
        "Fit the model to the training data.",
        "The solver package.Newton needs second derivatives; see the guide.",
        "Training vectors, one row for each of the samples in the set.",
    ]
    assert builtin.paragraphs(GOOGLE_STYLE) == [
        "Dimensionality of the encoder layers and of the pooler.",
        "If True, the sampler will drop the last batch if it would be smaller than the others.",
        "the name under which the thing is known",
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
    assert letters / sum(map(len, texts)) > 0.92
    assert not any(mark in text for text in texts for mark in (">>>", "```", ":class:"))
