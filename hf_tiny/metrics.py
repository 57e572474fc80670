"""Metrics that need no network, and what they have in common."""

import math
from collections.abc import Callable
from typing import ClassVar

import datasets
import numpy as np


class Metric:
    """A metric of `evaluate` that is part of this package, so that nothing is downloaded. A subclass names the type of what
    it compares and has `_compute`."""

    INPUTS: ClassVar[dict] = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
    _compute: Callable[..., dict[str, float]]

    def compute(self, **given) -> dict[str, float]:
        import evaluate  # late: it takes a second, and training can begin without it

        info = evaluate.MetricInfo(description=self.__doc__, citation="", features=datasets.Features(self.INPUTS))
        parts = {"_info": lambda _: info, "_compute": lambda _, **checked: self._compute(**checked)}
        return type(type(self).__name__, (evaluate.Metric,), parts)(keep_in_memory=True).compute(**given)


def share(right: np.ndarray) -> float:
    return float(np.mean(right)) if np.size(right) else math.nan


def majority(references: np.ndarray) -> float:
    """The accuracy of always answering with the most frequent label."""
    return share(references == np.bincount(references).argmax()) if len(references) else math.nan


def macro_f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """The mean over the labels that occur, as gold or as answer."""
    from sklearn.metrics import f1_score  # late: it takes a second to import

    return float(f1_score(references, predictions, average="macro", zero_division=0)) if len(references) else math.nan
