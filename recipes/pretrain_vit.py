# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny>=0.1"]
# ///
"""Pretrain a ViT on images without labels, as a masked autoencoder: it learns to guess the patches that it cannot see.

hf-tiny pretrain-vit  # scikit-learn's digits, under 2 minutes on 2 cores
hf-tiny pretrain-vit --train_file my_images/ --size small --output_dir runs/mine
hf-tiny pretrain-vit runs/mine/recipe.yaml --resume_from_checkpoint latest
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.data.augment import Augment
from hf_tiny.data.images import ImageBatches, ImageData, read_images
from hf_tiny.data.masking import MaskPatches
from hf_tiny.hub import Card
from hf_tiny.models import SIZES, HfTinyViTConfig
from hf_tiny.start import IMAGE_CLASSIFIER, StartArguments, check
from hf_tiny.tasks.images import (
    ImageTask,
    ImageTaskArguments,
    MaskedImageEvaluation,
    image_size,
    start_config,
    start_masked,
    start_patches,
    start_processor,
)
from hf_tiny.train import TrainConfig, run, train

PAPER = {"per_device_train_batch_size": 1024, "learning_rate": 6e-4, "num_train_epochs": 800.0, "warmup_steps": 0.05,
         "crop_scale": 0.2, "random_flip": True}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe(ImageTaskArguments, StartArguments, TrainConfig):
    """Pretrain a ViT on images without labels, as a masked autoencoder."""

    CONFIG: ClassVar[type] = HfTinyViTConfig
    MODEL_SIZES: ClassVar[dict[str, dict]] = {
        size: {"norm_pix_loss": True, **settings} for size, settings in SIZES[HfTinyViTConfig].items()
    }
    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"per_device_train_batch_size": 64, "learning_rate": 2e-3, "num_train_epochs": 60.0},
        "mini": {"per_device_train_batch_size": 128, "learning_rate": 1.5e-3, "num_train_epochs": 60.0},
        **dict.fromkeys(("ti", "small", "base"), PAPER),
    }
    DEFAULTS: ClassVar[dict] = {
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.05,
        "adam_beta2": 0.95,
        "per_device_eval_batch_size": 128,
        "max_eval_samples": 1024,
    }

    output_dir: str = flag("runs/vit", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny or mini for small images and machines; DeiT's ti and small, ViT's base.")
    mask_ratio: float = flag(0.75, "Share of patches that the encoder does not see.", above=0, below=1)


def main(recipe: Recipe) -> dict[str, float]:
    check(recipe, IMAGE_CLASSIFIER)
    images = read_images(recipe, labelled=False)
    config = start_config(recipe, images["train"], least_patch=2)
    model = start_masked(recipe, config)
    size, channels = image_size(config), config.num_channels
    data = {split: ImageData(part, size, channels, skip_bad=recipe.skip_bad_images) for split, part in images.items()}
    processor = start_processor(recipe, config, data["train"])
    rows, columns = config.grid_size(size)
    mask = MaskPatches(processor, recipe.seed, rows * columns, recipe.mask_ratio, Augment(recipe))
    masked = MaskPatches(processor, 0, rows * columns, recipe.mask_ratio)  # the same masks for every seed
    start_patches(recipe, model, data["train"], masked)
    batches = ImageBatches(data["train"], mask, recipe.per_device_train_batch_size, recipe.seed)
    held_out = ImageBatches(data["validation"], masked, recipe.per_device_eval_batch_size, recipe.seed, False)
    evaluate = MaskedImageEvaluation(held_out, model)
    card = Card(template="vit", pipeline_tag="image-feature-extraction", data=recipe.data_name(ImageTask.BUILTIN))
    return train(model, batches, recipe, evaluate=evaluate, processor=processor, card=card)


if __name__ == "__main__":
    run(main, Recipe)
