"""The recipes for pairs of texts from end to end: learning, averaging, resuming, several processes, mistakes."""

import json
import random
import shutil
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from fixtures import tiny_run
from fixtures.labelled import read_table, write_table
from fixtures.tiny_run import assert_refused, results_of
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_tiny import InputError, arguments
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

RECIPE = "finetune_seq2seq"
WORDS = {
    "배": "ship",
    "달": "moon",
    "새": "bird",
    "책": "book",
    "산": "hill",
    "물": "water",
    "길": "road",
    "집": "house",
}
COLUMNS = ("source", "target")
SPLITS = {"train": "train", "validation": "dev", "test": "test"}
SMALL = {"hidden_size": 64, "encoder_layers": 2, "intermediate_size": 128}
LONGER = {"max_source_length": 32, "max_target_length": 32}
FIGURES = [f"{split}_{name}" for split in ("eval", "test") for name in ("bleu", "chrf", "exact_match", "nll", "ppl")]


def pair_rows(count: int, seed: int) -> list[tuple[str, str]]:
    """One to four Korean words, and the same in English."""
    numbers = random.Random(seed)
    texts = [numbers.choices(list(WORDS), k=numbers.randrange(1, 5)) for _ in range(count)]
    return [(" ".join(text), " ".join(WORDS[word] for word in text)) for text in texts]


def write_aligned(stem: Path, rows: list[tuple[str, str]]) -> Path:
    for side, language in enumerate(("ko", "en")):
        stem.with_suffix(f".{language}").write_text("".join(f"{row[side]}\n" for row in rows), encoding="utf-8")
    return stem


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("pairs")
    for split, count in (("train", 400), ("dev", 50), ("test", 21)):
        rows = pair_rows(count, seed=count)
        write_table(home / f"{split}.tsv", rows, COLUMNS)
        write_aligned(home / split, rows)
    return home


def given(home: Path, **settings) -> dict:
    """The flags of a short run, but for --output_dir."""
    data = {"train_file": home / "train.tsv", "validation_file": home / "dev.tsv", "vocab_size": 400}
    lengths = {"max_source_length": 16, "max_target_length": 16, "max_tokens": 128, "num_beams": 1}
    small = {} if "model_name_or_path" in settings else SMALL
    return {
        **data,
        **lengths,
        **small,
        "per_device_eval_batch_size": 8,
        "max_eval_samples": 21,
        "max_steps": 3,
        **settings,
    }


def test_korean_needs_no_flag_for_its_vocabulary(tmp_path):
    """It was refused: the 512 tokens of the tiny size are fewer than its syllables."""
    text = "".join(chr(0xAC00 + 7 * number) for number in range(600))
    rows = [(text[start : start + 9], text[start + 1 : start + 9]) for start in range(0, 591)]
    write_table(tmp_path / "train.tsv", rows, COLUMNS)
    settings = {
        **given(tmp_path, train_file=tmp_path / "train.tsv", max_steps=1),
        "vocab_size": None,
        "validation_file": None,
    }
    ended = run(tmp_path / "run", **{name: value for name, value in settings.items() if value is not None})
    assert ended.code == 0, ended.err
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["vocab_size"] == 4096


def run(output_dir: Path, recipe: str = RECIPE, function=tiny_run.run_plain, **settings) -> tiny_run.Ended:
    return tiny_run.run_to(output_dir, recipe, function, **settings)


def done(output_dir: Path, recipe: str = RECIPE, function=tiny_run.run_plain, **settings) -> Path:
    return tiny_run.finish(output_dir, recipe, function, **settings)


def together(output_dir: Path, **settings) -> Path:
    return tiny_run.finish_together(output_dir, RECIPE, **settings)


# From scratch


def learning(home: Path) -> dict:
    sizes = {"max_steps": 120, "save_steps": 20, "average_checkpoints": 3, "max_tokens": 256, "max_eval_samples": 50}
    sizes |= {"hidden_size": 128, "intermediate_size": 256}
    rates = {"learning_rate": 2e-3, "lr_scheduler_type": "constant", "hidden_dropout_prob": 0.0}
    return given(home, test_file=home / "test.tsv", logging_steps=25, **sizes, **rates)


