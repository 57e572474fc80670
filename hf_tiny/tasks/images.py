"""N → 1 on images: a label for an image; and masked autoencoding, which needs no labels."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
    ViTImageProcessorPil,
)
from transformers.utils import ModelOutput

from hf_tiny import report
from hf_tiny.arguments import flag
from hf_tiny.baselines import Baseline, sample
from hf_tiny.callbacks import EMA, Callback
from hf_tiny.checkpoint import goes_on, loaded
from hf_tiny.data.augment import Augment, AugmentArguments, Mix
from hf_tiny.data.batches import Batch, uniform
from hf_tiny.data.images import (
    ImageArguments,
    ImageBatches,
    ImageData,
    LabelledImage,
    Normalize,
    Survey,
    file_images,
    read_images,
    survey,
)
from hf_tiny.data.masking import MaskPatches
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Evaluation, Results
from hf_tiny.models import (
    HfTinyGreyImageProcessor,
    HfTinyViTConfig,
    HfTinyViTForImageClassification,
    HfTinyViTForMaskedImageModeling,
)
from hf_tiny.models.vit import patchify, unpatchify
from hf_tiny.processes import on_main
from hf_tiny.start import IMAGE_CLASSIFIER, named, prepare, pretrained, read_config
from hf_tiny.tasks import FILE, Line, Task, TaskEvaluation, label_names
from hf_tiny.tasks.classify import Classification, TextEvaluation, label_scores, predict_texts, score_texts

logger = logging.getLogger(__name__)

PATCHES = ((16, 2), (64, 4))  # the shorter side of an image, at most, and its patch; 16 above
LARGE, USUAL = 64, (224, 224)  # images that are larger have this size unless another is asked for
DRAWN, SHOWN_SIDE = 8, 320  # images of a report; pixels of one in the demo
DIMMED = 0.25  # how bright an image is where the model does not look
SURVEYED, LEAST_PATCHES = 1000, 4  # images for the components of patches; patches for each of their pixels
PIXEL_STEPS = 100  # of a regression on pixels


@dataclass(frozen=True, kw_only=True)
class ImageTaskArguments(AugmentArguments, ImageArguments):
    """Images, and the model that reads them."""

    patch_size: int | None = flag(
        None, "Side of a patch in pixels; by default 2, 4 or 16, by the size of the images.", low=1, group="model"
    )


# The model


def image_size(config: PreTrainedConfig) -> tuple[int, int]:
    size = config.to_dict().get("image_size", USUAL)  # models without positions have none
    return (size, size) if isinstance(size, int) else tuple(size)


def start_config(recipe, images: Sequence[LabelledImage], least_patch: int, **changes) -> PreTrainedConfig:
    """Of the model to train: that of the recipe's model, with the image size that is asked for, or a new one.

    changes: to the configuration; None leaves it as it is.
    """
    changes = {name: value for name, value in changes.items() if value is not None}
    wanted = None if recipe.image_size is None else tuple((recipe.image_size * 2)[:2])
    option, name = named(recipe)
    found = survey(images)
    if name:
        if recipe.patch_size:
            raise InputError(f"--patch_size {recipe.patch_size}: {option} {name} has its own. Leave the flag out.")
        config = _known_config(option, name, wanted, {**recipe.given_settings, **changes})
    else:
        config = _new_config(recipe, found, least_patch, wanted, changes)
    if config.num_channels not in (1, 3):
        raise InputError(f"--num_channels {config.num_channels}: images are read as grey (1) or in three colours (3).")
    _say_size(found, config)
    if config.num_channels == 1 and found.grey < 1:
        logger.warning(
            f"The model reads grey images, and {1 - found.grey:.0%} of these have colours: they become grey."
        )
    if config.num_channels == 3 and found.grey > 0:
        logger.warning(
            f"The model reads colours, and {found.grey:.0%} of these images are grey: all three colours get them."
        )
    return config


def _say_size(found: Survey, config: PreTrainedConfig) -> None:
    before, after = ("{} x {}".format(*size) for size in (found.size, image_size(config)))
    if found.agreeing < 1:
        typical = f"most are {before}" if found.agreeing > 0.5 else f"their median side is {found.size[0]}"
        logger.info(f"The images differ in size; {typical}. All become {after}; --image_size gives another size.")
    elif before != after:
        patches = f", in patches of {config.patch_size}" if isinstance(config, HfTinyViTConfig) else ""
        logger.info(f"Images of {before} become {after}{patches}.")


def _new_config(recipe, found: Survey, least_patch: int, wanted: tuple | None, changes: dict) -> HfTinyViTConfig:
    size = wanted or (found.size if max(found.size) <= LARGE else USUAL)
    patch = max(least_patch, next((patch for side, patch in PATCHES if min(size) <= side), 16))
    if wanted is None and recipe.patch_size is None:
        size = tuple(-(-side // patch) * patch for side in size)
    patch = recipe.patch_size or patch
    sizes = {"image_size": size, "patch_size": patch, "num_channels": 1 if found.grey == 1 else 3}
    try:
        return recipe.build_config(**changes, **sizes)
    except InputError as error:
        raise InputError(f"--image_size {' '.join(map(str, size))} --patch_size {patch}: {error}") from error


def _known_config(option: str, name: str, wanted: tuple | None, changes: dict) -> PreTrainedConfig:
    config = read_config(option, name, IMAGE_CLASSIFIER)
    if isinstance(config, HfTinyViTConfig):
        size = {} if wanted is None else {"image_size": list(wanted)}
        return read_config(option, name, IMAGE_CLASSIFIER, **{**changes, **size})
    if wanted not in (None, image_size(config)):
        raise InputError(f"--image_size {wanted}: {name} takes {image_size(config)} only. Leave the flag out.")
    if changes:
        raise InputError(f"--{next(iter(changes))} is for hf_tiny's ViT; {name} is a {config.model_type}.")
    return config


def start_processor(recipe, config: PreTrainedConfig, data: ImageData):
    """The image processor of the recipe's model, else one by the mean and deviation of the training images."""
    size = dict(zip(("height", "width"), image_size(config), strict=True))
    if recipe.model_name_or_path:
        try:
            processor = AutoImageProcessor.from_pretrained(recipe.model_name_or_path, trust_remote_code=False)
            # As the images are decoded here: models of others may have been trained with other ways to resize.
            processor.size, processor.resample = type(processor.size)(**size), Image.Resampling.BILINEAR
            return processor
        except (OSError, ValueError) as error:
            logger.warning(f"{recipe.model_name_or_path} has no image processor ({error}): a new one is made.")
    mean, deviation = data.mean_and_deviation()
    if config.num_channels == 1:
        return HfTinyGreyImageProcessor(size=size, image_mean=mean, image_std=deviation)
    return ViTImageProcessorPil(size=size, image_mean=mean, image_std=deviation, do_convert_rgb=True)


