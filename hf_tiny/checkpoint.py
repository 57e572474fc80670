"""Checkpoints that are complete or absent, never half: save, verify, rotate, find."""

import contextlib
import difflib
import errno
import fcntl
import hashlib
import json
import logging
import os
import pickle
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from .arguments import flags_of_run, parse, recipe_of_run
from .data.cache import sync
from .errors import InputError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"  # file name -> size and SHA-256; written last
LOCK = ".lock"
RANDOM_STATE = "rng-{}-of-{}.pt"  # process, number of processes
WHOLE_OPTIMIZER, SHARDED_OPTIMIZER = "optimizer.pt", "optimizer"  # one file, or a folder with a file of each process
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")  # loading them can run any code
RUN_FILES = ("recipe.yaml", "metrics.jsonl", "all_results.json", "config.json")
OWN = ("recipe.yaml", "metrics.jsonl", "seed-*/recipe.yaml", "checkpoint-*")  # only a run of ours has one of them


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """One writer per output_dir: the system frees the lock when the process ends, however it ends."""
    with contextlib.ExitStack() as stack:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(output_dir / LOCK, "a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"Another process is writing to {output_dir} right now. Wait for it, stop it, or choose another --output_dir."
            ) from error
        except OSError as error:  # something else has its name, or the disk knows no locks
            raise InputError(
                f"{output_dir / LOCK} cannot be locked ({error.strerror}). Move it away, or choose a folder on another disk."
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()}, {time.time_ns()}\n")  # no other run's lock says this
        file.flush()
        yield


def check_folder(output_dir: Path, resuming: bool) -> None:
    """Refuse, before anything is prepared, a folder that cannot be written to, that holds another run, or whose files no
    run of ours wrote: a run leaves a README.md, a config.json and more."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise InputError(
            f"--output_dir {output_dir} cannot be written to ({error.strerror}). Choose another folder."
        ) from error
    if not resuming:
        refuse_foreign_run(output_dir)
    if not any(found for name in OWN for found in output_dir.glob(name)):
        others = sorted(path.name for path in output_dir.iterdir() if not path.is_dir() and path.name[0] != ".")
        if others:
            raise InputError(
                f"--output_dir {output_dir} holds files that are not of a run ({', '.join(others[:3])}), and a run could "
                "replace them. Choose a new or an empty folder."
            )


def refuse_foreign_run(output_dir: Path) -> None:
    """A new run never writes over an old one."""
    held = [path.name for path in checkpoints(output_dir)]
    held += [name for name in RUN_FILES if (output_dir / name).exists()]
    if held:
        raise InputError(
            f"--output_dir {output_dir} holds another run ({', '.join(held[:3])}). Go on with it by "
            "--resume_from_checkpoint latest, choose another --output_dir, or delete the folder."
        )


@contextlib.contextmanager
def complete_or_absent(target: Path, main: bool = True) -> Iterator[Path]:
    """A folder to write into, which takes the place of `target` only when everything in it is on the disk. Where several
    processes write, the main one makes the folder and puts it in its place."""
    draft = target.with_name(f".draft-{target.name}")
    try:
        if main:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        yield draft
        if main:
            _complete(draft, target)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        if main:
            shutil.rmtree(draft, ignore_errors=True)
        before = [path for path in checkpoints(target.parent) if path != target]
        kept = f"{before[-1]} is intact" if before else "no earlier checkpoint exists"
        raise InputError(
            f"{target} could not be saved ({_reason(error)}). Free some space, then resume: {kept}."
        ) from error


def _reason(error: Exception) -> str:
    """Why something was not written. Of a full disk torch tells a line of its own code, safetensors a number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    full = ("enforce fail", "PytorchStreamWriter", os.strerror(errno.ENOSPC))
    return "the disk takes no more" if any(words in str(error) for words in full) else str(error)


def open_weights(folder: Path) -> None:
    """safetensors lets nobody else read its files, whatever the umask: whoever can read the rest can read them too."""
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode & 0o777)


