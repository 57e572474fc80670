"""Checkpoints that are complete or absent, never half: save, verify, rotate, find."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .errors import InputError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"  # file name -> size and SHA-256; written last
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")  # loading them can run any code
RUN_FILES = ("recipe.yaml", "metrics.jsonl", "all_results.json", "config.json")


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """One writer per output_dir: the system frees the lock when the process ends, however it ends."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with open(output_dir / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"Another process is writing to {output_dir} right now. Wait for it, stop it, or choose another --output_dir."
            ) from error
        yield


def refuse_foreign_run(output_dir: Path) -> None:
    """A new run never writes over an old one."""
    held = [path.name for path in checkpoints(output_dir)] + [
        name for name in RUN_FILES if (output_dir / name).exists()
    ]
    if held:
        raise InputError(
            f"--output_dir {output_dir} holds another run ({', '.join(held[:3])}). Go on with it by "
            "--resume_from_checkpoint latest, choose another --output_dir, or delete the folder."
        )


@contextlib.contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `target` only when everything in it is on the disk."""
    draft = target.with_name(f".draft-{target.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        manifest = {path.name: _digest(path) for path in sorted(draft.iterdir())}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [*draft.iterdir(), draft]:
            _sync(path)
        if target.exists():
            _discard(target)
        os.replace(draft, target)
        _sync(target.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        before = [path for path in checkpoints(target.parent) if path != target]
        kept = f"{before[-1]} is intact" if before else "no earlier checkpoint exists"
        raise InputError(f"{target} could not be saved ({error}). Free some space, then resume: {kept}.") from error


@contextlib.contextmanager
def written(what: str) -> Iterator[None]:
    """A disk that is full outside a checkpoint costs nothing that the last checkpoint has."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{what} could not be written ({error}). Free some space, then go on with --resume_from_checkpoint latest."
        ) from error


def sweep(output_dir: Path) -> None:
    """Delete what killed runs have left half written or half deleted."""
    for draft in output_dir.glob(".draft-*checkpoint-*"):
        shutil.rmtree(draft)


def rotate(output_dir: Path, keep: int | None, spare: int | None = None) -> None:
    """Delete the oldest checkpoints beyond `keep`, but never the one of step `spare`."""
    if keep is not None:
        for path in checkpoints(output_dir)[: -max(keep, 1)]:
            if step_of(path) != spare:
                _discard(path)


def _discard(checkpoint: Path) -> None:
    """A kill while deleting must not leave half a checkpoint behind."""
    doomed = checkpoint.with_name(f".draft-old-{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed)


def abandon_after(output_dir: Path, step: int) -> None:
    """Checkpoints later than the one a run goes on from are set aside: they are no longer part of it."""
    for path in checkpoints(output_dir):
        if step_of(path) > step:
            aside = path.with_name(f"abandoned-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = dict(json.loads((checkpoint / MANIFEST).read_text()))
    except (OSError, TypeError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if not manifest:
        return f"{MANIFEST} names no file"
    for name, digest in manifest.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if _digest(path) != digest:
            return f"{name} differs from its checksum"
    return None


def check_model(folder: Path) -> None:
    """Refuse what nobody could load: no config, no weights, weights that are damaged or pickled."""
    if not (folder / "config.json").is_file():
        saved = checkpoints(folder)
        hint = f" Its newest checkpoint is {saved[-1]}." if saved else ""
        raise InputError(f"{folder} lacks config.json: there is no finished model in it.{hint}")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickled = [path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLED]
        found = f"only {pickled[0]}, a pickle file, and loading that can run any code" if pickled else "no weights"
        raise InputError(
            f"{folder} has {found}. Save the model with `save_pretrained`, which writes model.safetensors."
        )
    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            with open(path, "rb") as file:
                pickled = file.read(2) in (b"PK", b"\x80\x02")
            what = "is a pickle file by another name" if pickled else f"is damaged or was cut short ({error})"
            raise InputError(f"{path} {what}. Take it from a checkpoint, or save the model again.") from error
    if (folder / MANIFEST).exists() and (problem := damage(folder)):
        raise InputError(f"{folder} is damaged: {problem}. Take an earlier checkpoint.")


def find(output_dir: Path, wanted: str) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` means: `latest` is the newest one that is whole, or None."""
    if wanted != "latest":
        path = Path(wanted)
        if not path.is_dir():
            raise InputError(
                f"--resume_from_checkpoint {wanted}: no such folder. Give a checkpoint-<step> or `latest`."
            )
        if problem := damage(path):
            raise InputError(f"{path} is damaged: {problem}. Use an earlier checkpoint, or `latest`.")
        return path
    for path in reversed(checkpoints(output_dir)):
        problem = damage(path)
        if problem is None:
            return path
        logger.warning(f"{path} is damaged: {problem}. Trying the one before it.")
    return None


def _digest(path: Path) -> list:
    with open(path, "rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
