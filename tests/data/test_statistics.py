"""Counts of tokens near each other and in the same passage, against a count by hand, and the vectors that are made of them."""

import io
import math
import zipfile
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from fixtures.labelled import raw_lines
from scipy import sparse

from hf_tiny import InputError
from hf_tiny.data import statistics
from hf_tiny.data.corpus import Corpus, CorpusArguments, _files
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(raw_lines(100), TokenizerArguments(vocab_size=200), model_max_length=64)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Several files of blocks, in a cache of its own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("hf_tiny.data.corpus.SHARD_BYTES", 4000)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(raw_lines(400)), encoding="utf-8")
    return Corpus(CorpusArguments(train_file=[str(path)], max_seq_length=32, preprocessing_num_workers=1))


def by_hand(texts, size: int) -> Counter:
    """A token and a later one of the same text, with weights of 60 / distance; pairs of different tokens in the same 32,
    with weights of 60 / the square root of how many there are; how often each token occurs."""
    found = Counter()
    for text in texts:
        for i, one in enumerate(text):
            for distance, other in enumerate(text[i + 1 : i + 6], 1):
                found[one, other] += 60 // distance
        for first in range(0, len(text), 32):
            passage = sorted(set(text[first : first + 32]))
            for one, other in combinations(passage, 2):
                found[size + one, other] += round(60 / math.sqrt(len(passage)))
        found.update((2 * size, token) for token in text)
    return found


def entries(counts) -> dict:
    found = counts.tocoo()
    return {(int(i), int(j)): int(n) for i, j, n in zip(*found.coords, found.data, strict=True)}


def test_counts_are_those_of_a_count_by_hand(corpus, tokenizer):
    plan = corpus.packings(tokenizer)["train"]
    texts = [text for number in range(len(plan.shards)) for text in plan.texts(number)]
    assert len(texts) > 300
    counts = corpus.pair_counts(tokenizer)
    assert entries(counts) == by_hand(texts, len(tokenizer))
    assert counts.dtype == np.int64
    assert statistics.num_tokens(counts) == sum(map(len, texts))


def test_texts_are_counted_each_by_itself(monkeypatch):
    texts = [[1, 2, 3, 1], [3], [], [2, 2, 1, 4, 4, 4, 1, 0], [0, 1, 4] * 11, [3, 2] * 32, [1]]
    assert entries(statistics.text_counts(texts, 5)) == by_hand(texts, 5)
    for many in (1, 20, 100):  # tokens at once
        monkeypatch.setattr(statistics, "TOKENS", many)
        assert entries(statistics.text_counts(iter(texts), 5)) == by_hand(texts, 5)
    assert statistics.text_counts([], 5).nnz == 0


def same(one, other) -> bool:
    return all(
        np.array_equal(a, b) for a, b in zip(*((c.indptr, c.indices, c.data) for c in (one, other)), strict=True)
    )


def test_the_same_however_the_work_is_divided_and_blocks_are_made(corpus, tokenizer, tmp_path):
    plan, counts = corpus.packings(tokenizer)["train"], corpus.pair_counts(tokenizer)
    groups, folder = list(_files(plan).values()), tmp_path / "cache" / "hf_tiny_statistics"
    assert len(groups) > 3
    for divided, workers in ((groups, 1), (groups, 2), ([[number] for group in groups for number in group], 1)):
        (kept,) = folder.glob("*.npz")
        kept.unlink()
        assert same(statistics.corpus_counts(plan, divided, len(tokenizer), workers), counts)
    other = replace(plan, length=16, seed=plan.seed + 1)
    assert same(statistics.corpus_counts(other, groups, len(tokenizer), 1), counts)
    assert len(list(folder.glob("*.npz"))) == 1  # blocks of another length have the same texts


def test_a_damaged_or_foreign_cache_is_counted_again(corpus, tokenizer, tmp_path, caplog):
    first = corpus.pair_counts(tokenizer)
    (kept,) = (tmp_path / "cache" / "hf_tiny_statistics").glob("*.npz")
    kept.write_bytes(kept.read_bytes()[:100])
    assert same(corpus.pair_counts(tokenizer), first) and f"{kept} is damaged" in caplog.text
    from scipy import sparse

    sparse.save_npz(kept, first[:50][:, :50].tocsr())
    assert same(corpus.pair_counts(tokenizer), first) and caplog.text.count(f"{kept} is damaged") == 2


def test_a_disk_that_fails_after_the_check_gets_a_message(corpus, tokenizer, monkeypatch):
    corpus.pair_counts(tokenizer)
    monkeypatch.setattr(sparse, "load_npz", lambda file: zipfile.ZipFile(io.BytesIO(b"what a failing disk gives")))
    with pytest.raises(InputError, match=r"hf_tiny_statistics.*the cache cannot be read .*HF_DATASETS_CACHE"):
        corpus.pair_counts(tokenizer)


