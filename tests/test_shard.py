"""A model in shards (FSDP) trains, saves and resumes like a whole one.

accelerate shards on GPUs only. Told that these are GPUs, it does on CPUs, over gloo, what recipes/accelerate/fsdp.yaml
makes it do there: torch's `fully_shard` on each block, on the tied embeddings, and on the rest.
"""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from fixtures import tiny_run
from fixtures.tiny_run import ROOT, largest_difference, logged_steps, metrics, toy
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_tiny import HfTinyElectraForPreTraining, InputError, checkpoint
from hf_tiny.callbacks import CollapseWarning
from hf_tiny.hub import NOT_PUSHED
from hf_tiny.processes import refuse_to_shard
from hf_tiny.train import Callback, Run, run

pytestmark = pytest.mark.slow

# Five held-out batches, the last one short, which two processes cannot share evenly.
SETTINGS = {"dropout": 0.0, "layers": 2, "held_out_rows": 35, "max_steps": 6, "save_steps": 3, "eval_steps": 3}
# The "best" model is that of step 3: what is loaded at the end is not what was trained last.
SETTINGS |= {"load_best_model_at_end": True, "greater_is_better": True}


def run_sharded(*flags) -> None:
    sys.argv = ["toy.py", *flags]
    run(sharded_main, tiny_run.ToyRecipe)


def sharded_main(recipe) -> None:
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    agree = Run.agree

    def agree_in_shards(self):
        assert sum(isinstance(module, FSDPModule) for module in self.model.modules()) == 7
        assert all(isinstance(weight, DTensor) for weight in self.model.parameters())
        agree(self)

    Run.agree = agree_in_shards
    tiny_run.toy_main(recipe)


