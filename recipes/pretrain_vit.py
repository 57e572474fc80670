"""Pretrain a ViT on pictures without labels, as a masked autoencoder: it learns to guess the patches that it cannot see.

accelerate launch recipes/pretrain_vit.py  # scikit-learn's digits, under 2 minutes on 2 cores
accelerate launch recipes/pretrain_vit.py --train_file my_pictures/ --size small --output_dir runs/mine
accelerate launch recipes/pretrain_vit.py runs/mine/recipe.yaml --resume_from_checkpoint latest
"""

from dataclasses import dataclass
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.data.augment import Augment, AugmentArguments
from hf_tiny.data.images import ImageArguments, read_pictures
from hf_tiny.data.pixels import MaskPictures, PictureBatches, Pixels
from hf_tiny.metrics import Evaluation, collect_masked, compute_masked
from hf_tiny.pictures import image_size, report_masked, start_config, start_masked, start_processor
from hf_tiny.train import TrainConfig, run, train

PAPER = {"per_device_train_batch_size": 1024, "learning_rate": 6e-4, "num_train_epochs": 800.0, "warmup_steps": 0.05,
         "crop_scale": 0.2, "random_flip": True}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe(AugmentArguments, ImageArguments, TrainConfig):
    """Pretrain a ViT on pictures without labels, as a masked autoencoder."""

    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"per_device_train_batch_size": 64, "learning_rate": 2e-3, "num_train_epochs": 60.0},
        "mini": {"per_device_train_batch_size": 128, "learning_rate": 1.5e-3, "num_train_epochs": 60.0},
        **dict.fromkeys(("ti", "small", "base"), PAPER),
    }

    output_dir: str = flag("runs/vit", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny or mini for small pictures and machines; DeiT's ti and small, ViT's base.")
    model_name_or_path: str | None = flag(None, "Go on from this pretrained ViT.")
    config_name: str | None = flag(None, "From scratch, with the configuration of this model.")
    patch_size: int | None = flag(None, "Pixels of a patch's side; by default 2, 4 or 16, by the pictures' size.")
    mask_ratio: float = flag(0.75, "The share of patches that the encoder does not see.")
    norm_pix_loss: bool = flag(True, "Guess each patch's pixels normalised by their own mean and deviation.")
    lr_scheduler_type: str = flag("cosine", "linear, cosine, constant, inverse_sqrt or warmup_stable_decay.")
    weight_decay: float = flag(0.05, "AdamW's decay of matrices; biases and norms do not decay.")
    adam_beta2: float = flag(0.95, "AdamW's beta 2.")
    per_device_eval_batch_size: int = flag(128, "Samples in an evaluation batch.")
    max_eval_samples: int | None = flag(1024, "Evaluate on this many pictures, the same for every --seed.")


def main(recipe: Recipe) -> dict[str, float]:
    pictures = read_pictures(recipe, labelled=False)
    config = start_config(recipe, pictures["train"], least_patch=2, norm_pix_loss=recipe.norm_pix_loss)
    size, channels = image_size(config), config.num_channels
    pixels = {split: Pixels(part, size, channels, skip_bad=recipe.skip_bad_images) for split, part in pictures.items()}
    processor = start_processor(recipe, config, pixels["train"])
    rows, columns = config.grid_size(size)
    mask = MaskPictures(processor, recipe.seed, rows * columns, recipe.mask_ratio, Augment(recipe))
    masked = MaskPictures(processor, 0, rows * columns, recipe.mask_ratio)  # the same masks for every seed
    batches = PictureBatches(pixels["train"], mask, recipe.per_device_train_batch_size, recipe.seed)
    held_out = PictureBatches(pixels["validation"], masked, recipe.per_device_eval_batch_size, recipe.seed, False)
    model = start_masked(recipe, config)
    evaluate = Evaluation(held_out, collect_masked, compute_masked, report_masked(held_out, model))
    about = {"template": "vit", "pipeline_tag": "image-feature-extraction", "data": recipe.data_name}
    return train(model, batches, recipe, evaluate=evaluate, processor=processor, card=about)


if __name__ == "__main__":
    run(main, Recipe)