@pytest.fixture(scope="module")
def learned(home) -> Path:
    run = home / "learned"
    return done(run, function=tiny_run.run_named, gradient_accumulation_steps=2, **learning(home))


def test_it_learns_and_leaves_everything(learned):
    results = results_of(learned)
    assert results["eval_exact_match"] > 0.9 and results["test_exact_match"] > 0.9
    assert all(results[name] >= 0 for name in FIGURES)
    assert results["eval_bleu"] > 80 and results["eval_chrf"] > 80 and 1 < results["eval_ppl"] < 2
    assert results["eval_loss"] > results["eval_nll"]  # which is not smoothed
    assert results["baseline_name"] == "the most frequent target"  # a copy is Korean, for English
    most_frequent = Counter(target for _, target in pair_rows(400, seed=400)).most_common(1)[0][0]
    targets = [target for _, target in pair_rows(21, seed=21)]
    assert results["baseline_test_exact_match"] == pytest.approx(targets.count(most_frequent) / 21)
    names = ["config.json", "model.safetensors", "tokenizer.json", "README.md", "curves.png", "recipe.yaml"]
    names += [f"{split}_{name}" for split in ("validation", "test") for name in ("predictions.tsv", "attention.png")]
    assert [name for name in names if not (learned / name).stat().st_size] == []
    assert f"{results['train_tokens']:,} tokens of both sides in" in (learned / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_folder_writes_what_the_predictions_say(learned, home, split):
    rows = read_table(learned / f"{split}_predictions.tsv")
    given = read_table(home / f"{'dev' if split == 'validation' else split}.tsv")
    assert [{**row, "prediction": None} for row in rows] == [{**row, "prediction": None} for row in given]
    right = sum(row["prediction"] == row["target"] for row in rows) / len(rows)
    assert right == results_of(learned)[f"{'eval' if split == 'validation' else split}_exact_match"]
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(learned), AutoTokenizer.from_pretrained(learned)
    inputs = tokenizer([row["source"] for row in rows], padding=True, return_tensors="pt", return_token_type_ids=False)
    written = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=16), skip_special_tokens=True)
    assert written == [row["prediction"] for row in rows]


