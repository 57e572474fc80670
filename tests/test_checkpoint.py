"""Checkpoints are complete or absent."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from hf_tiny import InputError, arguments, checkpoint
from hf_tiny.config import TrainConfig


def make(folder, step: int, text: str = "weights"):
    with checkpoint.complete_or_absent(folder / f"checkpoint-{step}") as draft:
        (draft / "model.bin").write_text(text)
        (draft / "state.json").write_text("{}")
    return folder / f"checkpoint-{step}"


def steps(folder) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.checkpoints(folder)]


def test_a_saved_checkpoint_is_whole_and_sorted_by_number(tmp_path):
    for step in (5, 10, 100, 20):
        assert checkpoint.damage(make(tmp_path, step)) is None
    assert steps(tmp_path) == [5, 10, 20, 100]
    assert checkpoint.find(tmp_path, "latest").name == "checkpoint-100"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".draft")] == []


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: (path / "model.bin").write_text("weight"), "model.bin differs from its checksum"),
        (lambda path: (path / "model.bin").write_text("weightZ"), "model.bin differs from its checksum"),
        (lambda path: (path / "model.bin").unlink(), "model.bin is missing"),
        (lambda path: (path / "manifest.json").write_text('{"model'), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff\x00\x80"), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[1, 2]"), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json names no file"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
    ],
)
def test_damage_is_named_and_the_one_before_is_used(tmp_path, spoil, problem):
    before, newest = make(tmp_path, 1), make(tmp_path, 2)
    spoil(newest)
    assert problem in checkpoint.damage(newest)
    with pytest.raises(InputError, match=r"checkpoint-2 is damaged.*earlier checkpoint"):
        checkpoint.find(tmp_path, str(newest))
    assert checkpoint.find(tmp_path, "latest") == before


def test_nothing_whole_is_nothing_found(tmp_path):
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / ".draft-checkpoint-9").mkdir()
    (tmp_path / "checkpoint-final").mkdir()
    assert steps(tmp_path) == [7]
    assert checkpoint.find(tmp_path, "latest") is None
    with pytest.raises(InputError, match="no such folder"):
        checkpoint.find(tmp_path, str(tmp_path / "checkpoint-8"))


def test_an_error_while_saving_leaves_the_old_one_and_no_draft(tmp_path):
    make(tmp_path, 1)
    message = r"checkpoint-2 could not be saved \(no space\).*Free some space.*checkpoint-1 is intact"
    with pytest.raises(InputError, match=message), checkpoint.complete_or_absent(tmp_path / "checkpoint-2") as draft:
        (draft / "model.bin").write_text("half")
        raise OSError("no space")
    assert steps(tmp_path) == [1]
    assert checkpoint.damage(tmp_path / "checkpoint-1") is None
    assert not list(tmp_path.glob(".draft*"))


def test_a_full_disk_is_told_in_our_words(tmp_path):
    """torch tells a line of its own code ("enforce fail at inline_container.cc"), safetensors an error number."""
    message = r"checkpoint-2 could not be saved \(the disk takes no more\)\. Free some space"
    with pytest.raises(InputError, match=message), checkpoint.complete_or_absent(tmp_path / "checkpoint-2"):
        torch.save({"weights": torch.zeros(100_000)}, "/dev/full")
    with pytest.raises(InputError, match=message), checkpoint.complete_or_absent(tmp_path / "checkpoint-2"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    full = pytest.raises(InputError, match=r"metrics\.jsonl could not be written \(No space left on device\)")
    with full, checkpoint.written("metrics.jsonl"), open("/dev/full", "w") as file:
        file.write("figures")


def test_a_checkpoint_takes_the_place_of_a_damaged_one(tmp_path):
    (make(tmp_path, 3) / "model.bin").unlink()
    (tmp_path / ".draft-checkpoint-3").mkdir()
    (tmp_path / ".draft-checkpoint-3" / "left over").write_text("")
    target = make(tmp_path, 3, "new")
    assert checkpoint.damage(target) is None
    assert sorted(os.listdir(target)) == ["manifest.json", "model.bin", "state.json"]
    assert (target / "model.bin").read_text() == "new"


@pytest.mark.parametrize(
    ("keep", "spare", "left"),
    [
        (2, None, [3, 4]),
        (1, None, [4]),
        (0, None, [1, 2, 3, 4]),
        (None, None, [1, 2, 3, 4]),
        (1, 2, [2, 4]),
        (9, None, [1, 2, 3, 4]),
    ],
)
def test_rotation(tmp_path, keep, spare, left):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    checkpoint.rotate(tmp_path, keep, spare)
    assert steps(tmp_path) == left
    assert not list(tmp_path.glob(".draft*"))


def test_the_lock_has_one_holder(tmp_path):
    run = tmp_path / "run"
    message = r"Another process is writing to .*run"
    with checkpoint.locked(run), pytest.raises(InputError, match=message), checkpoint.locked(run):
        pass
    with checkpoint.locked(run):
        pass


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "all_results.json", "config.json", "checkpoint-3"])
def test_another_run_is_not_written_over(tmp_path, name):
    checkpoint.refuse_foreign_run(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"holds another run .{name}.*--resume_from_checkpoint latest"):
        checkpoint.refuse_foreign_run(tmp_path)


def test_later_checkpoints_are_set_aside_when_a_run_goes_on_from_an_earlier_one(tmp_path):
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "weights").write_text(str(step))
    checkpoint.abandon_after(tmp_path, 2)
    checkpoint.rotate(tmp_path, keep=1)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-2"]
    assert (tmp_path / "abandoned-checkpoint-6" / "weights").read_text() == "6"


def test_files_that_no_run_wrote_are_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / ".hidden").touch()
    checkpoint.check_folder(tmp_path, resuming=False)  # nothing that a run would replace
    (tmp_path / "README.md").write_text("mine")
    monkeypatch.chdir(tmp_path)
    for resuming in (False, True):
        with pytest.raises(
            InputError, match=r"--output_dir \. holds files that are not of a run .README\.md.*empty folder"
        ):
            checkpoint.check_folder(Path("."), resuming)
    (tmp_path / "checkpoint-4").mkdir()
    checkpoint.check_folder(tmp_path, resuming=True)  # a run of ours wrote README.md, or its owner after it


@pytest.mark.parametrize("place", ["file", "file/below", "dangling", "/proc/hf_tiny"])
def test_a_folder_that_cannot_be_written_to_is_found_first(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "far")
    with pytest.raises(InputError, match=f"--output_dir {tmp_path / place} cannot be written to"):
        checkpoint.check_folder(tmp_path / place, resuming=False)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_refuses_files_is_found_first(tmp_path, monkeypatch, number):
    """Also by root, whom permissions do not stop."""

    def refuse(**_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(InputError, match=f"cannot be written to .{os.strerror(number)}.*Choose another folder"):
        checkpoint.check_folder(tmp_path / "run", resuming=False)


def test_a_run_that_has_not_finished_is_used_by_its_newest_whole_checkpoint(tmp_path, caplog):
    assert checkpoint.usable("google/electra-small") == "google/electra-small"
    assert checkpoint.usable(str(tmp_path)) == str(tmp_path)
    for step in (90, 100):
        make(tmp_path, step)
    with caplog.at_level("INFO"):
        assert checkpoint.usable(str(tmp_path)) == str(tmp_path / "checkpoint-100")
    assert f"{tmp_path} is a run that has not finished: checkpoint-100" in caplog.text
    (tmp_path / "checkpoint-100" / "model.bin").write_text("other")
    assert checkpoint.usable(str(tmp_path)) == str(tmp_path / "checkpoint-90")
    (tmp_path / "checkpoint-90" / "model.bin").unlink()
    with pytest.raises(InputError, match="none of its checkpoints is whole"):
        checkpoint.usable(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert checkpoint.usable(str(tmp_path)) == str(tmp_path)  # it has finished


def test_a_mistyped_folder_is_not_a_new_run_on_other_data(tmp_path, caplog):
    """A run that only says where it goes on has no data of its own."""
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-4" / checkpoint.MANIFEST).write_text("{}")
    resumed = {"output_dir": str(tmp_path / "rum"), "resume_from_checkpoint": "latest"}
    with pytest.raises(InputError, match=r"rum holds no checkpoint, \S*run does: is that meant\? No other flag"):
        checkpoint.check_resume(arguments.parse(TrainConfig, settings=resumed))
    checkpoint.check_resume(arguments.parse(TrainConfig, settings={**resumed, "max_steps": 4}))
    assert "rum holds no checkpoint" in caplog.text


def test_the_folder_of_a_run_is_no_checkpoint(tmp_path):
    newest = make(tmp_path / "books", 100)
    with pytest.raises(InputError, match=f"is the folder of a run. Give one of its checkpoints, such as {newest}"):
        checkpoint.find(tmp_path / "run", str(tmp_path / "books"))


def test_damaged_lines_of_the_log_are_named_and_left_out(tmp_path, caplog):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 1, "loss": 0.1}\n\x00\xff garbage\n[3]\n{"step": "x"}\n{"step": 2}\n{"step": 3}\n{"st')
    checkpoint.abandon_after(tmp_path, 2)
    assert log.read_text() == '{"step": 1, "loss": 0.1}\n{"step": 2}\n'
    assert [f"metrics.jsonl:{number} is not a line" in caplog.text for number in range(1, 8)] == [
        False, True, True, True, False, False, True]  # fmt: skip


def test_a_damaged_manifest_is_blamed_itself(tmp_path):
    saved = make(tmp_path, 4)
    text = (saved / checkpoint.MANIFEST).read_text()
    place = text.index('"state.json"') + 25  # within its checksum
    (saved / checkpoint.MANIFEST).write_text(text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :])
    assert checkpoint.damage(saved) == "manifest.json differs from its checksum"


def test_latest_falls_back_on_a_file_that_cannot_be_read(tmp_path, monkeypatch, caplog):
    first, second = make(tmp_path, 4), make(tmp_path, 8)
    digest = checkpoint._digest

    def refuse(path):
        if path.parent == second:
            raise PermissionError(13, "Permission denied")
        return digest(path)

    monkeypatch.setattr(checkpoint, "_digest", refuse)
    assert checkpoint.find(tmp_path, "latest") == first
    assert f"{second} is damaged: model.bin cannot be read (Permission denied)" in caplog.text


def test_what_safetensors_leaves_when_it_is_killed_is_swept(tmp_path):
    (tmp_path / ".tmpQRGhyd").write_text("half of the weights")
    (tmp_path / "mine.tmp").write_text("not of a run")
    checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.tmp"]


def test_a_disk_that_refuses_the_draft_itself_gets_a_message(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with (
        pytest.raises(InputError, match="checkpoint-4 could not be saved"),
        checkpoint.complete_or_absent(tmp_path / "file" / "checkpoint-4"),
    ):
        pass
