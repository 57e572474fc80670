"""English prose that is on every machine where hf_tiny is installed: the docstrings of Python and of its packages.

They are read from the source files without importing them. The text differs with the installed versions.
"""

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

import datasets
from tqdm.auto import tqdm

FORMAT_VERSION = 1  # Raise it when the cleaning changes.
# Folder of the package -> name of its distribution.
PACKAGES = {
    "transformers": "transformers",
    "torch": "torch",
    "scipy": "scipy",
    "sympy": "sympy",
    "sklearn": "scikit-learn",
    "pandas": "pandas",
    "networkx": "networkx",
    "numpy": "numpy",
    "matplotlib": "matplotlib",
    "huggingface_hub": "huggingface_hub",
    "datasets": "datasets",
    "accelerate": "accelerate",
    "evaluate": "evaluate",
    "tokenizers": "tokenizers",
    "pyarrow": "pyarrow",
    "fsspec": "fsspec",
    "jinja2": "jinja2",
    "mpmath": "mpmath",
    "aiohttp": "aiohttp",
    "PIL": "pillow",
}
HELD_OUT = ("numpy", "huggingface_hub", "asyncio", "email", "unittest")
STANDARD_LIBRARY = "python"
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "testing",
    "_vendor",
    "_vendored",
    "externals",
    "site-packages",
    "idlelib",
    "lib2to3",
}
MIN_WORDS = 6
MIN_PROSE = 0.75  # The share of words of a paragraph that look like words.
DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# What is not prose, in the order in which it is removed: fenced code; reST directives with code, formulas or tables,
# and their indented bodies; literal blocks after "::"; doctests; other directives; underlines, rules and tables.
NOT_PROSE = tuple(
    re.compile(pattern, re.M)
    for pattern in (
        r"^[ \t]*```(?:.*\n)*?[ \t]*```[ \t]*$",
        r"^([ \t]*)\.\. *(?:\w*code|ipython|doctest|plot|math|figure|image|\w*-?table|auto|toctree|raw|_|\[)"
        r".*(?:\n[ \t]*$|\n\1[ \t]+\S.*)*",
        r"(?<=::)[ \t]*\n(?:[ \t]*\n)+([ \t]+)\S.*(?:\n[ \t]*$|\n\1.*)*",
        r"^[ \t]*>>>.*(?:\n[ \t]*\S.*)*",
        r"^[ \t]*(?:\.\. |:[a-z]+:|@).*$",
        r"^.*\n[ \t]*([-=~^*#+])\1{2,}[ \t]*$",
        r"^[ \t]*[|+].*$|^[ \t=-]+$",
    )
)
MARKUP = tuple(
    (re.compile(pattern), kept)
    for pattern, kept in (
        (r"!?\[([^\]]*)\]\([^)]*\)", r"\1"),  # [text](address)
        (r"`([^`<]+?)\s*<[^`>]*>`_*", r"\1"),  # `text <address>`_
        (r":[a-z:+-]+:`[~!.]*([^`]*)`", r"\1"),  # :class:`~package.Name`
        (r"\[?`+[~!]?([^`]*)`+_*\]?", r"\1"),  # ``code``, `code`, [`Name`]
        (r"(\*\*?)(\w(?:[^*]*\w)?)\1", r"\2"),  # *emphasis*, **strong**
        (r"</?[a-zA-Z][^>]*>|\[\d+\]_?", ""),
    )
)
TYPED_NAME = re.compile(r"[\w*][\w, *.]* : ")
DESCRIBED_NAME = re.compile(r"(?:[-*+] |\d+[.)] )?(?:`*\*{0,2}[\w.]+`*(?: ?\([^)]*\))?:(?:\s|$))?")
PROSE_WORD = re.compile(r"[\"'(]?[A-Za-z]+(?:['-][a-z]+)*[\"')]?[.,;:!?]?")


