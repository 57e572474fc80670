import logging
import math
from dataclasses import dataclass

import numpy as np
import pytest
import seqeval.metrics
import torch
from accelerate import Accelerator
from matplotlib import font_manager
from PIL import Image
from seqeval.scheme import IOB2
from transformers.utils import ModelOutput

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, hub
from hf_tiny.data.collate import Batches, MaskTokens
from hf_tiny.hub import draw_confusion
from hf_tiny.metrics import (
    Classification,
    CollapseWarning,
    Entities,
    Evaluation,
    Parsing,
    Regression,
    ReplacedTokenDetection,
    Subjects,
    Tags,
    collect_electra,
    collect_links,
    collect_tags,
    collect_texts,
    compute_electra,
    compute_links,
    compute_tags,
    compute_texts,
    confusion_tags,
    confusion_texts,
    is_entity_scheme,
    predict_links,
    predict_texts,
)
from hf_tiny.train import TrainState
from hf_tiny.trees import is_tree


def entropy(share: float) -> float:
    return -share * math.log(share) - (1 - share) * math.log(1 - share)


@pytest.mark.parametrize(
    ("scores", "replaced", "accuracy", "precision", "recall", "auc"),
    [
        ([2.0, -1.0, 0.5, -3.0, -2.0], [1, 1, 0, 0, 0], 3 / 5, 1 / 2, 1 / 2, 5 / 6),
        ([1.0, 2.0, -1.0, -2.0], [1, 1, 0, 0], 1, 1, 1, 1),
        ([-1.0, -2.0, 1.0, 2.0], [1, 1, 0, 0], 0, 0, 0, 0),
        ([-2.0, -2.0, -2.0, -2.0], [1, 0, 0, 0], 3 / 4, 0, 0, 1 / 2),  # the majority class
        ([0.0, -1.0], [1, 0], 1 / 2, 0, 0, 1),  # exactly 0 does not say "replaced"
    ],
)
def test_replaced_token_detection(scores, replaced, accuracy, precision, recall, auc):
    figures = ReplacedTokenDetection(keep_in_memory=True).compute(predictions=scores, references=replaced)
    expected = {
        "rtd_accuracy": accuracy,
        "rtd_precision": precision,
        "rtd_recall": recall,
        "rtd_auc": auc,
        "rtd_majority_entropy": entropy(sum(replaced) / len(replaced)),
    }
    assert figures == pytest.approx(expected)


@pytest.mark.parametrize(("replaced", "recall"), [([0, 0, 0], 0), ([1, 1, 1], 1 / 3)])
def test_one_class_only(replaced, recall):
    figures = ReplacedTokenDetection(keep_in_memory=True).compute(predictions=[1.0, -1.0, -1.0], references=replaced)
    assert math.isnan(figures["rtd_auc"])
    assert figures["rtd_majority_entropy"] == 0
    assert figures["rtd_recall"] == pytest.approx(recall)


def evaluation(blocks, tokenizer, batch_size: int) -> Evaluation:
    batches = Batches(blocks, MaskTokens(tokenizer, 0.15, seed=0), batch_size, seed=0, shuffle=False)
    return Evaluation(batches, collect_electra, compute_electra(50.0))


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = HfTinyElectraConfig(
        vocab_size=len(tokenizer),
        embedding_size=16,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        generator_size=0.5,
        initializer_range=0.3,
    )
    return HfTinyElectraForPreTraining(config)


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_uneven_batches_equal_one_big_batch(blocks, tokenizer, model, batch_size):
    accelerator = Accelerator(cpu=True)
    whole = evaluation(blocks, tokenizer, len(blocks))(model, accelerator)
    parts = evaluation(blocks, tokenizer, batch_size)(model, accelerator)
    assert parts == pytest.approx(whole, abs=1e-5)
    assert model.training


