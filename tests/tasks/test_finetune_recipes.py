"""The fine-tuning recipes from end to end, on tasks that a tiny model learns in seconds."""

import ast
import json
import re
import shutil
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from fixtures import tiny_run
from fixtures.finetuning import RECIPES, SMALL, finish, given, make_home, run, suffix
from fixtures.labelled import QUOTED, read_table, read_trees, text_rows, write_table
from fixtures.tiny_run import assert_refused, finish_together, results_of
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForTokenClassification,
    GPT2Config,
    RobertaConfig,
    RobertaForMaskedLM,
)

from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyElectraForTokenClassification,
    hub,
    report,
)
from hf_tiny.data.batches import Source
from hf_tiny.models.trees import maximum_spanning_tree
from hf_tiny.models.words import affixes
from hf_tiny.train import TrainConfig, train

STARTS = ("scratch", "hf_tiny", "native")
LEARNS = {"learning_rate": 2e-3, "max_steps": 60}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """With an encoder of hf_tiny's, too."""
    home = make_home(tmp_path_factory.mktemp("finetune"))
    sizes = {"max_steps": 2, "max_seq_length": 32, "per_device_train_batch_size": 4, "generator_size": 0.5, **SMALL}
    tiny_run.finish(home / "hf_tiny", "pretrain_electra", train_file=home / "text.txt", vocab_size=300, **sizes)
    return home


@pytest.fixture(scope="module")
def run_of(home):
    """run_of(recipe, start): the folder of that run, which is made once. From scratch it goes on until it has learned,
    and leaves images."""
    made = {}

    def run_of(recipe: str, start: str) -> Path:
        if (recipe, start) not in made:
            folder = home / f"{recipe}-{start}"
            if start == "scratch":
                settings = {**LEARNS, "gradient_accumulation_steps": 2, "test_file": home / f"test.{suffix(recipe)}"}
                made[recipe, start] = finish(home, recipe, folder, tiny_run.run_named, **settings)
            else:
                made[recipe, start] = finish(home, recipe, folder, model_name_or_path=home / start)
        return made[recipe, start]

    return run_of


# What a run leaves


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("start", STARTS)
def test_a_run_leaves_everything(run_of, recipe, start):
    run = run_of(recipe, start)
    names = ["config.json", "model.safetensors", "tokenizer.json", "README.md", "metrics.jsonl", "all_results.json"]
    names += ["recipe.yaml", f"validation_predictions.{suffix(recipe)}"]
    if start == "scratch":  # which is drawn
        names += ["curves.png", f"test_predictions.{suffix(recipe)}"]
        names += [] if recipe == "parser" else ["validation_confusion.png", "test_confusion.png"]
    for name in names:
        assert (run / name).stat().st_size > 0, name
    card = (run / "README.md").read_text(encoding="utf-8")
    assert ("scratch" if start == "scratch" else f"/{start}`") in card
    (example,) = re.findall(r'^print\(solve\((".*")\)\)$', card, re.MULTILINE)
    if recipe == "classifier":
        assert ast.literal_eval(example) == QUOTED
    results = results_of(run)
    assert f"| eval_loss | {report.number(results['eval_loss'])} |" in card
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
        own = torch.from_numpy(affixes(words, model.config.affix_buckets))[None]
        outputs = model.eval()(**encoding, word_spans=spans, affixes=own)
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
            rows, gold = read_table(written.with_suffix(".tsv")), read_table(home / f"{file}.tsv")
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
    first, again = run_of("parser", "native"), tmp_path / "again"
    arguments = [str(first / "recipe.yaml"), "--output_dir", str(again)]
    ended = tiny_run.start(tmp_path, tiny_run.run_plain, "finetune_parser", *arguments).wait()
    assert ended.code == 0, ended.err
    assert tiny_run.largest_difference(first, again) == 0


# Bad input


def decoder(home, folder):
    GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=50).save_pretrained(folder / "gpt2")
    return {"model_name_or_path": folder / "gpt2"}, [folder / "gpt2", "gpt2 is a decoder", "this needs an encoder"]


