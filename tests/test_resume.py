"""A run that was stopped, however it was stopped, ends like one that never was."""

import json
import os
import random
import shlex
import shutil
import signal
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from fixtures import tiny_run
from fixtures.tiny_run import (
    ROOT,
    assert_same_training,
    largest_difference,
    logged_steps,
    metrics,
    start_toy,
    toy,
    wait_for_step,
)

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, InputError, arguments, checkpoint, report
from hf_tiny.data.batches import Source
from hf_tiny.train import TrainConfig, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Twelve steps that were never stopped, with dropout, and checkpoints at 4, 8 and 12."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert toy(run).code == 0
    return run


def stopped_copy(whole, folder, last: int):
    """The folder of `whole` as it was after the checkpoint of step `last`."""
    run = folder / "run"
    shutil.copytree(whole, run)
    for path in checkpoint.checkpoints(run):
        if checkpoint.step_of(path) > last:
            shutil.rmtree(path)
    (run / "all_results.json").unlink()
    (run / "model.safetensors").unlink()
    return run


@pytest.mark.parametrize("wanted", ["latest", "checkpoint-4"])
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(whole, tmp_path, wanted):
    run = stopped_copy(whole, tmp_path, last=8)
    ended = toy(run, resume_from_checkpoint=wanted if wanted == "latest" else run / wanted)
    assert ended.code == 0, ended.err
    assert f"at step {8 if wanted == 'latest' else 4}." in ended.err
    assert_same_training(run / "checkpoint-12", whole / "checkpoint-12")
    assert largest_difference(run, whole) == 0
    assert logged_steps(run) == list(range(1, 13))
    one, other = (json.loads((folder / "all_results.json").read_text()) for folder in (run, whole))
    for name in ("eval_loss", "eval_rtd_auc", "train_steps", "train_tokens"):
        assert one[name] == other[name]


def test_resume_at_the_last_step_just_finishes(whole, tmp_path):
    run = stopped_copy(whole, tmp_path, last=12)
    ended = toy(run, resume_from_checkpoint="latest")
    assert ended.code == 0, ended.err
    assert largest_difference(run, whole) == 0
    assert logged_steps(run) == list(range(1, 13))
    assert json.loads((run / "all_results.json").read_text())["train_steps"] == 12


def test_a_longer_run_goes_on_from_a_finished_one(whole, tmp_path):
    run = stopped_copy(whole, tmp_path, last=12)
    assert toy(run, resume_from_checkpoint="latest", max_steps=14).code == 0
    assert logged_steps(run) == list(range(1, 15))