def _complete(draft: Path, target: Path) -> None:
    open_weights(draft)
    paths = sorted(draft.rglob("*"))
    manifest = {path.relative_to(draft).as_posix(): _digest(path) for path in paths if path.is_file()}
    (draft / MANIFEST).write_text(json.dumps({**manifest, MANIFEST: _digest_of(manifest)}, indent=1))
    for path in [*paths, draft / MANIFEST, draft]:
        sync(path)
    if target.exists():
        _discard(target)
    os.replace(draft, target)
    sync(target.parent)


@contextlib.contextmanager
def written(what: str) -> Iterator[None]:
    """A disk that is full outside a checkpoint costs nothing that the last checkpoint has."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{what} could not be written ({_reason(error)}). Free some space, or move away what is in its place; then go on with "
            "--resume_from_checkpoint latest."
        ) from error


@contextlib.contextmanager
def loaded(failure: str) -> Iterator[None]:
    """A model that is not there, or whose weights are damaged, is the person's to mend."""
    try:
        yield
    except (SafetensorError, EOFError) as error:
        reason = f"its weights are damaged or were cut short ({error}). Copy or download them again."
        raise InputError(f"{failure}: {reason}") from error
    except pickle.UnpicklingError as error:
        reason = "its weights are a pickle file that is damaged or would run code. Give it with a model.safetensors."
        raise InputError(f"{failure}: {reason}") from error
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{failure}: {error}") from error


@contextlib.contextmanager
def restored(checkpoint: Path) -> Iterator[None]:
    """For loading a checkpoint. Its files are those of its manifest, but not every manifest is of a run of ours."""
    try:
        yield
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{checkpoint} holds a pickle that would run code, or none at all: it is not loaded. Resume a run of your own."
        ) from error
    except (OSError, LookupError, TypeError, ValueError, SafetensorError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise InputError(f"{checkpoint} cannot be loaded ({problem}). Use an earlier checkpoint.") from error


def sweep(output_dir: Path) -> None:
    """Delete what killed runs have left half written or half deleted."""
    for draft in output_dir.glob(".draft-*checkpoint-*"):
        shutil.rmtree(draft)
    for draft in output_dir.glob(".tmp??????"):  # of safetensors
        draft.unlink()


def rotate(output_dir: Path, keep: int | None, spare: int | None = None) -> None:
    """Delete the oldest checkpoints beyond `keep`, but never the one of step `spare`."""
    if keep is not None and keep > 0:  # else all are kept, as in Trainer
        for path in checkpoints(output_dir)[:-keep]:
            if step_of(path) != spare:
                _discard(path)


def _discard(checkpoint: Path) -> None:
    """A kill while deleting must not leave half a checkpoint behind."""
    shutil.rmtree(_set_aside(checkpoint, ".draft-old-"))


def _set_aside(checkpoint: Path, prefix: str) -> Path:
    aside = checkpoint.with_name(prefix + checkpoint.name)
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)


def abandon_after(output_dir: Path, step: int) -> None:
    """What is later than the step a run goes on from is no longer part of it: checkpoints are set aside, lines of
    metrics.jsonl deleted, so that no step is logged twice."""
    for path in checkpoints(output_dir):
        if step_of(path) > step:
            _set_aside(path, "abandoned-")
    log, draft = output_dir / "metrics.jsonl", output_dir / ".draft-metrics.jsonl"
    if log.exists():
        draft.write_text("".join(json.dumps(line) + "\n" for line in read_log(log) if line["step"] <= step))
        os.replace(draft, log)