def test_the_finished_model_is_the_mean_of_the_last_checkpoints(learned):
    folders = [learned / f"checkpoint-{step}" for step in (80, 100, 120)]
    assert results_of(learned)["averaged_checkpoints"] == 3
    finished, parts = tiny_run.weights(learned), [tiny_run.weights(folder) for folder in folders]
    assert ("lm_head.weight" in finished) + ("model.encoder.word_embeddings.weight" in finished) == 1
    for name, weight in finished.items():
        mean = sum(part[name].double() for part in parts) / 3
        assert torch.equal(weight, mean.float()), name
    assert tiny_run.largest_difference(learned, folders[-1]) > 0
    model = AutoModelForSeq2SeqLM.from_pretrained(learned)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_the_best_model_at_the_end_is_not_averaged(home, tmp_path):
    """A rate that ruins the model: its first checkpoint is the best."""
    rates = {"learning_rate": 0.5, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_train_samples": 30}
    best = {"load_best_model_at_end": "true", "eval_steps": 1, "save_steps": 1, "average_checkpoints": 1}
    best |= {"metric_for_best_model": "ppl", "per_device_eval_batch_size": 2}  # known from the first batch alone
    ended = run(tmp_path / "run", **given(home, **rates, **best))
    assert ended.code == 0, ended.err
    found = {line["step"]: line["eval_ppl"] for line in tiny_run.metrics(tmp_path / "run") if "eval_ppl" in line}
    step = min(found, key=found.get)
    assert step < 3 and results_of(tmp_path / "run")["eval_ppl"] == found[step]
    assert tiny_run.largest_difference(tmp_path / "run", tmp_path / "run" / f"checkpoint-{step}") == 0


# Several processes


def test_two_processes_evaluate_to_the_last_digit_like_one(learned, home, tmp_path):
    two = tmp_path / "two"
    shutil.copytree(learned, two)
    (two / "README.md").unlink()  # or the run would be finished
    together(two, resume_from_checkpoint="latest", gradient_accumulation_steps=1, **learning(home))
    single, double = results_of(learned), results_of(two)
    assert (single["num_processes"], double["num_processes"]) == (1, 2)
    assert tiny_run.largest_difference(learned, two) == 0
    assert {name: double[name] for name in FIGURES} == {name: single[name] for name in FIGURES}
    for split in ("validation", "test"):
        name = f"{split}_predictions.tsv"
        assert (learned / name).read_bytes() == (two / name).read_bytes()


def test_two_processes_train_like_one_that_accumulates(home, tmp_path):
    """From aligned files; micro-batches are of different size."""
    files = {f"{name}_file": [home / f"{part}.ko", home / f"{part}.en"] for name, part in SPLITS.items()}
    settings = given(
        home, **files, source_lang="ko", target_lang="en", hidden_dropout_prob=0.0, max_steps=4, save_steps=2
    )
    settings["average_checkpoints"] = 1
    two = together(tmp_path / "two", **settings)
    one = done(tmp_path / "one", gradient_accumulation_steps=2, **settings)
    assert tiny_run.largest_difference(one, two) < 1e-5
    single, double = results_of(one), results_of(two)
    assert double["train_tokens"] == single["train_tokens"]
    assert double["eval_loss"] == pytest.approx(single["eval_loss"], rel=1e-4)
    assert tiny_run.largest_difference(one, one / "checkpoint-4") == 0  # the mean of one
    assert len((one / "validation_predictions.en").read_text(encoding="utf-8").splitlines()) == 21
    assert len((one / "test_predictions.en").read_text(encoding="utf-8").splitlines()) == 21
    assert "test_bleu" in single


# Stopped and resumed


def test_a_killed_run_resumes_bit_for_bit(home, tmp_path):
    """With dropout, also of merges, over several epochs; the checkpoints before and after the kill are averaged."""
    settings = given(home, bpe_dropout=0.1, max_train_samples=30, max_steps=9, save_steps=3, copy_attention="true")
    whole, run_dir = done(tmp_path / "whole", **settings), tmp_path / "run"
    # The fifth call saves the optimiser of the third checkpoint.
    killed = run(run_dir, function=partial(tiny_run.run_killed, "torch.save:5"), **settings)
    assert killed.code == -signal.SIGKILL
    assert sorted(path.name for path in run_dir.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    again = {**settings, "resume_from_checkpoint": "latest"}
    words = ["checkpoint-6 was made with data", "BPE dropout 0.1", "Resume with the same settings"]
    assert_refused(run(run_dir, **{**again, "bpe_dropout": 0.2}), *words)
    ended = run(run_dir, **again)
    assert ended.code == 0, ended.err
    assert "at step 6." in ended.err
    tiny_run.assert_same_training(run_dir / "checkpoint-9", whole / "checkpoint-9")
    assert tiny_run.largest_difference(run_dir, whole) == 0
    assert tiny_run.metrics(whole)[-1]["epoch"] > 1
    name = "validation_predictions.tsv"
    assert (run_dir / name).read_text() == (whole / name).read_text()
    assert results_of(run_dir)["averaged_checkpoints"] == results_of(whole)["averaged_checkpoints"] == 3


def test_two_processes_resume_bit_for_bit(home, tmp_path):
    settings = given(home, max_train_samples=60, save_steps=2, max_steps=6)
    whole = together(tmp_path / "whole", **settings)
    parts = shutil.copytree(whole, tmp_path / "parts")
    for step in (4, 6):
        shutil.rmtree(parts / f"checkpoint-{step}")
    together(parts, resume_from_checkpoint="latest", **settings)
    tiny_run.assert_same_training(parts / "checkpoint-6", whole / "checkpoint-6")
    assert [line["step"] for line in tiny_run.metrics(parts) if "eval_loss" in line] == [6]
    tokens = [results_of(run)["train_tokens"] for run in (parts, whole)]
    assert tokens[0] == tokens[1]


# From another model


@pytest.mark.parametrize("objective", ["infilling", "spans"])
def test_pretraining_and_then_pairs(home, tmp_path, objective):
    text = tiny_run.write_text(tmp_path / "text.txt", lines=100)
    sizes = {"max_seq_length": 32, "per_device_train_batch_size": 4, "max_eval_samples": 8, "vocab_size": 500, **SMALL}
    start = done(tmp_path / "start", "pretrain_seq2seq", train_file=text, objective=objective, max_steps=3, **sizes)
    results = results_of(start)
    assert results["eval_ppl"] > 1 and results["eval_nll"] == pytest.approx(results["eval_loss"])  # not smoothed
    tuned = done(
        tmp_path / "run", **given(home, model_name_or_path=start, max_steps=1, hidden_dropout_prob=0.2, **LONGER)
    )
    assert 0 < tiny_run.largest_difference(start, tuned) < 0.01  # one step
    config = json.loads((tuned / "config.json").read_text())
    assert (config["label_smoothing"], config["hidden_dropout_prob"]) == (
        0.1,
        0.2,
    )  # the flags', not those it came with
    assert (tuned / "tokenizer.json").read_text() == (start / "tokenizer.json").read_text()


def small_tokenizer():
    texts = [text for row in pair_rows(200, seed=0) for text in row]
    return train_tokenizer(texts, TokenizerArguments(vocab_size=400, tokenizer_model="bpe", extra_ids=8))


def native(kind: str, folder: Path) -> Path:
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(folder)
    known = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    known |= {"eos_token_id": tokenizer.eos_token_id, "decoder_start_token_id": tokenizer.bos_token_id}
    if kind == "t5":
        config = T5Config(**known, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
        T5ForConditionalGeneration(config).save_pretrained(folder)
        return folder
    sizes = {"d_model": 32, "max_position_embeddings": 64, "forced_eos_token_id": None}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 64}
    if kind == "bart":
        config = BartConfig(**known, **sizes, bos_token_id=tokenizer.bos_token_id)
        BartForConditionalGeneration(config).save_pretrained(folder)
    else:
        MarianMTModel(MarianConfig(**known, **sizes, bos_token_id=tokenizer.bos_token_id)).save_pretrained(folder)
    return folder


def test_a_tokenizer_without_a_first_token(home, tmp_path):
    """As T5's: the decoder starts with padding."""
    tokenizer = small_tokenizer()
    tokenizer.bos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "tokenizer").bos_token_id is None
    made = done(tmp_path / "run", **given(home, tokenizer_name=tmp_path / "tokenizer", max_steps=1))
    config = json.loads((made / "config.json").read_text())
    assert config["decoder_start_token_id"] == config["pad_token_id"] == tokenizer.pad_token_id


@pytest.mark.parametrize("kind", ["marian", "t5", "bart"])
def test_transformers_own_models(home, tmp_path, kind):
    start = native(kind, tmp_path / kind)
    settings = {"model_name_or_path": start, "max_steps": 4, "save_steps": 2, "num_beams": 2}
    tuned = done(tmp_path / "run", **given(home, **settings))
    before, after = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in (start, tuned))
    assert type(before) is type(after)
    parts = [tiny_run.weights(tuned / f"checkpoint-{step}") for step in (2, 4)]
    finished = tiny_run.weights(tuned)
    assert all(torch.equal(w, ((parts[0][n].double() + parts[1][n]) / 2).float()) for n, w in finished.items())
    assert results_of(tuned)["eval_ppl"] > 1
    assert (tuned / "validation_attention.png").stat().st_size