def corpus_files() -> tuple[list[str], list[str]]:
    """The .jsonl files of the training packages and of the held-out ones; written when they are not there."""
    versions = {name: importlib.metadata.version(PACKAGES[name]) for name in PACKAGES if importlib.util.find_spec(name)}
    key = json.dumps([FORMAT_VERSION, platform.python_version(), versions, HELD_OUT])
    root = Path(datasets.config.HF_DATASETS_CACHE) / "hf_tiny_builtin"
    folder = root / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as unfinished:
            _write(Path(unfinished) / "files", list(versions))
            if not folder.is_dir():
                os.replace(Path(unfinished) / "files", folder)
    files = sorted(folder.glob("*.jsonl"))
    return [str(path) for path in files if path.stem not in HELD_OUT], [
        str(path) for path in files if path.stem in HELD_OUT
    ]


def _write(folder: Path, packages: list[str]) -> None:
    """One file per package. Training packages come first, so that what they say is not new in the held-out ones."""
    modules = sorted(_modules(packages), key=lambda module: module[0] in HELD_OUT)
    folder.mkdir()
    seen = set()
    # A syntax tree is a million small objects: without the garbage collector it is built in half the time.
    with ExitStack() as stack, ProcessPoolExecutor(initializer=gc.disable) as pool:
        texts = pool.map(_documents, [path for _, _, path in modules], chunksize=8)
        files = {name: stack.enter_context(open(folder / f"{name}.jsonl", "w")) for name, _, _ in modules}
        found = zip(modules, tqdm(texts, "Reading docstrings", len(modules), unit=" modules"), strict=True)
        manual = ((STANDARD_LIBRARY, f"topics.{topic}", [paragraphs(text)]) for topic, text in topics.items())
        for name, source, documents in chain(manual, ((name, source, docs) for (name, source, _), docs in found)):
            for document in documents:
                new = {_key(text): text for text in document if _key(text) not in seen}
                seen.update(new)
                if new:
                    row = {"text": "\n".join(new.values()), "source": source}
                    files[name].write(json.dumps(row, ensure_ascii=False) + "\n")


def _modules(packages: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Package, module name and source file. The standard library is one package, but for what is held out of it."""
    library = Path(sysconfig.get_path("stdlib"))
    roots = {name: Path(importlib.util.find_spec(name).submodule_search_locations[0]) for name in packages}
    for package, root in {STANDARD_LIBRARY: library, **roots}.items():
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if SKIPPED_FOLDERS.isdisjoint(parts):
                if package == STANDARD_LIBRARY:
                    yield parts[0] if parts[0] in HELD_OUT else package, ".".join(parts), path
                else:
                    yield package, ".".join((package, *parts)), path


def _documents(path: Path) -> list[list[str]]:
    """The paragraphs of each docstring of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return []  # A template, or source for another version of Python.
    nodes = [tree]
    for node in nodes:
        nodes += (child for child in node.body if isinstance(child, DOCUMENTED))
    return [paragraphs(text) for node in nodes if (text := ast.get_docstring(node))]


def paragraphs(text: str) -> list[str]:
    """The paragraphs of prose in a docstring, each on one line, without markup, code, tables and names of arguments."""
    for pattern in NOT_PROSE:
        text = pattern.sub("", text)
    found, indent = [[]], 0
    for line in text.expandtabs().splitlines():
        words = line.strip()
        name = DESCRIBED_NAME.match(words).group()
        if not words or name or TYPED_NAME.match(words) or len(line) - len(line.lstrip()) < indent:
            found.append([])
        indent = len(line) - len(line.lstrip())
        if not TYPED_NAME.match(words):
            found[-1].append(words.removeprefix(name))
    joined = (" ".join(lines).replace("::", ":") for lines in found)
    for pattern, kept in MARKUP:
        joined = [pattern.sub(kept, paragraph) for paragraph in joined]
    return [clean for paragraph in joined if _is_prose(clean := " ".join(paragraph.split()))]


def _is_prose(paragraph: str) -> bool:
    words = paragraph.split()
    prose = sum(PROSE_WORD.fullmatch(word) is not None for word in words)
    return prose >= MIN_WORDS and prose >= MIN_PROSE * len(words)


def _key(paragraph: str) -> str:
    return re.sub(r"[\W\d_]+", " ", paragraph).casefold()
