"""What is measured while training and on held-out data; `evaluate.Metric`s that need no network."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import evaluate
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from sacrebleu.metrics import BLEU, CHRF
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics.v1 import precision_recall_fscore_support as precision_recall_of_entities
from seqeval.scheme import IOB2
from sklearn.metrics import (
    confusion_matrix,
    f1_score,
    matthews_corrcoef,
    precision_recall_fscore_support,
    roc_auc_score,
)
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from .data.collate import Batch, Batches, BucketedBatches
from .train import Callback, TrainState, call, divides_by_count
from .trees import maximum_spanning_tree

logger = logging.getLogger(__name__)
Results = dict[str, np.ndarray]


@dataclass
class Evaluation:
    """`collect` takes what is needed from one batch's outputs, item by item; `compute` turns all of it into figures;
    `report` writes files about the last results (predictions, pictures) into a folder."""

    batches: Batches | BucketedBatches
    collect: Callable[[ModelOutput, Batch], Results]
    compute: Callable[[Results], dict[str, float]]
    report: Callable[[Results, Path], None] | None = None
    results: Results = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """The processes share the batches; every item counts once, in the order of the data, however many there are. All
        call the model equally often, as a model in shards needs: what one evaluates a second time is left out."""
        model.eval()
        divides, results = divides_by_count(model), []
        for first in range(0, len(self.batches), accelerator.num_processes):
            index = (first + accelerator.process_index) % len(self.batches)
            batch = send_to_device(self.batches[index], accelerator.device)
            with accelerator.autocast():
                outputs = call(model, batch, batch["num_items_in_batch"] if divides else None)
                results.append((index, {**self.collect(outputs, batch), **self.more(model, batch)}))
        model.train()
        by_index = dict(gather_object(results))
        ordered = [by_index[index] for index in range(len(self.batches))]
        self.results = {name: np.concatenate([result[name] for result in ordered]) for name in ordered[0]}
        return self.compute(self.results)

    def more(self, model: nn.Module, batch: Batch) -> Results:
        """What is taken from the model beside its outputs."""
        return {}

    def write_report(self, folder: Path) -> None:
        if self.report is not None:
            self.report(self.results, folder)


@dataclass
class Generation(Evaluation):
    """An evaluation for which the model also writes: `generate(model, batch)` gives a text for each sample."""

    generate: Callable[[nn.Module, Batch], list[str]] = field(kw_only=True)

    def more(self, model: nn.Module, batch: Batch) -> Results:
        example = batch["about"]["example"].cpu().numpy()
        return {"texts": np.array(self.generate(model, batch), dtype=object), "example": example}


class ReplacedTokenDetection(evaluate.Metric):
    """Scores above 0 say "replaced". The majority entropy is the loss of always answering with the overall share of
    replaced tokens: a discriminator that does no better has learned nothing."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("float32"), "references": datasets.Value("int8")}
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", features=datasets.Features(features), format="numpy"
        )

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        found = predictions > 0
        precision, recall, _, _ = precision_recall_fscore_support(references, found, average="binary", zero_division=0)
        share = references.mean()
        both = 0 < share < 1
        return {
            "rtd_accuracy": float((found == references).mean()),
            "rtd_precision": float(precision),
            "rtd_recall": float(recall),
            "rtd_auc": float(roc_auc_score(references, predictions)) if both else math.nan,
            "rtd_majority_entropy": float(-share * math.log(share) - (1 - share) * math.log(1 - share))
            if both
            else 0.0,
        }


def collect_electra(outputs: ModelOutput, batch: Batch) -> Results:
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    counts = batch["num_items_in_batch"]
    return {
        "scores": outputs.logits.detach().float()[valid].cpu().numpy(),
        "replaced": outputs.replaced[valid].cpu().numpy(),
        "mlm_correct": outputs.mlm_logits.argmax(-1).eq(outputs.mlm_labels).cpu().numpy(),
        # Sums and counts, not means: batches of different size then weigh what they should.
        "mlm_loss": (outputs.mlm_loss.detach() * counts[0])[None].cpu().numpy(),
        "rtd_loss": (outputs.rtd_loss.detach() * counts[1])[None].cpu().numpy(),
    }


