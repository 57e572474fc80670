"""Every command and snippet of README.md and docs/ runs, cut short; every table is what was measured; every link leads
somewhere. Commands that need GPUs or several machines are parsed only: their flags exist."""

import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock
from urllib.request import urlopen

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from fixtures import browser, tiny_run
from fixtures.hub_server import HubServer
from PIL import Image

import hf_tiny
from hf_tiny import arguments, cli
from hf_tiny.flags import read_table

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "hf_of_you"
ORDER = (
    "README",
    "docs/pretraining",
    "docs/finetuning",
    "docs/data",
    "docs/hub",
    "docs/using",
    "docs/scaling",
    "docs/api",
    "docs/ko/quickstart",
)  # of what they make
PATIENCE = 300  # seconds: `hf-tiny` starts a launcher, which starts a process that imports everything
WITHOUT_COMMANDS = ("docs/design", "docs/experiments", "docs/reliability", "docs/results")
NOT_RUN = ("make", "pip", "python3", "source", "sbatch")  # what builds the environment, and SLURM
RUN_HERE = ("cpu_2proc.yaml",)  # of the launcher's files: the others need GPUs or several machines
SHORT = {"max_steps": 2, "per_device_train_batch_size": 2, "max_eval_samples": 4, "vocab_size": 400, "num_beams": 1}
TEXT = "모델은 문장을 읽고 다음 낱말을 배운다 the model reads each sentence and learns it"
TREES = """1\t나는\t나+는\tPRON\tNP+JX\t_\t3\tnsubj\t_\t_
2\t책을\t책+을\tNOUN\tNNG+JKO\t_\t3\tobj\t_\t_
3\t읽었다\t읽+었+다\tVERB\tVV+EP+EF\t_\t0\troot\t_\t_

1\t읽었다\t읽+었+다\tVERB\tVV+EP+EF\t_\t0\troot\t_\t_

"""
SYLLABLES = "가나다라마바사아자차카타파하"
FILES = {
    "reviews.tsv": "id\tdocument\tlabel\n"
    + "".join(f"{i}\t{'정말 좋다' if i % 2 else 'so dull'}\t{i % 2}\n" for i in range(20)),
    "names.conll": "Ada\tB-person\nmet\tO\n\n나는\tO\n서울에\tB-place\n산다\tO\n\n" * 10,
    "trees.conllu": TREES * 10,
    "talk.tsv": "source\ttarget\n" + "".join(f"{one} 문장을 읽고\tthe model reads {one}\n" for one in SYLLABLES),
    "similar.tsv": "source\ttarget\tscore\n"
    + "".join(f"{one} 문장\tthe model reads {one}\t{number % 6}\n" for number, one in enumerate(SYLLABLES)),
    "train.en": "".join(f"the model reads {one}\n" for one in SYLLABLES),
    "train.ko": "".join(f"{one} 문장을 읽고\n" for one in SYLLABLES),
}

EVERY_RUN = {  # not part of a walk: what serves all runs in the same way, and what a model's file stands for
    *(
        f"hf_tiny/{name}.py"
        for name in ("arguments", "flags", "processes", "errors", "optim", "evaluation", "metrics", "checkpoint")
    ),
    *(
        f"hf_tiny/{name}.py"
        for name in (
            "report",
            "hub",
            "baselines",
            "machine",
            "data/cache",
            "data/workers",
            "data/statistics",
            "data/encoding",
            "models/layers",
            "models/heads",
            "models/joint",
            "models/words",
        )
    ),
}

sys.path.insert(0, str(ROOT / "benchmarks"))
import render  # noqa: E402


def read(name: str) -> str:
    return (ROOT / f"{name}.md").read_text(encoding="utf-8")


