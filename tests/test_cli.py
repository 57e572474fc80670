"""The command hf-tiny: verbs, exit codes, processes, and what the wheel holds."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from fixtures import tiny_run
from fixtures.tiny_run import ROOT
from packaging.requirements import Requirement

import hf_tiny
from hf_tiny import checkpoint, cli
from hf_tiny.tokenizer import MODELS

COMMAND = [sys.executable, "-c", "import sys, hf_tiny_cli; sys.argv[0] = 'hf-tiny'; hf_tiny_cli.main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
TINY = tiny_run.flags(max_seq_length=32, per_device_train_batch_size=4, vocab_size=300, logging_steps=1, save_steps=0)


def hf_tiny_command(*words) -> tuple[subprocess.CompletedProcess, float]:
    """The command as it is installed, and the seconds of processor time that it took."""
    before = os.times()
    ended = subprocess.run([*COMMAND, *map(str, words)], env=ENVIRONMENT, capture_output=True, text=True)
    after = os.times()
    return ended, sum(after[2:4]) - sum(before[2:4])


def run_cli(*words) -> None:
    """The same in a process that has loaded torch already."""
    cli.main(words)


@pytest.mark.parametrize("words", [["--help"], []])
def test_help_lists_the_verbs_at_once(words):
    ended, seconds = hf_tiny_command(*words)
    assert ended.returncode == 0 and seconds < 1.5
    verbs = dict(re.findall(r"^  ([a-z0-9-]+) +(\S.*)$", ended.stdout, re.MULTILINE))
    recipes = {path.stem.replace("_", "-") for path in (ROOT / "recipes").glob("*.py")}
    assert recipes | set(cli.COMMANDS) == set(verbs) and "predict" in verbs
    assert verbs["pretrain-electra"] == "Pretrain ELECTRA from raw text."


def test_the_beginning_of_several_verbs_is_answered_with_all_of_them():
    ended, _ = hf_tiny_command("pretrain", "--train_file", "texts")
    verbs = "pretrain-electra, pretrain-reformer, pretrain-seq2seq, pretrain-vit"
    assert ended.returncode == 2 and f"Which one: {verbs}? `hf-tiny --help` lists the verbs." in ended.stderr


BIG_PRINT = "from hf_tiny.errors import exit_codes\nwith exit_codes(): print('a line\\n' * 99999)"
OTHER_PIPE = "from hf_tiny.errors import exit_codes\nwith exit_codes(): raise BrokenPipeError('of a worker')"


@pytest.mark.parametrize(
    ("words", "buffered", "code"),
    [
        ([*COMMAND, "--help"], True, 0),
        ([*COMMAND, "--help"], False, 141),
        ([sys.executable, "-c", BIG_PRINT], True, 141),
    ],
)
def test_a_reader_that_has_seen_enough_is_no_error(words, buffered, code):
    """`hf-tiny --help | head -3`"""
    reads, writes = os.pipe()
    os.close(reads)
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": "" if buffered else "1"}
    ended = subprocess.run(words, env=environment, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (code, "")


def test_another_broken_pipe_is_an_error():
    ended = subprocess.run([sys.executable, "-c", OTHER_PIPE], env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 1 and "BrokenPipeError: of a worker" in ended.stderr


@pytest.mark.parametrize("words", [["pretrain-elektra"], ["--num_processes", "2", "pretrain-elektra", "--seed", "1"]])
def test_an_unknown_verb_is_answered_at_once(words):
    ended, seconds = hf_tiny_command(*words)
    assert ended.returncode == 2 and seconds < 1.5
    assert "Did you mean pretrain-electra? `hf-tiny --help` lists the verbs." in ended.stderr


def test_the_version_has_one_source():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'version = { attr = "hf_tiny.__version__" }' in text and f'"{hf_tiny.__version__}"' not in text


def test_every_package_is_in_the_wheel():
    text = (ROOT / "pyproject.toml").read_text()
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "hf_tiny").rglob("*.py")}
    assert all(f'"{folder.replace("/", ".")}"' in text for folder in folders)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_names_what_it_needs(path):
    """For `uv run recipes/NAME.py`: this package, with the extras that its imports need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)*?)# ///\n", path.read_text(encoding="utf-8"), re.MULTILINE)
    header = tomllib.loads("".join(line.removeprefix("#").strip() + "\n" for line in block.splitlines()))
    assert header.keys() == {"requires-python", "dependencies"}
    assert header["requires-python"] == project["requires-python"]
    (needed,) = map(Requirement, header["dependencies"])
    extras = {"finetune_tagger": {"tag"}, "finetune_seq2seq": {"translate"}}.get(path.stem, set())
    assert (needed.name, needed.extras) == (project["name"], extras) and hf_tiny.__version__ in needed.specifier
    assert extras <= project["optional-dependencies"].keys()