def start_masked(recipe, config: PreTrainedConfig) -> HfTinyViTForMaskedImageModeling:
    option, name = named(recipe)
    if not isinstance(config, HfTinyViTConfig):
        raise InputError(f"{option} {name}: a {config.model_type} is not hf_tiny's ViT.")
    if recipe.model_name_or_path:
        with loaded(f"{option} {name} cannot be loaded"):
            return HfTinyViTForMaskedImageModeling.from_pretrained(name, config=config).float()
    return HfTinyViTForMaskedImageModeling(config)


@torch.no_grad()
def start_patches(recipe, model: PreTrainedModel, data: ImageData, collate: Normalize) -> None:
    """Let the projection of patches start from their principal components in the training images. Outputs beyond these keep
    the usual initialisation, whose norm the components get."""
    pixels = isinstance(model.config, HfTinyViTConfig) and model.config.stem == "patch"
    if recipe.init == "random" or recipe.model_name_or_path or not pixels or on_main(lambda: goes_on(recipe)):
        return
    weight = model.get_input_embeddings().weight  # (hidden, pixels of a patch)

    def components() -> torch.Tensor | None:
        rows = np.linspace(0, len(data) - 1, min(len(data), SURVEYED), dtype=int)
        patches = patchify(collate(data[rows], 0)["pixel_values"], model.config).flatten(0, 1).double()
        if len(patches) < LEAST_PATCHES * patches.shape[1]:
            logger.warning(
                f"{len(patches):,} patches say too little of {patches.shape[1]} pixels: they start at random."
            )
            return None
        _, vectors = torch.linalg.eigh(patches.mT.cov())  # the last has the most variance
        return vectors.mT.flip(0)[: len(weight)].to(weight)

    found = on_main(components)
    if found is not None:
        weight[: len(found)] = found * weight.norm(dim=1).mean()
        logger.info(f"The projection of patches starts from {len(found)} principal components of the training images.")


