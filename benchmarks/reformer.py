"""python benchmarks/reformer.py [--quick]

One training step (batch 1, random bytes as tokens) of causal language models of the same size against length and depth:

- hf_tiny's Reformer;
- a plain Transformer of hf_tiny's blocks, full attention through SDPA, and the same with gradient checkpointing;
- transformers' Reformer with the same layers, sizes, hashes and chunks.

Every point is measured in fresh processes: the median time of whole steps, and what one forward and backward pass adds to the
memory, without the gradients that stay. For the latter every tensor gets pages of its own, so that they are counted and not
the gaps between them. A side stops where its next point would need more than 6 GiB or 60 s a step. The
two Reformers are timed once more at one length, taking turns in one process, also with more hashes and with the dropout that
both have by default. hf_tiny's Reformer multiplies float32 by the library that its loop takes on this processor, the others
by torch's choice. The last line is JSON.
"""

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import torch
from render import keep
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import ReformerConfig, ReformerModelWithLMHead
from transformers.utils import logging

from hf_tiny import HfTinyReformerConfig, HfTinyReformerForCausalLM
from hf_tiny.machine import best_products, float32_by
from hf_tiny.models.layers import BlockSizes, EncoderBlock, linear_cross_entropy, rotary_angles

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OURS, SDPA, SAVING, PEER = "hf_tiny's Reformer", "SDPA", "SDPA, checkpointed", "transformers' Reformer"
SIDES = (OURS, SDPA, SAVING, PEER)
# The width of a stream of the Reformers, and of the Transformer: their matrices have the same shapes.
WIDTH, HEADS, FEED, CHUNK, HASHES, VOCABULARY = 256, 4, 512, 64, 2, 320
LENGTHS = tuple(2**power for power in range(9, 17))
DEPTHS = (2, 6, 12)
TURNS = ((HASHES, 0.0), (HASHES, 0.05), (4, 0.0), (4, 0.05))  # hashes and dropout where the Reformers take turns
MOST_SECONDS, MOST_MB = 60.0, 6 * 1024.0


