"""finetune_tagger.py and finetune_parser.py: long sentences, words without a tag, morphemes, subjects, and mistakes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from fixtures.finetuning import finish, make_home, run
from fixtures.labelled import KOREAN, NO_SUBJECT, name_sentences, read_trees, write_klue_names, write_trees
from fixtures.tiny_run import assert_refused, results_of
from transformers import pipeline

from hf_tiny.tasks.tag import consistent


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("words"))


@pytest.fixture
def windows(home) -> dict:
    """Flags of short windows."""
    return {"max_seq_length": 16, "doc_stride": 4, "model_name_or_path": home / "native"}


def predictions(folder: Path) -> list[list[list[str]]]:
    return read_trees(folder / "validation_predictions.conllu")


@pytest.mark.parametrize(
    ("recipe", "own", "figure"), [("tagger", slice(3, 4), "accuracy"), ("parser", slice(6, 8), "las_full")]
)
def test_a_word_of_a_long_sentence_is_scored_and_written_once(home, windows, tmp_path, recipe, own, figure):
    dev = write_trees(tmp_path / "dev.conllu", 12, seed=5, copies=6)
    folder = finish(home, recipe, tmp_path / "run", validation_file=dev, **windows)
    found, gold = predictions(folder), read_trees(dev)
    assert [[word[:3] for word in one] for one in found] == [[word[:3] for word in one] for one in gold]
    assert min(len(sentence) for sentence in gold) > 14
    words = [pair for pairs in zip(found, gold, strict=True) for pair in zip(*pairs, strict=True)]
    right = np.mean([one[own] == other[own] for one, other in words])
    assert results_of(folder)[f"eval_{figure}"] == pytest.approx(right)


def test_predicates_of_a_long_sentence(home, windows, tmp_path):
    """The last windows have none."""
    dev = write_trees(tmp_path / "dev.conllu", 12, seed=5, copies=6)
    dev.write_text(re.sub(r"^(\d\d\t.*)(VERB|ADJ)", r"\1X", dev.read_text(), flags=re.MULTILINE))
    found = predictions(finish(home, "parser", tmp_path / "run", validation_file=dev, task="subject", **windows))
    asked = [word[9].startswith("Subject=") for sentence in found for word in sentence]
    assert asked == [word[3] in ("VERB", "ADJ") for sentence in read_trees(dev) for word in sentence]
    assert 0 < sum(asked) < 0.3 * len(asked)


def test_words_without_a_tag_are_not_scored(home, windows, tmp_path):
    """Not even a whole window of them, in the middle of a sentence."""

    def write(name: str, untagged: range) -> Path:
        tags = [None if place in untagged else str(place % 2) for place in range(60)]
        words = ["the" if place % 2 else "moon" for place in range(60)]
        (tmp_path / name).write_text(json.dumps({"tokens": words, "tags": tags}) + "\n")
        return tmp_path / name

    data = {"train_file": write("train.jsonl", range(0)), "validation_file": write("dev.jsonl", range(3, 57))}
    folder = finish(home, "tagger", tmp_path / "run", **data, **windows)
    (row,) = [json.loads(line) for line in (folder / "validation_predictions.jsonl").open()]
    assert len(row["prediction"]) == 60
    assert row["prediction"].count("_") > 12  # of windows in which nothing is asked
    ends = [place for place, tag in enumerate(row["tags"]) if tag is not None]
    right = [row["prediction"][place] == row["tags"][place] for place in ends]
    assert results_of(folder)["eval_accuracy"] == pytest.approx(np.mean(right))


def test_morphemes(home, tmp_path):
    names = {"train_file": ("train", 80), "validation_file": ("dev", 9)}
    data = {
        flag: write_trees(tmp_path / f"{name}.conllu", count, seed=count, patterns=(KOREAN, NO_SUBJECT))
        for flag, (name, count) in names.items()
    }
    settings = {"learning_rate": 2e-3, "max_steps": 40, "tag_field": "morphemes"}
    ended = run(home, "tagger", tmp_path / "run", **data, **settings)
    assert ended.code == 0, ended.err
    assert "the morphemes of 100.00% of" in ended.err
    assert results_of(tmp_path / "run")["eval_f1"] > 0.95
    tags = {word[1]: word[9] for sentence in predictions(tmp_path / "run") for word in sentence}
    assert tags["책을"] == "Tags=B-NNG,B-JKO"
    assert tags["했다"] == "Tags=B-VV+EP,B-EF"


@pytest.mark.slow
@pytest.mark.parametrize("character_tokens", [None, False])
def test_a_pipeline_finds_in_raw_text_what_was_scored(home, tmp_path, character_tokens):
    """KLUE's format, made from raw sentences: of each the pipeline gets the raw text."""
    train, dev = name_sentences(150, seed=1), name_sentences(40, seed=2)
    data = {
        "train_file": write_klue_names(tmp_path / "train.tsv", train),
        "validation_file": write_klue_names(tmp_path / "dev.tsv", dev),
    }
    settings = {"learning_rate": 2e-3, "max_steps": 45, "character_tokens": character_tokens}
    settings = {name: value for name, value in settings.items() if value is not None}
    folder = finish(home, "tagger", tmp_path / "run", **data, **settings)
    results = results_of(folder)
    solve = pipeline("token-classification", model=str(folder), aggregation_strategy="simple", device="cpu")
    found = [{(one["start"], one["end"], one["entity_group"]) for one in solve(text)} for text, _ in dev]
    right = sum(len(names & set(gold)) for names, (_, gold) in zip(found, dev, strict=True))
    assert results["eval_f1"] > 0.3 and sum(map(len, found)) > 20  # it has learned, but not all
    assert results["eval_precision"] == pytest.approx(right / sum(map(len, found)))
    assert results["eval_recall"] == pytest.approx(right / sum(len(gold) for _, gold in dev))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert json.dumps(dev[0][0], ensure_ascii=False) in card and ', aggregation_strategy="simple")' in card


