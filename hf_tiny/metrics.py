"""Metrics that need no network, and what they have in common. Apart from evaluation.py: `evaluate` takes time to import."""

import math
from typing import ClassVar

import datasets
import evaluate
import numpy as np


class Metric(evaluate.Metric):
    """A metric of `evaluate` that is part of this package, so that nothing is downloaded. A subclass names the type of what
    it compares and has `_compute`."""

    INPUTS: ClassVar[dict] = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}

    def __init__(self):
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=datasets.Features(self.INPUTS))


def share(right: np.ndarray) -> float:
    return float(np.mean(right)) if np.size(right) else math.nan


def majority(references: np.ndarray) -> float:
    """The accuracy of always answering with the most frequent label."""
    return share(references == np.bincount(references).argmax()) if len(references) else math.nan


def macro_f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """The mean over the labels that occur, as gold or as answer."""
    from sklearn.metrics import f1_score  # late: it takes a second to import

    return float(f1_score(references, predictions, average="macro", zero_division=0)) if len(references) else math.nan
