"""Pictures to batches of tensors: decoded by Pillow, changed by chance, normalised, masked.

Small sets are decoded once, into one array of bytes; larger ones batch by batch, in threads beside the training.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from hf_tiny.data.augment import Augment, Mix
from hf_tiny.data.collate import Batch, Batches, uniform
from hf_tiny.data.images import Picture
from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

IN_MEMORY = 2**30  # bytes of decoded pictures
MEASURED = 2**24  # bytes, for the mean and the deviation
CHUNK = 64  # pictures that a thread decodes at once
LOOKED_AT = 256  # pictures, to see whether a set is grey and whether it is the same
BROKEN = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)  # what Pillow raises


class BadPicture(InputError):
    """One picture that cannot be read."""


def decode(picture: Picture, size: tuple[int, int], channels: int) -> np.ndarray:
    """(channels, height, width), as transformers' pipelines load a picture and its image processors resize it."""
    try:
        image = picture.load()
        if image.mode[0] in "IF":
            raise ValueError(f"it has the mode {image.mode}, which has more than 8 bits; save it with 8")
        if image.format is not None:  # it comes from a file, and a camera may have been held upright
            image = ImageOps.exif_transpose(image)
        image = (image if image.mode == "L" else image.convert("RGB")).convert("L" if channels == 1 else "RGB")
        pixels = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR))
    except BROKEN as error:
        raise BadPicture(
            f"{picture.place}: this picture cannot be read: {error}. Mend or remove it, or leave out such pictures with "
            "--skip_bad_images True."
        ) from error
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def look(pictures: Sequence[Picture]) -> tuple[tuple[int, int], float]:
    """Height and width of the first picture that can be read, and the share of grey ones, of some."""
    size, grey = None, []
    for row in np.linspace(0, len(pictures) - 1, min(LOOKED_AT, len(pictures)), dtype=int).tolist():
        try:
            with pictures[row].load() as image:
                size = size or image.size[::-1]
                grey.append(image.mode in ("1", "L", "LA"))
        except BROKEN:  # it gets its message when it is decoded
            continue
    return size or (1, 1), float(np.mean(grey or [False]))


def say_conversion(pictures: Sequence[Picture], channels: int) -> None:
    grey = look(pictures)[1]
    if channels == 1 and grey < 1:
        logger.warning(f"The model reads grey pictures, and {1 - grey:.0%} of these have colours: they become grey.")
    if channels == 3 and grey > 0:
        logger.warning(
            f"The model reads colours, and {grey:.0%} of these pictures are grey: all three colours get them."
        )


class Pixels:
    """The pictures of a split by row, as bytes, with the numbers of their labels; decoded once when they fit in memory."""

    def __init__(
        self,
        pictures: Sequence[Picture],
        size: tuple[int, int],
        channels: int,
        labels: Sequence[str] | None = None,
        skip_bad: bool = False,
        in_memory: int = IN_MEMORY,
    ):
        self.shape = (channels, *size)
        self.pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))  # Pillow decodes and resizes without Python's lock
        self.array = None
        fits = len(pictures) * int(np.prod(self.shape)) <= in_memory
        array = np.empty((len(pictures), *self.shape), dtype=np.uint8) if fits else None
        good = np.ones(len(pictures), dtype=bool)
        if fits or skip_bad:  # a large set is read once more to find what to skip
            parts = (range(start, min(start + CHUNK, len(pictures))) for start in range(0, len(pictures), CHUNK))
            good[:] = np.concatenate(list(self.pool.map(partial(self._read, pictures, array, skip_bad), parts)))
        if not good.any():
            raise InputError(
                f"--skip_bad_images: none of {len(pictures)} pictures, such as {pictures[0].place}, can be read."
            )
        if not good.all():
            first = pictures[int(np.flatnonzero(~good)[0])].place
            logger.warning(
                f"{int((~good).sum()):,} of {len(good):,} pictures cannot be read and are left out, such as {first}"
            )
            pictures, array = [pictures[row] for row in np.flatnonzero(good)], array[good] if fits else None
        self.pictures, self.array = pictures, array
        numbers = {label: number for number, label in enumerate(labels or ())}
        self.labels = np.array([numbers.get(picture.label, -100) for picture in pictures])
        some = np.linspace(0, len(self) - 1, min(len(self), LOOKED_AT), dtype=int)
        digest = hashlib.sha256(self[some]["pixels"].tobytes() + self.labels.tobytes())
        self.fingerprint = f"{len(self)} pictures of {self.shape} {digest.hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        rows = np.asarray(rows)
        if self.array is not None:
            pixels = self.array[rows]
        else:
            pixels = np.stack(list(self.pool.map(self._decode, (self.pictures[row] for row in rows))))
        return {"pixels": pixels, "label": self.labels[rows], "example": rows}

    def _decode(self, picture: Picture) -> np.ndarray:
        return decode(picture, self.shape[1:], self.shape[0])

    def _read(self, pictures: Sequence[Picture], array: np.ndarray | None, skip_bad: bool, rows: range) -> list[bool]:
        good = []
        for row in rows:
            try:
                pixels = self._decode(pictures[row])
            except BadPicture:
                if not skip_bad:
                    raise
                good.append(False)
                continue
            good.append(True)
            if array is not None:
                array[row] = pixels
        return good

    def mean_and_deviation(self) -> tuple[list[float], list[float]]:
        """Of each channel, in 0 ... 1."""
        most = max(LOOKED_AT, MEASURED // int(np.prod(self.shape)))
        pixels = self[np.linspace(0, len(self) - 1, min(len(self), most), dtype=int)]["pixels"]
        values, figures = np.arange(256) / 255, []
        for channel in range(self.shape[0]):
            shares = np.bincount(pixels[:, channel].ravel(), minlength=256) / pixels[:, channel].size
            mean = float(shares @ values)
            figures.append((round(mean, 4), round(max(0.01, float(shares @ (values - mean) ** 2) ** 0.5), 4)))
        means, deviations = zip(*figures, strict=True)
        return list(means), list(deviations)


# Batches


class PictureBatches(Batches):
    """`Batches` of pixels."""

    def __init__(self, data: Pixels, collate: Callable, batch_size: int, seed: int, shuffle: bool = True):
        self.data, self.collate, self.batch_size, self.seed, self.shuffle = data, collate, batch_size, seed, shuffle
        self.fingerprint = f"{data.fingerprint}, {collate}"
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)


