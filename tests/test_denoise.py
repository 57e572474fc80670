"""Denoising: what is damaged can be mended from the target, as much is damaged as was asked for, and chance is a function
of the seed and the place."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import poisson

from hf_tiny import InputError
from hf_tiny.data.collate import Batches, SpanCorruption, TextInfilling, uniform
from hf_tiny.data.corpus import CorpusArguments, load_blocks
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

SENTENCES = [
    "The quick fox ran home.",
    "Is it late?",
    "잠은 사람에게 꼭 필요합니다.",
    'He said "no."',
    "Pi is 3.14 or so!",
]
LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer():
    texts = [" ".join(SENTENCES), *SENTENCES] * 5
    return train_tokenizer(texts, TokenizerArguments(tokenizer_model="bpe", vocab_size=480, extra_ids=12))


@pytest.fixture(scope="module")
def blocks(tokenizer):
    """As load_blocks makes them: <s> A </s> B </s>, or <s> A </s>."""
    generator = np.random.default_rng(0)
    ids = generator.integers(len(tokenizer) - 150, len(tokenizer), size=(600, LENGTH))
    ids[:, 0], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    ids[::2, 30] = tokenizer.sep_token_id
    return {"input_ids": ids, "segment_start": np.full(600, 31)}


def contents(tokenizer, blocks) -> list[list[int]]:
    return [[i for i in row if i not in (1, 2)] for row in blocks["input_ids"].tolist()]


def sides(batch, tokenizer) -> list[tuple[list[int], list[int]]]:
    """Each pair without its padding; both sides end with </s>, and only there."""
    pairs = []
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        source, target = ids[mask.bool()].tolist(), labels[labels != -100].tolist()
        for side in (source, target):
            assert side.index(tokenizer.eos_token_id) == len(side) - 1
        assert (ids[~mask.bool()] == tokenizer.pad_token_id).all()
        pairs.append((source[:-1], target[:-1]))
    assert batch["num_items_in_batch"].tolist() == [
        sum(len(target) + 1 for _, target in pairs),
        sum(len(source) + len(target) + 2 for source, target in pairs),
    ]
    return pairs


def kinds(tokenizer):
    return [
        TextInfilling(tokenizer, 3),
        TextInfilling(tokenizer, 3, permute_sentences=False),
        SpanCorruption(tokenizer, 3),
    ]


def test_special_ids(tokenizer):
    assert (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.eos_token_id) == (1, 2, 2)


@pytest.mark.parametrize("density", [0.05, 0.15, 0.5])
def test_spans_can_be_put_back(tokenizer, blocks, density):
    batch = SpanCorruption(tokenizer, 1, density, mean_span_length=3 if density < 0.5 else 8)(blocks, 0)
    sentinels = tokenizer.convert_tokens_to_ids([f"<extra_id_{n}>" for n in range(12)])
    for (source, target), text in zip(sides(batch, tokenizer), contents(tokenizer, blocks), strict=True):
        spans = {}
        for token in target:
            if token in sentinels:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        assert list(spans) == sentinels[: len(spans)] and all(spans.values())
        assert [token for token in source if token in sentinels] == list(spans)  # in order, and never two in a row
        assert not any(a in sentinels and b in sentinels for a, b in pairwise(source))
        assert [token for one in source for token in spans.get(one, [one])] == text
        assert sum(map(len, spans.values())) == round(density * len(text))


def test_infilling_keeps_the_rest_in_order(tokenizer, blocks):
    batch = TextInfilling(tokenizer, 1, permute_sentences=False)(blocks, 0)
    for (source, target), text in zip(sides(batch, tokenizer), contents(tokenizer, blocks), strict=True):
        assert target == text
        kept = [token for token in source if token != tokenizer.mask_token_id]
        assert len(kept) == len(text) - round(0.3 * len(text))
        rest = iter(text)
        assert all(token in rest for token in kept)  # a subsequence
        assert not any(a == b == tokenizer.mask_token_id for a, b in pairwise(source))


def test_lengths_of_spans_are_poisson_and_some_are_empty(tokenizer):
    noise = TextInfilling(tokenizer, 0)
    numbers = uniform(0, 0, 3000, 256).reshape(3000, 2, 128)
    starts, lengths = zip(*(noise.spans(120, *own) for own in numbers), strict=True)
    assert {int(own.sum()) for own in lengths} == {36}
    for first, own in zip(starts, lengths, strict=True):
        assert first[0] >= 0 and first[-1] + own[-1] <= 120
        assert (first[1:] > first[:-1] + own[:-1]).all()  # none touches another
    drawn = np.searchsorted(noise.length_cdf, numbers[:, 0], side="right")
    shares = np.bincount(drawn.ravel(), minlength=12)[:12] / drawn.size
    np.testing.assert_allclose(shares, poisson.pmf(np.arange(12), 3), atol=0.002)
    used = np.bincount(np.concatenate(lengths), minlength=12)[:12] / sum(map(len, lengths))
    np.testing.assert_allclose(used, poisson.pmf(np.arange(12), 3), atol=0.03)  # the last of each is cut
    # No place is preferred; but at the ends, where fewer spans fit.
    covered = np.zeros(120)
    for first, own in zip(starts, lengths, strict=True):
        for start, length in zip(first, own, strict=True):
            covered[start : start + length] += 1
    assert abs(covered[10:-10] / 3000 - 0.3).max() < 0.05


def test_sentences_change_places_and_stay_whole(tokenizer):
    noise = TextInfilling(tokenizer, 0)
    parts = [tokenizer.encode(sentence, add_special_tokens=False) for sentence in SENTENCES]
    text = np.array([token for part in parts for token in part])
    orders = set()
    for numbers in uniform(0, 0, 200, len(text)):
        permuted = noise.permuted(text, numbers)
        assert sorted(permuted) == sorted(text)
        decoded = tokenizer.decode(permuted)
        assert all(sentence in decoded for sentence in SENTENCES)  # also "3.14" is not cut
        orders.add(decoded)
    assert len(orders) > 60  # of 120
    assert " ".join(SENTENCES) in tokenizer.decode(noise.permuted(text, np.arange(len(text)) / 1000))


def test_two_small_batches_are_one_large_batch_and_a_seek_is_a_walk(tokenizer, blocks):
    data = Dataset.from_dict({name: values[:40] for name, values in blocks.items()})
    for noise in kinds(tokenizer):
        small, large = (Batches(data, noise, size, seed=3) for size in (4, 8))
        for index in (0, 6, 2):  # 6: in the second epoch
            halves = [pair for half in (2 * index, 2 * index + 1) for pair in sides(small[half], tokenizer)]
            assert halves == sides(large[index], tokenizer)
        again = Batches(data, noise, 8, seed=3)[6]
        assert all(torch.equal(again[name], large[6][name]) for name in again)
        assert sides(large[0], tokenizer) != sides(large[5], tokenizer)


def test_the_noise_differs_by_seed_and_epoch(tokenizer, blocks):
    row = {name: values[:1] for name, values in blocks.items()}
    for kind in (TextInfilling, SpanCorruption):
        drawn = {str(sides(kind(tokenizer, seed)(row, first), tokenizer)) for seed in (0, 1) for first in (0, 1, 600)}
        assert len(drawn) == 6
    assert len({repr(noise) for noise in kinds(tokenizer)}) == 3  # the fingerprint of a run knows which


def test_tiny_texts_survive(tokenizer):
    for size in range(2, 8):
        ids = np.full((50, 8), tokenizer.pad_token_id)
        ids[:, 0], ids[:, 1 : size - 1], ids[:, size - 1] = 1, 300, 2
        for noise in kinds(tokenizer):
            for source, target in sides(noise({"input_ids": ids}, 0), tokenizer):
                assert source.count(300) <= size - 2 and target.count(300) <= size - 2


def test_blocks_of_raw_text(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join([" ".join(SENTENCES)] * 60), encoding="utf-8")
    arguments = CorpusArguments(train_file=[str(tmp_path / "a.txt")], max_seq_length=32, preprocessing_num_workers=1)
    data = load_blocks(arguments, tokenizer)["train"]
    ((_, target), *_) = sides(Batches(data, TextInfilling(tokenizer, 0), 4, seed=0)[0], tokenizer)
    assert tokenizer.decode(target) in " ".join(SENTENCES * 120)


def test_bad_settings(tokenizer, blocks):
    wordpiece = train_tokenizer(SENTENCES * 9, TokenizerArguments(vocab_size=300))
    for kind in (TextInfilling, SpanCorruption):
        with pytest.raises(InputError, match="no eos_token"):
            kind(wordpiece, 0)
        with pytest.raises(InputError, match="--noise_density 1 must be"):
            kind(tokenizer, 0, 1.0)
        with pytest.raises(InputError, match="--mean_span_length 0"):
            kind(tokenizer, 0, mean_span_length=0)
    with pytest.raises(InputError, match=r"has 30 spans, and the tokenizer 12 tokens.*--extra_ids"):
        SpanCorruption(tokenizer, 0, 0.5, mean_span_length=1)(blocks, 0)
