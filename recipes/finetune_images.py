"""Fine-tune a ViT to give a picture one label.

accelerate launch recipes/finetune_images.py  # scikit-learn's digits, from scratch, under a minute on 2 cores
accelerate launch recipes/finetune_images.py --model_name_or_path runs/vit --train_file my_classes/ --layer_decay 0.75
accelerate launch recipes/finetune_images.py --model_name_or_path runs/vit --trainable_layers 0  # a linear probe
"""

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.data.augment import AugmentArguments
from hf_tiny.data.images import ImageArguments, read_pictures
from hf_tiny.data.pixels import Pixels
from hf_tiny.data.tagged import find_labels
from hf_tiny.pictures import fine_tune, image_size, start_classifier, start_config, start_processor
from hf_tiny.train import TrainConfig, run
from hf_tiny.transfer import StartArguments, check

PAPER = {"per_device_train_batch_size": 256, "learning_rate": 5e-4, "num_train_epochs": 100.0, "randaugment": 2,
         "random_flip": True, "drop_path_rate": 0.1, "label_smoothing": 0.1, "crop_scale": 0.2}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe(StartArguments, AugmentArguments, ImageArguments, TrainConfig):
    """Fine-tune a ViT to give a picture one label."""

    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"per_device_train_batch_size": 64, "learning_rate": 1e-3, "num_train_epochs": 80.0,
                 "random_shift": 0.1, "ema": 0.99},
        "mini": {"per_device_train_batch_size": 128, "learning_rate": 1e-3, "num_train_epochs": 40.0,
                 "random_shift": 0.1, "ema": 0.99},
        **dict.fromkeys(("ti", "small", "base"), PAPER),
    }  # fmt: skip

    output_dir: str = flag("runs/images", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny or mini for small pictures and machines; DeiT's ti and small, ViT's base.")
    patch_size: int | None = flag(None, "Pixels of a patch's side; by default 4 or 16, by the pictures' size.")
    pooling: str | None = flag(
        None, "What an image is classified by: cls, the class token, or the mean of its patches."
    )
    drop_path_rate: float | None = flag(None, "How often the last layer is left out; earlier ones more rarely.")
    label_smoothing: float | None = flag(None, "The share of the target that is spread over all labels.")
    mixup: float = flag(0.0, "Mix pairs of pictures and their labels, by a share from Beta(mixup, mixup); 0 does not.")
    cutmix: float = flag(0.0, "The same with a part of the other picture; with both, each picture gets one of them.")
    ema: float = flag(0.0, "The decay of a moving average of the weights, such as 0.999; 0 takes the last weights.")
    l2_sp: float = flag(0.0, "A pretrained encoder's weights decay towards where they started; 0: towards zero.")
    lr_scheduler_type: str = flag("cosine", "linear, cosine, constant, inverse_sqrt or warmup_stable_decay.")
    weight_decay: float = flag(0.05, "AdamW's decay of matrices; biases and norms do not decay.")
    per_device_eval_batch_size: int = flag(128, "Samples in an evaluation batch.")
    eval_steps: int = flag(0, "Steps between evaluations; 0 evaluates at the end only.")
    save_steps: int = flag(0, "Steps between checkpoints; 0 saves at the end only.")


def main(recipe: Recipe) -> dict[str, float]:
    check(recipe)
    pictures = read_pictures(recipe, labelled=True)
    labels = find_labels(pictures["train"], chain.from_iterable(pictures.values()))
    changes = {name: vars(recipe)[name] for name in ("pooling", "drop_path_rate", "label_smoothing")}
    config = start_config(recipe, pictures["train"], least_patch=4, **changes)
    sizes = (image_size(config), config.num_channels, labels, recipe.skip_bad_images)
    pixels = {split: Pixels(part, *sizes) for split, part in pictures.items()}
    processor = start_processor(recipe, config, pixels["train"])
    model = start_classifier(recipe, config, labels)
    return fine_tune(recipe, model, processor, pixels, labels)


if __name__ == "__main__":
    run(main, Recipe)