def read_log(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl. One that a kill has cut short, or that is damaged, is named and left out."""
    lines = []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}). Move it away: the run goes on without it."
        ) from error
    for number, text in enumerate(content.splitlines(), start=1):
        try:
            line = json.loads(text)
            line["step"] + 0
        except (ValueError, TypeError, LookupError):
            logger.warning(f"{path}:{number} is not a line of figures: it is left out.")
        else:
            lines.append(line)
    return lines


def results(output_dir: Path) -> dict[str, float] | None:
    """Of a run that has finished. None: it has not, or some of what it left is gone or damaged, and is made again."""
    card, weights = output_dir / "README.md", output_dir.glob("model*.safetensors")
    with contextlib.suppress(OSError, TypeError, ValueError):
        found = dict(json.loads((output_dir / "all_results.json").read_text()))
        return found if card.is_file() and any(weights) else None  # the card is written last
    return None


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = dict(json.loads((checkpoint / MANIFEST).read_text()))
    except (OSError, TypeError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    own = manifest.pop(MANIFEST, None)  # older ones have none
    if own is not None and own != _digest_of(manifest):
        return f"{MANIFEST} differs from its checksum"
    if not manifest:
        return f"{MANIFEST} names no file"
    for name, digest in manifest.items():
        path = checkpoint / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if _digest(path) != digest:
                return f"{name} differs from its checksum"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _digest_of(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


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
                is_pickle = file.read(2) in (b"PK", b"\x80\x02")
            what = "is a pickle file by another name" if is_pickle else f"is damaged or was cut short ({error})"
            raise InputError(f"{path} {what}. Take it from a checkpoint, or save the model again.") from error
    if (folder / MANIFEST).exists() and (problem := damage(folder)):
        raise InputError(f"{folder} is damaged: {problem}. Take an earlier checkpoint.")


def usable(name: str) -> str:
    """A model by its name or folder. The folder of a run that has not finished stands for its newest whole checkpoint."""
    folder = Path(name)
    if not folder.is_dir() or (folder / "config.json").exists() or not checkpoints(folder):
        return name
    found = find(folder, "latest")
    if found is None:
        raise InputError(f"{folder}: the run has not finished, and none of its checkpoints is whole.")
    logger.info(f"{folder} is a run that has not finished: {found.name}, its newest checkpoint, is used.")
    return str(found)


def check_resume(config: Any) -> None:
    """Before anything is prepared: whether there is what --resume_from_checkpoint names; what else the run goes on with."""
    output_dir, wanted = Path(config.output_dir), config.resume_from_checkpoint
    if wanted is None:
        return
    if wanted != "latest":
        _named(wanted)
    elif not checkpoints(output_dir):
        others = [path.parent.name for path in output_dir.parent.glob("*/checkpoint-*")]
        if close := difflib.get_close_matches(output_dir.name, others, n=1):
            text = f"{output_dir} holds no checkpoint, {output_dir.with_name(close[0])} does: is that meant?"
            alone = {"output_dir": config.output_dir, "resume_from_checkpoint": wanted}
            if config == parse(type(config), settings=alone):  # not the built-in data, surely
                raise InputError(f"{text} No other flag says what to train.")
            logger.warning(text)
    recipe = recipe_of_run(str(output_dir), wanted)
    if recipe.is_file():
        try:
            flags_of_run(type(config), recipe)
            logger.info(f"Flags that are not given are those of {recipe}.")
        except (InputError, OSError) as error:
            logger.warning(f"{recipe}: {error} Flags that are not given have their defaults.")


def _named(wanted: str) -> Path:
    """The checkpoint of that path."""
    path = Path(wanted)
    if not path.is_dir():
        raise InputError(f"--resume_from_checkpoint {wanted}: no such folder. Give a checkpoint-<step> or `latest`.")
    if not (path / MANIFEST).exists() and (saved := checkpoints(path)):
        raise InputError(
            f"--resume_from_checkpoint {wanted} is the folder of a run. Give one of its checkpoints, such as {saved[-1]}, "
            f"or go on in it: {shlex.join(['--output_dir', wanted, '--resume_from_checkpoint', 'latest'])}"
        )
    return path


def find(output_dir: Path, wanted: str) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` means: `latest` is the newest one that is whole, or None."""
    if wanted != "latest":
        path = _named(wanted)
        if problem := damage(path):
            raise InputError(f"{path} is damaged: {problem}. Use an earlier checkpoint, or `latest`.")
        return path
    for path in reversed(checkpoints(output_dir)):
        problem = damage(path)
        if problem is None:
            return path
        logger.warning(f"{path} is damaged: {problem}. Trying the one before it.")
    return None


def goes_on(config: Any) -> bool:
    """Whether the run has a whole checkpoint to go on from, so that what its weights start from does not matter."""
    wanted = vars(config).get("resume_from_checkpoint")
    paths = reversed(checkpoints(Path(config.output_dir))) if wanted == "latest" else [Path(wanted)] if wanted else []
    return any(damage(path) is None for path in paths)


def settings(output_dir: Path, wanted: str | None) -> dict:
    """What a run that goes on has settled before its first step: whether in bfloat16, and how many threads. Nothing where
    the file cannot be read: `find` says what is wrong with it."""
    folders = checkpoints(output_dir)[-1:] if wanted == "latest" else [Path(wanted)] if wanted else []
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, KeyError):
            saved = json.loads((folder / "trainer_state.json").read_text())
            settled = {"bf16": saved["identity"]["bf16"], "num_threads": saved.get("num_threads")}
            return {name: value for name, value in settled.items() if value is not None}  # None: an older version
    return {}


