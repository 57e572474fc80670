"""Evaluation on held-out data, shared by the processes."""

import inspect
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .data.batches import Batch, Source, num_items, num_tokens

Results = dict[str, np.ndarray]
GOLD = ("labels", "heads")  # what of a batch is for comparison
BAR_INTERVAL = 0.5 if sys.stderr.isatty() else 30  # seconds between updates; a log file gets few


def divides_by_count(model: nn.Module) -> bool:
    """hf_tiny's models divide their loss by the step's count; transformers' own give the mean over the micro-batch."""
    return "num_items_in_batch" in inspect.signature(model.forward).parameters


def call(model: nn.Module, batch: dict, counts: Tensor | None) -> ModelOutput:
    """The model's outputs for a batch, without what is not for the model."""
    inputs = {name: value for name, value in batch.items() if name not in ("about", "num_items_in_batch")}
    return model(**inputs) if counts is None else model(**inputs, num_items_in_batch=counts)


def count_flops(model: nn.Module, batch: dict) -> int:
    """Floating-point operations of a forward pass; random numbers and gradients are left alone."""
    with torch.random.fork_rng(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(model, send_to_device(batch, model.device), None)
    return counter.get_total_flops()


def flops_per_token(model: nn.Module, batch: Batch) -> float:
    return count_flops(model, batch) / int(num_tokens(batch))


class Evaluation:
    """What a task measures on held-out data.

    A task says how: `answers` takes what predictions are made of from one batch, item by item, and `collect` also what they
    are compared with; `compute` turns what was collected, of all batches or of the first one, into figures; `rows` makes
    predictions of the last results, and `report` writes files about them (predictions, images) into a folder.
    """

    def __init__(self, batches: Source):
        self.batches = batches
        self.results: Results = {}

    def answers(self, outputs: ModelOutput, batch: Batch) -> Results:
        return {}

    def collect(self, outputs: ModelOutput, batch: Batch) -> Results:
        return {**self.answers(outputs, batch), **loss_and_items(outputs, batch)}

    def generate(self, model: nn.Module, batch: Batch) -> Results:
        """What is taken from the model beside its outputs."""
        return {}

    def answer(self, model: nn.Module, batch: Batch) -> Results:
        """What is taken from the model where there is nothing to compare with."""
        inputs = {name: value for name, value in batch.items() if name not in GOLD}
        return self.answers(call(model, inputs, None), batch)

    def rows(self) -> Iterable[tuple[str, str | dict]]:
        """The predictions, in the order and in the format of the data: a suffix, and a line or the columns of a table."""
        return ()

    def compute(self, results: Results) -> dict[str, float]:
        return {"loss": mean_loss(results)}

    def report(self, folder: Path) -> None: ...

    def training_figures(self, outputs: ModelOutput, batch: Batch) -> dict[str, float]:
        """Figures of a micro-batch of training for the log, beside the losses."""
        return {}

    def names(self, model: nn.Module, accelerator: Accelerator) -> list[str]:
        """The figures that it will give: those of its first batch. The run that follows is not changed by it."""
        with torch.random.fork_rng():
            return list(self(model, accelerator, most=1))

    @torch.no_grad()
    def __call__(self, model: nn.Module, accelerator: Accelerator, most: int | None = None) -> dict[str, float]:
        """The processes share the batches; every item counts once, in the order of the data, however many there are. All
        call the model equally often, as a model in shards needs: what one evaluates a second time is left out.

        most: the number of batches, if not all of them."""
        model.eval()
        divides, results, count = divides_by_count(model), [], min(len(self.batches), most or len(self.batches))
        starts = range(0, count, accelerator.num_processes)
        for first in with_bar(starts, "evaluate", most is None and accelerator.is_main_process):
            index = (first + accelerator.process_index) % count
            batch = send_to_device(self.batches[index], accelerator.device)
            with accelerator.autocast():
                outputs = call(model, batch, batch["num_items_in_batch"] if divides else None)
                results.append((index, {**self.collect(outputs, batch), **self.generate(model, batch)}))
        model.train()
        by_index = dict(gather_object(results))
        self.results = joined([by_index[index] for index in range(count)])
        return self.compute(self.results)

    @torch.inference_mode()
    def predict(self, model: PreTrainedModel) -> Iterable[tuple[str, str | dict]]:
        """The predictions for data that needs no answers."""
        results = []
        for index in with_bar(range(len(self.batches)), "predict"):
            results.append(self.answer(model, send_to_device(self.batches[index], model.device)))
        self.results = joined(results)
        return self.rows()


def with_bar(steps: range, name: str, shown: bool = True) -> Iterable[int]:
    return tqdm(steps, name, leave=False, delay=BAR_INTERVAL, mininterval=BAR_INTERVAL, disable=not shown)


def joined(results: list[Results]) -> Results:
    return {name: np.concatenate([result[name] for result in results]) for name in results[0]}


def array(tensor: Tensor) -> np.ndarray:
    """bfloat16, which numpy does not have, as float32."""
    return (tensor.float() if tensor.is_floating_point() else tensor).detach().cpu().numpy()


def loss_and_items(outputs: ModelOutput, batch: Batch, name: str = "loss") -> Results:
    """A loss as a sum and a count: batches of different size then weigh what they should. Without items there is no
    loss."""
    items = num_items(batch)[None]
    return {name: array(torch.where(items > 0, outputs[name].float() * items, 0.0)), "items": array(items)}


def mean_loss(results: Results, name: str = "loss") -> float:
    items = results["items"].sum()
    return float(results[name].sum(dtype=np.float64) / items) if items else math.nan


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # above that a float is infinite
