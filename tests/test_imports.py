"""The shape of the package, read from its source: imports go one way, and nothing is too long to read."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_tiny"
SOURCES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
RECIPES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "recipes").rglob("*.py"))}

# From the bottom to the top: a layer imports itself and those below it, but models and errors stand alone.
MODELS, ERRORS = {"models"}, {"errors", "arguments", "flags", "signals", "loopback"}
MIDDLE = {
    *(
        "baselines",
        "tokenizer",
        "optim",
        "checkpoint",
        "evaluation",
        "metrics",
        "report",
        "runs",
        "tracking",
        "callbacks",
        "config",
        "processes",
        "progress",
        "machine",
        "train",
        "convert",
        "from_tensorflow",
        "start",
    ),
    "hub",
}
LAYERS = (MODELS | ERRORS, {"data"}, MIDDLE, {"tasks"}, {"pipelines", "predict", "export", "demo"}, {"api", "cli"})
MODEL_PACKAGES = {"torch", "transformers", "numpy", "tokenizers"}  # what a model that travels to the Hub may need
LATE = {  # slow, or an extra: imported by the function that needs it
    *(
        "sklearn",
        "matplotlib",
        "sacrebleu",
        "seqeval",
        "peft",
        "gradio",
        "trackio",
        "tensorboard",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "tensorflow",
    ),
    "sentence_transformers",
}
FILE_LINES, RECIPE_LINES, FUNCTION_LINES, FUNCTION_BRANCHES = 600, 120, 60, 12


def name_of(path: Path) -> str:
    """As it is imported: hf_tiny.data.sources."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path) for path in SOURCES}


def layer_of(module: str) -> str:
    """Its file or folder directly below hf_tiny; of hf_tiny itself nothing."""
    return (module + ".").split(".")[1]


def imported(path: Path, statement: ast.stmt) -> Iterator[str]:
    """The modules that a statement imports, by their whole names."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        package = name_of(path).split(".")
        package = package if path.name == "__init__.py" else package[:-1]
        above = package[: len(package) - statement.level + 1] if statement.level else []
        base = ".".join([*above, *([statement.module] if statement.module else [])])
        for alias in statement.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def imports(path: Path, tree: ast.Module) -> set[str]:
    """Also those within functions."""
    return {module for statement in ast.walk(tree) for module in imported(path, statement)}


def allowed(layer: str) -> set[str]:
    """What modules of this layer may import of hf_tiny."""
    for alone in (MODELS, ERRORS):
        if layer in alone:
            return alone
    (place,) = (place for place, names in enumerate(LAYERS) if layer in names)
    return set().union(*LAYERS[: place + 1])


def test_every_module_has_a_layer():
    assert {layer_of(name) for name in MODULES} - {""} <= set().union(*LAYERS)
    assert allowed("models") == {"models"} and allowed("data") == {*MODELS, *ERRORS, "data"}
    assert {"train", "data", "models"} <= allowed("train") and "tasks" not in allowed("train")


def test_imports_go_one_way():
    wrong = []
    for path, tree in SOURCES.items():
        name = name_of(path)
        for module in imports(path, tree):
            root, layer = module.split(".")[0], layer_of(name)  # hf_tiny itself, without a layer, gathers public names
            backwards = root == "hf_tiny" and layer and layer_of(module) not in allowed(layer)
            if backwards or root in ("recipes", "tests", "benchmarks"):
                wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_models_travel():
    """transformers copies siblings that are imported as `from .sibling import X`, and nothing else. The table of models stays
    here."""
    wrong = []
    files = {path: tree for path, tree in SOURCES.items() if layer_of(name_of(path)) == "models"}
    for path, tree in files.items():
        for statement in ast.walk(tree) if path.name != "__init__.py" else ():
            sibling = isinstance(statement, ast.ImportFrom) and statement.level == 1 and statement.module
            for module in imported(path, statement):
                known = module.split(".")[0] in MODEL_PACKAGES | sys.stdlib_module_names
                if not (known or sibling or module == "huggingface_hub.dataclasses"):
                    wrong.append(f"{path}:{statement.lineno}: {module}")
    assert wrong == []


def test_what_is_slow_or_an_extra_is_imported_late():
    found = ((path, one) for path, tree in SOURCES.items() for line in tree.body for one in imported(path, line))
    assert [f"{path} imports {module}" for path, module in found if module.split(".")[0] in LATE] == []


# Size


def branches(function: ast.FunctionDef) -> int:
    """if, elif, for, while, except, the cases of a match and the ifs of comprehensions; functions within have their own."""
    count, nodes = 0, list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count += isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case)
            count += len(node.ifs) if isinstance(node, ast.comprehension) else 0
            nodes += ast.iter_child_nodes(node)
    return count


def test_branches_are_counted():
    source = """
def function(x):
    if x: pass
    elif x and x: pass
    else: pass
    for y in [z for z in x if z if not z]:
        while y: y = 1 if y else 0
    try: pass
    except ValueError: pass
    def inner():
        if x: pass
"""
    (function,) = ast.parse(source).body
    assert branches(function) == 7


def too_long(path: Path, tree: ast.Module) -> Iterator[str]:
    lines, most = len(path.read_text(encoding="utf-8").splitlines()), RECIPE_LINES if path in RECIPES else FILE_LINES
    if lines > most:
        yield f"{path}: {lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines, count = node.end_lineno - node.lineno + 1, branches(node)
            if lines > FUNCTION_LINES or count > FUNCTION_BRANCHES:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines and {count} branches"


def test_nothing_is_too_long_to_read():
    assert [found for path, tree in (SOURCES | RECIPES).items() for found in too_long(path, tree)] == []


def test_a_name_says_what_a_file_holds():
    assert [path for path in SOURCES | RECIPES if path.stem in ("utils", "util", "helpers", "common", "misc")] == []


# Tests


def test_tests_share_fixtures_and_not_each_other():
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in Counter(path.name for path in paths).items() if count > 1] == []
    found = {path: imports(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths}
    assert [str(path) for path, names in found.items() if any(name.startswith("test_") for name in names)] == []