def blocks(name: str) -> list[tuple[str, str]]:
    """The fenced blocks of a document that can be run: language and content."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", read(name), re.DOTALL | re.MULTILINE)


def commands(name: str) -> list[list[str]]:
    lines = [line for language, block in blocks(name) if language == "bash" for line in block.splitlines()]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


# Running what the documents say


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub on loopback, with a dataset; the processes of the tests know no other one."""
    folder = tmp_path_factory.mktemp("hub")
    environment = {
        "HF_HOME": str(folder / "home"),
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
    }
    with HubServer(folder / "repositories", {TOKEN: ("you", "write")}) as server:
        rows = "".join(f'{{"document": "{line}"}}\n' for line in text_lines(400))
        server.add("you/corpus", {"train.jsonl": rows.encode()}, "datasets")
        with mock.patch.dict(os.environ, {**environment, "HF_ENDPOINT": server.url}):
            forkserver._forkserver._stop()  # the next one reads the environment again
            yield server
            forkserver._forkserver._stop()


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """An empty folder as a user's checkout: recipes, and data in Korean and English."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for place, lines in (("my_texts/one.txt", text_lines(1200)), ("more_texts/two.txt", text_lines(600)[::-1])):
        (folder / place).parent.mkdir()
        (folder / place).write_text("\n".join(lines), encoding="utf-8")
    for number in range(40):
        label, colour = ("cat", 40 + number) if number % 2 else ("sky", 200 - number)
        for path in (folder / "my_images", folder / "my_classes" / label):
            path.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (colour, 90, 255 - colour)).save(path / f"{number}.png")
    for name, content in FILES.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def text_lines(count: int) -> list[str]:
    words = TEXT.split()
    return [" ".join(words[(i * 7 + j * j) % len(words)] for j in range(12)) for i in range(count)]


def run_module(name: str, *argv: str) -> None:
    """What `python -m NAME` does."""
    sys.argv = [name, *argv]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_console(*argv: str) -> None:
    """What `hf-tiny` does."""
    from hf_tiny import cli  # late: of what is tested here only these commands need it

    sys.exit(cli.main(list(argv)))


def run_snippet(source: str) -> None:
    exec(compile(source, "<docs>", "exec"), {"__name__": "__main__"})


def at_home(folder: str, function, *args) -> None:
    os.chdir(folder)
    function(*args)


def run(home: Path, function, *args, processes: int = 1) -> str:
    """Call a function in new processes, in the user's folder; returns what they printed."""
    environments = [{}]
    if processes > 1:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        shared = {
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environments = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)]
    started = [
        tiny_run.start(home / "processes", at_home, str(home), function, *args, env={k: str(v) for k, v in env.items()})
        for env in environments
    ]
    ended = [one.wait(PATIENCE) for one in started]
    for one in ended:
        assert one.code == 0, f"{args}\n{one.out}\n{one.err}"
    return "".join(one.out for one in ended)


@cache
def recipe_class(script: str) -> type[arguments.Arguments]:
    name = Path(script).stem
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / script)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Recipe


def shortened(script: str, flags: list[str]) -> list[str]:
    """The flags with those of SHORT that the recipe has; a run that is resumed keeps its own."""
    if "--resume_from_checkpoint" in flags:
        return flags
    known = recipe_class(script).__dataclass_fields__
    if "--max_minutes" in flags:
        place = flags.index("--max_minutes")
        flags = flags[:place] + flags[place + 2 :]
    return [*flags, *tiny_run.flags(**{name: value for name, value in SHORT.items() if name in known})]


def start_afresh(home: Path, flags: list[str]) -> None:
    """A command may be another way to do what an earlier one did, into the same folder."""
    if "--output_dir" in flags and "--resume_from_checkpoint" not in flags:
        shutil.rmtree(home / flags[flags.index("--output_dir") + 1], ignore_errors=True)


def run_recipe(home: Path, script: str, flags: list[str], processes: int = 1) -> str:
    start_afresh(home, flags)
    return run(home, tiny_run.run_plain, Path(script).stem, *shortened(script, flags), processes=processes)


def run_command(home: Path, words: list[str]) -> None:
    if words[:2] == ["accelerate", "launch"]:
        launch = launch_command_parser().parse_args(words[2:])
        config = yaml.safe_load((ROOT / launch.config_file).read_text()) if launch.config_file else {"num_processes": 1}
        if launch.config_file and Path(launch.config_file).name not in RUN_HERE:
            arguments.parse(recipe_class(launch.training_script), launch.training_script_args)
        else:
            run_recipe(home, launch.training_script, launch.training_script_args, config["num_processes"])
    elif words[:2] == ["hf-tiny", "demo"] and "--push_space" not in words:
        started = tiny_run.start(home / "processes", at_home, str(home), run_console, *words[1:])
        assert b"hf-tiny demo" in urlopen(browser.address(started)).read()
        started.kill(signal.SIGINT)
        assert started.wait(PATIENCE).code == 130
    elif words[0] == "hf-tiny":
        start_afresh(home, words)
        script = f"recipes/{words[1].replace('-', '_')}.py"
        run(home, run_console, *(shortened(script, words[1:]) if (ROOT / script).exists() else words[1:]))
    elif words[:2] == ["python", "-m"]:
        run(home, run_module, *words[2:])
    elif words[0] == "python":
        run_recipe(home, words[1], words[2:])
    else:
        assert words[0] in NOT_RUN, words


