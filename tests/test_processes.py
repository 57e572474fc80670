"""Several processes train like one, or do not start."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from fixtures import tiny_run
from fixtures.tiny_run import ROOT, largest_difference, metrics, start_group, toy, wait_for_step

from hf_tiny import checkpoint, convert, processes
from hf_tiny.callbacks import EMA

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
from fixtures import tiny_run
from hf_tiny.train import Run

agree = Run.agree
def recorded(self):
    agree(self)
    with open(f"process-{{os.getpid()}}.txt", "w") as file:
        file.write(f"{{self.world}} {{type(self.model).__name__}}")
Run.agree = recorded
tiny_run.run_toy(*sys.argv[1:])
"""


def test_two_launched_processes_train_like_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests")))
    settings = {"max_steps": 20, "dropout": 0.0, "save_steps": 10, "held_out_rows": 20, "eval_steps": 10}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    launch += ["--config_file", str(ROOT / "recipes" / "accelerate" / "cpu_2proc.yaml"), str(script)]
    flags = tiny_run.flags(output_dir=tmp_path / "two", per_device_train_batch_size=8, **settings)
    ended = subprocess.run(launch + flags, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert [path.read_text() for path in tmp_path.glob("process-*.txt")] == ["2 DistributedDataParallel"] * 2
    assert json.loads((tmp_path / "two" / "all_results.json").read_text())["num_processes"] == 2

    assert toy(tmp_path / "one", per_device_train_batch_size=16, **settings).code == 0
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-5
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for single, double in zip(one, two, strict=True):
        for name in single.keys() & {"loss", "mlm_loss", "rtd_loss", "grad_norm", "eval_loss", "eval_mlm_loss"}:
            assert double[name] == pytest.approx(single[name], rel=1e-4), (single["step"], name)


def test_two_processes_evaluate_to_the_last_digit_like_one(tmp_path):
    """Five held-out batches, the last one short: every row counts once."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = {"max_steps": 4, "held_out_rows": 35}
    assert toy(one, gradient_accumulation_steps=2, **settings).code == 0
    shutil.copytree(one, two)
    (two / "README.md").unlink()  # or the run would be finished
    ended = tiny_run.group(two, 2, resume_from_checkpoint="latest", gradient_accumulation_steps=1, **settings)
    assert [process.code for process in ended] == [0, 0], ended[0].err
    results = [json.loads((run / "all_results.json").read_text()) for run in (one, two)]
    assert [result["num_processes"] for result in results] == [1, 2]
    figures = [name for name in results[0] if name.startswith("eval_")]
    assert len(figures) == 9
    for name in figures:
        assert results[0][name] == results[1][name], name


def test_a_signal_to_one_process_stops_both_at_the_same_step(tmp_path):
    run = tmp_path / "run"
    started = start_group(run, 2, pause=0.05, max_steps=200, save_steps=0, held_out_rows=16)
    wait_for_step(started[0], run, 3)
    started[1].kill(signal.SIGTERM)
    ended = [process.wait() for process in started]
    assert [process.code for process in ended] == [143, 143], ended[0].err
    saved = checkpoint.find(run, "latest")
    assert 3 <= checkpoint.step_of(saved) < 200
    assert f"Stopped by SIGTERM; {saved.name} is saved." in ended[0].err
    assert sorted(path.name for path in saved.glob("rng-*")) == ["rng-0-of-2.pt", "rng-1-of-2.pt"]


def believe_to_be_alone(*flags) -> None:
    """What accelerate does with two processes and no GPU when nobody tells it to use the CPU."""
    assert PartialState().num_processes == 1
    tiny_run.run_toy(*flags)


def test_processes_that_would_train_alone_are_refused(tmp_path):
    ended = [process.wait() for process in start_group(tmp_path / "run", 2, believe_to_be_alone)]
    for process in ended:
        assert process.code == 2
        assert "started 2 processes, but accelerate sees 1: each would train alone" in process.err
        assert "--config_file recipes/accelerate/cpu_2proc.yaml" in process.err
        assert "Traceback" not in process.err
    assert not (tmp_path / "run").exists()


def test_a_launcher_that_starts_too_few_processes_is_refused(tmp_path):
    """`accelerate launch --cpu --num_processes 2` starts one process without a word."""
    parsed = launch_command_parser().parse_args(["--cpu", "--num_processes", "2", "script.py"])
    _, environment = prepare_simple_launcher_cmd_env(_validate_launch_command(parsed)[0])
    new = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    flags = tiny_run.flags(output_dir=tmp_path / "run", max_steps=1)
    ended = tiny_run.start(tmp_path, tiny_run.run_toy, *flags, env=new).wait()
    assert ended.code == 2
    assert "asked for several processes and started only one" in ended.err
    assert "cpu_2proc.yaml" in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_nan_stops_the_run_and_keeps_the_last_checkpoint(tmp_path, processes):
    run = tmp_path / "run"
    settings = {"nan_at": 6, "save_steps": 4, "held_out_rows": 16}
    for ended in [toy(run, **settings)] if processes == 1 else tiny_run.group(run, 2, **settings):
        assert ended.code == 2
        assert "The gradient is nan at step 7: the loss has become NaN or infinite." in ended.err
        assert f"checkpoint is {run / 'checkpoint-4'}" in ended.err
        assert "lower --learning_rate" in ended.err
        assert "Traceback" not in ended.err
    assert [path.name for path in checkpoint.checkpoints(run)] == ["checkpoint-4"]
    assert checkpoint.damage(run / "checkpoint-4") is None


@pytest.mark.parametrize(("asked", "spins"), [({}, "1000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")])
def test_threads_soon_give_way_to_other_programs(asked, spins):
    """libgomp itself says how long a thread that waits spins; what a person has set holds."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    variables = {**others, "OMP_DISPLAY_ENV": "VERBOSE", **asked}
    command = [sys.executable, "-c", "import hf_tiny, torch"]
    said = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in said


def test_the_command_that_goes_on_works_when_it_is_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "recipes" / "pretrain_electra.py"), "--output_dir", "runs/my run"])
    words = ["hf-tiny", "pretrain-electra", "--output_dir", "runs/my run", "--resume_from_checkpoint", "latest"]
    assert shlex.split(processes.resume_command()) == words
    monkeypatch.setattr(sys, "argv", ["mine/x.py", "--resume_from_checkpoint", "runs/x/checkpoint-4"])
    words = shlex.split(processes.resume_command())
    assert words[:2] == ["accelerate", "launch"]
    assert words[-5:] == [
        "mine/x.py",
        "--output_dir",
        "runs/x",
        "--resume_from_checkpoint",
        "latest",
    ]  # where it went on
    again = ["mine/x.py", "--output_dir", "runs/y", "--resume_from_checkpoint=latest", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", again)
    words = shlex.split(processes.resume_command())
    assert words[-7:] == [*again[:3], "--seed", "1", "--resume_from_checkpoint", "latest"]


@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGKILL)])
def test_a_launcher_that_is_killed_takes_its_run_along(tmp_path, processes, number):
    """`accelerate launch` starts the script and waits: SIGTERM, of `docker stop` say, ends it without a word to the script."""
    run, script = tmp_path / "run", tmp_path / "toy.py"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests")))
    flags = tiny_run.flags(output_dir=run, max_steps=500, pause=0.1, save_steps=0)
    two = ["--main_process_port", "0", "--config_file", str(ROOT / "recipes" / "accelerate" / "cpu_2proc.yaml")]
    options = two if processes == 2 else ["--num_processes", "1", "--cpu"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(script), *flags]
    launcher = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not tiny_run.logged_steps(run) and time.monotonic() < end:
        time.sleep(0.05)
    children = psutil.Process(launcher.pid).children()
    assert len(children) == processes
    launcher.send_signal(number)
    assert launcher.wait(60) != 0
    while not checkpoint.checkpoints(run) and time.monotonic() < end:
        time.sleep(0.05)
    (saved,) = checkpoint.checkpoints(run)
    assert checkpoint.damage(saved) is None and checkpoint.step_of(saved) < 500
    assert len(list(saved.glob("rng-*"))) == processes
    assert not psutil.wait_procs(children, 60)[1]


def test_weights_can_be_read_by_those_who_can_read_the_rest(tmp_path):
    toy = tiny_run.model()
    tiny_run.train_here(tmp_path / "run", callbacks=[EMA(0.9)], toy=toy, max_steps=1)
    convert.convert(str(tmp_path / "run"), tmp_path / "native")
    weights = list(tmp_path.rglob("*.safetensors"))
    assert sorted(path.name for path in weights) == ["ema.safetensors", *["model.safetensors"] * 4]
    for path in weights:
        assert path.stat().st_mode & 0o777 == path.with_name("config.json").stat().st_mode & 0o777
