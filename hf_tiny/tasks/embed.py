"""Sentence embeddings: texts that mean the same lie close to each other.

An encoder learns from pairs of texts: those with a score by regression on it, those without by telling the second text of a
pair from those of the other pairs of its micro-batch.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from hf_tiny.arguments import flag
from hf_tiny.baselines import TextFeatures, sample
from hf_tiny.data import builtin, sources
from hf_tiny.data.batches import Batch, pad_right
from hf_tiny.data.windows import Feature, WindowArguments
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Results, array, loss_and_items, mean_loss
from hf_tiny.metrics import share
from hf_tiny.models.heads import count_items
from hf_tiny.models.layers import cross_entropy
from hf_tiny.models.linking import without_pooler
from hf_tiny.tasks import Line, Task, TaskEvaluation
from hf_tiny.tasks.classify import Regression

logger = logging.getLogger(__name__)

MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers
NEAREST = 10  # lines that the demo shows


@dataclass(frozen=True, kw_only=True)
class EmbedArguments(WindowArguments):
    """Where the two texts of a pair are, and how similar they are."""

    text_column: str = flag("source", "The column that holds the first text of a pair.")
    text_pair_column: str = flag("target", "The column that holds the second text.")
    label_column: str | None = flag(
        None, "The column that holds the similarity, a number. Without it, the two texts of a pair mean the same."
    )
    temperature: float = flag(0.05, "By which similarities are divided when pairs have no score.", above=0)


@dataclass(frozen=True)
class TextPair:
    """score: how similar the texts are; None where pairs have no score."""

    texts: tuple[str, ...]
    score: float | None
    place: str
    kind: str
    row: dict
    labels: tuple[str, ...] = ()


# Features


def score_range(pairs: Sequence[TextPair]) -> tuple[float, float] | None:
    """The lowest and the highest similarity of the training data; None where pairs have no score."""
    scores = [pair.score for pair in pairs if pair.score is not None]
    if scores and min(scores) == max(scores):
        raise InputError(f"All similarities of the training data are {scores[0]:g}: there is nothing to learn.")
    return (min(scores), max(scores)) if scores else None


@dataclass(frozen=True)
class CollateTextPairs:
    """All first texts of the pairs, then all second ones."""

    pad_token_id: int

    def __call__(self, features: Sequence[Feature]) -> Batch:
        texts = [feature[side] for side in EmbedTask.SIDES for feature in features]
        sizes = torch.tensor([len(text) for text in texts])
        return {
            "input_ids": pad_right(texts, self.pad_token_id),
            "attention_mask": (torch.arange(int(sizes.max())) < sizes[:, None]).long(),
            "labels": torch.tensor([feature["labels"] for feature in features], dtype=torch.float32),
            "about": {"example": torch.tensor([feature["example"] for feature in features])},
            "num_items_in_batch": torch.tensor([len(features), int(sizes.sum())]),
        }


# The model


@dataclass
class EmbeddingOutput(ModelOutput):
    """embeddings (texts, hidden): of length 1."""

    loss: Tensor | None = None
    embeddings: Tensor | None = None


class SentenceEncoder(PreTrainedModel):
    """An encoder while it learns embeddings: the mean of its states, scaled to length 1. What is saved is the encoder, and
    what sentence-transformers needs to use it so.

    temperature: None where pairs have a score.
    """

    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, encoder: PreTrainedModel, temperature: float | None):
        super().__init__(deepcopy(encoder.config))
        self.encoder, self.temperature = without_pooler(encoder), temperature

    def state_dict(self, *args, **kwargs) -> dict[str, Tensor]:
        return self.encoder.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.encoder.load_state_dict(*args, **kwargs)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.encoder.get_input_embeddings()

    def save_pretrained(self, save_directory: str | Path, **kwargs) -> None:
        self.encoder.save_pretrained(save_directory, **kwargs)
        folder, size = Path(save_directory), self.config.get_text_config().hidden_size
        modules: list[dict] = [
            {"idx": number, "name": str(number), "path": "" if number == 0 else f"{number}_{name}",
             "type": f"sentence_transformers.models.{name}"}
            for number, name in enumerate(MODULES)
        ]  # fmt: skip
        (folder / "modules.json").write_text(json.dumps(modules, indent=2))
        for module in modules[1:]:
            (folder / module["path"]).mkdir(exist_ok=True)
        pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2))
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": "cosine"}))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> EmbeddingOutput:
        """input_ids (2 pairs, length): all first texts, then all second ones. labels (pairs,): how similar they are."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **kwargs)[0]
        weights = attention_mask[:, :, None].to(states.dtype)
        embeddings = F.normalize((states * weights).sum(1).float() / weights.sum(1), dim=-1)
        if labels is None:
            return EmbeddingOutput(None, embeddings)
        count = count_items(labels, num_items_in_batch)
        first, second = embeddings.chunk(2)
        if self.temperature is None:
            return EmbeddingOutput(F.mse_loss((first * second).sum(-1), labels, reduction="sum") / count, embeddings)
        # The other pairs of the micro-batch are the wrong answers, so that processes need not exchange any.
        scores, right = first @ second.mT / self.temperature, torch.arange(len(first), device=first.device)
        loss = (cross_entropy(scores, right, count) + cross_entropy(scores.mT, right, count)) / 2
        return EmbeddingOutput(loss, embeddings)