# Mistakes


def different_lines(folder, home):
    write_aligned(folder / "a", pair_rows(12, seed=0))
    (folder / "a.en").write_text("one\n" * 11)
    flags = {"train_file": [folder / "a.ko", folder / "a.en"], "source_lang": "ko", "target_lang": "en"}
    return flags, [f"{folder / 'a.ko'} has 12 lines", f"{folder / 'a.en'} has 11"]


def empty_side(folder, home):
    path = write_table(folder / "empty.tsv", [("배", "ship"), ("달", ""), ("새", "bird")], COLUMNS)
    return {"train_file": path}, [f"{path}:3: the target is empty", "--skip_empty_pairs"]


def empty_aligned_side(folder, home):
    write_aligned(folder / "a", [("배", "ship"), ("", "moon")])
    files = [folder / "a.ko", folder / "a.en"]
    flags = {"train_file": files, "validation_file": files, "source_lang": "ko", "target_lang": "en"}
    return flags, [f"{folder / 'a.ko'}:2: the source is empty", "--skip_empty_pairs"]


def too_long(folder, home):
    path = write_table(folder / "long.tsv", [*pair_rows(20, seed=0), ("배 " * 40, "ship")], COLUMNS)
    flags = {"train_file": path, "truncate_pairs": False}
    return flags, [f"{path}:22:", "1 of 21 pairs", "--max_source_length 16", "Raise the lengths"]


