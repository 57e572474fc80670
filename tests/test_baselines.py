"""What a model is compared with: the answers of each baseline, by hand, and what is said of them."""

import json
import math
import re

import numpy as np
import pytest
from fixtures.finetuning import finish, make_home, run

from hf_tiny import baselines, report
from hf_tiny.data.conllu import Sentence
from hf_tiny.data.images import ImageData, LabelledImage
from hf_tiny.tasks.classify import ClassifyArguments, Text, TextTask
from hf_tiny.tasks.embed import EmbedArguments, EmbedTask, TextPair
from hf_tiny.tasks.images import image_baseline
from hf_tiny.tasks.parse import LinkTask, ParseArguments
from hf_tiny.tasks.tag import TagArguments, TagTask


def texts(rows: list[tuple]) -> list[Text]:
    return [Text(text, None, label, "", ".tsv", {}) for text, label in rows]


def test_characters_or_words_are_chosen_by_folds():
    stems = ["좋", "나쁘"]
    korean = [(f"{stem}{ending}", str(n)) for n, stem in enumerate(stems) for ending in "은던지게구나네요다면서도만큼"]
    found = TextTask(ClassifyArguments(), labels=["0", "1"]).baseline(
        {"train": texts(korean), "validation": texts([("좋겠군", "0"), ("나쁘겠군", "1")])}
    )
    assert found.name == "TF-IDF of characters + linear SVM" and found.figures["validation"]["accuracy"] == 1.0
    words = [(f"{x} {y}", str(int((x < "m") == (y < "m")))) for x in "acegnprt" for y in "acegnprt"]
    pairs = [("not good", "0"), ("good", "1"), ("not bad", "1"), ("bad", "0")] * 8
    found = TextTask(ClassifyArguments(), labels=["0", "1"]).baseline(
        {"train": texts(pairs + words), "validation": texts(pairs), "test": texts(pairs)}
    )
    assert found.figures["validation"]["accuracy"] == found.figures["test"]["accuracy"] == 1.0


def test_numbers_of_pairs_come_from_their_overlap():
    rows = np.random.default_rng(0).integers(0, 30, (80, 2, 4))
    pairs = [[" ".join(f"word{n}" for n in side) for side in row] for row in rows]
    scores = [len(set(a.split()) & set(b.split())) + 0.5 for a, b in pairs]
    made = [Text(a, b, str(score), "", ".tsv", {}) for (a, b), score in zip(pairs, scores, strict=True)]
    found = TextTask(ClassifyArguments(), labels=None).baseline({"train": made[:60], "validation": made[60:]})
    assert found.name.endswith("ridge regression") and found.figures["validation"]["spearmanr"] > 0.5


def test_texts_with_several_labels():
    rows = [("good long", ("x", "y")), ("good", ("x",)), ("long", ("y",)), ("so", ())] * 5
    made = [Text(text, None, "", "", ".jsonl", {}, several) for text, several in rows]
    found = TextTask(ClassifyArguments(), labels=["x", "y"]).baseline({"train": made, "validation": made[:4]})
    assert found.figures["validation"] == {"micro_f1": 1.0, "macro_f1": 1.0, "accuracy": 1.0}


def test_too_few_texts_for_folds():
    rows = texts([("a good film", "1"), ("a bad film", "0")])
    assert (
        TextTask(ClassifyArguments(), labels=["0", "1"])
        .baseline({"train": rows, "validation": rows})
        .figures["validation"]["accuracy"]
        == 1.0
    )


def sentence(words: str, tags: list, heads=()) -> Sentence:
    return Sentence(tuple(words.split()), tuple(tags), "", ".conllu", (), tuple(heads))


def test_tags_by_word_then_by_suffix_then_by_majority():
    train = [("run", "V"), ("run", "V"), ("run", "N"), ("walking", "V"), ("ring", "N"), ("table", "N"), ("house", "N")]
    predict = baselines.fit_tags([[word for word, _ in train]], [[tag for _, tag in train]])
    assert predict(["run", "talking", "ring", "운동"]) == ["V", "V", "N", "N"]
    part = [sentence("run talking x", ["V", "V", None])]
    found = TagTask(TagArguments(), labels=["N", "V"]).baseline(
        {"train": [sentence("run walking", ["V", "N"])], "validation": part}
    )
    assert found.figures["validation"]["accuracy"] == 0.5  # the third word is not scored


def test_entities_of_a_baseline_are_whole_ones():
    train = [sentence("in New York", ["O", "B-LOC", "I-LOC"])]
    labels = ["B-LOC", "I-LOC", "O"]
    found = TagTask(TagArguments(), labels=labels).baseline({"train": train, "validation": train}).figures["validation"]
    assert found["f1"] == 1.0 and found["accuracy"] == 1.0