def test_the_command_is_an_extension_of_hf(tmp_path, monkeypatch):
    """`hf extensions install you/hf-tiny` looks for a console script of the repository's name; `hf tiny` runs it."""
    from huggingface_hub.cli import extensions

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    monkeypatch.setattr(extensions, "EXTENSIONS_ROOT", tmp_path)
    monkeypatch.setattr(extensions.constants, "HF_HUB_DISABLE_UPDATE_CHECK", True)
    _, repository, short_name = extensions._normalize_repo_id("you/hf-tiny")
    assert (repository, short_name) == ("hf-tiny", "tiny") and extensions._get_executable_name("tiny") in scripts
    assert not (ROOT / "hf-tiny").exists()  # which would be taken for a program that is the whole extension
    program = tmp_path / "hf-tiny" / "venv" / "bin" / "hf-tiny"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n{COMMAND[-1]}\n")
    program.chmod(0o755)
    extensions.ExtensionManifest(
        "you", "hf-tiny", "you/hf-tiny", "tiny", str(program), "python", datetime.now(UTC)
    ).save(tmp_path / "hf-tiny")
    assert extensions.dispatch_unknown_top_level_extension(["tiny", "--help"], {"auth", "jobs"}) == 0
    assert extensions.dispatch_unknown_top_level_extension(["tiny", "predikt"], {"auth", "jobs"}) == 2


@pytest.mark.slow
def test_the_install_wins_over_the_folder_of_a_clone(tmp_path):
    """Python that starts in the folder above a clone finds a folder `hf_tiny` there, which is no package."""
    changes = subprocess.run(["git", "diff", "HEAD", "--binary"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "hf_tiny"], check=True)
    if changes:  # what is not committed yet
        subprocess.run(["git", "apply"], cwd=tmp_path / "hf_tiny", input=changes, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    packages = next((tmp_path / "env").glob("lib/*/site-packages"))
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))  # torch and the like; not our own install
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--editable", tmp_path / "hf_tiny"], check=True)
    above = {"cwd": tmp_path, "capture_output": True, "text": True}
    snippet = "import hf_tiny; print(hf_tiny.__file__, hf_tiny.__version__)"
    found = subprocess.run([python, "-c", snippet], **above)
    assert found.stdout.split() == [str(tmp_path / "hf_tiny" / "hf_tiny" / "__init__.py"), hf_tiny.__version__], found
    listed = subprocess.run([tmp_path / "env" / "bin" / "hf-tiny", "--help"], **above)
    assert listed.returncode == 0 and "pretrain-electra" in listed.stdout, listed.stderr
    refused = subprocess.run(
        [tmp_path / "env" / "bin" / "hf-tiny", "push", "nowhere", "--hub_model_id", "a/b"], **above
    )
    assert refused.returncode == 2 and "nowhere lacks config.json" in refused.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["pretrain-electra", "--max_step", "1"], 2, "Unknown flag --max_step. Did you mean --max_steps?"),
        (["pretrain-electra", "--logging_steps", "0"], 2, "--logging_steps 0: it must be above 0."),
        (["pretrain-electra", "--help"], 0, ""),
        (["compare-tokenizers", "--learning_rate", "1"], 2, "Unknown flag --learning_rate"),
        (["convert", "nowhere", "new"], 2, "error: "),
        (["push", "nowhere", "--hub_model_id", "a/b"], 2, "error: nowhere lacks config.json"),
        (["push"], 2, "required"),
    ],
)
def test_exit_codes(tmp_path, words, code, message):
    ended = tiny_run.start(tmp_path, run_cli, *words).wait()
    assert (ended.code, "Traceback" in ended.err) == (code, False), ended.err
    assert message in ended.err


@pytest.mark.slow
def test_one_process_runs_the_recipe_itself(tmp_path):
    text = tiny_run.write_text(tmp_path / "text.txt")
    flags = ["--train_file", str(text), "--max_steps", "2", *TINY]
    ended = tiny_run.start(tmp_path, run_cli, "pretrain-electra", *flags, "--output_dir", str(tmp_path / "one")).wait()
    assert ended.code == 0, ended.err
    ended = tiny_run.recipe(tmp_path, *flags, "--output_dir", tmp_path / "two")
    assert ended.code == 0, ended.err
    assert tiny_run.largest_difference(tmp_path / "one", tmp_path / "two") == 0


