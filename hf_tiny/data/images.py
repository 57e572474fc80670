"""Pictures with or without a label, from folders, idx files, tables or the Hub. They are found here and decoded later."""

import io
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path

import datasets
import numpy as np
from accelerate import PartialState
from PIL import Image
from sklearn.datasets import load_digits

from hf_tiny.arguments import flag
from hf_tiny.data import files
from hf_tiny.data.splits import SPLITS, SplitArguments, check, finish
from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FILES = (*PICTURES, ".parquet")
HELD_OUT, DIGITS_HELD_OUT = 10.0, 25.0  # per cent


@dataclass(frozen=True, kw_only=True)
class ImageArguments(SplitArguments):
    """Which pictures, and how large they become. With neither files nor a data set: scikit-learn's digits."""

    train_file: list[str] | None = flag(None, "Folders of pictures (one of each class), idx files, parquet, or globs.")
    image_column: str = flag("image", "The column of a table that holds the picture.")
    label_column: str = flag("label", "The column of a table that holds the label.")
    image_size: list[int] | None = flag(
        None, "One number, or height and width; by default the model's or the pictures'."
    )
    validation_split_percentage: float | None = flag(
        None, "How much is held out when there is no validation data; by default 10, of the digits 25."
    )
    skip_bad_images: bool = flag(False, "Leave out and count pictures that cannot be read, instead of stopping.")

    @property
    def data_name(self) -> str:
        """As the model card names it."""
        return ", ".join(self.train_file or [self.dataset_name or "scikit-learn's digits"])


@dataclass(frozen=True)
class Picture:
    load: Callable[[], Image.Image]
    label: str | None
    place: str

    @property
    def labels(self) -> tuple[str, ...]:
        return () if self.label is None else (self.label,)


# Reading


def read_pictures(arguments: ImageArguments, labelled: bool) -> dict[str, list[Picture]]:
    """The pictures of `train`, `validation` and, if there is one, `test`. Without `labelled` nobody asks for labels."""
    _check(arguments)
    splits = {}
    if arguments.dataset_name:
        with PartialState().local_main_process_first():  # the first fills the cache for the others
            splits = _hub_pictures(arguments, labelled)
    elif not arguments.train_file:
        splits = {"train": _digits()}
    if arguments.validation_split_percentage is None:
        percentage = HELD_OUT if arguments.train_file or arguments.dataset_name else DIGITS_HELD_OUT
        arguments = replace(arguments, validation_split_percentage=percentage)
    for split, patterns in arguments.patterns.items():
        splits[split] = list(_file_pictures(patterns, f"--{split}_file", arguments, labelled))
    if labelled and len(classes := {picture.label for picture in splits["train"]}) == 1:
        raise InputError(
            f"All {len(splits['train'])} training pictures are of one class, {classes.pop()!r}: there is nothing to learn "
            "with fewer than 2. --train_file takes the folder that holds a folder for each class."
        )
    return finish(splits, arguments, "pictures", lambda picture: picture.labels if labelled else ())


def _check(arguments: ImageArguments) -> None:
    check(arguments)
    if (size := arguments.image_size) is not None and (len(size) > 2 or min(size) < 1):
        raise InputError(f"--image_size {' '.join(map(str, size))}: give one number, or height and width.")


