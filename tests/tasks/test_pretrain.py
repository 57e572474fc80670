"""What is measured in pretraining: replaced tokens, the losses of all batches together, a discriminator that collapses."""

import logging
import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, HfTinyElectraModel
from hf_tiny.callbacks import CollapseWarning, TrainState
from hf_tiny.data.batches import Batches
from hf_tiny.data.masking import MaskTokens
from hf_tiny.tasks.pretrain import ElectraEvaluation, ReplacedTokenDetection, start_layers


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
    figures = ReplacedTokenDetection().compute(predictions=scores, references=replaced)
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
    figures = ReplacedTokenDetection().compute(predictions=[1.0, -1.0, -1.0], references=replaced)
    assert math.isnan(figures["rtd_auc"])
    assert figures["rtd_majority_entropy"] == 0
    assert figures["rtd_recall"] == pytest.approx(recall)


def evaluation(blocks, tokenizer, batch_size: int) -> ElectraEvaluation:
    mask = MaskTokens(tokenizer, 0.15, seed=0)
    return ElectraEvaluation(Batches(blocks, mask, batch_size, seed=0, shuffle=False), 50.0)


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


@pytest.mark.parametrize("batch_size", [1, 8])
def test_uneven_batches_equal_one_big_batch(blocks, tokenizer, model, batch_size):
    accelerator = Accelerator(cpu=True)
    whole = evaluation(blocks, tokenizer, len(blocks))(model, accelerator)
    parts = evaluation(blocks, tokenizer, batch_size)(model, accelerator)
    assert parts == pytest.approx(whole, abs=1e-5)


def test_evaluation_by_hand(blocks, tokenizer, model):
    judge = evaluation(blocks, tokenizer, 8)
    figures = judge(model, Accelerator(cpu=True))
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
    assert judge.training_figures(outputs, batch) == pytest.approx(figures, abs=1e-5)  # the log has them, too


def test_padding_is_not_measured(blocks, tokenizer, model):
    judge = evaluation(blocks, tokenizer, len(blocks))
    batch = judge.batches[0]
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, 12:] = 0
    batch["labels"][:, 12:] = -100
    batch["num_items_in_batch"] = torch.tensor([int(batch["labels"].ne(-100).sum()), 12 * len(blocks)])
    with torch.no_grad():
        outputs = model.eval()(**batch)
    results = judge.collect(outputs, batch)
    assert results["scores"].shape == results["replaced"].shape == (12 * len(blocks),)
    assert judge.compute(results)["rtd_loss"] == pytest.approx(outputs.rtd_loss.item(), rel=1e-5)


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


@pytest.mark.parametrize("head_size", [32, 36, 64])
def test_layers_begin_by_adding_nothing_and_looking_at_neighbours(head_size):
    torch.manual_seed(0)
    config = HfTinyElectraConfig(vocab_size=50, hidden_size=2 * head_size, num_attention_heads=2, intermediate_size=32,
                                 num_hidden_layers=3, position_embedding_type="rotary", norm_first=True,
                                 initializer_range=0.05, attn_implementation="eager")  # fmt: skip
    model = HfTinyElectraModel(config).eval()
    start_layers(model.encoder)
    ids = torch.randint(5, 50, (4, 40))
    outputs = model(ids, output_attentions=True)
    embedded, _ = model.embeddings(ids, None, None, None)
    torch.testing.assert_close(outputs.last_hidden_state, model.encoder.norm(model.encoder.project(embedded)))
    inner = torch.arange(1, 39)
    for weights in outputs.attentions[:2]:  # (batch, heads, query, key)
        for head, side in enumerate((-1, 1)):
            assert (weights[:, head, inner].argmax(-1) == inner + side).float().mean() > 0.9
            assert weights[:, head, inner, inner + side].mean() > 0.3
    assert outputs.attentions[2].max() < 0.5  # later layers begin with an open mind


def test_a_start_leaves_layers_with_learned_positions_or_without_biases_looking_everywhere():
    for fields in ({"norm_first": True}, {"architecture": "modern"}):
        model = HfTinyElectraModel(HfTinyElectraConfig(vocab_size=50, num_hidden_layers=1, **fields))
        start_layers(model.encoder)
        layer = model.encoder.layers[0]
        assert not layer.attention.out.weight.any() and layer.attention.qkv.weight.any()
        assert layer.attention.qkv.bias is None or not layer.attention.qkv.bias.any()