def test_a_recipe_that_does_not_train_leaves_runs_alone(tmp_path, monkeypatch):
    """Not even a folder of its name that holds a run."""
    monkeypatch.chdir(tmp_path)
    Path("runs/out/checkpoint-3").mkdir(parents=True)
    text = tiny_run.write_text(tmp_path / "text.txt")
    flags = tiny_run.flags(train_file=text, vocab_size=400, max_eval_samples=5)
    ended = tiny_run.start(tmp_path, run_cli, "compare-tokenizers", *flags).wait()
    assert ended.code == 0, ended.err
    assert re.findall(r"^(\w+) +tokens per word", ended.out, re.MULTILINE) == list(MODELS)
    assert os.listdir("runs/out") == ["checkpoint-3"]


def listening(pid: int) -> list:
    """The ports on which a process and its children wait for others."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    ports = (port for process in family for port in process.net_connections("inet"))
    return [port for port in ports if port.status == psutil.CONN_LISTEN]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("processes", [1, 2])
def test_make_waits_until_the_run_is_saved(tmp_path, processes):
    text, run = tiny_run.write_text(tmp_path / "text.txt"), tmp_path / "run"
    options = "--num_processes 2" if processes == 2 else ""
    (tmp_path / "hf-tiny").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} {options} "$@"\n')
    (tmp_path / "hf-tiny").chmod(0o755)
    flags = shlex.join(["--train_file", str(text), "--max_steps", "5000", *TINY])
    command = ["make", "-o", ".venv/installed", "pretrain", f"BIN={tmp_path}", f"OUT={run}", f"ARGS={flags}"]
    environment = {**ENVIRONMENT, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    with open(tmp_path / "err", "w") as err:
        make = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=err, stderr=err)
    end = time.monotonic() + 200
    while max(tiny_run.logged_steps(run), default=0) < 2:
        assert time.monotonic() < end and make.poll() is None, (tmp_path / "err").read_text()
        time.sleep(0.05)
    family = psutil.Process(make.pid).children(recursive=True)
    make.terminate()
    assert make.wait(60) != 0
    said = (tmp_path / "err").read_text()
    assert "Stopped by SIGTERM; checkpoint-" in said and "Traceback" not in said
    assert len(list(checkpoint.find(run, "latest").glob("rng-*"))) == processes
    assert not psutil.wait_procs(family, 10)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "number"),
    [(["--num_processes", "2"], signal.SIGTERM), (["--mixed_precision", "no"], signal.SIGINT)],
)
def test_launched_processes(tmp_path, options, number):
    """Two over gloo, or one with other options: a signal reaches them, and their exit code comes back."""
    text, run = tiny_run.write_text(tmp_path / "text.txt"), tmp_path / "run"
    environment = {**ENVIRONMENT, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    flags = ["pretrain-electra", "--train_file", str(text), "--output_dir", str(run), "--max_steps", "5000", *TINY]
    port = [] if "--mixed_precision" in options else ["--main_process_port", "0"]
    with open(tmp_path / "err", "w") as err:
        listens = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a shell may have ignored it
        started = subprocess.Popen([*COMMAND, *port, *options, *flags], env=environment, stderr=err, **listens)
    end = time.monotonic() + 200
    while max(tiny_run.logged_steps(run), default=0) < 2:
        assert time.monotonic() < end and started.poll() is None, (tmp_path / "err").read_text()
        time.sleep(0.05)
    assert not {port.laddr.ip for port in listening(started.pid)} - {"127.0.0.1"}  # others cannot reach them
    started.send_signal(number)
    assert started.wait(60) == 128 + number
    error = (tmp_path / "err").read_text()
    assert f"Stopped by {number.name}; checkpoint-" in error and "Traceback" not in error
    assert "death signal" not in error  # of torch's launcher
    saved = checkpoint.find(run, "latest")
    assert len(list(saved.glob("rng-*"))) == (1 if "--mixed_precision" in options else 2)
    if "--num_processes" in options:
        refused, _ = hf_tiny_command(*port, *options, *flags)
        assert refused.returncode == 2 and "holds another run" in refused.stderr
        assert "Traceback" not in refused.stderr
        nothing = ["pretrain-electra", "--train_file", tmp_path / "nothing.txt", "--output_dir", tmp_path / "none"]
        refused, _ = hf_tiny_command(*port, *options, *nothing)
        assert refused.returncode == 2 and refused.stderr.splitlines()[-1].startswith("error: --train_file")
        assert refused.stderr.count("error: ") == 1  # though it is wrong for both processes
    step = checkpoint.step_of(saved)
    again = [*flags, "--resume_from_checkpoint", "latest", "--max_steps", str(step + 2)]
    done, _ = hf_tiny_command(*port, *options, *again)
    assert done.returncode == 0, done.stderr
    results = json.loads((run / "all_results.json").read_text())
    assert results["num_processes"] == (2 if "--num_processes" in options else 1)