def test_evaluation_by_hand(blocks, tokenizer, model):
    figures = evaluation(blocks, tokenizer, 8)(model, Accelerator(cpu=True))
    batch = evaluation(blocks, tokenizer, len(blocks)).batches[0]
    with torch.no_grad():
        outputs = model.eval()(**batch)
    assert figures["loss"] == pytest.approx(outputs.loss.item(), rel=1e-5)
    assert figures["mlm_loss"] == pytest.approx(outputs.mlm_loss.item(), rel=1e-5)
    assert figures["rtd_loss"] == pytest.approx(outputs.rtd_loss.item(), rel=1e-5)
    right = outputs.mlm_logits.argmax(-1) == batch["labels"][batch["labels"] != -100]
    assert figures["mlm_accuracy"] == pytest.approx(right.float().mean().item())
    replaced, found = outputs.replaced.numpy(), (outputs.logits > 0).numpy()
    assert figures["rtd_accuracy"] == pytest.approx((replaced == found).mean())
    assert figures["rtd_recall"] == pytest.approx(found[replaced].mean())
    assert figures["rtd_precision"] == pytest.approx(replaced[found].mean())
    assert figures["rtd_majority_entropy"] == pytest.approx(entropy(replaced.mean()))
    pairs = outputs.logits.numpy()[replaced][:, None] - outputs.logits.numpy()[~replaced]
    assert figures["rtd_auc"] == pytest.approx(np.mean(pairs > 0), abs=1e-6)


def test_padding_is_not_measured(blocks, tokenizer, model):
    batch = evaluation(blocks, tokenizer, len(blocks)).batches[0]
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, 12:] = 0
    batch["labels"][:, 12:] = -100
    batch["num_items_in_batch"] = torch.tensor([int(batch["labels"].ne(-100).sum()), 12 * len(blocks)])
    with torch.no_grad():
        outputs = model.eval()(**batch)
    results = collect_electra(outputs, batch)
    assert results["scores"].shape == results["replaced"].shape == (12 * len(blocks),)
    assert compute_electra(50.0)(results)["rtd_loss"] == pytest.approx(outputs.rtd_loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("step", "loss", "recall", "warnings"),
    [
        (100, 0.39, 0.1, 0),  # better than the majority class
        (100, 0.39, 0.0, 1),  # finds nothing
        (100, 0.41, 0.1, 1),  # loss above the entropy
        (100, 0.40, 0.1, 1),
        (9, 0.41, 0.0, 0),  # still warming up
        (10, 0.41, 0.0, 1),
    ],
)
def test_collapse_warning(caplog, step, loss, recall, warnings):
    metrics = {"eval_rtd_loss": loss, "eval_rtd_majority_entropy": 0.40, "eval_rtd_recall": recall}
    with caplog.at_level(logging.WARNING, logger="hf_tiny"):
        CollapseWarning().on_evaluate(TrainState(step=step, warmup_steps=10), metrics)
    assert len(caplog.records) == warnings
    if warnings:
        for part in (f"step {step}:", "collapsed", f"RTD loss {loss:.3f}", "entropy 0.400", f"recall {recall:.3f}"):
            assert part in caplog.text


# --- texts, tags, links


def gather(collected: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([result[name] for result in collected]) for name in collected[0]}


def splits(count: int, times: int = 5):
    """Ways to put `count` windows into batches, in any order and of any size."""
    random = np.random.default_rng(0)
    yield [np.arange(count)]
    yield [np.array([window]) for window in range(count)]
    for _ in range(times):
        cuts = np.sort(random.choice(np.arange(1, count), size=min(2, count - 1), replace=False))
        yield np.split(random.permutation(count), cuts)


@pytest.mark.parametrize(
    ("predictions", "references", "accuracy", "f1", "matthews", "majority"),
    [
        # Label 0: precision 2/3, recall 1; label 1: precision 1, recall 1/3; label 2 is never right.
        ([0, 0, 0, 1, 2], [0, 0, 1, 1, 1], 3 / 5, (4 / 5 + 1 / 2 + 0) / 3, None, 3 / 5),
        ([1, 1, 0, 0], [1, 0, 1, 0], 1 / 2, 1 / 2, 0.0, 1 / 2),
        ([1, 1, 1, 0], [1, 1, 0, 0], 3 / 4, (4 / 5 + 2 / 3) / 2, (2 * 1 - 1 * 0) / math.sqrt(3 * 2 * 2 * 1), 1 / 2),
        ([1, 0], [0, 1], 0.0, 0.0, -1.0, 1 / 2),
        ([1, 1, 1], [1, 1, 1], 1.0, 1.0, 0.0, 1.0),  # one label only
    ],
)
@pytest.mark.filterwarnings("error")
def test_classification(predictions, references, accuracy, f1, matthews, majority):
    figures = Classification(keep_in_memory=True).compute(predictions=predictions, references=references)
    assert figures["accuracy"] == pytest.approx(accuracy)
    assert figures["f1"] == pytest.approx(f1)
    assert figures["majority"] == pytest.approx(majority)
    if matthews is not None:
        assert figures["matthews_correlation"] == pytest.approx(matthews)