class Normalize:
    """Bytes to what a model reads, by the mean and the deviation of its image processor; changed by `augment` before."""

    def __init__(self, processor, seed: int, augment: Augment | None = None):
        self.mean, self.deviation = (
            torch.tensor(values).view(-1, 1, 1) for values in (processor.image_mean, processor.image_std)
        )
        self.seed, self.augment = seed, augment

    def __repr__(self) -> str:
        return f"normalized by {self.mean.flatten().tolist()} and {self.deviation.flatten().tolist()}, {self.augment}"

    def pixels(self, rows: dict[str, np.ndarray], numbers: np.ndarray) -> Tensor:
        images = torch.from_numpy(rows["pixels"]).float() / 255
        return images if self.augment is None else self.augment(images, numbers)

    def normalized(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.deviation


class ClassifyPictures(Normalize):
    """Batches for a classifier; mixed pictures have probabilities as labels."""

    def __init__(self, processor, seed: int, augment: Augment | None = None, mix: Mix | None = None):
        super().__init__(processor, seed, augment)
        self.mix = mix

    def __repr__(self) -> str:
        return f"{super().__repr__()}, {self.mix}"

    def __call__(self, rows: dict[str, np.ndarray], first: int) -> Batch:
        count, width = len(rows["label"]), 0 if self.augment is None else self.augment.width
        numbers = uniform(self.seed, first, count, width + Mix.width)
        images, labels = self.pixels(rows, numbers[:, :width]), torch.from_numpy(rows["label"])
        about = {"label": labels, "example": torch.from_numpy(rows["example"])}
        if self.mix is not None:
            images, labels = self.mix(images, labels, first, numbers[:, width:])
        counts = torch.tensor([count, count])
        return {"pixel_values": self.normalized(images), "labels": labels, "about": about, "num_items_in_batch": counts}


class MaskPictures(Normalize):
    """Batches for MAE: which patches the encoder sees, chosen by the picture's place in the run."""

    def __init__(self, processor, seed: int, patches: int, mask_ratio: float, augment: Augment | None = None):
        super().__init__(processor, seed, augment)
        self.patches, self.kept = patches, round(patches * (1 - mask_ratio))
        if not 0 < self.kept < patches:
            raise InputError(
                f"--mask_ratio {mask_ratio:g}: of {patches} patches this leaves {self.kept} to see. Use 0.75."
            )

    def __repr__(self) -> str:
        return f"{super().__repr__()}, {self.kept} of {self.patches} patches seen"

    def __call__(self, rows: dict[str, np.ndarray], first: int) -> Batch:
        count, width = len(rows["pixels"]), 0 if self.augment is None else self.augment.width
        numbers = uniform(self.seed, first, count, width + self.patches)
        seen = np.argpartition(numbers[:, width:], self.kept, axis=1)[:, : self.kept]
        return {
            "pixel_values": self.normalized(self.pixels(rows, numbers[:, :width])),
            "ids_keep": torch.from_numpy(np.sort(seen, axis=1)),
            "about": {"example": torch.from_numpy(rows["example"])},
            "num_items_in_batch": torch.tensor([count * (self.patches - self.kept), count]),
        }