@dataclass(frozen=True)
class EmbeddingOn:
    """Makes a `SentenceEncoder` of an encoder, as an Auto class makes a head on it."""

    temperature: float | None

    def from_pretrained(self, name: str, **changes) -> SentenceEncoder:
        return SentenceEncoder(AutoModel.from_pretrained(name, **changes), self.temperature)

    def from_config(self, config: PreTrainedConfig) -> SentenceEncoder:
        return SentenceEncoder(AutoModel.from_config(config), self.temperature)


# Figures


class EmbedEvaluation(TaskEvaluation):
    """Pairs with a score: how the cosines agree with it. Without: whether the second text is the nearest of all held-out
    ones to the first (`accuracy`), and the mean of 1 / its rank (`mrr`)."""

    def collect(self, outputs: ModelOutput, batch: Batch) -> Results:
        first, second = outputs.embeddings.chunk(2)
        example = array(batch["about"]["example"])
        return {"first": array(first), "second": array(second), "example": example, **loss_and_items(outputs, batch)}

    def compute(self, results: Results) -> dict[str, float]:
        loss, order = {"loss": mean_loss(results)}, np.argsort(results["example"])
        if self.items[0].score is not None:
            gold = [self.items[example].score for example in results["example"][order]]
            return {**loss, **correlations(cosines(results), gold)}
        return {**loss, **retrieval(results["first"][order] @ results["second"][order].T)}

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        for pair, cosine in zip(self.items, cosines(self.results), strict=True):
            yield pair.kind, {**pair.row, "prediction": f"{cosine:.4f}"}


def correlations(found: np.ndarray, gold: list) -> dict[str, float]:
    figures = Regression().compute(predictions=found, references=gold)
    return {name: figures[name] for name in ("spearmanr", "pearson")}


def retrieval(similarities: np.ndarray) -> dict[str, float]:
    """Of each text (a row) to all second texts, of which that of its own number is the right one."""
    ranks = 1 + (similarities > similarities.diagonal()[:, None]).sum(1)
    return {"accuracy": share(ranks == 1), "mrr": share(1 / ranks)}


class Embeddings(TaskEvaluation):
    """The embedding of each text; of a pair of texts the cosine of theirs."""

    def answers(self, outputs: ModelOutput, batch: Batch) -> Results:
        return {"embeddings": array(outputs.embeddings), "example": array(batch["about"]["example"])}

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        vectors = iter(self.results["embeddings"][np.argsort(self.results["example"])])
        for item in self.items:
            found = [next(vectors) for _ in item.texts]
            if len(found) == 2:
                yield item.kind, {**item.row, "prediction": f"{found[0] @ found[1]:.4f}"}
            else:
                yield item.kind, {**item.row, "embedding": [round(value, 6) for value in found[0].tolist()]}


def cosines(results: Results) -> np.ndarray:
    """Of the two texts of each pair, in the order of the data."""
    return (results["first"] * results["second"]).sum(1)[np.argsort(results["example"])]