# Batches and figures


class ClassifyImages(Normalize):
    """Batches for a classifier; mixed images have probabilities as labels."""

    def __init__(self, processor, seed: int, augment: Augment | None = None, mix: Mix | None = None):
        super().__init__(processor, seed, augment)
        self.mix = mix

    def __repr__(self) -> str:
        return f"{super().__repr__()}, {self.mix}"

    def __call__(self, rows: dict[str, np.ndarray], first: int) -> Batch:
        count = len(rows["label"])
        numbers = uniform(self.seed, first, count, self.width + Mix.width)
        images, labels = self.images(rows, numbers[:, : self.width]), torch.from_numpy(rows["label"])
        about = {"label": labels, "example": torch.from_numpy(rows["example"])}
        if self.mix is not None:
            images, labels = self.mix(images, labels, first, numbers[:, self.width :])
        counts = torch.tensor([count, count])
        return {"pixel_values": self.normalized(images), "labels": labels, "about": about, "num_items_in_batch": counts}


def spread_out(batches: ImageBatches) -> tuple[np.ndarray, dict]:
    """The numbers and the batch of some images from all over the data, which may stand in the order of their classes."""
    rows = np.linspace(0, len(batches.data) - 1, min(DRAWN, len(batches.data)), dtype=int)
    return rows, batches.collate(batches.data[rows], 0)


class ImageEvaluation(TextEvaluation):
    """The figures of a text classifier; the report is a table of the predictions, an image of what was taken for what, and
    one of what the model looks at."""

    batches: ImageBatches

    def collect(self, outputs: ModelOutput, batch: Batch) -> Results:
        """The labels that were learned may be mixed, these are not."""
        return super().collect(outputs, {**batch, "labels": batch["about"]["label"]})

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        answers = zip(predict_texts(self.results), score_texts(self.results), strict=True)
        for image, (number, score) in zip(self.items, answers, strict=True):
            gold = {} if image.label is None else {"label": image.label}
            yield (
                ".csv",
                {"image": image.place, **gold, "prediction": self.task.labels[number], "prediction_score": score},
            )

    def report(self, folder: Path) -> None:
        super().report(folder)
        self.draw(folder)

    def draw(self, folder: Path) -> None:
        """What the model looks at, in some of the images, above which stands what it takes them for."""
        model = self.task.model
        if isinstance(model, HfTinyViTForImageClassification):
            found = predict_texts(self.results)
            rows, batch = spread_out(self.batches)
            images = self.batches.collate.restored(batch["pixel_values"])
            looks = pooled_attention(model, batch["pixel_values"].to(model.device))
            shown = {"image": images, "overlay": images * (DIMMED + (1 - DIMMED) * looks), "attention": looks}
            path = folder / f"{self.split}_attention.png"
            names, note = report.drawable(self.task.labels, path)
            titles = [names[found[row]] for row in rows]
            report.draw_images(path, shown, titles, "attention: share of the highest", note)


@torch.no_grad()
def pooled_attention(model: HfTinyViTForImageClassification, images: torch.Tensor) -> np.ndarray:
    """Where the last layer looks: the attention of what is pooled (the class token, or all patches), the mean over heads;
    (batch, height, width, 1), at most 1."""
    with report.recorded_attention(model):
        weights = model(images, output_attentions=True).attentions[-1].float().mean(1)  # (batch, query, key)
    grid = model.config.grid_size(images.shape[2:])
    looks = weights[:, model.vit.pooled].mean(1)[:, -grid[0] * grid[1] :].unflatten(1, grid)
    looks = looks / looks.amax((1, 2), keepdim=True)
    return nn.functional.interpolate(looks[:, None], images.shape[2:]).permute(0, 2, 3, 1).cpu().numpy()


class MaskedImageEvaluation(Evaluation):
    """The loss; the report is an image of held-out images: as they are, what the encoder sees of them, and what the decoder
    makes of that."""

    batches: ImageBatches

    def __init__(self, batches: ImageBatches, model: HfTinyViTForMaskedImageModeling):
        super().__init__(batches)
        self.model = model

    def report(self, folder: Path) -> None:
        _, batch = spread_out(self.batches)
        report.draw_images(folder / "reconstructions.png", reconstructions(self.model, batch, self.batches.collate))


