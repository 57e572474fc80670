"""Mistakes that a person can mend, and how a command ends after one."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


class InputError(ValueError):
    """What was wrong, where, and what to do. Recipes print it without a traceback and exit with 2."""


def require(module: str, extra: str) -> ModuleType:
    """Import a module that only some runs need."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise InputError(f'{package} is not installed: pip install "hf_tiny[{extra}]"') from error


@contextmanager
def exit_codes() -> Iterator[None]:
    """A command ends with 2 after bad input and with 130 after Ctrl-C, and shows no traceback of either."""
    try:
        yield
    except InputError as error:
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nStopped outside the training loop: there was nothing to save.", file=sys.stderr, flush=True)
        sys.exit(130)
