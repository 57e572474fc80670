"""Images with or without a label, from folders, idx files, tables or the Hub: found first, decoded later, then batched."""

import hashlib
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path
from unicodedata import normalize

import datasets
import numpy as np
import torch
from accelerate import PartialState
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from hf_tiny.arguments import flag
from hf_tiny.data import sources
from hf_tiny.data.augment import Augment
from hf_tiny.data.batches import Batch, Batches
from hf_tiny.data.encoding import Decoding, open_bytes
from hf_tiny.data.splits import SPLITS, SplitArguments, finish
from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

IMAGES = (".png", ".jpg", ".jpeg", ".jfif", ".avif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FILES = (*IMAGES, ".parquet")
UNREAD = (".heic", ".heif", ".svg", ".dng", ".cr2", ".nef", ".arw")  # images that Pillow does not open
DIGITS_HELD_OUT = 25.0  # per cent
IN_MEMORY = 2**30  # bytes of decoded images
MEASURED = 2**24  # bytes, for the mean and the deviation
CHUNK = 64  # number of images that a thread decodes at once
SAMPLED = 256  # number of images that tell whether a dataset is grey, and whether it is the same
BROKEN = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)  # what Pillow raises


@dataclass(frozen=True, kw_only=True)
class ImageArguments(SplitArguments):
    """Which images, and how large they become. With neither files nor a dataset: scikit-learn's digits."""

    train_file: list[str] | None = flag(None, "Folders of images (one for each class), idx files, parquet, or globs.")
    image_column: str = flag("image", "The column of a table that holds the image.")
    label_column: str = flag("label", "The column of a table that holds the label.")
    image_size: list[int] | None = flag(
        None, "One number, or height and width; by default that of the model or of the images.", low=1
    )
    validation_split_percentage: float | None = flag(
        None,
        "How much is held out when there is no validation data; by default 10, of the digits 25.",
        above=0,
        below=100,
    )
    skip_bad_images: bool = flag(False, "Leave out and count images that cannot be read, instead of stopping.")


@dataclass(frozen=True)
class LabelledImage:
    """load: opens the image."""

    load: Callable[[], Image.Image]
    label: str | None
    place: str

    @property
    def labels(self) -> tuple[str, ...]:
        return () if self.label is None else (self.label,)


# Reading


def read_images(arguments: ImageArguments, labelled: bool) -> dict[str, list[LabelledImage]]:
    """The images of `train`, `validation` and, if there is one, `test`. Without `labelled` nobody asks for labels."""
    arguments.check_data()
    if (size := arguments.image_size) is not None and len(size) > 2:
        raise InputError(f"--image_size {' '.join(map(str, size))}: give one number, or height and width.")
    splits = {"train": _digits()} if arguments.is_builtin else {}
    if arguments.dataset_name:
        with PartialState().local_main_process_first():  # the first process fills the cache for the others
            splits = _hub_images(arguments.dataset_name, arguments, labelled)
    if arguments.is_builtin and arguments.validation_split_percentage is None:
        arguments = replace(arguments, validation_split_percentage=DIGITS_HELD_OUT)
    for split, patterns in arguments.patterns.items():
        splits[split] = list(file_images(patterns, f"--{split}_file", arguments, labelled))
    if labelled and len(classes := {image.label for image in splits["train"]}) == 1:
        raise InputError(
            f"All {len(splits['train'])} training images are of one class, {classes.pop()!r}: there is nothing to learn "
            "with fewer than 2. --train_file takes the folder that holds a folder for each class."
        )
    return finish(splits, arguments, "images", lambda image: image.labels if labelled else ())


