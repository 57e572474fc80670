"""What only a GPU shows. Without one these tests are skipped, and `make test` says so aloud."""

import pytest
import torch
from accelerate import Accelerator
from fixtures import tiny_run
from fixtures.tiny_run import metrics, train_here

from hf_tiny.data.batches import Prefetcher

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: this machine has no CUDA device")


def losses(folder) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def test_a_run_learns_what_it_learns_on_a_cpu(tmp_path, monkeypatch):
    train_here(tmp_path / "gpu", max_steps=6, logging_steps=1, bf16=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *args: False)
    train_here(tmp_path / "cpu", max_steps=6, logging_steps=1, bf16=False)
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_a_run_in_bfloat16_is_near(tmp_path):
    for bf16 in (False, True):
        train_here(tmp_path / str(bf16), max_steps=6, logging_steps=1, bf16=bf16)
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=0.03)


def test_batches_are_sent_and_their_counts_stay():
    batches = tiny_run.batches(tiny_run.ToyRecipe(output_dir="unused"))
    with Prefetcher(batches, Accelerator(), 0, 1) as ahead:
        (batch,) = next(ahead)
    assert batch.pop("num_items_in_batch").device.type == "cpu"
    assert {value.device.type for value in batch.values()} == {"cuda"}
