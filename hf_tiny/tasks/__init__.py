"""One module for each task, with all of it: its flags, from rows to batches, its metrics, its predictions and images.

Here is what they share: `Task`, which recipes, `hf-tiny predict` and `hf-tiny evaluate` ask alike, and how a recipe fine-tunes.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_tiny.arguments import flag
from hf_tiny.baselines import Baseline, BaselineArguments, BaselineScores
from hf_tiny.callbacks import Callback
from hf_tiny.data import predictions, sources
from hf_tiny.data.batches import Batch, BucketedBatches, Source
from hf_tiny.data.encoding import Decoding, EncodingArguments
from hf_tiny.data.sources import TEXT
from hf_tiny.data.splits import each_labelled, find_labels, known_labels, read_splits
from hf_tiny.data.windows import IGNORED, CollateWindows, Feature
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Evaluation
from hf_tiny.hub import Card
from hf_tiny.metrics import share
from hf_tiny.models import SIZES, HfTinyElectraConfig
from hf_tiny.models.heads import EncoderConfig
from hf_tiny.models.spelling import Spelling
from hf_tiny.start import (
    ENCODER,
    Kind,
    TransferArguments,
    base_name,
    check,
    load_config,
    named,
    prepare,
    start_model,
    start_tokenizer,
)
from hf_tiny.tokenizer import TokenizerArguments
from hf_tiny.train import TrainConfig, train

logger = logging.getLogger(__name__)

MOST_LABELS, MOST_CHARACTERS = 20, 160  # that are shown at the start of a run
MOST_UNKNOWN = 0.05  # of the training text, before a run warns
HIGHEST_RATE = 1e-3  # of tiny models, and of wider ones that hf_tiny has pretrained without dropout
FILE = "file"  # stands where messages name a flag
Line = tuple[str, str]  # its place and its text


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TransferArguments, BaselineArguments, TokenizerArguments, EncodingArguments, TrainConfig):
    """The flags that every fine-tuning recipe for texts has."""

    CONFIG: ClassVar[type] = HfTinyElectraConfig
    # Of the configuration, for this task, of an encoder that was pretrained here without dropout, as small sizes are.
    PRETRAINED: ClassVar[dict] = {}
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
        None,
        "Peak learning rate. By default by the size: 1e-3 for tiny and mini, 3.5e-4 for small, 6.8e-5 for base.",
        above=0,
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


class Task:
    """A task, as a recipe trains a model for it, and as `hf-tiny predict`, `evaluate` and `demo` use the trained one. Each task
    has a subclass that says how.

    arguments: ARGUMENTS with the flags of a recipe, or with PredictArguments.
    model, processor: of a recipe they are made by `start`.
    labels: what the model can answer with, if it answers with labels.
    """

    ARGUMENTS: ClassVar[type]  # the flags by which data is read
    KIND: ClassVar[Kind] = ENCODER  # of the model
    WHAT: ClassVar[str] = "texts"
    FILES: ClassVar[tuple[str, ...]] = (*sources.TABLES, sources.TEXT)  # suffixes of files that the recipe reads
    BUILTIN: ClassVar[str]  # the name of the built-in data
    BUILTIN_FILES: ClassVar[Callable[[], tuple[list[str], list[str]]]]
    SIDES: ClassVar[tuple[str, ...]] = ("input_ids",)  # the arrays of a feature that are padded
    ABOUT: ClassVar[tuple[str, ...]] = ("example",)  # what of a feature is not for the model
    EVALUATION: ClassVar[type["TaskEvaluation"]]
    PREDICTS: ClassVar[bool] = True  # False: such a model can be looked at, and needs fine-tuning for more
    LIVE: ClassVar[bool] = False  # whether the page of the demo answers while its visitor types
    SHOWS: ClassVar[dict[str, str]]  # the parts of an answer on this page, and how each is shown: see `demo.shown`

    def __init__(self, arguments: Any, model: Any = None, processor: Any = None, labels: list[str] | None = None):
        self.arguments, self.model, self.processor, self.labels = arguments, model, processor, labels

    # Reading

    def splits(self) -> dict[str, list]:
        """The items of the recipe's data."""
        return self.read_splits()

    def read_splits(self, **choices) -> dict[str, list]:
        """choices: see `read_splits` of data/splits.py."""
        choices = {"what": self.WHAT, **choices}
        return read_splits(self.arguments, type(self).BUILTIN_FILES, self.from_files, self.from_row, **choices)

    def from_files(self, patterns: list[str], option: str, decoding: Decoding) -> Iterator:
        for path in sources.expand(patterns, option, self.FILES, any_suffix=sources.TEXT in self.FILES):
            yield from self.from_file(path, decoding)

    def from_file(self, path: str, decoding: Decoding, labelled: bool = True) -> Iterable:
        make = partial(self.from_row, sources.kind(path), labelled=labelled)
        yield from each_labelled(make, sources.table_rows(path, decoding))

    def from_row(self, kind: str, place: str, row: dict, labelled: bool = True) -> Any:
        """An item of a table's columns, or of the Hub's."""
        raise NotImplementedError

    def from_texts(self, lines: list[Line]) -> Iterable:
        """Items without labels from raw text."""
        raise NotImplementedError

    def are_labelled(self, lines: list[Line]) -> bool:
        """Whether lines are as the recipe reads them and not raw text."""
        return False

    def read(self, patterns: Sequence[str], labelled: bool) -> list:
        """The items of new files, folders and globs. Those that need no labels may be raw text, an item a line."""
        decoding, items = self.arguments.decoding, []
        for path in sources.expand(list(patterns), FILE, tuple(dict.fromkeys((*self.FILES, TEXT))), any_suffix=True):
            if labelled or (sources.kind(path) in self.FILES and sources.kind(path) != TEXT):
                items += self.from_file(path, decoding, labelled)
                continue
            lines = [(f"{path}:{number}", line) for number, line in sources.numbered_lines(path, decoding)]
            filled = [line for line in lines if line[1].strip()]
            if self.are_labelled(filled):
                logger.info(f"{path}: its lines have labels, as those that the recipe reads.")
                items += self.from_file(path, decoding, False)
            else:
                decoding.counts["empty lines are left out"] += len(lines) - len(filled)
                items += self.from_texts(filled)
        for problem, count in (+decoding.counts).items():
            logger.warning(f"{count:,} {problem}")
        if not items:
            raise InputError(f"{', '.join(patterns)}: there are no {self.WHAT} in it.")
        return items

    def kinds(self, items: list) -> set[str]:
        """The suffixes of the files that predictions are written to."""
        return {item.kind for item in items}

    # Labels and features

    @property
    def open_ended(self) -> bool:
        """Whether held-out labels that the training data lacks are to be expected."""
        return False

    def find_labels(self, splits: dict[str, list]) -> list[str] | None:
        return find_labels(splits, self.open_ended)

    def know_labels(self, items: list, labelled: bool) -> None:
        """Of new data: the labels that the model knows, and where they are open ended, then those that only the items have."""
        self.labels = known_labels(self.known or [], items, self.open_ended)

    @property
    def known(self) -> list[str] | None:
        """What a trained model answers with."""
        return [self.model.config.id2label[number] for number in range(self.model.config.num_labels)]

    def texts(self, items: list) -> list[str]:
        """What a tokenizer sees of them."""
        return [text for item in items for text in item.texts]

    def features(self, items: list, *, labelled: bool = True, training: bool = False) -> Any:
        """What batches are made of."""
        raise NotImplementedError

    def collate(self, labelled: bool) -> Callable[[list[Feature]], Batch]:
        return CollateWindows(self.processor.pad_token_id, self.ABOUT)

    def vary(self, items: list) -> Callable[[dict, tuple[int, int, int]], dict] | None:
        """How the features of the items to train on change from epoch to epoch: see `BucketedBatches`."""
        return None

    def batches(self, features: Any, items: list, *, labelled: bool = True, training: bool = False) -> Source:
        """What has no labels has one side only."""
        given, sides = self.arguments, self.SIDES if labelled else self.SIDES[:1]
        size = given.per_device_train_batch_size if training else given.per_device_eval_batch_size
        seed, vary = (given.seed, self.vary(items)) if training else (0, None)
        return BucketedBatches(features, self.collate(labelled), size, given.max_tokens, seed, training, sides, vary)

    # The model

    def head(self, items: list) -> tuple[Any, dict]:
        """What makes the model (see `start_model`), and the changes to its configuration. items: to train on."""
        raise NotImplementedError

    def start_tokenizer(self, items: list, texts: Callable[[], list[str]]) -> PreTrainedTokenizerBase:
        return start_tokenizer(self.arguments, texts, kind=self.KIND)

    def small_encoder(self) -> bool:
        """Whether the recipe starts from an encoder that was pretrained here without dropout: it would soon know a small set
        by heart."""
        option, name = named(self.arguments)
        if name is None or not self.arguments.model_name_or_path or self.KIND is not ENCODER:
            return False
        config = load_config(option, name, trust_remote_code=self.arguments.trust_remote_code)
        return isinstance(config, EncoderConfig) and not config.hidden_dropout_prob

    def start(self, splits: dict[str, list]) -> dict[str, Any]:
        """Make the processor and the model to train; returns the features of each split."""
        texts = partial(self.texts, splits["train"])
        self.labels = self.find_labels(splits)
        self.processor = self.start_tokenizer(splits["train"], texts)
        auto_class, changes = self.head(splits["train"])
        if self.small_encoder():
            given = self.arguments.given_settings
            changes = {name: value for name, value in self.arguments.PRETRAINED.items() if name not in given} | changes
        self.model = start_model(self.arguments, auto_class, self.processor, texts=texts, **changes)
        read_spelling(self.model, self.processor)
        features = {split: self.features(part, training=split == "train") for split, part in splits.items()}
        check_features(self.model, self.processor, features)
        log_labels(features["train"], self.model.config.id2label)
        log_texts(self.processor, features["train"], self.SIDES)
        return features

    def prepare(self) -> tuple[list[dict] | None, list[Callback]]:
        """The groups of the optimiser and the callbacks for `train`."""
        recipe = self.arguments
        if recipe.learning_rate is None:
            rate = HIGHEST_RATE if self.small_encoder() else usual_rate(self.model)
            self.arguments = recipe = replace(recipe, learning_rate=rate)
            logger.info(f"Learning rate: {recipe.learning_rate:g}, by the size of the model.")
        groups, callbacks = prepare(self.model, recipe)
        if recipe.measure_forgetting and recipe.model_name_or_path:
            from hf_tiny.tasks.pretrain import Forgetting  # late: few runs need it

            callbacks.append(Forgetting(recipe.model_name_or_path, recipe.measure_forgetting, recipe.encoding))
        return groups, callbacks

    # Figures

    def metric(self, items: Sequence) -> Any:
        """By which a model and its baseline are scored on the items, if one metric does it all."""
        return None

    def evaluation(self, features: Any, items: list, split: str, *, labelled: bool = True) -> "TaskEvaluation":
        return self.EVALUATION(self.batches(features, items, labelled=labelled), items, split, self)

    def evaluation_of(self, items: list, split: str, *, labelled: bool) -> "TaskEvaluation":
        """Of new data."""
        self.know_labels(items, labelled)
        return self.evaluation(self.features(items, labelled=labelled), items, split, labelled=labelled)

    def fit_baseline(self, items: list) -> tuple[str, Callable[[list], dict[str, float]]]:
        """The name of a baseline that has learned from the items, and what it scores on others."""
        raise NotImplementedError

    def baseline(self, splits: dict[str, list]) -> Baseline:
        name, score = self.fit_baseline(splits["train"])
        return Baseline(name, {split: score(part) for split, part in splits.items() if split != "train"})

    def described(self, shown: Any) -> dict:
        """What the card says of the task, with a held-out item as the example."""
        raise NotImplementedError

    def card(self, splits: dict[str, list]) -> Card:
        recipe, told = self.arguments, self.described(splits["validation"][0])
        told = {"template": "finetuned", "data": recipe.data_name(self.BUILTIN), "base": base_name(recipe), **told}
        return Card(labels=self.labels, **told)

    # The page of `hf-tiny demo`

    @property
    def asks(self) -> dict[str, str]:
        """What a visitor gives, and of which kind it is: see `demo.asked`."""
        return {"text": "text"}

    @property
    def shows(self) -> dict[str, str]:
        return self.SHOWS

    def show(self, *given: Any) -> list:
        """The values of SHOWS for what a visitor gave."""
        raise NotImplementedError

    def judged(self, text: str) -> Any:
        """The evaluation of one text, with its results."""
        if not text.strip():
            raise InputError("There is no text yet. Write one.")
        evaluation = self.evaluation_of(list(self.from_texts([("This text", text)])), "demo", labelled=False)
        evaluation.predict(self.model)
        return evaluation


