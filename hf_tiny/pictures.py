"""What the recipes for pictures share: what to start from, moving averages, and what is drawn and written at the end."""

import csv
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
    ViTImageProcessorPil,
)

from . import checkpoint, hub
from .data.augment import Augment, Mix
from .data.images import Picture
from .data.pixels import ClassifyPictures, Normalize, PictureBatches, Pixels, look, say_conversion
from .errors import InputError
from .finetune import base_name, label_names
from .metrics import Evaluation, Results, collect_pictures, compute_texts, confusion_texts, predict_texts
from .models.image_processing import HfTinyGreyImageProcessor
from .models.vit import (
    HfTinyViTConfig,
    HfTinyViTForImageClassification,
    HfTinyViTForMaskedImageModeling,
    patchify,
    unpatchify,
)
from .train import Callback, TrainState, train
from .transfer import prepare, pretrained

logger = logging.getLogger(__name__)

LITTLE = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384,
          "initializer_range": 0.08, "pooling": "mean", "decoder_hidden_size": 64, "decoder_num_attention_heads": 4,
          "decoder_intermediate_size": 256}  # fmt: skip
MODELS = {  # two for small pictures and machines; DeiT's tiny and small, ViT's base, with MAE's decoder
    "tiny": {**LITTLE, "decoder_num_hidden_layers": 1},
    "mini": {**LITTLE, "decoder_num_hidden_layers": 2},
    "ti": {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768,
           "decoder_hidden_size": 128, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4,
           "decoder_intermediate_size": 512},
    "small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536,
              "decoder_hidden_size": 256, "decoder_num_hidden_layers": 4, "decoder_num_attention_heads": 8,
              "decoder_intermediate_size": 1024},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}  # fmt: skip
PATCHES = ((16, 2), (64, 4))  # the shorter side of a picture, at most, and its patch; 16 above
LARGE, USUAL = 64, (224, 224)  # pictures that are larger have this size unless another is asked for
DRAWN = 8


def image_size(config: PreTrainedConfig) -> tuple[int, int]:
    size = config.to_dict().get("image_size", USUAL)  # models without positions have none
    return (size, size) if isinstance(size, int) else tuple(size)


