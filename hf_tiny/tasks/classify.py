"""N → 1: a label, several, or a number, for a text or a pair of texts."""

import logging
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar
from unicodedata import normalize

import datasets
import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import ModelOutput

from hf_tiny import report
from hf_tiny.arguments import flag
from hf_tiny.baselines import fit_texts, sample
from hf_tiny.data import builtin, sources
from hf_tiny.data.batches import Batch
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.splits import NoLabel
from hf_tiny.data.windows import CollateWindows, Feature, WindowArguments
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Results, array, divides_by_count, mean_loss
from hf_tiny.metrics import Metric, macro_f1, majority, share
from hf_tiny.models.heads import EncoderConfig, Surface
from hf_tiny.start import load_config, named
from hf_tiny.tasks import Line, Task, TaskEvaluation, label_names

logger = logging.getLogger(__name__)

LINES = ".txt"  # "label text" lines
LONG_TEXT_DROPOUT = 0.1  # of a model from scratch: each window of a long text is learned from, which is noise enough
SHEET_ERRORS = ("#N/A", "#REF!", "#VALUE!", "#NAME?", "#DIV/0!", "#NULL!", "#NUM!")  # Excel saves them as text


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


# Rows to texts


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


def _label_and_text(line: str) -> tuple[str, str]:
    end = min((line + " ").index(" "), (line + "\t").index("\t"))
    return line[:end], line[end + 1 :]


def _several(value, place: str, arguments: ClassifyArguments) -> tuple[str, ...] | None:
    """The labels of a list, or of a text with separators; None where a text has one label."""
    if arguments.label_separator and isinstance(value, str | None):
        parts = (part.strip() for part in (value or "").split(arguments.label_separator))
        value = [part for part in parts if part]
    if not isinstance(value, list):
        return None
    return tuple(dict.fromkeys(label_name(each, place, arguments.label_column) for each in value))


def label_name(value, place: str, column: str | None) -> str:
    """A label as text; as a Mac writes Hangul it looks the same and is another. NaN is no label, whether it is a number or what
    a table says where there is none; nor is an error of a spreadsheet. column: None where it is the first word of a line."""
    name = "" if value is None else normalize("NFC", str(value).strip())
    if not name or name.lower() == "nan" or name.upper() in SHEET_ERRORS:
        where = "the first word" if column is None else f"column {column!r}"
        raise NoLabel(place, f"the label, {where}, is {name or 'empty'}")
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


class TextEvaluation(TaskEvaluation):
    def answers(self, outputs: ModelOutput, batch: Batch) -> Results:
        return {"logits": array(outputs.logits), "example": array(batch["about"]["example"])}

    def collect(self, outputs: ModelOutput, batch: Batch) -> Results:
        return {**super().collect(outputs, batch), "labels": array(batch["labels"])}

    def compute(self, results: Results) -> dict[str, float]:
        figures = self.metric.compute(predictions=predict_texts(results), references=gold_texts(results))
        return {"loss": mean_loss(results), **figures}

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        found, labels = predict_texts(self.results), self.task.labels
        names = [f"{value:.4f}" if labels is None else labels[value] for value in found]
        scores = [None] * len(found) if labels is None else score_texts(self.results)
        answers = zip(self.items, names, scores, strict=True)
        return ((text.kind, _predicted(text, name, score)) for text, name, score in answers)

    def report(self, folder: Path) -> None:
        super().report(folder)
        if self.task.labels is not None:
            found, gold = predict_texts(self.results), gold_texts(self.results)
            report.draw_confusion(folder / f"{self.split}_confusion.png", self.task.labels, gold, found)


class SeveralLabelsEvaluation(TextEvaluation):
    """A label is predicted where its probability is above one half."""

    def compute(self, results: Results) -> dict[str, float]:
        sides = (_mean_logits(results) > 0, gold_texts(results))
        found, gold = (side.astype(int).tolist() for side in sides)
        return {"loss": mean_loss(results), **self.metric.compute(predictions=found, references=gold)}

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        separator = self.task.arguments.label_separator  # None where cells are lists
        for text, logits in zip(self.items, _mean_logits(self.results), strict=True):
            chosen = np.flatnonzero(logits > 0)
            answer: list = [
                [self.task.labels[int(label)] for label in chosen],
                (1 / (1 + np.exp(-logits[chosen]))).round(4).tolist(),
            ]
            if separator is not None or text.kind == LINES:
                answer = [(separator or ",").join(map(str, part)) for part in answer]
            yield text.kind, _predicted(text, *answer)

    def report(self, folder: Path) -> None:
        TaskEvaluation.report(self, folder)


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


