"""What a corpus says of its words before any model is trained: tokens that keep the same company get similar vectors.

Truncated singular value decompositions of how often tokens stand near each other, which tells words of one kind, and of how
often they stand in the same passage, which tells words of one subject and mood (Levy & Goldberg, 2014; Landauer & Dumais,
1997). It takes seconds, and a model whose embeddings start from it need not learn what words mean. scipy and scikit-learn are
loaded by what needs them.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from hf_tiny.data import cache, packing
from hf_tiny.data.packing import Packing
from hf_tiny.data.workers import workers

logger = logging.getLogger(__name__)

WEIGHTS = (60, 30, 20, 15, 12)  # of tokens 1, 2, ... apart: 60 / distance, so that counts are whole numbers
LEAST_TOKENS = 5  # of text for each token of the vocabulary, on average: with fewer, counts are chance
PASSAGE = 32  # tokens of a text that count as one passage
PASSAGE_WEIGHT = 60  # divided by the square root of the number of different tokens in it
SMOOTHING = 0.75  # of the frequencies of contexts: rare ones weigh less (Levy, Goldberg & Dagan, 2015)
MOST_SHARDS = 64  # of a larger corpus a sample, about 256 MB, says as much
MOST_PAIRS = 25_000_000  # of each kind, about 300 MB
TOKENS = 1 << 18  # counted at once
NO_TOKEN = -1
FORMAT_VERSION = 4  # Raise it when the same texts give other counts than before.


def corpus_counts(plan: Packing, groups: Sequence[Sequence[int]], size: int, most: int | None = None):
    """What the texts of a split say of each token: a sparse matrix (2 size + 1, size) of whole numbers. Near pairs, of a token
    (row) and a later one (column); below them pairs in the same passage, of a token and one with a greater number; in the
    last row how often each token occurs. It is the same however the work is divided.

    groups: of shards, each counted at once. size: of the vocabulary. most: processes that count.
    """
    from scipy import sparse

    stride = max(1, len(plan.shards) // MOST_SHARDS)
    texts = replace(plan, length=0, cls=0, sep=0, seed=0)  # texts are the same in other blocks
    weights = (WEIGHTS, PASSAGE, PASSAGE_WEIGHT)
    about = repr((packing.digest(plan.shards, texts), stride, weights, FORMAT_VERSION))
    name = f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.npz"

    def count(draft: Path) -> None:
        if stride > 1:
            logger.info(f"Pairs of tokens are counted in every {stride}th of {len(groups)} parts of the corpus.")
        chosen = groups[::stride]
        with workers(most, len(chosen)) as each, open(draft, "wb") as file:  # given a name, scipy would add its suffix
            counted = each(partial(_some_shards, plan, size), chosen)
            counted = tqdm(counted, "Counting pairs of tokens", len(chosen), unit=" files")
            sparse.save_npz(file, _total(counted, size), compressed=False)

    file = cache.kept(cache.place("hf_tiny_statistics", name), count)
    with cache.readable(file):
        return sparse.load_npz(file)


def text_counts(texts: Iterable[Sequence[int]], size: int):
    """The same of texts, each by itself."""
    return _total((_counts(row, size) for row in _rows(texts)), size)


# Counting


def _some_shards(plan: Packing, size: int, shards: Sequence[int]):
    return text_counts(chain.from_iterable(map(plan.texts, shards)), size)


def _rows(texts: Iterable[Sequence[int]]) -> Iterator[np.ndarray]:
    """Some texts at a time, one after the other, too far apart to be near."""
    apart, row = [NO_TOKEN] * len(WEIGHTS), []
    for text in texts:
        row += text
        row += apart
        if len(row) > TOKENS:
            yield np.array(row)
            row = []
    if row:
        yield np.array(row)


def _counts(row: np.ndarray, size: int):
    from scipy import sparse

    often = np.bincount(row[row != NO_TOKEN], minlength=size)
    return sparse.vstack((_near(row, size), _together(row, size), sparse.csr_array(often[None])), format="csr")


def _near(row: np.ndarray, size: int):
    """The weights of the pairs (a token, a later one)."""
    from scipy import sparse

    near = sparse.csr_array((size, size), dtype=np.int64)
    for distance, weight in enumerate(WEIGHTS, 1):
        first, second = row[:-distance], row[distance:]
        both = (first != NO_TOKEN) & (second != NO_TOKEN)
        weights = np.full(both.sum(), weight, dtype=np.int64)
        near = near + sparse.coo_array((weights, (first[both], second[both])), shape=near.shape).tocsr()
    return near


def _together(row: np.ndarray, size: int):
    """The weights of the pairs of different tokens within each passage."""
    from scipy import sparse

    places, there = np.arange(row.size), row != NO_TOKEN
    text_starts = np.maximum.accumulate(np.where(there, 0, places + 1))
    passages = np.cumsum(there & ((places - text_starts) % PASSAGE == 0))[there] - 1
    shape = (passages.max(initial=-1) + 1, size)
    found = sparse.coo_array((np.ones(passages.size, dtype=np.int64), (passages, row[there])), shape=shape).tocsr()
    found.data[:] = 1  # a word that is repeated is one
    weights = np.rint(PASSAGE_WEIGHT / np.sqrt(found.sum(1))).astype(np.int64)
    return sparse.triu(found.T @ sparse.diags_array(weights, dtype=np.int64) @ found, k=1)


def _total(parts: Iterable, size: int):
    """The sum. Where pairs of a kind become too many, the rarest are dropped."""
    from scipy import sparse

    total, dropped = sparse.csr_array((2 * size + 1, size), dtype=np.int64), 0
    for part in parts:
        total = total + part
        for first in (0, size):
            pairs = total.data[slice(*total.indptr[[first, first + size]])]
            if len(pairs) > MOST_PAIRS:
                place = len(pairs) - MOST_PAIRS // 2
                rare = pairs <= np.partition(pairs, place)[place]
                dropped += int(rare.sum())
                pairs[rare] = 0
                total.eliminate_zeros()
    if dropped:
        logger.warning(f"{dropped:,} of the rarest pairs of tokens are left out: at most {MOST_PAIRS:,} are kept.")
    return total.tocsr()


# From counts to vectors


def num_tokens(counts) -> int:
    """Of the text that was counted."""
    return int(counts[[-1]].sum())


def log_frequencies(counts) -> np.ndarray:
    """(vocabulary,), float32: the logarithm of how frequent each token is, a mean token having 0. A token that does not occur
    counts as half a one."""
    often = counts[[-1]].toarray()[0] + 0.5
    return np.log(often / often.mean()).astype(np.float32)


def token_vectors(counts, size: int) -> np.ndarray:
    """(vocabulary, at most `size`), float32; zeros for a token that stands near no other. Half of the dimensions are of the
    words that stand near, a word before and the same one after being two contexts, half of those in the same passage."""
    from scipy import sparse

    tokens, counts = counts.shape[1], counts.astype(np.float32)
    near, together = counts[:tokens], counts[tokens:-1]
    return np.concatenate(
        (
            _decomposed(sparse.hstack((near, near.T), format="csr"), size - size // 2),
            _decomposed((together + together.T).tocsr(), size // 2),
        ),
        axis=1,
    )


def _decomposed(counts, size: int) -> np.ndarray:
    """Positive pointwise mutual information with smoothed contexts; U sqrt(S) of its randomised decomposition U S V, with a
    mean length of 1."""
    from sklearn.utils.extmath import randomized_svd

    sums, contexts = (np.asarray(counts.sum(axis, dtype=np.float64)) for axis in (1, 0))
    contexts **= SMOOTHING
    contexts /= contexts.sum() or 1
    rows = np.repeat(np.arange(counts.shape[0], dtype=np.int32), np.diff(counts.indptr))
    information = np.log(counts.data / sums[rows] / contexts[counts.indices])
    counts.data = np.maximum(information, 0, dtype=np.float32)
    counts.eliminate_zeros()
    rank = min(size, np.count_nonzero(np.diff(counts.indptr)), len(np.unique(counts.indices)))
    if not rank:
        return np.zeros((counts.shape[0], 0), dtype=np.float32)
    left, scales, _ = randomized_svd(counts, rank, random_state=0)
    vectors = (left * np.sqrt(scales)).astype(np.float32)
    vectors[np.diff(counts.indptr) == 0] = 0
    return vectors / np.linalg.norm(vectors[sums > 0], axis=1).mean()