@pytest.mark.parametrize("name", ORDER)
def test_the_commands_and_snippets_run(name, hub, home):
    """Each document builds on what the ones before it in ORDER have made."""
    for language, block in blocks(name):
        if language == "python":
            assert run(home, run_snippet, block).strip()
        for line in block.splitlines() if language == "bash" else ():
            if words := shlex.split(line, comments=True):
                run_command(home, words)


def test_the_runs_are_there(hub, home):
    """After the documents: what they say is left in the folders, and on the Hub."""
    made = {
        Path(words[words.index("--output_dir") + 1])
        for name in ORDER
        for words in commands(name)
        if "--output_dir" in words and not {"export", "predict", "evaluate"}.intersection(words)
    }
    kept = {path for path in made if not path.is_absolute() and path.name != "four"}  # parsed only
    assert len(kept) > 20
    for path in kept:
        several = list((home / path).glob("seed-*"))
        for folder in several or [home / path]:
            left = {file.name for file in folder.iterdir()}
            assert {
                "README.md",
                "all_results.json",
                "config.json",
                "metrics.jsonl",
                "model.safetensors",
                "recipe.yaml",
            } <= left
    for name in ("reviews", "names", "encoder"):
        assert {"README.md", "config.json", "model.safetensors"} <= hub.files(f"you/{name}").keys()
    assert (home / "native" / "generator" / "model.safetensors").exists()


def test_every_document_is_run():
    found = {str(path.relative_to(ROOT).with_suffix("")) for path in render.documents()}
    assert found == {*ORDER, *WITHOUT_COMMANDS}
    assert not [name for name in WITHOUT_COMMANDS if blocks(name)]


# What is not run


def test_slurm_gets_flags_that_exist():
    (words,) = [words for name in ORDER for words in commands(name) if words[0] == "sbatch"]
    assert (ROOT / words[1]).exists()
    recipe = arguments.parse(recipe_class(words[2]), words[3:])
    assert recipe.size == "base" and recipe.output_dir == "/shared/runs/base"


def test_make_runs_what_the_documents_say():
    assert [words[1] for words in commands("README") if words[0] == "make"] == ["pretrain", "test"]
    targets = set(re.findall(r"`make ([\w -]+)`", read("README") + read("CONTRIBUTING") + read("docs/results")))
    assert {"lint", "results"} <= {target for several in targets for target in several.split()}
    call = [
        "make",
        "--dry-run",
        "--always-make",
        *{target for several in targets for target in several.split()},
        *("pretrain", "demo"),
    ]
    dry = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "hf-tiny pretrain-electra" in dry and "hf-tiny demo runs/demo" in dry
    assert "-m pytest" in dry and "ruff check" in dry and "benchmarks/render.py" in dry


def test_the_wheel_of_the_readme_is_this_version():
    version = hf_tiny.__version__
    wheels = set(re.findall(r"hf_tiny-([\d.]+)-py3-none-any\.whl", read("README")))
    assert wheels == {version} and (ROOT / "constraints.txt").exists()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version


def test_benchmarks_that_are_named_exist():
    text = "".join(path.read_text(encoding="utf-8") for path in render.documents())
    named = set(re.findall(r"benchmarks/\w+\.py", text))
    assert len(named) >= 9 and not [name for name in named if not (ROOT / name).exists()]


# What is written


def test_the_readme_is_short():
    assert len(read("README").splitlines()) <= 130


def test_the_tables_are_what_was_measured():
    texts = {path: path.read_text(encoding="utf-8") for path in render.documents()}
    for path, text in texts.items():
        assert render.render(text) == text, f"{path.name}: `make results` writes its tables"
    names = Counter(name for text in texts.values() for name in re.findall(r"<!-- results:(\w+) -->", text))
    assert names == Counter(render.COLUMNS.keys()), "each table stands once"
    assert all(render.rows(name) for name in names)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(6.5, "6.5"), (4300, "4,300"), (0.682, "0.682"), (0.39, "0.390"), (39.58, "39.6"), (2.747, "2.75"), (2.0, "2"),
     (0.0, "0"), (0.00021, "0.0002"), (100.0, "100"), ("23.719 s, 1,229 MB", "23.7 s, 1,229 MB"), ("+1.8", "+1.8"),
     ("0.9920 ± 0.0034", "0.992 ± 0.003"), ("las", "LAS"), ("74.28 ± 0.60", "74.28 ± 0.60")],
)  # fmt: skip
def test_numbers_are_for_people(value, shown):
    assert render.cell({"figures": {"value": value}}, "figures.value") == shown