@pytest.mark.filterwarnings("error")
def test_regression():
    metric = Regression(keep_in_memory=True)
    figures = metric.compute(predictions=[1.0, 2.0, 4.0], references=[0.0, 3.0, 5.0])
    # Deviations (-4, -1, 5) / 3 and (-8, 1, 7) / 3: 66 / sqrt(42 * 114).
    assert figures == pytest.approx({"pearson": 66 / math.sqrt(42 * 114), "spearmanr": 1.0, "mse": 1.0})
    ties = metric.compute(predictions=[1.0, 1.0, 2.0], references=[3.0, 1.0, 2.0])  # ranks 1.5, 1.5, 3 and 3, 1, 2
    assert ties["spearmanr"] == pytest.approx(0.0)
    for predictions, references in (([1.0, 1.0], [0.0, 1.0]), ([0.0, 1.0], [2.0, 2.0]), ([1.0], [1.0])):
        constant = metric.compute(predictions=predictions, references=references)
        assert math.isnan(constant["pearson"]) and math.isnan(constant["spearmanr"])


def test_entities():
    references = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC", "B-LOC"]]
    predictions = [["B-PER", "I-PER", "O", "B-PER"], ["I-LOC", "B-LOC", "I-LOC"]]
    # Gold: PER 0-1, LOC 3, LOC 1, LOC 2. Found: PER 0-1 (right), PER 3, LOC 1-2; the I-LOC that begins nothing is none.
    figures = Entities(keep_in_memory=True).compute(predictions=predictions, references=references)
    assert figures == pytest.approx({"precision": 1 / 3, "recall": 1 / 4, "f1": 2 / 7, "accuracy": 4 / 7})
    for name, function in (("f1", seqeval.metrics.f1_score), ("precision", seqeval.metrics.precision_score)):
        assert figures[name] == pytest.approx(function(references, predictions, mode="strict", scheme=IOB2))


@pytest.mark.filterwarnings("error")
def test_no_entities_at_all():
    figures = Entities(keep_in_memory=True).compute(predictions=[["O", "O"]], references=[["O", "O"]])
    assert figures == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 1.0}


def test_tags():
    figures = Tags(keep_in_memory=True).compute(predictions=[0, 0, 1, 2], references=[0, 1, 1, 1])
    assert figures == pytest.approx({"accuracy": 1 / 2, "f1": (2 / 3 + 1 / 2 + 0) / 3, "majority": 3 / 4})


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["O", "B-PER", "I-PER"], True),
        (["B-NNG", "I-NNG", "B-XSV+EP"], True),
        (["NOUN", "VERB"], False),
        (["O", "X"], False),
        (["B-PER", "NOUN"], False),
        (["O", "B-PER", "E-PER"], False),  # IOBES is scored tag by tag
        (["O"], False),
    ],
)
def test_is_entity_scheme(labels, expected):
    assert is_entity_scheme(labels) is expected


PARSES = [  # head, relation, gold head, gold relation; uas, las, las_full, label_accuracy
    ((2, "nsubj", 2, "nsubj"), (1, 1, 1, 1)),
    ((2, "nsubj", 2, "nsubj:pass"), (1, 1, 0, 1)),  # the gold subtype is missing
    ((2, "nsubj:outer", 2, "nsubj:pass"), (1, 1, 0, 1)),  # another subtype
    ((2, "acl:relcl", 2, "acl"), (1, 1, 0, 1)),
    ((2, "aclx", 2, "acl"), (1, 0, 0, 0)),  # no subtype: another relation
    ((3, "nsubj", 2, "nsubj"), (0, 0, 0, 1)),  # wrong head, right label
    ((2, "obj", 2, "nsubj"), (1, 0, 0, 0)),  # right head, wrong label
    ((1, "obj", 2, "nsubj"), (0, 0, 0, 0)),
    ((0, "root", 0, "root"), (1, 1, 1, 1)),
    ((1, "punct", 2, "punct"), (0, 0, 0, 1)),  # punctuation counts
    ((2, "punct", 2, "punct"), (1, 1, 1, 1)),
]


