"""python benchmarks/seq2seq.py [--quick]

An encoder-decoder (4 + 4 layers, 8192 sub-words, dropout and label smoothing 0.1) by hf_tiny and by transformers' Marian,
from the same weights, taking turns in one process. Training is an epoch over the same pairs with the same optimiser,
schedule and clipping, in micro-batches of 4096 tokens of both sides, padding included:

- hf_tiny's HfTinySeq2SeqForConditionalGeneration in hf_tiny's loop, batches by length, at most 4096 tokens in each;
- MarianMTModel in Seq2SeqTrainer as it comes (random batches): as many pairs at a time as make 4096 tokens on average;
- the same with train_sampling_strategy="group_by_length": more pairs at a time make 4096 tokens. It sorts by the length of
  both sides together, with which there is less padding than by the source alone, as it comes.

The Trainer's own label smoothing is slower than torch's: the peers get torch's.

Then both decode the same batches of 32 with beam search, 4 beams, 64 tokens each, and must write the same.

The texts are sentences of Python documentation of 4 to 40 words, to be restored after a fifth of the words is dropped: the
two sides' lengths go together as those of translations do. Ratios are our target tokens per second (without padding), or
the peer's time to decode, divided by the other's: above 1, hf_tiny is faster. The last line is JSON.
"""

import argparse
import json
import os
import random
import re
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from finetune import real_share
from render import keep, middle_and_range
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.utils import ModelOutput, logging

from hf_tiny.convert import seq2seq_from_native
from hf_tiny.data import builtin
from hf_tiny.data.batches import BucketedBatches
from hf_tiny.tasks.translate import SIDES, CollatePairs, Pair, PairArguments, PairTask
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer
from hf_tiny.train import TrainConfig, train

OURS, DEFAULT, GROUPED, DECODER = "hf_tiny", "Trainer as it comes", "Trainer, group_by_length", "Marian"
PEERS = {DEFAULT: "random", GROUPED: "group_by_length"}
SAME = {
    "num_train_epochs": 1, "learning_rate": 1e-3, "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 0.1,
    "weight_decay": 0.0, "adam_beta2": 0.98, "adam_epsilon": 1e-8, "max_grad_norm": 1.0,
}  # fmt: skip
DECODING = {"num_beams": 4, "min_new_tokens": 64, "max_new_tokens": 64}


def read_pairs(count: int) -> list[Pair]:
    """Sentences of docstrings, spread over all packages, with and without a fifth of their words."""
    sentences, chance = [], random.Random(0)
    for path in builtin.corpus_files()[0]:
        with open(path, encoding="utf-8") as file:
            for text in (json.loads(line)["text"] for line in file):
                sentences += re.findall(r"(?<!\S)[A-Z][^\n]*?[.!?](?=\s+[A-Z]|$)", text, re.MULTILINE)
    sentences = [sentence for sentence in sentences if 4 <= len(sentence.split()) <= 40]
    pairs = []
    for sentence in chance.sample(sentences, count):
        first, *words = sentence.split()
        source = " ".join([first, *(word for word in words if chance.random() < 0.8)])
        pairs.append(Pair(source, sentence, "", "", "", {}))
    return pairs


