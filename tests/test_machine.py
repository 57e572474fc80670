"""The precision and the threads of a run are measured, recorded and kept."""

import json
import os
import platform
import resource
import signal

import pytest
import torch
import yaml
from fixtures import tiny_run
from fixtures.tiny_run import largest_difference, train_here

from hf_tiny import (
    HfTinyElectraForPreTraining,
    HfTinyReformerConfig,
    HfTinyReformerModel,
    InputError,
    arguments,
    machine,
)
from hf_tiny.callbacks import SlowdownWarning, TrainState

MEASURED = {"float32": 1.0, "bfloat16": 0.5, "loss": 0.001, "cosine": 0.999}


@pytest.fixture
def probed(tmp_path, monkeypatch) -> list:
    """Steps of every size are tried; what the child process says is in place of measuring."""
    asked = []
    monkeypatch.setattr(machine, "LEAST_FLOPS", 0)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(machine, "measured_elsewhere", lambda model, batch: asked.append(batch) or MEASURED)
    return asked


def recipe_of(folder) -> dict:
    return yaml.safe_load((folder / "recipe.yaml").read_text())


@pytest.mark.parametrize(
    ("changes", "taken", "words"),
    [
        ({}, True, "2.00 times as fast"),
        ({"bfloat16": 1 / 1.31}, True, "1.31 times"),
        ({"bfloat16": 1 / 1.29}, False, "1.29 times"),
        ({"loss": 0.2}, False, "not right"),
        ({"loss": float("nan")}, False, "not right"),
        ({"cosine": 0.5}, False, "not right"),
    ],
)
def test_bfloat16_is_taken_where_it_is_right_and_much_faster(changes, taken, words):
    verdict = machine.judge({**MEASURED, **changes})
    assert verdict["bf16"] is taken and words in verdict["reason"]


def test_a_step_is_measured_in_both_precisions():
    recipe = tiny_run.ToyRecipe(output_dir="unused")
    part, flops = machine.some_rows(tiny_run.model(0.1), tiny_run.batches(recipe)[0])
    assert flops > 1e6 and len(part["input_ids"]) == recipe.per_device_train_batch_size
    found = machine.measure(tiny_run.model(0.1), part)
    assert found["float32"] > 0 and found["bfloat16"] > 0 and 0 < found["loss"] < 0.05 and 0.95 < found["cosine"] < 1


def test_large_steps_are_measured_on_fewer_rows(monkeypatch):
    model, batch = tiny_run.model(), tiny_run.batches(tiny_run.ToyRecipe(output_dir="unused"))[0]
    rows = len(batch["input_ids"])
    _, flops = machine.some_rows(model, batch)
    monkeypatch.setattr(machine, "MOST_FLOPS", flops / 2)
    part, again = machine.some_rows(model, batch)
    assert again == flops and len(part["input_ids"]) == len(part["labels"]) == rows // 2


class Deadly(HfTinyElectraForPreTraining):
    def forward(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGILL)  # as bfloat16 does where a virtual machine announces what it does not have


@pytest.mark.slow
def test_another_process_measures_and_may_die(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))  # where Deadly is
    recipe, model = tiny_run.ToyRecipe(output_dir="unused"), tiny_run.model()
    part, _ = machine.some_rows(model, tiny_run.batches(recipe)[0])
    assert machine.judge(machine.measured_elsewhere(model, part))["reason"].startswith("a step in bfloat16 is")
    model.__class__ = Deadly
    verdict = machine.judge(machine.measured_elsewhere(model, part))
    assert verdict["bf16"] is False and f"ended with -{signal.SIGILL.value}" in verdict["reason"]


def test_small_steps_stay_in_float32_and_nothing_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "measured_elsewhere", lambda *_: pytest.fail("tried"))
    train_here(tmp_path / "run", max_steps=1, evaluate=True)
    recipe = recipe_of(tmp_path / "run")
    assert recipe["bf16"] is False and recipe["num_threads"] == torch.get_num_threads()


def test_the_answer_is_remembered_recorded_and_kept(tmp_path, probed, monkeypatch):
    run = tmp_path / "run"
    train_here(run, max_steps=2)
    train_here(tmp_path / "plain", max_steps=2, bf16=False)
    train_here(tmp_path / "again", max_steps=2)
    assert len(probed) == 1 and recipe_of(run)["bf16"] is recipe_of(tmp_path / "again")["bf16"] is True
    assert largest_difference(run, tmp_path / "again") == 0 < largest_difference(run, tmp_path / "plain")
    saved = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())
    assert saved["identity"]["bf16"] is True and saved["num_threads"] == torch.get_num_threads()
    monkeypatch.setattr(machine, "bfloat16_is_better", lambda *_: pytest.fail("asked again"))
    train_here(run, max_steps=3, resume_from_checkpoint="latest")
    assert recipe_of(run)["bf16"] is True
    with pytest.raises(InputError, match="bf16 = True, this run has False"):
        train_here(run, max_steps=4, resume_from_checkpoint="latest", bf16=False)


