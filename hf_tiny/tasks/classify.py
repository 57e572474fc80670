"""N → 1: a label, several, or a number, for a text or a pair of texts."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

import datasets
import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_tiny import report
from hf_tiny.arguments import flag
from hf_tiny.baselines import Baseline, fit_texts, sample
from hf_tiny.data import builtin, predictions, sources
from hf_tiny.data.batches import Batch, Source
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.splits import read_splits
from hf_tiny.data.windows import CollateWindows, Feature, WindowArguments
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Evaluation, Results, array, divides_by_count, mean_loss
from hf_tiny.hub import Card
from hf_tiny.metrics import Metric, macro_f1, majority, share
from hf_tiny.start import base_name
from hf_tiny.tasks.predictor import FILE, Line, Predictor

LINES = ".txt"  # "label text" lines


@dataclass(frozen=True, kw_only=True)
class ClassifyArguments(WindowArguments):
    """Where a text and its label are."""

    text_column: str = flag("text", "The column that holds the text.")
    text_pair_column: str | None = flag(None, "The column that holds the second text of a pair.")
    label_column: str = flag("label", "The column that holds the label.")
    label_separator: str | None = flag(
        None, "What stands between labels where a text may have several, or none; cells with lists need no flag."
    )
    do_regression: bool | None = flag(
        None, "Predict numbers; by default when all labels are numbers and some are not whole."
    )
    class_weights: str = flag(
        "none", "balanced: all labels weigh the same in the loss, however rare.", choices=("none", "balanced")
    )


@dataclass(frozen=True)
class Text:
    """kind: the suffix of its file. row: all columns of a table. several: the labels, where a text may have any number."""

    text: str
    text_pair: str | None
    label: str
    place: str
    kind: str
    row: dict
    several: tuple[str, ...] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,) if self.several is None else self.several

    @property
    def texts(self) -> list[str]:
        return [self.text] if self.text_pair is None else [self.text, self.text_pair]


# Rows to features


def read_texts(arguments: ClassifyArguments) -> dict[str, list[Text]]:
    def every_label(texts: list[Text]) -> bool:
        check_lines(texts, arguments.text_column)
        return not is_regression({"train": texts}, arguments)

    splits = read_splits(
        arguments,
        builtin.classified_files,
        partial(_file_texts, arguments=arguments),
        partial(_row_text, arguments=arguments),
        "texts",
        labels=every_label,
    )
    first = splits["train"][0]
    for text in chain.from_iterable(splits.values()):
        if (text.several is None) != (first.several is None):
            raise InputError(f"{text.place}: labels are lists in some rows and not in others, such as {first.place}.")
    return splits


def check_lines(texts: Sequence[Text], column: str) -> None:
    """Lines have labels where these repeat. Of the first words of raw text about half occur only once, however much text
    there is. column: --text_column, which only a table has."""
    lines = [text for text in texts if text.kind == LINES]
    if lines and len(lines) == len(texts) and column != ClassifyArguments.text_column:
        raise InputError(
            f"{lines[0].place}: --text_column {column} names a column, and the name of this file does not say that it is a "
            f"table. Let it end in {', '.join(sources.TABLES)}; text with tabs between columns, as Excel saves it, in .tsv."
        )
    counts = Counter(label for text in lines for label in text.labels)
    single = {label for label, count in counts.items() if count == 1 and _number(label) is None}
    if 3 * len(single) > len(counts):
        text = next(text for text in lines if single.intersection(text.labels))
        raise InputError(
            f"{text.place}: is {text.label!r} the label of this line? {len(single):,} of {len(counts):,} first words occur only "
            "once, as in raw text. Lines must be `label text`, with labels that repeat; a table needs a name that ends in "
            f"{', '.join(sources.TABLES)}; raw text is for pretraining."
        )


def _file_texts(
    patterns: list[str], option: str, decoding: Decoding, arguments: ClassifyArguments, labelled: bool = True
) -> Iterator[Text]:
    for path in sources.expand(patterns, option, (*sources.TABLES, LINES), any_suffix=True):
        kind = sources.kind(path)
        if kind in sources.TABLES:
            for place, row in sources.table_rows(path, decoding):
                yield _row_text(kind, place, row, arguments, labelled)
        else:
            lines = ((f"{path}:{number}", line) for number, line in sources.numbered_lines(path, decoding))
            yield from _line_texts(lines, arguments)


def _label_and_text(line: str) -> tuple[str, str]:
    end = min((line + " ").index(" "), (line + "\t").index("\t"))
    return line[:end], line[end + 1 :]


def _line_texts(lines: Iterable[tuple[str, str]], arguments: ClassifyArguments) -> Iterator[Text]:
    for place, line in lines:
        if not line.strip():
            continue
        label, text = _label_and_text(line)
        if not label:
            raise InputError(f"{place}: the line begins with a blank and not with a label, as `label text` does.")
        several = _several(label, place, arguments)
        if several is None:
            label_name(label, place, None)
        yield Text(text, None, label, place, LINES, {}, several)


def _row_text(kind: str, place: str, row: dict, arguments: ClassifyArguments, labelled: bool = True) -> Text:
    text = sources.text_cell(row, arguments.text_column, place, "--text_column")
    pair_column = arguments.text_pair_column
    pair = None if pair_column is None else sources.text_cell(row, pair_column, place, "--text_pair_column")
    if not labelled:
        return Text(text, pair, "", place, kind, row)
    value = sources.cell(row, arguments.label_column, place, "--label_column")
    several = _several(value, place, arguments)
    label = label_name(value, place, arguments.label_column) if several is None else ", ".join(several)
    return Text(text, pair, label, place, kind, row, several)


def _several(value, place: str, arguments: ClassifyArguments) -> tuple[str, ...] | None:
    """The labels of a list, or of a text with separators; None where a text has one label."""
    if arguments.label_separator and isinstance(value, str | None):
        parts = (part.strip() for part in (value or "").split(arguments.label_separator))
        value = [part for part in parts if part]
    if not isinstance(value, list):
        return None
    return tuple(dict.fromkeys(label_name(each, place, arguments.label_column) for each in value))


def label_name(value, place: str, column: str | None) -> str:
    """A label as text. NaN is no label, whether it is a number or what a table says where there is none. column: None where
    it is the first word of a line."""
    name = "" if value is None else str(value).strip()
    if not name or name.lower() == "nan":
        where = "the first word" if column is None else f"column {column!r}"
        raise InputError(f"{place}: the label, {where}, is {name or 'empty'}. Give one, or drop the row.")
    if isinstance(value, dict | list):
        raise InputError(f"{place}: {column!r} holds {value!r}. A label is a text or a number, or a list of these.")
    return name


def is_regression(texts: dict[str, list[Text]], arguments: ClassifyArguments) -> bool:
    """Whether labels are numbers to come close to: as the flag says, else when all are numbers and one is not whole."""
    if arguments.do_regression is False:
        return False
    all_texts = list(chain.from_iterable(texts.values()))
    values = [None if text.several is not None else _number(text.label) for text in all_texts]
    commas = [text for text in all_texts if text.several is None and re.fullmatch(r"[-+]?\d+,\d+", text.label)]
    if commas and len(commas) == values.count(None):
        raise InputError(
            f"{commas[0].place}: the label {commas[0].label!r} has a comma where a number has a point. Write "
            f"{commas[0].label.replace(',', '.')}, or give --do_regression False if labels are names."
        )
    whole = [value is None or value == round(value) for value in values]
    if None in values and (arguments.do_regression or not all(whole)):
        wrong, number = all_texts[values.index(None)], all_texts[whole.index(False) if not all(whole) else 0]
        reason = "as --do_regression needs" if all(whole) else f"as that of {number.place} is, {number.label!r}"
        raise InputError(
            f"{wrong.place}: the label {wrong.label!r} is not a number, {reason}. Correct it, or give --do_regression False if "
            "labels are names."
        )
    return None not in values and (bool(arguments.do_regression) or not all(whole))


def _number(label: str) -> float | None:
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def balanced_weights(
    texts: Sequence[Text], labels: Sequence[str] | None, model: PreTrainedModel, arguments: ClassifyArguments
) -> np.ndarray | None:
    """What a text of each label weighs, the rarer the more; None: all texts weigh the same."""
    if arguments.class_weights == "none":
        return None
    if labels is None or texts[0].several is not None:
        raise InputError("--class_weights: this is for texts with one label each. Leave the flag out.")
    if not divides_by_count(model):
        raise InputError(
            f"--class_weights: transformers' {type(model).__name__} has a loss of its own, without weights. Convert the model to "
            "hf_tiny's with `hf-tiny convert`, or leave the flag out."
        )
    counts = Counter(text.label for text in texts)
    # Only their proportions matter, since the loss is divided by their sum. None is below 1: that is the least divisor.
    return np.array([max(counts.values()) / counts[label] for label in labels], dtype=np.float32)


def text_features(
    texts: Sequence[Text],
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str] | None,
    arguments: ClassifyArguments,
    weights: np.ndarray | None = None,
) -> list[Feature]:
    """input_ids, token_type_ids (if the model has them), labels and example, the index of the text. All windows of a text
    have its label: a class number; of several 0 or 1 for each class; a number to come close to when `labels` is None. A text
    without a label has none.

    weights: of each label. Then labels are the weight in the place of the class, and 0 in the others, as a cross entropy
        with probabilities takes them; and weight is the text's share of what the loss is divided by.
    """
    numbers = {label: number for number, label in enumerate(labels or [])}

    def answer(text: Text) -> dict:
        if text.several is None and not text.label:
            return {}
        if labels is None:
            return {"labels": float(text.label)}
        if text.several is None and weights is None:
            return {"labels": numbers[text.label]}
        chosen = np.isin(labels, text.labels).astype(np.float32)
        return (
            {"labels": chosen} if weights is None else {"labels": weights * chosen, "weight": float(weights @ chosen)}
        )

    encoder = arguments.encoder(tokenizer)
    windows = encoder.texts([text.text for text in texts], [text.text_pair for text in texts])
    return [
        {**window, **answer(text), "example": example}
        for example, (text, found) in enumerate(zip(texts, windows, strict=True))
        for window in found
    ]


# Figures


class Classification(Metric):
    """Accuracy, macro F1 and Matthews correlation of label ids. `majority` is the accuracy of always answering with the
    most frequent label."""

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        from sklearn.metrics import matthews_corrcoef

        found, gold = np.asarray(predictions), np.asarray(references)
        several = np.unique(np.concatenate([found, gold])).size > 1  # sklearn warns of a single label
        return {
            "accuracy": share(found == gold),
            "f1": macro_f1(found, gold),
            "matthews_correlation": float(matthews_corrcoef(gold, found)) if several else 0.0,
            "majority": majority(gold),
        }


class SeveralLabels(Metric):
    """F1 of 0 or 1 for each label: over all of them (`micro_f1`), and the mean over labels (`macro_f1`). `accuracy`: how
    often all labels of a text are right."""

    INPUTS: ClassVar[dict] = dict.fromkeys(("predictions", "references"), datasets.List(datasets.Value("int64")))

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, float]:
        from sklearn.metrics import f1_score

        found, gold = np.asarray(predictions), np.asarray(references)
        figures = {
            f"{average}_f1": float(f1_score(gold, found, average=average, zero_division=0))
            for average in ("micro", "macro")
        }
        return {**figures, "accuracy": share((found == gold).all(1))}


class Regression(Metric):
    """Pearson's and Spearman's correlation (nan where one side is constant) and the mean squared error."""

    INPUTS: ClassVar[dict] = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        from scipy.stats import pearsonr, spearmanr

        found, gold = np.asarray(predictions), np.asarray(references)
        varied = gold.size > 1 and np.ptp(found) > 0 and np.ptp(gold) > 0
        return {
            "pearson": float(pearsonr(found, gold).statistic) if varied else math.nan,
            "spearmanr": float(spearmanr(found, gold).statistic) if varied else math.nan,
            "mse": share((found - gold) ** 2),
        }


class TextEvaluation(Evaluation):
    """labels: None for regression."""

    def __init__(self, batches: Source, texts: Sequence[Text], labels: Sequence[str] | None, split: str):
        super().__init__(batches)
        self.texts, self.labels, self.split = texts, labels, split
        self.metric = Regression() if labels is None else Classification()

    def answers(self, outputs: ModelOutput, batch: Batch) -> Results:
        return {"logits": array(outputs.logits), "example": array(batch["about"]["example"])}

    def collect(self, outputs: ModelOutput, batch: Batch) -> Results:
        return {**super().collect(outputs, batch), "labels": array(batch["labels"])}

    def compute(self, results: Results) -> dict[str, float]:
        figures = self.metric.compute(predictions=predict_texts(results), references=gold_texts(results))
        return {"loss": mean_loss(results), **figures}

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        found = predict_texts(self.results)
        names = [f"{value:.4f}" if self.labels is None else self.labels[value] for value in found]
        scores = [None] * len(found) if self.labels is None else score_texts(self.results)
        answers = zip(self.texts, names, scores, strict=True)
        return ((text.kind, _predicted(text, name, score)) for text, name, score in answers)

    def report(self, folder: Path) -> None:
        predictions.write(self.rows(), folder, f"{self.split}_predictions")
        if self.labels is not None:
            found, gold = predict_texts(self.results), gold_texts(self.results)
            report.draw_confusion(folder / f"{self.split}_confusion.png", self.labels, gold, found)


class SeveralLabelsEvaluation(TextEvaluation):
    """A label is predicted where its probability is above one half.

    separator: None where cells are lists.
    """

    labels: Sequence[str]

    def __init__(
        self, batches: Source, texts: Sequence[Text], labels: Sequence[str], split: str, separator: str | None
    ):
        super().__init__(batches, texts, labels, split)
        self.metric, self.separator = SeveralLabels(), separator

    def compute(self, results: Results) -> dict[str, float]:
        found, gold = _mean_logits(results) > 0, gold_texts(results)
        figures = self.metric.compute(predictions=found.astype(int).tolist(), references=gold.astype(int).tolist())
        return {"loss": mean_loss(results), **figures}

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        for text, logits in zip(self.texts, _mean_logits(self.results), strict=True):
            chosen = np.flatnonzero(logits > 0)
            answer: list = [
                [self.labels[int(label)] for label in chosen],
                (1 / (1 + np.exp(-logits[chosen]))).round(4).tolist(),
            ]
            if self.separator is not None or text.kind == LINES:
                answer = [(self.separator or ",").join(map(str, part)) for part in answer]
            yield text.kind, _predicted(text, *answer)

    def report(self, folder: Path) -> None:
        predictions.write(self.rows(), folder, f"{self.split}_predictions")


def text_evaluation(
    batches: Source, texts: Sequence[Text], labels: Sequence[str] | None, split: str, arguments: ClassifyArguments
) -> TextEvaluation:
    if labels is None or texts[0].several is None:
        return TextEvaluation(batches, texts, labels, split)
    return SeveralLabelsEvaluation(batches, texts, labels, split, arguments.label_separator)


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


def _predicted(text: Text, prediction: str | list, score: float | str | list | None) -> str | dict:
    """The row with columns `prediction` and `prediction_score`; of a line the same with tabs between: the label, if it has
    one, the prediction, its score, the text or texts. A number that is predicted has no score."""
    found = {"prediction": prediction} | ({} if score is None else {"prediction_score": score})
    if text.kind != LINES:
        return {**text.row, **found}
    return "\t".join(map(str, (*([text.label] if text.label else []), *found.values(), *text.texts)))


def text_baseline(texts: dict[str, list[Text]], labels: Sequence[str] | None) -> Baseline:
    numbers = {label: number for number, label in enumerate(labels or [])}
    several = texts["train"][0].several is not None

    def gold(part: Sequence[Text]) -> list:
        if several:
            return [np.isin(labels or [], text.labels).astype(int) for text in part]
        return [float(text.label) if labels is None else numbers[text.label] for text in part]

    learned = sample(texts["train"], "texts")
    name, predict = fit_texts([text.texts for text in learned], gold(learned), regression=labels is None)
    metric = Regression() if labels is None else SeveralLabels() if several else Classification()
    figures = {
        split: metric.compute(predictions=predict([text.texts for text in part]), references=gold(part))
        for split, part in texts.items()
        if split != "train"
    }
    return Baseline(name, figures)


class TextPredictor(Predictor):
    """One label, several or a number, as the model's configuration says."""

    ARGUMENTS = ClassifyArguments

    def __init__(self, *args):
        super().__init__(*args)
        config = self.model.config
        self.several = config.problem_type == "multi_label_classification"
        self.labels = None if config.problem_type == "regression" or config.num_labels == 1 else self.names

    def from_file(self, path: str, decoding: Decoding, labelled: bool) -> Iterator[Text]:
        for text in _file_texts([path], FILE, decoding, self.arguments, labelled):
            if labelled and self.labels is not None and (text.several is not None) != self.several:
                number = (
                    "any number of labels. Give cells with lists, or --label_separator" if self.several else "one label"
                )
                raise InputError(f"{text.place}: to this model a text has {number}.")
            yield text

    def from_texts(self, lines: list[Line]) -> Iterator[Text]:
        """The two texts of a pair have a tab between."""
        pairs = self.arguments.text_pair_column is not None
        for place, line in lines:
            text, tab, pair = line.partition("\t") if pairs else (line, "", None)
            if pairs and not tab:
                raise InputError(f"{place}: the model reads pairs of texts. Give both, with a tab between.")
            yield Text(text, pair, "", place, LINES, {})

    def are_labelled(self, lines: list[Line]) -> bool:
        return all(_label_and_text(line)[0] in (self.labels or ()) for _, line in lines)

    def evaluation(self, items: list[Text], labelled: bool, split: str) -> TextEvaluation:
        if labelled and self.labels is None:
            is_regression({split: items}, replace(self.arguments, do_regression=True))  # it refuses what is no number
        elif labelled:
            self.labels_of(items)
        features = text_features(items, self.processor, self.labels, self.arguments)
        batches = self.batches(features, CollateWindows(self.processor.pad_token_id))
        if self.several:
            return SeveralLabelsEvaluation(batches, items, self.names, split, self.arguments.label_separator)
        return TextEvaluation(batches, items, self.labels, split)

    def train_items(self) -> list[Text]:
        return read_texts(self.arguments)["train"]

    def baseline(self, splits: dict[str, list[Text]]) -> Baseline:
        return text_baseline(splits, self.labels)


def text_card(recipe, texts: dict[str, list[Text]], labels: Sequence[str] | None) -> Card:
    shown = texts["validation"][0]
    several, example = shown.several, {"text": shown.text[:100], "text_pair": (shown.text_pair or "")[:100]}
    return Card(
        template="finetuned",
        data=recipe.data_name("paragraphs of Python documentation"),
        pipeline_tag="text-classification",
        pipeline="text-classification",
        task="A regressor of texts" if labels is None else "A classifier of texts",
        base=base_name(recipe),
        options="" if several is None else "top_k=None",
        example=example["text"] if shown.text_pair is None else example,
        labels=labels,
        scoring="A long text is the mean of its windows. "
        + (
            "`majority` is the accuracy of always giving the most frequent label."
            if several is None
            else "A label is given where its probability is above one half. `micro_f1` is over all labels together, "
            "`macro_f1` the mean over labels, `accuracy` the share of texts whose labels are all right."
        ),
    )