def label_scores(logits: np.ndarray, labels: list[str] | None, several: bool = False) -> dict[str, float] | str:
    """The probability of each label; of a number, what is predicted."""
    if labels is None:
        return f"{logits[0]:.4f}"
    shares = 1 / (1 + np.exp(-logits)) if several else np.exp(logits - logits.max())
    shares = shares if several else shares / shares.sum()
    return dict(zip(labels, shares.tolist(), strict=True))


def evidence(task: "TextTask", texts: Sequence[str], label: int) -> list[tuple[str, float | None]]:
    """What each word says for a label: gradient x input of its logit less the mean of all, over the tokens of the word; a
    share of the strongest. Where the windows of a long text share tokens, it is the gradient of their mean."""
    given, model, found = task.arguments, task.model, []
    inputs = task.processor(
        *([text] for text in texts), truncation=True, max_length=given.max_seq_length, padding=True, return_tensors="pt",
        stride=given.doc_stride, return_overflowing_tokens=len(texts) == 1, return_offsets_mapping=True,
    )  # fmt: skip

    def keep(module, arguments, states: torch.Tensor) -> torch.Tensor:
        found.append(states.detach().requires_grad_())
        return found[-1]

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        read = {name: inputs[name].to(model.device) for name in task.processor.model_input_names if name in inputs}
        logits = model(**read).logits.float().mean(0)
    finally:
        hook.remove()
    rest = 0 if task.several or len(logits) == 1 else logits.mean()
    (gradient,) = torch.autograd.grad(logits[label] - rest, found[0])
    weights = array((gradient * found[0]).sum(-1))  # (windows, tokens)
    words = [[(word.start(), word[0]) for word in re.finditer(r"\S+", text)] for text in texts]
    sums = [np.zeros(len(side)) for side in words]
    for window, offsets in enumerate(inputs["offset_mapping"].tolist()):
        for token, side in enumerate(inputs.sequence_ids(window)):
            if side is not None and words[side]:
                start, end = offsets[token]
                sums[side][bisect_right(words[side], max(start, end - 1), key=lambda word: word[0]) - 1] += weights[
                    window, token
                ]
    highest = max((float(np.abs(side).max()) for side in sums if len(side)), default=0) or 1.0
    pieces: list[tuple[str, float | None]] = []
    for side, values in zip(words, sums, strict=True):
        pieces += [("  |  ", None)] if pieces else []
        pieces += [(word, round(value / highest, 4)) for (_, word), value in zip(side, values.tolist(), strict=True)]
    return pieces


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