class EmbedTask(Task):
    """Tables with pairs get the cosine of each pair; other texts their embedding."""

    ARGUMENTS, FILES, SIDES = EmbedArguments, tuple(sources.TABLES), ("input_ids", "pair_ids")
    BUILTIN, BUILTIN_FILES = "dates in English and Korean", builtin.pair_files
    scores: tuple[float, float] | None = None  # the lowest and the highest that pairs have

    def splits(self) -> dict[str, list[TextPair]]:
        # A text that is in training and in held-out data would be found by heart.
        together = None if self.arguments.label_column else lambda pair: pair.texts[0]
        return self.read_splits(what="pairs", together=together)

    def from_row(self, kind: str, place: str, row: dict, labelled: bool = True) -> TextPair:
        """What is not labelled needs neither a similarity nor a second text."""
        given = self.arguments
        names = {"--text_column": given.text_column, "--text_pair_column": given.text_pair_column}
        if not labelled and given.text_pair_column not in row:
            names.pop("--text_pair_column")
        texts = tuple(sources.text_cell(row, column, place, option) for option, column in names.items())
        if given.label_column is None or not labelled:
            return TextPair(texts, None, place, kind, row)
        value = sources.cell(row, given.label_column, place, "--label_column")
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = np.nan
        if not np.isfinite(score):
            raise InputError(f"{place}: the similarity {value!r}, column {given.label_column!r}, is not a number.")
        return TextPair(texts, score, place, kind, row)

    def from_texts(self, lines: list[Line]) -> list[TextPair]:
        return [TextPair((line,), None, place, ".jsonl", {"text": line}) for place, line in lines]

    def find_labels(self, splits: dict[str, list[TextPair]]) -> None:
        self.scores = score_range(splits["train"])

    def know_labels(self, items: list[TextPair], labelled: bool) -> None:
        self.scores = score_range(items)

    def head(self, items: list[TextPair]) -> tuple:
        return EmbeddingOn(self.arguments.temperature if self.scores is None else None), {}

    def features(self, items: list[TextPair], *, labelled: bool = True, training: bool = False) -> list[Feature]:
        """input_ids and pair_ids, the tokens of both texts; labels, the score of the pair from 0 to 1 (0 where pairs have
        none); example, the index of the pair. Without labels each text is a feature, with its index. A text has one
        embedding: what does not fit into a window is cut off."""
        texts = self.texts(items)
        windows = list(self.arguments.encoder(self.processor).texts(texts, [None] * len(texts)))
        if cut := sum(len(found) > 1 for found in windows):
            logger.warning(f"{cut:,} of {len(texts):,} texts are longer than --max_seq_length and are cut off")
        ids = [found[0]["input_ids"] for found in windows]
        if not labelled:
            return [{"input_ids": own, "example": number} for number, own in enumerate(ids)]
        low, high = self.scores or (0.0, 1.0)
        return [
            {**dict(zip(self.SIDES, ids[2 * number : 2 * number + 2], strict=True)), "labels": value, "example": number}
            for number, value in enumerate(((pair.score or low) - low) / (high - low) for pair in items)
        ]

    def collate(self, labelled: bool):
        return CollateTextPairs(self.processor.pad_token_id) if labelled else super().collate(labelled)

    def evaluation(self, features: list[Feature], items: list[TextPair], split: str, *, labelled: bool = True):
        kind = EmbedEvaluation if labelled else Embeddings
        return kind(self.batches(features, items, labelled=labelled), items, split, self)

    # The page of `hf-tiny demo`

    SHOWS = {"the nearest lines": "table"}
    lines: tuple[str, ...] = ()  # that a text is compared with where its visitor gives none
    embedded: tuple[tuple[str, ...], np.ndarray] = ((), np.empty((0, 0)))  # the last lines, and their embeddings

    @property
    def asks(self) -> dict[str, str]:
        return {"text": "text", "lines to compare it with": "lines"}

    def show(self, text: str, lines: str = "") -> list:
        found = tuple(line for line in lines.splitlines() if line.strip()) or self.lines
        if not found:
            raise InputError("There are no lines to compare the text with. Paste some, or start with --lines FILE.")
        if self.embedded[0] != found:
            self.embedded = (found, self.vectors(found))
        cosines = self.embedded[1] @ self.vectors((text,))[0]
        order = np.argsort(-cosines, kind="stable")[:NEAREST]
        return [[["cosine", "line"], *([f"{cosines[place]:.4f}", found[place]] for place in order)]]

    def vectors(self, lines: tuple[str, ...]) -> np.ndarray:
        items = self.from_texts([("This text", line) for line in lines])
        judged = self.evaluation_of(items, "demo", labelled=False)
        judged.predict(self.model)
        return judged.results["embeddings"][np.argsort(judged.results["example"])]

    def fit_baseline(self, items: list[TextPair]) -> tuple:
        """Cosines of TF-IDF, of characters: the languages of a pair may share no word."""
        features = TextFeatures("characters").fit([pair.texts for pair in sample(items, "pairs")])

        def score(part: Sequence[TextPair]) -> dict[str, float]:
            texts = [pair.texts for pair in part]
            if part[0].score is not None:
                return correlations(features.cosines(texts), [pair.score for pair in part])
            first, second = features.sides(texts)
            return retrieval((first @ second.T).toarray())

        return "cosine of TF-IDF of characters", score

    def described(self, shown: TextPair) -> dict:
        return {
            "template": "embeddings",
            "pipeline_tag": "sentence-similarity",
            "task": "An encoder of sentences",
            "example": shown.texts[0][:100],
            "scoring": "Spearman's and Pearson's correlation of the cosine with the given similarity."
            if self.arguments.label_column is not None
            else "`accuracy`: how often the second text of a pair is the nearest to the first, of all held-out ones; `mrr`: "
            "the mean of 1 / its rank.",
        }