def test_threads_are_those_asked_for_or_the_faster_ones(tmp_path, monkeypatch):
    before, steps = torch.get_num_threads(), iter([9.0, 0.2, 0.2, 0.2, 9.0, 0.1, 0.1, 0.1])
    try:
        train_here(tmp_path / "two", max_steps=1, num_threads=2)
        assert torch.get_num_threads() == 2 == recipe_of(tmp_path / "two")["num_threads"]
        monkeypatch.setattr(machine, "timed_step", lambda *_: (next(steps), 0.0))
        train_here(tmp_path / "auto", max_steps=1, num_threads="auto")
        assert torch.get_num_threads() == 1 == recipe_of(tmp_path / "auto")["num_threads"]
    finally:
        torch.set_num_threads(before)


def test_measuring_leaves_the_run_as_it_was(tmp_path, probed):
    """Not a random number is taken from it: dropout is the same."""
    train_here(tmp_path / "auto", max_steps=2, dropout=0.1, num_threads="auto")
    train_here(tmp_path / "told", max_steps=2, dropout=0.1, bf16=True, num_threads=torch.get_num_threads())
    assert len(probed) == 1 and largest_difference(tmp_path / "auto", tmp_path / "told") == 0


@pytest.mark.parametrize(
    ("flags", "bf16", "threads"),
    [
        ([], "auto", None),
        (["--bf16"], True, None),
        (["--bf16", "False", "--num_threads", "3"], False, 3),
        (["--bf16", "auto", "--num_threads", "auto"], "auto", "auto"),
    ],
)
def test_the_flags(flags, bf16, threads):
    recipe = arguments.parse(tiny_run.ToyRecipe, ["--output_dir", "unused", *flags])
    assert (recipe.bf16, recipe.num_threads) == (bf16, threads)


@pytest.mark.parametrize(("name", "value"), [("bf16", "maybe"), ("num_threads", "many"), ("num_threads", "0")])
def test_bad_values_are_refused(name, value):
    with pytest.raises(InputError, match=f"--{name}"):
        arguments.parse(tiny_run.ToyRecipe, ["--output_dir", "unused", f"--{name}", value])


def test_a_run_says_that_it_has_become_slow(caplog):
    callback, state = SlowdownWarning(), TrainState()
    for step in range(1, 61):
        state.step, state.tokens = step, 1000 * step
        state.seconds += 0.1 if step < 30 else 2.0 if step == 10 else 1.0
        callback.on_step_end(state, torch.nn.Identity())
    (said,) = caplog.messages
    assert "from 10,000 to 1,000 tokens a second" in said and "--num_threads 1" in said


def amd(**changes) -> dict:
    return {"cpu_name": "AMD EPYC", "avx512_f": True, "amx_tile": False, **changes}


@pytest.mark.parametrize(
    ("about", "exact", "library"),
    [
        (amd(), True, "oneDNN"),
        (amd(), False, "MKL"),
        (amd(amx_tile=True), True, "MKL"),
        (amd(avx512_f=False), True, "MKL"),
        (amd(cpu_name="Intel Xeon"), True, "MKL"),
        ({}, True, "MKL"),
    ],
)
def test_onednn_multiplies_where_it_is_faster_and_as_exact(about, exact, library, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: about)
    monkeypatch.setattr(machine, "is_float32", lambda: exact)
    assert machine.best_products(tiny_run.model()) == library
    assert machine.best_products(HfTinyReformerModel(HfTinyReformerConfig(hidden_size=64))) == library
    assert machine.best_products(torch.nn.Linear(2, 2)) == "MKL"  # sdpa of others would be slower


def test_products_that_are_rounded_to_bfloat16_are_found_out():
    assert machine.is_float32()
    with torch.autocast("cpu", torch.bfloat16):
        assert not machine.is_float32()


def test_steps_multiply_by_onednn_and_evaluations_by_mkl(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_tiny.train.best_products", lambda model: "oneDNN")
    seen, forward = set(), HfTinyElectraForPreTraining.forward

    def watched(self, *args, **kwargs):
        seen.add((self.training, torch.backends.mkldnn.matmul.fp32_precision))
        return forward(self, *args, **kwargs)

    before = torch.backends.mkldnn.matmul.fp32_precision
    monkeypatch.setattr(HfTinyElectraForPreTraining, "forward", watched)
    train_here(tmp_path / "run", max_steps=1, evaluate=True)
    assert {(True, "bf16"), (False, before)} <= seen and (False, "bf16") not in seen
    assert torch.backends.mkldnn.matmul.fp32_precision == before != "bf16"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_freed_memory_is_kept():
    machine.keep_memory()
    faults = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(2**24).add_(1)  # 64 MB
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert sorted(faults)[3] < 2000, faults  # pages; given back, it would be 16,384 each time
