"""tests/bad_inputs.tsv: wrong commands. Each ends with the exit code 2 and a sentence that names what is wrong, without a
traceback, and leaves all files as they were. All of them run in one process, through the recipes themselves."""

import contextlib
import hashlib
import importlib
import io
import json
import os
import shlex
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import pytest
from accelerate.state import AcceleratorState
from fixtures import bad_files, tiny_run

from hf_tiny import flags, hub, train

TABLE = Path(__file__).with_name("bad_inputs.tsv")
LINES = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
ROWS = [tuple(line[:3]) for line in LINES]
# Before the flags of the row, which win.
SHORT = {"max_steps": 1, "per_device_train_batch_size": 2}
FILES = {
    **{f"pretrain_{model}": "text.txt" for model in ("electra", "reformer", "seq2seq")},
    **{"pretrain_vit": "flat", "finetune_classifier": "reviews.tsv", "finetune_tagger": "names.conll"},
    **{"finetune_parser": "trees.conllu", "finetune_seq2seq": "talk.tsv", "finetune_embeddings": "talk.tsv"},
    "finetune_images": "classes",
}
SECONDS = 90


class Accepted(Exception):
    """A wrong command has come as far as the training."""


def refuse_to_train(*_) -> None:
    raise Accepted


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_row(recipe: str, words: list[str]) -> tuple[int | str, str]:
    """The exit code (or the traceback of what was raised), and what was printed."""
    sys.argv = [str(flags.RECIPES / f"{recipe}.py"), *words]
    AcceleratorState._reset_state()
    printed = io.StringIO()
    code: int | str = 0
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            if recipe == "push":
                hub.main(["push", *words])
            else:
                flags.begin("__main__", sys.argv[0])
                module = importlib.import_module(f"hf_tiny.recipes.{recipe}")
                with mock.patch.object(train.Run, "loop", refuse_to_train):
                    train.run(module.main, module.Recipe)
        except SystemExit as end:
            code = 2 if isinstance(end.code, str) else end.code
            printed.write(end.code if isinstance(end.code, str) else "")
        except BaseException:
            code = traceback.format_exc()
    return code, printed.getvalue()


def command(number: int) -> list[str]:
    """The words of a row, after what keeps it short; a recipe file comes first."""
    recipe, line, _ = ROWS[number]
    words = shlex.split(line)
    if recipe not in FILES:
        return words
    first = [words.pop(0)] if words and not words[0].startswith("-") else []
    return [*first, *tiny_run.flags(**SHORT, train_file=FILES[recipe], output_dir=f"../out/{number}"), *words]


def run_rows(folder: str) -> None:
    """Every row in turn; what came of each goes into outcomes.json."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    home = Path(folder, "home")
    home.mkdir()
    os.chdir(home)
    bad_files.write(home)
    before, outcomes = contents(home), []
    for number, (recipe, _, _) in enumerate(ROWS):
        start = time.monotonic()
        code, printed = run_row(recipe, command(number))
        after = contents(home)
        outcomes.append([code, printed, time.monotonic() - start, before == after])
        before = after
    Path(folder, "outcomes.json").write_text(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    ended = tiny_run.start(folder, run_rows, str(folder)).wait(600)
    assert ended.code == 0, ended.err
    return json.loads((folder / "outcomes.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(number, id=" ".join(line[:2])) for number, line in enumerate(LINES)],
)
def test_a_wrong_command_is_answered(outcomes, number):
    code, printed, _, untouched = outcomes[number]
    assert code == 2, f"{code}\n{printed}"
    assert "Traceback" not in printed
    message = printed[printed.rindex("error: ") :]
    for word in ROWS[number][2].split(" | "):
        assert word in message
    assert untouched


@pytest.mark.slow
def test_the_table_is_long_and_quick(outcomes):
    assert len(ROWS) >= 200 and len({(recipe, line) for recipe, line, _ in ROWS}) == len(ROWS)
    assert sum(seconds for _, _, seconds, _ in outcomes) < SECONDS
