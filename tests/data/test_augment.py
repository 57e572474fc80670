"""Random changes of images, by what must hold for each."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hf_tiny.arguments import Arguments, parse
from hf_tiny.data import augment
from hf_tiny.data.augment import Augment, AugmentArguments, Mix
from hf_tiny.data.images import ImageArguments, ImageBatches, ImageData, read_images
from hf_tiny.data.masking import MaskPatches
from hf_tiny.errors import InputError
from hf_tiny.models.image_processing import HfTinyGreyImageProcessor
from hf_tiny.tasks.images import ClassifyImages


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(6, 3, 8, 10) * 0.9 + 0.1


def test_a_shift_does_not_wrap(images):
    moved = augment.shift(images, torch.tensor([[2, 0], [-3, 0], [0, 1], [0, -4], [1, 1], [0, 0]]))
    assert torch.equal(moved[0, :, 2:], images[0, :, :-2]) and not moved[0, :, :2].any()
    assert torch.equal(moved[1, :, :-3], images[1, :, 3:]) and not moved[1, :, -3:].any()
    assert torch.equal(moved[2, :, :, 1:], images[2, :, :, :-1]) and not moved[2, :, :, :1].any()
    assert torch.equal(moved[3, :, :, :-4], images[3, :, :, 4:]) and not moved[3, :, :, -4:].any()
    assert torch.equal(moved[4, :, 1:, 1:], images[4, :, :-1, :-1])
    assert torch.equal(moved[5], images[5])


def test_flips_crops_and_operations(images):
    assert torch.equal(augment.flip(augment.flip(images)), images)
    assert torch.equal(augment.flip(images)[..., 0], images[..., -1])
    whole = augment.resized_crop(images, torch.rand(6, 3), least=1.0)
    torch.testing.assert_close(whole, images)
    part = augment.resized_crop(images, torch.tensor([[0.0, 0.5, 0.5]] * 6), least=0.25)
    assert part.min() >= images.min() - 1e-6 and part.max() <= images.max() + 1e-6  # nothing but the image
    chance = torch.rand(6, 4)
    torch.testing.assert_close(augment.operation(images, chance, 0.0), images)
    for number, name in enumerate(augment.OPERATIONS):
        chance[:, 0] = (number + 0.5) / len(augment.OPERATIONS)
        chance[:, 1:] = torch.tensor([0.9, 0.5, 0.5])
        changed = augment.operation(images, chance, 1.0)
        assert changed.min() >= 0 and changed.max() <= 1
        assert torch.equal(changed, images) == (name == "identity"), name
    hole = augment.box((8, 10), torch.full((1, 2), 0.5), torch.tensor([0.5]))
    assert hole.sum() == 4 * 5 and hole[0, 2:6, 3:7].all()


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixed_labels_say_what_the_image_is_made_of(mixup, cutmix):
    """Every image is its class everywhere: the mean of its pixels must be the mean of its labels."""
    labels = torch.tensor([0, 2, 1, 2, 0, 1])
    images = labels.float()[:, None, None, None].expand(-1, 1, 16, 16)
    mixed, soft = Mix(3, mixup, cutmix)(images, labels, 4, np.random.default_rng(0).random((6, Mix.width)))
    torch.testing.assert_close(soft.sum(1), torch.ones(6))
    torch.testing.assert_close(mixed.mean((1, 2, 3)), soft @ torch.arange(3.0))
    assert ((soft > 0).sum(1) == 2).any()
    _, lonely = Mix(3, mixup, cutmix)(images, labels, 5, np.random.default_rng(0).random((6, Mix.width)))
    assert lonely[0].tolist() == [1, 0, 0]  # the other one of its pair is in the micro-batch before


def test_chance_is_a_function_of_the_place():
    """Batches of another size, and another object, see the same images, labels and masks."""
    arguments = AugmentArguments(random_shift=0.2, random_flip=True, crop_scale=0.5, randaugment=2)
    reads = HfTinyGreyImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.4], image_std=[0.3])
    digits = read_images(ImageArguments(max_train_samples=36), labelled=True)["train"]
    data = ImageData(digits, (8, 8), 1, [str(digit) for digit in range(10)])
    for make in (
        lambda: ClassifyImages(reads, 7, Augment(arguments), Mix(10, 0.8, 1.0)),
        lambda: MaskPatches(reads, 7, 16, 0.75, Augment(arguments)),
    ):
        large, small = (ImageBatches(data, make(), size, seed=3) for size in (16, 4))
        for name in large[1].keys() - {"about", "num_items_in_batch"}:
            parts = torch.cat([small[index][name] for index in range(4, 8)])
            torch.testing.assert_close(parts, large[1][name], rtol=0, atol=0)
        later = {n: v for n, v in large[4].items() if n not in ("about", "num_items_in_batch")}
        assert any(not torch.equal(value, large[1][name]) for name, value in later.items())
    assert large[0]["ids_keep"].shape == (16, 4)
    assert all(row.unique().numel() == 4 for row in large[0]["ids_keep"])
    assert large[0]["num_items_in_batch"].tolist() == [16 * 12, 16]


@dataclass(frozen=True, kw_only=True)
class Flags(AugmentArguments, Arguments):
    """Only what changes images."""


@pytest.mark.parametrize("wrong", ["--random_shift 1.5", "--crop_scale 0", "--randaugment -1"])
def test_settings_without_a_meaning_are_refused(wrong):
    with pytest.raises(InputError, match=f"{wrong}: it must be"):
        parse(Flags, wrong.split())


def test_what_is_on_is_in_the_fingerprint():
    assert repr(Augment(AugmentArguments(random_shift=0.2, randaugment=2))) == (
        "random_shift 0.2, crop_scale 1.0, randaugment 2, randaugment_magnitude 0.3"
    )
    assert repr(Mix(3, 0.8)) == "mixup 0.8, cutmix 0"
