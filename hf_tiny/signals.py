"""Signals: how a process is asked to end, by a person, by the system, or by the end of its parent."""

import atexit
import ctypes
import math
import os
import signal
import stat
import sys
import time
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PASSED_ON = 5.0  # seconds in which a launcher passes on a signal that SLURM, for one, has sent to all processes as well
FIRST_SPEAKS = 10.0  # seconds in which torch's launcher ends the other processes after the first has ended
LAUNCHED = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}  # variables of `accelerate launch` and of torchrun


class Stopped(KeyboardInterrupt):
    """A command was stopped by a signal. saved: it was in training, and its checkpoint is saved."""

    def __init__(self, number: int, saved: bool = False):
        super().__init__(number)
        self.number, self.saved = number, saved


class StopHandler:
    """While it is entered, Ctrl-C, SIGTERM and the end of the terminal call `stop` once, though they may come twice; one that
    comes later ends the process at once."""

    def __init__(self):
        self.since = math.inf

    def __enter__(self) -> None:
        numbers = [signal.SIGTERM, signal.SIGINT]
        numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []  # which `nohup` ignores
        self.handlers = {number: signal.signal(number, self.ask) for number in numbers}

    def __exit__(self, *exception) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def ask(self, number, frame) -> None:
        now = time.monotonic()
        if now - self.since > PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number == signal.SIGHUP:
            leave_terminal()
        first, self.since = self.since == math.inf, min(now, self.since)
        if first:
            self.stop(number)

    def stop(self, number: int) -> None:
        raise Stopped(number)


def leave_terminal() -> None:
    """Of a terminal that is gone: what is still printed goes nowhere, where it would be an error in the midst of saving."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(nowhere, number)


def signal_when_ended(parent: int) -> bool:
    """Ask the kernel for SIGTERM when the parent of this process ends; False: it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent


def end_with_launcher() -> None:
    """A launcher that is killed, as by `docker stop` or SLURM, tells its processes nothing."""
    parent = os.getppid()
    if LAUNCHED & os.environ.keys() and not signal_when_ended(parent):
        raise Stopped(signal.SIGTERM)


def leave(code: int) -> NoReturn:
    """End the process. One of several ends without the shutdown of the interpreter: a thread of gloo that lets go of a tensor
    during it aborts the process, and 134 takes the place of the code."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        atexit._run_exitfuncs()  # of loggers and trackers
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def let_the_first_speak() -> None:
    """What is wrong for all processes of a machine is said once: the launcher ends the others while they wait here."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(FIRST_SPEAKS)
