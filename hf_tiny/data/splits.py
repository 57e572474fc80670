"""Data to train on, to evaluate on and to test with: where each split comes from, what is held out, how much is taken."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from accelerate import PartialState

from hf_tiny.arguments import flag
from hf_tiny.data import sources
from hf_tiny.data.encoding import Decoding, EncodingArguments
from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
HELD_OUT = 10.0  # per cent
NAMED = 3  # of many rows that are wrong alike


class Labelled(Protocol):
    """What is split: it knows where it comes from and which labels it has."""

    @property
    def place(self) -> str: ...

    @property
    def labels(self) -> tuple[str, ...]: ...


Item = TypeVar("Item", bound=Labelled)


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Which data. With neither files nor a dataset, the built-in data is used."""

    GROUP: ClassVar[str] = "data"

    train_file: list[str] | None = flag(None, "Files, folders or globs, each also .gz.")
    validation_file: list[str] | None = flag(
        None, "The same to evaluate on. Without it, a part of the data is held out."
    )
    dataset_name: str | None = flag(None, "A dataset on the Hub, or the folder of one.")
    dataset_config_name: str | None = flag(None, "The configuration of the dataset.")
    validation_split_percentage: float | None = flag(
        HELD_OUT, "How much is held out when there is no validation data.", above=0, below=100
    )

    @property
    def patterns(self) -> dict[str, list[str]]:
        """The files that were given for each split."""
        given = {split: vars(self).get(f"{split}_file") for split in SPLITS}
        return {split: patterns for split, patterns in given.items() if patterns}

    @property
    def is_builtin(self) -> bool:
        return not (self.train_file or self.dataset_name)

    def data_name(self, builtin: str) -> str:
        """As the model card names the data."""
        return ", ".join(self.train_file or [self.dataset_name or f"hf_tiny's built-in {builtin}"])

    def check_data(self) -> None:
        if self.train_file and self.dataset_name:
            raise InputError("Give --train_file or --dataset_name, not both.")
        if self.is_builtin and self.patterns:
            raise InputError("--validation_file and --test_file need --train_file or --dataset_name beside them.")


@dataclass(frozen=True, kw_only=True)
class SplitArguments(DataArguments):
    """Examples, and how many of them."""

    test_file: list[str] | None = flag(None, "The same to evaluate the finished model on.")
    max_train_samples: int | None = flag(None, "Train on this many examples, the same for every --seed.", low=1)
    max_eval_samples: int | None = flag(None, "Evaluate on this many examples, the same for every --seed.", low=1)


@dataclass(frozen=True, kw_only=True)
class TextSplitArguments(SplitArguments, EncodingArguments):
    """Data in text files."""


def read_splits(
    arguments: TextSplitArguments,
    builtin_files: Callable[[], tuple[list[str], list[str]]],
    from_files: Callable[[list[str], str, Decoding], Iterable[Item]],
    from_row: Callable[[str, str, dict], Item],
    what: str,
    *,
    keep: Callable[[Item, Counter], bool] = lambda item, counts: True,
    labels: Callable[[list[Item]], bool] = lambda items: False,
    together: Callable[[Item], Hashable] | None = None,
) -> dict[str, list[Item]]:
    """The items of `train`, `validation` and, if there is one, `test`: from files, from the Hub, or built in.

    from_files: reads the files, folders and globs of a flag; it may count what it skips.
    from_row: makes an item of the suffix, place and columns of a row.
    keep: whether an item is used; it may count what is not.
    labels: whether the items, those to train on, have labels of which training needs at least one of each.
    together: items for which it is the same are held out together, or not at all.
    """
    arguments.check_data()
    decoding, splits, given = arguments.decoding, {}, arguments.patterns
    with PartialState().local_main_process_first():  # the first process fills the cache for the others
        if arguments.dataset_name:
            rows = hub_rows(arguments.dataset_name, arguments.dataset_config_name)
            make = partial(from_row, ".jsonl")
            splits = {split: list(each_labelled(make, part)) for split, part in rows.items()}
        elif not arguments.train_file:
            given["train"], given["validation"] = builtin_files()
    for split, patterns in given.items():
        splits[split] = list(from_files(patterns, f"--{split}_file", decoding))
    for split, items in splits.items():
        splits[split] = [item for item in items if keep(item, decoding.counts)]
        if not splits[split]:
            place = ", ".join(given.get(split, [f"--dataset_name {arguments.dataset_name}"]))
            purpose = "train" if split == "train" else "evaluate"
            raise InputError(f"{place}: there are no {what} in it to {purpose} on.")
    for problem, count in decoding.counts.items():
        logger.warning(f"{count:,} {problem}")
    every_label = labels(splits["train"])
    return finish(splits, arguments, what, (lambda item: item.labels) if every_label else lambda item: (), together)


class NoLabel(InputError):
    """A row without a label."""

    def __init__(self, place: str, problem: str):
        super().__init__(f"{place}: {problem}. Give one, or drop the row.")
        self.place, self.problem = place, problem


def each_labelled(make: Callable[[str, dict], Item], rows: Iterable[tuple[str, dict]]) -> Iterator[Item]:
    """What is made of the place and the columns of each row. Those that lack a label are named together."""
    missing, labelled = [], 0
    for row in rows:
        try:
            yield make(*row)
            labelled += 1
        except NoLabel as error:
            missing.append(error)
    if len(missing) == 1:
        raise missing[0]
    if missing:
        first, *others = missing
        some = ", ".join(error.place for error in others[:NAMED]) + (" and others" if others[NAMED:] else "")
        raise InputError(
            f"{first.place}: {first.problem}. {len(missing):,} of {len(missing) + labelled:,} rows lack a label, also {some}. "
            "Give them, or drop these rows."
        )