@torch.no_grad()
def reconstructions(model: HfTinyViTForMaskedImageModeling, batch: dict, collate: Normalize) -> dict[str, np.ndarray]:
    """The images of a batch, what of them is not masked, and what the decoder makes of that."""
    model.eval()
    batch = {name: batch[name].to(model.device) for name in ("pixel_values", "ids_keep")}
    patches = patchify(batch["pixel_values"], model.config)
    seen = torch.zeros(patches.shape[:2], device=model.device).scatter(1, batch["ids_keep"], 1.0)[:, :, None]
    visible = unpatchify(seen.expand_as(patches), model.config.grid_size(image_size(model.config)), model.config)
    hidden = 1 - visible.permute(0, 2, 3, 1).cpu().numpy()
    original, guessed = collate.restored(batch["pixel_values"]), collate.restored(model.reconstruct(**batch))
    return {"original": original, "masked": original * (1 - hidden) + 0.5 * hidden, "reconstructed": guessed}


class ImageTask(Task):
    ARGUMENTS, KIND, WHAT, EVALUATION = ImageArguments, IMAGE_CLASSIFIER, "images", ImageEvaluation
    BUILTIN = "digits of scikit-learn"
    data: dict[str, ImageData] | None = None  # of a recipe

    # Reading

    def splits(self) -> dict[str, list[LabelledImage]]:
        return read_images(self.arguments, labelled=True)

    def read(self, patterns: Sequence[str], labelled: bool) -> list[LabelledImage]:
        found = list(file_images(list(patterns), FILE, self.arguments, labelled))
        if not found:
            raise InputError(f"{', '.join(patterns)}: there are no images in it.")
        return found

    def from_texts(self, lines: list[Line]) -> list[LabelledImage]:
        """Each line is the path of an image."""
        return self.read([line.strip() for _, line in lines], labelled=False)

    def kinds(self, items: list[LabelledImage]) -> set[str]:
        return {".csv"}

    # Features and the model

    def features(self, items: list[LabelledImage], *, labelled: bool = True, training: bool = False) -> ImageData:
        config = self.model.config
        return ImageData(items, image_size(config), config.num_channels, self.labels, self.arguments.skip_bad_images)

    def start(self, splits: dict[str, list[LabelledImage]]) -> dict[str, ImageData]:
        recipe, self.labels = self.arguments, self.find_labels(splits)
        changes = {"drop_path_rate": recipe.drop_path_rate, "label_smoothing": recipe.label_smoothing}
        config = start_config(recipe, splits["train"], least_patch=4, **changes)
        self.model = self.start_model(config)
        self.data = {split: self.features(part) for split, part in splits.items()}
        self.processor = start_processor(recipe, config, self.data["train"])
        start_patches(recipe, self.model, self.data["train"], ClassifyImages(self.processor, recipe.seed))
        return self.data

    def start_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        recipe, names = self.arguments, label_names(self.labels)
        if recipe.model_name_or_path:
            kept = ("image_size", "drop_path_rate", "label_smoothing", *recipe.given_settings)
            changes = {name: vars(config)[name] for name in kept if isinstance(config, HfTinyViTConfig)}
            return pretrained(recipe.model_name_or_path, AutoModelForImageClassification, {**names, **changes})
        config.update(names)
        model = AutoModelForImageClassification.from_config(config)
        logger.info(f"{type(model).__name__}: from scratch, {model.num_parameters():,} parameters.")
        return model

    def prepare(self) -> tuple[list[dict], list[Callback]]:
        groups, callbacks = prepare(self.model, self.arguments)
        # Averaged before adapters are merged.
        return groups, [*([EMA(self.arguments.ema)] if self.arguments.ema else []), *callbacks]

    def mix(self) -> Mix | None:
        recipe, config = self.arguments, self.model.config
        if not (recipe.mixup or recipe.cutmix):
            return None
        if not isinstance(config, HfTinyViTConfig):
            raise InputError(
                f"--mixup and --cutmix give images two labels, of which transformers' {config.model_type} would make another "
                "loss: leave them out, or convert the model to hf_tiny's ViT (see hf_tiny/convert.py)."
            )
        return Mix(len(self.labels or ()), recipe.mixup, recipe.cutmix)

    def batches(
        self, features: ImageData, items: list, *, labelled: bool = True, training: bool = False
    ) -> ImageBatches:
        given = self.arguments
        if not training:
            collate = ClassifyImages(self.processor, seed=0)
            return ImageBatches(features, collate, given.per_device_eval_batch_size, 0, False)
        collate = ClassifyImages(self.processor, given.seed, Augment(given), self.mix())
        return ImageBatches(features, collate, given.per_device_train_batch_size, given.seed)

    # The page of `hf-tiny demo`

    SHOWS = {"scores": "scores", "where it looks: the brighter the more": "image"}

    @property
    def asks(self) -> dict[str, str]:
        return {"image": "image"}

    def given(self, image: Image.Image | None) -> list[LabelledImage]:
        if image is None:
            raise InputError("There is no image yet. Give one.")
        return [LabelledImage(lambda: image, None, "This image")]

    def show(self, image: Image.Image | None) -> list:
        """The scores, and the image as the model sees it, dark where it does not look; of a native model no more than that."""
        judged: Any = self.evaluation_of(self.given(image), "demo", labelled=False)
        judged.predict(self.model)
        pixels = judged.batches[0]["pixel_values"]
        seen = judged.batches.collate.restored(pixels)
        if isinstance(self.model, HfTinyViTForImageClassification):
            seen = seen * (0.15 + 0.85 * pooled_attention(self.model, pixels.to(self.model.device)))
        return [label_scores(judged.results["logits"][0], self.labels), enlarged(seen[0])]

    # Figures

    def metric(self, items: Sequence[LabelledImage]) -> Classification:
        return Classification()

    def evaluation(self, features: ImageData, items: list, split: str, *, labelled: bool = True) -> TaskEvaluation:
        return super().evaluation(features, list(features.images), split)  # those that can be read

    def baseline(self, splits: dict[str, list[LabelledImage]]) -> Baseline:
        return image_baseline(self.data or {split: self.features(part) for split, part in splits.items()})

    def described(self, shown: LabelledImage) -> dict:
        return {
            "pipeline_tag": "image-classification",
            "pipeline": "image-classification",
            "task": "A classifier of images",
            "example": "image.png",
            "unit": "images",
            "scoring": "`majority` is the accuracy of always giving the most frequent label.",
        }


