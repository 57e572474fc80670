"""N → 1: a label, or a number, for a text or a pair of texts."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_tiny import report
from hf_tiny.arguments import flag
from hf_tiny.baselines import Baseline, fit_texts, sample
from hf_tiny.data import builtin, predictions, sources
from hf_tiny.data.batches import Batch, Source
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.splits import read_splits
from hf_tiny.data.windows import Feature, WindowArguments
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Evaluation, Results, array, loss_and_items, mean_loss
from hf_tiny.hub import Card
from hf_tiny.metrics import Metric, macro_f1, majority, share
from hf_tiny.start import base_name

LINES = ".txt"  # "label text" lines


@dataclass(frozen=True, kw_only=True)
class ClassifyArguments(WindowArguments):
    """Where a text and its label are."""

    text_column: str = flag("text", "The column that holds the text.")
    text_pair_column: str | None = flag(None, "The column that holds the second text of a pair.")
    label_column: str = flag("label", "The column that holds the label.")
    do_regression: bool | None = flag(
        None, "Predict numbers; by default when all labels are numbers and some are not whole."
    )


@dataclass(frozen=True)
class Text:
    """kind: the suffix of its file. row: all columns of a table."""

    text: str
    text_pair: str | None
    label: str
    place: str
    kind: str
    row: dict

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,)

    @property
    def texts(self) -> list[str]:
        return [self.text] if self.text_pair is None else [self.text, self.text_pair]


# Rows to features


def read_texts(arguments: ClassifyArguments) -> dict[str, list[Text]]:
    return read_splits(
        arguments,
        builtin.classified_files,
        partial(_file_texts, arguments=arguments),
        partial(_row_text, arguments=arguments),
        "texts",
        labels=lambda texts: not is_regression({"train": texts}, arguments),
    )


def _file_texts(patterns: list[str], option: str, decoding: Decoding, arguments: ClassifyArguments) -> Iterator[Text]:
    for path in sources.expand(patterns, option, (*sources.TABLES, LINES), any_suffix=True):
        kind = sources.kind(path)
        if kind in sources.TABLES:
            for place, row in sources.table_rows(path, decoding):
                yield _row_text(kind, place, row, arguments)
        else:
            yield from _line_texts(path, sources.numbered_lines(path, decoding))


def _line_texts(path: str, lines: Iterable[tuple[int, str]]) -> Iterator[Text]:
    for number, line in lines:
        if line.strip():
            end = min((line + " ").index(" "), (line + "\t").index("\t"))
            if not end:
                raise InputError(
                    f"{path}:{number}: the line begins with a blank and not with a label, as `label text` does."
                )
            yield Text(line[end + 1 :], None, line[:end], f"{path}:{number}", LINES, {})


def _row_text(kind: str, place: str, row: dict, arguments: ClassifyArguments) -> Text:
    text = sources.text_cell(row, arguments.text_column, place, "--text_column")
    pair_column = arguments.text_pair_column
    pair = None if pair_column is None else sources.text_cell(row, pair_column, place, "--text_pair_column")
    label = sources.cell(row, arguments.label_column, place, "--label_column")
    if label is None or not (label := str(label).strip()):
        raise InputError(f"{place}: the label, column {arguments.label_column!r}, is empty. Give one, or drop the row.")
    return Text(text, pair, label, place, kind, row)


def is_regression(texts: dict[str, list[Text]], arguments: ClassifyArguments) -> bool:
    """Whether labels are numbers to come close to: as the flag says, else when all are numbers and one is not whole."""
    if arguments.do_regression is False:
        return False
    values = []
    for text in chain.from_iterable(texts.values()):
        value = _number(text.label)
        if value is None:
            if arguments.do_regression:
                raise InputError(f"{text.place}: the label {text.label!r} is not a number, as --do_regression needs.")
            return False
        values.append(value)
    return bool(arguments.do_regression) or any(value != round(value) for value in values)


def _number(label: str) -> float | None:
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def text_features(
    texts: Sequence[Text],
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str] | None,
    arguments: ClassifyArguments,
) -> list[Feature]:
    """input_ids, token_type_ids (if the model has them), labels (a number to come close to when `labels` is None) and
    example, the index of the text. All windows of a text have its label."""
    numbers = {label: number for number, label in enumerate(labels or [])}
    encoder = arguments.encoder(tokenizer)
    windows = encoder.texts([text.text for text in texts], [text.text_pair for text in texts])
    return [
        {**window, "labels": float(text.label) if labels is None else numbers[text.label], "example": example}
        for example, (text, found) in enumerate(zip(texts, windows, strict=True))
        for window in found
    ]


# Figures


class Classification(Metric):
    """Accuracy, macro F1 and Matthews correlation of label ids. `majority` is the accuracy of always answering with the
    most frequent label."""

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        from sklearn.metrics import matthews_corrcoef

        predictions, references = np.asarray(predictions), np.asarray(references)
        several = np.unique(np.concatenate([predictions, references])).size > 1  # sklearn warns of a single label
        return {
            "accuracy": share(predictions == references),
            "f1": macro_f1(predictions, references),
            "matthews_correlation": float(matthews_corrcoef(references, predictions)) if several else 0.0,
            "majority": majority(references),
        }


class Regression(Metric):
    """Pearson's and Spearman's correlation (nan where one side is constant) and the mean squared error."""

    INPUTS: ClassVar[dict] = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        from scipy.stats import pearsonr, spearmanr

        predictions, references = np.asarray(predictions), np.asarray(references)
        varied = references.size > 1 and np.ptp(predictions) > 0 and np.ptp(references) > 0
        return {
            "pearson": float(pearsonr(predictions, references).statistic) if varied else math.nan,
            "spearmanr": float(spearmanr(predictions, references).statistic) if varied else math.nan,
            "mse": share((predictions - references) ** 2),
        }


class TextEvaluation(Evaluation):
    """labels: None for regression."""

    def __init__(self, batches: Source, texts: Sequence[Text], labels: Sequence[str] | None, split: str):
        super().__init__(batches)
        self.texts, self.labels, self.split = texts, labels, split
        self.metric = Regression() if labels is None else Classification()

    def collect(self, outputs: ModelOutput, batch: Batch) -> Results:
        return {
            "logits": array(outputs.logits),
            "labels": array(batch["labels"]),
            "example": array(batch["about"]["example"]),
            **loss_and_items(outputs, batch),
        }

    def compute(self, results: Results) -> dict[str, float]:
        figures = self.metric.compute(predictions=predict_texts(results), references=gold_texts(results))
        return {"loss": mean_loss(results), **figures}

    def report(self, folder: Path) -> None:
        found = predict_texts(self.results)
        names = [f"{value:.4f}" if self.labels is None else self.labels[value] for value in found]
        scores = [None] * len(found) if self.labels is None else score_texts(self.results)
        rows = ((text.kind, _predicted(text, *answer)) for text, *answer in zip(self.texts, names, scores, strict=True))
        predictions.write(rows, folder, f"{self.split}_predictions")
        if self.labels is not None:
            report.draw_confusion(folder / f"{self.split}_confusion.png", self.labels, gold_texts(self.results), found)


def predict_texts(results: Results) -> np.ndarray:
    """For each example, in order: its label id, or its value where the model has one output only."""
    means = _mean_logits(results)
    return means[:, 0] if means.shape[1] == 1 else means.argmax(1)


def score_texts(results: Results) -> list[float]:
    """The probability of what is predicted for each example, as a pipeline gives it."""
    means = _mean_logits(results)
    shares = np.exp(means - means.max(1, keepdims=True))
    return [round(score, 4) for score in (shares.max(1) / shares.sum(1)).tolist()]


def _mean_logits(results: Results) -> np.ndarray:
    """The windows of a long text are averaged. For label ids the mean of the logits decides as the mean of the log
    probabilities would: they differ by a number that is the same for all labels."""
    _, place, windows = np.unique(results["example"], return_inverse=True, return_counts=True)
    sums = np.zeros((len(windows), results["logits"].shape[1]))
    np.add.at(sums, place, results["logits"])
    return sums / windows[:, None]


def gold_texts(results: Results) -> np.ndarray:
    """All windows of an example have its label: the first one's is taken."""
    return results["labels"][np.unique(results["example"], return_index=True)[1]]


