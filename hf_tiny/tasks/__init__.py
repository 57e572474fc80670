"""One module for each task, with all of it: its flags, from rows to batches, its metrics, its predictions and images.

Here is what the tasks on encoders of text share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_tiny.arguments import flag
from hf_tiny.baselines import Baseline, BaselineArguments, BaselineScores
from hf_tiny.data.batches import Batch, BucketedBatches
from hf_tiny.data.windows import Feature
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Evaluation
from hf_tiny.hub import Card
from hf_tiny.models import SIZES, HfTinyElectraConfig
from hf_tiny.start import TransferArguments, prepare
from hf_tiny.tasks.pretrain import Forgetting
from hf_tiny.tokenizer import TokenizerArguments
from hf_tiny.train import TrainConfig, train


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TransferArguments, BaselineArguments, TokenizerArguments, TrainConfig):
    """The flags that every fine-tuning recipe for texts has."""

    CONFIG: ClassVar[type] = HfTinyElectraConfig
    # Fine-tuned models have no generator: its share of the width restricts nothing.
    MODEL_SIZES: ClassVar[dict[str, dict]] = {
        size: {**fields, "generator_size": 1.0} for size, fields in SIZES[HfTinyElectraConfig].items()
    }
    DEFAULTS: ClassVar[dict] = {
        "vocab_size": 4096,
        "num_train_epochs": 5.0,
        "learning_rate": 5e-4,  # about 1e-3 for a tiny model, 3e-4 for a small one, 5e-5 for a base one
        "eval_steps": 0,
        "save_steps": 0,
    }

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


def label_names(labels: Sequence[str] | None) -> dict:
    """What the configuration says of the labels; None is a number."""
    if labels is None:
        return {"num_labels": 1, "problem_type": "regression"}
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}
    return {"problem_type": "single_label_classification", **names}


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


def check_features(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, features: dict[str, list[dict]]) -> None:
    for split, part in features.items():
        if not part:
            raise InputError(
                f"The {split} data has nothing that is learned or scored: no window has a label. See --task or --tag_field."
            )
    longest = max(len(sample["input_ids"]) for part in features.values() for sample in part)
    positions = model.base_model.config.to_dict().get("max_position_embeddings", longest)
    tables = (module for name, module in model.named_modules() if name.endswith(".position_embeddings"))
    skipped = [
        1 + table.padding_idx for table in tables if isinstance(table, nn.Embedding) and table.padding_idx is not None
    ]
    limit = min(positions - sum(skipped), tokenizer.model_max_length)  # RoBERTa's begin after the padding's
    if longest > limit:
        raise InputError(f"The model reads at most {limit} tokens, a window has {longest}: lower --max_seq_length.")