def hub_rows(name: str, config: str | None) -> dict[str, list[tuple[str, dict]]]:
    """The place and the columns of every row, by split. A test split whose labels are hidden is left out."""
    splits = {}
    for split, data in sources.load_hub(name, config).items():
        names = sources.class_names(data.features)
        rows = [sources.named(row, names) for row in data] if split in SPLITS else []
        if split == "test" and rows and any(all(_hidden(row[column]) for row in rows) for column in names):
            logger.warning(f"--dataset_name {name}: the labels of its test split are hidden. The split is left out.")
        elif rows:
            splits[split] = [(f"{name}, {split}, row {number}", row) for number, row in enumerate(rows, 1)]
    return splits


def _hidden(label: str | list | None) -> bool:
    return label is None or label == [None] * len(label)


def finish(
    splits: dict[str, list[Item]],
    arguments: SplitArguments,
    what: str,
    labels: Callable[[Item], tuple[str, ...]] = lambda item: (),
    together: Callable[[Item], Hashable] | None = None,
) -> dict[str, list[Item]]:
    """The splits in order, with a part held out when there is no validation data, and at most as many items as allowed.

    labels: what training needs at least one of each of, if an item has some.
    """
    if "validation" not in splits:
        percentage = arguments.validation_split_percentage or HELD_OUT
        train, held_out = _hold_out(splits["train"], percentage, labels, together)
        splits = {**splits, "train": train, "validation": held_out}
    splits = {split: splits[split] for split in SPLITS if split in splits}
    say_if_seen(splits, what)
    for split, items in splits.items():
        training = split == "train"
        limit = arguments.max_train_samples if training else arguments.max_eval_samples
        splits[split] = _sample(items, limit, labels if training else lambda item: ())
    logger.info(", ".join(f"{split}: {len(items):,} {what}" for split, items in splits.items()))
    return splits


def say_if_seen(splits: dict[str, list[Item]], what: str) -> None:
    trained = {item.place for item in splits["train"]}
    for split in splits.keys() - {"train"}:
        if seen := [item.place for item in splits[split] if item.place in trained]:
            logger.warning(
                f"{split}: {len(seen):,} of {len(splits[split]):,} {what}, such as {seen[0]}, are also trained on. Its "
                "scores say nothing of new data."
            )


def _hold_out(items: list[Item], percentage: float, labels: Callable, together: Callable | None) -> list[list]:
    """Held out at random, but the same for every seed: all runs are evaluated on the same data. An item with a label that
    no other has stays in training, where it can be learned."""
    keys = list(range(len(items))) if together is None else [together(item) for item in items]
    groups = list(dict.fromkeys(keys))
    count = round(len(groups) * percentage / 100)
    chosen = {groups[place] for place in np.random.default_rng(0).permutation(len(groups))[:count]}
    known = {label for key, item in zip(keys, items, strict=True) if key not in chosen for label in labels(item)}
    out = (key in chosen and known.issuperset(labels(item)) for key, item in zip(keys, items, strict=True))
    held_out = np.fromiter(out, dtype=bool)
    if not 0 < held_out.sum() < len(items):
        raise InputError(
            f"--validation_split_percentage {percentage:g}: of {len(items)} examples this holds out {held_out.sum()}, but "
            f"a run needs some to train on and some to evaluate on. Use a {'lower' if held_out.any() else 'higher'} number, "
            "or give more examples or --validation_file."
        )
    return [list(compress(items, chosen)) for chosen in (~held_out, held_out)]


def _sample(items: list[Item], limit: int | None, labels: Callable) -> list[Item]:
    """A choice that is the same for every seed, in the order of the files, with at least one item of each label."""
    if limit is None or limit >= len(items):
        return items
    seen, first, rest = set(), [], []
    for index in np.random.default_rng(0).permutation(len(items)).tolist():
        (rest if seen.issuperset(labels(items[index])) else first).append(index)
        seen.update(labels(items[index]))
    return [items[index] for index in sorted((first + rest)[:limit])]


# Labels


def find_labels(splits: dict[str, list[Item]], open_ended: bool = False) -> list[str]:
    """The labels of the training data, in order. A label that only other splits have is a mistake, unless labels are open
    ended, as tags that are joined from many features are: then it comes last, and is never predicted correctly."""
    labels = _ordered({label for item in splits["train"] for label in item.labels})
    if len(labels) < 2:
        raise InputError(
            f"The training data has {len(labels)} kind of label{''.join(f', {label!r}' for label in labels)}. There is "
            "nothing to learn with fewer than 2. See --label_column or --tag_field."
        )
    return known_labels(labels, chain.from_iterable(splits[split] for split in splits if split != "train"), open_ended)


def known_labels(labels: list[str], items: Iterable[Item], open_ended: bool) -> list[str]:
    """The labels that were trained on, and after them, where labels are open ended, those that only other items have."""
    known, unknown = set(labels), Counter()
    for item in items:
        for label in item.labels:
            if label not in known and not open_ended:
                some = ", ".join(labels[:20]) + (f" and {len(labels) - 20} more" if len(labels) > 20 else "")
                raise InputError(f"{item.place}: the label {label!r} is not in the training data. It has {some}.")
            unknown[label] += label not in known
    new = _ordered(+unknown)
    if new:
        logger.warning(f"{unknown.total():,} held-out labels, {len(new):,} different, are not in the training data")
    return labels + new


def _ordered(labels: Iterable[str]) -> list[str]:
    """Whole numbers by value, else alphabetically."""
    labels = sorted(labels)
    return sorted(labels, key=int) if all(label.removeprefix("-").isdecimal() for label in labels) else labels