@pytest.fixture(scope="module")
def fsdp_yaml():
    """The variables that `accelerate launch` sets."""
    flags = ["--config_file", str(ROOT / "recipes" / "accelerate" / "fsdp.yaml"), "script.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(flags))
    variables = {
        k: v for k, v in prepare_multi_gpu_env(arguments).items() if k.startswith(("FSDP_", "ACCELERATE_USE_F"))
    }
    assert variables["FSDP_VERSION"] == "2" and variables["ACCELERATE_USE_FSDP"] == "true"
    return variables


def group(output_dir, variables, processes: int, **settings) -> list[tiny_run.Ended]:
    """Six micro-batches a step, over any number of processes; one process has no shards."""
    settings = {**SETTINGS, "gradient_accumulation_steps": 6 // processes, **settings}
    function = run_sharded if processes > 1 else tiny_run.run_toy
    started = tiny_run.start_group(output_dir, processes, function, env=variables, **settings)
    return [process.wait() for process in started]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never in shards, with checkpoints at 3 and 6."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert toy(run, gradient_accumulation_steps=6, **SETTINGS).code == 0
    return run


@pytest.fixture(scope="module")
def shards(tmp_path_factory, fsdp_yaml):
    """The same with the model in two shards."""
    run = tmp_path_factory.mktemp("shards") / "run"
    ended = group(run, fsdp_yaml, 2)
    assert [process.code for process in ended] == [0, 0], ended[0].err
    return run


def test_shards_train_like_the_whole(whole, shards):
    for saved in ("checkpoint-3", "checkpoint-6", "."):
        assert largest_difference(shards / saved, whole / saved) < 1e-5
    assert (
        largest_difference(shards, shards / "checkpoint-3") == 0 < largest_difference(shards, shards / "checkpoint-6")
    )
    for one, two in zip(metrics(whole), metrics(shards), strict=True):
        assert one["step"] == two["step"]
        for name in one.keys() & {"loss", "grad_norm", "eval_loss", "eval_mlm_loss", "eval_rtd_loss"}:
            assert two[name] == pytest.approx(one[name], rel=1e-4), (one["step"], name)


def test_the_finished_model_is_whole_and_tied(whole, shards):
    assert sorted(path.name for path in shards.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert json.loads((shards / "config.json").read_text()) == json.loads((whole / "config.json").read_text())
    model = HfTinyElectraForPreTraining.from_pretrained(shards)
    assert model.generator_lm_head.weight is model.electra.embeddings.word_embeddings.weight


def test_each_process_saves_its_part_of_the_optimizer(shards):
    saved = shards / "checkpoint-3"
    parts = sorted((saved / "optimizer").iterdir())
    assert [path.name[:11] for path in parts] == ["shard-00001", "shard-00002"]
    elements = []
    for path in parts:
        elements.append(sum(value.numel() for name, value in load_file(path).items() if not name.endswith("step")))
    moments = 2 * sum(weight.numel() for weight in tiny_run.weights(saved).values())
    assert sum(elements) == moments and max(elements) < 0.55 * moments
    assert not list(filter_repo_objects([f"optimizer/{parts[0].name}"], ignore_patterns=NOT_PUSHED))
    assert checkpoint.damage(saved) is None
    content = parts[1].read_bytes()
    parts[1].write_bytes(content[:-1])
    assert checkpoint.damage(saved) == f"optimizer/{parts[1].name} differs from its checksum"
    parts[1].write_bytes(content)


@pytest.mark.parametrize(("start", "processes"), [("shards", 1), ("shards", 2), ("shards", 3), ("whole", 2)])
def test_a_run_goes_on_in_other_shards(request, whole, tmp_path, fsdp_yaml, start, processes):
    run = tmp_path / "run"
    shutil.copytree(request.getfixturevalue(start), run)
    shutil.rmtree(run / "checkpoint-6")
    ended = group(run, fsdp_yaml, processes, resume_from_checkpoint="latest")
    assert [process.code for process in ended] == [0] * processes, ended[0].err
    assert "checkpoint-3 at step 3" in ended[0].err
    assert largest_difference(run / "checkpoint-6", whole / "checkpoint-6") < 1e-5
    assert largest_difference(run, run / "checkpoint-3") == 0
    assert logged_steps(run) == [1, 2, 3, 4, 5, 6]
    assert checkpoint.damage(run / "checkpoint-6") is None
    assert (run / "checkpoint-6" / "optimizer").exists() == (processes > 1)
    assert json.loads((run / "all_results.json").read_text())["num_processes"] == processes


def test_another_number_of_micro_batches_is_refused(shards, tmp_path, fsdp_yaml):
    shutil.copytree(shards, tmp_path / "run")
    again = {"resume_from_checkpoint": "latest", "gradient_accumulation_steps": 2}
    for process in group(tmp_path / "run", fsdp_yaml, 2, **again):
        assert process.code == 2
        assert "took 6 micro-batches per step; 2 processes x --gradient_accumulation_steps 2 is 4" in process.err
        assert "that fit: [1, 2, 3, 6]; here use --gradient_accumulation_steps 3." in process.err


def test_a_full_disk_stops_all_processes_and_leaves_no_half(tmp_path, fsdp_yaml):
    run = tmp_path / "run"
    for process in group(run, fsdp_yaml, 2, full_disk_at=4):
        assert process.code == 2
        assert "checkpoint-6 could not be saved" in process.err
        assert f"{run / 'checkpoint-3'} is intact" in process.err
    assert [path.name for path in run.glob("*checkpoint-*")] == ["checkpoint-3"]
    assert checkpoint.damage(run / "checkpoint-3") is None


@pytest.mark.parametrize(
    ("sharded", "callbacks", "tied", "words"),
    [
        (False, [], True, "FSDP 1 is not supported: set `fsdp_version: 2`"),
        (True, [Callback()], True, "Callback needs whole weights"),
        (True, [CollapseWarning()], False, "it would untie weights"),
    ],
)
def test_what_shards_would_do_wrongly_is_refused(sharded, callbacks, tied, words):
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=sharded)
    with pytest.raises(InputError, match=words):
        refuse_to_shard(accelerator, callbacks, tied=tied)
