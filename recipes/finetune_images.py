# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny>=0.1"]
# ///
"""Fine-tune a ViT to give an image one label.

hf-tiny finetune-images  # scikit-learn's digits, from scratch, under a minute on 2 cores
hf-tiny finetune-images --model_name_or_path runs/vit --train_file my_classes/ --layer_decay 0.75
hf-tiny finetune-images --model_name_or_path runs/vit --trainable_layers 0  # a linear probe
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.baselines import BaselineArguments
from hf_tiny.models import SIZES, HfTinyViTConfig
from hf_tiny.start import TransferArguments
from hf_tiny.tasks import fine_tune
from hf_tiny.tasks.images import ImageTask, ImageTaskArguments
from hf_tiny.train import TrainConfig, run

LITTLE = {"learning_rate": 1e-3, "random_shift": 0.1, "ema": 0.99}
PAPER = {"per_device_train_batch_size": 256, "learning_rate": 5e-4, "num_train_epochs": 100.0, "randaugment": 2,
         "random_flip": True, "drop_path_rate": 0.1, "label_smoothing": 0.1, "crop_scale": 0.2}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe(ImageTaskArguments, TransferArguments, BaselineArguments, TrainConfig):
    """Fine-tune a ViT to give an image one label."""

    CONFIG: ClassVar[type] = HfTinyViTConfig
    MODEL_SIZES: ClassVar[dict[str, dict]] = SIZES[HfTinyViTConfig]
    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {**LITTLE, "per_device_train_batch_size": 64, "num_train_epochs": 80.0},
        "mini": {**LITTLE, "random_shift": 0.05, "per_device_train_batch_size": 128, "num_train_epochs": 40.0},
        **dict.fromkeys(("ti", "small", "base"), PAPER),
    }
    DEFAULTS: ClassVar[dict] = {
        "l2_sp": 0.0,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.05,
        "per_device_eval_batch_size": 128,
        "eval_steps": 0,
        "save_steps": 0,
    }

    output_dir: str = flag("runs/images", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny or mini for small images and machines; DeiT's ti and small, ViT's base.")
    drop_path_rate: float | None = flag(
        None, "How often the last layer is left out; earlier ones more rarely.", low=0, below=1
    )
    label_smoothing: float | None = flag(None, "Share of the target that is spread over all labels.", low=0, below=1)
    mixup: float = flag(0.0, "Mix pairs of images and their labels, by a share from Beta(mixup, mixup); 0: off.", low=0)
    cutmix: float = flag(0.0, "The same with a part of the other image; with both, each image gets one of them.", low=0)
    ema: float = flag(0.0, "Decay of a moving average of the weights, such as 0.999; 0: off.", low=0, below=1)


def main(recipe: Recipe) -> dict[str, float]:
    return fine_tune(recipe, ImageTask)


if __name__ == "__main__":
    run(main, Recipe)
