"""One module for each task, with all of it: its flags, from rows to batches, its metrics, its predictions and images.

Here is what the tasks on encoders of text share.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_tiny.arguments import flag
from hf_tiny.baselines import Baseline, BaselineArguments, BaselineScores
from hf_tiny.data.batches import Batch, BucketedBatches
from hf_tiny.data.encoding import EncodingArguments
from hf_tiny.data.windows import IGNORED, Feature
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Evaluation
from hf_tiny.hub import Card
from hf_tiny.metrics import share
from hf_tiny.models import SIZES, HfTinyElectraConfig
from hf_tiny.start import TransferArguments, prepare
from hf_tiny.tasks.pretrain import Forgetting
from hf_tiny.tokenizer import TokenizerArguments
from hf_tiny.train import TrainConfig, train

logger = logging.getLogger(__name__)

MOST_LABELS, MOST_CHARACTERS = 20, 160  # that are shown at the start of a run
MOST_UNKNOWN = 0.05  # of the training text, before a run warns


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TransferArguments, BaselineArguments, TokenizerArguments, EncodingArguments, TrainConfig):
    """The flags that every fine-tuning recipe for texts has."""

    CONFIG: ClassVar[type] = HfTinyElectraConfig
    # Fine-tuned models have no generator: its share of the width restricts nothing.
    MODEL_SIZES: ClassVar[dict[str, dict]] = {
        size: {**fields, "generator_size": 1.0} for size, fields in SIZES[HfTinyElectraConfig].items()
    }
    DEFAULTS: ClassVar[dict] = {
        "num_train_epochs": 5.0,
        "eval_steps": 0,
        "save_steps": 0,
    }
    VOCAB_SIZE: ClassVar[int] = 4096  # that training texts alone are enough for
    RAW_VOCAB_SIZE: ClassVar[int] = 8192  # with a few megabytes of --raw_file

    raw_file: list[str] | None = flag(
        None, "Raw text for a model from scratch: for its vocabulary, and for what it knows of words.", group="data"
    )
    vocab_size: int | None = flag(  # type: ignore[assignment]  # until the texts are there
        None, "Size of the vocabulary to train. By default 4096; with much raw text 8192, and 16384 to classify.", low=1
    )
    lowercase: bool | None = flag(  # type: ignore[assignment]  # until the texts are there
        None, "Lower-case the text; by default where the training texts have no capital letters."
    )
    learning_rate: float | None = flag(  # type: ignore[assignment]  # until the model is there
        None, "Peak learning rate. By default by the width: 1e-3 for tiny, 3.5e-4 for small, 6.8e-5 for base.", above=0
    )
    size: str = flag("tiny", "Size of a model that is trained from scratch.", group="model")
    max_tokens: int = flag(
        4096,
        "Number of tokens in a micro-batch, padding included, of at most --per_device_train_batch_size texts.",
        low=1,
        group="training",
    )
    measure_forgetting: list[str] | None = flag(
        None, "Files of raw text on which to measure the pretraining losses before and after.", group="training"
    )


def label_names(labels: Sequence[str] | None, several: bool = False) -> dict:
    """What the configuration says of the labels; None is a number. several: one may have any number of them."""
    if labels is None:
        return {"num_labels": 1, "problem_type": "regression"}
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}
    return {"problem_type": f"{'multi' if several else 'single'}_label_classification", **names}


def fine_tune(
    recipe: FinetuneConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    features: dict[str, list[Feature]],
    collate: Callable[[list[Feature]], Batch],
    evaluation: Callable[[str, BucketedBatches], Evaluation],
    card: Card,
    baseline: Callable[[], Baseline],
    sides: tuple[str, ...] = ("input_ids",),
) -> dict[str, float]:
    """Train on the features of `train`. `evaluation(split, batches)` is made for each of the other splits.

    sides: the arrays of a feature that are padded.
    """
    check_features(model, tokenizer, features)
    log_labels(features["train"], model.config.id2label)
    log_texts(tokenizer, features["train"], sides)
    if recipe.learning_rate is None:
        recipe = replace(recipe, learning_rate=usual_rate(model))
        logger.info(f"Learning rate: {recipe.learning_rate:g}, by the width of the model.")
    groups, callbacks = prepare(model, recipe)
    if recipe.baseline:
        callbacks.append(BaselineScores(baseline))
    if recipe.measure_forgetting and recipe.model_name_or_path:
        callbacks.append(Forgetting(recipe.model_name_or_path, recipe.measure_forgetting, recipe.encoding))

    def batches(split: str, size: int) -> BucketedBatches:
        return BucketedBatches(features[split], collate, size, recipe.max_tokens, recipe.seed, split == "train", sides)

    judges = {
        split: evaluation(split, batches(split, recipe.per_device_eval_batch_size))
        for split in features
        if split != "train"
    }
    return train(
        model,
        batches("train", recipe.per_device_train_batch_size),
        recipe,
        evaluate=judges["validation"],
        test=judges.get("test"),
        groups=groups,
        callbacks=callbacks,
        processor=tokenizer,
        card=card,
    )


def usual_rate(model: PreTrainedModel) -> float:
    """Of a model of this width: what was found to work for tiny ones, and falls with the width as the papers' rates do."""
    width = model.config.get_text_config().hidden_size
    return min(1e-3, float(f"{1e-3 * (128 / width) ** 1.5:.1e}"))