def compute_electra(discriminator_weight: float) -> Callable[[Results], dict[str, float]]:
    metric = ReplacedTokenDetection(keep_in_memory=True)

    def compute(results: Results) -> dict[str, float]:
        mlm_loss = float(results["mlm_loss"].sum() / results["mlm_correct"].size)
        rtd_loss = float(results["rtd_loss"].sum() / results["replaced"].size)
        return {
            "loss": mlm_loss + discriminator_weight * rtd_loss,
            "mlm_loss": mlm_loss,
            "mlm_accuracy": float(results["mlm_correct"].mean()),
            "rtd_loss": rtd_loss,
            **metric._compute(results["scores"], results["replaced"]),
        }

    return compute


class CollapseWarning(Callback):
    """Says in words when the discriminator does no better than the majority class, which its falling loss hides."""

    needs_whole_weights = False

    def on_evaluate(self, state: TrainState, metrics: dict[str, float]) -> None:
        if state.step < state.warmup_steps:
            return
        loss, entropy = metrics["eval_rtd_loss"], metrics["eval_rtd_majority_entropy"]
        if loss >= entropy or metrics["eval_rtd_recall"] == 0:
            logger.warning(
                f"step {state.step}: the discriminator has collapsed to the majority class or has not left it yet (RTD loss "
                f"{loss:.3f}, majority entropy {entropy:.3f}, recall {metrics['eval_rtd_recall']:.3f}). If this lasts: "
                "rotary positions, a smaller generator, a lower learning rate, or more steps."
            )


# --- a token from those before it, or from those around it


def collect_tokens(token_bytes: np.ndarray) -> Callable[[ModelOutput, Batch], Results]:
    """token_bytes: how many bytes of text each token stands for. In training only the loss is collected, which is divided
    by the count of the whole step there."""

    def collect(outputs: ModelOutput, batch: Batch) -> Results:
        results = _sum_and_items(outputs, batch)
        if outputs.loss.requires_grad:
            return results
        labels = batch["labels"].cpu().numpy()
        return {**results, "bytes": token_bytes[labels[labels != -100]].sum(keepdims=True)}

    return collect


def compute_tokens(results: Results) -> dict[str, float]:
    """`ppl`: perplexity, by which the loss compares models with one tokenizer. `bits_per_byte`: the information in the
    scored tokens over the bytes of their text, which compares models with any."""
    loss = _mean_loss(results)
    if "bytes" not in results:
        return {"loss": loss}
    bits = results["loss"].sum(dtype=np.float64) / math.log(2)
    return {"loss": loss, "ppl": math.exp(min(loss, 700.0)), "bits_per_byte": float(bits / results["bytes"].sum())}


# --- one label or number for a text


def _share(right: np.ndarray) -> float:
    return float(right.mean()) if right.size else math.nan


def _majority(references: np.ndarray) -> float:
    """The accuracy of always answering with the most frequent label."""
    return float(np.unique(references, return_counts=True)[1].max() / references.size) if references.size else math.nan


def _macro_f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """The mean over the labels that occur, as gold or as answer."""
    if not references.size:
        return math.nan
    return float(f1_score(references, predictions, average="macro", zero_division=0))


def _metric_info(description: str, format: str | None = "numpy", **features) -> evaluate.MetricInfo:
    return evaluate.MetricInfo(
        description=description, citation="", features=datasets.Features(features), format=format
    )


class Classification(evaluate.Metric):
    """Accuracy, macro F1 and Matthews correlation of label ids. `majority` is the accuracy of always answering with the
    most frequent label."""

    def _info(self) -> evaluate.MetricInfo:
        return _metric_info(self.__doc__, predictions=datasets.Value("int64"), references=datasets.Value("int64"))

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        several = np.unique(np.concatenate([predictions, references])).size > 1  # sklearn warns of a single label
        return {
            "accuracy": _share(predictions == references),
            "f1": _macro_f1(predictions, references),
            "matthews_correlation": float(matthews_corrcoef(references, predictions)) if several else 0.0,
            "majority": _majority(references),
        }