def test_names_are_found_in_a_given_time(home, tmp_path):
    """What is timed is one batch of the validation data: the sentences of the others have no tags yet."""
    rows = [[("Anna", "B-PER"), ("runs", "O")], [("to", "O"), ("Seoul", "B-LOC")]] * 8
    for name in ("train", "dev"):
        text = "\n\n".join("\n".join(f"{word}\t{tag}" for word, tag in sentence) for sentence in rows)
        (tmp_path / f"{name}.conll").write_text(text + "\n")
    data = {"train_file": tmp_path / "train.conll", "validation_file": tmp_path / "dev.conll"}
    ended = run(home, "tagger", tmp_path / "run", **data, max_steps=-1, max_minutes=0.01, per_device_eval_batch_size=4)
    assert ended.code == 0, ended.err


def test_a_pipeline_tags_morphemes_of_raw_text(home, tmp_path):
    """The card of a model of morphemes has a text as people write it."""
    data = {flag: home / f"{name}.conllu" for flag, name in (("train_file", "train"), ("validation_file", "dev"))}
    folder = finish(home, "tagger", tmp_path / "run", **data, tag_field="morphemes")
    card = (folder / "README.md").read_text(encoding="utf-8")
    text = " ".join(word[1] for word in read_trees(home / "dev.conllu")[0])
    assert json.dumps(text, ensure_ascii=False) in card
    solve = pipeline("token-classification", model=str(folder), device="cpu", ignore_labels=[])
    tags = [one["entity"] for one in solve(text)]
    written = [word[9].removeprefix("Tags=").split(",") for word in predictions(folder)[0]]
    assert len(tags) == len(text.replace(" ", ""))
    assert consistent(tags) == [tag for word in written for tag in word]


