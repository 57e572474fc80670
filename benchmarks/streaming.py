"""Peak memory of a stream of text and of its statistics, small and large.

python benchmarks/streaming.py                                    # 20 and 200 MB of made-up text, in 50 shards each
python benchmarks/streaming.py --text my_texts/ --text more.txt   # your own, repeated until it is enough

For each size one process makes the vocabulary, one counts pairs of tokens and makes vectors of them, and one
reads the text to its end, once: plan, packing, shuffling, masks. The last line is JSON.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

import numpy as np

SHARDS = 50


def made_up(size: int) -> bytes:
    """Lines of words of which few are frequent and many are rare."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbg가나다라마바사아자"))
    words = np.array(["".join(random.choice(letters, random.integers(1, 9))) for _ in range(20_000)])
    picked = words[np.minimum(random.zipf(1.2, size // 4), len(words)) - 1]
    lines = [" ".join(picked[start : start + 20]) for start in range(0, len(picked), 20)]
    return "\n".join(lines).encode()[:size].rsplit(b"\n", 1)[0] + b"\n"


def write(folder: Path, megabytes: int, texts: list[Path]) -> None:
    """The lines of the texts, mixed, again and again, in shards of equal size."""
    folder.mkdir(parents=True)
    size = megabytes * 1_000_000 // SHARDS
    if texts:
        lines = [line for path in texts for line in path.read_bytes().splitlines(keepends=True) if line.strip()]
    else:
        lines = made_up(2_000_000).splitlines(keepends=True)
    mixed = cycle(np.random.default_rng(0).permutation(len(lines)).tolist())
    for number in range(SHARDS):
        with open(folder / f"{number:02d}.txt", "wb") as file:
            while file.tell() < size:
                file.write(lines[next(mixed)])


def read(folder: Path, cache: Path, stage: str) -> None:
    """The vocabulary, which is then in the cache, the statistics, or one epoch of the stream; prints its figures."""
    import datasets

    from hf_tiny import tokenizer
    from hf_tiny.data import statistics
    from hf_tiny.data.corpus import Corpus, CorpusArguments
    from hf_tiny.data.masking import MaskTokens
    from hf_tiny.data.stream import StreamedBatches

    datasets.config.HF_DATASETS_CACHE = tokenizer.HF_DATASETS_CACHE = cache
    corpus = Corpus(CorpusArguments(train_file=[str(folder)], streaming=True, preprocessing_num_workers=1))
    words = tokenizer.load_tokenizer(
        tokenizer.TokenizerArguments(vocab_size=4096), corpus.documents, corpus.fingerprint
    )
    if stage == "vocabulary":
        return print(json.dumps({"vocabulary_mb": peak()}))
    if stage == "count":
        began, before = time.perf_counter(), peak()
        counts = corpus.pair_counts(words)
        counted, figures = time.perf_counter(), {"loaded_mb": before, "count_mb": peak()}
        figures["table_mb"] = sum(part.nbytes for part in (counts.data, counts.indices, counts.indptr)) >> 20
        statistics.token_vectors(counts, 128)
        figures |= {
            "count_seconds": round(counted - began, 1),
            "vectors_seconds": round(time.perf_counter() - counted, 1),
        }
        return print(json.dumps(figures))
    batches = StreamedBatches(corpus.mixed(words, lanes=1)["train"], MaskTokens(words, 0.15, 0), 32)
    began, number, tokens = time.perf_counter(), 0, 0
    while number % 100 or batches.epoch(number) < 1:
        tokens += int(batches[number]["num_items_in_batch"][-1])
        number += 1
    rate = tokens / (time.perf_counter() - began)
    print(json.dumps({"tokens": tokens, "tokens_per_second": round(rate), "stream_mb": peak()}))


def peak() -> int:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs=2, default=[20, 200])
    parser.add_argument("--text", type=Path, action="append", default=[], help="a file or folder of .txt")
    parser.add_argument("--folder", type=Path, help="where to write the corpora; by default a temporary folder")
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        return read(Path(given.read[0]), given.folder, given.read[1])
    texts = [path for text in given.text for path in (sorted(text.rglob("*.txt")) if text.is_dir() else [text])]
    figures = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for megabytes in given.megabytes:
            corpus, figures[megabytes] = Path(folder) / str(megabytes), {}
            write(corpus, megabytes, texts)
            for stage in ("vocabulary", "count", "stream"):
                command = [sys.executable, __file__, "--folder", folder, "--read", corpus, stage]
                ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                figures[megabytes] |= json.loads(ended.stdout.splitlines()[-1])
    print(
        f"{'MB of text':>12} {'tokens':>14} {'tokens/s':>10} {'MB peak: vocabulary':>20} {'stream':>8} {'counting':>10}"
    )
    for megabytes, one in figures.items():
        print(
            f"{megabytes:>12} {one['tokens']:>14,} {one['tokens_per_second']:>10,} {one['vocabulary_mb']:>20} "
            f"{one['stream_mb']:>8} {one['count_mb']:>10}"
        )
    small, large = figures.values()
    growth = {
        f"{stage}_growth_mb": large[f"{stage}_mb"] - small[f"{stage}_mb"]
        for stage in ("vocabulary", "count", "table", "stream")
    }
    print(json.dumps({"shards": SHARDS, "figures": figures, **growth}))


if __name__ == "__main__":
    main()
