"""English prose that is on every machine where hf_tiny is installed: the docstrings of Python and of its packages.

They are read from the source files without importing them. The text differs with the installed versions. Labelled data
is made of them and of the source itself; pairs of texts are dates in two languages.
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
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from datetime import date
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

import datasets
from tqdm.auto import tqdm

from hf_tiny.data import dates, python_trees

FORMAT_VERSION = 4  # Raise it when the cleaning changes.
HELD_OUT = ("numpy", "huggingface_hub", "asyncio", "email", "unittest")
STANDARD_LIBRARY = "python"
PACKAGES = (  # hf_tiny's dependencies, the largest first
    *("torch", "transformers", "scipy", "sklearn", "pandas", "matplotlib", "numpy", "datasets", "huggingface_hub"),
    *("accelerate", "evaluate", "tokenizers"),
)
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # Where the name differs from the package's.
SKIPPED = {"test", "tests", "testing", "conftest", "_vendor", "externals", "site-packages", "idlelib", "lib2to3"}
TAGGED_VERSION = 2  # Raise it when the classified texts or the treebank change.
CLASSES = {  # the package that a paragraph comes from, and names in its text that would give it away
    "matplotlib": ("matplotlib", "pyplot", "plt", "mpl"),
    "pandas": ("pandas", "pd"),
    "sklearn": ("sklearn", "scikit-learn"),
    "torch": ("torch", "pytorch"),
    STANDARD_LIBRARY: ("python",),
}
CLASS_SIZES = {"train": 400, "validation": 100}  # paragraphs of each class
PARAGRAPH_LENGTHS = range(60, 500)  # characters
TREEBANK_SIZES = {"train": 3000, "validation": 500}  # sentences
SENTENCES_OF_MODULE = 40
HELD_OUT_MODULES = 0.2
PAIRS_VERSION = 1  # Raise it when the pairs change.
PAIR_SIZES = {"train": 5000, "validation": 500}
YEARS = range(1600, 2100)
DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def corpus_files() -> tuple[list[str], list[str]]:
    """The .jsonl files of the training packages and of the held-out ones, one per package; written when missing."""
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    key = json.dumps([FORMAT_VERSION, platform.python_version(), versions, HELD_OUT])
    folder = _written(key, lambda folder: _write(folder, list(versions)))
    held_out = {str(folder / f"{package}.jsonl") for package in HELD_OUT}
    files = sorted(map(str, folder.glob("*.jsonl")))
    return [path for path in files if path not in held_out], [path for path in files if path in held_out]


def _written(key: str, write: Callable[[Path], None]) -> Path:
    """The folder of this key in the cache, made by `write` when it is missing."""
    root = Path(datasets.config.HF_DATASETS_CACHE) / "hf_tiny_builtin"
    folder = root / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as unfinished:
            write(Path(unfinished) / "files")
            with suppress(OSError):  # Another run may have been faster.
                os.replace(Path(unfinished) / "files", folder)
    return folder


def _write(folder: Path, packages: list[str]) -> None:
    """Repeated paragraphs are left out. Training text comes first, so that none of it comes again in held-out text."""
    folder.mkdir()
    modules = sorted(_modules(packages), key=lambda module: module[0] in HELD_OUT)
    seen = set()
    # A syntax tree is a million small objects: without the garbage collector it is built in half the time.
    with ExitStack() as stack, ProcessPoolExecutor(initializer=gc.disable) as pool:
        names = {STANDARD_LIBRARY, *(package for package, *_ in modules)}
        paths = {package: folder / f"{package}.jsonl" for package in names}
        files = {package: stack.enter_context(open(path, "w", encoding="utf-8")) for package, path in paths.items()}
        documents = pool.map(_documents, [path for *_, path in modules], chunksize=8)
        documents = tqdm(documents, "Reading docstrings", len(modules), unit=" modules")
        found = ((package, name, texts) for (package, name, _), texts in zip(modules, documents, strict=True))
        manual = ((STANDARD_LIBRARY, f"pydoc_data.topics.{topic}", [_keyed(text)]) for topic, text in topics.items())
        for package, source, texts in chain(manual, found):
            for text in texts:
                new = [paragraph for key, paragraph in text.items() if key not in seen]
                seen.update(text)
                if new:
                    row = {"text": "\n".join(new), "source": source}
                    files[package].write(json.dumps(row, ensure_ascii=False) + "\n")


def _modules(packages: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Package, module and source file. The standard library is one package, but for what is held out of it."""
    roots = {name: importlib.util.find_spec(name).submodule_search_locations[0] for name in packages}
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
        try:
            nodes = [ast.parse(path.read_bytes())]
        except (SyntaxError, ValueError):
            return []  # A template, or source for another version of Python.
    for node in nodes:
        nodes += [child for child in node.body if isinstance(child, DOCUMENTED)]
    return [_keyed(text) for node in nodes if (text := ast.get_docstring(node))]