def no_column(folder, home):
    words = [f"{home / 'train.tsv'}:2: there is no column 'korean'", "'source', 'target'", "--source_column"]
    return {"source_column": "korean", "target_column": "target"}, words


def one_file(folder, home):
    flags = {"train_file": home / "train.ko", "source_lang": "ko", "target_lang": "en"}
    return flags, [home / "train.en", "is missing"]


def a_bert(folder, home):
    tokenizer = train_tokenizer(["a few words of text"] * 4, TokenizerArguments(vocab_size=60), model_max_length=32)
    tokenizer.save_pretrained(folder / "bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "bert")
    return {"model_name_or_path": folder / "bert"}, [
        f"--model_name_or_path {folder / 'bert'}",
        "bert is an encoder, and this needs an encoder-decoder",
    ]


def native_copies(folder, home):
    flags = {"model_name_or_path": native("t5", folder / "t5"), "copy_attention": "true"}
    return flags, ["--copy_attention", "is a t5 of transformers, which has none"]


def no_model(folder, home):
    return {"model_name_or_path": folder / "none"}, [f"--model_name_or_path {folder / 'none'}"]


def another_tokenizer(folder, home):
    texts = [text for row in pair_rows(200, seed=0) for text in row] + [f"{n} {n * n}" for n in range(2000)]
    train_tokenizer(texts, TokenizerArguments(vocab_size=900, tokenizer_model="bpe")).save_pretrained(folder / "large")
    flags = {"model_name_or_path": native("t5", folder / "t5"), "tokenizer_name": folder / "large"}
    return flags, ["knows 3", "the tokenizer has 900", "--tokenizer_name"]


def best_and_mean(folder, home):
    return {"load_best_model_at_end": "true", "eval_steps": 1}, ["--load_best_model_at_end", "--average_checkpoints 1"]


def few_positions(folder, home):
    flags = {"model_name_or_path": native("bart", folder / "bart"), "max_target_length": 128}
    return flags, ["--max_target_length 128", "64 tokens only"]


MISTAKES = [different_lines, empty_side, empty_aligned_side, too_long, no_column, one_file, a_bert, no_model]
MISTAKES += [another_tokenizer, best_and_mean, few_positions, native_copies]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.__name__)
def test_mistakes_are_named(home, tmp_path, mistake):
    flags, words = mistake(tmp_path, home)
    assert_refused(run(tmp_path / "run", **given(home, **flags)), *words)


@pytest.mark.parametrize(
    ("recipe", "flags", "words"),
    [
        (RECIPE, ["--num_beams", "0"], "--num_beams 0: it must be 1 or above"),
        (RECIPE, ["--average_checkpoints", "0"], "--average_checkpoints 0: it must be 1 or above"),
        (RECIPE, ["--hidden_dropout_prob", "1.5"], "--hidden_dropout_prob 1.5: it must be 0 or above and below 1"),
        (RECIPE, ["--dropout", "0.1"], "--dropout: it is now --hidden_dropout_prob"),
        (RECIPE, ["--label_smoothing", "1.5"], "--label_smoothing 1.5: it must be 0 or above and below 1"),
        ("pretrain_seq2seq", ["--objective", "infiling"], "--objective infiling: choose one of infilling, spans"),
    ],
)
def test_values_that_are_not_possible_are_refused(recipe, flags, words):
    with pytest.raises(InputError, match=words):
        arguments.parse(tiny_run.recipe_module(recipe).Recipe, flags)
