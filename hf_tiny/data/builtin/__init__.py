"""English prose that is on every machine where hf_tiny is installed: the docstrings of Python and of its packages.

They are read from the source files without importing them. The text differs with the installed versions, and so do the
classified paragraphs that are made of it.

The treebank and the pairs lie here as files, made by benchmarks/make_builtin.py. The treebank is derived from Python's
standard library, and is under its licence, that of the Python Software Foundation.
"""

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

from tqdm.auto import tqdm

from hf_tiny.data import cache, sources
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.workers import workers

FORMAT_VERSION = 4  # Raise it when the cleaning changes.
HELD_OUT = ("numpy", "huggingface_hub", "asyncio", "email", "unittest")
STANDARD_LIBRARY = "python"
PACKAGES = (  # hf_tiny's dependencies, the largest first
    *("torch", "transformers", "scipy", "sklearn", "pandas", "matplotlib", "numpy", "datasets", "huggingface_hub"),
    *("accelerate", "evaluate", "tokenizers"),
)
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # Where the name differs from the package's.
SKIPPED = {"test", "tests", "testing", "conftest", "_vendor", "externals", "site-packages", "idlelib", "lib2to3"}
CLASSIFIED_VERSION = 2  # Raise it when the classified texts change.
CLASSES = {  # the package that a paragraph comes from, and names in its text that would give it away
    "matplotlib": ("matplotlib", "pyplot", "plt", "mpl"),
    "pandas": ("pandas", "pd"),
    "sklearn": ("sklearn", "scikit-learn"),
    "torch": ("torch", "pytorch"),
    STANDARD_LIBRARY: ("python",),
}
CLASS_SIZES = {"train": 400, "validation": 100}  # paragraphs of each class
PARAGRAPH_LENGTHS = range(60, 500)  # characters
HELD_OUT_MODULES = 0.2
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def corpus_files() -> tuple[list[str], list[str]]:
    """The .jsonl files of the training packages and of the held-out ones, one per package; written when missing."""
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    key = json.dumps([FORMAT_VERSION, platform.python_version(), versions, HELD_OUT])
    folder = _written(key, lambda: _corpus(list(versions)))
    held_out = {str(folder / f"{package}.jsonl") for package in HELD_OUT}
    files = sorted(map(str, folder.glob("*.jsonl")))
    return [path for path in files if path not in held_out], [path for path in files if path in held_out]


def _written(key: str, make: Callable[[], dict[str, list[dict]]]) -> Path:
    """The folder of this key in the cache. When it is missing, `make()` gives the rows of each of its .jsonl files."""

    def write(folder: Path) -> None:
        folder.mkdir()
        for name, rows in make().items():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    return cache.kept(cache.place("hf_tiny_builtin", hashlib.sha256(key.encode()).hexdigest()[:16]), write)


def _corpus(packages: list[str]) -> dict[str, list[dict]]:
    """Repeated paragraphs are left out. Training text comes first, so that none of it comes again in held-out text."""
    modules = sorted(_modules(packages), key=lambda module: module[0] in HELD_OUT)
    seen, rows = set(), {}
    with workers(None, len(modules), chunk=8) as each:
        documents = each(_documents, [path for *_, path in modules])
        documents = tqdm(documents, "Reading docstrings", len(modules), unit=" modules")
        found = ((package, name, texts) for (package, name, _), texts in zip(modules, documents, strict=True))
        manual = ((STANDARD_LIBRARY, f"pydoc_data.topics.{topic}", [_keyed(text)]) for topic, text in topics.items())
        for package, source, texts in chain(manual, found):
            for text in texts:
                new = [paragraph for key, paragraph in text.items() if key not in seen]
                seen.update(text)
                if new:
                    rows.setdefault(package, []).append({"text": "\n".join(new), "source": source})
    return rows


