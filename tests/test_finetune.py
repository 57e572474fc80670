"""The fine-tuning recipes from end to end, on tasks that a tiny model learns in seconds."""

import ast
import json
import random
import re
import shutil
import signal
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiny_run
import torch
from accelerate.state import AcceleratorState
from test_bad_input import assert_refused
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    GPT2Config,
    RobertaConfig,
    RobertaForMaskedLM,
)

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForTokenClassification, hub
from hf_tiny.data.collate import Source
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer
from hf_tiny.train import TrainConfig, train
from hf_tiny.trees import maximum_spanning_tree

RECIPES = ("classifier", "tagger", "parser")
STARTS = ("scratch", "hf_tiny", "native")

# Texts with a word that tells the label; sentences in which the tag of a word and its head are always the same.

MOODS = {"bad": ("awful", "나쁘다"), "good": ("great", "좋다"), "plain": ("ordinary", "보통이다")}
QUOTED = 'he said "great" \\'
FILLERS = ["the", "ship", "sails", "under", "a", "moon", "나는", "어제", "바다에서", "배를", "보았다"]
ENGLISH = (
    ("the a", "DET", 3, "det"),
    ("old cold red", "ADJ", 3, "amod"),
    ("ship bird moon", "NOUN", 4, "nsubj"),
    ("sees finds", "VERB", 0, "root"),
    ("every", "DET", 6, "det"),
    ("hill letter", "NOUN", 4, "obj"),
)
KOREAN = (
    ("나는 그는", "PRON", 4, "nsubj"),
    ("작은 큰", "ADJ", 3, "amod"),
    ("책을 배를", "NOUN", 4, "obj"),
    ("읽었다 했다", "VERB", 0, "root"),
)
NO_SUBJECT = (("책을 배를", "NOUN", 2, "obj"), ("읽었다 했다", "VERB", 0, "root"))
MORPHEMES = {
    "나는": ("나+는", "NP+JX"),
    "그는": ("그+는", "NP+JX"),
    "작은": ("작+은", "VA+ETM"),
    "큰": ("크+ㄴ", "VA+ETM"),
    "책을": ("책+을", "NNG+JKO"),
    "배를": ("배+를", "NNG+JKO"),
    "읽었다": ("읽+었+다", "VV+EP+EF"),
    "했다": ("하+었+다", "VV+EP+EF"),
}


def text_rows(count: int, seed: int, words: int = 6) -> list[tuple[str, str]]:
    """(text, label); every tenth text is empty and plain."""
    numbers = random.Random(seed)
    rows = []
    for number in range(count):
        label = numbers.choice(list(MOODS))
        text = numbers.choices(FILLERS, k=numbers.randrange(1, words))
        text.insert(numbers.randrange(len(text) + 1), numbers.choice(MOODS[label]))
        rows.append(("", "plain") if number % 10 == 9 else (" ".join(text), label))
    return rows


def write_texts(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows), encoding="utf-8")
    return path


def write_trees(path: Path, count: int, seed: int, patterns=(ENGLISH, KOREAN, NO_SUBJECT), copies: int = 1) -> Path:
    """`copies`: how many of them are one long sentence, each hanging on the first one's root."""
    numbers = random.Random(seed)
    blocks = []
    for sentence in range(count):
        lines, first = [f"# sent_id = {path.stem}-{sentence}"], None
        for _ in range(copies):
            pattern, before = patterns[numbers.randrange(len(patterns))], len(lines) - 1
            for place, (forms, upos, head, relation) in enumerate(pattern, before + 1):
                form = numbers.choice(forms.split())
                lemma, xpos = MORPHEMES.get(form, (form, upos))
                head, relation = (head + before, relation) if head else (first or 0, "conj" if first else "root")
                lines.append(f"{place}\t{form}\t{lemma}\t{upos}\t{xpos}\t_\t{head}\t{relation}\t_\t_")
            first = first or 1 + [line.split("\t")[7:8] for line in lines[1:]].index(["root"])
        blocks.append("\n".join(lines) + "\n\n")
    path.write_text("".join(blocks), encoding="utf-8")
    return path