def _digits() -> list[LabelledImage]:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 and grey."""
    from sklearn.datasets import load_digits  # late: it takes a second to import

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)
    return _array_images(pixels, map(str, digits.target.tolist()), "scikit-learn's digits")


def _array_images(pixels: np.ndarray, labels: Iterable[str | None], path: str) -> list[LabelledImage]:
    return [
        LabelledImage(partial(Image.fromarray, one), label, f"{path}, image {number}")
        for number, (one, label) in enumerate(zip(pixels, labels, strict=True), 1)
    ]


def file_images(patterns: list[str], option: str, arguments: ImageArguments, labelled: bool) -> Iterator[LabelledImage]:
    for pattern in dict.fromkeys(map(os.path.expanduser, patterns)):
        if os.path.isdir(pattern):
            root = Path(pattern)
            _say_unread(root, option)
            found = list(_class_files(root, option)) if labelled else [(path, "") for path in _inside(root)]
        else:  # a glob may also match folders, each of a class
            matches = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
            paths = [path for match in map(Path, matches) for path in (_inside(match) if match.is_dir() else [match])]
            found = [(path, path.parent.name) for path in paths]
        if not found:  # it says what is missing
            found = [(Path(path), "") for path in sources.expand([pattern], option, FILES)]
        for path, label in found:
            if sources.kind(path) == ".parquet":
                yield from _table_images(str(path), arguments, labelled)
            elif sources.kind(path) in IMAGES:
                # A Mac writes the names of folders in another form.
                name = normalize("NFC", label) if labelled else None
                yield LabelledImage(partial(Image.open, path), name, str(path))
            else:
                yield from _idx_images(str(path), option, labelled)


def _inside(root: Path) -> Iterator[Path]:
    """All files of a folder and the folders in it, links too, but for hidden ones and the images that runs have drawn."""
    for folder, subfolders, names in os.walk(root, followlinks=True):
        if folder != str(root) and any(sources.is_of_run(Path(folder, name)) for name in names):
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if name[0] != "." and sources.kind(name) in FILES)


def _say_unread(root: Path, option: str) -> None:
    """What telephones and cameras save is not left out without a word."""
    left_out = Counter(sources.kind(path) for path in root.rglob("*") if not sources.is_hidden(path.relative_to(root)))
    for suffix in UNREAD:
        if left_out[suffix]:
            logger.warning(
                f"{option} {root}: {left_out[suffix]:,} files that end in {suffix} are left out. Save them as .jpg."
            )


def _class_files(root: Path, option: str) -> Iterator[tuple[Path, str]]:
    """The files of each folder, with its name as their label."""
    empty = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")}
    for path in _inside(root):
        label = path.relative_to(root).parts[0]
        empty.discard(label)
        if path.parent == root and sources.kind(path) in IMAGES:
            raise InputError(f"{path}: it lies in no class. {option} {root} needs a folder for each class.")
        yield path, label
    if empty:
        raise InputError(
            f"{option} {root}: the class folder {min(empty)!r} is empty: it has no image ({', '.join(IMAGES)}). "
            "Put some in it, or remove it."
        )


def _idx_images(path: str, option: str, labelled: bool) -> list[LabelledImage]:
    """The labels lie beside the images: train-labels-idx1-ubyte for train-images-idx3-ubyte, each with or without .gz."""
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
            raise InputError(f"{found[0]} has {len(labels)} labels, and {path} has {len(pixels)} images.")
    return _array_images(pixels, labels or [None] * len(pixels), path)


def _read_idx(path: str, axes: tuple[int, ...]) -> np.ndarray:
    with sources.readable(path), open_bytes(path) as file:
        raw = file.read()
    if raw[:3] != b"\0\0\x08" or raw[3] not in axes:
        raise InputError(
            f"{path}: neither an image ({', '.join(IMAGES)}), nor .parquet, nor an idx file of bytes with "
            f"{' or '.join(map(str, axes))} axes."
        )
    shape = tuple(np.frombuffer(raw, ">i4", raw[3], 4).tolist())
    start = 4 + 4 * len(shape)
    if len(raw) - start != np.prod(shape):
        raise InputError(f"{path}: it is cut off or damaged: {len(raw) - start:,} bytes where {shape} need others.")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _table_images(path: str, arguments: ImageArguments, labelled: bool) -> Iterator[LabelledImage]:
    for place, row in sources.table_rows(path, Decoding()):
        cell, label = sources.cell(row, arguments.image_column, place, "--image_column"), None
        if labelled:
            label = sources.cell(row, arguments.label_column, place, "--label_column")
            if label is None:
                raise InputError(f"{place}: the label, column {arguments.label_column!r}, is empty.")
        raw = cell["bytes"] if isinstance(cell, dict) else cell
        if not isinstance(raw, bytes):
            raise InputError(
                f"{place}: {arguments.image_column!r} must hold the bytes of an image. See --image_column."
            )
        yield LabelledImage(partial(_from_bytes, raw), None if label is None else str(label), place)


def _hub_images(dataset: str, arguments: ImageArguments, labelled: bool) -> dict[str, list[LabelledImage]]:
    splits, name = {}, f"--dataset_name {dataset}"
    for split, data in sources.load_hub(dataset, arguments.dataset_config_name).items():
        if split not in SPLITS:
            continue
        sources.cell(data.features, arguments.image_column, name, "--image_column")
        labels: list[str | None] = [None] * len(data)
        if labelled:
            sources.cell(data.features, arguments.label_column, name, "--label_column")
            names = sources.class_names(data.features).get(arguments.label_column)
            column = data[arguments.label_column]
            labels = [names[x] if x >= 0 else None for x in column] if names else list(map(str, column))
            if None in labels:
                logger.warning(f"{name}: some labels of its split {split} are hidden. The split is left out.")
                continue
        data = data.cast_column(arguments.image_column, datasets.Image(decode=False))
        load = partial(_from_row, data.select_columns([arguments.image_column]))
        place = f"{dataset}, {split}, row "
        splits[split] = [LabelledImage(partial(load, n), label, f"{place}{n + 1}") for n, label in enumerate(labels)]
    return splits


def _from_bytes(raw: bytes) -> Image.Image:
    return Image.open(io.BytesIO(raw))


def _from_row(data: datasets.Dataset, number: int) -> Image.Image:
    (cell,) = data[number].values()
    return Image.open(cell["path"]) if cell["bytes"] is None else _from_bytes(cell["bytes"])


# Decoding


class BadImage(InputError):
    """One image that cannot be read."""


def decode(image: LabelledImage, size: tuple[int, int], channels: int) -> np.ndarray:
    """(channels, height, width), as transformers' pipelines load an image and its image processors resize it."""
    try:
        loaded = image.load()
        if loaded.mode[0] in "IF":
            raise ValueError(f"it has the mode {loaded.mode}, which has more than 8 bits; save it with 8")
        if loaded.format is not None:  # it comes from a file, and a camera may have been held upright
            loaded = ImageOps.exif_transpose(loaded)
        loaded = (loaded if loaded.mode == "L" else loaded.convert("RGB")).convert("L" if channels == 1 else "RGB")
        pixels = np.asarray(loaded.resize(size[::-1], Image.Resampling.BILINEAR))
    except BROKEN as error:
        raise BadImage(
            f"{image.place}: this image cannot be read: {error}. Correct or remove it, or leave out such images with "
            "--skip_bad_images True."
        ) from error
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


