"""The end of a launcher reaches its processes, nobody waits for one that has ended already, and its exit code is what it says."""

import os
import pty
import signal
import subprocess
import sys

import psutil
import pytest
from fixtures.tiny_run import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell of the end of a parent")

LAUNCHED = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_MIXED_PRECISION": "no"}
LATE = """
import os
from hf_tiny import signals
from hf_tiny.errors import exit_codes

parents = iter([12345, 1])  # it ends while the kernel is being asked
os.getppid = lambda: next(parents)
with exit_codes():
    signals.end_with_launcher()
"""
# A launcher that starts a process and waits, as `accelerate launch` does.
LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""
PROCESS = """
import os, time
from hf_tiny import signals
from hf_tiny.errors import exit_codes
with exit_codes():
    signals.end_with_launcher()
    print(os.getpid(), flush=True)
    time.sleep(100)
"""


# What is printed to a terminal that is gone is an error.
CLOSED = """
import sys, time
from hf_tiny.errors import exit_codes
from hf_tiny.signals import Stopped
with exit_codes():
    try:
        print("ready", flush=True)
        time.sleep(100)
    except Stopped:
        print("saving", flush=True)
        open(sys.argv[1], "w").write("saved")
        raise
"""


def test_a_terminal_that_is_closed_lets_a_run_save(tmp_path):
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, [sys.executable, "-c", CLOSED, str(tmp_path / "saved")], LAUNCHED)
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGHUP
    assert (tmp_path / "saved").read_text() == "saved"


def test_nohup_is_heeded():
    code = "import os, signal, sys; from hf_tiny.errors import exit_codes\nwith exit_codes(): os.kill(os.getpid(), signal.SIGHUP)"
    command = ["nohup", sys.executable, "-c", f"{code}; print('goes on')"]
    assert subprocess.run(command, env=LAUNCHED, capture_output=True, text=True).stdout == "goes on\n"


def test_a_launcher_that_ends_while_the_kernel_is_asked_is_noticed():
    ended = subprocess.run([sys.executable, "-c", LATE], env=LAUNCHED, capture_output=True, text=True)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert "there was nothing to save" in ended.stderr and "Traceback" not in ended.stderr
    alone = {name: value for name, value in LAUNCHED.items() if name != "ACCELERATE_MIXED_PRECISION"}
    assert subprocess.run([sys.executable, "-c", LATE], env=alone).returncode == 0  # a shell may end before its program


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_ends_with_its_launcher(number):
    command = [sys.executable, "-c", LAUNCHER, PROCESS]
    launcher = subprocess.Popen(command, env=LAUNCHED, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = psutil.Process(int(launcher.stdout.readline()))
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=30)  # until the process, too, has closed its end
    assert launcher.returncode == -number
    assert "there was nothing to save" in said and "Traceback" not in said
    assert not psutil.wait_procs([process], 30)[1]


# Two processes over gloo are stopped; in the second, a thread of gloo waits to let go of a tensor when the interpreter shuts down.
TWO = """
import os, sys, time
import torch
from torch import distributed
from hf_tiny.errors import exit_codes
from hf_tiny.signals import Stopped

def stop(rank):
    os.environ.update(WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    if not rank:
        os._exit(143)
    with exit_codes():
        sys.setswitchinterval(1000)  # seconds in which no other thread gets the interpreter
        distributed.all_reduce(torch.ones(3), async_op=True)  # fails, as the other process has ended
        end = time.monotonic() + 4
        while time.monotonic() < end:
            pass
        raise Stopped(15, saved=True)

pids = []
for rank in range(2):
    pids.append(os.fork())
    if not pids[-1]:
        stop(rank)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


@pytest.mark.slow
def test_a_stopped_process_is_not_aborted_by_threads_of_gloo(tmp_path):
    words = [sys.executable, "-c", TWO, tmp_path / "meeting"]
    ended = subprocess.run(words, env=LAUNCHED, capture_output=True, text=True)
    assert ended.stdout == "[143, 143]\n", ended.stdout + ended.stderr