def no_file(home, folder):
    return {"test_file": folder / "nothing.tsv"}, [folder / "nothing.tsv", "no such file", "--test_file"]


def too_long_windows(home, folder):
    train = write_table(folder / "train.tsv", text_rows(12, 5, words=200))
    settings = {"train_file": train, "model_name_or_path": home / "native", "max_seq_length": 100}
    return settings, ["at most 64 tokens", "100", "--max_seq_length"]


def windows_that_roberta_cannot_read(home, folder):
    """It has 66 places, but the first one is after the one of the padding."""
    tokenizer = AutoTokenizer.from_pretrained(home / "native", model_max_length=1 << 40, pad_token="[UNK]")
    assert tokenizer.pad_token_id == 1
    tokenizer.save_pretrained(folder / "roberta")
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=66, type_vocab_size=2, **SMALL)
    RobertaForMaskedLM(config).save_pretrained(folder / "roberta")
    settings, _ = too_long_windows(home, folder)
    settings = {**settings, "model_name_or_path": folder / "roberta", "max_seq_length": 65}
    return settings, ["at most 64 tokens", "65", "--max_seq_length"]


@pytest.mark.parametrize("mistake", [decoder, no_file, too_long_windows, windows_that_roberta_cannot_read])
def test_a_mistake_gets_a_message(home, tmp_path, mistake):
    settings, words = mistake(home, tmp_path)
    assert_refused(run(home, "classifier", tmp_path / "run", **settings), *words)
    assert not list(tmp_path.glob("run/*"))


# Stopped and resumed


def test_a_killed_run_resumes_bit_for_bit_and_only_as_what_it_was(home, tmp_path):
    settings = {"model_name_or_path": home / "native", "max_steps": 8, "save_steps": 4, "layer_decay": 0.9}
    whole, folder = finish(home, "classifier", tmp_path / "whole", **settings), tmp_path / "run"  # with dropout
    # The third call saves the optimiser of the second checkpoint.
    killed = run(home, "classifier", folder, partial(tiny_run.run_killed, "torch.save:3"), **settings)
    assert killed.code == -signal.SIGKILL
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]

    settings["resume_from_checkpoint"] = "latest"
    words = ["checkpoint-4 was made with parameters, rate factors and starts", "Resume with the same settings"]
    assert_refused(run(home, "classifier", folder, **{**settings, "layer_decay": 0.8}), *words)
    words = ["checkpoint-4 was made with data", "64 tokens"]
    assert_refused(run(home, "classifier", folder, **settings, max_tokens=64), *words)

    ended = run(home, "classifier", folder, **settings)
    assert ended.code == 0, ended.err
    assert "at step 4." in ended.err
    tiny_run.assert_same_training(folder / "checkpoint-8", whole / "checkpoint-8")
    assert tiny_run.largest_difference(folder, whole) == 0
    assert results_of(folder)["eval_loss"] == results_of(whole)["eval_loss"]
    name = "validation_predictions.tsv"
    assert (folder / name).read_text() == (whole / name).read_text()


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
    return BertForTokenClassification(BertConfig(vocab_size=60, num_labels=3, **SMALL, **NO_DROPOUT))


def own_tagger() -> HfTinyElectraForTokenClassification:
    config = HfTinyElectraConfig(vocab_size=60, embedding_size=32, num_labels=3, **SMALL, **NO_DROPOUT)
    return HfTinyElectraForTokenClassification(config)