def test_a_finished_run_that_is_resumed_says_so_and_does_nothing(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    ended = toy(run, resume_from_checkpoint="latest")
    assert ended.code == 0 and f"The run in {run} has finished, with 12 steps: nothing is left to do." in ended.err
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_card_and_recipe_keep_all_commands_of_a_run(tmp_path, monkeypatch):
    run = tmp_path / "my run"
    monkeypatch.setattr(sys, "argv", ["recipes/toy.py", "--output_dir", str(run)])
    tiny_run.train_here(run, max_steps=4)
    monkeypatch.setattr(sys, "argv", ["recipes/toy.py", "--max_steps", "6"])
    tiny_run.train_here(run, max_steps=6, resume_from_checkpoint="latest")
    flags = (f"--output_dir '{run}'", "--max_steps 6")
    first, second = (f"accelerate launch --quiet recipes/toy.py {end}" for end in flags)
    recipe, card = (run / "recipe.yaml").read_text(), (run / "README.md").read_text()
    assert recipe.startswith(f"# {first}\n# {second}\n")
    assert yaml.safe_load(recipe)["max_steps"] == 6
    assert f"- Command: `{first}`\n- Resumed with: `{second}`\n- 6 steps" in card


def test_flags_that_are_left_out_on_a_resume_are_those_of_the_run(tmp_path):
    """Those that are given win: a longer run, a new rate."""
    run, settings = tmp_path / "run", {"max_steps": 6, "seed": 7, "rows": 50, "layers": 2, "weight_decay": 0.5}
    assert toy(run, **settings).code == 0
    ended = toy(run, resume_from_checkpoint="latest")
    assert ended.code == 0 and "has finished, with 6 steps: nothing is left to do." in ended.err, ended.err
    assert f"Flags that are not given are those of {run / 'recipe.yaml'}." in ended.err
    before = yaml.safe_load((run / "recipe.yaml").read_text())
    assert toy(run, resume_from_checkpoint="latest", max_steps=8, learning_rate=1e-3).code == 0
    after = yaml.safe_load((run / "recipe.yaml").read_text())
    assert after == {**before, "max_steps": 8, "learning_rate": 1e-3}
    assert logged_steps(run) == list(range(1, 9))
    assert toy(tmp_path / "again", **{**settings, "max_steps": 8}, learning_rate=1e-3).code == 0
    again = yaml.safe_load((tmp_path / "again" / "recipe.yaml").read_text())
    assert again == {**after, "output_dir": str(tmp_path / "again")}


def test_flags_that_the_identity_of_a_run_forbids_are_refused_on_a_resume(tmp_path):
    assert toy(tmp_path / "run", max_steps=4, seed=7).code == 0
    ended = toy(tmp_path / "run", resume_from_checkpoint="latest", max_steps=8, seed=8)
    tiny_run.assert_refused(ended, "checkpoint-4 was made with seed = 7, this run has 8")


def test_a_new_number_of_epochs_wins_over_the_steps_of_the_run(tmp_path):
    (tmp_path / "recipe.yaml").write_text("max_steps: 4\nnum_train_epochs: 1.0\nweight_decay: 0.5\nnum_threads: 64\n")
    flags = ["--output_dir", str(tmp_path), "--resume_from_checkpoint", "latest"]
    kept, longer = (arguments.parse(TrainConfig, [*flags, *more]) for more in ([], ["--num_train_epochs", "3"]))
    assert (kept.max_steps, kept.num_train_epochs, kept.weight_decay, kept.num_threads) == (4, 1, 0.5, None)
    assert (longer.max_steps, longer.num_train_epochs, longer.weight_decay) == (-1, 3, 0.5)


def test_a_run_of_another_recipe_is_not_gone_on_with(tmp_path, monkeypatch):
    """It was asked where in the raw text its labels are."""
    flags = ["--output_dir", str(tmp_path), "--resume_from_checkpoint", "latest"]
    monkeypatch.setattr(sys, "argv", ["recipes/finetune_classifier.py", *flags])
    for command in ("hf-tiny pretrain-electra --output_dir a", "accelerate launch --quiet recipes/pretrain_electra.py"):
        (tmp_path / "recipe.yaml").write_text(f"# {command}\nmax_steps: 4\n")
        with pytest.raises(
            InputError, match=r" is a run of pretrain-electra\. Go on with it by `hf-tiny pretrain-electra`"
        ):
            arguments.parse(TrainConfig, flags)
    (tmp_path / "recipe.yaml").write_text("# hf-tiny finetune-classifier --model_name_or_path pretrain-electra\n{}")
    assert arguments.parse(TrainConfig, flags).output_dir == str(tmp_path)


def test_a_run_goes_on_in_the_folder_of_the_checkpoint_that_is_named(whole, tmp_path):
    """Wherever the run has been moved to since."""
    run = stopped_copy(whole, tmp_path, last=8)
    ended = tiny_run.start(
        tmp_path, tiny_run.run_toy, "--resume_from_checkpoint", str(run / "checkpoint-8"), "--pause", "0"
    ).wait()
    assert ended.code == 0, ended.err
    assert_same_training(run / "checkpoint-12", whole / "checkpoint-12")


@pytest.mark.parametrize("content", ["{max_steps: 3", "", "max_steps: three\n"])
def test_a_damaged_recipe_file_is_named_and_not_needed(whole, tmp_path, content):
    run = stopped_copy(whole, tmp_path, last=8)
    (run / "recipe.yaml").write_text(content)
    ended = toy(run, resume_from_checkpoint="latest")
    assert ended.code == 0 and f"{run / 'recipe.yaml'}: " in ended.err, ended.err
    assert ended.err.count("Flags that are not given") == 1
    assert "Flags that are not given have their defaults." in ended.err
    assert_same_training(run / "checkpoint-12", whole / "checkpoint-12")


@pytest.mark.parametrize("end", ["", "5\n"])
def test_a_recipe_file_that_was_cut_or_changed_is_not_a_run_with_other_flags(whole, tmp_path, end):
    run = stopped_copy(whole, tmp_path, last=8)
    text = (run / "recipe.yaml").read_text()
    rate = text.index("learning_rate: 0.002")
    rest = text[rate:].partition("\n")[2] if end else ""
    (run / "recipe.yaml").write_text(text[:rate] + f"learning_rate: 0.00{end}" + rest)
    ended = toy(run, resume_from_checkpoint="latest")
    assert ended.code == 0 and f"{run / 'recipe.yaml'}: it is not as the run has written it." in ended.err, ended.err
    assert_same_training(run / "checkpoint-12", whole / "checkpoint-12")


def test_several_seeds_go_on_with_their_flags(tmp_path):
    run = tmp_path / "run"
    assert toy(run, seeds=2, seed=5, max_steps=4).code == 0
    shutil.rmtree(run / "seed-6")
    (run / "all_results.json").unlink()
    ended = toy(run, resume_from_checkpoint="latest")
    assert ended.code == 0, ended.err
    assert json.loads((run / "all_results.json").read_text())["seeds"] == 2
    assert sorted(path.name for path in run.glob("seed-*")) == ["seed-5", "seed-6"]
    assert logged_steps(run / "seed-6") == [1, 2, 3, 4]


def test_a_new_rate_and_decay_hold_after_a_resume(whole, tmp_path):
    run = stopped_copy(whole, tmp_path, last=8)
    assert toy(run, resume_from_checkpoint="latest", learning_rate=1e-5, weight_decay=0.5).code == 0
    line = metrics(run)[8]
    assert (line["step"], line["learning_rate"]) == (9, pytest.approx(1e-5 * (1 - 8 / 12)))
    groups = torch.load(run / "checkpoint-12" / "optimizer.pt", weights_only=True)["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]


def test_latest_without_a_checkpoint_starts_at_step_0(whole, tmp_path):
    (tmp_path / "run" / ".draft-checkpoint-4").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3, "loss": 9.0}\n{"step": 4, "lo')  # killed at once
    ended = toy(tmp_path / "run", resume_from_checkpoint="latest")
    assert ended.code == 0, ended.err
    assert "holds no whole checkpoint yet: starting from step 0" in ended.err
    assert_same_training(tmp_path / "run" / "checkpoint-12", whole / "checkpoint-12")
    assert logged_steps(tmp_path / "run") == list(range(1, 13))


# Killed


def test_killed_at_five_random_moments_then_bit_equal(tmp_path):
    settings = {"max_steps": 40, "save_steps": 3, "eval_steps": 10, "save_total_limit": 2}
    assert toy(tmp_path / "whole", **settings).code == 0
    numbers = random.Random(20)
    moments = sorted(numbers.sample(range(2, 39), 5))
    run = tmp_path / "run"
    for moment in moments:
        started = start_toy(run, resume_from_checkpoint="latest", pause=0.02, **settings)
        wait_for_step(started, run, moment)
        time.sleep(numbers.uniform(0, 0.08))
        started.kill()
        assert started.wait().code == -signal.SIGKILL
        last = checkpoint.find(run, "latest")
        assert last is None or checkpoint.step_of(last) > max(logged_steps(run)) - 2 * settings["save_steps"]
    ended = toy(run, resume_from_checkpoint="latest", **settings)
    assert ended.code == 0, ended.err
    assert_same_training(run / "checkpoint-40", tmp_path / "whole" / "checkpoint-40")
    assert largest_difference(run, tmp_path / "whole") == 0
    assert logged_steps(run) == list(range(1, 41))
    assert [line["step"] for line in metrics(run) if "eval_loss" in line] == [10, 20, 30, 40]
    for one, other in zip(metrics(run), metrics(tmp_path / "whole"), strict=True):
        assert {**one, "tokens_per_second": 0} == {**other, "tokens_per_second": 0}
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-39", "checkpoint-40"]


@pytest.mark.parametrize(
    "place",
    [
        "torch.save:3",  # the optimiser of the second checkpoint
        "digest:12",  # the manifest of the second checkpoint
        "replace:3",  # the second checkpoint is written, not yet in its place
        "replace:4",  # the rotation begins
        "rmtree:4",  # the rotation deletes the first checkpoint
    ],
)
def test_killed_while_saving_then_bit_equal(whole, tmp_path, place):
    run = tmp_path / "run"
    assert toy(run, save_total_limit=1, kill_in=place).code == -signal.SIGKILL
    last = checkpoint.find(run, "latest")
    assert last.name in ("checkpoint-4", "checkpoint-8")
    assert all(checkpoint.damage(path) is None for path in checkpoint.checkpoints(run))
    assert toy(run, save_total_limit=1, resume_from_checkpoint="latest").code == 0
    assert_same_training(run / "checkpoint-12", whole / "checkpoint-12")
    assert [path.name for path in run.glob("*checkpoint-*")] == ["checkpoint-12"]
    assert logged_steps(run) == list(range(1, 13))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_ends_with_its_code(whole, tmp_path, number):
    run = tmp_path / "run"
    started = start_toy(run, save_steps=0, pause=0.1)
    wait_for_step(started, run, 3)
    for _ in range(2):  # a launcher passes on what all processes were sent
        started.kill(number)
        time.sleep(0.02)
    ended = started.wait()
    step = checkpoint.step_of(checkpoint.find(run, "latest"))
    assert (ended.code, 3 <= step < 12) == (128 + number, True)
    assert f"Stopped by {number.name}; checkpoint-{step} is saved." in ended.err
    words = shlex.split(ended.err.splitlines()[-1])  # a command that can be pasted
    assert words[:2] == ["accelerate", "launch"] and words[-2:] == ["--resume_from_checkpoint", "latest"]
    assert words[words.index("--output_dir") + 1] == str(run)
    assert "Traceback" not in ended.err
    assert toy(run, resume_from_checkpoint="latest").code == 0
    assert_same_training(run / "checkpoint-12", whole / "checkpoint-12")


# Damaged


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: os.truncate(path / "model.safetensors", 1000), "model.safetensors differs from its checksum"),
        (lambda path: (path / "optimizer.pt").unlink(), "optimizer.pt is missing"),
        (lambda path: (path / "manifest.json").write_text("garbage"), "manifest.json cannot be read"),
        (lambda path: edit(path / "trainer_state.json", '"step": 8', '"step": 7'), "trainer_state.json differs"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(whole, tmp_path, spoil, problem):
    run = stopped_copy(whole, tmp_path, last=8)
    spoil(run / "checkpoint-8")
    refused = toy(run, resume_from_checkpoint=run / "checkpoint-8")
    assert refused.code == 2
    assert f"checkpoint-8 is damaged: {problem}" in refused.err
    assert "Traceback" not in refused.err
    ended = toy(run, resume_from_checkpoint="latest")
    assert ended.code == 0, ended.err
    assert f"checkpoint-8 is damaged: {problem}" in ended.err
    assert "checkpoint-4 at step 4" in ended.err
    assert checkpoint.damage(run / "checkpoint-8") is None
    assert_same_training(run / "checkpoint-12", whole / "checkpoint-12")


class Intruder:
    def __reduce__(self):
        return os._exit, (99,)


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


FOREIGN = {
    "optimizer.pt": (lambda path: torch.save({"state": Intruder()}, path), "holds a pickle that would run code"),
    "rng-0-of-1.pt": (lambda path: torch.save(Intruder(), path), "holds a pickle that would run code"),
    "trainer_state.json": (lambda path: edit(path, '"step": 8', '"stride": 8'), "cannot be loaded (TypeError"),
    "model.safetensors": (lambda path: path.write_bytes(b"\x80\x02"), "cannot be loaded"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_checkpoint_of_strangers_runs_no_code_and_gets_a_message(whole, tmp_path, name):
    """Its manifest agrees with what was put into it."""
    run = stopped_copy(whole, tmp_path, last=8)
    change, message = FOREIGN[name]
    change(run / "checkpoint-8" / name)
    manifest = json.loads((run / "checkpoint-8" / checkpoint.MANIFEST).read_text())
    del manifest[checkpoint.MANIFEST]
    manifest[name] = checkpoint._digest(run / "checkpoint-8" / name)
    manifest[checkpoint.MANIFEST] = checkpoint._digest_of(manifest)
    (run / "checkpoint-8" / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    ended = toy(run, resume_from_checkpoint="latest")
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    assert f"{run / 'checkpoint-8'} {message}" in ended.err


@pytest.mark.parametrize("results", ["", "[1]", "garbage", None])
def test_results_that_are_damaged_are_made_again(whole, tmp_path, results):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "all_results.json").unlink() if results is None else (run / "all_results.json").write_text(results)
    ended = toy(run, resume_from_checkpoint="latest")
    assert ended.code == 0 and "Traceback" not in ended.err, ended.err
    one, other = (json.loads((folder / "all_results.json").read_text()) for folder in (run, whole))
    assert one["eval_loss"] == other["eval_loss"] and largest_difference(run, whole) == 0


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", ".lock"])
@pytest.mark.parametrize("what", ["folder", "link"])
def test_something_else_in_the_place_of_a_file_gets_a_message(whole, tmp_path, name, what):
    run = stopped_copy(whole, tmp_path, last=8)
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir() if what == "folder" else (run / name).symlink_to("nowhere/at/all")
    ended = toy(run, resume_from_checkpoint="latest")
    if (name, what) == ("recipe.yaml", "link"):  # the new file takes the place of a link to nothing
        assert ended.code == 0 and (run / name).is_file() and not (run / name).is_symlink(), ended.err
        assert largest_difference(run, whole) == 0
        return
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    assert name in ended.err.rpartition("error: ")[2] and "ove" in ended.err
    (run / name).rmdir() if what == "folder" else (run / name).unlink()
    assert toy(run, resume_from_checkpoint="latest").code == 0
    assert largest_difference(run, whole) == 0


def test_random_numbers_that_are_gone_are_said(tmp_path, caplog):
    alone = SimpleNamespace(process_index=1, num_processes=2, device=torch.device("cpu"))
    checkpoint.load_random_state(tmp_path, alone, seed=5)
    assert "rng-1-of-2.pt does not exist: dropout goes on with other random numbers" in caplog.text
    assert torch.initial_seed() == 6


# Changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 2}, "model.num_hidden_layers = 1, this run has 2"),
        ({"dropout": 0.0}, "dropout_prob = 0.1, this run has 0.0"),
        ({"layers": 2, "seed": 1}, "model.num_hidden_layers = 1, this run has 2, and seed, parameters"),
        ({"rows": 90}, "data = "),
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size = 8, this run has 4"),
        ({"seed": 1}, "seed = 42, this run has 1"),
        ({"bf16": True}, "bf16 = False, this run has True"),
        (
            {"gradient_accumulation_steps": 3},
            "took 1 micro-batches per step; 1 processes x --gradient_accumulation_steps 3",
        ),
    ],
)
def test_a_resume_of_something_else_names_the_field(whole, tmp_path, change, words):
    run = stopped_copy(whole, tmp_path, last=8)
    before = (run / "metrics.jsonl").read_bytes()
    ended = toy(run, resume_from_checkpoint="latest", **change)
    assert ended.code == 2
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert (run / "metrics.jsonl").read_bytes() == before
    assert checkpoint.find(run, "latest").name == "checkpoint-8"


def test_a_checkpoint_of_elsewhere_does_not_go_into_a_folder_that_holds_a_run(whole, tmp_path):
    run = stopped_copy(whole, tmp_path, last=4)
    before = (run / "metrics.jsonl").read_bytes()
    ended = toy(run, resume_from_checkpoint=whole / "checkpoint-8")
    assert ended.code == 2
    assert "holds another run" in ended.err
    assert (run / "metrics.jsonl").read_bytes() == before
    ended = toy(tmp_path / "new", resume_from_checkpoint=whole / "checkpoint-8")
    assert ended.code == 0, ended.err
    assert logged_steps(tmp_path / "new") == [9, 10, 11, 12]
    assert_same_training(tmp_path / "new" / "checkpoint-12", whole / "checkpoint-12")


def test_the_best_checkpoint_may_be_gone(whole, tmp_path):
    """The first part did not keep the best model; the second one wants it."""
    run = tmp_path / "run"
    assert toy(run, max_steps=8, eval_steps=2, save_total_limit=1).code == 0
    state = json.loads((run / "checkpoint-8" / "trainer_state.json").read_text())["state"]
    assert state["best_step"] == 8
    ended = toy(run, max_steps=12, resume_from_checkpoint="latest", load_best_model_at_end=True)
    assert ended.code == 0, ended.err
    state = json.loads((run / "checkpoint-12" / "trainer_state.json").read_text())["state"]
    assert largest_difference(run, run / f"checkpoint-{state['best_step']}") == 0


class Fixed(Source):
    """Micro-batches that no other code has a part in."""

    batch_size, fingerprint = 4, "frozen"

    def __len__(self):
        return 8

    def __getitem__(self, index):
        numbers = np.random.default_rng(index)
        ids = torch.from_numpy(numbers.integers(5, 32, (4, 8)))
        labels = ids.where(torch.from_numpy(numbers.random((4, 8)) < 0.3), -100)
        noise = torch.from_numpy(numbers.random((4, 8), dtype=np.float32))
        counts = torch.tensor([int((labels >= 0).sum()), 32])
        ids = ids.where(labels < 0, 4)
        return {"input_ids": ids, "labels": labels, "sampling_noise": noise, "num_items_in_batch": counts}


def test_a_checkpoint_of_an_older_version_goes_on(tmp_path, monkeypatch):
    """Saved by version 0.1.0 after 3 of 6 steps, with dropout; `expected` is what that version had after 6."""
    with tarfile.open(ROOT / "tests" / "fixtures" / "old_checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    sizes = {"vocab_size": 32, "embedding_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 8, "generator_size": 1.0}
    torch.manual_seed(0)
    model = HfTinyElectraForPreTraining(HfTinyElectraConfig(**sizes))
    settings = {"max_steps": 6, "save_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
    config = TrainConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest", **settings)
    AcceleratorState._reset_state(True)
    monkeypatch.setattr(report, "draw_curves", tiny_run.without_curves)
    assert train(model, Fixed(), config)["train_tokens"] == 6 * 32
    assert logged_steps(tmp_path) == [4, 5, 6]
    assert largest_difference(tmp_path / "checkpoint-6", tmp_path / "expected") < 1e-6


# Two writers, other numbers of processes


def test_a_second_writer_is_refused_while_the_first_runs(whole, tmp_path):
    run = tmp_path / "run"
    first = start_toy(run, pause=0.1)
    wait_for_step(first, run, 2)
    second = toy(run, resume_from_checkpoint="latest")
    assert second.code == 2
    assert f"Another process is writing to {run}" in second.err
    assert "Traceback" not in second.err
    assert first.wait().code == 0
    assert_same_training(run / "checkpoint-12", whole / "checkpoint-12")
    assert logged_steps(run) == list(range(1, 13))


def test_another_number_of_processes_sees_the_same_samples(tmp_path):
    settings = {"dropout": 0.0, "held_out_rows": 16}
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert toy(whole, gradient_accumulation_steps=2, **settings).code == 0
    assert toy(run, gradient_accumulation_steps=2, **settings).code == 0
    shutil.rmtree(run / "checkpoint-12")
    shutil.rmtree(run / "checkpoint-8")
    settings["gradient_accumulation_steps"] = 1
    refused = tiny_run.toy(run, resume_from_checkpoint="latest", **settings)
    assert refused.code == 2
    assert "took 2 micro-batches per step" in refused.err
    assert "Numbers of processes that fit: [1, 2]; here use --gradient_accumulation_steps 2." in refused.err
    ended = tiny_run.group(run, 2, resume_from_checkpoint="latest", **settings)
    assert [one.code for one in ended] == [0, 0], ended[0].err
    assert largest_difference(run, whole) < 1e-5
    for one, other in zip(metrics(run), metrics(whole), strict=True):
        assert one["step"] == other["step"]
        for name in one.keys() & {"loss", "mlm_loss", "eval_loss"}:
            assert one[name] == pytest.approx(other[name], rel=1e-5)


def test_three_processes_cannot_share_two_micro_batches(tmp_path):
    assert toy(tmp_path / "run", gradient_accumulation_steps=2, max_steps=4).code == 0
    ended = tiny_run.group(tmp_path / "run", 3, resume_from_checkpoint="latest", max_steps=4)
    assert [one.code for one in ended] == [2, 2, 2]
    assert "took 2 micro-batches per step, which 3 processes cannot share: use --num_processes 1 or 2." in ended[0].err


def test_save_total_limit_keeps_the_newest(tmp_path):
    assert toy(tmp_path / "run", save_steps=2, save_total_limit=3).code == 0
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path / "run")] == [8, 10, 12]