def log_labels(features: list[Feature], names: dict[int, str]) -> None:
    """How often each label occurs in the training data."""
    labels = [np.asarray(feature["labels"]) for feature in features]
    numbers, of_words = labels[0].dtype.kind == "f", labels[0].ndim > 0
    if numbers or not of_words:  # of a text, and so of all its windows
        labels = list({feature["example"]: label for feature, label in zip(features, labels, strict=True)}.values())
    if numbers and not of_words:
        logger.info(f"labels: numbers from {min(labels):g} to {max(labels):g}, on average {np.mean(labels):g}")
        return
    if numbers:  # 0 for each class that a text does not have
        counts = np.count_nonzero(labels, axis=0)
    else:
        every = np.concatenate([label.ravel() for label in labels])
        counts = np.bincount(every[every != IGNORED], minlength=len(names))
    order = np.argsort(-counts, kind="stable")[:MOST_LABELS].tolist()
    more = f" and {len(counts) - len(order):,} more" if len(counts) > len(order) else ""
    logger.info(f"labels: {', '.join(f'{names[label]} {counts[label]:,}' for label in order)}{more}")


def log_texts(
    tokenizer: PreTrainedTokenizerBase, features: list[Feature], sides: tuple[str, ...] = ("input_ids",)
) -> None:
    """Two examples as the model reads them, and how much of the training text its tokenizer does not know."""
    for feature in features[:2]:
        texts = " | ".join(tokenizer.decode(feature[side].tolist()) for side in sides)
        logger.info(f"for example: {texts[:MOST_CHARACTERS]}")
    ids = np.concatenate([feature[side] for feature in features for side in sides])
    special = [number for number in tokenizer.all_special_ids if number != tokenizer.unk_token_id]
    unknown = share(ids[~np.isin(ids, special)] == tokenizer.unk_token_id)
    logger.info(f"{tokenizer.unk_token or 'unknown tokens'}: {unknown:.2%} of the training text")
    if unknown > MOST_UNKNOWN:
        logger.warning(
            f"The tokenizer does not know {unknown:.0%} of the training text: the model sees {tokenizer.unk_token} in its place. "
            "Use a model for the language of the text, or start from scratch without --tokenizer_name."
        )


def check_features(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, features: dict[str, list[dict]]) -> None:
    for split, part in features.items():
        if not part:
            raise InputError(
                f"The {split} data has nothing that is learned or scored: no window has a label. See --task or --tag_field."
            )
    longest = max(len(sample["input_ids"]) for part in features.values() for sample in part)
    limit = longest_input(model, tokenizer)
    if longest > limit:
        raise InputError(f"The model reads at most {limit} tokens, a window has {longest}: lower --max_seq_length.")


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens that a model has positions for."""
    positions = model.base_model.config.to_dict().get("max_position_embeddings", sys.maxsize)
    tables = (module for name, module in model.named_modules() if name.endswith(".position_embeddings"))
    skipped = [
        1 + table.padding_idx for table in tables if isinstance(table, nn.Embedding) and table.padding_idx is not None
    ]
    return min(positions - sum(skipped), tokenizer.model_max_length)  # RoBERTa's begin after the padding's
