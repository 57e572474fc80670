"""python benchmarks/contention.py [--quick]

How fast the tiny ELECTRA trains on all cores, alone and beside a process that keeps one core busy, by how the threads
wait for each other: as OpenMP does by itself, as hf_tiny sets it, with a tenth of that, and with a single thread.
Each figure is of a process of its own; they take turns. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

from render import keep, middle_and_range

WAYS = {  # what the environment says before torch is loaded, and the number of threads
    "hf_tiny": ({}, 0),
    "openmp": ({"GOMP_SPINCOUNT": "300000"}, 0),  # what libgomp takes by itself
    "short_spin": ({"GOMP_SPINCOUNT": "100"}, 0),
    "one_thread": ({}, 1),
}
BUSY = "while True: pass"


def train(seconds: float, threads: int) -> None:
    """Print the tokens per second of steps of the tiny ELECTRA."""
    import hf_tiny  # noqa: I001, F401  before torch, as in every recipe
    import numpy as np
    import torch
    from types import SimpleNamespace

    from hf_tiny.data.masking import MaskTokens
    from hf_tiny.models import SIZES, HfTinyElectraConfig, HfTinyElectraForPreTraining

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    model = HfTinyElectraForPreTraining(HfTinyElectraConfig(**SIZES[HfTinyElectraConfig]["tiny"], vocab_size=4096))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    special = SimpleNamespace(pad_token_id=0, cls_token_id=2, sep_token_id=3, mask_token_id=4)
    ids = np.random.default_rng(0).integers(5, 4096, (16, 64))
    batch = MaskTokens(special, 0.25, seed=0)({"input_ids": ids, "segment_start": np.full(16, 32)}, 0)

    def step() -> None:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        step()
        steps += 1
    print(steps * ids.size / (time.perf_counter() - start))


@contextmanager
def competitor(busy: bool):
    process = subprocess.Popen([sys.executable, "-c", BUSY]) if busy else None
    try:
        yield
    finally:
        if process:
            process.kill()
            process.wait()


def measure(way: str, busy: bool, seconds: float) -> float:
    variables, threads = WAYS[way]
    command = [sys.executable, __file__, "--train", str(seconds), "--threads", str(threads)]
    with competitor(busy):
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two turns of a second: a check, not a measurement")
    parser.add_argument("--repetitions", type=int, default=None, help="default: 5; 2 when quick")
    parser.add_argument("--results", help="the file of benchmarks/results, without .json, that keeps the figures")
    parser.add_argument("--train", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.threads)
        return
    repetitions, seconds = arguments.repetitions or (2 if arguments.quick else 5), 1 if arguments.quick else 4
    found: dict[tuple[str, bool], list[float]] = {(way, busy): [] for busy in (False, True) for way in WAYS}
    for turn in range(repetitions):
        keys = list(found)
        for key in keys[turn % len(keys) :] + keys[: turn % len(keys)]:
            found[key].append(measure(*key, seconds))
    print(f"tokens per second, {os.cpu_count()} cores   alone (range)            beside a busy process (range)")
    for way in WAYS:
        columns = [found[way, busy] for busy in (False, True)]
        shown = [f"{statistics.median(c):6.0f} ({min(c):.0f} to {max(c):.0f})" for c in columns]
        print(f"{way:34s} {shown[0]:24s} {shown[1]}")
    middle = {key: statistics.median(values) for key, values in found.items()}
    result = {
        "contended_share": round(middle["hf_tiny", True] / middle["hf_tiny", False], 3),
        "contended_share_openmp": round(middle["openmp", True] / middle["openmp", False], 3),
        "idle_cost": round(1 - middle["hf_tiny", False] / middle["openmp", False], 3),
        "tokens_per_second": {f"{way}{', contended' if busy else ''}": round(v) for (way, busy), v in middle.items()},
        "repetitions": repetitions,
    }
    shares = {
        "hf_tiny beside a busy process, of its speed alone": ("hf_tiny", True, "hf_tiny", False),
        "OpenMP's own waiting beside a busy process, of its speed alone": ("openmp", True, "openmp", False),
        "hf_tiny alone, of OpenMP's own waiting": ("hf_tiny", False, "openmp", False),
        "a tenth of the spinning beside a busy process, of its speed alone": ("short_spin", True, "short_spin", False),
        "a tenth of the spinning alone, of OpenMP's own waiting": ("short_spin", False, "openmp", False),
        "hf_tiny beside a busy process, of one thread there": ("hf_tiny", True, "one_thread", True),
    }
    pairs = {what: zip(found[one, a], found[other, b], strict=True) for what, (one, a, other, b) in shares.items()}
    rows = {what: middle_and_range([one / other for one, other in pair]) for what, pair in pairs.items()}
    keep(arguments.results, rows, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
