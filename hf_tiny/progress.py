"""How far a run is: its best figure so far, where its time goes, and when it will end."""

import math
import time
from datetime import datetime, timedelta
from pathlib import Path

from .arguments import read_unchanged, recipe_of_run
from .callbacks import TrainState
from .data.batches import Prefetcher, Source
from .errors import InputError
from .optim import warmup_length
from .processes import on_main

TIMED_STEPS = 8  # --max_minutes is worked out from so many steps,
TIMED_SHARE = 1 / 60  # or more for this share of the time
# Ends of names of figures that should fall: all others should rise.
LOWER_IS_BETTER = ("loss", "nll", "ppl", "perplexity", "bits_per_byte", "mse", "mae")


def new_state(config, batches: Source, processes: int) -> TrainState:
    per_step, steps = processes * config.gradient_accumulation_steps, config.max_steps
    if steps <= 0:
        steps = math.ceil(config.num_train_epochs * len(batches) / per_step)
    warmup = warmup_length(config.warmup_steps, steps)
    return TrainState(max_steps=steps, warmup_steps=warmup, micro_batches_per_step=per_step)


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
        data, whole = self.spent["data"], self.in_steps()
        return {"data_wait_share": data / whole, "outside_model_share": (data + self.spent["loop"]) / whole}


# How long


class Forecast:
    """Says once, after the first steps, when the run will end."""

    FROM, TO = 2, 12  # steps that are timed; those before take longer

    def __init__(self, state: TrainState):
        self.began, self.since = state.step, 0.0

    def said(self, state: TrainState) -> str:
        taken = state.step - self.began
        if taken == self.FROM:
            self.since = state.seconds
        if taken != self.TO or state.step == state.max_steps:
            return ""
        left = (state.max_steps - state.step) * (state.seconds - self.since) / (self.TO - self.FROM)
        end = datetime.now() + timedelta(seconds=min(left, 1e10))
        text = f"{state.max_steps:,} steps: about {duration(left)} more, until {end:%Y-%m-%d %H:%M}."
        if left > 86_400:
            text += (
                " That is more than a day. A smaller --size or fewer --max_steps take less; --max_minutes 60 trains for an "
                "hour, with a schedule of that length. A run that is stopped can be resumed, and its checkpoints can be used."
            )
        return text


def duration(seconds: float) -> str:
    """As people say it: 40 seconds, 12 minutes, 3.5 hours, 428 days."""
    for size, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {name}"
    return f"{seconds:.0f} seconds"


def time_steps(run, minutes: float) -> float:
    """Seconds of a step of a run of so many minutes, by steps that are undone: the weights are copied before and put
    back. The random numbers begin anew when the run starts or resumes."""
    weights = {name: weight.detach().clone() for name, weight in run.bare_model.state_dict().items()}
    scaler = run.accelerator.scaler and run.accelerator.scaler.state_dict()
    times: list[float] = []
    enough = TIMED_SHARE * 60 * minutes
    run.model.train()
    with Prefetcher(run.batches, run.accelerator, 0, run.config.gradient_accumulation_steps) as ahead:
        while on_main(lambda: len(times) < TIMED_STEPS or times[-1] - times[0] < enough):
            run.step(next(ahead))
            times.append(time.perf_counter())
    run.bare_model.load_state_dict(weights)
    run.optimizer.state.clear()
    if scaler:
        run.accelerator.scaler.load_state_dict(scaler)
    run.batches.load_state_dict({})  # a stream begins anew
    run.sums, run.timers = {}, Timers()
    return (times[-1] - times[1]) / (len(times) - 2)  # the first steps take longer


def time_evaluation(run) -> float:
    if run.evaluate is None:
        return 0.0
    run.evaluate.names(run.bare_model, run.accelerator)  # what is loaded late is loaded now
    began = time.perf_counter()
    run.evaluate.names(run.bare_model, run.accelerator)
    return (time.perf_counter() - began) * len(run.evaluate.batches) / run.world


def steps_within(seconds: float, step: float, evaluation: float, eval_steps: int) -> int:
    """How many steps, with the evaluations between them and at the end, take so long."""
    each = step + (evaluation / eval_steps if eval_steps else 0.0)
    return max(1, int((seconds - evaluation) / each))


def earlier_length(output_dir: Path, resumed_from: str | None) -> int | None:
    """The --max_steps of the run that is resumed, which its recipe.yaml has; None: there is none."""
    if resumed_from is None:
        return None
    recipe = recipe_of_run(str(output_dir), resumed_from)
    try:
        steps = read_unchanged(recipe)["max_steps"] if recipe.exists() else -1
    except (OSError, ValueError, LookupError) as error:
        raise InputError(f"{recipe} cannot be read ({error}): give the --max_steps of the run.") from error
    return steps if steps > 0 else None
