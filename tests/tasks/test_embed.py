"""Sentence embeddings: what is learned, what is measured, and what sentence-transformers makes of the folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import tiny_run
from sentence_transformers import SentenceTransformer

from hf_tiny import HfTinyElectraConfig, HfTinyElectraModel
from hf_tiny.errors import InputError
from hf_tiny.tasks.embed import (
    CollateTextPairs,
    EmbedArguments,
    EmbedEvaluation,
    EmbedTask,
    SentenceEncoder,
    TextPair,
    score_range,
)

COLORS = ["red", "blue", "green", "white", "black", "yellow"]
THINGS = ["house", "boat", "tree", "cloud", "bird", "stone"]


def write_pairs(path: Path, scored: bool) -> Path:
    """`a red house` and `the house is red` mean the same; of scored pairs each has another one of similarity 0 beside it."""
    rows = []
    for color in COLORS:
        for thing in THINGS:
            rows.append((f"a {color} {thing}", f"the {thing} is {color}", "5.0"))
            if scored:
                other = THINGS[(THINGS.index(thing) + 1) % len(THINGS)]
                rows.append((f"a {color} {thing}", f"the {other} was {COLORS[COLORS.index(color) - 1]}", "0.5"))
    lines = ["source\ttarget\tscore", *("\t".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def encoder(temperature: float | None) -> SentenceEncoder:
    torch.manual_seed(0)
    config = HfTinyElectraConfig(
        vocab_size=120, embedding_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return SentenceEncoder(HfTinyElectraModel(config), temperature)


def batch(tokenizer, count: int, score: float | None = None) -> dict:
    pairs = [TextPair((f"{c} fox jumps", f"lazy dog {c}"), score, "", ".tsv", {}) for c in COLORS[:count]]
    task = EmbedTask(EmbedArguments(), None, tokenizer)
    task.scores = None if score is None else (0.0, 1.0)
    features = task.features(pairs)
    return CollateTextPairs(tokenizer.pad_token_id)(features)


def call(model: SentenceEncoder, given: dict, items: int):
    inputs = {name: given[name] for name in ("input_ids", "attention_mask", "labels")}
    return model(**inputs, num_items_in_batch=torch.tensor([items, 0]))


def test_contrastive_loss_by_hand(tokenizer):
    model, given = encoder(0.05), batch(tokenizer, 4)
    outputs = call(model, given, 4)
    first, second = outputs.embeddings.chunk(2)
    torch.testing.assert_close(outputs.embeddings.norm(dim=-1), torch.ones(8))
    scores = first @ second.mT / 0.05
    rows = -scores.log_softmax(1).diagonal().mean()
    columns = -scores.log_softmax(0).diagonal().mean()
    torch.testing.assert_close(outputs.loss, (rows + columns) / 2)


def test_similarity_loss_by_hand(tokenizer):
    model, given = encoder(None), batch(tokenizer, 4, 0.75)
    outputs = call(model, given, 4)
    first, second = outputs.embeddings.chunk(2)
    torch.testing.assert_close(outputs.loss, (((first * second).sum(-1) - 0.75) ** 2).mean())


@pytest.mark.parametrize("score", [None, 0.5])
def test_padding_changes_nothing(tokenizer, score):
    model, given = encoder(0.05 if score is None else None).eval(), batch(tokenizer, 3, score)
    longer = {**given, "input_ids": torch.nn.functional.pad(given["input_ids"], (0, 5), value=tokenizer.pad_token_id),
              "attention_mask": torch.nn.functional.pad(given["attention_mask"], (0, 5))}  # fmt: skip
    torch.testing.assert_close(call(model, given, 3).embeddings, call(model, longer, 3).embeddings)


def test_retrieval_figures_by_hand():
    pairs = [TextPair(("a", "b"), None, "", ".tsv", {})] * 3
    near = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    # The partner of the first is the nearest, of the second the farthest of three, of the third the second nearest.
    found = {"first": near, "second": np.array([[1.0, 0.0], [0.9, -0.43], [0.0, 1.0]]), "example": np.arange(3)}
    figures = EmbedEvaluation([], pairs, "validation", EmbedTask(EmbedArguments())).compute(
        {**found, "loss": np.ones(1), "items": np.ones(1)}
    )
    assert figures["accuracy"] == pytest.approx(2 / 3) and figures["mrr"] == pytest.approx((1 + 1 / 3 + 1) / 3)


def test_bad_scores_are_named(tmp_path):
    path = write_pairs(tmp_path / "pairs.tsv", scored=True)
    path.write_text(path.read_text().replace("5.0", "much", 1))
    with pytest.raises(InputError, match=r"pairs.tsv:2: the similarity 'much', column 'score', is not a number"):
        EmbedTask(EmbedArguments(train_file=[str(path)], label_column="score")).splits()
    with pytest.raises(InputError, match="All similarities of the training data are 3"):
        score_range([TextPair(("a", "b"), 3.0, "", ".tsv", {})] * 2)


SETTINGS = {"num_train_epochs": 12, "learning_rate": 2e-3, "vocab_size": 200, "num_hidden_layers": 1, "hidden_size": 32,
            "embedding_size": 32, "intermediate_size": 64, "generator_size": 0.5, "per_device_train_batch_size": 8}  # fmt: skip
IN_ANOTHER_PROCESS = """
import sys
sys.modules["hf_tiny"] = None  # importing it fails
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], trust_remote_code=True, device="cpu")
print(model.encode(["a red house", "the house is red", "a black bird"]).tolist())
"""


def run(folder: Path, name: str, **settings) -> Path:
    flags = tiny_run.flags(output_dir=folder / name, **{**SETTINGS, **settings})
    ended = tiny_run.start(folder, tiny_run.run_plain, "finetune_embeddings", *flags).wait()
    assert ended.code == 0, ended.err
    return folder / name


def results(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text())


def test_pairs_without_a_score_are_told_apart_and_a_resume_is_exact(tmp_path):
    data = write_pairs(tmp_path / "pairs.tsv", scored=False)
    done = run(tmp_path, "done", train_file=data, save_steps=20)
    assert results(done)["eval_mrr"] > 0.6  # by chance (1 + 1/2 + 1/3 + 1/4) / 4 = 0.52
    start = sorted(done.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[0]
    again = run(tmp_path, "again", train_file=data, resume_from_checkpoint=start)
    assert tiny_run.largest_difference(done, again) == 0


def test_scored_pairs_and_sentence_transformers(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.tsv", scored=True)
    metric = {"metric_for_best_model": "spearmanr", "per_device_eval_batch_size": 2}  # known from the first batch alone
    done = run(tmp_path, "done", train_file=pairs, label_column="score", **metric)
    assert results(done)["eval_spearmanr"] > 0.5
    here = SentenceTransformer(str(done), device="cpu").encode(["a red house", "the house is red", "a black bird"])
    assert np.allclose((here**2).sum(1), 1, atol=1e-5)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(done)]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    np.testing.assert_allclose(np.array(json.loads(ended.stdout.splitlines()[-1])), here, atol=1e-5)
