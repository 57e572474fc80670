"""Evaluation: every item counts once, however it is batched; metrics need no network."""

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils import ModelOutput

from hf_tiny import evaluation
from hf_tiny.data.batches import BucketedBatches
from hf_tiny.evaluation import Evaluation, array, call, divides_by_count, loss_and_items, mean_loss, perplexity
from hf_tiny.metrics import Metric, macro_f1, majority, share

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6]


class Counting(nn.Module):
    """Its loss is the mean of the numbers it is given; in training it would add 1."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.ones(()))

    def forward(self, numbers, num_items_in_batch=None):
        count = numbers.numel() if num_items_in_batch is None else num_items_in_batch[0]
        return ModelOutput(loss=numbers.sum() / count + self.training * self.extra)


class Native(Counting):
    """As transformers' own: the mean over the micro-batch."""

    def forward(self, numbers):
        return super().forward(numbers)


def collate(rows: list[dict]) -> dict:
    numbers = torch.tensor([float(len(row["input_ids"])) for row in rows])
    counts = torch.tensor([len(rows), int(numbers.sum())])
    return {"numbers": numbers, "about": {"example": [row["example"] for row in rows]}, "num_items_in_batch": counts}


def batches(batch_size: int) -> BucketedBatches:
    data = [{"input_ids": np.zeros(length), "example": number} for number, length in enumerate(LENGTHS)]
    return BucketedBatches(data, collate, batch_size, 10_000, seed=0, shuffle=False)


class Remembering(Evaluation):
    def collect(self, outputs, batch):
        return {**super().collect(outputs, batch), "example": np.array(batch["about"]["example"])}

    def generate(self, model, batch):
        return {"doubled": array(batch["numbers"] * 2)}

    def compute(self, results):
        return {**super().compute(results), "sum": float(results["doubled"].sum())}


@pytest.mark.parametrize("model", [Counting(), Native()])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_uneven_batches_weigh_what_they_should(model, batch_size):
    judge = Remembering(batches(batch_size))
    figures = judge(model, Accelerator(cpu=True))
    assert figures == pytest.approx({"loss": np.mean(LENGTHS), "sum": 2 * sum(LENGTHS)})
    assert judge.results["example"].tolist() == sorted(range(8), key=LENGTHS.__getitem__)  # the order of the batches
    assert model.training  # as it was


def test_what_is_not_for_the_model_does_not_reach_it():
    batch = batches(8)[0]
    assert divides_by_count(Counting()) and not divides_by_count(Native())
    assert call(Native().eval(), batch, None).loss.item() == pytest.approx(np.mean(LENGTHS))
    assert call(Counting().eval(), batch, torch.tensor([1])).loss.item() == sum(LENGTHS)


def test_a_plain_evaluation_has_the_loss_only(tmp_path):
    judge, batch = Evaluation(batches(8)), batches(8)[0]
    assert judge(Counting(), Accelerator(cpu=True)) == {"loss": pytest.approx(np.mean(LENGTHS))}
    judge.report(tmp_path)
    assert not list(tmp_path.iterdir())
    assert judge.training_figures(ModelOutput(loss=torch.tensor(1.0)), batch) == {}  # losses are in the log anyway


def test_losses_are_sums_and_counts():
    def batch(items: int) -> dict:
        return {"num_items_in_batch": torch.tensor([items, 99])}

    parts = [
        loss_and_items(ModelOutput(loss=torch.tensor(loss)), batch(items))
        for loss, items in ((2.0, 3), (math.nan, 0), (6.0, 1))  # a mean of nothing is no number
    ]
    together = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    assert mean_loss(together) == pytest.approx(3.0)
    assert math.isnan(mean_loss(parts[1]))
    named = loss_and_items(ModelOutput(nll=torch.tensor(1.5, dtype=torch.bfloat16)), batch(2), "nll")
    assert mean_loss(named, "nll") == 1.5 and named["nll"].dtype == np.float32


def test_figures_of_little():
    assert perplexity(math.log(8)) == pytest.approx(8) and math.isfinite(perplexity(1e9))
    assert share(np.array([True, False])) == 0.5 and math.isnan(share(np.array([])))
    assert majority(np.array([3, 1, 3])) == pytest.approx(2 / 3) and math.isnan(majority(np.array([], dtype=int)))
    assert macro_f1(np.array([0, 1]), np.array([0, 0])) == pytest.approx((2 / 3 + 0) / 2)
    assert math.isnan(macro_f1(np.array([]), np.array([])))


def test_a_metric_is_one_of_evaluate():
    class Same(Metric):
        """How often two numbers are the same."""

        def _compute(self, predictions, references):
            return {"same": share(np.asarray(predictions) == np.asarray(references))}

    metric = Same()
    assert metric.compute(predictions=[1, 2], references=np.array([1, 3])) == {"same": 0.5}
    metric.add_batch(predictions=[1], references=[1])
    metric.add_batch(predictions=[2, 3], references=[2, 3])
    assert metric.compute() == {"same": 1.0} and metric.description == Same.__doc__


def test_the_names_of_the_figures_are_known_from_one_batch():
    judge, before = Remembering(batches(3)), torch.get_rng_state()
    assert judge.names(Counting(), Accelerator(cpu=True)) == ["loss", "sum"]
    assert len(judge.results["example"]) == 3 and torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_has_a_bar_and_asking_for_names_has_none(monkeypatch):
    bars = []
    monkeypatch.setattr(
        evaluation, "tqdm", lambda steps, name, disable, **_: bars.append((len(steps), disable)) or steps
    )
    judge = Remembering(batches(3))
    judge(Counting(), Accelerator(cpu=True))
    judge.names(Counting(), Accelerator(cpu=True))
    assert bars == [(3, False), (1, True)]