class TaskEvaluation(Evaluation):
    """An evaluation that knows the items of its batches, and writes a prediction for each in the format of its file."""

    def __init__(self, batches: Source | None, items: Sequence, split: str, task: Any):
        super().__init__(batches)  # type: ignore[arg-type]  # None: of results that are there already
        self.items, self.split, self.task, self.metric = items, split, task, task.metric(items)

    def draw(self, folder: Path) -> None:
        """Images about the answers, whether or not there is something to compare these with."""

    def report(self, folder: Path) -> None:
        predictions.write(self.rows(), folder, f"{self.split}_predictions")


def fine_tune(recipe, task_class: type[Task]) -> dict[str, float]:
    """Train a model for a task as the recipe says, and evaluate it beside its baseline."""
    check(recipe, task_class.KIND)
    task = task_class(recipe)
    splits = task.splits()
    features = task.start(splits)
    groups, callbacks = task.prepare()
    if recipe.baseline:
        callbacks.append(BaselineScores(lambda: task.baseline(splits)))
    judges = {split: task.evaluation(features[split], splits[split], split) for split in splits if split != "train"}
    return train(
        task.model,
        task.batches(features["train"], splits["train"], training=True),
        task.arguments,
        evaluate=judges["validation"],
        test=judges.get("test"),
        groups=groups,
        callbacks=callbacks,
        processor=task.processor,
        card=task.card(splits),
    )


def read_spelling(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Tell a new head how the tokens of the vocabulary are written."""
    for module in model.modules():
        if isinstance(module, Spelling) and not module.numbers.any():
            special = {*tokenizer.all_special_ids}
            tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
            module.read([None if number in special else token for number, token in enumerate(tokens)])


def usual_rate(model: PreTrainedModel) -> float:
    """Of a model of this width: what was found to work for tiny ones, and falls with the width as the papers' rates do."""
    width = model.config.get_text_config().hidden_size
    return min(HIGHEST_RATE, float(f"{1e-3 * (128 / width) ** 1.5:.1e}"))


def log_labels(features: list[Feature], names: dict[int, str]) -> None:
    """How often each label occurs in the training data."""
    labels = [np.asarray(feature["labels"]) for feature in features]
    numbers, of_words = labels[0].dtype.kind == "f", labels[0].ndim > 0
    if numbers or not of_words:  # of a text, and so of all its windows
        labels = list({feature["example"]: label for feature, label in zip(features, labels, strict=True)}.values())
    if numbers and not of_words:
        if min(labels) < max(labels):  # pairs of texts that mean the same have no label
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