@dataclass(frozen=True)
class Survey:
    """What a sample of the images is like.

    size: height and width that more than half of them have, else a square of their median side.
    agreeing: the share of images that have this size.
    grey: the share of grey ones.
    """

    size: tuple[int, int]
    agreeing: float
    grey: float


def survey(images: Sequence[LabelledImage]) -> Survey:
    sizes, grey = Counter(), []
    for row in np.linspace(0, len(images) - 1, min(SAMPLED, len(images)), dtype=int).tolist():
        try:
            with images[row].load() as image:
                turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5  # a camera was held upright
                sizes[image.size if turned else image.size[::-1]] += 1
                grey.append(image.mode in ("1", "L", "LA"))
        except BROKEN:  # it gets its message when it is decoded
            continue
    if not sizes:
        return Survey((1, 1), 1.0, 0.0)
    size, count = sizes.most_common(1)[0]
    if 2 * count <= sizes.total():
        size = (round(np.median([side for size in sizes.elements() for side in size])),) * 2
    return Survey(size, sizes[size] / sizes.total(), float(np.mean(grey)))


class ImageData:
    """The images of a split by row, as bytes, with the numbers of their labels; decoded once when they fit in memory."""

    def __init__(
        self,
        images: Sequence[LabelledImage],
        size: tuple[int, int],
        channels: int,
        labels: Sequence[str] | None = None,
        skip_bad: bool = False,
        in_memory: int = IN_MEMORY,
    ):
        self.shape = (channels, *size)
        self.pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))  # Pillow decodes and resizes without Python's lock
        fits = len(images) * int(np.prod(self.shape)) <= in_memory
        array = np.empty((len(images), *self.shape), dtype=np.uint8) if fits else None
        good = np.ones(len(images), dtype=bool)
        if fits or skip_bad:  # a large set is read once more to find what to skip
            parts = (range(start, min(start + CHUNK, len(images))) for start in range(0, len(images), CHUNK))
            good[:] = np.concatenate(list(self.pool.map(partial(self._read, images, array, skip_bad), parts)))
        if not good.any():
            raise InputError(
                f"--skip_bad_images: none of {len(images)} images, such as {images[0].place}, can be read."
            )
        if not good.all():
            first = images[int(np.flatnonzero(~good)[0])].place
            logger.warning(
                f"{int((~good).sum()):,} of {len(good):,} images cannot be read and are left out, such as {first}"
            )
            images = [images[row] for row in np.flatnonzero(good).tolist()]
            array = None if array is None else array[good]
        self.images, self.array = images, array
        numbers: dict[str | None, int] = {label: number for number, label in enumerate(labels or ())}
        self.labels = np.array([numbers.get(image.label, -100) for image in images])
        some = np.linspace(0, len(self) - 1, min(len(self), SAMPLED), dtype=int)
        digest = hashlib.sha256(self[some]["pixels"].tobytes() + self.labels.tobytes())
        self.fingerprint = f"{len(self)} images of {self.shape} {digest.hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        rows = np.asarray(rows)
        if self.array is not None:
            pixels = self.array[rows]
        else:
            pixels = np.stack(list(self.pool.map(self._decode, (self.images[row] for row in rows))))
        return {"pixels": pixels, "label": self.labels[rows], "example": rows}

    def _decode(self, image: LabelledImage) -> np.ndarray:
        return decode(image, self.shape[1:], self.shape[0])

    def _read(self, images: Sequence[LabelledImage], array: np.ndarray | None, skip_bad: bool, rows: range) -> list:
        good = [False] * len(rows)
        for place, row in enumerate(rows):
            with suppress(BadImage) if skip_bad else nullcontext():
                pixels = self._decode(images[row])
                good[place] = True
                if array is not None:
                    array[row] = pixels
        return good

    def mean_and_deviation(self) -> tuple[list[float], list[float]]:
        """Of each channel, in 0 ... 1."""
        most = max(SAMPLED, MEASURED // int(np.prod(self.shape)))
        pixels = self[np.linspace(0, len(self) - 1, min(len(self), most), dtype=int)]["pixels"]
        channels = [channel / 255 for channel in pixels.swapaxes(0, 1)]
        deviations = [max(0.01, float(channel.std())) for channel in channels]
        return [round(float(channel.mean()), 4) for channel in channels], [round(each, 4) for each in deviations]


# Batches


class Normalize:
    """Bytes to what a model reads, by the mean and the deviation of its image processor; changed by `augment` before."""

    def __init__(self, processor, seed: int, augment: Augment | None = None):
        self.mean, self.deviation = (
            torch.tensor(values).view(-1, 1, 1) for values in (processor.image_mean, processor.image_std)
        )
        self.seed, self.augment = seed, augment
        self.width = 0 if augment is None else augment.width  # random numbers for each image

    def __repr__(self) -> str:
        return f"normalized by {self.mean.flatten().tolist()} and {self.deviation.flatten().tolist()}, {self.augment}"

    def __call__(self, rows: dict[str, np.ndarray], first: int) -> Batch:
        """`first` is the place of the first image in the order of training."""
        raise NotImplementedError

    def images(self, rows: dict[str, np.ndarray], numbers: np.ndarray) -> Tensor:
        images = torch.from_numpy(rows["pixels"]).float() / 255
        return images if self.augment is None else self.augment(images, numbers)

    def normalized(self, images: Tensor) -> Tensor:
        # Decoding and shifting leave the channels last in memory, on which some convolutions of a CPU crash.
        return ((images - self.mean) / self.deviation).contiguous()

    def restored(self, images: Tensor) -> np.ndarray:
        """What a model reads, as it was before: (count, height, width, channels) in 0 ... 1."""
        images = images.float().cpu() * self.deviation + self.mean
        return images.clamp(0, 1).permute(0, 2, 3, 1).numpy()


class ImageBatches(Batches):
    """`Batches` of images."""

    unit = "images"
    collate: Normalize

    def _open(self, data: ImageData) -> str:
        self.data = data
        return data.fingerprint