def _digits() -> list[Picture]:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 and grey."""
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)
    return _array_pictures(pixels, map(str, digits.target.tolist()), "scikit-learn's digits")


def _array_pictures(pixels: np.ndarray, labels: Iterable[str | None], path: str) -> list[Picture]:
    return [
        Picture(partial(Image.fromarray, array), label, f"{path}, picture {number}")
        for number, (array, label) in enumerate(zip(pixels, labels, strict=True), 1)
    ]


def _file_pictures(patterns: list[str], option: str, arguments: ImageArguments, labelled: bool) -> Iterator[Picture]:
    for pattern in dict.fromkeys(map(os.path.expanduser, patterns)):
        if os.path.isdir(pattern):
            root = Path(pattern)
            found = list(_class_pictures(root, option)) if labelled else [(path, "") for path in _inside(root)]
        else:  # a glob may also match folders, each of a class
            matches = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
            found = [path for match in map(Path, matches) for path in (_inside(match) if match.is_dir() else [match])]
            found = [(path, path.parent.name) for path in found]
        if not found:  # it says what is missing
            found = [(Path(path), "") for path in files.expand([pattern], option, FILES)]
        for path, label in found:
            if files.kind(path) == ".parquet":
                yield from _table_pictures(str(path), arguments, labelled)
            elif files.kind(path) in PICTURES:
                yield Picture(partial(Image.open, path), label if labelled else None, str(path))
            else:
                yield from _idx_pictures(str(path), option, labelled)


def _inside(root: Path) -> Iterator[Path]:
    """All files of a folder and the folders in it, links too."""
    for folder, subfolders, names in os.walk(root, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if files.kind(name) in FILES)


def _class_pictures(root: Path, option: str) -> Iterator[tuple[Path, str]]:
    """The files of each folder, with its name as their label."""
    empty = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")}
    for path in _inside(root):
        label = path.relative_to(root).parts[0]
        empty.discard(label)
        if path.parent == root and files.kind(path) in PICTURES:
            raise InputError(f"{path}: it lies in no class. {option} {root} needs a folder for each class.")
        yield path, label
    if empty:
        raise InputError(
            f"{option} {root}: the class folder {min(empty)!r} is empty: it has no picture ({', '.join(PICTURES)}). "
            "Put some in it, or remove it."
        )


def _idx_pictures(path: str, option: str, labelled: bool) -> list[Picture]:
    """The labels lie beside the pictures: train-labels-idx1-ubyte for train-images-idx3-ubyte, each with or without .gz."""
    pixels, labels = _read_idx(path, (3, 4)), None
    if labelled:
        folder, name = os.path.split(path)
        wanted = re.sub(r"idx\d", "idx1", name.replace("images", "labels")).removesuffix(".gz")
        found = [full for end in (".gz", "") if os.path.exists(full := os.path.join(folder, wanted + end))]
        if not found or wanted == name.removesuffix(".gz"):
            raise InputError(
                f"{option} {path}: its labels are missing. They are looked for in {os.path.join(folder, wanted)}, or the "
                "same with .gz."
            )
        labels = list(map(str, _read_idx(found[0], (1,)).tolist()))
        if len(labels) != len(pixels):
            raise InputError(f"{found[0]} has {len(labels)} labels, and {path} has {len(pixels)} pictures.")
    return _array_pictures(pixels, labels or [None] * len(pixels), path)


def _read_idx(path: str, axes: tuple[int, ...]) -> np.ndarray:
    with files.readable(path), files.open_bytes(path) as file:
        raw = file.read()
    if raw[:3] != b"\0\0\x08" or raw[3] not in axes:
        raise InputError(
            f"{path}: neither a picture ({', '.join(PICTURES)}), nor .parquet, nor an idx file of bytes with "
            f"{' or '.join(map(str, axes))} axes."
        )
    shape = tuple(np.frombuffer(raw, ">i4", raw[3], 4).tolist())
    start = 4 + 4 * len(shape)
    if len(raw) - start != np.prod(shape):
        raise InputError(f"{path}: it is cut off or damaged: {len(raw) - start:,} bytes where {shape} need others.")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _table_pictures(path: str, arguments: ImageArguments, labelled: bool) -> Iterator[Picture]:
    for place, row in files.table_rows(path, "strict", Counter()):
        _check_column(arguments.image_column, "--image_column", row, place)
        cell, label = row[arguments.image_column], None
        if labelled:
            _check_column(arguments.label_column, "--label_column", row, place)
            label = row[arguments.label_column]
            if label is None:
                raise InputError(f"{place}: the label, column {arguments.label_column!r}, is empty.")
        raw = cell["bytes"] if isinstance(cell, dict) else cell
        if not isinstance(raw, bytes):
            raise InputError(
                f"{place}: {arguments.image_column!r} must hold the bytes of a picture. See --image_column."
            )
        yield Picture(partial(_from_bytes, raw), None if label is None else str(label), place)


def _hub_pictures(arguments: ImageArguments, labelled: bool) -> dict[str, list[Picture]]:
    splits, name = {}, f"--dataset_name {arguments.dataset_name}"
    for split, data in files.load_hub(arguments.dataset_name, arguments.dataset_config_name).items():
        if split not in SPLITS:
            continue
        _check_column(arguments.image_column, "--image_column", data.features, name)
        labels = [None] * len(data)
        if labelled:
            _check_column(arguments.label_column, "--label_column", data.features, name)
            names = files.class_names(data.features).get(arguments.label_column)
            labels = data[arguments.label_column]
            labels = [names[x] if x >= 0 else None for x in labels] if names else list(map(str, labels))
            if None in labels:
                logger.warning(f"{name}: some labels of its split {split} are hidden; the split is left out.")
                continue
        data = data.cast_column(arguments.image_column, datasets.Image(decode=False))
        load = partial(_from_row, data.select_columns([arguments.image_column]))
        place = f"{arguments.dataset_name}, {split}, row "
        splits[split] = [Picture(partial(load, n), label, f"{place}{n + 1}") for n, label in enumerate(labels)]
    return splits


def _check_column(column: str, option: str, columns: Iterable[str], place: str) -> None:
    if column not in columns:
        raise InputError(
            f"{place}: there is no column {column!r}, only {', '.join(map(repr, columns))}. Name the right one with {option}."
        )


def _from_bytes(raw: bytes) -> Image.Image:
    return Image.open(io.BytesIO(raw))


def _from_row(data: datasets.Dataset, number: int) -> Image.Image:
    (cell,) = data[number].values()
    return Image.open(cell["path"]) if cell["bytes"] is None else _from_bytes(cell["bytes"])
