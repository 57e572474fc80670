"""python benchmarks/electra.py [--quick]

One pretraining step of ELECTRA-small (sequence 128, batch 32) by hf_tiny and by transformers, on the same weights,
masks and optimiser. Each competitor has a process of its own, for how threads wait and memory is kept belongs to a process:
ours as hf_tiny's loop sets it up, transformers' as a script finds it. They take turns, a step each, and only one computes:

- hf_tiny's HfTinyElectraForPreTraining;
- transformers as it comes: ElectraForMaskedLM and ElectraForPreTraining with tied embeddings, logits at every position;
- the same two models with the logits computed at the masked positions only ("sliced");
- hf_tiny's and transformers' in bfloat16 autocast, too. `electra_step_ratio_default_precision` is transformers in float32,
  its default, beside hf_tiny's, which is bfloat16 where the processor multiplies it itself.

hf_tiny's steps multiply float32 by the library that its loop takes on this processor, transformers' by torch's choice; the
limit that `matmul_share` refers to is that of the faster one.

Ratios are the peer's figure divided by ours: above 1, hf_tiny is faster or needs less memory. The last line is JSON.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from render import keep, middle_and_range
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

# hf_tiny is imported where it is used: transformers' processes do without it.

OURS, WHOLE, SLICED = "hf_tiny", "transformers as it comes", "transformers, sliced logits"
SIDES = (OURS, WHOLE, SLICED)
VARIANTS = ((0.1, False), (0.0, False), (0.1, True))  # dropout, bfloat16
VOCABULARY, LENGTH = 30522, 128
# The ids of BERT's vocabulary.
SPECIAL = SimpleNamespace(pad_token_id=0, cls_token_id=101, sep_token_id=102, mask_token_id=103)


class Composition(nn.Module):
    """The two halves that transformers ships, joined in the ordinary way."""

    def __init__(self, discriminator: ElectraForPreTraining, generator: ElectraForMaskedLM, sliced: bool):
        super().__init__()
        self.discriminator, self.generator, self.sliced = discriminator, generator, sliced
        ours, theirs = generator.electra.embeddings, discriminator.electra.embeddings
        for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"):
            setattr(ours, name, getattr(theirs, name))
        generator.generator_lm_head.weight = theirs.word_embeddings.weight

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, labels: Tensor, sampled: Tensor | None = None
    ) -> Tensor:
        masked = labels != -100
        if self.sliced:
            hidden = self.generator.electra(input_ids, token_type_ids=token_type_ids).last_hidden_state[masked]
            logits = self.generator.generator_lm_head(self.generator.generator_predictions(hidden))
            mlm_loss = F.cross_entropy(logits, labels[masked])
        else:
            output = self.generator(input_ids, token_type_ids=token_type_ids, labels=labels)
            mlm_loss, logits = output.loss, output.logits.detach()[masked]
        if sampled is None:
            sampled = torch.multinomial(logits.detach().softmax(-1), 1).squeeze(1)
        original = torch.where(masked, labels, input_ids)
        corrupted = original.masked_scatter(masked, sampled)
        replaced = (corrupted != original).long()
        return mlm_loss + 50 * self.discriminator(corrupted, token_type_ids=token_type_ids, labels=replaced).loss


def build(side: str, dropout: float) -> nn.Module:
    """ELECTRA-small with the same weights on every side."""
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    discriminator = ElectraForPreTraining(ElectraConfig(**rates))
    narrow = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 256}
    composition = Composition(discriminator, ElectraForMaskedLM(ElectraConfig(**rates, **narrow)), side == SLICED)
    if side != OURS:
        return composition
    from hf_tiny.convert import electra_from_native

    return electra_from_native(discriminator, composition.generator, sharing="embeddings")


def make_batch(size: int, first: int) -> dict[str, Tensor]:
    """Full blocks of random tokens, masked by hf_tiny's collator: 19 of the 128 positions in every row."""
    from hf_tiny.data.masking import MaskTokens

    ids = np.random.default_rng(first).integers(1000, VOCABULARY, (size, LENGTH))
    return MaskTokens(SPECIAL, 0.15, seed=0)({"input_ids": ids, "segment_start": np.full(size, LENGTH // 2)}, first)


def compute_loss(side: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if side == OURS:
        return model(**batch).loss
    return model(batch["input_ids"], batch["token_type_ids"], batch["labels"])


def compete(turns: Connection, side: str, dropout: float, bf16: bool, threads: int) -> None:
    """A competitor's process: takes a step for each batch, and gives its seconds and the MB that the steps so far have added
    to a process which had only imported its modules: weights, optimiser and activations."""
    torch.set_num_threads(threads)
    products = nullcontext
    if side == OURS:
        from hf_tiny import convert  # noqa: F401  its memory is not the step's
        from hf_tiny.machine import best_products, float32_by, keep_memory

        keep_memory()
    before = peak_memory()
    model = build(side, dropout).train()
    if side == OURS:
        products = partial(float32_by, best_products(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-6, weight_decay=0.01, fused=True)

    def step(batch: dict[str, Tensor]) -> None:
        with products():
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = compute_loss(side, model, batch)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with suppress(EOFError):  # that is the end
        while True:
            batch = {name: torch.from_numpy(values) for name, values in turns.recv().items()}
            turns.send((seconds(step, batch), peak_memory() - before))


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Competitor:
    def __init__(self, *key, threads: int):
        # Spawned, not forked: torch reads how threads wait when it is imported, and hf_tiny has set it by then.
        context = multiprocessing.get_context("spawn" if OURS in key else "fork")
        self.turns, theirs = context.Pipe()
        context.Process(target=compete, args=(theirs, *key, threads), daemon=True).start()
        theirs.close()  # so that its end is seen

    def step(self, batch: dict[str, Tensor]) -> tuple[float, float]:
        self.turns.send({name: values.numpy() for name, values in batch.items()})
        return self.turns.recv()


@torch.no_grad()
def check_same_loss(batch: dict[str, Tensor]) -> None:
    """In eval mode, with the tokens that our generator samples, every side must have the same loss."""
    model = build(OURS, 0.0).eval()
    corrupted = []  # what our discriminator gets to see
    model.electra.register_forward_pre_hook(lambda _, inputs: corrupted.append(inputs[0]))
    ours = model(**batch).loss
    sampled = corrupted[0][batch["labels"] != -100]
    for side in (WHOLE, SLICED):
        theirs = build(side, 0.0).eval()(batch["input_ids"], batch["token_type_ids"], batch["labels"], sampled)
        difference = (theirs - ours).abs().item()
        if difference > 1e-4:
            raise SystemExit(f"Not the same model: the loss of {side} differs from ours by {difference:.2e}.")
    print(f"Same weights, same loss on all three sides: {ours:.4f}\n")


def matmul_flops_per_second(size: int, dtype: torch.dtype, libraries: set[str]) -> float:
    """What one large matrix product reaches, the best of three by each library."""
    from hf_tiny.machine import float32_by

    a, b = torch.randn(2, size, size).to(dtype)
    times = []
    for library in libraries:
        with float32_by(library):
            times += [seconds(torch.mm, a, b) for _ in range(3)]
    return 2 * size**3 / min(times)


def seconds(function: Callable, *inputs) -> float:
    start = time.perf_counter()
    function(*inputs)
    return time.perf_counter() - start


def median_and_range(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def compared(theirs: list[float], ours: list[float]) -> list[float]:
    return [their / our for their, our in zip(theirs, ours, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batch 2 and 5 repetitions: a check, not a measurement")
    parser.add_argument("--batch_size", type=int, default=None)
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--results", help="the file of benchmarks/results, without .json, that keeps the figures")
    arguments = parser.parse_args()
    batch_size = arguments.batch_size or (2 if arguments.quick else 32)
    repetitions = arguments.repetitions or (5 if arguments.quick else 9)

    keys = [(side, dropout, bf16) for dropout, bf16 in VARIANTS for side in SIDES]
    peers = {key: Competitor(*key, threads=arguments.threads) for key in keys if key[0] != OURS}
    from hf_tiny.machine import FASTER, best_products  # after the peers have started: it sets how threads wait

    ours = {key: Competitor(*key, threads=arguments.threads) for key in keys if key[0] == OURS}
    competitors = {key: (peers | ours)[key] for key in keys}
    torch.set_num_threads(arguments.threads)
    print(f"ELECTRA-small, batch {batch_size}, length {LENGTH}, {arguments.threads} threads, torch {torch.__version__}")
    check_same_loss(make_batch(batch_size, 0))
    model = build(OURS, 0.1).train()
    libraries = {"MKL", best_products(model)}
    with FlopCounterMode(display=False) as counter:
        compute_loss(OURS, model, make_batch(batch_size, 0)).backward()
    for competitor in competitors.values():  # warm up
        competitor.step(make_batch(batch_size, 0))
    memory = {side: competitors[side, 0.1, False].step(make_batch(batch_size, batch_size))[1] for side in SIDES}

    times = {key: [] for key in keys}
    limits = dict.fromkeys((torch.float32, torch.bfloat16), 0.0)
    for repetition in range(repetitions):
        for dtype in limits:
            reached = [matmul_flops_per_second(size, dtype, libraries) for size in (1024, 2048)]
            limits[dtype] = max(limits[dtype], *reached)
        batch = make_batch(batch_size, repetition * batch_size)
        shift = repetition % len(keys)  # so that nobody is always first
        for key in keys[shift:] + keys[:shift]:
            times[key].append(competitors[key].step(batch)[0])

    print(f"{'':28} dropout  precision   step, ms (range)        peer / ours (range)    peak memory, MB")
    ratios, rows = {}, {}
    for (side, dropout, bf16), values in times.items():
        middle, low, high = median_and_range([1000 * value for value in values])
        precision = "bfloat16" if bf16 else "float32"
        line = f"{side:28} {dropout:7}  {precision:9}   {middle:6.0f} ({low:.0f} to {high:.0f})"
        if side != OURS:
            ratio, least, most = median_and_range(compared(values, times[OURS, dropout, bf16]))
            ratios[side, dropout, bf16] = round(ratio, 3)
            line = f"{line:73} {ratio:.2f} ({least:.2f} to {most:.2f})"
            rows[f"{side}, dropout {dropout}, {precision}"] = middle_and_range(
                compared(values, times[OURS, dropout, bf16])
            )
        print(f"{line:97} {memory[side]:.0f}" if dropout and not bf16 else line)

    flops, ours = counter.get_total_flops(), {key[1:]: values for key, values in times.items() if key[0] == OURS}
    rates = {key: flops / statistics.median(values) for key, values in ours.items()}
    default = statistics.median(ours[0.1, True]) * FASTER < statistics.median(ours[0.1, False])  # whether bfloat16
    reach = ", ".join(f"{limit / 1e9:.0f} GFLOP/s in {dtype}" for dtype, limit in limits.items())
    print(f"\n{flops / 1e9:.0f} GFLOP a step; large matrix products reach {reach}")
    faster = compared(times[WHOLE, 0.1, False], ours[0.1, default])
    rows[f"{WHOLE} in float32, its default, and hf_tiny in {('float32', 'bfloat16')[default]}"] = middle_and_range(
        faster
    )
    result = {
        "electra_step_ratio": ratios[WHOLE, 0.1, False],
        "electra_step_ratio_no_dropout": ratios[WHOLE, 0.0, False],
        "electra_step_ratio_sliced": ratios[SLICED, 0.1, False],
        "electra_step_ratio_sliced_no_dropout": ratios[SLICED, 0.0, False],
        "electra_step_ratio_bf16": ratios[WHOLE, 0.1, True],
        "electra_step_ratio_sliced_bf16": ratios[SLICED, 0.1, True],
        "electra_step_ratio_default_precision": round(statistics.median(faster), 3),
        "default_precision": "bfloat16" if default else "float32",
        "matmul_share": round(rates[0.1, False] / limits[torch.float32], 3),
        "matmul_share_no_dropout": round(rates[0.0, False] / limits[torch.float32], 3),
        "matmul_share_bf16": round(rates[0.1, True] / limits[torch.bfloat16], 3),
        "memory_ratio": round(memory[WHOLE] / memory[OURS], 3),
        "memory_ratio_sliced": round(memory[SLICED] / memory[OURS], 3),
        "batch_size": batch_size,
        "threads": arguments.threads,
        "repetitions": repetitions,
    }
    rows |= {f"peak memory of {side}": {"ratio": round(memory[side] / memory[OURS], 3)} for side in (WHOLE, SLICED)}
    for name, precision in (("matmul_share", "float32"), ("matmul_share_bf16", "bfloat16")):
        rows[f"this machine's measured matmul limit, {precision} (share reached, dropout 0.1)"] = {
            "ratio": result[name]
        }
    keep(arguments.results, rows, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