def start_config(recipe, pictures: Sequence[Picture], least_patch: int, **changes) -> PreTrainedConfig:
    """Of the model to train: that of the recipe's model, with the picture size that is asked for, or a new one."""
    wanted = None if recipe.image_size is None else tuple((recipe.image_size * 2)[:2])
    name = recipe.model_name_or_path or recipe.config_name
    if name:
        option = "--model_name_or_path" if recipe.model_name_or_path else "--config_name"
        if recipe.patch_size:
            raise InputError(f"--patch_size {recipe.patch_size}: {option} {name} has its own. Leave the flag out.")
        config = _image_config(option, name, wanted, changes)
    else:
        size, grey = look(pictures)
        size = wanted or (size if max(size) <= LARGE else USUAL)
        patch = max(least_patch, next((patch for side, patch in PATCHES if min(size) <= side), 16))
        if wanted is None and recipe.patch_size is None:
            size, given = tuple(-(-side // patch) * patch for side in size), size
            if size != given:
                logger.info("Pictures of {} x {} become {} x {}, in patches of {}.".format(*given, *size, patch))
        patch = recipe.patch_size or patch
        try:
            config = HfTinyViTConfig(
                image_size=size,
                patch_size=patch,
                num_channels=1 if grey == 1 else 3,
                **MODELS[recipe.size] | {key: value for key, value in changes.items() if value is not None},
            )
        except ValueError as error:
            raise InputError(f"--image_size {' '.join(map(str, size))} --patch_size {patch}: {error}") from error
    say_conversion(pictures, config.num_channels)
    return config


def _image_config(option: str, name: str, wanted: tuple[int, int] | None, changes: dict) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(f"{option} {name}: no model could be found there: {error}") from error
    if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise InputError(
            f"{option} {name}: a {config.model_type} does not classify pictures. Give a folder that pretrain_vit.py left, "
            "or a ViT of transformers; python -m hf_tiny.convert makes the first from a ViTMAE."
        )
    changes = {key: value for key, value in changes.items() if value is not None}
    if not isinstance(config, HfTinyViTConfig):
        if wanted not in (None, image_size(config)):
            raise InputError(f"--image_size {wanted}: {name} takes {image_size(config)} only. Leave the flag out.")
        if changes:
            raise InputError(f"--{next(iter(changes))} is for hf_tiny's ViT; {name} is a {config.model_type}.")
        return config
    try:
        return AutoConfig.from_pretrained(name, **changes, **({} if wanted is None else {"image_size": list(wanted)}))
    except ValueError as error:
        raise InputError(f"--image_size {wanted}, with {name}: {error}") from error


def start_processor(recipe, config: PreTrainedConfig, pixels: Pixels):
    """The image processor of the recipe's model, else one by the mean and deviation of the training pictures."""
    size = dict(zip(("height", "width"), image_size(config), strict=True))
    if recipe.model_name_or_path:
        try:
            processor = AutoImageProcessor.from_pretrained(recipe.model_name_or_path)
            # As the pictures are decoded here: models of others may have been trained with other ways to resize.
            processor.size, processor.resample = type(processor.size)(**size), Image.Resampling.BILINEAR
            return processor
        except (OSError, ValueError) as error:
            logger.warning(f"{recipe.model_name_or_path} has no image processor ({error}): a new one is made.")
    mean, deviation = pixels.mean_and_deviation()
    if config.num_channels == 1:
        return HfTinyGreyImageProcessor(size=size, image_mean=mean, image_std=deviation)
    return ViTImageProcessorPil(size=size, image_mean=mean, image_std=deviation, do_convert_rgb=True)


def start_masked(recipe, config: PreTrainedConfig) -> HfTinyViTForMaskedImageModeling:
    if not isinstance(config, HfTinyViTConfig):
        raise InputError(
            f"{recipe.model_name_or_path or recipe.config_name}: a {config.model_type} is not hf_tiny's ViT."
        )
    if recipe.model_name_or_path:
        with checkpoint.loaded(f"--model_name_or_path {recipe.model_name_or_path} cannot be loaded"):
            return HfTinyViTForMaskedImageModeling.from_pretrained(recipe.model_name_or_path, config=config).float()
    return HfTinyViTForMaskedImageModeling(config)


def start_classifier(recipe, config: PreTrainedConfig, labels: Sequence[str]) -> PreTrainedModel:
    names = label_names(labels)
    if recipe.model_name_or_path:
        known = {} if not isinstance(config, HfTinyViTConfig) else {
            name: vars(config)[name] for name in ("image_size", "pooling", "drop_path_rate", "label_smoothing")
        }  # fmt: skip
        return pretrained(recipe.model_name_or_path, AutoModelForImageClassification, {**names, **known})
    config.update(names)
    model = AutoModelForImageClassification.from_config(config)
    logger.info(f"{type(model).__name__}: from scratch, {model.num_parameters():,} parameters.")
    return model


def start_mix(recipe, config: PreTrainedConfig, labels: Sequence[str]) -> Mix | None:
    if not (recipe.mixup or recipe.cutmix):
        return None
    if not isinstance(config, HfTinyViTConfig):
        raise InputError(
            f"--mixup and --cutmix give pictures two labels, of which transformers' {config.model_type} would make another "
            "loss: drop them, or convert the model to hf_tiny's ViT (see hf_tiny/convert.py)."
        )
    return Mix(len(labels), recipe.mixup, recipe.cutmix)


class EMA(Callback):
    """The finished model has an exponential moving average of the weights; the average is young in a run's first steps."""

    replaces_weights = True
    FILE = "ema.safetensors"

    def __init__(self, decay: float):
        if not 0 < decay < 1:
            raise InputError(f"--ema {decay:g}: it must be between 0 and 1, such as 0.999.")
        self.decay, self.weights = decay, {}

    @torch.no_grad()
    def on_step_end(self, state: TrainState, model: nn.Module) -> None:
        moving = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
        if not self.weights:
            self.weights = {name: weight.clone() for name, weight in moving.items()}
        self.weights = {name: weight.to(moving[name].device) for name, weight in self.weights.items()}  # moves once
        decay = min(self.decay, (1 + state.step) / (10 + state.step))
        torch._foreach_lerp_(list(self.weights.values()), [moving[name] for name in self.weights], 1 - decay)

    def on_save(self, folder: Path) -> None:
        save_file(self.weights, folder / self.FILE)

    def on_load(self, folder: Path) -> None:
        if not (folder / self.FILE).exists():
            raise InputError(f"{folder} was made without --ema. Resume with the same settings.")
        self.weights = load_file(folder / self.FILE)

    @torch.no_grad()
    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        for name, weight in self.weights.items():
            model.get_parameter(name).copy_(weight)
        return {}


def fine_tune(recipe, model: PreTrainedModel, processor, pixels: dict[str, Pixels], labels: Sequence[str]) -> dict:
    """Train on the pictures of `train`, and judge by those of the other splits."""
    groups, callbacks = prepare(model, recipe)
    if recipe.ema:
        callbacks.insert(0, EMA(recipe.ema))  # before adapters are merged
    changed = ClassifyPictures(processor, recipe.seed, Augment(recipe), start_mix(recipe, model.config, labels))
    plain = ClassifyPictures(processor, recipe.seed)
    judges = {}
    for split in [name for name in pixels if name != "train"]:
        held_out = PictureBatches(pixels[split], plain, recipe.per_device_eval_batch_size, recipe.seed, shuffle=False)
        report = report_pictures(split, held_out, labels, model)
        judges[split] = Evaluation(held_out, collect_pictures, compute_texts(labels), report)
    about = {
        "task": "A classifier of pictures",
        "base": base_name(recipe),
        "pipeline": "image-classification",
        "example": "picture.png",
        "labels": labels,
        "unit": "pictures",
        "scoring": "`majority` is the accuracy of always giving the most frequent label.",
    }
    card = {"template": "finetuned", "pipeline_tag": "image-classification", "data": recipe.data_name, "filled": about}
    return train(
        model,
        PictureBatches(pixels["train"], changed, recipe.per_device_train_batch_size, recipe.seed),
        recipe,
        evaluate=judges["validation"],
        test=judges.get("test"),
        groups=groups,
        callbacks=callbacks,
        processor=processor,
        card=card,
    )


# Reports


def shown(images: Tensor, normalize: Normalize) -> np.ndarray:
    """What a model reads, as it was before: (count, height, width, channels) in 0 ... 1."""
    images = images.float().cpu() * normalize.deviation + normalize.mean
    return images.clamp(0, 1).permute(0, 2, 3, 1).numpy()


def spread_out(batches: PictureBatches) -> tuple[np.ndarray, dict]:
    """The numbers and the batch of some pictures from all over the data, which may stand in the order of their classes."""
    rows = np.linspace(0, len(batches.data) - 1, min(DRAWN, len(batches.data)), dtype=int)
    return rows, batches.collate(batches.data[rows], 0)


def report_masked(batches: PictureBatches, model: HfTinyViTForMaskedImageModeling) -> Callable[[Results, Path], None]:
    """A picture of held-out pictures: as they are, what the encoder sees of them, and what the decoder makes of that."""

    @torch.no_grad()
    def report(results: Results, folder: Path) -> None:
        model.eval()
        _, batch = spread_out(batches)
        batch = {name: batch[name].to(model.device) for name in ("pixel_values", "ids_keep")}
        patches = patchify(batch["pixel_values"], model.config)
        seen = torch.zeros(patches.shape[:2], device=model.device).scatter(1, batch["ids_keep"], 1.0)[:, :, None]
        visible = unpatchify(seen.expand_as(patches), model.config.grid_size(image_size(model.config)), model.config)
        pixels = {"original": batch["pixel_values"], "reconstructed": model.reconstruct(**batch)}
        rows = {name: shown(images, batches.collate) for name, images in pixels.items()}
        grey = 1 - visible.permute(0, 2, 3, 1).cpu().numpy()
        masked = rows["original"] * (1 - grey) + 0.5 * grey
        order = {"original": rows["original"], "masked": masked, "reconstructed": rows["reconstructed"]}
        hub.draw_pictures(folder / "reconstructions.png", order)

    return report


def report_pictures(
    split: str, batches: PictureBatches, labels: Sequence[str], model: PreTrainedModel
) -> Callable[[Results, Path], None]:
    """A table of the predictions, a picture of what was taken for what, and one of what the model looks at."""

    def report(results: Results, folder: Path) -> None:
        found = [labels[number] for number in predict_texts(results)]
        with open(folder / f"{split}_predictions.csv", "w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["image", "label", "prediction"])
            for picture, name in zip(batches.data.pictures, found, strict=True):
                table.writerow([picture.place, picture.label, name])
        hub.draw_confusion(folder / f"{split}_confusion.png", labels, confusion_texts(results, labels))
        if isinstance(model, HfTinyViTForImageClassification):
            draw_attention(folder / f"{split}_attention.png", model, batches, found)

    return report


@torch.no_grad()
def draw_attention(path: Path, model: PreTrainedModel, batches: PictureBatches, names: Sequence[str]) -> None:
    """Where the last layer looks: the attention of what is pooled (the class token, or all patches), the mean over heads."""
    used = model.config._attn_implementation
    rows, batch = spread_out(batches)
    images = batch["pixel_values"].to(model.device)
    model.set_attn_implementation("eager")
    model.eval()
    weights = model(images, output_attentions=True).attentions[-1].float().mean(1)  # (batch, query, key)
    model.set_attn_implementation(used)
    grid = model.config.grid_size(images.shape[2:])
    looks = weights[:, model.vit.pooled].mean(1)[:, -grid[0] * grid[1] :].unflatten(1, grid)
    looks = looks / looks.amax((1, 2), keepdim=True)
    looks = nn.functional.interpolate(looks[:, None], images.shape[2:]).permute(0, 2, 3, 1).cpu().numpy()
    hub.draw_pictures(
        path, {"picture": shown(images, batches.collate), "attention": looks}, [names[row] for row in rows]
    )
