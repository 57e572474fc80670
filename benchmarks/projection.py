"""python benchmarks/projection.py my_texts/ [--sample_by paragraph]

What ELECTRA-base on 100 GB of text and 64 GPUs would take, on paper: rates that are measured here, on one core and on
your text, and assumptions about the machines. Writes benchmarks/results/projection.electra_base.json.
"""

import sys
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import render
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, checkpoint
from hf_tiny.data.batches import Batches
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.data.masking import MaskTokens
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

TEXT, GPUS, MACHINES, CORES = 100e9, 64, 8, 64  # bytes; eight machines with eight GPUs and 64 cores each
PEAK, UTILISATION = 312e12, 0.4  # of an A100 in bfloat16, and how much of it a step reaches
NETWORK = 12.5e9  # bytes a second from machine to machine: 100 Gbit/s
STEPS, BATCH, LENGTH, SAMPLE = 766_000, 256, 512, 50e6  # the paper's; what the tokenizer is trained on
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}


def core_seconds(function):
    """What it returns, and the processor time of all its threads: that other work on the machine does not disturb."""
    began = time.process_time()
    result = function()
    return result, time.process_time() - began


def measure_text(arguments: CorpusArguments) -> tuple[dict, object]:
    corpus = Corpus(arguments)
    texts, reading = core_seconds(lambda: list(corpus.documents()))
    size = sum(len(text.encode()) for text in texts)
    vocabulary = TokenizerArguments(vocab_size=30522)
    tokenizer, learning = core_seconds(lambda: train_tokenizer(texts, vocabulary, model_max_length=LENGTH))
    with tempfile.TemporaryDirectory() as cache:
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        blocks, packing = core_seconds(lambda: corpus.blocks(tokenizer)["train"])
        batch, tokens = Batches(blocks, MaskTokens(tokenizer, 0.15, 0), 1, 0)[0], len(blocks) * LENGTH
    found = {"bytes": size, "read": size / reading, "learn": size / learning, "pack": size / packing}
    return {**found, "tokens": tokens / size}, batch


def measure_model(batch: dict) -> dict:
    config = HfTinyElectraConfig(vocab_size=30522, embedding_size=768, generator_size=1 / 3, **BASE)
    model = HfTinyElectraForPreTraining(config)
    inputs = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
    with FlopCounterMode(display=False) as counter:
        model(**inputs).loss.backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with checkpoint.complete_or_absent(Path(folder) / "checkpoint-1") as draft:
            model.save_pretrained(draft)
            checkpoint.save_optimizer(draft, model, optimizer, sharded=False)
        saving = time.perf_counter() - began
        written = sum(path.stat().st_size for path in (Path(folder) / "checkpoint-1").iterdir())
        assert checkpoint.damage(Path(folder) / "checkpoint-1") is None
    flops = counter.get_total_flops() / LENGTH
    return {"flops": flops, "parameters": model.num_parameters(), "written": written, "saving": saving}


def project(text: dict, model: dict, order: float) -> list[tuple[str, str, str]]:
    """What, how much, and where the figure is from."""
    tokens, written = TEXT * text["tokens"], model["written"]
    flops = model["flops"] * BATCH * LENGTH
    compute, compute_here = (flops / (gpus * PEAK * UTILISATION) for gpus in (GPUS, GPUS // MACHINES))
    gradients = 4 * model["parameters"]
    network = 2 * (MACHINES - 1) / MACHINES * gradients / NETWORK
    step = compute + network
    pack = TEXT / text["pack"] / CORES / 60
    core, computed = f"measured, {text['bytes'] / 1e6:.0f} MB of text, one core", "computed"
    wire = "assumed: 100 Gbit/s, no overlap"
    gpu = f"assumed: A100, {UTILISATION:.0%} of {PEAK / 1e12:.0f} TFLOP/s (bfloat16)"
    rate, per_weight = written / model["saving"] / 1e6, written / model["parameters"]
    return [
        ("reading all text once, for the tokenizer", f"{TEXT / text['read'] / 60:.0f} min at {text['read'] / 1e6:.0f} MB/s", core),
        ("learning the tokenizer from 50 MB of it", f"{SAMPLE / text['learn']:.0f} core-seconds", core),
        ("tokenizing and packing", f"{text['pack'] / 1e6:.1f} MB/s a core", core),
        (f"packing on a machine of {CORES} cores", f"{pack:.0f} min", "computed, if cores do not wait for each other"),
        ("tokens; passes over them", f"{tokens / 1e9:.0f} billion; {STEPS * BATCH * LENGTH / tokens:.1f}", computed),
        ("packed blocks on the disk of each machine", f"{4 * (LENGTH + 1) * tokens / LENGTH / 1e9:.0f} GB", computed),
        ("the order of an epoch, in each process", f"{order:.1f} s, {8 * tokens / LENGTH / 1e6:.0f} MB", "measured"),
        ("a step of 256 x 512 tokens", f"{flops / 1e12:.0f} TFLOP", "counted"),
        (f"computing it on {GPUS} GPUs", f"{1000 * compute:.0f} ms", gpu),
        ("summing gradients over 8 machines", f"{1000 * network:.0f} ms for {gradients / 1e6:.0f} MB", wire),
        (f"computing it on the {GPUS // MACHINES} GPUs of one machine", f"{1000 * compute_here:.0f} ms", gpu),
        (f"{STEPS:,} steps on {GPUS} GPUs", f"{STEPS * step / 3600:.0f} h, {compute / step:.0%} computing", computed),
        ("a checkpoint", f"{written / 1e9:.2f} GB, {per_weight:.1f} bytes a weight", "measured"),
        ("writing, hashing and syncing it", f"{model['saving']:.0f} s at {rate:.0f} MB/s", "measured, on a busy machine"),
        ("steps in that time", f"{model['saving'] / step:.0f}", computed),
    ]  # fmt: skip


def main() -> None:
    sample_by = sys.argv[3] if "--sample_by" in sys.argv else "line"
    text, batch = measure_text(
        CorpusArguments(
            train_file=sys.argv[1:2], sample_by=sample_by, max_seq_length=LENGTH, preprocessing_num_workers=1
        )
    )
    _, order = core_seconds(lambda: np.random.default_rng(0).permutation(int(TEXT * text["tokens"] / LENGTH)))
    rows = project(text, measure_model(batch), order)
    for row in rows:
        print(f"{row[0]:44} {row[1]:30} {row[2]}")
    command = f"python benchmarks/projection.py my_texts/ --sample_by {sample_by}"
    found = [{"what": what, "command": command, "figures": {"value": value, "how": how}} for what, value, how in rows]
    render.write("projection.electra_base", found)


if __name__ == "__main__":
    main()