def read_trees(path: Path) -> list[list[list[str]]]:
    """The columns of the words of each sentence."""
    blocks = path.read_text(encoding="utf-8").strip().split("\n\n")
    return [[line.split("\t") for line in block.splitlines() if not line.startswith("#")] for block in blocks]


def read_texts(path: Path) -> list[dict[str, str]]:
    head, *rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with the data of all recipes, an encoder of hf_tiny's and one of transformers'."""
    home = tmp_path_factory.mktemp("finetune")
    for split, count in (("train", 120), ("dev", 33), ("test", 20)):
        write_texts(home / f"{split}.tsv", [(QUOTED, "good"), *text_rows(count, seed=count)])
        write_trees(home / f"{split}.conllu", count, seed=count)
    words = [*FILLERS, *sum(MOODS.values(), ()), *(w for part in (*ENGLISH, *KOREAN) for w in part[0].split())]
    numbers = random.Random(0)
    lines = [" ".join(numbers.choices(words, k=12)) for _ in range(200)]
    (home / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tokenizer = train_tokenizer(lines, TokenizerArguments(vocab_size=300), model_max_length=64)
    tokenizer.save_pretrained(home / "native")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **small)
    BertForMaskedLM(config).save_pretrained(home / "native")
    return home


@pytest.fixture(scope="module")
def pretrained(home) -> Path:
    sizes = tiny_run.flags(size="tiny", max_steps=2, max_seq_length=32, per_device_train_batch_size=4, vocab_size=300)
    arguments = ["--train_file", home / "text.txt", "--output_dir", home / "hf_tiny", *sizes]
    ended = tiny_run.start(home, tiny_run.run_plain, "pretrain_electra", *map(str, arguments)).wait()
    assert ended.code == 0, ended.err
    return home / "hf_tiny"


def given(home: Path, recipe: str, **settings) -> dict:
    """The flags of a run of the recipe on its data, but for --output_dir."""
    suffix = "tsv" if recipe == "classifier" else "conllu"
    data = {"train_file": home / f"train.{suffix}", "validation_file": home / f"dev.{suffix}"}
    sizes = {"vocab_size": 300, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_steps": 3}
    return {**data, **sizes, **settings}


def tune(recipe: str, output_dir: Path, run=tiny_run.run_plain, **settings) -> tiny_run.Ended:
    flags = tiny_run.flags(output_dir=output_dir, **settings)
    return tiny_run.start(output_dir.parent, run, f"finetune_{recipe}", *flags).wait()


def results_of(run: Path) -> dict[str, float]:
    return json.loads((run / "all_results.json").read_text())


@pytest.fixture(scope="module")
def run_of(home, request):
    """run_of(recipe, start): the folder of that run, which is made once. From scratch it goes on until it has learned."""
    made = {}

    def run_of(recipe: str, start: str) -> Path:
        if (recipe, start) not in made:
            made[recipe, start] = run = home / f"{recipe}-{start}"
            if start == "scratch":
                learns = {"learning_rate": 2e-3, "max_steps": 60, "gradient_accumulation_steps": 2}
                suffix = "tsv" if recipe == "classifier" else "conllu"
                settings = {**learns, "test_file": home / f"test.{suffix}"}
                ended = tune(recipe, run, tiny_run.run_named, **given(home, recipe, **settings))
            else:
                source = home / "native" if start == "native" else request.getfixturevalue("pretrained")
                ended = tune(recipe, run, **given(home, recipe, model_name_or_path=source))
            assert ended.code == 0, ended.err
        return made[recipe, start]

    return run_of


# What a run leaves


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("start", STARTS)
def test_a_run_leaves_everything(run_of, recipe, start):
    run = run_of(recipe, start)
    suffix = "tsv" if recipe == "classifier" else "conllu"
    names = ["config.json", "model.safetensors", "tokenizer.json", "README.md", "metrics.jsonl", "all_results.json"]
    names += ["recipe.yaml", f"validation_predictions.{suffix}"]
    if start == "scratch":  # which is drawn
        names += ["curves.png", f"test_predictions.{suffix}"]
        names += [] if recipe == "parser" else ["validation_confusion.png", "test_confusion.png"]
    for name in names:
        assert (run / name).stat().st_size > 0, name
    card = (run / "README.md").read_text(encoding="utf-8")
    assert ("scratch" if start == "scratch" else f"/{start}`") in card
    (example,) = re.findall(r'^print\(solve\((".*")\)\)$', card, re.MULTILINE)
    if recipe == "classifier":
        assert ast.literal_eval(example) == QUOTED
    results = results_of(run)
    assert f"| eval_loss | {results['eval_loss']:.4f} |" in card
    model = {
        "classifier": AutoModelForSequenceClassification,
        "tagger": AutoModelForTokenClassification,
        "parser": AutoModel,
    }[recipe].from_pretrained(run)
    kind = "Bert" if start == "native" else "HfTinyElectra"
    assert type(model.base_model).__name__ == f"{kind}Model"
    assert results["num_parameters"] == model.num_parameters()
    assert set(tiny_run.logged_steps(run)) >= {1, results["train_steps"]}


@torch.no_grad()
def predict_texts(run: Path, texts: list[str]) -> list[str]:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    logits = model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    return [model.config.id2label[number] for number in logits.argmax(-1).tolist()]


def first_tokens(encoding) -> list[int]:
    places = encoding.word_ids()
    return [places.index(word) for word in range(1 + max(place for place in places if place is not None))]


@torch.no_grad()
def predict_tags(run: Path, sentences: list[list[str]]) -> list[list[list[str]]]:
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    found = []
    for words in sentences:
        encoding = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        numbers = model.eval()(**encoding).logits[0, first_tokens(encoding)].argmax(-1)
        found.append([[model.config.id2label[number]] for number in numbers.tolist()])
    return found


@torch.no_grad()
def predict_links(run: Path, sentences: list[list[str]]) -> list[list[list[str]]]:
    model, tokenizer = AutoModel.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    found = []
    for words in sentences:
        encoding = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        firsts = first_tokens(encoding)
        spans = torch.tensor([list(zip(firsts, [*firsts[1:], len(encoding.word_ids()) - 1], strict=True))])
        outputs = model.eval()(**encoding, word_spans=spans)
        heads = maximum_spanning_tree(outputs.logits[0].numpy())
        labels = outputs.label_logits[0, np.arange(len(words)), heads].argmax(-1)
        names = (model.config.id2label[number] for number in labels.tolist())
        found.append([list(link) for link in zip(map(str, heads), names, strict=True)])
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("start", STARTS)
def test_the_predictions_and_figures_are_those_of_the_saved_model(home, run_of, recipe, start):
    run, results = run_of(recipe, start), results_of(run_of(recipe, start))
    for split, file in (("eval", "dev"), *([("test", "test")] if start == "scratch" else [])):
        written = run / f"{'validation' if split == 'eval' else split}_predictions"
        if recipe == "classifier":
            rows, gold = read_texts(written.with_suffix(".tsv")), read_texts(home / f"{file}.tsv")
            assert [{"text": row["text"], "label": row["label"]} for row in rows] == gold
            assert any(row["text"] == "" for row in rows)
            assert [row["prediction"] for row in rows] == predict_texts(run, [row["text"] for row in gold])
            right = [row["prediction"] == row["label"] for row in rows]
            assert results[f"{split}_accuracy"] == pytest.approx(np.mean(right))
            continue
        found, gold = read_trees(written.with_suffix(".conllu")), read_trees(home / f"{file}.conllu")
        own, figure = (slice(3, 4), "accuracy") if recipe == "tagger" else (slice(6, 8), "las_full")
        predict = predict_tags if recipe == "tagger" else predict_links
        predicted = predict(run, [[word[1] for word in sentence] for sentence in gold[:8]])
        assert [[word[own] for word in sentence] for sentence in found[:8]] == predicted
        words = [pair for pairs in zip(found, gold, strict=True) for pair in zip(*pairs, strict=True)]
        assert all(one[:3] + one[8:] == other[:3] + other[8:] for one, other in words)  # all else as it was
        assert results[f"{split}_{figure}"] == pytest.approx(np.mean([one[own] == other[own] for one, other in words]))


def test_each_recipe_learns(run_of):
    assert results_of(run_of("classifier", "scratch"))["eval_accuracy"] > 0.95
    assert results_of(run_of("tagger", "scratch"))["eval_accuracy"] > 0.95
    assert results_of(run_of("parser", "scratch"))["eval_las"] > 0.95
    for recipe in RECIPES:
        lines = [line["loss"] for line in tiny_run.metrics(run_of(recipe, "scratch")) if "loss" in line]
        assert lines[-1] < 0.5 * lines[0]


def test_the_recipe_of_a_run_gives_the_same_run(home, run_of, tmp_path):
    run = run_of("parser", "native")
    arguments = [str(run / "recipe.yaml"), "--output_dir", str(tmp_path / "again")]
    ended = tiny_run.start(tmp_path, tiny_run.run_plain, "finetune_parser", *arguments).wait()
    assert ended.code == 0, ended.err
    assert tiny_run.largest_difference(run, tmp_path / "again") == 0


# Other tasks and data


def test_regression_of_pairs(home, tmp_path):
    """An English word and a Korean one: what the second one says is the score."""

    def write(name: str, count: int) -> Path:
        numbers, rows = random.Random(count), []
        for _ in range(count):
            mood = numbers.randrange(3)
            second = list(MOODS.values())[mood][1]
            rows.append({"a": numbers.choice(["the ship", "a moon", ""]), "b": second, "score": f"{1.3 * mood:.3f}"})
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    data = {"train_file": write("train.jsonl", 40), "validation_file": write("dev.jsonl", 11)}
    columns = {"text_column": "a", "text_pair_column": "b", "label_column": "score"}
    settings = {"learning_rate": 1e-3, "max_steps": 25}
    ended = tune("classifier", tmp_path / "run", **given(home, "classifier", **settings, **data, **columns))
    assert ended.code == 0, ended.err
    results = results_of(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "validation_predictions.jsonl").open()]
    gold, found = (np.array([float(row[name]) for row in rows]) for name in ("score", "prediction"))
    assert results["eval_mse"] == pytest.approx(np.mean((gold - found) ** 2), abs=1e-3)
    assert results["eval_pearson"] == pytest.approx(np.corrcoef(gold, found)[0, 1], abs=1e-3)
    assert results["eval_pearson"] > 0.8
    assert results["eval_spearmanr"] > 0.8
    model, tokenizer = (
        auto.from_pretrained(tmp_path / "run") for auto in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    assert model.config.problem_type == "regression"
    pairs = tokenizer([row["a"] for row in rows], [row["b"] for row in rows], padding=True, return_tensors="pt")
    assert tokenizer.unk_token_id not in pairs["input_ids"]  # the vocabulary is of both texts
    assert model.eval()(**pairs).logits[:, 0].tolist() == pytest.approx(found.tolist(), abs=1e-4)


def test_several_seeds_share_the_data_and_give_mean_and_deviation(home, tmp_path):
    run = tmp_path / "run"
    settings = {"seeds": 2, "max_train_samples": 20, "max_eval_samples": 9, "model_name_or_path": home / "native"}
    ended = tune("classifier", run, **given(home, "classifier", **settings))
    assert ended.code == 0, ended.err
    assert ended.err.count("train: 20 examples, validation: 9 examples") == 2
    parts = [results_of(run / name) for name in ("seed-42", "seed-43")]
    summary = results_of(run)
    assert summary.pop("seeds") == 2
    assert summary.keys() == {f"{name}{end}" for name in parts[0] for end in ("", "_std")}
    for name in ("eval_loss", "eval_accuracy", "train_steps", "train_tokens"):
        one, other = (part[name] for part in parts)
        assert summary[name] == pytest.approx((one + other) / 2)
        assert summary[f"{name}_std"] == pytest.approx(statistics.stdev([one, other]))
    assert parts[0]["eval_loss"] != parts[1]["eval_loss"]
    assert tiny_run.largest_difference(run / "seed-42", run / "seed-43") > 0
    assert f"± {summary['eval_loss_std']:.4f}" in ended.out
    single = {**settings, "seeds": 1, "seed": 43}
    assert tune("classifier", tmp_path / "single", **given(home, "classifier", **single)).code == 0
    assert tiny_run.largest_difference(run / "seed-43", tmp_path / "single") == 0
    data = [
        json.loads((run / name / "checkpoint-3" / "trainer_state.json").read_text())["identity"]["data"]
        for name in ("seed-42", "seed-43")
    ]
    assert data[0] == data[1]  # the same samples
    assert data[0].startswith("20 samples")
    chosen = [(run / name / "validation_predictions.tsv").read_text() for name in ("seed-42", "seed-43")]
    assert [line.rpartition("\t")[0] for line in chosen[0].splitlines()] == [
        line.rpartition("\t")[0] for line in chosen[1].splitlines()
    ]


def test_several_seeds_of_a_figure_that_is_not_a_number(home, tmp_path):
    """No predicate of the validation data has a subject: how many are found is unknown."""
    dev = write_trees(tmp_path / "dev.conllu", 5, seed=1, patterns=(NO_SUBJECT,))
    settings = {"seeds": 2, "task": "subject", "validation_file": dev, "model_name_or_path": home / "native"}
    ended = tune("parser", tmp_path / "run", **given(home, "parser", **settings))
    assert np.isnan(results_of(tmp_path / "run" / "seed-43")["eval_overt_accuracy"])
    assert ended.code == 0, ended.err
    assert np.isnan(results_of(tmp_path / "run")["eval_overt_accuracy_std"])


@pytest.mark.parametrize(
    ("recipe", "task"), [("classifier", None), ("tagger", None), ("parser", None), ("parser", "subject")]
)
def test_what_is_longer_than_a_window(home, tmp_path, recipe, task):
    """Everything is scored and written once, however many windows it is in."""
    windows = {"max_seq_length": 16, "doc_stride": 4, "model_name_or_path": home / "native"}
    if recipe == "classifier":
        dev = write_texts(tmp_path / "dev.tsv", text_rows(12, 5, words=60))
    else:
        dev = write_trees(tmp_path / "dev.conllu", 12, seed=5, copies=6)
        if task == "subject":  # the last windows have no predicate
            dev.write_text(re.sub(r"^(\d\d\t.*)(VERB|ADJ)", r"\1X", dev.read_text(), flags=re.MULTILINE))
    settings = {**windows, "validation_file": dev, **({"task": task} if task else {})}
    ended = tune(recipe, tmp_path / "run", **given(home, recipe, **settings))
    assert ended.code == 0, ended.err
    results = results_of(tmp_path / "run")
    if recipe == "classifier":
        rows = read_texts(tmp_path / "run" / "validation_predictions.tsv")
        assert [row["text"] for row in rows] == [row["text"] for row in read_texts(dev)]
        assert results["eval_accuracy"] == pytest.approx(np.mean([row["prediction"] == row["label"] for row in rows]))
    else:
        found, gold = read_trees(tmp_path / "run" / "validation_predictions.conllu"), read_trees(dev)
        assert [[word[:3] for word in one] for one in found] == [[word[:3] for word in one] for one in gold]
        assert min(len(sentence) for sentence in gold) > 14
        if task == "subject":
            asked = [word[9].startswith("Subject=") for sentence in found for word in sentence]
            assert asked == [word[3] in ("VERB", "ADJ") for sentence in gold for word in sentence]
            assert 0 < sum(asked) < 0.3 * len(asked)
        else:
            own, figure = (slice(3, 4), "accuracy") if recipe == "tagger" else (slice(6, 8), "las_full")
            words = [pair for pairs in zip(found, gold, strict=True) for pair in zip(*pairs, strict=True)]
            assert results[f"eval_{figure}"] == pytest.approx(np.mean([one[own] == two[own] for one, two in words]))


def test_words_without_a_tag_are_not_scored(home, tmp_path):
    """Not even a whole window of them, in the middle of a sentence."""

    def write(name: str, untagged: range) -> Path:
        tags = [None if place in untagged else str(place % 2) for place in range(60)]
        words = ["the" if place % 2 else "moon" for place in range(60)]
        (tmp_path / name).write_text(json.dumps({"tokens": words, "tags": tags}) + "\n")
        return tmp_path / name

    data = {"train_file": write("train.jsonl", range(0)), "validation_file": write("dev.jsonl", range(3, 57))}
    windows = {"max_seq_length": 16, "doc_stride": 4, "model_name_or_path": home / "native"}
    ended = tune("tagger", tmp_path / "run", **given(home, "tagger", **data, **windows))
    assert ended.code == 0, ended.err
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "validation_predictions.jsonl").open()]
    assert len(row["prediction"]) == 60
    assert row["prediction"].count("_") > 12  # of windows in which nothing is asked
    ends = [place for place, tag in enumerate(row["tags"]) if tag is not None]
    right = [row["prediction"][place] == row["tags"][place] for place in ends]
    assert results_of(tmp_path / "run")["eval_accuracy"] == pytest.approx(np.mean(right))


def test_morphemes(home, tmp_path):
    for split, count in (("train", 80), ("dev", 9)):
        write_trees(tmp_path / f"{split}.conllu", count, seed=count, patterns=(KOREAN, NO_SUBJECT))
    data = {"train_file": tmp_path / "train.conllu", "validation_file": tmp_path / "dev.conllu"}
    learns = {"learning_rate": 2e-3, "max_steps": 40, "tag_field": "morphemes"}
    ended = tune("tagger", tmp_path / "run", **given(home, "tagger", **data, **learns))
    assert ended.code == 0, ended.err
    assert "the morphemes of 100.00% of" in ended.err
    assert results_of(tmp_path / "run")["eval_f1"] > 0.95
    tags = {word[1]: word[9] for one in read_trees(tmp_path / "run" / "validation_predictions.conllu") for word in one}
    assert tags["책을"] == "Tags=B-NNG,B-JKO"
    assert tags["했다"] == "Tags=B-VV+EP,B-EF"


def test_subjects(home, tmp_path):
    settings = {"task": "subject", "learning_rate": 2e-3, "max_steps": 40}
    ended = tune("parser", tmp_path / "run", **given(home, "parser", **settings))
    assert ended.code == 0, ended.err
    results = results_of(tmp_path / "run")
    assert results["eval_subject_accuracy"] > 0.95
    assert results["eval_overt_accuracy"] > 0.9
    assert 0 < results["eval_majority"] < 0.9
    found, right = read_trees(tmp_path / "run" / "validation_predictions.conllu"), []
    for sentence in found:
        for word in sentence:
            subjects = [other[0] for other in sentence if other[6:8] == [word[0], "nsubj"]]
            answer = dict(part.split("=") for part in word[9].split("|") if "=" in part).get("Subject")
            assert (answer is not None) == (word[3] in ("VERB", "ADJ"))
            right += [] if answer is None else [answer == (subjects or ["0"])[0]]
    assert np.mean(right) == pytest.approx(results["eval_subject_accuracy"])


# Bad input


def unknown_label(home, folder):
    dev = write_texts(folder / "dev.tsv", [("one", "good"), ("two", "ugly")])
    return "classifier", {"validation_file": dev}, [f"{dev}:3", "'ugly'", "bad, good, plain"]


def unknown_tag(home, folder):
    (folder / "dev.conll").write_text("the DET\nship SHIP\n")
    (folder / "train.conll").write_text("the DET\nship NOUN\n")
    data = {"train_file": folder / "train.conll", "validation_file": folder / "dev.conll"}
    return "tagger", data, [f"{folder / 'dev.conll'}:1", "'SHIP'", "DET, NOUN"]


def no_column(home, folder):
    return "classifier", {"text_column": "review"}, [f"{home / 'train.tsv'}:2", "'review'", "'text'", "--text_column"]


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


def one_class(home, folder):
    train = write_texts(folder / "train.tsv", [("one", "good"), ("two", "good")])
    return "classifier", {"train_file": train}, ["1 kind of label", "'good'", "fewer than 2", "--label_column"]


def decoder(home, folder):
    GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=50).save_pretrained(folder / "gpt2")
    return "tagger", {"model_name_or_path": folder / "gpt2"}, [folder / "gpt2", "gpt2 is a decoder", "Give an encoder"]


def no_predicate(home, folder):
    (folder / "a.conllu").write_text("1\ta\t_\tX\t_\t_\t0\troot\t_\t_\n")
    return "parser", {"validation_file": folder / "a.conllu", "task": "subject"}, ["validation", "nothing", "--task"]


def no_file(home, folder):
    path = folder / "nothing.conllu"
    return "parser", {"test_file": path}, [path, "no such file", "--test_file"]


def no_model(home, folder):
    path = folder / "nowhere"
    return "parser", {"model_name_or_path": path}, [f"--model_name_or_path {path}", "no model could be found"]


def too_long_windows(home, folder):
    train = write_texts(folder / "train.tsv", text_rows(12, 5, words=200))
    settings = {"train_file": train, "model_name_or_path": home / "native", "max_seq_length": 100}
    return "classifier", settings, ["at most 64 tokens", "100", "--max_seq_length"]


def windows_that_roberta_cannot_read(home, folder):
    """It has 66 places, but the first one is after the one of the padding."""
    tokenizer = AutoTokenizer.from_pretrained(home / "native", model_max_length=1 << 40, pad_token="[UNK]")
    assert tokenizer.pad_token_id == 1
    tokenizer.save_pretrained(folder / "roberta")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=66, type_vocab_size=2, **sizes)
    RobertaForMaskedLM(config).save_pretrained(folder / "roberta")
    recipe, settings, _ = too_long_windows(home, folder)
    settings = {**settings, "model_name_or_path": folder / "roberta", "max_seq_length": 65}
    return recipe, settings, ["at most 64 tokens", "65", "--max_seq_length"]


def misspelt_flag(home, folder):
    return "classifier", {"validaton_file": "x"}, ["Unknown flag --validaton_file", "Did you mean --validation_file?"]


MISTAKES = [
    unknown_label,
    unknown_tag,
    no_column,
    other_number_of_tags,
    word_without_tag,
    cycle,
    head_out_of_range,
    one_class,
    no_predicate,
    decoder,
    no_file,
    no_model,
    too_long_windows,
    windows_that_roberta_cannot_read,
    misspelt_flag,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_message(home, tmp_path, mistake):
    recipe, settings, words = mistake(home, tmp_path)
    assert_refused(tune(recipe, tmp_path / "run", **given(home, recipe, **settings)), *words)
    assert not list(tmp_path.glob("run/*"))


# Stopped and resumed


def test_a_killed_run_resumes_bit_for_bit_and_only_as_what_it_was(home, tmp_path):
    settings = {"model_name_or_path": home / "native", "max_steps": 8, "save_steps": 4, "layer_decay": 0.9}
    settings = given(home, "classifier", **settings)  # with dropout
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert tune("classifier", whole, **settings).code == 0
    # The third call saves the optimiser of the second checkpoint.
    killed = tune("classifier", run, partial(tiny_run.run_killed, "torch.save:3"), **settings)
    assert killed.code == -signal.SIGKILL
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]

    again = {**settings, "resume_from_checkpoint": "latest"}
    words = ["checkpoint-4 was made with parameters, rate factors and starts", "Resume with the same settings"]
    assert_refused(tune("classifier", run, **{**again, "layer_decay": 0.8}), *words)
    assert_refused(
        tune("classifier", run, **{**again, "max_tokens": 64}), "checkpoint-4 was made with data", "64 tokens"
    )

    ended = tune("classifier", run, **again)
    assert ended.code == 0, ended.err
    assert "at step 4." in ended.err
    tiny_run.assert_same_training(run / "checkpoint-8", whole / "checkpoint-8")
    assert tiny_run.largest_difference(run, whole) == 0
    assert results_of(run)["eval_loss"] == results_of(whole)["eval_loss"]
    name = "validation_predictions.tsv"
    assert (run / name).read_text() == (whole / name).read_text()


# Accumulation


@dataclass
class Given(Source):
    """Micro-batches that were made by hand."""

    micro_batches: list[dict]
    batch_size: int
    fingerprint: str = "by hand"

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int) -> dict:
        return self.micro_batches[index % len(self)]


def labelled(rows: slice, seed: int, count: int | None = None) -> dict[str, torch.Tensor]:
    """Some of eight rows of twelve tokens: of the first four nearly all are labelled, of the others two or three."""
    numbers = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(low, high, (8, 12), generator=numbers) for low, high in ((5, 60), (0, 3)))
    sizes = torch.tensor([12, 11, 9, 12, 4, 5, 12, 3])
    mask = (torch.arange(12) < sizes[:, None]).long()
    labels[mask == 0] = -100
    labels[4:, 1:] = -100
    labels[5, :] = -100
    labels = labels[rows]
    counts = torch.tensor([int((labels != -100).sum()) if count is None else count, int(mask[rows].sum())])
    batch = {"input_ids": ids[rows], "attention_mask": mask[rows], "labels": labels, "num_items_in_batch": counts}
    return batch


def native_tagger() -> BertForTokenClassification:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForTokenClassification(BertConfig(vocab_size=60, num_labels=3, **sizes, **dropout))


def own_tagger() -> HfTinyElectraForTokenClassification:
    sizes = {"embedding_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = HfTinyElectraConfig(vocab_size=60, intermediate_size=64, num_labels=3, **sizes, **dropout)
    return HfTinyElectraForTokenClassification(config)


def train_on(output_dir: Path, make, micro_batches: list[dict], accumulation: int) -> Path:
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    settings = {"max_steps": 3, "gradient_accumulation_steps": accumulation, "save_steps": 0, "learning_rate": 1e-3}
    config = TrainConfig(output_dir=str(output_dir), **settings)
    with mock.patch.multiple(hub, draw_curves=tiny_run.without_curves, write_card=tiny_run.without_curves):
        train(make(), Given(micro_batches, len(micro_batches[0]["labels"])), config)
    return output_dir


@pytest.mark.parametrize("make", [native_tagger, own_tagger])
def test_two_uneven_micro_batches_are_one_batch(tmp_path, make):
    """Also for transformers' own models, which know nothing of the other half."""
    large = [labelled(slice(0, 8), step) for step in range(3)]
    halves = [labelled(rows, step) for step in range(3) for rows in (slice(0, 4), slice(4, 8))]
    counts = [int(half["num_items_in_batch"][0]) for half in halves[:2]]
    assert counts[0] > 10 * counts[1] > 0
    one = train_on(tmp_path / "one", make, large, 1)
    two = train_on(tmp_path / "two", make, halves, 2)
    assert tiny_run.largest_difference(one, two) < 1e-5
    if make is native_tagger:  # what the mean of the two means would give
        even = [labelled(rows, step, 8) for step in range(3) for rows in (slice(0, 4), slice(4, 8))]
        assert tiny_run.largest_difference(one, train_on(tmp_path / "even", make, even, 2)) > 1e-4