class MaskedImageTask(ImageTask):
    """What a masked autoencoder makes of an image of which it sees some patches, others at every time."""

    PREDICTS, SHOWS = False, {"what it sees": "image", "what it makes of that": "image"}
    times = 0

    @property
    def asks(self) -> dict[str, str]:
        return {"image": "image", "share that is hidden": "share"}

    def show(self, image: Image.Image | None, share: float = 0.75) -> list:
        self.labels, self.times = None, self.times + 1
        rows, columns = self.model.config.grid_size(image_size(self.model.config))
        mask = MaskPatches(self.processor, self.times, rows * columns, share)
        found = reconstructions(self.model, mask(self.features(self.given(image))[np.arange(1)], 0), mask)
        return [enlarged(found[name][0]) for name in ("masked", "reconstructed")]


def enlarged(image: np.ndarray) -> Image.Image:
    """An image of numbers in 0 ... 1, large enough to be looked at, with its pixels as they are."""
    pixels = (255 * image.clip(0, 1)).round().astype(np.uint8)
    found = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
    times = max(1, SHOWN_SIDE // max(found.size))
    return found.resize((found.width * times, found.height * times), Image.Resampling.NEAREST)


def image_baseline(data: dict[str, ImageData]) -> Baseline:
    """Logistic regression on the pixels, standardised."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def read(split: str, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        found = data[split][np.asarray(rows)]
        return found["pixels"].reshape(len(rows), -1).astype(np.float32), found["label"]

    learner = make_pipeline(StandardScaler(), LogisticRegression(max_iter=PIXEL_STEPS, tol=1e-2))
    learner.fit(*read("train", sample(range(len(data["train"])), "images")))
    figures = {}
    for split in data.keys() - {"train"}:
        pixels, labels = read(split, range(len(data[split])))
        figures[split] = Classification().compute(predictions=learner.predict(pixels), references=labels)
    return Baseline("logistic regression on pixels", figures)