def _keyed(text: str) -> dict[str, str]:
    """Each paragraph under what makes it the same as another: its words, without case, digits and punctuation."""
    return {re.sub(r"[\W\d_]+", " ", paragraph).casefold(): paragraph for paragraph in paragraphs(text)}


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring that are prose, each on one line: no code, no tables, no formulas."""
    text = re.sub(r"^.*\n[ \t]*([-=~^*#+])\1{2,}[ \t]*$", "", text, flags=re.M)  # underlined headings
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if ">>>" not in part and "```" not in part]
    return [part for part in found if part.count(" ") >= 5 and _letters(part) >= 0.8 * len(part)]


def _letters(text: str) -> int:
    return sum(character.isalpha() or character == " " for character in text)


# Labelled data, for the recipes that fine-tune


def classified_files() -> tuple[list[str], list[str]]:
    """Paragraphs of docstrings, `text`, and the package that they come from, `label`: .jsonl to train on and to evaluate
    on. No module is in both, and the packages' own names are taken out."""
    sources = [path for paths in corpus_files() for path in paths if Path(path).stem in CLASSES]
    key = json.dumps([TAGGED_VERSION, sources and Path(sources[0]).parent.name, CLASSES, CLASS_SIZES])
    folder = _written(key, lambda folder: _write_classified(folder, sources))
    return [str(folder / "train.jsonl")], [str(folder / "validation.jsonl")]


def treebank_files() -> tuple[list[str], list[str]]:
    """Statements of Python's standard library as dependency trees: .conllu to train on and to evaluate on. No module is
    in both, and no sentence comes twice."""
    key = json.dumps([TAGGED_VERSION, platform.python_version(), TREEBANK_SIZES])
    folder = _written(key, _write_treebank)
    return [str(folder / "train.conllu")], [str(folder / "validation.conllu")]


def _write_classified(folder: Path, sources: list[str]) -> None:
    rows = {"train": [], "validation": []}
    secret = re.compile(rf"\b({'|'.join(name for names in CLASSES.values() for name in names)})\b\.?", re.IGNORECASE)
    for source in sources:
        found = {"train": [], "validation": []}
        with open(source, encoding="utf-8") as file:
            for row in map(json.loads, file):
                texts = (" ".join(secret.sub("", text).split()) for text in row["text"].split("\n"))
                label = Path(source).stem
                found[_split(row["source"])] += [
                    {"text": text, "label": label} for text in texts if len(text) in PARAGRAPH_LENGTHS
                ]
        for split, examples in found.items():
            rows[split] += random.Random(0).sample(examples, min(CLASS_SIZES[split], len(examples)))
    folder.mkdir()
    for split, examples in rows.items():
        random.Random(0).shuffle(examples)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in examples)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def _write_treebank(folder: Path) -> None:
    modules = [(name, path) for _, name, path in _modules([]) if name.count(".") == 1]
    modules.sort(key=lambda module: _split(module[0]) == "validation")  # so that what comes again is held out of this
    found, seen = {"train": [], "validation": []}, set()
    for name, path in tqdm(modules, "Reading statements", unit=" modules"):
        for tree in _trees(path):
            if tree.words not in seen:
                seen.add(tree.words)
                found[_split(name)].append((name, tree))
    folder.mkdir()
    known = set()
    for split, trees in found.items():
        if known:  # A label that is not trained on cannot be predicted.
            trees = [(name, tree) for name, tree in trees if known.issuperset((*tree.roles, *tree.relations))]
        trees = random.Random(0).sample(trees, min(TREEBANK_SIZES[split], len(trees)))
        known.update(label for _, tree in trees for label in (*tree.roles, *tree.relations))
        text = "".join(tree.conllu(name) for name, tree in trees)
        (folder / f"{split}.conllu").write_text(text, encoding="utf-8")


def _trees(path: Path) -> Iterator[python_trees.Tree]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return
    names, statements = python_trees.module_names(module), python_trees.statements(module)
    random.Random(0).shuffle(statements)
    for statement in statements[:SENTENCES_OF_MODULE]:
        if tree := python_trees.tree(statement, names):
            yield tree


def _split(module: str) -> str:
    """By the module's name alone, so that a module stays on its side."""
    digest = hashlib.blake2b(module.encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "big") < HELD_OUT_MODULES * 2**64 else "train"


# Pairs, for the recipes that write text


def pair_files() -> tuple[list[str], list[str]]:
    """Dates in English words, `source`, and in Korean ones, `target`: .tsv to train on and to evaluate on. The order is
    turned round, 'sixteenth' becomes two syllables and 'nineteen' three; no date is in both."""
    folder = _written(json.dumps(["pairs", PAIRS_VERSION, PAIR_SIZES, [YEARS.start, YEARS.stop]]), _write_pairs)
    return [str(folder / "train.tsv")], [str(folder / "validation.tsv")]


def _write_pairs(folder: Path) -> None:
    chance = random.Random(0)
    possible = range(date(YEARS.start, 1, 1).toordinal(), date(YEARS.stop, 1, 1).toordinal())
    days = iter(chance.sample(possible, sum(PAIR_SIZES.values())))
    folder.mkdir()
    for split, size in PAIR_SIZES.items():
        rows = [dates.pair(date.fromordinal(next(days)), chance.randrange(dates.FORMS)) for _ in range(size)]
        lines = ("\t".join(row) + "\n" for row in [("source", "target"), *rows])
        (folder / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