def test_subjects(home, tmp_path):
    folder = finish(home, "parser", tmp_path / "run", task="subject", learning_rate=2e-3, max_steps=40)
    results, right = results_of(folder), []
    assert results["eval_subject_accuracy"] > 0.95
    assert results["eval_overt_accuracy"] > 0.9
    assert 0 < results["eval_majority"] < 0.9
    for sentence in predictions(folder):
        for word in sentence:
            subjects = [other[0] for other in sentence if other[6:8] == [word[0], "nsubj"]]
            answer = dict(part.split("=") for part in word[9].split("|") if "=" in part).get("Subject")
            assert (answer is not None) == (word[3] in ("VERB", "ADJ"))
            right += [] if answer is None else [answer == (subjects or ["0"])[0]]
    assert np.mean(right) == pytest.approx(results["eval_subject_accuracy"])


def test_several_seeds_of_a_figure_that_is_not_a_number(home, tmp_path):
    """No predicate of the validation data has a subject: how many are found is unknown."""
    dev = write_trees(tmp_path / "dev.conllu", 5, seed=1, patterns=(NO_SUBJECT,))
    settings = {"seeds": 2, "task": "subject", "validation_file": dev, "model_name_or_path": home / "native"}
    folder = finish(home, "parser", tmp_path / "run", **settings)
    assert np.isnan(results_of(folder / "seed-43")["eval_overt_accuracy"])
    assert np.isnan(results_of(folder)["eval_overt_accuracy_std"])


# Mistakes


def unknown_tag(home, folder):
    (folder / "dev.conll").write_text("the DET\nship SHIP\n")
    (folder / "train.conll").write_text("the DET\nship NOUN\n")
    data = {"train_file": folder / "train.conll", "validation_file": folder / "dev.conll"}
    return "tagger", data, [f"{folder / 'dev.conll'}:1", "'SHIP'", "DET, NOUN"]


def other_number_of_tags(home, folder):
    rows = [{"tokens": ["a", "b"], "tags": ["X", "Y"]}, {"tokens": ["a", "b", "c"], "tags": ["X", "Y"]}]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "tagger", {"train_file": folder / "a.jsonl"}, [f"{folder / 'a.jsonl'}:2", "3 words and 2 tags"]


def word_without_tag(home, folder):
    (folder / "a.conll").write_text("the DET\nship NOUN\n\nthe DET\nmoon\n")
    return "tagger", {"train_file": folder / "a.conll"}, [f"{folder / 'a.conll'}:5", "1 columns"]


def cycle(home, folder):
    lines = (home / "dev.conllu").read_text().split("\n\n")
    lines[3] = "# sent_id = round-7\n1\ta\t_\tX\t_\t_\t2\tdet\t_\t_\n2\tb\t_\tX\t_\t_\t1\tdet\t_\t_"
    (folder / "a.conllu").write_text("\n\n".join(lines))
    return "parser", {"validation_file": folder / "a.conllu"}, [folder / "a.conllu", "round-7", "cycle", "1 -> 2 -> 1"]


def head_out_of_range(home, folder):
    (folder / "a.conllu").write_text("# sent_id = far-3\n1\ta\t_\tX\t_\t_\t9\tdet\t_\t_\n")
    return "parser", {"train_file": folder / "a.conllu"}, ["a.conllu:1", "far-3", "'9'", "from 0 to 1"]


def no_predicate(home, folder):
    (folder / "a.conllu").write_text("1\ta\t_\tX\t_\t_\t0\troot\t_\t_\n")
    return "parser", {"validation_file": folder / "a.conllu", "task": "subject"}, ["validation", "nothing", "--task"]


MISTAKES = [unknown_tag, other_number_of_tags, word_without_tag, cycle, head_out_of_range, no_predicate]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_message(home, tmp_path, mistake):
    recipe, settings, words = mistake(home, tmp_path)
    assert_refused(run(home, recipe, tmp_path / "run", **settings), *words)
    assert not list(tmp_path.glob("run/*"))
