"""Files in the cache: complete or absent, and found out when they are damaged.

Beside each file lie its size and SHA-256. The size is compared whenever the file is opened; the contents once for each
change of its time: the checksum then gets the time of the file, and as long as both agree nothing is read again.
"""

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from zipfile import BadZipFile

import datasets

from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

ABANDONED = 24 * 3600.0  # seconds after which nobody is writing a draft any more
CHECKSUM = ".sha256"  # at the end of the name of a file that holds the size and the SHA-256 of another


def place(kind: str, key: str) -> Path:
    """Where something is kept in the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE) / kind / key


def kept(target: Path, make: Callable[[Path], object]) -> Path:
    """A file or folder of the cache. When it is missing or damaged, which is said, `make(draft)` writes it."""
    if not is_whole(target):
        write(target, make)
    return target


def is_whole(target: Path) -> bool:
    """Whether it is there and not damaged; if it is, says so."""
    damage = damage_of(target)
    if damage and target.exists():
        logger.warning(f"{target} is damaged ({damage}): it is made again.")
    return not damage


def write(target: Path, make: Callable[[Path], object]) -> None:
    """Complete or absent: what `make(draft)` writes is on the disk, with its checksums, before it gets its name."""
    draft = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    advice = "Free some space, or set HF_DATASETS_CACHE to a folder that can be written."
    with _usable(target.parent, "written", advice):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        try:
            make(draft)
            for path in [path for path in (draft, *draft.rglob("*")) if path.is_file()]:
                _write_checksum(path)
            if draft.is_dir():
                _replace_folder(draft, target)
            else:
                os.replace(draft, target)
                os.replace(_checksum(draft), _checksum(target))
            sync(target.parent)
        finally:
            _remove(draft)
            _remove(_checksum(draft))


def _sweep(target: Path) -> None:
    """What a run that was killed has left of it."""
    for draft in target.parent.glob(f".{target.name}-*"):
        with suppress(OSError):
            if time.time() - draft.stat().st_mtime > ABANDONED:
                _remove(draft)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _replace_folder(draft: Path, target: Path) -> None:
    """A folder that is not empty cannot be replaced at once: a damaged one is moved away first. Another run may be doing
    the same, and what it makes is as good."""
    old = target.with_name(f"{draft.name}-old")
    with suppress(FileNotFoundError):
        os.replace(target, old)
    with suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
        try:
            os.replace(draft, target)
        finally:
            shutil.rmtree(old, ignore_errors=True)


def damage_of(path: Path) -> str | None:
    """What is wrong with a file, or with a file of a folder; None when it is whole."""
    if path.is_dir():
        files = [Path(str(name).removesuffix(CHECKSUM)) for name in sorted(path.glob(f"*{CHECKSUM}"))]
        found = ((file.name, damage_of(file)) for file in files)
        return next((f"{name}: {damage}" for name, damage in found if damage), None if files else "no checksums")
    try:
        size, digest = json.loads(_checksum(path).read_text())
        about, checked = path.stat(), _checksum(path).stat()
        if about.st_size != size:
            return f"it has {about.st_size:,} bytes and had {size:,}"
        if about.st_mtime_ns != checked.st_mtime_ns:
            if _digest(path) != digest:
                return "its contents have changed"
            with suppress(OSError):  # a cache that is only read is compared every time
                os.utime(_checksum(path), ns=(about.st_mtime_ns,) * 2)
    except (OSError, ValueError, TypeError) as error:
        return f"{'it is missing' if isinstance(error, FileNotFoundError) else error}"
    return None


def _checksum(path: Path) -> Path:
    return path.with_name(path.name + CHECKSUM)


def _write_checksum(path: Path) -> None:
    sync(path)
    about = path.stat()
    _checksum(path).write_text(json.dumps([about.st_size, _digest(path)]))
    os.utime(_checksum(path), ns=(about.st_mtime_ns,) * 2)
    sync(_checksum(path))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """To the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def readable(folder: Path) -> AbstractContextManager:
    """For what was whole a moment ago."""
    return _usable(folder, "read", "Try again; if it stays so, set HF_DATASETS_CACHE to a folder on another disk.")


@contextmanager
def _usable(folder: Path, how: str, advice: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        by_tokenizers = "(os error " in str(error)  # which says it with a bare Exception
        if not isinstance(error, OSError | BadZipFile) and not by_tokenizers:  # numpy makes the second of the first
            raise
        raise InputError(f"{folder}: the cache cannot be {how} ({error}). {advice}") from error