# Several processes


def together(recipe: str, output_dir: Path, **settings) -> None:
    function = partial(tiny_run.run_plain, f"finetune_{recipe}")
    ended = tiny_run.group(output_dir, 2, function=function, **settings)
    assert [process.code for process in ended] == [0, 0], ended[0].err + ended[1].err


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_evaluate_to_the_last_digit_like_one(home, run_of, tmp_path, recipe):
    """Five batches or more for two processes, the last one short."""
    one, two = run_of(recipe, "scratch"), tmp_path / "two"
    shutil.copytree(one, two)
    suffix = "tsv" if recipe == "classifier" else "conllu"
    settings = given(home, recipe, test_file=home / f"test.{suffix}", learning_rate=2e-3, max_steps=60)
    together(recipe, two, resume_from_checkpoint="latest", **settings)
    single, double = results_of(one), results_of(two)
    assert (single["num_processes"], double["num_processes"]) == (1, 2)
    figures = [name for name in single if name.startswith(("eval_", "test_"))]
    assert len(figures) >= 8
    assert {name: double[name] for name in figures} == {name: single[name] for name in figures}
    for split in ("validation", "test"):
        name = f"{split}_predictions.{suffix}"
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_two_processes_train_like_one_that_accumulates(home, tmp_path):
    settings = given(home, "classifier", max_steps=6)
    one, two = tmp_path / "one", tmp_path / "two"
    together("classifier", two, **settings)
    ended = tune("classifier", one, gradient_accumulation_steps=2, **settings)
    assert ended.code == 0, ended.err
    assert tiny_run.largest_difference(one, two) < 1e-5
    assert results_of(two)["eval_loss"] == pytest.approx(results_of(one)["eval_loss"], rel=1e-4)
    assert results_of(two)["train_tokens"] == results_of(one)["train_tokens"]


def test_two_processes_run_several_seeds(home, tmp_path):
    settings = given(home, "classifier", max_steps=1, seeds=2, model_name_or_path=home / "native")
    together("classifier", tmp_path / "run", **settings)
    assert results_of(tmp_path / "run")["num_processes"] == 2
