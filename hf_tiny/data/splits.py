"""Data to train on, to evaluate on and to test with: where each part comes from, what is held out, how much of it is taken."""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hf_tiny.arguments import flag
from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class SplitArguments:
    """Which data. With neither files nor a data set the built-in data is used."""

    train_file: list[str] | None = flag(None, "Files, folders or globs, each also .gz.")
    validation_file: list[str] | None = flag(None, "The same to evaluate on; without it a part of it is held out.")
    test_file: list[str] | None = flag(None, "The same to evaluate the finished model on.")
    dataset_name: str | None = flag(None, "A data set on the Hub, or a folder of one.")
    dataset_config_name: str | None = flag(None, "Its configuration.")
    validation_split_percentage: float = flag(10.0, "How much is held out when there is no validation data.")
    max_train_samples: int | None = flag(None, "Train on this many examples, the same for every --seed.")
    max_eval_samples: int | None = flag(None, "Evaluate on this many examples, the same for every --seed.")

    @property
    def patterns(self) -> dict[str, list[str]]:
        """What was given for each split."""
        given = {split: vars(self)[f"{split}_file"] for split in SPLITS}
        return {split: patterns for split, patterns in given.items() if patterns}

    def name_of_data(self, builtin: str) -> str:
        """As the model card names it."""
        return ", ".join(self.train_file or [self.dataset_name or f"hf_tiny's built-in {builtin}"])


def check(arguments: SplitArguments) -> None:
    for name in ("max_train_samples", "max_eval_samples"):
        if (limit := vars(arguments)[name]) is not None and limit < 1:
            raise InputError(f"--{name} {limit}: it must be above 0.")
    if arguments.train_file and arguments.dataset_name:
        raise InputError("Give --train_file or --dataset_name, not both.")
    if (arguments.validation_file or arguments.test_file) and not (arguments.train_file or arguments.dataset_name):
        raise InputError("--validation_file and --test_file need --train_file or --dataset_name beside them.")


def finish(
    splits: dict[str, list[Item]],
    arguments: SplitArguments,
    what: str,
    labels: Callable[[Item], tuple[str, ...]] = lambda item: (),
    together: Callable[[Item], Hashable] | None = None,
) -> dict[str, list[Item]]:
    """The splits in order, with something held out when nothing was given for it, and no more than was asked for.

    labels: what training needs at least one of each of, if an item has some.
    together: items for which it is the same are held out together, or not.
    """
    if "validation" not in splits:
        percentage = arguments.validation_split_percentage
        train, held_out = _hold_out(splits["train"], percentage, labels, together)
        splits = {**splits, "train": train, "validation": held_out}
    splits = {split: splits[split] for split in SPLITS if split in splits}
    for split, items in splits.items():
        training = split == "train"
        limit = arguments.max_train_samples if training else arguments.max_eval_samples
        splits[split] = _sample(items, limit, labels if training else lambda item: ())
    logger.info(", ".join(f"{split}: {len(items):,} {what}" for split, items in splits.items()))
    return splits


def _hold_out(items: list[Item], percentage: float, labels: Callable, together: Callable | None) -> tuple[list, list]:
    """Held out by chance, but the same for every seed: all runs are evaluated on the same. An item with a label that no
    other has stays in training, where it can be learned."""
    keys = list(range(len(items))) if together is None else [together(item) for item in items]
    groups = list(dict.fromkeys(keys))
    count = round(len(groups) * percentage / 100) if 0 < percentage < 100 else 0
    chosen = {groups[place] for place in np.random.default_rng(0).permutation(len(groups))[:count]}
    known = {label for key, item in zip(keys, items, strict=True) if key not in chosen for label in labels(item)}
    held_out = [key in chosen and known.issuperset(labels(item)) for key, item in zip(keys, items, strict=True)]
    if not 0 < sum(held_out) < len(items):
        raise InputError(
            f"--validation_split_percentage {percentage:g}: of {len(items)} examples this holds out "
            f"{sum(held_out)}, and a run needs some to train on and some to evaluate on. Use another number, such as 10, or "
            "give --validation_file."
        )
    parts = ([item for item, out in zip(items, held_out, strict=True) if out == part] for part in (False, True))
    return tuple(parts)


def _sample(items: list[Item], limit: int | None, labels: Callable) -> list[Item]:
    """A choice that is the same for every seed, in the order of the files; of each label at least one."""
    if limit is None or limit >= len(items):
        return items
    seen, first, rest = set(), [], []
    for index in np.random.default_rng(0).permutation(len(items)).tolist():
        (rest if seen.issuperset(labels(items[index])) else first).append(index)
        seen.update(labels(items[index]))
    return [items[index] for index in sorted((first + rest)[:limit])]