def test_trees_follow_the_side_that_the_treebank_prefers():
    korean = [sentence("나는 책을 읽었다", ["nsubj", "obj", "root"], [3, 3, 0])]
    found = LinkTask(ParseArguments(task="parse")).baseline({"train": korean, "validation": korean})
    assert found.name == "each word depends on the next one"
    assert found.figures["validation"]["uas"] == pytest.approx(2 / 3)  # 책을 and 읽었다; 나는 is attached to 책을
    assert found.figures["validation"]["las"] == pytest.approx(2 / 3)  # as obj, of which one stands before its head
    subjects = [sentence("갔다 왔다", ["nsubj", "omitted"], [2, 0])]
    found = (
        LinkTask(ParseArguments(task="subject"))
        .baseline({"train": subjects, "validation": subjects})
        .figures["validation"]
    )
    assert found["subject_accuracy"] == 0.5 and found["omitted_accuracy"] == 1.0


def test_embeddings_are_compared_with_cosines():
    same = [TextPair((f"문서 {n} 입니다", f"문서 {n}"), None, "", ".tsv", {}) for n in ("하나", "둘", "셋")]
    assert EmbedTask(EmbedArguments()).baseline({"train": same, "validation": same}).figures["validation"] == {
        "accuracy": 1.0,
        "mrr": 1.0,
    }
    scored = [
        TextPair(("가나다 라마", other), score, "", ".tsv", {}) for other, score in (("가나다 라마", 5), ("바사", 0))
    ]
    assert EmbedTask(EmbedArguments()).baseline({"train": scored, "validation": scored}).figures["validation"][
        "pearson"
    ] == pytest.approx(1)


def test_images_are_compared_with_their_pixels():
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 100, (40, 4, 4), dtype=np.uint8)
    pixels[::2, 0, 0] += 120
    rows = [LabelledImage(lambda one=one: Image.fromarray(one), "ab"[n % 2], "") for n, one in enumerate(pixels)]
    data = {split: ImageData(rows, (4, 4), 1, ["a", "b"]) for split in ("train", "validation")}
    assert image_baseline(data).figures["validation"]["accuracy"] == 1.0


def test_large_sets_are_sampled_and_that_is_said(monkeypatch, caplog):
    monkeypatch.setattr(baselines, "MOST_ITEMS", 10)
    with caplog.at_level("INFO", logger="hf_tiny"):
        chosen = baselines.sample(range(1000), "texts")
    assert (
        len(chosen) == 10 and list(chosen) == sorted(chosen) and list(chosen) == list(baselines.sample(range(1000), ""))
    )
    assert "The baseline learns from 10 of 1,000 texts." in caplog.messages


def test_a_model_that_loses_says_so():
    results = {"eval_accuracy": 0.703, "baseline_name": "words", "baseline_accuracy": 0.758, "eval_mse": 1.0}
    results |= {"baseline_mse": 2.0, "test_accuracy": 0.8, "baseline_test_accuracy": 0.8}
    said = report.compare(results)
    assert said == (
        "The model does not beat its baseline (words): accuracy 0.703 against 0.758. It is level in test_accuracy 0.8."
    )
    better = {**results, "eval_accuracy": 0.8, "test_accuracy": 0.81}
    assert report.compare(better) == "The model beats its baseline (words) in every figure."
    assert report.compare({"eval_accuracy": 0.5}) == ""


def test_a_tie_is_no_defeat():
    results = {"eval_accuracy": 0.758, "baseline_name": "words", "baseline_accuracy": 0.758001}
    assert report.compare(results) == "The model is level with its baseline (words): accuracy 0.758."
    ahead = {**results, "eval_mse": 1.0, "baseline_mse": 2.0}
    said = "The model is level with its baseline (words): accuracy 0.758. It is ahead in mse 1 against 2."
    assert report.compare(ahead) == said
    constant = {"eval_pearson": math.nan, "baseline_name": "words", "baseline_pearson": math.nan}
    assert report.compare(constant).startswith("The model does not beat")


@pytest.mark.slow
def test_a_run_has_it_everywhere_or_not_at_all(tmp_path):
    home = make_home(tmp_path)
    settings = {"test_file": home / "test.tsv", "max_steps": 2}
    ended = run(home, "classifier", tmp_path / "run", seeds=2, **settings)
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["baseline_accuracy"] == 1.0 and results["baseline_accuracy_std"] == 0
    assert results["baseline_test_accuracy"] == 1.0 and results["baseline_name"].startswith("TF-IDF of ")
    assert "The model does not beat its baseline (TF-IDF of " in ended.out
    card = (tmp_path / "run" / "seed-42" / "README.md").read_text()
    assert "The model does not beat its baseline" in card and re.search(
        r"^\| eval_accuracy \| \S+ \| 1 \|$", card, re.MULTILINE
    )
    plain = finish(home, "classifier", tmp_path / "none", baseline=False, **settings)
    assert not any("baseline" in name for name in json.loads((plain / "all_results.json").read_text()))
