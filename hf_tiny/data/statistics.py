"""What a corpus says of its words before any model is trained: tokens that keep the same company get similar vectors.

A truncated singular value decomposition of how often tokens stand near each other (Levy & Goldberg, 2014). It takes seconds,
and a model whose embeddings start from it need not learn what words mean. scipy and scikit-learn are loaded by what needs
them.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from hf_tiny.data import cache, packing
from hf_tiny.data.packing import Packing
from hf_tiny.data.workers import workers

logger = logging.getLogger(__name__)

WEIGHTS = (60, 30, 20, 15, 12)  # of tokens 1, 2, ... apart: 60 / distance, so that counts are whole numbers
LEAST_TOKENS = 5  # of text for each token of the vocabulary, on average: with fewer, counts are chance
SMOOTHING = 0.75  # of the frequencies of contexts: rare ones weigh less (Levy, Goldberg & Dagan, 2015)
MOST_SHARDS = 64  # of a larger corpus a sample, about 256 MB, says as much
MOST_PAIRS = 50_000_000  # about 600 MB
TOKENS = 1 << 17  # counted at once
NO_TOKEN = -1
FORMAT_VERSION = 2  # Raise it when the same blocks give other counts than before.


def corpus_counts(plan: Packing, files: dict[Path, list[int]], size: int, most: int | None = None):
    """How often tokens stand near each other in the blocks of a split: a sparse matrix (size, size) of whole numbers, for a
    token (row) and a later one (column). It is the same however the work is divided, and whether the blocks are in the cache
    or not.

    files: of the blocks in the cache, and the shards that each is made of.
    size: of the vocabulary.
    most: processes that count.
    """
    from scipy import sparse

    stride = max(1, len(plan.shards) // MOST_SHARDS)
    about = repr((packing.digest(plan.shards, plan), stride, WEIGHTS, FORMAT_VERSION))
    name = f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.npz"

    def count(draft: Path) -> None:
        if stride > 1:
            logger.info(f"Pairs of tokens are counted in every {stride}th of {len(files)} parts of the corpus.")
        chosen = dict(islice(files.items(), 0, None, stride))
        with workers(most, len(chosen)) as each, open(draft, "wb") as file:  # given a name, scipy would add its suffix
            counted = each(partial(_one_file, plan, size), chosen.keys(), chosen.values())
            counted = tqdm(counted, "Counting pairs of tokens", len(chosen), unit=" files")
            sparse.save_npz(file, _total(counted, size), compressed=False)

    file = cache.kept(cache.place("hf_tiny_statistics", name), count)
    with cache.readable(file):
        return sparse.load_npz(file)


def text_counts(groups: Iterable[Sequence[Sequence[int]]], size: int):
    """The same of texts, each by itself, a group of them at a time."""
    apart = [NO_TOKEN] * len(WEIGHTS)
    rows = (np.fromiter(chain.from_iterable((*text, *apart) for text in texts), dtype=np.int32) for texts in groups)
    return _total((_near(row[None], size) for row in rows), size)


# Counting


def _one_file(plan: Packing, size: int, file: Path, shards: list[int]):
    special = (plan.cls, plan.sep)
    return sum(_near(np.where(np.isin(rows, special), NO_TOKEN, rows), size) for rows in _rows(plan, file, shards))


def _rows(plan: Packing, file: Path, shards: list[int]) -> Iterator[np.ndarray]:
    """Some blocks at a time, (blocks, length): from the cache or, where there is none, from the text."""
    count = max(1, TOKENS // plan.length)
    if cache.damage_of(file) is None:
        with pa.memory_map(str(file)) as source:
            for batch in pa.ipc.open_stream(source):
                rows = batch.column("input_ids").flatten().to_numpy().reshape(-1, plan.length)
                yield from (rows[first : first + count] for first in range(0, len(rows), count))
    else:
        blocks = (block["input_ids"] for number in shards for block in plan.blocks(number, Counter()))
        while rows := list(islice(blocks, count)):
            yield np.array(rows)


def _near(rows: np.ndarray, size: int):
    """The weights of the pairs (a token, a later one) within each row."""
    from scipy import sparse

    near = sparse.csr_array((size, size), dtype=np.int64)
    for distance, weight in enumerate(WEIGHTS, 1):
        first, second = rows[:, :-distance], rows[:, distance:]
        both = (first != NO_TOKEN) & (second != NO_TOKEN)
        weights = np.full(both.sum(), weight, dtype=np.int64)
        near = near + sparse.coo_array((weights, (first[both], second[both])), shape=near.shape).tocsr()
    return near


def _total(parts: Iterable, size: int):
    """The sum. Where pairs become too many, the rarest are dropped."""
    from scipy import sparse

    total, dropped = sparse.csr_array((size, size), dtype=np.int64), 0
    for part in parts:
        total = total + part
        if total.nnz > MOST_PAIRS:
            place = total.nnz - MOST_PAIRS // 2
            rare = total.data <= np.partition(total.data, place)[place]
            dropped += int(rare.sum())
            total.data[rare] = 0
            total.eliminate_zeros()
    if dropped:
        logger.warning(f"{dropped:,} of the rarest pairs of tokens are left out: at most {MOST_PAIRS:,} are kept.")
    return total.tocsr()


# From counts to vectors


def num_tokens(counts) -> int:
    """Of the text that was counted, nearly: one at the end of a text stands before fewer than the others."""
    return int(counts.sum() // sum(WEIGHTS))


def _both_sides(counts) -> np.ndarray:
    """(2, vocabulary): how often each token has another after it, and before it."""
    return np.stack([np.asarray(counts.sum(axis), dtype=np.float64) for axis in (1, 0)])


def log_frequencies(counts) -> np.ndarray:
    """(vocabulary,), float32: the logarithm of how frequent each token is, a mean token having 0. A token that stands near no
    other counts as half a one."""
    sums = _both_sides(counts).sum(0) + sum(WEIGHTS)
    return np.log(sums / sums.mean()).astype(np.float32)


def token_vectors(counts, size: int) -> np.ndarray:
    """(vocabulary, at most `size`), float32; zeros for a token that stands near no other.

    Positive pointwise mutual information with smoothed contexts, a word before and the same one after being two of them; U
    sqrt(S) of its randomised decomposition U S V.
    """
    from scipy import sparse
    from sklearn.utils.extmath import randomized_svd

    after, before = _both_sides(counts)
    known = np.flatnonzero(after + before)
    later = counts[known][:, known]
    near, sums = sparse.hstack((later, later.T)).tocoo(), (after + before)[known]
    contexts = np.concatenate((before[known], after[known])) ** SMOOTHING
    contexts /= contexts.sum()
    information = np.log(near.data / sums[near.row] / contexts[near.col])
    matrix = sparse.csr_array((np.maximum(information, 0).astype(np.float32), (near.row, near.col)), shape=near.shape)
    matrix.eliminate_zeros()
    left, scales, _ = randomized_svd(matrix, min(size, len(known)), random_state=0)
    vectors = np.zeros((counts.shape[0], len(scales)), dtype=np.float32)
    vectors[known] = left * np.sqrt(scales)
    return vectors
