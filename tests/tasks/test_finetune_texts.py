"""finetune_classifier.py: pairs and numbers, several seeds, long texts, and mistakes in tables."""

import json
import random
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from fixtures import tiny_run
from fixtures.finetuning import finish, make_home, run
from fixtures.labelled import MOODS, read_table, text_rows, write_table
from fixtures.tiny_run import assert_refused, results_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from hf_tiny.report import number


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("texts"))


def write_pairs(path: Path, count: int) -> Path:
    """An English text and a Korean word: what the second one says is the score."""
    numbers, rows = random.Random(count), []
    for _ in range(count):
        mood = numbers.randrange(3)
        second = list(MOODS.values())[mood][1]
        rows.append({"a": numbers.choice(["the ship", "a moon", ""]), "b": second, "score": f"{1.3 * mood:.3f}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_regression_of_pairs(home, tmp_path):
    names = {"train_file": "train.jsonl", "validation_file": "dev.jsonl"}
    data = {
        flag: write_pairs(tmp_path / name, count) for (flag, name), count in zip(names.items(), (40, 11), strict=True)
    }
    columns = {"text_column": "a", "text_pair_column": "b", "label_column": "score"}
    folder = finish(home, "classifier", tmp_path / "run", learning_rate=2e-3, max_steps=30, **data, **columns)
    results = results_of(folder)
    rows = [json.loads(line) for line in (folder / "validation_predictions.jsonl").open()]
    gold, found = (np.array([float(row[name]) for row in rows]) for name in ("score", "prediction"))
    assert results["eval_mse"] == pytest.approx(np.mean((gold - found) ** 2), abs=1e-3)
    assert results["eval_pearson"] == pytest.approx(np.corrcoef(gold, found)[0, 1], abs=1e-3)
    assert results["eval_pearson"] > 0.8
    assert results["eval_spearmanr"] > 0.8
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.problem_type == "regression"
    pairs = tokenizer([row["a"] for row in rows], [row["b"] for row in rows], padding=True, return_tensors="pt")
    assert tokenizer.unk_token_id not in pairs["input_ids"]  # the vocabulary is of both texts
    assert model.eval()(**pairs).logits[:, 0].tolist() == pytest.approx(found.tolist(), abs=1e-4)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert json.dumps({"text": rows[0]["a"], "text_pair": rows[0]["b"]}, ensure_ascii=False) in card
    snippet = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("PATH_OR_ID", str(folder))
    exec(snippet, given := {})
    answer = given["solve"]({"text": rows[0]["a"], "text_pair": rows[0]["b"]})
    assert answer["score"] == pytest.approx(found[0], abs=1e-3)


@pytest.mark.parametrize("start", ["scratch", "native"])
def test_texts_with_several_labels(home, tmp_path, start):
    """On hf_tiny's encoder and on one of transformers'. The figures are those of the written predictions."""
    numbers = random.Random(0)
    for name, count in (("train", 60), ("dev", 15)):
        rows = []
        for _ in range(count):
            moods = [mood for mood in MOODS if numbers.random() < 0.4]
            rows.append((" ".join(["ship", *(MOODS[mood][0] for mood in moods), "moon"]), "; ".join(moods)))
        write_table(tmp_path / f"{name}.tsv", rows)
    data = {"train_file": tmp_path / "train.tsv", "validation_file": tmp_path / "dev.tsv", "label_separator": ";"}
    settings = {"max_steps": 30}
    if start == "native":  # a random one
        settings = {"max_steps": 150, "model_name_or_path": home / "native", "l2_sp": 0.0}
    ended = run(home, "classifier", tmp_path / "run", learning_rate=2e-3, **data, **settings)
    assert ended.code == 0, ended.err
    assert re.search(r"^labels: \w+ \d+, \w+ \d+, \w+ \d+$", ended.err, re.MULTILINE)
    found, gold = (
        [
            {part.strip() for part in row[name].split(";") if part}
            for row in read_table(tmp_path / "run/validation_predictions.tsv")
        ]
        for name in ("prediction", "label")
    )
    results, right = results_of(tmp_path / "run"), sum(len(a & b) for a, b in zip(found, gold, strict=True))
    assert results["eval_micro_f1"] == pytest.approx(2 * right / sum(map(len, [*found, *gold])))
    assert results["eval_micro_f1"] > 0.6
    assert results["eval_accuracy"] == pytest.approx(np.mean([a == b for a, b in zip(found, gold, strict=True)]))
    solve = pipeline("text-classification", model=str(tmp_path / "run"), top_k=None, device="cpu")
    answers = solve([row["text"] for row in read_table(tmp_path / "dev.tsv")])
    assert [{one["label"] for one in answer if one["score"] > 0.5} for answer in answers] == found


def test_rare_labels_can_weigh_as_much_as_frequent_ones(home, tmp_path):
    """All texts are the same: without weights the model answers with the frequent label, with them it cannot tell."""
    rows = [("the ship", "often")] * 36 + [("the ship", "rare")] * 4
    table = write_table(tmp_path / "train.tsv", rows)
    data = {"train_file": table, "validation_file": table, "max_steps": 40, "learning_rate": 2e-3}
    scores = {}
    for weights in ("none", "balanced"):
        folder = finish(home, "classifier", tmp_path / weights, class_weights=weights, baseline=False, **data)
        answers = read_table(folder / "validation_predictions.tsv")
        scores[weights] = {(row["prediction"], float(row["prediction_score"])) for row in answers}
    ((label, score),) = scores["none"]
    assert label == "often" and score > 0.8
    ((_, score),) = scores["balanced"]
    assert score < 0.65


def test_several_seeds_share_the_data_and_give_mean_and_deviation(home, tmp_path):
    folder = tmp_path / "run"
    settings = {"max_train_samples": 20, "max_eval_samples": 9, "model_name_or_path": home / "native"}
    ended = run(home, "classifier", folder, seeds=2, **settings)
    assert ended.code == 0, ended.err
    assert ended.err.count("train: 20 texts, validation: 9 texts") == 2
    seeds = [folder / name for name in ("seed-42", "seed-43")]
    parts, summary = [results_of(seed) for seed in seeds], results_of(folder)
    assert summary.pop("seeds") == 2
    assert summary.pop("baseline_name") == parts[0].pop("baseline_name") == parts[1]["baseline_name"]
    assert summary.keys() == {f"{name}{end}" for name in parts[0] for end in ("", "_std")}
    for name in ("eval_loss", "eval_accuracy", "train_steps", "train_tokens"):
        one, other = (part[name] for part in parts)
        assert summary[name] == pytest.approx((one + other) / 2)
        assert summary[f"{name}_std"] == pytest.approx(statistics.stdev([one, other]))
    assert parts[0]["eval_loss"] != parts[1]["eval_loss"]
    assert tiny_run.largest_difference(*seeds) > 0
    assert f"± {number(summary['eval_loss_std'])}" in ended.out
    single = finish(home, "classifier", tmp_path / "single", seed=43, **settings)
    assert tiny_run.largest_difference(seeds[1], single) == 0
    states = [json.loads((seed / "checkpoint-3" / "trainer_state.json").read_text()) for seed in seeds]
    data = [state["identity"]["data"] for state in states]
    assert data[0] == data[1]  # the same samples
    assert data[0].startswith("20 samples")
    written = [read_table(seed / "validation_predictions.tsv") for seed in seeds]
    assert [row["text"] for row in written[0]] == [row["text"] for row in written[1]]


def test_a_text_that_is_longer_than_a_window_is_scored_once(home, tmp_path):
    dev = write_table(tmp_path / "dev.tsv", text_rows(12, 5, words=60))
    windows = {"max_seq_length": 16, "doc_stride": 4, "model_name_or_path": home / "native"}
    folder = finish(home, "classifier", tmp_path / "run", validation_file=dev, **windows)
    rows = read_table(folder / "validation_predictions.tsv")
    assert [row["text"] for row in rows] == [row["text"] for row in read_table(dev)]
    right = np.mean([row["prediction"] == row["label"] for row in rows])
    assert results_of(folder)["eval_accuracy"] == pytest.approx(right)


@pytest.mark.parametrize(("words", "dropout"), [(12, 0.3), (90, 0.1)])
def test_a_new_model_of_long_texts_has_less_dropout(home, tmp_path, words, dropout):
    """home's data with windows of 32 tokens. A flag that is given would win, as that of `given` does in other tests."""
    train = write_table(tmp_path / "train.tsv", text_rows(40, 5, words=words))
    flags = {
        "train_file": train,
        "max_seq_length": 32,
        "doc_stride": 4,
        "max_steps": 1,
        "vocab_size": 300,
        "hidden_size": 32,
    }
    folder = tiny_run.finish(tmp_path / "run", "finetune_classifier", validation_file=home / "dev.tsv", **flags)
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.hidden_dropout_prob == dropout


# Mistakes


def unknown_label(home, folder):
    dev = write_table(folder / "dev.tsv", [("one", "good"), ("two", "ugly")])
    return {"validation_file": dev}, [f"{dev}:3", "'ugly'", "bad, good, plain"]


def no_column(home, folder):
    return {"text_column": "review"}, [f"{home / 'train.tsv'}:2", "'review'", "'text'", "--text_column"]


def one_class(home, folder):
    train = write_table(folder / "train.tsv", [("one", "good"), ("two", "good")])
    return {"train_file": train}, ["1 kind of label", "'good'", "fewer than 2", "--label_column"]


@pytest.mark.parametrize("mistake", [unknown_label, no_column, one_class])
def test_a_mistake_gets_a_message(home, tmp_path, mistake):
    settings, words = mistake(home, tmp_path)
    assert_refused(run(home, "classifier", tmp_path / "run", **settings), *words)
    assert not list(tmp_path.glob("run/*"))
