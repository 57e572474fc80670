"""What the fine-tuning recipes share: their flags, the way from features to `train()`, and the reports at the end."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import hub
from .arguments import flag
from .data.collate import BucketedBatches
from .data.predictions import write_links, write_tags, write_texts
from .data.tagged import Sentence, Text
from .errors import InputError
from .metrics import Evaluation, Results, confusion_tags, confusion_texts, predict_links, predict_texts
from .models.linking import HfTinyTokenLinkingConfig, HfTinyTokenLinkingModel
from .tokenizer import TokenizerArguments
from .train import TrainConfig, train
from .transfer import TransferArguments, prepare

Report = Callable[[Results, Path], None]


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TransferArguments, TokenizerArguments, TrainConfig):
    """The flags that every fine-tuning recipe has."""

    vocab_size: int = flag(4096, "Size of the vocabulary to train, when there is no tokenizer yet.")
    num_train_epochs: float = flag(5.0, "Passes over the training data.")
    learning_rate: float = flag(5e-4, "Peak rate: about 1e-3 for a tiny model, 3e-4 for a small, 5e-5 for a base one.")
    max_tokens: int = flag(4096, "Tokens in a micro-batch, with its padding; with --per_device_train_batch_size texts.")
    eval_steps: int = flag(0, "Steps between evaluations; 0 evaluates at the end only.")
    save_steps: int = flag(0, "Steps between checkpoints; 0 saves at the end only.")


class LinkingOn:
    """Makes a new linking head on an encoder, as an Auto class makes other heads."""

    @staticmethod
    def from_pretrained(name: str, **config) -> HfTinyTokenLinkingModel:
        return HfTinyTokenLinkingModel.from_encoder(name, **config)

    @staticmethod
    def from_config(encoder, **config) -> HfTinyTokenLinkingModel:
        return HfTinyTokenLinkingModel(HfTinyTokenLinkingConfig(encoder=encoder, **config))


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
    features: dict[str, list[dict]],
    collate: Callable,
    judge: Callable[[str], tuple[Callable, Callable, Report]],
    card: dict,
) -> dict[str, float]:
    """Train on the features of `train`. `judge(split)` gives collect, compute and report for each of the others."""
    check_features(model, tokenizer, features)
    groups, callbacks = prepare(model, recipe)

    def batches(split: str, size: int, shuffle: bool) -> BucketedBatches:
        return BucketedBatches(features[split], collate, size, recipe.max_tokens, recipe.seed, shuffle)

    judges = {
        split: Evaluation(batches(split, recipe.per_device_eval_batch_size, False), *judge(split))
        for split in features
        if split != "train"
    }
    about = {"base": base_name(recipe), **card["filled"]}
    about["example"] = json.dumps(about["example"], ensure_ascii=False)[
        1:-1
    ]  # it stands in quotes, in a line of Python
    return train(
        model,
        batches("train", recipe.per_device_train_batch_size, True),
        recipe,
        evaluate=judges["validation"],
        test=judges.get("test"),
        groups=groups,
        callbacks=callbacks,
        processor=tokenizer,
        card={"template": "finetuned", **card, "filled": about},
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


def base_name(recipe: FinetuneConfig) -> str:
    if recipe.model_name_or_path:
        return f"`{recipe.model_name_or_path}`"
    return f"scratch, with the configuration of `{recipe.config_name}`" if recipe.config_name else "scratch"


# Reports: predictions in the format of the input, and a picture of what was taken for what


def report_texts(split: str, texts: Sequence[Text], labels: Sequence[str] | None) -> Report:
    def report(results: Results, folder: Path) -> None:
        found = predict_texts(results)
        if labels is None:
            write_texts(texts, [f"{value:.4f}" for value in found], folder, f"{split}_predictions")
        else:
            write_texts(texts, [labels[number] for number in found], folder, f"{split}_predictions")
            hub.draw_confusion(folder / f"{split}_confusion.png", labels, confusion_texts(results, labels))

    return report


def report_tags(split: str, sentences: Sequence[Sentence], labels: Sequence[str], tag_field: str) -> Report:
    def report(results: Results, folder: Path) -> None:
        tags = [[None] * len(sentence.words) for sentence in sentences]  # nothing is asked of windows without a tag
        for example, word, number in zip(*(results[name] for name in ("example", "word", "predicted")), strict=True):
            tags[example][word] = labels[number]
        write_tags(sentences, tags, folder, f"{split}_predictions", tag_field)
        hub.draw_confusion(folder / f"{split}_confusion.png", labels, confusion_tags(results, labels))

    return report


def report_links(split: str, sentences: Sequence[Sentence], labels: Sequence[str], task: str) -> Report:
    def report(results: Results, folder: Path) -> None:
        heads, numbers = predict_links(results, task)
        names = np.array(labels, dtype=object)
        heads, relations = (
            _of_all(sentences, results, found) for found in (heads, [names[number] for number in numbers])
        )
        if task == "subject":  # only of predicates
            heads = [
                [head if gold is not None else None for head, gold in zip(found, sentence.heads, strict=True)]
                for found, sentence in zip(heads, sentences, strict=True)
            ]
        write_links(sentences, heads, relations, folder, f"{split}_predictions", task)

    return report


def _of_all(sentences: Sequence[Sentence], results: Results, found: list[np.ndarray]) -> list[list]:
    """What was found, sentence by sentence. Nothing is asked of windows in which nothing is scored: it is missing at the
    end of some sentences, and for others altogether."""
    asked = dict(zip(np.unique(results["example"]).tolist(), (links.tolist() for links in found), strict=True))
    known = [asked.get(index, []) for index in range(len(sentences))]
    return [links + [None] * (len(one.words) - len(links)) for links, one in zip(known, sentences, strict=True)]