def test_a_large_corpus_is_sampled_and_rare_pairs_are_dropped(corpus, tokenizer, monkeypatch, caplog):
    whole = corpus.pair_counts(tokenizer)
    monkeypatch.setattr(statistics, "MOST_SHARDS", 2)
    with caplog.at_level("INFO", logger="hf_tiny"):
        part = corpus.pair_counts(tokenizer)
    assert 0 < part.sum() < 0.7 * whole.sum() and "Pairs of tokens are counted in every" in caplog.text
    monkeypatch.setattr(statistics, "MOST_SHARDS", 64)
    monkeypatch.setattr(statistics, "FORMAT_VERSION", -1)
    size = len(tokenizer)
    near, together = whole[:size].nnz, whole[size:-1].nnz
    monkeypatch.setattr(statistics, "MOST_PAIRS", min(near, together) // 4)
    few = corpus.pair_counts(tokenizer)
    assert few[:size].nnz <= near // 4 and few[size:-1].nnz <= together // 4
    assert (
        statistics.num_tokens(few) == statistics.num_tokens(whole)
        and "of the rarest pairs of tokens are left out" in caplog.text
    )
    top = max(entries(whole), key=entries(whole).get)
    assert top in entries(few)  # the most frequent stays


def test_frequencies_are_those_of_the_text():
    texts = [
        [1, 2, 1, 3] * 50,
        [1, 3] * 50,
    ]  # token 1 is twice as frequent as 3, and 3 twice as 2; 0 and 4 do not occur
    found = np.exp(statistics.log_frequencies(statistics.text_counts(texts, 5)))
    assert found.mean() == pytest.approx(1)
    assert found[[1, 3, 2]] / found.sum() == pytest.approx([150 / 300, 100 / 300, 50 / 300], rel=0.02)
    assert found[0] == found[4] == pytest.approx(found[2] / 101, rel=1e-5)


def test_before_and_after_are_two_contexts():
    """Tokens 1 and 2 have the same neighbours, but one of them in front of 3 and the other behind it."""
    vectors = statistics.token_vectors(statistics.text_counts([[1, 3], [3, 2], [4, 3], [3, 5]] * 50, 6), 6)[:, :3]
    directions = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    assert directions[1] @ directions[4] > 0.99 and directions[2] @ directions[5] > 0.99
    assert abs(directions[1] @ directions[2]) < 0.01


def exact(dense: np.ndarray, size: int) -> np.ndarray:
    sums, contexts = dense.sum(1), dense.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        smoothed = contexts**0.75 / (contexts**0.75).sum()
        information = np.nan_to_num(np.maximum(np.log(dense / sums[:, None] / smoothed), 0))
    left, scales, _ = np.linalg.svd(information)
    vectors = (left * np.sqrt(scales))[:, :size]
    return vectors / np.linalg.norm(vectors[sums > 0], axis=1).mean()


def test_vectors_are_those_of_exact_decompositions():
    """Tokens 0 and 1 stand in the same places, 2 and 3 in others."""
    numbers = np.random.default_rng(0)
    texts = [[numbers.integers(2) + 2 * side, 4 + side, numbers.integers(2) + 2 * side] for side in (0, 1) * 200]
    counts = statistics.text_counts([list(map(int, text)) for text in texts], 8)
    vectors = statistics.token_vectors(counts, 7)
    assert vectors.shape == (8, 7) and vectors.dtype == np.float32
    assert not vectors[6:].any()  # they do not occur
    near, together = np.split(counts.toarray()[:-1].astype(float), 2)
    parts = (
        exact(np.hstack([near, near.T]), 4),
        exact(together + together.T, 3),
    )  # after a token and before it; in its text
    for found, expected in zip((vectors[:, :4], vectors[:, 4:]), parts, strict=True):
        np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4)
        directions = found[:4] / np.linalg.norm(found[:4], axis=1, keepdims=True)
        assert directions[0] @ directions[1] > 0.9 and abs(directions[0] @ directions[2]) < 0.1
    assert statistics.token_vectors(counts, 100).shape == (8, 12)  # of each no more dimensions than tokens


def test_what_says_nothing_gives_no_vectors():
    for texts, size in (([], 5), ([[3]], 5), ([[3, 3, 3]], 5), ([[0, 0]], 1)):
        vectors = statistics.token_vectors(statistics.text_counts(texts, size), 4)
        assert vectors.shape == (size, 0)
    vectors = statistics.token_vectors(statistics.text_counts([[0, 1, 2, 3]], 5), 1)
    assert vectors.shape == (5, 1) and np.isfinite(vectors).all()


def test_words_of_one_subject_are_near_though_they_never_are_neighbours():
    """Each text has four words of one of two subjects, six others apart, of which any may stand in both."""
    numbers = np.random.default_rng(0)
    texts = [
        [token for word in numbers.permutation(5)[:4] for token in (5 * side + word, *numbers.integers(10, 40, 6))]
        for side in (0, 1) * 500
    ]
    counts = statistics.text_counts([list(map(int, text)) for text in texts], 40)
    vectors = statistics.token_vectors(counts, 8)[:10]
    near, together = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in np.split(vectors, 2, axis=1))
    subjects, neighbours = ((part[:5] @ part[:5].T, part[:5] @ part[5:].T) for part in (together, near))
    assert subjects[0].mean() > 0.8 and subjects[1].mean() < 0.1
    assert abs(neighbours[0].mean() - neighbours[1].mean()) < 0.2