def test_minutes_have_one_digit():
    assert render.cell({"figures": {"train_minutes": 0.7}}, "figures.train_minutes") == "0.7"
    assert render.cell({"figures": {"minutes a run": "3.0"}}, "figures.minutes a run") == "3"


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    agents = (ROOT / "AGENTS.md", ROOT / "skills" / "hf-tiny" / "SKILL.md")
    for path in (*render.documents(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *agents):
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                file, _, anchor = target.partition("#")
                other = (path.parent / file).resolve() if file else path
                assert other.exists(), f"{path.name}: {target}"
                assert not anchor or anchor in anchors(other.read_text(encoding="utf-8")), f"{path.name}: {target}"


def test_agents_are_told_what_is_true():
    told, skill = read("AGENTS"), read("skills/hf-tiny/SKILL")
    assert len(told.splitlines()) <= 80
    _, head, body = skill.split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["name"] == "hf-tiny" and 100 < len(about["description"]) <= 1024
    verbs = {*cli.recipes(), *cli.COMMANDS}
    words = [
        shlex.split(line) for block in re.findall(r"```bash\n(.*?)```", body, re.DOTALL) for line in block.splitlines()
    ]
    assert len(words) > 5 and {line[1] for line in words} <= verbs
    assert set(re.findall(r"`([a-z]+-[a-z0-9]+)`", body)) - {"hf-tiny"} <= verbs
    table = read_table()
    for _, verb, *rest in words:
        known = {flag for flag, recipes in table.items() if verb in cli.COMMANDS or verb.replace("-", "_") in recipes}
        assert {word[2:] for word in rest if word.startswith("--")} <= known | {"text"}, verb
    for place in re.findall(r"^\| `([\w/.]+)` \|", told, re.MULTILINE):
        assert (ROOT / place).exists(), place


def test_images_are_small():
    for path in (ROOT / "docs" / "images").iterdir():
        assert path.stat().st_size < 150_000 and path.name in read("README") + read("docs/using")


def test_the_tree_of_the_design_is_the_package():
    (tree,) = re.findall(r"^```\n(hf_tiny/.*?)^```", read("docs/design"), re.DOTALL | re.MULTILINE)
    folders, named = [], set()
    for line in tree.split("recipes/ ")[0].splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth:] = [name]
        if name.endswith(".py"):
            named.add("".join(folders))
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / "hf_tiny").rglob("*.py")}


def print_walk(name: str, *flags: str) -> None:
    """Run a recipe and print, for each file of the project that is used between `main` and the first loss, what is entered
    first in it."""
    entered: dict[str, str] = {}

    def trace(frame, event, argument) -> None:
        code, place = frame.f_code, frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        begun = place.startswith("recipes/") and code.co_name == "main"
        if event == "call" and (begun or (entered and place.startswith(("hf_tiny/", "recipes/")))):
            entered.setdefault(place, code.co_qualname.split(".")[0])
            if code.co_name == "forward":
                sys.setprofile(None)

    sys.setprofile(trace)
    threading.setprofile(trace)  # the thread that prepares batches
    try:
        tiny_run.run_plain(name, *flags)
    finally:
        sys.setprofile(None)
        print(json.dumps(entered))


def test_the_walks_are_those_of_the_runs(hub, home):
    text = read("docs/design").split("## A walk")[1].split("\n## ")[0]
    walks = re.findall(r"^`accelerate launch recipes/(\w+)\.py ?(.*)`\n\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert [name for name, _, _ in walks] == ["pretrain_electra", "finetune_tagger", "finetune_images"]
    for name, flags, table in walks:
        rows = re.findall(r"^\| (\d+) \| `(.*)` \| `(.*)` \|$", table, re.MULTILINE)
        assert len(rows) <= 12 and [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
        short = shortened(f"recipes/{name}.py", [*shlex.split(flags), "--output_dir", f"walks/{name}"])
        printed = run(home, print_walk, name, *short)
        entered = json.loads(printed.splitlines()[-1])
        assert [(file, at) for _, file, at in rows] == [one for one in entered.items() if one[0] not in EVERY_RUN]
