"""Machines that share nothing but a network train like one process, or say what they would have to share."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from fixtures import tiny_run
from fixtures.tiny_run import ROOT, largest_difference, logged_steps, metrics

pytestmark = pytest.mark.slow

CONFIGS = ROOT / "recipes" / "accelerate"
# What a cluster has: `srun` starts the command on each machine, here in a folder and with a cache of its own.
SRUN = """#!/bin/bash
for machine in 0 1; do
    cd "$TMP_PATH/machine-$machine"
    SLURM_NODEID=$machine HF_HOME="$PWD/cache" "$@" > log 2>&1 &
    started="$started $!"
done
for process in $started; do wait $process || exit 1; done
"""
SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames here[0-1]" ] && printf "127.0.0.1\\nelsewhere\\n"\n'


@pytest.mark.parametrize("name", ["cpu_2proc", "multi_gpu", "multi_node", "fsdp"])
def test_accelerate_understands_the_config(name, monkeypatch):
    path = str(CONFIGS / f"{name}.yaml")
    config = load_config_from_file(path)  # refuses keys that it does not know
    parsed = launch_command_parser().parse_args(["--config_file", path, "script.py"])
    assert set(config.fsdp_config or {}) <= set(vars(parsed))  # of these it would take any
    arguments, *_ = _validate_launch_command(parsed)
    assert arguments.multi_gpu != arguments.use_fsdp
    assert (arguments.num_machines, arguments.num_processes) == {
        "cpu_2proc": (1, 2),
        "multi_gpu": (1, 4),
        "multi_node": (2, 8),
        "fsdp": (1, 4),
    }[name]
    if name == "fsdp":
        for variable, value in prepare_multi_gpu_env(arguments).items():
            monkeypatch.setenv(variable, value)
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
        assert plugin.transformer_cls_names_to_wrap == ["EncoderBlock"]
        assert not plugin.cpu_ram_efficient_loading and not plugin.activation_checkpointing


def test_two_launches_of_slurm_train_like_one_process(tmp_path):
    """Each machine has its own copy of the text, trains its own tokenizer and packs its own blocks; one writes the run."""
    for name, content in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    for machine in ("machine-0", "machine-1", "alone"):
        (tmp_path / machine).mkdir()
        tiny_run.write_text(tmp_path / machine / "text.txt", 600)
    settings = {"max_steps": 10, "max_seq_length": 32, "vocab_size": 400, "logging_steps": 1, "eval_steps": 5}
    flags = tiny_run.flags(per_device_train_batch_size=4, **settings)
    slurm = {"SLURM_JOB_NODELIST": "here[0-1]", "SLURM_JOB_ID": os.getpid(), "SLURM_NNODES": 2, "SLURM_GPUS_ON_NODE": 1}
    slurm |= {"SLURM_SUBMIT_DIR": ROOT, "TMP_PATH": tmp_path, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}
    slurm["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", CONFIGS / "slurm.sh", tiny_run.RECIPE, "--train_file", "text.txt", "--output_dir", "run", *flags]
    environment = {**os.environ, **{name: str(value) for name, value in slurm.items()}}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    logs = [(tmp_path / machine / "log").read_text() for machine in ("machine-0", "machine-1")]
    assert ended.returncode == 0, (ended.stderr, *logs)

    run, alone = tmp_path / "machine-0" / "run", tmp_path / "alone" / "run"
    files = ["--train_file", tmp_path / "alone" / "text.txt", "--output_dir", alone]
    one = tiny_run.recipe(tmp_path, *files, "--gradient_accumulation_steps", 2, *flags)
    assert one.code == 0, one.err
    assert json.loads((run / "all_results.json").read_text())["num_processes"] == 2
    assert largest_difference(run, alone) < 1e-5
    assert (run / "tokenizer.json").read_bytes() == (alone / "tokenizer.json").read_bytes()
    for two, single in zip(metrics(run), metrics(alone), strict=True):
        for name in single.keys() & {"loss", "eval_loss", "eval_mlm_loss"}:
            assert two[name] == pytest.approx(single[name], rel=1e-4), (single["step"], name)
    assert sorted(path.name for path in (tmp_path / "machine-1").iterdir()) == ["cache", "log", "text.txt"]


# Each process is a machine with a disk of its own: the same --output_dir is another folder there.


def run_apart(flag, output_dir, *flags) -> None:
    rank = os.environ["RANK"]
    own = Path(output_dir).parent / f"machine-{rank}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    tiny_run.run_toy(flag, "run", *[text.replace("RANK", rank) for text in flags])


def apart(tmp_path, **settings) -> list[tiny_run.Ended]:
    settings = {"max_steps": 4, "save_steps": 2, "held_out_rows": 16, "dropout": 0.0, **settings}
    return [process.wait() for process in tiny_run.start_group(tmp_path / "run", 2, run_apart, **settings)]


def refusals(ended: list[tiny_run.Ended]) -> str:
    """The error that all processes ended with."""
    for process in ended:
        assert process.code == 2, process.err
        assert "Traceback" not in process.err
    first, second = (process.err.split("error: ")[-1] for process in ended)
    assert first == second
    return first


def test_a_checkpoint_that_a_machine_does_not_see_is_refused(tmp_path):
    ended = apart(tmp_path)
    assert [process.code for process in ended] == [0, 0], ended[0].err
    run, other = tmp_path / "machine-0" / "run", tmp_path / "machine-1" / "run"
    assert not other.exists()
    shutil.rmtree(run / "checkpoint-4")
    words = "Process 1 does not see the run/checkpoint-2/manifest.json of process 0."
    message = refusals(apart(tmp_path, resume_from_checkpoint="latest"))
    assert words in message and "a disk that all machines share" in message
    (other / "checkpoint-2").mkdir(parents=True)
    (other / "checkpoint-2" / "manifest.json").write_text("of another run")
    assert words in refusals(apart(tmp_path, resume_from_checkpoint="latest"))
    shutil.rmtree(other)
    shutil.copytree(run, other)
    ended = apart(tmp_path, resume_from_checkpoint="latest")
    assert [process.code for process in ended] == [0, 0], ended[0].err
    assert logged_steps(run) == [1, 2, 3, 4]
    assert logged_steps(other) == [1, 2, 3, 4] and not (other / "checkpoint-4").exists()  # only the copy


def test_what_needs_a_shared_disk_is_refused_before_the_first_step(tmp_path):
    message = refusals(apart(tmp_path, load_best_model_at_end=True, eval_steps=2))
    assert "Process 1 does not see the run/.lock of process 0." in message
    assert not (tmp_path / "machine-0" / "run" / "metrics.jsonl").exists()


def test_a_run_on_one_machine_s_disk_stops_all_from_writing_over_it(tmp_path):
    (tmp_path / "machine-0" / "run" / "checkpoint-2").mkdir(parents=True)
    assert "run holds another run (checkpoint-2)." in refusals(apart(tmp_path))


def test_machines_with_other_data_are_refused(tmp_path):
    message = refusals(apart(tmp_path, rows="10RANK"))
    assert "Process 1 has data = 101 rows" in message and "process 0 has 100 rows" in message
    assert "Give every machine the same flags and files" in message