@pytest.mark.parametrize(("words", "expected"), [([word], figures) for word, figures in PARSES])
def test_parsing_of_a_word(words, expected):
    heads, relations, gold_heads, gold_relations = map(list, zip(*words, strict=True))
    figures = Parsing(keep_in_memory=True).compute(
        predictions=heads, references=gold_heads, relations=relations, reference_relations=gold_relations
    )
    assert figures == dict(zip(("uas", "las", "las_full", "label_accuracy"), expected, strict=True))


def test_parsing_counts_every_word():
    heads, relations, gold_heads, gold_relations = map(list, zip(*[word for word, _ in PARSES], strict=True))
    figures = Parsing(keep_in_memory=True).compute(
        predictions=heads, references=gold_heads, relations=relations, reference_relations=gold_relations
    )
    expected = np.mean([figures for _, figures in PARSES], axis=0)
    assert list(figures.values()) == pytest.approx(expected.tolist())


def test_subjects():
    figures = Subjects(keep_in_memory=True).compute(predictions=[0, 0, 3, 2, 1], references=[0, 2, 3, 0, 0])
    expected = {"subject_accuracy": 2 / 5, "overt_accuracy": 1 / 2, "omitted_accuracy": 1 / 3, "majority": 3 / 5}
    assert figures == pytest.approx(expected)
    figures = Subjects(keep_in_memory=True).compute(predictions=[0, 1], references=[0, 0])
    assert math.isnan(figures["overt_accuracy"])


def text_results(windows: list[tuple[int, list[float], float]], batches, dtype) -> dict[str, np.ndarray]:
    """Windows (example, logits, label) in batches, whose losses are 0, 1, 2, ... of the window's place."""
    collected = []
    for places in batches:
        examples, logits, labels = zip(*[windows[place] for place in places], strict=True)
        outputs = ModelOutput(loss=torch.tensor(float(np.mean(places))), logits=torch.tensor(logits))
        batch = {
            "labels": torch.tensor(labels, dtype=dtype),
            "num_items_in_batch": torch.tensor([len(places), 99]),
            "about": {"example": torch.tensor(examples)},
        }
        collected.append(collect_texts(outputs, batch))
    return gather(collected)