class Work:
    """The pairs, as both sides take them."""

    def __init__(self, count: int, hidden_size: int, max_tokens: int):
        self.hidden_size, self.max_tokens = hidden_size, max_tokens
        pairs = read_pairs(20_000)  # A vocabulary of 8192 needs more text than is trained on.
        settings = TokenizerArguments(tokenizer_model="bpe", vocab_size=8192)
        self.tokenizer = train_tokenizer((pair.target for pair in pairs), settings)
        self.features = PairTask(PairArguments(truncate_pairs=True), None, self.tokenizer).features(pairs[:count])
        self.lengths = np.array([[len(sample[side]) for side in SIDES] for sample in self.features])  # (pairs, 2)
        self.target_tokens = int(self.lengths[:, 1].sum())
        rows = [{side: sample[side] for side in SIDES} for sample in self.features]
        self.dataset = Dataset.from_list(rows).add_column("length", self.lengths.sum(1).tolist())
        self.collate = CollatePairs(self.tokenizer.pad_token_id)

    def model(self, seed: int, spread: float = 0.02) -> MarianMTModel:
        set_seed(seed)
        size, heads = self.hidden_size, self.hidden_size // 32
        config = MarianConfig(
            vocab_size=len(self.tokenizer), d_model=size, encoder_layers=4, decoder_layers=4, dropout=0.1,
            encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=4 * size,
            decoder_ffn_dim=4 * size, activation_function="relu", scale_embedding=True, init_std=spread,
            pad_token_id=self.tokenizer.pad_token_id, eos_token_id=self.tokenizer.eos_token_id,
            decoder_start_token_id=self.tokenizer.bos_token_id, forced_eos_token_id=None,
        )  # fmt: skip
        return MarianMTModel._from_config(config, attn_implementation="sdpa")

    def batches(self, seed: int) -> BucketedBatches:
        return BucketedBatches(self.features, self.collate, 1024, self.max_tokens, seed, sides=SIDES)

    def batch_size(self, sampling: str) -> int:
        """The most pairs with which the Trainer's full micro-batches have on average no more tokens than our largest."""
        tokens, count = {}, len(self.lengths)
        for size in range(1, min(count, 200) + 1):
            torch.manual_seed(0)
            order = torch.randperm(count)
            if sampling == "group_by_length":
                order = np.array(get_length_grouped_indices(self.lengths.sum(1), size))
            batches = self.lengths[order[: count // size * size]].reshape(-1, size, 2)
            tokens[size] = size * batches.max(1).sum(1).mean()
        return max(size for size in tokens if tokens[size] <= self.max_tokens)


def smoothed_loss(outputs: ModelOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None):
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


@torch.no_grad()
def check_same_loss(work: Work) -> None:
    native, batch = work.model(0).eval(), work.batches(0)[0]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    ours = seq2seq_from_native(native)(**inputs).loss
    theirs = smoothed_loss(native(**inputs), inputs["labels"])
    if (difference := (theirs - ours).abs().item()) > 1e-4:
        raise SystemExit(f"Not the same model: the loss of {DECODER} differs from ours by {difference:.2e}.")
    print(f"Same weights, same loss on both sides: {ours:.4f}")


def ours(work: Work, seed: int, folder: Path, bf16: bool) -> float:
    """Target tokens per second."""
    model = seq2seq_from_native(work.model(seed))
    once = {"eval_steps": 0, "save_steps": 0, "logging_steps": 10_000}
    config = TrainConfig(output_dir=str(folder), seed=seed, bf16=bf16, **once, **SAME)
    return work.target_tokens / train(model, work.batches(seed), config)["train_runtime"]


def peer(work: Work, seed: int, folder: Path, bf16: bool, sampling: str, batch_size: int) -> float:
    model = work.model(seed)
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder), seed=seed, train_sampling_strategy=sampling, per_device_train_batch_size=batch_size,
        save_strategy="no", logging_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, bf16=bf16, **SAME,
    )  # fmt: skip
    collator = DataCollatorForSeq2Seq(work.tokenizer, model)
    data = {"train_dataset": work.dataset, "data_collator": collator}
    trainer = Seq2SeqTrainer(model, arguments, **data, compute_loss_func=smoothed_loss)
    return work.target_tokens / trainer.train().metrics["train_runtime"]


