"""Processes that prepare data: they end with the run, whatever ends it, and leave nothing half written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hf_tiny import InputError
from hf_tiny.data.workers import workers

PROGRAM = """
import sys, time
from pathlib import Path
from hf_tiny.data import cache
from hf_tiny.data.workers import workers
from hf_tiny.errors import exit_codes

folder = Path(sys.argv[1])

def make(draft):
    draft.write_text("half")
    (folder / f"{draft.name[1:6]}.started").touch()
    time.sleep(60)

def task(number):
    cache.write(folder / f"file{number}", make)

with exit_codes(), workers(int(sys.argv[2]), 2) as each:
    list(each(task, range(2)))
"""


def test_the_results_are_in_order():
    for most in (1, 3):
        with workers(most, 5, chunk=2) as each:
            assert list(each(pow, range(5), [2] * 5)) == [0, 1, 4, 9, 16]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_worker_that_is_killed_gets_a_message():
    with (
        pytest.raises(InputError, match=r"has ended. Was it killed.*--preprocessing_num_workers"),
        workers(2, 2) as each,
    ):
        list(each(_killed, range(2)))


def _killed(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_worker_refuses_arrives_as_it_is():
    for _ in range(20):  # now and then the others waited for ever for a lock of a worker that was ended
        with pytest.raises(InputError, match=r"^a.txt:3: wrong$"), workers(2, 2) as each:
            list(each(_refuse, range(2)))


def _refuse(number: int) -> None:
    raise InputError("a.txt:3: wrong")


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_run(tmp_path, number, most):
    """After SIGKILL they lived on for ever; after SIGTERM they and their drafts were left."""
    (tmp_path / "cache").mkdir()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache"), str(most)]
    answers = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a shell may have ignored it
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **answers)
    wait(lambda: len(list((tmp_path / "cache").glob("*.started"))) == most)
    children = psutil.Process(run.pid).children()
    assert len(children) == (most if most > 1 else 0)
    run.send_signal(number)
    _, said = run.communicate(timeout=60)
    assert run.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    assert "Traceback" not in said
    wait(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
    if number != signal.SIGKILL or most > 1:  # nothing can be done in a process that is killed
        wait(lambda: {path.suffix for path in Path(tmp_path / "cache").iterdir()} == {".started"})
    if number == signal.SIGTERM:
        assert "What is prepared stays in the cache." in said


def wait(happens, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.05)
