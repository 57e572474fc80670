"""The cache: complete or absent, damage is found out and mended, and a folder that cannot be written gets a message."""

import errno
import json
import os
import time
from pathlib import Path

import pytest

from hf_tiny import InputError
from hf_tiny.data import cache

CONTENT = b"some bytes " * 1000


def fill(draft: Path) -> None:
    draft.write_bytes(CONTENT)


def fill_folder(draft: Path) -> None:
    draft.mkdir()
    for name in ("a.json", "b.json"):
        fill(draft / name)


@pytest.fixture
def file(tmp_path) -> Path:
    return cache.kept(tmp_path / "kind" / "a.bin", fill)


@pytest.fixture
def folder(tmp_path) -> Path:
    return cache.kept(tmp_path / "kind" / "key", fill_folder)


def fail(draft: Path) -> None:
    pytest.fail("made again")


def test_what_is_whole_is_made_and_read_once(file, folder, monkeypatch):
    assert file.read_bytes() == CONTENT
    monkeypatch.setattr(cache, "_digest", lambda path: pytest.fail("read again"))
    assert cache.kept(file, fail) == file and cache.kept(folder, fail) == folder
    assert sorted(path.name for path in file.parent.iterdir()) == ["a.bin", "a.bin.sha256", "key"]
    assert len(list(folder.iterdir())) == 4
    size, digest = json.loads(file.with_name("a.bin.sha256").read_text())
    assert size == len(CONTENT) and len(digest) == 64


def test_another_time_is_another_look(file, monkeypatch):
    os.utime(file, ns=(1, 1))
    looked = []
    digest = cache._digest
    monkeypatch.setattr(cache, "_digest", lambda path: looked.append(path) or digest(path))
    for _ in range(3):
        assert cache.kept(file, fail) == file
    assert looked == [file]


SPOILED = {
    "changed": (lambda path: path.write_bytes(bytes(len(CONTENT))), "its contents have changed"),
    "cut": (lambda path: path.write_bytes(CONTENT[:-1]), "it has 10,999 bytes and had 11,000"),
    "no checksum": (lambda path: path.with_name(f"{path.name}.sha256").unlink(), "it is missing"),
    "half a checksum": (lambda path: path.with_name(f"{path.name}.sha256").write_text("[1"), "Expecting"),
    "another checksum": (lambda path: path.with_name(f"{path.name}.sha256").write_text("3"), "unpack"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_damage_is_said_and_mended(file, caplog, case):
    spoil, message = SPOILED[case]
    spoil(file)
    assert cache.kept(file, fill).read_bytes() == CONTENT
    assert f"{file} is damaged (" in caplog.text and message in caplog.text
    assert cache.kept(file, fail) == file


@pytest.mark.parametrize("case", ["changed", "cut", "gone", "empty"])
def test_damage_in_a_folder_is_said_and_mended(folder, caplog, case):
    if case == "gone":
        (folder / "b.json").unlink()
    elif case == "empty":
        for path in folder.iterdir():
            path.unlink()
    else:
        SPOILED[case][0](folder / "b.json")
    assert (cache.kept(folder, fill_folder) / "b.json").read_bytes() == CONTENT
    assert f"{folder} is damaged ({'no checksums' if case == 'empty' else 'b.json: '}" in caplog.text
    assert [path.name for path in folder.parent.iterdir()] == ["key"] and cache.kept(folder, fail)


def test_what_fails_leaves_nothing(file, folder):
    before = sorted(file.parent.rglob("*"))

    def break_down(draft: Path) -> None:
        fill(draft)
        raise KeyboardInterrupt

    for target in (file, file.with_name("new.bin"), folder):
        with pytest.raises(KeyboardInterrupt):
            cache.write(target, break_down)
    assert sorted(file.parent.rglob("*")) == before
    assert cache.kept(file, fail) and cache.kept(folder, fail)


def test_a_cache_that_cannot_be_written_gets_a_message(tmp_path):
    (tmp_path / "file").write_text("not a folder")

    def full(draft: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(InputError, match=rf"{tmp_path}/file: the cache cannot be written .*HF_DATASETS_CACHE"):
        cache.kept(tmp_path / "file" / "key", fill)
    with pytest.raises(InputError, match=r"the cache cannot be written .*No space left on device.*Free some space"):
        cache.kept(tmp_path / "key", full)


@pytest.mark.parametrize("make", [fill, fill_folder])  # a packed file, the folder of a tokenizer
def test_drafts_of_killed_runs_are_removed_after_a_day(tmp_path, make):
    target = cache.kept(tmp_path / "made", make)
    old, new = (target.with_name(f".made-{name}") for name in ("old", "new"))
    for draft in (old, new):
        make(draft)
    os.utime(old, (time.time() - 2 * cache.ABANDONED,) * 2)
    cache.write(target, make)
    assert new.exists() and not old.exists()


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), sync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(f"to {Path(new).name}"), replace(old, new)))
    cache.write(tmp_path / "a", fill)
    names = [Path(name).name.partition("-")[0] for name in done]
    assert names == [".a", ".a", "to a", "to a.sha256", tmp_path.name.partition("-")[0]]
    assert done[1].endswith(".sha256")


def test_a_cache_that_can_only_be_read_is_used(file, monkeypatch):
    """Another person's: the time of its checksum cannot be set, so that its contents are compared every time."""

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    os.utime(file, ns=(1, 1))
    monkeypatch.setattr(os, "utime", refuse)
    assert cache.kept(file, fail) == cache.kept(file, fail) == file
    file.write_bytes(bytes(len(CONTENT)))
    monkeypatch.setattr(os, "open", refuse)  # nor can it be written again
    with pytest.raises(InputError, match=r"the cache cannot be written .*Operation not permitted"):
        cache.kept(file, fill)


def test_what_tokenizers_says_of_a_full_disk_gets_a_message(tmp_path):
    def full(draft: Path) -> None:
        raise Exception("Disk quota exceeded (os error 122)")

    def broken(draft: Path) -> None:
        raise Exception("something else")

    with pytest.raises(InputError, match=r"the cache cannot be written .*Disk quota exceeded"):
        cache.kept(tmp_path / "key", full)
    with pytest.raises(Exception, match=r"^something else$"):
        cache.kept(tmp_path / "key", broken)