def _modules(packages: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Package, module and source file. The standard library is one package, but for what is held out of it."""
    specs = filter(None, map(importlib.util.find_spec, packages))
    roots = {spec.name: folder for spec in specs for folder in spec.submodule_search_locations or ()}
    for package, root in {STANDARD_LIBRARY: sysconfig.get_path("stdlib"), **roots}.items():
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = sorted(set(subfolders) - SKIPPED)
            for path in sorted(Path(folder, file) for file in files if file.endswith(".py")):
                parts = path.relative_to(root).with_suffix("").parts
                if path.stem not in SKIPPED:
                    inner = package == STANDARD_LIBRARY and parts[0] in HELD_OUT
                    yield parts[0] if inner else package, ".".join((package, *parts)), path


def _documents(path: Path) -> list[dict[str, str]]:
    """The paragraphs of each docstring of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        gc.disable()  # A syntax tree is a million small objects: without the collector it is built in half the time.
        try:
            nodes: list[Documented] = [ast.parse(path.read_bytes())]
        except (SyntaxError, ValueError):
            return []  # A template, or source for another version of Python.
        finally:
            gc.enable()
    for node in nodes:
        nodes += [child for child in node.body if isinstance(child, Documented)]
    return [_keyed(text) for node in nodes if (text := ast.get_docstring(node))]


def _keyed(text: str) -> dict[str, str]:
    """Each paragraph under what makes it the same as another: its words, without case, digits and punctuation."""
    return {re.sub(r"[\W\d_]+", " ", paragraph).casefold(): paragraph for paragraph in paragraphs(text)}


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring that are prose, each on one line: no code, no tables, no formulas."""
    text = re.sub(r"^.*\n[ \t]*([-=~^*#+])\1{2,}[ \t]*$", "", text, flags=re.M)  # underlined headings
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if ">>>" not in part and "```" not in part]
    letters = [sum(character.isalpha() or character == " " for character in part) for part in found]
    return [
        part for part, count in zip(found, letters, strict=True) if part.count(" ") >= 5 and count >= 0.8 * len(part)
    ]


# Labelled data, for the recipes that fine-tune


def classified_files() -> tuple[list[str], list[str]]:
    """Paragraphs of docstrings, `text`, and the package that they come from, `label`: .jsonl to train on and to evaluate
    on. No module is in both, and the packages' own names are taken out."""
    files = [path for paths in corpus_files() for path in paths if Path(path).stem in CLASSES]
    key = json.dumps([CLASSIFIED_VERSION, files and Path(files[0]).parent.name, CLASSES, CLASS_SIZES])
    folder = _written(key, lambda: _classified(files))
    return [str(folder / "train.jsonl")], [str(folder / "validation.jsonl")]


def treebank_files() -> tuple[list[str], list[str]]:
    """Statements of Python's standard library as dependency trees: .conllu to train on and to evaluate on. No module is
    in both, and no sentence comes twice."""
    return _shipped("treebank_{}.conllu.gz")


def pair_files() -> tuple[list[str], list[str]]:
    """Dates in English words, `source`, and in Korean ones, `target`: .tsv to train on and to evaluate on. The order is
    turned round, 'sixteenth' becomes two syllables and 'nineteen' three; no date is in both."""
    return _shipped("dates_{}.tsv.gz")


def _shipped(name: str) -> tuple[list[str], list[str]]:
    train, validation = (str(Path(__file__).with_name(name.format(split))) for split in ("train", "validation"))
    return [train], [validation]


def _classified(files: list[str]) -> dict[str, list[dict]]:
    rows = {"train": [], "validation": []}
    secret = re.compile(rf"\b({'|'.join(name for names in CLASSES.values() for name in names)})\b\.?", re.IGNORECASE)
    for file in files:
        found = {"train": [], "validation": []}
        for _, row in sources.table_rows(file, Decoding()):
            texts = (" ".join(secret.sub("", text).split()) for text in row["text"].split("\n"))
            new = ({"text": text, "label": Path(file).stem} for text in texts if len(text) in PARAGRAPH_LENGTHS)
            found[split_of(row["source"])] += new
        for split, examples in found.items():
            rows[split] += random.Random(0).sample(examples, min(CLASS_SIZES[split], len(examples)))
    for examples in rows.values():
        random.Random(0).shuffle(examples)
    return rows


def split_of(module: str) -> str:
    """By the module's name alone, so that a module stays on its side."""
    return "validation" if sources.hashed_below(HELD_OUT_MODULES, module) else "train"
