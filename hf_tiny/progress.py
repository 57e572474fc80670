"""How far a run is: its best figure so far, and where its time goes."""

import math
import time

# Ends of names of figures that should fall: all others should rise.
LOWER_IS_BETTER = ("loss", "nll", "ppl", "perplexity", "bits_per_byte", "mse", "mae")


def best_metric(name: str) -> str:
    """As it is called in metrics.jsonl: `accuracy` is `eval_accuracy`, as in Trainer."""
    return f"eval_{name.removeprefix('eval_')}"


def is_better(value: float, best: float | None, config) -> bool:
    """Whether a figure beats the best one so far, if there is one: NaN never does."""
    greater = config.greater_is_better
    if greater is None:
        greater = not config.metric_for_best_model.endswith(LOWER_IS_BETTER)
    if math.isnan(value):
        return False
    return best is None or (value > best if greater else value < best)


class Timers:
    """Seconds by what they were spent on."""

    def __init__(self):
        self.spent = dict.fromkeys(("start", "data", "model", "optimizer", "loop", "evaluate", "save"), 0.0)
        self._mark = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last lap was spent on `name`."""
        now = time.perf_counter()
        self.spent[name] += now - self._mark
        self._mark = now

    def in_steps(self) -> float:
        return max(1e-9, sum(self.spent[name] for name in ("data", "model", "optimizer", "loop")))

    def shares(self) -> dict[str, float]:
        """Of the time in steps, how much went into waiting for data and how much outside model and optimiser."""
        outside = self.spent["data"] + self.spent["loop"]
        return {
            "data_wait_share": self.spent["data"] / self.in_steps(),
            "outside_model_share": outside / self.in_steps(),
        }
