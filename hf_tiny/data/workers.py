"""Processes that prepare data beside this one, and end with it however it ends."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial

from hf_tiny.errors import InputError
from hf_tiny.signals import signal_when_ended

PATIENCE = 5.0  # seconds in which a worker removes what it has half written


def fork_context():
    """For processes that share what is in memory. Each tokenizes in one thread, since threads do not survive a fork."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return multiprocessing.get_context("fork")


@contextmanager
def workers(most: int | None, tasks: int, chunk: int = 1) -> Iterator[Callable]:
    """`map` in as many processes as there are tasks, at most so many, or as cores; with one, in this process.

    chunk: number of tasks that a process is given at once.
    A command that is stopped (see signals.py) stops them, and they remove what they have half written.
    """
    count = min(most or os.cpu_count() or 1, tasks)
    if count <= 1:
        yield map
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, fork_context(), _end_with_parent, (os.getpid(),))
    try:
        yield lambda task, *given: pool.map(partial(_run, task), *given, chunksize=chunk)
    except BaseException as error:
        own = set(multiprocessing.active_children()) - others
        for process in own:
            process.terminate()
        for process in own:  # one that was between two tasks may wait for a lock that another took along
            process.join(PATIENCE)
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise InputError(
                "A process that prepares the data has ended. Was it killed for lack of memory? Use fewer with "
                "--preprocessing_num_workers."
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent(parent: int) -> None:
    """In a worker: the end of the parent is SIGTERM. Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not signal_when_ended(parent):
        os._exit(1)


def _leave(number: int, frame) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would end the removing
    sys.exit(128 + number)


def _run(task: Callable, *given):
    """In a worker: SIGTERM ends the task, which then removes what it has half written, and the worker with it."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        return task(*given)
    except SystemExit:
        os._exit(128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
