"""python benchmarks/finetune.py [--quick]

The same classifier (ELECTRA with a width of 128 and 4 layers, dropout 0.1) from the same weights, on the same texts, with
the same batch size, optimiser, schedule and number of epochs, taking turns in one process:

- hf_tiny's HfTinyElectraForSequenceClassification in hf_tiny's loop, batches by length;
- transformers' ElectraForSequenceClassification in its Trainer as it comes (random batches, padded to their longest text);
- the same with train_sampling_strategy="group_by_length".

The texts are paragraphs of Python documentation, to be told apart by their package; a seed a repetition. Ratios are our
examples per second divided by the peer's: above 1, hf_tiny is faster. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from render import keep, middle_and_range
from transformers import (
    DataCollatorWithPadding,
    ElectraConfig,
    ElectraForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_tiny.convert import electra_head_from_native
from hf_tiny.data.batches import BucketedBatches
from hf_tiny.data.splits import find_labels
from hf_tiny.data.windows import CollateWindows
from hf_tiny.evaluation import call
from hf_tiny.tasks.classify import ClassifyArguments, TextEvaluation, TextTask
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer
from hf_tiny.train import TrainConfig, train

OURS, DEFAULT, GROUPED = "hf_tiny", "Trainer as it comes", "Trainer, group_by_length"
PEERS = {DEFAULT: "random", GROUPED: "group_by_length"}
RATE, WARMUP, BATCH_SIZE = 5e-4, 0.1, 32


class Work:
    """The texts, as both sides take them."""

    def __init__(self, samples: int | None):
        arguments = ClassifyArguments(max_seq_length=128, max_train_samples=samples)
        texts = TextTask(arguments).splits()
        self.labels = find_labels(texts)
        self.tokenizer = train_tokenizer((text.text for text in texts["train"]), TokenizerArguments(vocab_size=4096))
        self.collate = CollateWindows(self.tokenizer.pad_token_id)
        features = {
            split: TextTask(arguments, None, self.tokenizer, self.labels).features(part)
            for split, part in texts.items()
        }
        self.features = features["train"]
        held_out = BucketedBatches(features["validation"], self.collate, BATCH_SIZE, 8192, 0, shuffle=False)
        self.evaluation = TextEvaluation(
            held_out, texts["validation"], "validation", TextTask(ClassifyArguments(), labels=self.labels)
        )
        names = ("input_ids", "token_type_ids", "labels")
        self.dataset = Dataset.from_list([{name: sample[name] for name in names} for sample in self.features])

    def model(self, seed: int) -> ElectraForSequenceClassification:
        set_seed(seed)
        sizes = {"embedding_size": 128, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2}
        config = ElectraConfig(
            **sizes, intermediate_size=512, vocab_size=len(self.tokenizer), num_labels=len(self.labels)
        )
        config.initializer_range = 0.1
        return ElectraForSequenceClassification(config)

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module) -> float:
        model.eval()
        batches = [self.evaluation.batches[index] for index in range(len(self.evaluation.batches))]
        found = [self.evaluation.collect(call(model, batch, None), batch) for batch in batches]
        results = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        return self.evaluation.compute(results)["accuracy"]


def real_share(batches: BucketedBatches) -> float:
    """The share of the tokens of an epoch, on all sides, that are not padding."""
    lengths = [batches.lengths[samples] for samples in batches.epochs[0]]
    return sum(one.sum() for one in lengths) / sum((one.max(0) * len(one)).sum() for one in lengths)


def ours(work: Work, seed: int, epochs: float, folder: Path, bf16: bool) -> tuple[float, float]:
    model = electra_head_from_native(work.model(seed))
    config = TrainConfig(
        output_dir=str(folder), num_train_epochs=epochs, learning_rate=RATE, warmup_steps=WARMUP, seed=seed,
        adam_epsilon=1e-8, eval_steps=0, save_steps=0, logging_steps=50, bf16=bf16,
    )  # fmt: skip
    batches = BucketedBatches(work.features, work.collate, BATCH_SIZE, BATCH_SIZE * 128, seed)
    results = train(model, batches, config)
    return results["train_samples_per_second"], work.accuracy(model)


def peer(work: Work, seed: int, epochs: float, folder: Path, bf16: bool, sampling: str) -> tuple[float, float]:
    model = work.model(seed)
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, learning_rate=RATE, warmup_steps=WARMUP, weight_decay=0.01,
        per_device_train_batch_size=BATCH_SIZE, seed=seed, train_sampling_strategy=sampling, save_strategy="no",
        logging_steps=50, report_to="none", use_cpu=True, disable_tqdm=True, bf16=bf16,
    )  # fmt: skip
    collator = DataCollatorWithPadding(work.tokenizer)
    trainer = Trainer(model=model, args=arguments, train_dataset=work.dataset, data_collator=collator)
    return trainer.train().metrics["train_samples_per_second"], work.accuracy(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer texts, one epoch: a check, not a measurement")
    parser.add_argument("--repetitions", type=int, default=None, help="default: 5; 2 when quick")
    parser.add_argument("--epochs", type=int, default=2, help="more of them to compare accuracies, fewer for speed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--bf16", action="store_true", help="both sides in bfloat16")
    parser.add_argument("--results", help="the file of benchmarks/results, without .json, that keeps the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    epochs = 1 if arguments.quick else arguments.epochs
    repetitions = arguments.repetitions or (2 if arguments.quick else 5)
    work = Work(300 if arguments.quick else None)

    rates = {side: [] for side in (OURS, *PEERS)}
    accuracies = {side: [] for side in rates}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(repetitions):
            sides = list(rates)
            for side in sides[seed % 3 :] + sides[: seed % 3]:  # so that nobody is always first
                run = (work, seed, epochs, Path(folder, f"{seed}-{side}"), arguments.bf16)
                rate, accuracy = ours(*run) if side == OURS else peer(*run, PEERS[side])
                rates[side].append(rate)
                accuracies[side].append(accuracy)

    print(f"\n{len(work.features)} samples, {epochs} epochs, {repetitions} seeds, {arguments.threads} threads")
    print(f"{'':28} examples/s   ours / peer (range)      accuracy (deviation)")
    result, rows, about = {}, {}, f"{epochs} epochs, {'bfloat16' if arguments.bf16 else 'float32'}"
    for side, values in rates.items():
        ratios = [mine / theirs for mine, theirs in zip(rates[OURS], values, strict=True)]
        span = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        scores = accuracies[side]
        print(
            f"{side:28} {statistics.median(values):9.0f}    {span:24} "
            f"{statistics.mean(scores):.3f} ({statistics.stdev(scores):.3f})"
        )
        deviations = [
            f"{statistics.mean(accuracies[one]):.3f} ± {statistics.stdev(accuracies[one]):.3f}" for one in (OURS, side)
        ]
        rows[f"{side}, {about}"] = {**middle_and_range(ratios), **dict(zip(("ours", "peer"), deviations, strict=True))}
        result[side] = {"ratio": round(statistics.median(ratios), 3), "accuracy": round(statistics.mean(scores), 4)}
    batches = BucketedBatches(work.features, work.collate, BATCH_SIZE, BATCH_SIZE * 128, 0)
    found = {
        "finetune_ratio": result[DEFAULT]["ratio"],
        "finetune_ratio_grouped": result[GROUPED]["ratio"],
        "accuracy": result[OURS]["accuracy"],
        "accuracy_trainer": result[DEFAULT]["accuracy"],
        "accuracy_trainer_grouped": result[GROUPED]["accuracy"],
        "real_tokens": round(real_share(batches), 3),
        "bf16": arguments.bf16,
        "repetitions": repetitions,
        "threads": arguments.threads,
    }
    keep(arguments.results, {what: row for what, row in rows.items() if not what.startswith(OURS)}, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
