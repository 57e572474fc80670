"""Every command and snippet of the docs runs, the long ones cut short; every table of the docs is what was measured."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SHORT = ["--max_steps", "2", "--per_device_train_batch_size", "2", "--max_eval_samples", "4", "--vocab_size", "400"]
TREE = "1\t나는\t나+는\tPRON\tNP+JX\t_\t3\tnsubj\t_\t_\n2\t책을\t책+을\tNOUN\tNNG+JKO\t_\t3\tobj\t_\t_\n"
TREE += (
    "3\t읽었다\t읽+었+다\tVERB\tVV+EP+EF\t_\t0\troot\t_\t_\n\n1\t읽었다\t읽+었+다\tVERB\tVV+EP+EF\t_\t0\troot\t_\t_\n\n"
)
TAGGED = {
    "reviews.tsv": "id\tdocument\tlabel\n"
    + "".join(f"{i}\t{'정말 좋다' if i % 2 else '별로다'}\t{i % 2}\n" for i in range(20)),
    "names.conll": "Ada\tB-person\nmet\tO\n\nthe\tO\nLondon\tB-place\nfog\tO\n\n" * 10,
    "trees.conllu": TREE * 10,
    "talk.tsv": "source\ttarget\n"
    + "".join(f"{word} 문장을 읽고\tthe model reads {word}\n" for word in "가나다라마바사아자차카타파하"),
}
sys.path.insert(0, str(ROOT / "benchmarks"))
import render  # noqa: E402


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def commands(start: str) -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith(start)]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """An empty folder as a user's checkout: recipes and texts of two languages, nothing else."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    (folder / "my_texts").mkdir()
    (folder / "more_texts").mkdir()
    words = [
        "모델은",
        "문장을",
        "읽고",
        "다음",
        "낱말을",
        "배운다",
        "the",
        "model",
        "reads",
        "each",
        "sentence",
        "and",
        "learns",
        "it",
    ]
    text = "\n".join(" ".join(words[(i * 7 + j * j) % len(words)] for j in range(12)) for i in range(1200))
    (folder / "my_texts" / "one.txt").write_text(text, encoding="utf-8")
    (folder / "more_texts" / "two.txt").write_text(text[::-1], encoding="utf-8")
    for number in range(40):
        label, colour = ("cat", 40 + number) if number % 2 else ("sky", 200 - number)
        for path in (folder / "my_pictures", folder / "my_classes" / label):
            path.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (colour, 90, 255 - colour)).save(path / f"{number}.png")
    for name, content in TAGGED.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)


def test_the_commands_of_the_readme_run(home):
    launches = commands("accelerate launch")
    assert len(launches) == 16
    corpus = ["--train_file", "my_texts/"]
    for line in launches:
        words = shlex.split(line)
        short = SHORT[:-2] if "my_pictures" in line or "my_classes" in line else SHORT  # they have no vocabulary
        extra = [] if "recipe.yaml" in line else [*short, *([] if "--train_file" in words else corpus)]
        done = run([str(BIN / words[0]), *words[1:], *extra], home)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    for folder in (
        "mine",
        "two",
        "four",
        "streamed",
        "reviews",
        "names",
        "trees",
        "subjects/seed-42",
        "subjects/seed-43",
        "talk",
        "long_reviews",
        "classes",
    ):
        assert (home / "runs" / folder / "model.safetensors").exists()

    parts = commands("python -m hf_tiny.data.corpus prepare")
    assert len(parts) == 2
    for line in parts:
        done = run([sys.executable, *shlex.split(line)[1:]], home)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert done.stdout.count("all files are there") == 2

    for snippet, answer in zip(blocks("python"), ("'score'", "'relation'"), strict=True):
        done = run([sys.executable, "-c", snippet], home)
        assert done.returncode == 0, done.stderr
        assert answer in done.stdout


def test_make_runs_what_the_readme_says():
    assert commands("make") == ["make pretrain", "make test"]
    dry = run(["make", "--dry-run", "--always-make", "pretrain", "test", "lint", "bench"], ROOT).stdout
    assert "accelerate launch --quiet recipes/pretrain_electra.py" in dry
    assert "-m pytest" in dry and "ruff check" in dry and "benchmarks/electra.py" in dry
    assert "make lint test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("name", ["README.md", "recipes/README.md"])
def test_the_tables_are_what_was_measured(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- results:" in text
    assert render.render(text) == text


def test_every_file_of_the_tree_exists():
    (tree,) = re.findall(r"```\n(hf_tiny/.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names = re.findall(r"^ *(\S+\.py)", tree, re.MULTILINE)
    found = {path.name for path in (ROOT / "hf_tiny").rglob("*.py")}
    assert set(names) == found - {"errors.py"} | {"__init__.py"}
