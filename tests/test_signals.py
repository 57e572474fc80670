"""The end of a launcher reaches its processes, and nobody waits for one that has ended already."""

import os
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
