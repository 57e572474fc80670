"""python benchmarks/growth.py [--quick]

How the costs of a training step grow:

- with the length, from 128 to 8,192 tokens (or patches), for the tiny encoder of each family: as many texts as make 8,192 tokens;
- with the size and the cores: pretraining of ELECTRA, 8 blocks of 128 tokens, in float32 and, where the processor multiplies
  it, in bfloat16.

Steps are as in hf_tiny's loop. Every point is measured in fresh processes: the median time of steps, and the memory that two of
them add at their peak. The last line is JSON; with --results the figures are kept and drawn.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from electra import SPECIAL
from reformer import in_a_fresh_process, megabytes
from render import ROOT, write
from torch import Tensor, nn

from hf_tiny import SIZES, HfTinyElectraForPreTraining, models, report
from hf_tiny.data.masking import MaskTokens
from hf_tiny.machine import best_products, float32_by, keep_memory

ENCODERS = {
    "ELECTRA": (models.HfTinyElectraModel, models.HfTinyElectraConfig),
    "Reformer": (models.HfTinyReformerModel, models.HfTinyReformerConfig),
    "encoder-decoder's encoder": (models.seq2seq.HfTinySeq2SeqEncoder, models.HfTinySeq2SeqConfig),
    "ViT": (models.HfTinyViTModel, models.HfTinyViTConfig),
}
LENGTHS = tuple(2**power for power in range(7, 14))
MODEL_SIZES, TOKENS, VOCABULARY, PATCH = ("tiny", "mini", "small", "base"), 8192, 8192, 4
Loss = Callable[[], Tensor]


def encoder(family: str, length: int, tokens: int) -> tuple[nn.Module, Loss]:
    model_class, config_class = ENCODERS[family]
    sizes, rows = SIZES[config_class]["tiny"], max(1, tokens // length)
    if family == "ViT":
        power = length.bit_length() - 1
        shape = [PATCH * 2 ** (power - power // 2), PATCH * 2 ** (power // 2)]
        model = model_class(config_class(**sizes, image_size=shape, patch_size=PATCH, num_channels=1))
        images = torch.randn(rows, 1, *shape)
        return model, lambda: model(images).last_hidden_state.square().mean()
    model = model_class(config_class(**sizes, vocab_size=VOCABULARY, max_position_embeddings=length))
    ids = torch.randint(5, VOCABULARY, (rows, length))
    return model, lambda: model(ids).last_hidden_state.square().mean()


def pretraining(size: str, length: int, tokens: int) -> tuple[nn.Module, Loss]:
    config = models.HfTinyElectraConfig(**SIZES[models.HfTinyElectraConfig][size], vocab_size=30522)
    model, rows = HfTinyElectraForPreTraining(config), tokens // length
    ids = np.random.default_rng(0).integers(1000, 30522, (rows, length))
    batch = MaskTokens(SPECIAL, 0.15, seed=0)({"input_ids": ids, "segment_start": np.full(rows, length // 2)}, 0)
    return model, lambda: model(**batch).loss


class Steps:
    def __init__(self, build: Callable[..., tuple[nn.Module, Loss]], what: str, length: int, tokens: int, bf16: bool):
        torch.manual_seed(0)
        self.model, self.loss = build(what, length, tokens)
        self.model.train()
        self.products, self.bf16 = best_products(self.model), bf16
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> float:
        start = time.perf_counter()
        with float32_by(self.products):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                loss = self.loss()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def measure_time(repetitions: int, threads: int, *about) -> float:
    torch.set_num_threads(threads)
    keep_memory()
    steps = Steps(*about)
    steps.step()
    return statistics.median(steps.step() for _ in range(repetitions))


def measure_memory(threads: int, *about) -> float:
    torch.set_num_threads(threads)
    before = megabytes("VmRSS")
    steps = Steps(*about)
    steps.step()
    steps.step()
    return max(megabytes("VmHWM"), megabytes("VmRSS")) - before


def measure(
    name: str, repetitions: int, threads: int, build: Callable, what: str, length: int, tokens: int, bf16: bool
) -> dict:
    about = (build, what, length, tokens, bf16)
    seconds = in_a_fresh_process(measure_time, repetitions, threads, *about)
    found = {
        "tokens_per_second": round(max(length, tokens) / seconds),
        "megabytes": round(in_a_fresh_process(measure_memory, threads, *about)),
    }
    print(f"{name:60} {found['tokens_per_second']:9,} tokens/s {found['megabytes']:7,} MB", flush=True)
    return found


def draw(path: Path, lengths: dict[str, dict[int, dict]], sizes: dict[str, dict[str, dict]]) -> None:
    figure = report._figure(13, 3.8)
    axes = figure.subplots(1, 3)
    for axis, key, label in zip(
        axes, ("tokens_per_second", "megabytes"), ("tokens per second", "MB at the peak"), strict=False
    ):
        for family, points in lengths.items():
            axis.loglog(list(points), [point[key] for point in points.values()], marker="o", label=family, base=2)
        axis.set_yscale("log", base=10)
        axis.set(xlabel="tokens of a text", title=f"{label}, tiny encoders")
    for about, points in sizes.items():
        axes[2].semilogy(
            list(points), [point["tokens_per_second"] for point in points.values()], marker="o", label=about
        )
    axes[2].set(xlabel="size", title="tokens per second, ELECTRA's pretraining")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short texts, the tiny size: a check, not a measurement")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument(
        "--results", help="the file of benchmarks/results, without .json, that keeps the figures; and a .png"
    )
    arguments = parser.parse_args()
    cores, repetitions = sorted({1, arguments.threads}), 2 if arguments.quick else arguments.repetitions
    precisions = (False, True) if torch.cpu.get_capabilities().get("avx512_bf16") else (False,)
    torch.set_num_threads(1)  # this process computes nothing: its children start without threads
    lengths: dict[str, dict[int, dict]] = {family: {} for family in ENCODERS}
    for family, points in lengths.items():
        for length in LENGTHS[:2] if arguments.quick else LENGTHS:
            about = (encoder, family, length, 512 if arguments.quick else TOKENS, False)
            points[length] = measure(f"{family}, {length:,} tokens", repetitions, arguments.threads, *about)
    sizes: dict[str, dict[str, dict]] = {}
    for threads in cores:
        for bf16 in precisions:
            name = f"{threads} core{'s' if threads > 1 else ''}, {'bfloat16' if bf16 else 'float32'}"
            sizes[name] = {}
            for size in MODEL_SIZES[:1] if arguments.quick else MODEL_SIZES:
                about = (pretraining, size, 128, 128 if arguments.quick else 1024, bf16)
                sizes[name][size] = measure(f"ELECTRA-{size}, {name}", repetitions, threads, *about)
    result = {"lengths": lengths, "sizes": sizes, "threads": arguments.threads, "repetitions": repetitions}
    if arguments.results:
        write(
            arguments.results,
            {"what": "growth", "command": "python benchmarks/growth.py", "seeds": [0], "figures": result},
        )
        draw(ROOT / "benchmarks" / "results" / f"{arguments.results}.png", lengths, sizes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
