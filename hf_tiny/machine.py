"""How this machine computes a run's steps best: in which precision, with how many threads.

Both are measured on the run's own model and data, on copies, before the first step. What was settled is part of the run: it
is in recipe.yaml and in every checkpoint, and a run that goes on keeps it.
"""

import copy
import ctypes
import dataclasses
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import torch
from torch import nn

from . import checkpoint
from .data.batches import Batch, Source
from .evaluation import call, count_flops
from .models.layers import HfTinyPreTrainedModel
from .models.reformer import HfTinyReformerPreTrainedModel
from .processes import on_main

logger = logging.getLogger(__name__)

AUTO = "auto"
FASTER = 1.3  # by how much bfloat16 must be
LEAST_FLOPS, MOST_FLOPS = 2e10, 2e11  # of a step: smaller ones gain nothing, larger ones are measured on fewer rows
LOSS_TOLERANCE, LEAST_COSINE = 0.05, 0.95  # of the loss, relatively, and of the gradients' directions
TURNS, TIMEOUT = 3, 300  # measured steps, and the seconds after which the process that measures is given up


@contextmanager
def float32_by(library: str) -> Iterator[None]:
    """Products of float32 by the library that `best_products` names; by torch's choice again after it."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if library == "oneDNN" else before
    try:
        yield
    finally:
        matmul.fp32_precision = before


def best_products(model: nn.Module) -> str:
    """MKL, by which torch multiplies float32, has no AVX-512 for AMD's processors; oneDNN does, and is twice as fast there.

    torch gives it float32 only where rounding to bfloat16 is allowed. oneDNN makes use of that with AMX alone, and this is
    checked. Native models and evaluation keep torch's choice: the kernel of sdpa is slower with short texts by oneDNN.
    """
    about = torch.cpu.get_capabilities()
    fits = "AMD" in about.get("cpu_name", "") and about.get("avx512_f") and not about.get("amx_tile")
    if fits and isinstance(model, HfTinyPreTrainedModel | HfTinyReformerPreTrainedModel):
        with float32_by("oneDNN"):
            if is_float32():
                return "oneDNN"
    return "MKL"


def is_float32() -> bool:
    """Whether products have the precision of float32: rounded to bfloat16, a third and 1 would differ by 1e-3."""
    thirds = torch.full((256, 256), 1 / 3)
    return bool((thirds @ torch.eye(256) - thirds).abs().max() < 1e-6)


def keep_memory() -> None:
    """Let the C library keep what is freed. By default it gives large pieces back to the system, which must clear them before
    the next step can have them: a fifth of the time of a small step."""
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4  # numbers of malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)


def settle(config, model: nn.Module, batches: Source):
    """The configuration with an answer in the place of every "auto", the same for all processes; sets the threads."""
    keep_memory()
    before = on_main(lambda: checkpoint.settings(Path(config.output_dir), config.resume_from_checkpoint))
    if before.get("num_threads", 0) > len(os.sched_getaffinity(0)):
        logger.warning(
            f"The run had {before.pop('num_threads')} threads, and there are fewer cores: last digits may differ."
        )
    config = dataclasses.replace(config, **{k: v for k, v in before.items() if vars(config)[k] in (AUTO, None)})
    threads, bf16 = config.num_threads or torch.get_num_threads(), config.bf16
    if threads == AUTO:
        threads = on_main(lambda: best_threads(model, batches[0]))
    torch.set_num_threads(threads)
    if bf16 == AUTO:
        bf16 = not config.fp16 and on_main(lambda: bfloat16_is_better(model, batches[0]))
    return dataclasses.replace(config, num_threads=threads, bf16=bf16)


def best_threads(model: nn.Module, batch: Batch) -> int:
    """All cores of this process, or one: small steps may lose more by sharing than they gain."""
    part, _ = some_rows(model, batch)
    twin = copy.deepcopy(model).train()
    seconds = {}
    with torch.random.fork_rng():
        for count in (torch.get_num_threads(), 1):
            torch.set_num_threads(count)
            seconds[count] = min(timed_step(twin, part)[0] for _ in range(TURNS + 1))
    best = min(seconds, key=seconds.__getitem__)
    found = ", ".join(f"{1000 * value:.0f} ms with {count}" for count, value in seconds.items())
    logger.info(f"--num_threads {best}: a step takes {found}.")
    return best


def bfloat16_is_better(model: nn.Module, batch: Batch) -> bool:
    """Where the processor multiplies bfloat16 itself a step is up to three times as fast; elsewhere it is slower, or the
    process dies of an illegal instruction: a child process tries it."""
    if torch.accelerator.is_available():
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    part, flops = some_rows(model, batch)
    if flops < LEAST_FLOPS:
        return False
    shapes = {name: list(value.shape) for name, value in part.items() if torch.is_tensor(value)}
    here = [torch.cpu.get_capabilities(), torch.__version__, torch.get_num_threads(), best_products(model)]
    about = [*here, type(model).__name__, model.config.to_dict(), shapes]
    key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:20]
    cached = Path(datasets.config.HF_DATASETS_CACHE) / "hf_tiny_machine" / f"{key}.json"
    if cached.exists():
        verdict = json.loads(cached.read_text())
    else:
        verdict = judge(measured_elsewhere(model, part))
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_text(json.dumps(verdict))
    logger.info(f"--bf16 {verdict['bf16']}: {verdict['reason']}")
    return verdict["bf16"]


def judge(measured: dict | str) -> dict:
    """Whether to take bfloat16, and why. measured: a message where it could not be measured."""
    if isinstance(measured, str):
        return {"bf16": False, "reason": f"bfloat16 could not be tried here: {measured}"}
    ratio = measured["float32"] / measured["bfloat16"]
    speed = f"a step in bfloat16 is {ratio:.2f} times as fast as in float32"
    if not (measured["loss"] < LOSS_TOLERANCE and measured["cosine"] > LEAST_COSINE):
        return {"bf16": False, "reason": f"{speed}, but not right ({measured})."}
    return {"bf16": ratio >= FASTER, "reason": f"{speed}."}


def measured_elsewhere(model: nn.Module, batch: Batch) -> dict | str:
    """What `measure` finds in a process of its own, which may die."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.pt"
        torch.save({"model": model, "batch": batch, "threads": torch.get_num_threads()}, file)
        command = [sys.executable, "-m", "hf_tiny.machine", str(file)]
        # As a process on its own: the launcher's variables would make it wait for the others.
        alone = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "LOCAL_RANK", "RANK")}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=alone)
        except subprocess.TimeoutExpired:
            return f"{TIMEOUT} seconds were not enough."
    if done.returncode:
        return f"the process that tried ended with {done.returncode}. {(done.stderr.splitlines() or [''])[-1]}"
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Seconds of a step in both precisions, by how much the losses differ, and the cosine of the two gradients."""
    model.train()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    losses, gradients = {}, {}
    for _ in range(TURNS + 1):
        for bf16 in seconds:
            torch.manual_seed(0)  # the same dropout
            model.zero_grad()
            taken, losses[bf16] = timed_step(model, batch, bf16)
            seconds[bf16].append(taken)
            found = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
            gradients[bf16] = torch.cat(found)
    return {
        "float32": min(seconds[False]),
        "bfloat16": min(seconds[True]),
        "loss": abs(losses[True] / losses[False] - 1),
        "cosine": float(torch.cosine_similarity(gradients[False], gradients[True], dim=0)),
    }


def timed_step(model: nn.Module, batch: Batch, bf16: bool = False) -> tuple[float, float]:
    """Seconds and loss of a forward and a backward pass, as in a run."""
    products = best_products(model)
    start = time.perf_counter()
    with float32_by(products):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            loss = call(model, batch, None).loss
        loss.backward()
    return time.perf_counter() - start, loss.item()


def some_rows(model: nn.Module, batch: Batch) -> tuple[Batch, float]:
    """The first rows of a batch, as many as take MOST_FLOPS, and the floating-point operations of a step with all rows. A
    batch whose rows are not one sample each is taken as it is."""
    tensors = {name: value for name, value in batch.items() if torch.is_tensor(value) and name != "num_items_in_batch"}
    sizes = {len(value) for value in tensors.values()}
    rows = sizes.pop()
    model.eval()  # some models count what they see in training
    if sizes:
        return tensors, 3.0 * count_flops(model, tensors)  # backward costs twice the forward pass

    def first(count: int) -> Batch:
        return {name: value[:count] for name, value in tensors.items()}

    flops = 3.0 * rows * count_flops(model, first(1))
    return first(max(1, min(rows, int(rows * MOST_FLOPS / max(1.0, flops))))), flops


if __name__ == "__main__":
    saved = torch.load(sys.argv[1], weights_only=False)  # written by this module, for this moment
    torch.set_num_threads(saved["threads"])
    keep_memory()
    print(json.dumps(measure(saved["model"], saved["batch"])))