@pytest.mark.parametrize("batches", splits(5))
def test_windows_of_a_text_are_averaged(batches):
    windows = [
        (2, [0.0, 0.0, 1.0], 2),
        (0, [1.0, 0.0, 0.0], 1),  # the surer window of example 0 decides
        (0, [0.0, 5.0, 0.0], 1),
        (0, [1.0, 0.0, 0.0], 1),
        (1, [3.0, 1.0, 2.0], 2),
    ]
    results = text_results(windows, batches, torch.int64)
    assert predict_texts(results).tolist() == [1, 0, 2]
    figures = compute_texts(["a", "b", "c"])(results)
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert figures["f1"] == pytest.approx((0 + 1 + 2 / 3) / 3)
    assert figures["majority"] == pytest.approx(2 / 3)
    assert figures["loss"] == pytest.approx(2.0)
    assert confusion_texts(results, ["a", "b", "c"]).tolist() == [[0, 0, 0], [0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("batches", splits(4))
def test_windows_of_a_regression_are_averaged(batches):
    windows = [(5, [4.0], 5.0), (3, [1.0], 0.0), (4, [1.0], 3.0), (4, [3.0], 3.0)]
    results = text_results(windows, batches, torch.float32)
    assert predict_texts(results) == pytest.approx(np.array([1.0, 2.0, 4.0]))
    figures = compute_texts(None)(results)
    expected = {"loss": 1.5, "pearson": 66 / math.sqrt(42 * 114), "spearmanr": 1.0, "mse": 1.0}
    assert figures == pytest.approx(expected)


def tag_results(windows: list[tuple[int, list[int], list[int], list[int]]], batches, classes: int):
    """Windows (example, word, label and predicted tag per token) in batches, padded; the loss is 2 per item."""
    collected = []
    for places in batches:
        chosen = [windows[place] for place in places]
        width = max(len(word) for _, word, _, _ in chosen) + 2
        word, labels = torch.full((len(chosen), width), -1), torch.full((len(chosen), width), -100)
        logits = torch.zeros(len(chosen), width, classes)
        for row, (_, words, gold, predicted) in enumerate(chosen):
            word[row, 1 : len(words) + 1], labels[row, 1 : len(words) + 1] = torch.tensor(words), torch.tensor(gold)
            logits[row, torch.arange(1, len(words) + 1), torch.tensor(predicted)] = 1.0
        items = int(labels.ne(-100).sum())
        batch = {
            "labels": labels,
            "num_items_in_batch": torch.tensor([items, 99]),
            "about": {"example": torch.tensor([example for example, *_ in chosen]), "word": word},
        }
        loss = torch.tensor(2.0 if items else math.nan)  # a mean of nothing
        collected.append(collect_tags(ModelOutput(loss=loss, logits=logits), batch))
    return gather(collected)


# Example 0 comes in two windows, its words 0-1 owned by one and 2-3 by the other; its -1 are sub-words and others' words.
TAG_WINDOWS = [
    (1, [0, 1], [0, 0], [0, 0]),
    (0, [-1, 2, -1, 3], [-100, 2, -100, 0], [1, 2, 2, 0]),
    (0, [0, 1, -1], [0, 1, -100], [0, 1, 0]),
    (2, [0, 1, 2], [1, -100, 1], [1, 2, 2]),  # word 1 is not scored
    (3, [0], [-100], [1]),  # nothing to score
]


@pytest.mark.parametrize("batches", splits(5))
def test_entities_over_windows(batches):
    results = tag_results(TAG_WINDOWS, batches, 3)
    figures = compute_tags(["O", "B-X", "I-X"])(results)
    # Gold: 0:1-2, 2:0, 2:2. Found: 0:1-2 over both windows, 2:0; its I-X after the unscored word goes on with nothing.
    expected = {"loss": 2.0, "precision": 1.0, "recall": 2 / 3, "f1": 4 / 5, "accuracy": 7 / 8}
    assert figures == pytest.approx(expected)


@pytest.mark.parametrize("batches", splits(5))
def test_tags_over_windows(batches):
    results = tag_results(TAG_WINDOWS, batches, 3)
    figures = compute_tags(["ADJ", "NOUN", "VERB"])(results)
    expected = {"loss": 2.0, "accuracy": 7 / 8, "f1": (1 + 4 / 5 + 2 / 3) / 3, "majority": 1 / 2}
    assert figures == pytest.approx(expected)
    assert confusion_tags(results, ["ADJ", "NOUN", "VERB"]).tolist() == [[4, 0, 0], [0, 2, 1], [0, 0, 1]]


LINK_LABELS = ["root", "nsubj", "obj", "nsubj:pass"]


def link_window(example: int, first: int, arcs, owned, gold_heads, gold_labels, labels=None) -> dict:
    """A window whose word i scores 5 with the head arcs[i] (within the window) and the label labels[i] there."""
    size = len(arcs)
    scores, label_logits = torch.zeros(size, size + 1), torch.zeros(size, size + 1, len(LINK_LABELS))
    scores[torch.arange(size), torch.tensor(arcs)] = 5.0
    label_logits[torch.arange(size), torch.tensor(arcs), torch.tensor(labels or [1] * size)] = 1.0
    return {
        "example": example, "first_word": first, "scores": scores, "label_logits": label_logits,
        "owned": owned, "gold_heads": gold_heads, "gold_labels": gold_labels,
    }  # fmt: skip


def link_results(windows: list[dict], batches, training: bool = False) -> dict[str, np.ndarray]:
    """In padded batches; what is padding scores highest of all, and the loss is 3 per item."""
    collected = []
    for places in batches:
        chosen = [windows[place] for place in places]
        width = max(len(window["owned"]) for window in chosen) + 1
        logits = torch.full((len(chosen), width, width + 1), 99.0)
        label_logits = torch.zeros(len(chosen), width, width + 1, len(LINK_LABELS))
        about = {name: torch.full((len(chosen), width), -100) for name in ("gold_heads", "gold_labels")}
        about["owned"] = torch.zeros(len(chosen), width, dtype=torch.bool)
        for row, window in enumerate(chosen):
            size = len(window["owned"])
            logits[row, :size, : size + 1] = window["scores"]
            label_logits[row, :size, : size + 1] = window["label_logits"]
            for name in ("owned", "gold_heads", "gold_labels"):
                about[name][row, :size] = torch.tensor(window[name])
        for name in ("example", "first_word"):
            about[name] = torch.tensor([window[name] for window in chosen])
        about["num_words"] = torch.tensor([len(window["owned"]) for window in chosen])
        outputs = LinkOutput(loss=torch.tensor(3.0), logits=logits, label_logits=None if training else label_logits)
        batch = {"num_items_in_batch": torch.tensor([int(about["gold_heads"].ne(-100).sum()), 99]), "about": about}
        collected.append(collect_links(outputs, batch))
    return gather(collected)


@dataclass
class LinkOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    label_logits: torch.Tensor | None = None


N = -100
# Example 0 has the words 1-5: a window of 1-4 that owns 1-2, and one of 2-5 that owns 3-5.
LINK_WINDOWS = [
    link_window(1, 0, [2, 0], [1, 1], [2, 0], [3, 0], [1, 0]),
    link_window(0, 1, [0, 0, 2, 2], [0, 1, 1, 1], [N, 1, 3, 3], [N, 2, 2, 2], [0, 0, 2, 1]),
    link_window(0, 0, [0, 1, 0, 0], [1, 1, 0, 0], [0, 1, N, N], [0, 1, N, N], [0, 1, 0, 0]),
    link_window(2, 0, [0], [1], [0], [0], [0]),
]


@pytest.mark.parametrize("batches", splits(4))
def test_sentence_from_two_windows(batches):
    results = link_results(LINK_WINDOWS, batches)
    results_before = {name: values.copy() for name, values in results.items()}
    heads, labels = predict_links(results, "subject")
    assert [one.tolist() for one in heads] == [[0, 1, 0, 3, 3], [2, 0], [0]]
    assert [one.tolist() for one in labels] == [[0, 1, 0, 2, 1], [1, 0], [0]]
    figures = compute_links(LINK_LABELS, "parse")(results)
    # As a tree, one of the roots 1 and 3 must go; 3 has not seen 1 and goes to 2, 4 or 5: wrong, as the gold head is 1.
    heads, _ = predict_links(results, "parse")
    assert all(is_tree(one) for one in heads)
    assert heads[0][[0, 1, 3, 4]].tolist() == [0, 1, 3, 3] and heads[0][2] == 2
    assert figures["uas"] == pytest.approx(7 / 8)
    assert figures["las"] == pytest.approx(6 / 8)  # word 5 of example 0 has the wrong label
    assert figures["las_full"] == pytest.approx(5 / 8)  # and the first word of example 1 the wrong subtype
    assert figures["loss"] == pytest.approx(3.0)
    for name, values in results_before.items():
        np.testing.assert_array_equal(results[name], values)


@pytest.mark.parametrize("batches", splits(3))
def test_subjects_over_windows(batches):
    windows = [
        link_window(1, 0, [2, 0, 0], [1, 1, 1], [N, 0, N], [N, 0, N]),
        link_window(0, 0, [0, 1, 0], [1, 1, 0], [N, 1, N], [N, 1, N]),
        link_window(0, 1, [0, 1, 2], [0, 1, 1], [N, 0, 3], [N, 0, 1]),
    ]
    figures = compute_links(LINK_LABELS, "subject")(link_results(windows, batches))
    expected = {"loss": 3.0, "subject_accuracy": 3 / 4, "overt_accuracy": 1.0, "omitted_accuracy": 1 / 2}
    assert figures == pytest.approx({**expected, "majority": 1 / 2})


def test_a_word_is_not_linked_to_itself():
    window = link_window(0, 0, [1, 2], [1, 1], [0, 0], [0, 0])
    assert predict_links(link_results([window], [[0]]), "subject")[0][0].tolist() == [0, 0]


def test_links_in_training_have_a_loss_only():
    results = link_results(LINK_WINDOWS, [[0, 1], [2, 3]], training=True)
    assert compute_links(LINK_LABELS, "parse")(results) == {"loss": pytest.approx(3.0)}


def test_confusion_picture(tmp_path, monkeypatch):
    draw_confusion(tmp_path / "two.png", ["$a$", "b"], np.array([[3, 1], [0, 0]]))
    assert Image.open(tmp_path / "two.png").size[0] > 300
    monkeypatch.setattr(hub, "MOST_CLASSES", 3)
    draw_confusion(tmp_path / "many.png", [f"label {n}" for n in range(9)], np.eye(9, dtype=int))
    assert (tmp_path / "many.png").exists()
    assert [path.name for path in tmp_path.glob("*.txt")] == []


def test_confusion_picture_without_the_letters(tmp_path, monkeypatch):
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [])
    draw_confusion(tmp_path / "hangul.png", ["긍정", "부정"], np.array([[3, 1], [0, 2]]))
    assert (tmp_path / "hangul.txt").read_text(encoding="utf-8") == "1: 긍정\n2: 부정\n"
