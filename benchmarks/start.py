"""python benchmarks/start.py [--quick]

How long a start takes, in fresh processes that take turns: importing hf_tiny, and with it all that a fine-tuning imports, beside
importing torch and transformers; and from the command `hf-tiny finetune-classifier` to its first step, on the built-in data from
a warm cache. The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from render import keep, middle_and_range

PEER = "import torch, transformers"
LOADED = (
    "from transformers import PreTrainedModel, Trainer"  # transformers loads late, too: this is what trains a model
)
IMPORTS = (PEER, "import hf_tiny", LOADED, "import hf_tiny.tasks.classify")


def run(command: list[str], until: Path | None = None) -> float:
    """Seconds until the process has ended, or until there is a file."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (until and until.exists()):
        time.sleep(0.01)
    taken = time.perf_counter() - start
    if process.wait():
        raise SystemExit(f"{command} ended with {process.returncode}.")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once, and no step: a check, not a measurement")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--results", help="the file of benchmarks/results, without .json, that keeps the figures")
    arguments = parser.parse_args()
    repetitions = 1 if arguments.quick else arguments.repetitions
    times: dict[str, list[float]] = {line: [] for line in IMPORTS}
    first_steps = []
    for turn in range(-1, repetitions):  # the first fills caches
        found = {line: run([sys.executable, "-c", line]) for line in IMPORTS}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "hf_tiny.cli", "finetune-classifier", "--max_steps", "1"]
            log = Path(folder) / "run" / "metrics.jsonl"  # its first line is that of the first step
            step = 0.0 if arguments.quick else run([*command, "--output_dir", str(log.parent)], log)
        if turn >= 0:
            for line, seconds in found.items():
                times[line].append(seconds)
            first_steps.append(step)
    compared = {
        "import hf_tiny": (times["import hf_tiny"], times[PEER]),
        "all that a fine-tuning imports, beside transformers' Trainer": (times[IMPORTS[3]], times[LOADED]),
    }
    rows = {what: middle_and_range([a / b for a, b in zip(*both, strict=True)]) for what, both in compared.items()}
    result = {
        "import_ratio": rows["import hf_tiny"]["ratio"],
        "imports_of_a_run_ratio": rows["all that a fine-tuning imports, beside transformers' Trainer"]["ratio"],
        "import_seconds": {line: round(statistics.median(values), 2) for line, values in times.items()},
        "first_step_seconds": round(statistics.median(first_steps), 2),
        "repetitions": repetitions,
    }
    rows["seconds from the command to the first step of a fine-tuning"] = middle_and_range(first_steps)
    keep(arguments.results, rows, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