def train_on(output_dir: Path, make, micro_batches: list[dict], accumulation: int) -> Path:
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    settings = {"max_steps": 3, "gradient_accumulation_steps": accumulation, "save_steps": 0, "learning_rate": 1e-3}
    config = TrainConfig(output_dir=str(output_dir), **settings)
    nothing = tiny_run.without_curves
    summary, card = mock.patch.object(report, "print_summary", nothing), mock.patch.object(hub, "write_card", nothing)
    with mock.patch.object(report, "draw_curves", nothing), card, summary:
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_evaluate_to_the_last_digit_like_one(home, run_of, tmp_path, recipe):
    """Five batches or more for two processes, the last one short."""
    one, two = run_of(recipe, "scratch"), tmp_path / "two"
    shutil.copytree(one, two)
    (two / "README.md").unlink()  # or the run would be finished
    settings = given(home, recipe, test_file=home / f"test.{suffix(recipe)}", **LEARNS)
    settings |= {"resume_from_checkpoint": "latest", "gradient_accumulation_steps": 1}
    finish_together(two, f"finetune_{recipe}", **settings)
    single, double = results_of(one), results_of(two)
    assert (single["num_processes"], double["num_processes"]) == (1, 2)
    figures = [name for name in single if name.startswith(("eval_", "test_"))]
    assert len(figures) >= 8
    assert {name: double[name] for name in figures} == {name: single[name] for name in figures}
    for split in ("validation", "test"):
        name = f"{split}_predictions.{suffix(recipe)}"
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_two_processes_train_like_one_that_accumulates(home, tmp_path):
    two = finish_together(tmp_path / "two", "finetune_classifier", **given(home, "classifier", max_steps=6))
    one = finish(home, "classifier", tmp_path / "one", max_steps=6, gradient_accumulation_steps=2)
    assert tiny_run.largest_difference(one, two) < 1e-5
    assert results_of(two)["eval_loss"] == pytest.approx(results_of(one)["eval_loss"], rel=1e-4)
    assert results_of(two)["train_tokens"] == results_of(one)["train_tokens"]


def test_two_processes_run_several_seeds(home, tmp_path):
    settings = given(home, "classifier", max_steps=1, seeds=2, model_name_or_path=home / "native")
    finish_together(tmp_path / "run", "finetune_classifier", **settings)
    assert results_of(tmp_path / "run")["num_processes"] == 2


# What a small encoder of hf_tiny gets


def pretrained_here(home: Path, folder: Path, dropout: float, **sizes) -> Path:
    """An encoder as `pretrain-electra` leaves one, with the tokenizer of `native`."""
    tokenizer = AutoTokenizer.from_pretrained(home / "native")
    sizes = {**SMALL, "generator_size": 0.5, **sizes}
    config = HfTinyElectraConfig(vocab_size=len(tokenizer), hidden_dropout_prob=dropout, **sizes)
    HfTinyElectraForPreTraining(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_small_pretrained_encoder_gets_the_head_of_a_new_one(home, tmp_path, recipe, dropout):
    """One that was pretrained with dropout, as large ones are, stays as it is; flags win."""
    place, flags = pretrained_here(home, tmp_path / "encoder", dropout), {"max_steps": 1, "max_seq_length": 64}
    folder = finish(home, recipe, tmp_path / "run", model_name_or_path=place, **flags)
    settings = AutoConfig.from_pretrained(folder).to_dict()
    encoder = settings.get("encoder", settings)
    assert encoder["hidden_dropout_prob"] == (dropout or 0.3)
    heads = {
        "classifier": ("classifier_buckets", 32_768),
        "tagger": ("tagger_lstm_size", 128),
        "parser": ("lstm_size", 256),
    }
    name, size = heads[recipe]
    assert settings[name] == (size if recipe == "parser" or not dropout else 0)
    folder = finish(home, recipe, tmp_path / "given", model_name_or_path=place, hidden_dropout_prob=0.1, **flags)
    settings = AutoConfig.from_pretrained(folder).to_dict()
    assert settings.get("encoder", settings)["hidden_dropout_prob"] == 0.1


@pytest.mark.parametrize(("dropout", "rate"), [(0.0, 1e-3), (0.2, 3.5e-4)])
def test_a_small_pretrained_encoder_learns_as_fast_as_a_new_one(home, tmp_path, dropout, rate):
    place = pretrained_here(home, tmp_path / "encoder", dropout, hidden_size=256, num_hidden_layers=1)
    flags = {
        "max_steps": 1,
        "max_seq_length": 64,
        "logging_steps": 1,
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
    }
    folder = finish(home, "classifier", tmp_path / "run", model_name_or_path=place, **flags)
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert next(step["learning_rate"] for step in steps if "learning_rate" in step) == pytest.approx(rate)