class Transformer(nn.Module):
    def __init__(self, depth: int, saving: bool):
        super().__init__()
        rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        kinds = {
            "hidden_act": "relu",
            "norm_first": True,
            "layer_norm_eps": 1e-12,
            "modern": False,
            "_attn_implementation": "sdpa",
        }
        config = SimpleNamespace(**kinds, **rates)
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(EncoderBlock(config, BlockSizes(WIDTH, HEADS, FEED)) for _ in range(depth))
        for block in self.blocks:
            block.attention.is_causal = True
        self.norm, self.head, self.saving = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY), saving

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embeddings(input_ids)
        angles = rotary_angles(torch.arange(x.shape[1])[None], WIDTH // HEADS, x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, None, angles, use_reentrant=False) if self.saving else block(x, None, angles)
        x = self.norm(x)[:, :-1].flatten(0, 1)
        return SimpleNamespace(loss=linear_cross_entropy(x, self.head, labels[:, 1:].flatten(), len(x), 0.0)[0])


def build(side: str, length: int, depth: int, hashes: int, dropout: float) -> nn.Module:
    torch.manual_seed(0)
    if side in (SDPA, SAVING):
        return Transformer(depth, side == SAVING)
    same = {
        "vocab_size": VOCABULARY, "attn_layers": (["local", "lsh"] * depth)[:depth], "num_attention_heads": HEADS,
        "attention_head_size": WIDTH // HEADS, "hidden_dropout_prob": dropout, "axial_pos_shape": [length // CHUNK, CHUNK],
        "lsh_attn_chunk_length": CHUNK, "local_attn_chunk_length": CHUNK, "num_hashes": hashes,
        "chunk_size_feed_forward": min(512, length), "is_decoder": True,
    }  # fmt: skip
    if side == OURS:
        return HfTinyReformerForCausalLM(HfTinyReformerConfig(**same, hidden_size=2 * WIDTH, intermediate_size=FEED))
    config = ReformerConfig(
        **same, hidden_size=WIDTH, feed_forward_size=FEED, axial_pos_embds_dim=[WIDTH // 4, 3 * WIDTH // 4],
        max_position_embeddings=length, local_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ReformerModelWithLMHead(config)


class Competitor:
    def __init__(self, side: str, length: int, depth: int, hashes: int = HASHES, dropout: float = 0.0):
        self.model = build(side, length, depth, hashes, dropout).train()
        self.products = best_products(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(3, VOCABULARY, (1, length))

    def pass_through(self) -> None:
        with float32_by(self.products):
            self.model(input_ids=self.ids, labels=self.ids).loss.backward()

    def step(self) -> float:
        start = time.perf_counter()
        self.pass_through()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def megabytes(name: str) -> float:
    """A line of /proc/self/status: VmRSS is this process's memory now, VmHWM its peak."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024


def measure_memory(side: str, length: int, depth: int) -> float:
    """MB of activations at the peak."""
    ctypes.CDLL(None).mallopt(
        -3, 2**16
    )  # M_MMAP_THRESHOLD: what is larger has pages of its own, returned when it is freed
    Competitor(side, 2 * CHUNK, 2).pass_through()  # what libraries allocate once
    competitor = Competitor(side, length, depth)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = megabytes("VmRSS")
    competitor.pass_through()
    gradients = sum(p.grad.nbytes for p in competitor.model.parameters() if p.grad is not None) / 2**20
    return round(max(0.1, megabytes("VmHWM") - before - gradients), 2)


def measure_time(side: str, length: int, depth: int, repetitions: int) -> float:
    """Median seconds of a step."""
    competitor = Competitor(side, length, depth)
    competitor.step()  # the optimiser's state
    times = [competitor.step()]
    while len(times) < repetitions and sum(times) < MOST_SECONDS / 2:
        times.append(competitor.step())
    return round(statistics.median(times), 5)


def measure(side: str, length: int, depth: int, repetitions: int) -> tuple[float, float]:
    seconds = in_a_fresh_process(measure_time, side, length, depth, repetitions)
    return seconds, in_a_fresh_process(measure_memory, side, length, depth)


def take_turns(length: int, depth: int, repetitions: int, hashes: int, dropout: float) -> list[float]:
    """transformers' time over ours, once for each repetition."""
    ours, peer = (Competitor(side, length, depth, hashes, dropout) for side in (OURS, PEER))
    ratios = []
    for repetition in range(-1, repetitions):
        pair = (ours, peer) if repetition % 2 else (peer, ours)
        times = {competitor: competitor.step() for competitor in pair}
        ratios += [times[peer] / times[ours]] if repetition >= 0 else []  # the first is to warm up
    return ratios


def in_a_fresh_process(function, *inputs):
    threads = (torch.get_num_threads(),)
    with multiprocessing.get_context("fork").Pool(1, torch.set_num_threads, threads) as pool:
        return pool.apply(function, inputs)


def fits_next(points: list[tuple[float, float]]) -> bool:
    """Whether the next point, if the growth of the last two goes on, stays within the limits."""
    pairs = zip(*points[-2:], (MOST_SECONDS, MOST_MB), strict=True) if len(points) > 1 else ()
    return all(last * last / first <= most for first, last, most in pairs)


def crossing(lengths: tuple[int, ...], ours: list[float], other: list[float]) -> int | None:
    """From which length on ours is less, on straight lines between the logarithms of points; None: from none."""
    gaps = [math.log(a / b) for a, b in zip(ours, other, strict=False)]
    above = max((place for place, gap in enumerate(gaps) if gap > 0), default=-1)
    if above in (-1, len(gaps) - 1):
        return lengths[0] if above < 0 else None
    share = gaps[above] / (gaps[above] - gaps[above + 1])
    return round(lengths[above] * (lengths[above + 1] / lengths[above]) ** share)


def draw(path: Path, lengths: tuple[int, ...], points: dict[str, list[tuple[float, float]]], depth: int) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for place, (axis, label) in enumerate(zip(axes, ("seconds a step", "MB of activations"), strict=True)):
        for side, found in points.items():
            axis.loglog(lengths[: len(found)], [point[place] for point in found], marker="o", label=side, base=2)
        axis.set_yscale("log", base=10)
        axis.set(xlabel=f"tokens (batch 1, {depth} layers)", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=100)


def row(name: str, cells: Sequence[tuple[float, float] | str]) -> str:
    texts = (cell if isinstance(cell, str) else "{:.3f} / {:,.0f}".format(*cell) for cell in cells)
    return f"{name:>8}" + "".join(f"{text:>26}" for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short and shallow: a check, not a measurement")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--depth", type=int, default=6, help="layers where the length varies")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument(
        "--longest", type=int, default=LENGTHS[-1], help="4096 or more; with less than all, nothing is drawn"
    )
    parser.add_argument("--results", help="the file of benchmarks/results, without .json, that keeps the ratios")
    arguments = parser.parse_args()
    repetitions, depth = (5, 2) if arguments.quick else (arguments.repetitions, arguments.depth)
    lengths, depths = (LENGTHS[:2], (2, 4)) if arguments.quick else (LENGTHS, DEPTHS)
    lengths = tuple(length for length in lengths if length <= arguments.longest)
    length = lengths[-1] if arguments.quick else 4096
    torch.set_num_threads(arguments.threads)  # this process computes nothing: its children start without threads
    logging.set_verbosity_error()
    print(f"width {WIDTH}, {HEADS} heads, chunks of {CHUNK}, {HASHES} hashes, {arguments.threads} threads")
    print(f"\n{depth} layers; seconds a step / MB of activations\n{row('tokens', SIDES)}")
    points: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for tokens in lengths:
        cells = []
        for side, known in points.items():
            if fits := fits_next(known):
                known.append(measure(side, tokens, depth, repetitions))
            cells.append(known[-1] if fits else "too much")
        print(row(f"{tokens:,}", cells), flush=True)
    print(f"\n{length:,} tokens; seconds a step / MB of activations\n{row('layers', SIDES)}")
    deep = {}
    for layers in depths:
        deep[layers] = [measure(side, length, layers, repetitions) for side in SIDES]
        print(row(str(layers), deep[layers]), flush=True)
    print(f"\n{length:,} tokens, {depth} layers: a step of transformers' Reformer / ours (range)")
    ratios = {}
    for hashes, dropout in TURNS:
        found = in_a_fresh_process(take_turns, length, depth, max(5, repetitions), hashes, dropout)
        name = f"{hashes} hashes, dropout {dropout}"
        ratios[name] = [round(of(found), 3) for of in (statistics.median, min, max)]
        print("{:26} {:.2f} ({:.2f} to {:.2f})".format(name, *ratios[name]), flush=True)
    if lengths == LENGTHS:
        draw(Path(__file__).parent / "results" / "reformer.png", lengths, points, depth)

    seconds, memory = ({side: [point[place] for point in points[side]] for side in SIDES} for place in (0, 1))
    crossings = {
        f"{what}_crossing_{name}": crossing(lengths, found[OURS], found[side])
        for what, found in (("time", seconds), ("memory", memory))
        for name, side in (("sdpa", SDPA), ("sdpa_checkpointed", SAVING))
    }
    at = lengths.index(length)
    result = {
        "reformer_step_ratio": ratios[f"{HASHES} hashes, dropout 0.0"][0],
        "reformer_memory_ratio": round(memory[OURS][at] / memory[PEER][at], 3),
        "depth_memory_ratio": round(deep[depths[-1]][0][1] / deep[depths[0]][0][1], 3),  # ours is the first side
        **crossings,
        "reformer_step_ratios": ratios,  # median, least, most
        "lengths": lengths, "seconds": seconds, "megabytes": memory, "length": length, "depth": depth, "depths": depths,
        "width": WIDTH, "heads": HEADS, "feed_forward": FEED, "chunk": CHUNK, "hashes": HASHES,
        "threads": arguments.threads, "repetitions": repetitions, "torch": torch.__version__,
    }  # fmt: skip
    print(
        f"\nmemory, ours / theirs: {result['reformer_memory_ratio']:.2f}; {depths[-1]} layers / {depths[0]}: ", end=""
    )
    print(f"{result['depth_memory_ratio']:.2f}\nOurs needs less from this many tokens on (None: nowhere): {crossings}")
    rows = {
        f"transformers' Reformer, {name}": {"ratio": a, "spread": f"{b} to {c}"} for name, (a, b, c) in ratios.items()
    }
    keep(arguments.results, rows, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
