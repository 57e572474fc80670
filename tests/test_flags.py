"""What is said of a command before torch is imported."""

import os
import re
import subprocess
import sys
import time

import psutil
import pytest
from fixtures.tiny_run import ROOT

from hf_tiny import InputError, cli, flags

VERB = "pretrain-electra"
HF_TINY = [sys.executable, "-m", "hf_tiny.cli"]
RECIPE = [sys.executable, str(ROOT / "recipes" / "pretrain_electra.py")]


def test_the_table_is_current():
    assert flags.TABLE.read_text(encoding="utf-8") == flags.new_table(), "run `make flags`"


@pytest.mark.parametrize(
    "command", [[*HF_TINY, "pretrain-electra"], RECIPE, [*HF_TINY, "--num_processes", "2", "pretrain-electra"]]
)
def test_a_typo_is_answered_at_once(command):
    """The processor time: the clock also measures what else the machine does."""
    before = os.times()
    ended = subprocess.run([*command, "--max_step", "3"], capture_output=True, text=True, cwd=ROOT)
    after = os.times()
    message = "\nerror: Unknown flag --max_step. Did you mean --max_steps? `--help all` lists every flag.\n"
    assert (ended.returncode, ended.stderr) == (2, message)
    assert sum(after[2:4]) - sum(before[2:4]) < 0.5


def test_accelerate_launch_quiet_ends_with_our_sentence():
    """Its lines about defaults come before the recipe starts."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "recipes/pretrain_electra.py"]
    ended = subprocess.run([*launch, "--max_step", "3"], capture_output=True, text=True, cwd=ROOT)
    message = "\nerror: Unknown flag --max_step. Did you mean --max_steps? `--help all` lists every flag.\n"
    assert ended.returncode == 1 and ended.stderr.endswith(message)
    assert "Traceback" not in ended.stdout + ended.stderr


def test_the_first_line_comes_before_the_slow_imports(tmp_path):
    with subprocess.Popen([*RECIPE, "--output_dir", str(tmp_path)], stderr=subprocess.PIPE, text=True) as started:
        line = started.stderr.readline()
        spent = psutil.Process(started.pid).cpu_times()
        started.kill()
    assert line == "hf_tiny: pretrain_electra\n"
    assert spent.user + spent.system < 0.5


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--max-step=3", "Unknown flag --max-step. Did you mean --max_steps?"),
        ("--train", "Did you mean --train_file?"),
        ("--dropout", "Unknown flag --dropout: it is now --hidden_dropout_prob."),
        ("--no_bf16", "Unknown flag --no_bf16: it is now --bf16 False."),
        ("--xyzzy", "Unknown flag --xyzzy. `--help all`"),
        ("--do_eval", "Unknown flag --do_eval: a recipe evaluates anyway"),
        ("--do_eval=True", "`hf-tiny evaluate MODEL FILE` does."),
        ("--do-predict", "for new data use `hf-tiny predict MODEL FILE`."),
        ("--overwrite_output_dir", "a run never writes over another one"),
        ("--eval_strategy", "--eval_steps says how often"),
        ("--warmup_ratio", "it is now --warmup_steps."),
        ("--hub_token", "`hf auth login`"),
    ],
)
def test_unknown_flags(word, hint):
    with pytest.raises(InputError) as refusal:
        flags.check("pretrain_electra", ["--seed", "1", word, "2"])
    assert hint in str(refusal.value)


def test_what_resembles_nothing_gets_no_suggestion():
    """It was --encoding_errors."""
    with pytest.raises(InputError, match=r"^Unknown flag --learning_rate\. `--help all`"):
        flags.check("compare_tokenizers", ["--learning_rate", "1"])


def test_no_flag_of_ours_is_taken_for_a_foreign_one():
    """And what stands in the place of a foreign one is a flag or a verb."""
    table = flags.read_table()
    assert not table.keys() & (flags.FOREIGN.keys() | flags.RENAMED.keys())
    assert not set(flags.RENAMED.values()) - table.keys()
    answers = " ".join(flags.FOREIGN.values())
    assert set(re.findall(r"--(\w+)", answers)) <= table.keys()
    assert set(re.findall(r"`hf-tiny (\w+) ", answers)) <= cli.COMMANDS.keys()


def test_known_flags():
    flags.check("pretrain_reformer", ["--chunk_length", "64", "--max-steps=3", "--learning_rate", "-1", "--help"])
    flags.check("a_script_of_a_user", ["--whatever"])


def test_a_flag_that_is_newer_than_the_table_is_left_to_the_recipe(tmp_path, monkeypatch):
    lines = flags.TABLE.read_text().splitlines(keepends=True)
    monkeypatch.setattr(flags, "TABLE", tmp_path / "flags.tsv")
    flags.TABLE.write_text("".join(line for line in lines if not line.startswith("max_steps\t")))
    flags.check("pretrain_electra", ["--max_steps", "3"])
    with pytest.raises(InputError):
        flags.check("pretrain_electra", ["--max_step", "3"])


def test_checking_takes_no_time():
    start = time.process_time()
    for _ in range(20):
        flags.check("pretrain_electra", ["--max_steps", "3"])
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("word", "meant"),
    [("model", "model_name_or_path"), ("batch-size", "per_device_train_batch_size"), ("epoch", "num_train_epochs"),
     ("lr", "learning_rate"), ("data", "dataset_name")],
)  # fmt: skip
def test_a_part_of_a_flag_is_understood(word, meant):
    known = [flag for flag, recipes in flags.read_table().items() if "pretrain_electra" in recipes]
    assert flags.hint(word, known, "--") == f". Did you mean --{meant}?"
