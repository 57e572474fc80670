"""The recipe for long raw text from end to end: learning, bits per byte, resuming, what it leaves, mistakes."""

import json
import math
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import tiny_run
from fixtures.labelled import text_rows, write_table, write_trees
from fixtures.tiny_run import assert_refused, finish, finish_together, results_of, run_to
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, pipeline
from transformers.utils import ModelOutput

from hf_tiny import HfTinyReformerForTokenClassification
from hf_tiny.tasks.pretrain import TokenEvaluation
from hf_tiny.tokenizer import TokenizerArguments, frame, token_bytes, train_tokenizer

RECIPE = "pretrain_reformer"
SENTENCE = "the old ship sails under a red moon, 달이 뜬다."
SHARES = np.unique(list(f"{SENTENCE}\n".encode()), return_counts=True)[1] / len(f"{SENTENCE}\n".encode())
UNIGRAM = -float((SHARES * np.log(SHARES)).sum())  # the loss of bytes drawn by themselves
TEXTS = [SENTENCE, "quiet  birds\n\ncarry <mask> ##7 letters — naïve"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("reformer")
    (home / "text.txt").write_text(f"{SENTENCE}\n" * 200, encoding="utf-8")
    return home


def given(home: Path, **settings) -> dict:
    sizes = {"max_seq_length": 96, "chunk_length": 16, "per_device_train_batch_size": 4, "max_eval_samples": 4}
    sizes |= {"hidden_size": 128, "intermediate_size": 128, "attn_layers": ["local", "lsh"]}
    return {"train_file": home / "text.txt", "tokenizer_model": "bytes", "max_steps": 4, **sizes, **settings}


@pytest.mark.parametrize("objective, steps", [("causal", 30), ("masked", 90)])
def test_it_learns_and_leaves_a_model_that_works(home, tmp_path, objective, steps):
    settings = given(home, objective=objective, max_steps=steps, sample_by="line")  # a new line between two of them
    made = finish(tmp_path / "run", RECIPE, function=tiny_run.run_named, **settings)
    results = results_of(made)
    assert results["eval_loss"] < 0.6 * UNIGRAM and results["eval_ppl"] == math.exp(results["eval_loss"])
    assert results["eval_bits_per_byte"] == pytest.approx(results["eval_loss"] / math.log(2))  # a token is a byte
    assert f"A {objective} Reformer" in (made / "README.md").read_text(encoding="utf-8")
    if objective == "causal":
        written = pipeline("text-generation", model=str(made))(SENTENCE, max_new_tokens=5)[0]["generated_text"]
        assert written == f"{SENTENCE}\nthe "
    else:
        assert len(pipeline("fill-mask", model=str(made))("the old<mask>ship")) == 5


def test_two_processes_train_like_one_that_accumulates(home, tmp_path):
    """With full attention, where nothing hangs on the hashes: each process draws its own."""
    settings = given(home, full_attention=True, max_steps=2)
    one = finish(tmp_path / "one", RECIPE, gradient_accumulation_steps=2, **settings)
    two = finish_together(tmp_path / "two", RECIPE, **settings)
    assert tiny_run.largest_difference(one, two) < 1e-5
    assert json.loads((one / "config.json").read_text())["lsh_attn_chunk_length"] == 96


def test_a_killed_run_resumes_bit_for_bit(home, tmp_path):
    """With dropout and with rotations that are drawn anew in every step; the masks depend on the place alone."""
    settings = given(
        home, objective="masked", tokenizer_model="bpe", vocab_size=330, hidden_dropout_prob=0.1, save_steps=2
    )
    whole, run_dir = finish(tmp_path / "whole", RECIPE, **settings), tmp_path / "run"
    killed = run_to(run_dir, RECIPE, function=partial(tiny_run.run_killed, "torch.save:3"), **settings)
    assert killed.code == -signal.SIGKILL and not (run_dir / "checkpoint-4").exists()
    finish(run_dir, RECIPE, resume_from_checkpoint="latest", **settings)
    tiny_run.assert_same_training(run_dir / "checkpoint-4", whole / "checkpoint-4")
    assert results_of(run_dir)["eval_loss"] == results_of(whole)["eval_loss"]


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_it_can_be_fine_tuned(tmp_path, objective):
    """A causal one stays causal: its head reads the mean of all states. A configuration serves to begin from scratch."""
    for split, count in (("train", 120), ("dev", 33)):
        write_table(tmp_path / f"{split}.tsv", text_rows(count, seed=count))
        write_trees(tmp_path / f"{split}.conllu", count, seed=count)
    small = {"tokenizer_model": "bpe", "vocab_size": 400, "max_seq_length": 64, "validation_split_percentage": 20}
    settings = given(tmp_path, objective=objective, train_file=tmp_path / "train.tsv", sample_by="line", **small)
    base = finish(tmp_path / "base", RECIPE, **settings)
    files = {kind: {"train_file": f"train.{kind}", "validation_file": f"dev.{kind}"} for kind in ("tsv", "conllu")}
    files = {kind: {flag: tmp_path / name for flag, name in names.items()} for kind, names in files.items()}
    sizes = {"per_device_train_batch_size": 16, "max_steps": 40, "learning_rate": 2e-3, "l2_sp": 0}
    tuned = finish(tmp_path / "moods", "finetune_classifier", model_name_or_path=base, **files["tsv"], **sizes)
    assert results_of(tuned)["eval_accuracy"] > 0.9
    model = AutoModelForSequenceClassification.from_pretrained(tuned)
    assert model.config.is_decoder == (objective == "causal") and model.config.lsh_attn_chunk_length == 16
    tags = finish(tmp_path / "tags", "finetune_tagger", config_name=base, **files["conllu"], **sizes | {"max_steps": 2})
    assert type(AutoModelForTokenClassification.from_pretrained(tags)) is HfTinyReformerForTokenClassification


def test_bits_per_byte_by_hand():
    """Two batches: 3 tokens of 1 + 4 + 4 bytes at 2 nats, and 1 token of 1 byte at 6 nats: 12 nats in 10 bytes."""
    evaluation, parts = TokenEvaluation([], np.array([0, 1, 4])), []
    for labels, items, loss in (([[-100, 1, 2, 2]], 3, 2.0), ([[-100, -100, 1]], 1, 6.0)):
        batch = {"labels": torch.tensor(labels), "num_items_in_batch": torch.tensor([items, 99])}
        parts.append(evaluation.collect(ModelOutput(loss=torch.tensor(loss)), batch))
    figures = evaluation.compute({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    assert figures == pytest.approx({"loss": 3.0, "ppl": math.exp(3), "bits_per_byte": 12 / math.log(2) / 10})


@pytest.mark.parametrize("kind", ["bytes", "bpe", "wordpiece"])
def test_the_bytes_of_tokens(kind):
    tokenizer = frame(train_tokenizer(TEXTS * 9, TokenizerArguments(tokenizer_model=kind, vocab_size=420)), ends=False)
    for text in TEXTS:
        ids = tokenizer.encode(text, split_special_tokens=True)
        text = text if kind == "bytes" else ("" if kind == "wordpiece" else " ").join(text.split())
        first = kind == "bpe"  # the space before the first word
        assert token_bytes(tokenizer)[ids].sum() == first + len(text.encode())
        assert ids[0] == tokenizer.cls_token_id and tokenizer.sep_token_id not in ids
        assert kind == "wordpiece" or tokenizer.decode(ids[1:]) == text


MISTAKES = [
    ({"objective": "casual"}, ["--objective casual", "causal, masked"]),
    ({"position_embedding_type": "learned"}, ["position_embedding_type='learned'", "axial"]),
    ({"chunk_length": 0}, ["--chunk_length 0: it must be 1 or above"]),
    ({"max_seq_length": 65536}, ["shorter than one block", "--max_seq_length"]),
]


@pytest.mark.parametrize("flags, words", MISTAKES)
def test_mistakes_are_named(home, tmp_path, flags, words):
    assert_refused(run_to(tmp_path / "run", RECIPE, **given(home, **flags)), *words)