def measure_decoding(work: Work, batch_size: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds a batch."""
    native = work.model(0, spread=0.2).eval()  # large weights, or all continuations would be as likely
    models, times = {OURS: seq2seq_from_native(native), DECODER: native}, {OURS: [], DECODER: []}
    for repetition in range(-1, repetitions):  # the first warms up
        batch, written = work.collate(work.features[max(0, repetition) * batch_size :][:batch_size]), []
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        for side in list(models)[:: 1 if repetition % 2 else -1]:
            start = time.perf_counter()
            written.append(models[side].generate(**inputs, **DECODING))
            times[side].append(time.perf_counter() - start)
        if not torch.equal(*written):
            raise SystemExit(f"The two sides did not write the same in repetition {repetition}.")
    return {side: values[1:] for side, values in times.items()}


def ratios(numerators: list[float], denominators: list[float]) -> tuple[float, str]:
    values = [a / b for a, b in zip(numerators, denominators, strict=True)]
    middle = statistics.median(values)
    return round(middle, 3), f"{middle:.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and 80 pairs: a check, not a measurement")
    parser.add_argument("--repetitions", type=int, default=None, help="default: 5; 2 when quick")
    parser.add_argument("--hidden_size", type=int, default=None, help="default: 256; 64 when quick")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--bf16", action="store_true", help="both sides train in bfloat16")
    parser.add_argument("--results", help="the file of benchmarks/results, without .json, that keeps the figures")
    arguments = parser.parse_args()
    repetitions = arguments.repetitions or (2 if arguments.quick else 5)
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    hidden_size = arguments.hidden_size or (64 if arguments.quick else 256)
    work = Work(80, hidden_size, 1024) if arguments.quick else Work(2400, hidden_size, 4096)
    check_same_loss(work)
    sizes = {side: work.batch_size(sampling) for side, sampling in PEERS.items()}

    rates = {side: [] for side in (OURS, *PEERS)}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(repetitions):
            sides = list(rates)
            for side in sides[seed % 3 :] + sides[: seed % 3]:  # so that nobody is always first
                task = (work, seed, Path(folder, f"{seed}-{side}"), arguments.bf16)
                rates[side].append(ours(*task) if side == OURS else peer(*task, PEERS[side], sizes[side]))
    times = measure_decoding(work, 8 if arguments.quick else 32, repetitions)

    print(
        f"\n{len(work.lengths)} pairs, {work.target_tokens} target tokens, width {work.hidden_size}, {repetitions} "
        f"repetitions, {arguments.threads} threads\n{'':28} pairs at a time   target tokens/s   ours / peer (range)"
    )
    result, rows, precision = {}, {}, "bfloat16" if arguments.bf16 else "float32"
    for side, values in rates.items():
        result[side], span = ratios(rates[OURS], values)
        rows[f"{side}, {precision}"] = middle_and_range([a / b for a, b in zip(rates[OURS], values, strict=True)])
        pairs = sizes.get(side, work.batches(0).batch_size)
        print(f"{side:28} {pairs:15.1f}   {statistics.median(values):15.0f}   {span}")
    print(f"\n{'decoding, 4 beams':28} seconds           peer / ours (range)")
    for side, values in times.items():
        result[side], span = ratios(values, times[OURS])
        rows[f"{side}, beam search, 4 beams, the same output"] = middle_and_range(
            [a / b for a, b in zip(values, times[OURS], strict=True)]
        )
        print(f"{side:28} {statistics.median(values):7.2f}           {span}")
    result = {
        "seq2seq_train_ratio": result[DEFAULT], "seq2seq_train_ratio_grouped": result[GROUPED],
        "seq2seq_decode_ratio": result[DECODER], "batch_sizes": list(sizes.values()), "max_tokens": work.max_tokens,
        "hidden_size": hidden_size, "pairs": len(work.lengths), "repetitions": repetitions,
        "length_correlation": round(float(np.corrcoef(work.lengths.T)[0, 1]), 3), "threads": arguments.threads,
        "real_tokens": round(real_share(work.batches(0)), 3), "precision": precision,
    }  # fmt: skip
    keep(arguments.results, {what: row for what, row in rows.items() if not what.startswith(OURS)}, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
