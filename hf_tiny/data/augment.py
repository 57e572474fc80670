"""Random changes of whole batches of images, (batch, channels, height, width) in 0 ... 1.

All chance comes in as uniform numbers, a row for each image: the same numbers give the same image, in whatever batch,
process or resumed run it appears.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Tensor

from hf_tiny.arguments import flag

GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
OPERATIONS = ("identity", *GEOMETRIC, "brightness", "contrast", "cutout")
STRONGEST = {"rotate": math.pi / 6, "shear_x": 0.3, "shear_y": 0.3, "translate_x": 0.6, "translate_y": 0.6,
             "brightness": 0.9, "contrast": 0.9, "cutout": 0.5}  # fmt: skip
NUMBERS_OF_OPERATION = 4  # which one, how strong, and where a cut-out lies


@dataclass(frozen=True, kw_only=True)
class AugmentArguments:
    """How the images to train on are changed each time they are seen."""

    random_shift: float = flag(0.0, "Shift by up to this share of the sides; what comes in is black.", low=0, high=1)
    random_flip: bool = flag(False, "Mirror half of the images, left to right.")
    crop_scale: float = flag(
        1.0, "Below 1: cut out a part of at least this share of the area, and enlarge it.", above=0, high=1
    )
    randaugment: int = flag(0, "Operations of RandAugment on each image, such as rotation, contrast, cut-out.", low=0)
    randaugment_magnitude: float = flag(0.3, "How strong they are at most, from 0 to 1.", low=0, high=1)


class Augment:
    """What the flags say, on a batch."""

    def __init__(self, arguments: AugmentArguments):
        self.settings = {name: vars(arguments)[name] for name in AugmentArguments.__dataclass_fields__}
        self.width = 6 + NUMBERS_OF_OPERATION * arguments.randaugment  # numbers for each image

    def __repr__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items() if value)

    def __call__(self, images: Tensor, numbers: np.ndarray) -> Tensor:
        given, chance = self.settings, torch.from_numpy(numbers).float()
        if given["crop_scale"] < 1:
            images = resized_crop(images, chance[:, :3], given["crop_scale"])
        if given["random_shift"]:
            most = torch.tensor([round(given["random_shift"] * side) for side in images.shape[-2:]])
            images = shift(images, (chance[:, 3:5] * (2 * most + 1)).long() - most)
        if given["random_flip"]:
            images = torch.where(chance[:, 5, None, None, None] < 0.5, flip(images), images)
        for start in range(6, self.width, NUMBERS_OF_OPERATION):
            own = chance[:, start : start + NUMBERS_OF_OPERATION]
            images = operation(images, own, given["randaugment_magnitude"])
        return images


def flip(images: Tensor) -> Tensor:
    return images.flip(-1)


def shift(images: Tensor, offsets: Tensor) -> Tensor:
    """Each image moves by its own offset, (batch, 2), down and to the right; nothing comes in on the other side."""
    height, width = images.shape[-2:]
    rows = torch.arange(height) - offsets[:, :1]  # (batch, height): where each row comes from
    columns = torch.arange(width) - offsets[:, 1:]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    image = torch.arange(len(images))[:, None, None]
    moved = images[image, :, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]]
    return moved.permute(0, 3, 1, 2) * inside[:, None]  # from (batch, height, width, channels)


def resized_crop(images: Tensor, chance: Tensor, least: float) -> Tensor:
    """A part of the same form, of `least` to all of the area, enlarged to the whole."""
    side = (least + (1 - least) * chance[:, 0]).sqrt()
    matrices = torch.zeros(len(images), 2, 3)
    matrices[:, 0, 0] = matrices[:, 1, 1] = side
    matrices[:, :, 2] = (2 * chance[:, 1:] - 1) * (1 - side[:, None])
    return affine(images, matrices)


def affine(images: Tensor, matrices: Tensor) -> Tensor:
    """matrices: (batch, 2, 3), from the places of the new image, -1 ... 1, to those of the old one."""
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def operation(images: Tensor, chance: Tensor, magnitude: float) -> Tensor:
    """One operation of RandAugment on each image. chance: (batch, NUMBERS_OF_OPERATION)."""
    chosen = (chance[:, 0] * len(OPERATIONS)).long()
    signed = magnitude * (2 * chance[:, 1] - 1)
    strength = {name: torch.where(chosen == number, signed, 0.0) * STRONGEST[name]
                for number, name in enumerate(OPERATIONS) if name in STRONGEST}  # fmt: skip
    moved = torch.stack([strength[name] for name in GEOMETRIC]).any(0)
    if moved.any():
        images = images.clone()
        images[moved] = affine(images[moved], _matrices({name: strength[name][moved] for name in GEOMETRIC}))
    wide = {name: strength[name][:, None, None, None] for name in ("brightness", "contrast")}
    mean = images.mean((1, 2, 3), keepdim=True)
    images = (images + (images - mean) * wide["contrast"]) * (1 + wide["brightness"])
    kept = ~box(images.shape[-2:], chance[:, 2:4], strength["cutout"].abs())
    return images.clamp(0, 1) * kept[:, None]


def _matrices(strength: dict[str, Tensor]) -> Tensor:
    angle = strength["rotate"]
    first = [angle.cos(), strength["shear_x"] - angle.sin(), strength["translate_x"]]
    second = [strength["shear_y"] + angle.sin(), angle.cos(), strength["translate_y"]]
    return torch.stack([torch.stack(first, -1), torch.stack(second, -1)], 1)


def box(size: tuple[int, int], centres: Tensor, sides: Tensor) -> Tensor:
    """(batch, height, width): what lies in a box around a centre; both are shares of the image's sides."""
    inside = []
    for axis, length in enumerate(size):
        start = ((centres[:, axis] - sides / 2) * length).round()
        places = torch.arange(length)
        inside.append((places >= start[:, None]) & (places < (start + (sides * length).round())[:, None]))
    return inside[0][:, :, None] & inside[1][:, None, :]


class Mix:
    """Mixup and CutMix: the images 2n and 2n + 1 of the run are mixed, and their labels as much. Where both are asked
    for, each image gets one of them."""

    width = 4  # numbers for each image

    def __init__(self, num_labels: int, mixup: float = 0.0, cutmix: float = 0.0):
        self.num_labels, self.mixup, self.cutmix = num_labels, mixup, cutmix

    def __repr__(self) -> str:
        return f"mixup {self.mixup:g}, cutmix {self.cutmix:g}"

    def __call__(self, images: Tensor, labels: Tensor, first: int, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """The mixed images and the probabilities of their labels, (batch, num_labels)."""
        count = len(images)
        partner = (torch.arange(first, first + count) ^ 1) - first
        partner = torch.where((partner < 0) | (partner >= count), torch.arange(count), partner)  # alone at an end
        cut = torch.from_numpy(numbers[:, 0] < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0)))
        alpha = np.where(cut, self.cutmix, self.mixup)
        share = torch.from_numpy(betaincinv(alpha, alpha, numbers[:, 1])).float()  # of the image itself
        share = torch.maximum(share, 1 - share)  # so that the label of the larger part is its own
        hole = box(images.shape[-2:], torch.from_numpy(numbers[:, 2:4]).float(), (1 - share).sqrt())
        share = torch.where(cut, 1 - hole.float().mean((1, 2)), share)  # a box may lie partly outside
        own = torch.where(cut[:, None, None], (~hole).float(), share[:, None, None])[:, None]
        one_hot = F.one_hot(labels, self.num_labels).float()
        soft = share[:, None] * one_hot + (1 - share[:, None]) * one_hot[partner]
        return own * images + (1 - own) * images[partner], soft