class Regression(evaluate.Metric):
    """Pearson's and Spearman's correlation (nan where one side is constant) and the mean squared error."""

    def _info(self) -> evaluate.MetricInfo:
        return _metric_info(self.__doc__, predictions=datasets.Value("float64"), references=datasets.Value("float64"))

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        varied = references.size > 1 and np.ptp(predictions) > 0 and np.ptp(references) > 0
        return {
            "pearson": float(pearsonr(predictions, references).statistic) if varied else math.nan,
            "spearmanr": float(spearmanr(predictions, references).statistic) if varied else math.nan,
            "mse": _share((predictions - references) ** 2),
        }


def _sum_and_items(outputs: ModelOutput, batch: Batch) -> Results:
    """The loss as a sum and a count: batches of different size then weigh what they should. No items, no loss."""
    items = batch["num_items_in_batch"][:1]
    total = torch.where(items > 0, outputs.loss.detach().float() * items, 0.0)
    return {"loss": total.cpu().numpy(), "items": items.cpu().numpy()}


def _mean_loss(results: Results) -> float:
    items = results["items"].sum()
    return float(results["loss"].sum(dtype=np.float64) / items) if items else math.nan


def collect_texts(outputs: ModelOutput, batch: Batch) -> Results:
    return {
        "logits": outputs.logits.detach().float().cpu().numpy(),
        "labels": batch["labels"].cpu().numpy(),
        "example": batch["about"]["example"].cpu().numpy(),
        **_sum_and_items(outputs, batch),
    }


def collect_pictures(outputs: ModelOutput, batch: Batch) -> Results:
    """As of texts; the labels that were learned may be mixed, these are not."""
    return collect_texts(outputs, {**batch, "labels": batch["about"]["label"]})


def collect_masked(outputs: ModelOutput, batch: Batch) -> Results:
    """Of masked pictures only the loss."""
    return _sum_and_items(outputs, batch)


def compute_masked(results: Results) -> dict[str, float]:
    return {"loss": _mean_loss(results)}


def predict_texts(results: Results) -> np.ndarray:
    """For each example, in order: its label id, or its value where the model has one output only.

    The windows of a long text are averaged. For label ids the mean of the logits decides as the mean of the log
    probabilities would: they differ by a number that is the same for all labels.
    """
    _, place, windows = np.unique(results["example"], return_inverse=True, return_counts=True)
    sums = np.zeros((len(windows), results["logits"].shape[1]))
    np.add.at(sums, place, results["logits"])
    means = sums / windows[:, None]
    return means[:, 0] if means.shape[1] == 1 else means.argmax(1)


def _gold_texts(results: Results) -> np.ndarray:
    """All windows of an example have its label: the first one's is taken."""
    return results["labels"][np.unique(results["example"], return_index=True)[1]]


def compute_texts(labels: list[str] | None) -> Callable[[Results], dict[str, float]]:
    """labels: None for regression."""
    metric = Regression(keep_in_memory=True) if labels is None else Classification(keep_in_memory=True)

    def compute(results: Results) -> dict[str, float]:
        return {"loss": _mean_loss(results), **metric._compute(predict_texts(results), _gold_texts(results))}

    return compute


def confusion_texts(results: Results, labels: list[str]) -> np.ndarray:
    """How often each label (row) was answered with each label (column)."""
    return confusion_matrix(_gold_texts(results), predict_texts(results), labels=range(len(labels)))


# --- a tag for each word


class Tags(evaluate.Metric):
    """Accuracy and macro F1 of single tags. `majority` is the accuracy of always answering with the most frequent tag."""

    def _info(self) -> evaluate.MetricInfo:
        return _metric_info(self.__doc__, predictions=datasets.Value("int64"), references=datasets.Value("int64"))

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        return {
            "accuracy": _share(predictions == references),
            "f1": _macro_f1(predictions, references),
            "majority": _majority(references),
        }


