"""python benchmarks/predict.py [--quick]

`hf-tiny predict` and transformers' `pipeline(batch_size=32)` on the same texts with the same weights, taking turns in one
process, from a list of texts to a list of answers:

- hf_tiny's ELECTRA as `hf-tiny predict` uses it: windows sorted by length, batches with a budget of tokens;
- the same model in a pipeline, with the texts as they come;
- its native twin in a pipeline, with the texts as they come;
- its native twin in a pipeline, with the texts sorted by their number of characters: a peer who has taken some trouble.

One model (ELECTRA with a width of 128 and 4 layers, random weights) gives each text a label, another each word a tag. The
texts are paragraphs of Python documentation, of 6 to 83 words. Ratios are our texts per second divided by the peer's: above 1,
hf_tiny is faster. `same`: the share of the answers, labels or tags of words, that are those of the peer. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import pipeline
from transformers.utils import logging

from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
    predict,
)
from hf_tiny.convert import convert
from hf_tiny.models.words import split_words
from hf_tiny.tasks import label_names
from hf_tiny.tasks.classify import ClassifyArguments, TextTask
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 512}
NATIVE = {
    "position_embedding_type": "absolute",
    "norm_first": False,
    "classifier_pooling": "cls",
    "initializer_range": 0.1,
}
BATCH_SIZE, VOCABULARY, LABELS = 32, 4096, [f"label {number}" for number in range(8)]
MODELS = {"classify": HfTinyElectraForSequenceClassification, "tag": HfTinyElectraForTokenClassification}
OURS, SAME = "hf_tiny", "pipeline, the same model"
NATIVE_TWIN, SORTED = "pipeline, native twin", "pipeline, native twin, sorted"
Answers = list  # of each text its label, or the tags of its words


class Work:
    """A model with random weights in two folders, for hf_tiny and native; and who answers with it."""

    def __init__(self, task: str, tokenizer, folder: Path):
        torch.manual_seed(0)
        kind, own, native = MODELS[task], folder / task, folder / f"{task}-native"
        config = HfTinyElectraConfig(vocab_size=len(tokenizer), **SIZES, **NATIVE, **label_names(LABELS))
        kind(config).save_pretrained(own)
        tokenizer.save_pretrained(own)
        convert(str(own), native)
        self.task, self.model = task, predict.build(predict.load(str(own)))
        name = {"classify": "text-classification", "tag": "token-classification"}[task]
        self.pipelines = {
            side: pipeline(name, model=str(place), device="cpu", batch_size=BATCH_SIZE)
            for side, place in ((SAME, own), (NATIVE_TWIN, native), (SORTED, native))
        }

    def answer(self, side: str, texts: list[str]) -> Callable[[], Answers]:
        """Answers that can be timed; what makes them comparable is done after that."""
        if side == OURS:
            items = list(self.model.from_texts([("", text) for text in texts]))
            rows = [row for _, row in predict.predicted(self.model, items)]
            return lambda: [row.split("\t")[0] if self.task == "classify" else tags(row) for row in rows]
        order = sorted(range(len(texts)), key=lambda place: len(texts[place])) if side == SORTED else range(len(texts))
        found = dict(zip(order, self.pipelines[side]([texts[place] for place in order]), strict=True))
        return lambda: [compared(texts[place], found[place]) for place in range(len(texts))]


def tags(columns: str) -> list[str]:
    return [line.partition(" ")[2] for line in columns.splitlines() if line]


def compared(text: str, found: dict | list[dict]) -> str | list[str]:
    """A pipeline's label; or of each word what the pipeline says of its first token."""
    if isinstance(found, dict):
        return found["label"]
    of_tokens, place, words = {token["start"]: token["entity"] for token in found}, 0, []
    for word in split_words(text):
        place = text.index(word, place)
        words.append(of_tokens[place])
        place += len(word)
    return words


def agreement(one: Answers, other: Answers) -> float:
    """The share of labels, or of the tags of words, that are the same."""
    pairs = [
        (a, b) for left, right in zip(one, other, strict=True)
        for a, b in zip(*(([side] if isinstance(side, str) else side) for side in (left, right)), strict=True)
    ]  # fmt: skip
    return sum(a == b for a, b in pairs) / len(pairs)


def measure(work: Work, texts: list[str], repetitions: int) -> dict[str, dict]:
    sides = [OURS, *work.pipelines]
    seconds, answers = {side: [] for side in sides}, {}
    for side in sides:
        answers[side] = work.answer(side, texts[: 4 * BATCH_SIZE])()  # also warms up
    for turn in range(repetitions):
        for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:  # so that nobody is always first
            start = time.perf_counter()
            finish = work.answer(side, texts)
            seconds[side].append(time.perf_counter() - start)
            answers[side] = finish()
    print(f"\n{work.task}: {len(texts)} texts\n{'':30} texts/s   ours / peer (range)      same")
    result = {}
    for side in sides:
        ratios = [theirs / mine for mine, theirs in zip(seconds[OURS], seconds[side], strict=True)]
        spread, same = f"{min(ratios):.2f} to {max(ratios):.2f}", agreement(answers[OURS], answers[side])
        rate, ratio = len(texts) / statistics.median(seconds[side]), statistics.median(ratios)
        print(f"{side:30} {rate:7.0f}   {f'{ratio:.2f} ({spread})':24} {same:.4f}")
        result[side] = {"ratio": round(ratio, 3), "spread": spread, "same": round(same, 5)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer texts and turns: a check, not a measurement")
    parser.add_argument("--repetitions", type=int, default=None, help="default: 5; 2 when quick")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    logging.set_verbosity_error()
    repetitions = given.repetitions or (2 if given.quick else 5)
    texts = [text.text for text in TextTask(ClassifyArguments()).splits()["train"]][: 200 if given.quick else 600]
    tokenizer = train_tokenizer(texts, TokenizerArguments(vocab_size=VOCABULARY), model_max_length=512)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for task in MODELS:
            found[task] = measure(Work(task, tokenizer, Path(folder)), texts, repetitions)
    keys = {SAME: "", NATIVE_TWIN: "_native", SORTED: "_native_sorted"}
    figures = {
        f"predict_{task}_{name}{key}": found[task][side][name]
        for task in MODELS
        for side, key in keys.items()
        for name in ("ratio", "spread", "same")
    }
    print(json.dumps({**figures, "repetitions": repetitions, "threads": given.threads}))


if __name__ == "__main__":
    main()