@torch.no_grad()
def start_at_mean(model: PreTrainedModel, mean: float) -> None:
    """Let a new output layer begin with the mean of the labels: in small steps its bias would be long on the way."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 1]
    if layers[-1].bias is not None and not layers[-1].bias.any():
        layers[-1].bias.fill_(mean)


class TextTask(Task):
    """One label for a text, several, or a number, which has no labels."""

    ARGUMENTS, BUILTIN, BUILTIN_FILES = (
        ClassifyArguments,
        "paragraphs of Python documentation",
        builtin.classified_files,
    )

    # Reading

    def splits(self) -> dict[str, list[Text]]:
        def every_label(texts: list[Text]) -> bool:
            check_lines(texts, self.arguments.text_column)
            return not is_regression({"train": texts}, self.arguments)

        splits = self.read_splits(labels=every_label)
        first = splits["train"][0]
        for text in chain.from_iterable(splits.values()):
            if (text.several is None) != (first.several is None):
                raise InputError(
                    f"{text.place}: labels are lists in some rows and not in others, such as {first.place}."
                )
        empty = [text.place for text in chain.from_iterable(splits.values()) if not "".join(text.texts).strip()]
        if empty:
            logger.warning(f"{len(empty):,} texts are empty, such as {empty[0]}: there is nothing to learn from them.")
        return splits

    def from_file(self, path: str, decoding: Decoding, labelled: bool = True) -> Iterator[Text]:
        if sources.kind(path) in sources.TABLES:
            yield from super().from_file(path, decoding, labelled)
            return
        for number, line in sources.numbered_lines(path, decoding):
            if not line.strip():
                continue
            (label, text), place = _label_and_text(line), f"{path}:{number}"
            if not label:
                raise InputError(f"{place}: the line begins with a blank and not with a label, as `label text` does.")
            several = _several(label, place, self.arguments)
            name = label_name(label, place, None) if several is None else label
            yield Text(text, None, name, place, LINES, {}, several)

    def from_row(self, kind: str, place: str, row: dict, labelled: bool = True) -> Text:
        given = self.arguments
        text = sources.text_cell(row, given.text_column, place, "--text_column")
        pair_column = given.text_pair_column
        pair = None if pair_column is None else sources.text_cell(row, pair_column, place, "--text_pair_column")
        if not labelled:
            return Text(text, pair, "", place, kind, row)
        value = sources.cell(row, given.label_column, place, "--label_column")
        several = _several(value, place, given)
        label = label_name(value, place, given.label_column) if several is None else ", ".join(several)
        return Text(text, pair, label, place, kind, row, several)

    def from_texts(self, lines: list[Line]) -> Iterator[Text]:
        """The two texts of a pair have a tab between."""
        pairs = self.arguments.text_pair_column is not None
        for place, line in lines:
            text, tab, pair = line.partition("\t") if pairs else (line, "", None)
            if pairs and not tab:
                raise InputError(f"{place}: the model reads pairs of texts. Give both, with a tab between.")
            yield Text(text, pair, "", place, LINES, {})

    def are_labelled(self, lines: list[Line]) -> bool:
        return all(_label_and_text(line)[0] in (self.known or ()) for _, line in lines)

    def read(self, patterns: Sequence[str], labelled: bool) -> list[Text]:
        texts = super().read(patterns, labelled)
        for text in texts if labelled and self.known is not None else ():
            if (text.several is not None) != self.several:
                number = (
                    "any number of labels. Give cells with lists, or --label_separator" if self.several else "one label"
                )
                raise InputError(f"{text.place}: to this model a text has {number}.")
        return texts

    # Labels and features

    @property
    def several(self) -> bool:
        """Whether a text may have any number of labels."""
        return self.model.config.problem_type == "multi_label_classification"

    def find_labels(self, splits: dict[str, list[Text]]) -> list[str] | None:
        return None if is_regression(splits, self.arguments) else super().find_labels(splits)

    @property
    def known(self) -> list[str] | None:
        config = self.model.config
        return None if config.problem_type == "regression" or config.num_labels == 1 else super().known

    def know_labels(self, items: list[Text], labelled: bool) -> None:
        self.labels = self.known
        if labelled and self.labels is None:
            is_regression({"eval": items}, replace(self.arguments, do_regression=True))  # it refuses what is no number
        elif labelled:
            super().know_labels(items, labelled)

    def head(self, items: list[Text]) -> tuple:
        changes, (option, name) = label_names(self.labels, several=items[0].several is not None), named(self.arguments)
        ours = name is None or isinstance(
            load_config(option, name, trust_remote_code=self.arguments.trust_remote_code), EncoderConfig
        )
        if ours and items[0].text_pair is not None:
            changes["classifier_pairs"] = self.arguments.given_settings.get("classifier_pairs", True)
        if (name is None or self.small_encoder()) and self.are_long(items):
            changes["hidden_dropout_prob"] = self.arguments.given_settings.get("hidden_dropout_prob", LONG_TEXT_DROPOUT)
        return AutoModelForSequenceClassification, changes

    def are_long(self, items: list[Text]) -> bool:
        """Whether most of the text is read in several windows."""
        encodings = self.processor.backend_tokenizer.encode_batch_fast(self.texts(items), add_special_tokens=False)
        return sum(map(len, encodings)) > len(items) * self.arguments.max_seq_length

    def start(self, splits: dict[str, list[Text]]) -> dict[str, list[Feature]]:
        features = super().start(splits)
        for module in self.model.modules():
            if isinstance(module, Surface) and module.rarity.eq(1).all():
                self.start_surface(module, features["train"])
        if self.labels is None:
            start_at_mean(self.model, float(np.mean(self.gold(splits["train"]))))
        return features

    def start_surface(self, surface: Surface, features: list[Feature]) -> None:
        """Let the part of a new classifier that sees how texts are written know which tokens are rare."""
        collate = CollateWindows(self.processor.pad_token_id)
        parts = (collate(features[first : first + 64]) for first in range(0, len(features), 64))
        surface.weigh((part["input_ids"], part["attention_mask"], part.get("token_type_ids")) for part in parts)

    def features(self, items: list[Text], *, labelled: bool = True, training: bool = False) -> list[Feature]:
        """input_ids, token_type_ids (if the model has them), labels and example, the index of the text. All windows of a text
        have its label, as `gold` gives it.

        With --class_weights, labels to train on are the weight in the place of the class, and 0 in the others, as a cross
        entropy with probabilities takes them; and weight is the text's share of what the loss is divided by.
        """
        windows = self.arguments.encoder(self.processor).texts(
            [text.text for text in items], [text.text_pair for text in items]
        )
        answers: list[dict] = [{}] * len(items)
        if labelled:
            answers = [{"labels": gold if np.ndim(gold) == 0 else np.float32(gold)} for gold in self.gold(items)]
        if training and (weights := self.weights(items)) is not None:
            every = np.diag(weights)
            answers = [{"labels": every[number], "weight": float(weights[number])} for number in self.gold(items)]
        return [
            {**window, **answer, "example": example}
            for example, (answer, found) in enumerate(zip(answers, windows, strict=True))
            for window in found
        ]

    def gold(self, texts: Sequence[Text]) -> list:
        """Of each text the number, the class number, or of several labels 0 or 1 for each class."""
        if self.labels is None:
            return [float(text.label) for text in texts]
        if texts[0].several is not None:
            return [np.isin(self.labels, text.labels).astype(int) for text in texts]
        numbers = {label: number for number, label in enumerate(self.labels)}
        return [numbers[text.label] for text in texts]

    def weights(self, texts: Sequence[Text]) -> np.ndarray | None:
        """What a text of each label weighs, the rarer the more; None: all texts weigh the same."""
        if self.arguments.class_weights == "none":
            return None
        if self.labels is None or texts[0].several is not None:
            raise InputError("--class_weights: this is for texts with one label each. Leave the flag out.")
        if not divides_by_count(self.model):
            raise InputError(
                f"--class_weights: transformers' {type(self.model).__name__} has a loss of its own, without weights. Convert the "
                "model to hf_tiny's with `hf-tiny convert`, or leave the flag out."
            )
        counts = Counter(text.label for text in texts)
        # Only their proportions matter, since the loss is divided by their sum. None is below 1: that is the least divisor.
        return np.array([max(counts.values()) / counts[label] for label in self.labels], dtype=np.float32)

    # The page of `hf-tiny demo`

    SHOWS = {"scores": "scores", "the words that speak for it (red) and against it": "heat"}

    @property
    def asks(self) -> dict[str, str]:
        return {"text": "text"} | ({} if self.arguments.text_pair_column is None else {"second text": "text"})

    def show(self, *texts: str) -> list:
        """The scores of all labels, or the number, and the words behind the best of them."""
        texts = tuple(" ".join(text.split()) for text in texts)
        logits = _mean_logits(self.judged("\t".join(texts)).results)[0]
        best = int(logits.argmax())
        return [label_scores(logits, self.labels, self.several), evidence(self, texts, best)]

    # Figures

    def metric(self, items: Sequence[Text]) -> Metric:
        if self.labels is None:
            return Regression()
        return Classification() if items[0].several is None else SeveralLabels()

    def evaluation(self, features: list[Feature], items: list[Text], split: str, *, labelled: bool = True):
        kind = SeveralLabelsEvaluation if self.several else TextEvaluation
        return kind(self.batches(features, items, labelled=labelled), items, split, self)

    def fit_baseline(self, items: list[Text]) -> tuple:
        learned, metric = sample(items, "texts"), self.metric(items)
        name, predict = fit_texts([text.texts for text in learned], self.gold(learned), regression=self.labels is None)
        return name, lambda part: metric.compute(
            predictions=predict([text.texts for text in part]), references=self.gold(part)
        )

    def described(self, shown: Text) -> dict:
        example = {"text": shown.text[:100], "text_pair": (shown.text_pair or "")[:100]}
        return {
            "pipeline_tag": "text-classification",
            "pipeline": "text-classification",
            "task": "A regressor of texts" if self.labels is None else "A classifier of texts",
            "options": "" if shown.several is None else "top_k=None",
            "example": example["text"] if shown.text_pair is None else example,
            "scoring": "A long text is the mean of its windows. "
            + (
                "`majority` is the accuracy of always giving the most frequent label."
                if shown.several is None
                else "A label is given where its probability is above one half. `micro_f1` is over all labels together, "
                "`macro_f1` the mean over labels, `accuracy` the share of texts whose labels are all right."
            ),
        }
