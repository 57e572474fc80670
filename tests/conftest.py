"""What several test files need: a small real tokenizer and blocks of its text. No network, a fixed seed."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported
# Some virtual machines announce AMX and die of "illegal instruction" when torch uses it for bfloat16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests themselves run under nohup
CORES = sorted(os.sched_getaffinity(0))
if "PYTEST_XDIST_WORKER" in os.environ:
    # A core for each worker and what it starts: threads that wait for each other on a shared core are ten times slower.
    os.sched_setaffinity(0, {CORES[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(CORES)]})

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a small generator proposes tokens and a discriminator finds the replaced ones",
    "pack my box with five dozen liquor jugs",
    "every row is seen once in an epoch, and every epoch has its own order",
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    AcceleratorState._reset_state()  # an earlier test of this process may have had another precision


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS * 4, TokenizerArguments(vocab_size=120), model_max_length=32)


@pytest.fixture(scope="session")
def blocks(tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """21 full blocks of 16 tokens, [CLS] A [SEP] B [SEP], all different."""
    generator = np.random.default_rng(0)
    rows = []
    for start in generator.integers(5, 12, size=21):
        ids = generator.integers(5, len(tokenizer), size=16)
        ids[0], ids[start - 1], ids[-1] = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.sep_token_id
        rows.append({"input_ids": ids.astype(np.int32), "segment_start": int(start)})
    return Dataset.from_list(rows)
