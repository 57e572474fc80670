"""What is measured while training and on held-out data; `evaluate.Metric`s that need no network."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import datasets
import evaluate
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from sklearn.metrics import precision_recall_fscore_support, roc_auc_score
from torch import nn
from transformers.utils import ModelOutput

from .data.collate import Batch, Batches
from .train import Callback, TrainState

logger = logging.getLogger(__name__)
Results = dict[str, np.ndarray]


@dataclass(frozen=True)
class Evaluation:
    """`collect` takes what is needed from one batch's outputs, item by item; `compute` turns all of it into figures."""

    batches: Batches
    collect: Callable[[ModelOutput, Batch], Results]
    compute: Callable[[Results], dict[str, float]]

    @torch.no_grad()
    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """The processes share the batches; every item counts once, in the order of the data, however many there are."""
        model.eval()
        results = []
        for index in range(accelerator.process_index, len(self.batches), accelerator.num_processes):
            batch = send_to_device(self.batches[index], accelerator.device)
            with accelerator.autocast():
                results.append((index, self.collect(model(**batch), batch)))
        model.train()
        ordered = [result for _, result in sorted(gather_object(results), key=lambda pair: pair[0])]
        return self.compute({name: np.concatenate([result[name] for result in ordered]) for name in ordered[0]})


class ReplacedTokenDetection(evaluate.Metric):
    """Scores above 0 say "replaced". The majority entropy is the loss of always answering with the overall share of
    replaced tokens: a discriminator that does no better has learned nothing."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("float32"), "references": datasets.Value("int8")}
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", features=datasets.Features(features), format="numpy"
        )

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        found = predictions > 0
        precision, recall, _, _ = precision_recall_fscore_support(references, found, average="binary", zero_division=0)
        share = references.mean()
        both = 0 < share < 1
        return {
            "rtd_accuracy": float((found == references).mean()),
            "rtd_precision": float(precision),
            "rtd_recall": float(recall),
            "rtd_auc": float(roc_auc_score(references, predictions)) if both else math.nan,
            "rtd_majority_entropy": float(-share * math.log(share) - (1 - share) * math.log(1 - share))
            if both
            else 0.0,
        }


def collect_electra(outputs: ModelOutput, batch: Batch) -> Results:
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    counts = batch["num_items_in_batch"]
    return {
        "scores": outputs.logits.detach().float()[valid].cpu().numpy(),
        "replaced": outputs.replaced[valid].cpu().numpy(),
        "mlm_correct": outputs.mlm_logits.argmax(-1).eq(outputs.mlm_labels).cpu().numpy(),
        # Sums and counts, not means: batches of different size then weigh what they should.
        "mlm_loss": (outputs.mlm_loss.detach() * counts[0])[None].cpu().numpy(),
        "rtd_loss": (outputs.rtd_loss.detach() * counts[1])[None].cpu().numpy(),
    }


def compute_electra(discriminator_weight: float) -> Callable[[Results], dict[str, float]]:
    metric = ReplacedTokenDetection(keep_in_memory=True)

    def compute(results: Results) -> dict[str, float]:
        mlm_loss = float(results["mlm_loss"].sum() / results["mlm_correct"].size)
        rtd_loss = float(results["rtd_loss"].sum() / results["replaced"].size)
        return {
            "loss": mlm_loss + discriminator_weight * rtd_loss,
            "mlm_loss": mlm_loss,
            "mlm_accuracy": float(results["mlm_correct"].mean()),
            "rtd_loss": rtd_loss,
            **metric._compute(results["scores"], results["replaced"]),
        }

    return compute


class CollapseWarning(Callback):
    """Says in words when the discriminator does no better than the majority class, which its falling loss hides."""

    def on_evaluate(self, state: TrainState, metrics: dict[str, float]) -> None:
        if state.step < state.warmup_steps:
            return
        loss, entropy = metrics["eval_rtd_loss"], metrics["eval_rtd_majority_entropy"]
        if loss >= entropy or metrics["eval_rtd_recall"] == 0:
            logger.warning(
                f"step {state.step}: the discriminator has collapsed to the majority class or has not left it yet (RTD loss "
                f"{loss:.3f}, majority entropy {entropy:.3f}, recall {metrics['eval_rtd_recall']:.3f}). If this lasts: "
                "rotary positions, a smaller generator, a lower learning rate, or more steps."
            )