class Entities(evaluate.Metric):
    """Precision, recall and F1 of whole entities by seqeval, mode="strict", scheme=IOB2: an entity counts when its type
    and both its ends are right, and it begins with B-; an I- that follows no B- or I- of its type is no entity.
    `accuracy` is that of single tags."""

    def _info(self) -> evaluate.MetricInfo:
        tags = datasets.List(datasets.Value("string"))
        return _metric_info(self.__doc__, format=None, predictions=tags, references=tags)

    def _compute(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
        # This is what seqeval's own figures call in mode="strict", once instead of three times.
        precision, recall, f1, _ = precision_recall_of_entities(
            references, predictions, average="micro", scheme=IOB2, zero_division=0
        )
        right = [
            a == b for tags, gold in zip(predictions, references, strict=True) for a, b in zip(tags, gold, strict=True)
        ]
        return {
            "f1": float(f1),
            "precision": float(precision),
            "recall": float(recall),
            "accuracy": _share(np.array(right)),
        }


def is_entity_scheme(labels: list[str]) -> bool:
    """Whether the tags mark the beginning (B-) and the inside (I-) of entities, and nothing else but O."""
    return any(label.startswith("B-") for label in labels) and all(
        label == "O" or label.startswith(("B-", "I-")) for label in labels
    )


def collect_tags(outputs: ModelOutput, batch: Batch) -> Results:
    """Every word that its window owns, scored or not (then its label is -100): predictions are of all words."""
    word = batch["about"]["word"]
    words = word >= 0
    return {
        "predicted": outputs.logits.detach().argmax(-1)[words].cpu().numpy(),
        "labels": batch["labels"][words].cpu().numpy(),
        "example": batch["about"]["example"][:, None].expand_as(word)[words].cpu().numpy(),
        "word": word[words].cpu().numpy(),
        **_sum_and_items(outputs, batch),
    }


def _in_order(results: Results) -> Results:
    """The words of the data in their order, however windows and batches had them."""
    order = np.lexsort((results["word"], results["example"]))
    return {name: results[name][order] for name in ("predicted", "labels", "example", "word")}


def _scored_tags(results: Results) -> Results:
    words = _in_order(results)
    scored = words["labels"] != -100
    return {name: values[scored] for name, values in words.items()}


def compute_tags(labels: list[str]) -> Callable[[Results], dict[str, float]]:
    """Entities where the tags are B-, I- and O, else Tags."""
    names = np.array(labels, dtype=object)
    entities, tags = Entities(keep_in_memory=True), Tags(keep_in_memory=True)
    marks_entities = is_entity_scheme(labels)

    def compute(results: Results) -> dict[str, float]:
        words = _scored_tags(results)
        if not marks_entities:
            return {"loss": _mean_loss(results), **tags._compute(words["predicted"], words["labels"])}
        # No entity reaches over the end of a sentence, nor over words that are not scored.
        ends = np.flatnonzero((np.diff(words["example"]) != 0) | (np.diff(words["word"]) != 1)) + 1
        predictions, references = (
            [part.tolist() for part in np.split(names[words[name]], ends)] for name in ("predicted", "labels")
        )
        return {"loss": _mean_loss(results), **entities._compute(predictions, references)}

    return compute


def confusion_tags(results: Results, labels: list[str]) -> np.ndarray:
    """How often each tag (row) was answered with each tag (column)."""
    words = _scored_tags(results)
    return confusion_matrix(words["labels"], words["predicted"], labels=range(len(labels)))


# --- another word for each word


class Parsing(evaluate.Metric):
    """Attachment scores of dependency trees by the rules of the CoNLL 2018 shared task, on given words: every word
    counts, punctuation too. `uas`: the right head. `las`: the right head and relation, without the relation's subtype
    (what follows the colon). `las_full`: with it. `label_accuracy`: the right relation without its subtype, whatever
    the head."""

    def _info(self) -> evaluate.MetricInfo:
        heads, relations = datasets.Value("int64"), datasets.Value("string")
        return _metric_info(
            self.__doc__, predictions=heads, references=heads, relations=relations, reference_relations=relations
        )

    def _compute(
        self, predictions: np.ndarray, references: np.ndarray, relations: np.ndarray, reference_relations: np.ndarray
    ) -> dict[str, float]:
        attached = np.asarray(predictions) == np.asarray(references)
        pairs = list(zip(relations, reference_relations, strict=True))
        same = np.array([found == gold for found, gold in pairs], dtype=bool)
        alike = np.array([found.split(":")[0] == gold.split(":")[0] for found, gold in pairs], dtype=bool)
        return {
            "uas": _share(attached),
            "las": _share(attached & alike),
            "las_full": _share(attached & same),
            "label_accuracy": _share(alike),
        }


class Subjects(evaluate.Metric):
    """How often a predicate's subject was found: 0 says that it is omitted. `overt_accuracy` is over the predicates that
    have one, `omitted_accuracy` over the others; `majority` is the accuracy of always answering "omitted"."""

    def _info(self) -> evaluate.MetricInfo:
        return _metric_info(self.__doc__, predictions=datasets.Value("int64"), references=datasets.Value("int64"))

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        right, omitted = predictions == references, references == 0
        return {
            "subject_accuracy": _share(right),
            "overt_accuracy": _share(right[~omitted]),
            "omitted_accuracy": _share(right[omitted]),
            "majority": _share(omitted),
        }


def collect_links(outputs: ModelOutput, batch: Batch) -> Results:
    """In training there are no label logits, and only the loss is collected."""
    if outputs.label_logits is None:
        return _sum_and_items(outputs, batch)
    about = batch["about"]
    sizes = about["num_words"]
    width = outputs.logits.shape[1]
    words = torch.arange(width, device=sizes.device) < sizes[:, None]  # (windows, words) that are not padding
    heads = torch.arange(width + 1, device=sizes.device) <= sizes[:, None]
    pairs = words[:, :, None] & heads[:, None, :]
    return {
        "scores": outputs.logits.detach().float()[pairs].cpu().numpy(),
        "best_labels": outputs.label_logits.detach().argmax(-1)[pairs].to(torch.int32).cpu().numpy(),
        "sizes": sizes.cpu().numpy(),
        "first_word": about["first_word"].cpu().numpy(),
        "example": about["example"].cpu().numpy(),
        **{name: about[name][words].cpu().numpy() for name in ("owned", "gold_heads", "gold_labels")},
        **_sum_and_items(outputs, batch),
    }


def _sentences(results: Results) -> Iterator[Results]:
    """Each example, in order, put together from its windows: `scores` and `best_labels` (words, words + 1), `gold_heads`
    and `gold_labels` (words,). A word's row comes from the one window that owns the word; a pair that no window has seen,
    or of a word with itself, scores -inf."""
    sizes, first_word, example = results["sizes"], results["first_word"], results["example"]
    pair_ends, word_ends = np.cumsum(sizes * (sizes + 1)), np.cumsum(sizes)
    order = np.argsort(example, kind="stable")
    for windows in np.split(order, np.flatnonzero(np.diff(example[order])) + 1):
        length = int((first_word[windows] + sizes[windows]).max())
        sentence = {
            "scores": np.full((length, length + 1), -np.inf),
            "best_labels": np.zeros((length, length + 1), dtype=np.int64),
            "gold_heads": np.full(length, -100),
            "gold_labels": np.full(length, -100),
        }
        for window in windows:
            size, first = int(sizes[window]), int(first_word[window])
            pairs = slice(pair_ends[window] - size * (size + 1), pair_ends[window])
            words = slice(word_ends[window] - size, word_ends[window])
            owned = np.flatnonzero(results["owned"][words])
            heads = np.r_[0, first + 1 : first + size + 1]
            for name in ("scores", "best_labels"):
                sentence[name][(first + owned)[:, None], heads] = results[name][pairs].reshape(size, size + 1)[owned]
            for name in ("gold_heads", "gold_labels"):
                sentence[name][first + owned] = results[name][words][owned]
        np.fill_diagonal(sentence["scores"][:, 1:], -np.inf)
        yield sentence


def _decode(sentence: Results, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Heads and label ids. "parse": the best tree; "subject": each word's best, by itself."""
    scores = sentence["scores"]
    heads = maximum_spanning_tree(scores) if task == "parse" else scores.argmax(1)
    return heads, sentence["best_labels"][np.arange(len(heads)), heads]


def predict_links(results: Results, task: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each sentence, in order: the heads of its words (0, or a word counted from 1) and the ids of their labels."""
    decoded = [_decode(sentence, task) for sentence in _sentences(results)]
    return [heads for heads, _ in decoded], [labels for _, labels in decoded]


def compute_links(labels: list[str], task: str) -> Callable[[Results], dict[str, float]]:
    """task: "parse" or "subject"."""
    names = np.array(labels, dtype=object)
    parsing, subjects = Parsing(keep_in_memory=True), Subjects(keep_in_memory=True)

    def compute(results: Results) -> dict[str, float]:
        loss = {"loss": _mean_loss(results)}
        if "scores" not in results:
            return loss
        sentences = [(*_decode(one, task), one["gold_heads"], one["gold_labels"]) for one in _sentences(results)]
        heads, found, gold_heads, gold_found = map(np.concatenate, zip(*sentences, strict=True))
        scored = gold_heads != -100
        heads, gold_heads = heads[scored], gold_heads[scored]
        if task == "subject":
            return {**loss, **subjects._compute(heads, gold_heads)}
        return {**loss, **parsing._compute(heads, gold_heads, names[found[scored]], names[gold_found[scored]])}

    return compute


# --- a text for a text


class Translation(evaluate.Metric):
    """Of whole texts, as people read them. `bleu`: sacreBLEU. `chrf`: chrF++, of characters and pairs of words, the first
    figure to look at for Korean, whose words BLEU counts as wrong for one syllable. `bleu_tok`: BLEU of lower-cased
    text cut into words by sacreBLEU's 13a, the nearest to the "tokenised lowercase BLEU" of papers. `exact_match`: the
    share of texts that are the reference, white space aside."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return _metric_info(self.__doc__, format=None, predictions=text, references=text)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        scorers = {"bleu": BLEU(), "chrf": CHRF(word_order=2), "bleu_tok": BLEU(lowercase=True, force=True)}
        figures = {name: one.corpus_score(predictions, [references]).score for name, one in scorers.items()}
        self.signatures = {name: one.get_signature().format() for name, one in scorers.items()}
        same = [a.split() == b.split() for a, b in zip(predictions, references, strict=True)]
        return {**figures, "exact_match": _share(np.array(same))}


def collect_pairs(outputs: ModelOutput, batch: Batch) -> Results:
    """`loss` may be smoothed; `nll`, the model's own if it gives one, is not. In training only the loss is collected: it
    is divided by the count of the whole step there, which a perplexity does not survive."""
    results = _sum_and_items(outputs, batch)
    if outputs.loss.requires_grad:
        return results
    nll = outputs.get("nll", outputs.loss)
    return {**results, "nll": _sum_and_items(ModelOutput(loss=nll), batch)["loss"]}


def compute_pairs(
    references: Sequence[str] | None = None, baselines: dict[str, Sequence[str]] | None = None
) -> Callable[[Results], dict[str, float]]:
    """references: the right text of each example, if the model is to write.
    baselines: what somebody who has learned nothing would write, to be scored beside it."""
    metric = Translation(keep_in_memory=True)
    logged, beside = set(), {}

    def compute(results: Results) -> dict[str, float]:
        figures = {"loss": _mean_loss(results)}
        if "nll" in results:
            nll = _mean_loss({**results, "loss": results["nll"]})
            figures |= {"nll": nll, "ppl": math.exp(min(nll, 700.0))}  # above that a float is infinite
        if "texts" in results:
            figures |= metric._compute(predict_pairs(results), [references[one] for one in np.sort(results["example"])])
            for name in sorted(metric.signatures.keys() - logged):
                logger.info(f"{name}: sacreBLEU {metric.signatures[name]}")
            logged.update(metric.signatures)
            for baseline, texts in ({} if beside else baselines or {}).items():
                beside.update(
                    {f"{baseline}_{name}": value for name, value in metric._compute(texts, references).items()}
                )
            figures |= beside
        return figures

    return compute


def predict_pairs(results: Results) -> list[str]:
    """What was written, in the order of the data."""
    return results["texts"][np.argsort(results["example"])].tolist()


def generate_texts(tokenizer: PreTrainedTokenizerBase, **settings) -> Callable[[nn.Module, Batch], list[str]]:
    """settings: of `model.generate`, such as num_beams and max_new_tokens."""

    def generate(model: nn.Module, batch: Batch) -> list[str]:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        texts = tokenizer.batch_decode(model.generate(**inputs, **settings), skip_special_tokens=True)
        return [text.strip() for text in texts]

    return generate