def to_resume(output_dir: Path, wanted: str | None) -> Path | None:
    """The checkpoint to go on from, or None for a new run, which never writes over an old one."""
    found = None if wanted is None else find(output_dir, wanted)
    if wanted is not None and found is None:
        logger.warning(f"{output_dir} holds no whole checkpoint yet: starting from step 0.")
    elif found is None or found.resolve().parent != output_dir.resolve():
        refuse_foreign_run(output_dir)
    return found


def _digest(path: Path) -> list:
    with open(path, "rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


# Random numbers, weights and the optimiser's state. A sharded model (FSDP) has a part of every tensor in each process, a
# DTensor: its weights are saved whole, by the main process, and the optimiser's state, which is twice as much, by all.


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of this process: each has its own dropout."""
    devices = {} if device.type == "cpu" else {"device": torch.get_device_module(device).get_rng_state()}
    return {"cpu": torch.get_rng_state(), **devices}


def load_random_state(folder: Path, accelerator: Accelerator, seed: int) -> None:
    """With another number of processes there is none to go on with: then a new one."""
    rank, device = accelerator.process_index, accelerator.device
    path = folder / RANDOM_STATE.format(rank, accelerator.num_processes)
    if not path.exists():
        logger.warning(f"{path} does not exist: dropout goes on with other random numbers than it would have.")
        torch.manual_seed(seed + rank)
        return
    states = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])


def save_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, sharded: bool) -> None:
    """Whole by the main process alone, or in shards by all processes."""
    if not sharded:
        torch.save(optimizer.state_dict(), folder / WHOLE_OPTIMIZER)
        return
    writer = dcp.HuggingFaceStorageWriter(str(folder / SHARDED_OPTIMIZER), save_distributed=True)
    dcp.save(_state_by_name(model, optimizer), storage_writer=writer)


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """However it was saved, for a model that is now whole or in shards of any number of processes. A rate or decay that
    was changed for the resume holds.

    Not by torch's `set_optimizer_state_dict`: that invents a state for parameters that have none yet as they start later.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if (folder / WHOLE_OPTIMIZER).exists():
        # To the CPU: torch cannot load to "cpu:0", which is what it is with several processes on CPUs.
        saved = torch.load(folder / WHOLE_OPTIMIZER, map_location="cpu", weights_only=True)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, state in saved["state"].items():
            saved["state"][number] = {key: _placed(value, parameters[number]) for key, value in state.items()}
        optimizer.load_state_dict(saved)
    else:
        reader = dcp.HuggingFaceStorageReader(str(folder / SHARDED_OPTIMIZER))
        named = dict(model.named_parameters())
        for key, about in reader.read_metadata().state_dict_metadata.items():
            name, what = key.rsplit("/", 1)
            scalar = torch.zeros(about.size, device=named[name].device)
            optimizer.state[named[name]][what] = torch.zeros_like(named[name]) if what != "step" else scalar
        dcp.load(_state_by_name(model, optimizer), storage_reader=reader)
    for group, current in zip(optimizer.param_groups, settings, strict=True):
        group.update(current)


def _state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{what}": value
        for name, parameter in model.named_parameters()
        for what, value in optimizer.state[parameter].items()
    }


def load_weights(model: nn.Module, path: Path) -> None:
    """Of a whole model, into one that may be in shards."""
    own = model.state_dict()
    if any(isinstance(weight, DTensor) for weight in own.values()):
        weights = {name: _placed(weight, own[name]) for name, weight in load_file(path).items()}
        model.load_state_dict(weights, strict=False)  # a tied weight is saved once
    else:
        load_model(model, path)


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of it, where `like` is in shards."""
    if isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value
