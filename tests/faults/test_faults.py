"""A few cycles of each kind of benchmarks/faults.py: nothing is lost, and what cannot go on is said in words."""

import json
import shutil
import subprocess
import sys

import pytest
from fixtures.tiny_run import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler"),
]


def test_nothing_is_lost():
    """All parts in one go: the runs that nothing happens to are made once."""
    command = [sys.executable, ROOT / "benchmarks" / "faults.py", "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True)
    counts = json.loads(ended.stdout.splitlines()[-1])
    assert counts["failed"] == 0, ended.stdout
    assert ended.returncode == 0 and counts["tried"] >= 40
