"""Mistakes that a person can mend, and how a command ends after one."""

import difflib
import importlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from .signals import StopHandler, Stopped, leave, let_the_first_speak

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # of GPUs and CPUs, in torch's words
MEMORY_ADVICE = (
    "The memory is not enough. Use a lower --per_device_train_batch_size (with more --gradient_accumulation_steps the "
    "training is the same), shorter texts, --gradient_checkpointing, or a smaller --size."
)
PEER_IS_GONE = "by peer"  # gloo's "Connection closed by peer" and "reset by peer"
STOPPED_OUTSIDE = "Stopped outside the training loop: there was nothing to save. What is prepared stays in the cache."


class InputError(ValueError):
    """What was wrong, where, and what to do. Recipes print it without a traceback and exit with 2."""


def similar(name: str, folders: bool = False) -> str:
    """The question whether a file or a folder of about this name was meant, if there is one."""
    name = name.rstrip("/")
    wanted, above = Path(name).name, Path(name).expanduser().parent
    names = [one.name for one in above.iterdir() if one.is_dir() or not folders] if above.is_dir() else []
    close = [] if wanted in names else difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    return f" Did you mean {name.removesuffix(wanted)}{close[0]}?" if close else ""


def require(module: str, extra: str) -> ModuleType:
    """Import a module that only some runs need."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise InputError(f'{package} is not installed: pip install "hf_tiny[{extra}]"') from error


def reader_is_gone() -> bool:
    """Whether nobody reads what is printed any more, as after `| head`; what is left to print then goes nowhere."""
    pipe = select.poll()
    try:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        pipe.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # a notebook or a test collects what is printed
        return False
    if gone := any(event & select.POLLERR for _, event in pipe.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


@contextmanager
def exit_codes() -> Iterator[None]:
    """A command ends with 2 after bad input and with 130 or 143 after a signal, and shows no traceback."""
    try:
        with StopHandler():
            yield
    except InputError as error:
        let_the_first_speak()
        code, message = 2, f"error: {error}"
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
            code, message = 2, f"error: {MEMORY_ADVICE}"
        elif PEER_IS_GONE in str(error):
            code, message = 1, ""  # the process that ended first has said why
        else:
            raise
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        code, message = 128 + signal.SIGPIPE, ""
    except Stopped as stopped:
        code, message = 128 + stopped.number, "" if stopped.saved else STOPPED_OUTSIDE
    else:
        return
    finally:
        reader_is_gone()
    if message:
        print(f"\n{message}", file=sys.stderr, flush=True)
    leave(code)