def _predicted(text: Text, prediction: str, score: float | None) -> str | dict:
    """The row with columns `prediction` and `prediction_score`; of a line the same with tabs between: the label, the
    prediction, its score, the text. A number that is predicted has no score."""
    found = {"prediction": prediction} | ({} if score is None else {"prediction_score": score})
    return (
        "\t".join(map(str, (text.label, *found.values(), text.text))) if text.kind == LINES else {**text.row, **found}
    )


def text_baseline(texts: dict[str, list[Text]], labels: Sequence[str] | None) -> Baseline:
    numbers = {label: number for number, label in enumerate(labels or [])}

    def gold(part: Sequence[Text]) -> list:
        return [float(text.label) if labels is None else numbers[text.label] for text in part]

    learned = sample(texts["train"], "texts")
    name, predict = fit_texts([text.texts for text in learned], gold(learned), regression=labels is None)
    metric = Regression() if labels is None else Classification()
    figures = {
        split: metric.compute(predictions=predict([text.texts for text in part]), references=gold(part))
        for split, part in texts.items()
        if split != "train"
    }
    return Baseline(name, figures)


def text_card(recipe, texts: dict[str, list[Text]], labels: Sequence[str] | None) -> Card:
    return Card(
        template="finetuned",
        data=recipe.data_name("paragraphs of Python documentation"),
        pipeline_tag="text-classification",
        pipeline="text-classification",
        task="A regressor of texts" if labels is None else "A classifier of texts",
        base=base_name(recipe),
        example=texts["validation"][0].text[:100],
        labels=labels,
        scoring="A long text is the mean of its windows. `majority` is the accuracy of always giving the most frequent "
        "label.",
    )
