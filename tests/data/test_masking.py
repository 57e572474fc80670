"""What is hidden: as much as was asked for, never what frames a text, by chance that is a function of seed and place; what
was damaged can be mended from the target."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import poisson

from hf_tiny import InputError
from hf_tiny.data.batches import Batches, uniform
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.data.masking import MaskPatches, MaskTokens, NextTokens, SpanCorruption, TextInfilling
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

SENTENCES = [
    "The quick fox ran home.",
    "Is it late?",
    "잠은 사람에게 꼭 필요합니다.",
    'He said "no."',
    "Pi is 3.14 or so!",
]
LENGTH = 64


# Masked tokens


@pytest.fixture(scope="module")
def many(tokenizer):
    """2,000 blocks of 40 tokens, a third with [PAD] at the end, some [UNK], and what MaskTokens makes of them."""
    generator = np.random.default_rng(1)
    ids = generator.integers(5, len(tokenizer), size=(2000, 40))
    ids[generator.random(ids.shape) < 0.05] = tokenizer.unk_token_id
    ids[:, 0], ids[:, 20], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.sep_token_id
    ids[::3, 30:] = tokenizer.pad_token_id
    rows = {"input_ids": ids, "segment_start": np.full(2000, 21)}
    return ids, MaskTokens(tokenizer, 0.15, seed=11)(rows, first=0)


def test_mask_statistics(many, tokenizer):
    ids, batch = many
    masked = batch["labels"].ne(-100).numpy()
    assert (masked.sum(1) == 6).all()  # 15% of 40 in every block
    became_mask = (batch["input_ids"].numpy() == tokenizer.mask_token_id)[masked]
    spread = np.sqrt(0.85 * 0.15 / became_mask.size)
    assert abs(became_mask.mean() - 0.85) < 4 * spread
    # The 15% that stay keep their own token: there are no random ones.
    np.testing.assert_array_equal(batch["input_ids"].numpy()[masked][~became_mask], ids[masked][~became_mask])
    places = masked[1::3].mean(0)[1:-1]  # blocks without padding: no place is preferred
    assert abs(np.delete(places, 19) - 6 / 37).max() < 0.06


def test_labels_only_at_masked_places(many):
    ids, batch = many
    masked = batch["labels"].ne(-100).numpy()
    np.testing.assert_array_equal(batch["labels"].numpy()[masked], ids[masked])
    np.testing.assert_array_equal(batch["input_ids"].numpy()[~masked], ids[~masked])


def test_special_tokens_are_never_masked_but_unk_can_be(many, tokenizer):
    ids, batch = many
    masked = batch["labels"].ne(-100).numpy()
    assert tokenizer.unk_token_id in ids[masked]
    for token in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id):
        assert token in ids
        assert token not in ids[masked]


def test_counts_types_and_noise(many):
    ids, batch = many
    assert batch["num_items_in_batch"].tolist() == [int(batch["labels"].ne(-100).sum()), ids.size]
    assert batch["token_type_ids"][:, :21].sum() == 0
    assert batch["token_type_ids"][:, 21:].min() == 1
    noise = batch["sampling_noise"]
    assert noise.shape == ids.shape
    assert noise.min() >= 0
    assert noise.max() < 1
    assert abs(noise.mean().item() - 0.5) < 0.005
    # Independent of what was chosen: a shared number would make masked tokens all draw from the head of the CDF.
    assert abs(noise[batch["labels"].ne(-100)].mean().item() - 0.5) < 0.015


@pytest.mark.parametrize(
    ("length", "probability", "expected"), [(16, 0.15, 2), (16, 0.25, 4), (4, 0.15, 1), (64, 0.15, 10)]
)
def test_number_of_masked_tokens(tokenizer, length, probability, expected):
    rows = {"input_ids": np.full((3, length), 7), "segment_start": np.full(3, length)}
    batch = MaskTokens(tokenizer, probability, seed=0)(rows, first=0)
    assert batch["labels"].ne(-100).sum(1).tolist() == [expected] * 3


def test_a_block_of_special_tokens_has_nothing_to_mask(tokenizer):
    rows = {"input_ids": np.full((1, 8), tokenizer.pad_token_id), "segment_start": np.array([8])}
    batch = MaskTokens(tokenizer, 0.5, seed=0)(rows, first=0)
    assert batch["num_items_in_batch"].tolist() == [0, 8]


def test_a_causal_model_reads_text_that_nothing_frames(tokenizer):
    rows = {"input_ids": np.array([[2, 7, 8, 3, 9, 3], [2, 7, 8, 9, 10, 3]], dtype=np.int32)}  # [CLS] 2, [SEP] 3
    batch = {name: value.tolist() for name, value in NextTokens(tokenizer)(rows, 0).items()}
    assert batch["input_ids"] == [[2, 7, 8, 9, 0], [2, 7, 8, 9, 10]]
    assert batch["attention_mask"] == [[1, 1, 1, 1, 0], [1] * 5]
    assert batch["labels"] == [[-100, 7, 8, 9, -100], [-100, 7, 8, 9, 10]]
    assert batch["num_items_in_batch"] == [7, 9]


# Damaged texts


@pytest.fixture(scope="module")
def bpe():
    texts = [" ".join(SENTENCES), *SENTENCES] * 5
    return train_tokenizer(texts, TokenizerArguments(tokenizer_model="bpe", vocab_size=480, extra_ids=12))


@pytest.fixture(scope="module")
def packed(bpe):
    """As a corpus makes them: <s> A </s> B </s>, or <s> A </s>."""
    generator = np.random.default_rng(0)
    ids = generator.integers(len(bpe) - 150, len(bpe), size=(200, LENGTH))
    ids[:, 0], ids[:, -1] = bpe.cls_token_id, bpe.sep_token_id
    ids[::2, 30] = bpe.sep_token_id
    return {"input_ids": ids, "segment_start": np.full(200, 31)}


def contents(bpe, packed) -> list[list[int]]:
    return [[i for i in row if i not in (1, 2)] for row in packed["input_ids"].tolist()]


def sides(batch, bpe) -> list[tuple[list[int], list[int]]]:
    """Each pair without its padding; both sides end with </s>, and only there."""
    pairs = []
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        source, target = ids[mask.bool()].tolist(), labels[labels != -100].tolist()
        for side in (source, target):
            assert side.index(bpe.eos_token_id) == len(side) - 1
        assert (ids[~mask.bool()] == bpe.pad_token_id).all()
        pairs.append((source[:-1], target[:-1]))
    assert batch["num_items_in_batch"].tolist() == [
        sum(len(target) + 1 for _, target in pairs),
        sum(len(source) + len(target) + 2 for source, target in pairs),
    ]
    return pairs


def kinds(bpe):
    return [
        TextInfilling(bpe, 3),
        TextInfilling(bpe, 3, permute_sentences=False),
        SpanCorruption(bpe, 3),
    ]


def test_special_ids(bpe):
    assert (bpe.cls_token_id, bpe.sep_token_id, bpe.eos_token_id) == (1, 2, 2)


@pytest.mark.parametrize("density", [0.05, 0.15, 0.5])
def test_spans_can_be_put_back(bpe, packed, density):
    batch = SpanCorruption(bpe, 1, density, mean_span_length=3 if density < 0.5 else 8)(packed, 0)
    sentinels = bpe.convert_tokens_to_ids([f"<extra_id_{n}>" for n in range(12)])
    for (source, target), text in zip(sides(batch, bpe), contents(bpe, packed), strict=True):
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


def test_infilling_keeps_the_rest_in_order(bpe, packed):
    batch = TextInfilling(bpe, 1, permute_sentences=False)(packed, 0)
    for (source, target), text in zip(sides(batch, bpe), contents(bpe, packed), strict=True):
        assert target == text
        kept = [token for token in source if token != bpe.mask_token_id]
        assert len(kept) == len(text) - round(0.3 * len(text))
        rest = iter(text)
        assert all(token in rest for token in kept)  # a subsequence
        assert not any(a == b == bpe.mask_token_id for a, b in pairwise(source))


def test_lengths_of_spans_are_poisson_and_some_are_empty(bpe):
    noise = TextInfilling(bpe, 0)
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


def test_sentences_change_places_and_stay_whole(bpe):
    noise = TextInfilling(bpe, 0)
    parts = [bpe.encode(sentence, add_special_tokens=False) for sentence in SENTENCES]
    text = np.array([token for part in parts for token in part])
    orders = set()
    for numbers in uniform(0, 0, 200, len(text)):
        permuted = noise.permuted(text, numbers)
        assert sorted(permuted) == sorted(text)
        decoded = bpe.decode(permuted)
        assert all(sentence in decoded for sentence in SENTENCES)  # also "3.14" is not cut
        orders.add(decoded)
    assert len(orders) > 60  # of 120
    assert " ".join(SENTENCES) in bpe.decode(noise.permuted(text, np.arange(len(text)) / 1000))


def test_two_small_batches_are_one_large_batch_and_a_seek_is_a_walk(bpe, packed):
    data = Dataset.from_dict({name: values[:40] for name, values in packed.items()})
    for noise in kinds(bpe):
        small, large = (Batches(data, noise, size, seed=3) for size in (4, 8))
        for index in (0, 6, 2):  # 6: in the second epoch
            halves = [pair for half in (2 * index, 2 * index + 1) for pair in sides(small[half], bpe)]
            assert halves == sides(large[index], bpe)
        again = Batches(data, noise, 8, seed=3)[6]
        assert all(torch.equal(again[name], large[6][name]) for name in again)
        assert sides(large[0], bpe) != sides(large[5], bpe)


def test_the_noise_differs_by_seed_and_epoch(bpe, packed):
    row = {name: values[:1] for name, values in packed.items()}
    for kind in (TextInfilling, SpanCorruption):
        drawn = {str(sides(kind(bpe, seed)(row, first), bpe)) for seed in (0, 1) for first in (0, 1, 600)}
        assert len(drawn) == 6
    assert len({repr(noise) for noise in kinds(bpe)}) == 3  # the fingerprint of a run knows which


def test_tiny_texts_survive(bpe):
    for size in range(2, 8):
        ids = np.full((50, 8), bpe.pad_token_id)
        ids[:, 0], ids[:, 1 : size - 1], ids[:, size - 1] = 1, 300, 2
        for noise in kinds(bpe):
            for source, target in sides(noise({"input_ids": ids}, 0), bpe):
                assert source.count(300) <= size - 2 and target.count(300) <= size - 2


def test_blocks_of_raw_text(bpe, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join([" ".join(SENTENCES)] * 60), encoding="utf-8")
    arguments = CorpusArguments(train_file=[str(tmp_path / "a.txt")], max_seq_length=32, preprocessing_num_workers=1)
    data = Corpus(arguments).blocks(bpe)["train"]
    ((_, target), *_) = sides(Batches(data, TextInfilling(bpe, 0), 4, seed=0)[0], bpe)
    assert bpe.decode(target) in " ".join(SENTENCES * 120)


def test_bad_settings(bpe, packed):
    wordpiece = train_tokenizer(SENTENCES * 9, TokenizerArguments(vocab_size=300))
    for kind in (TextInfilling, SpanCorruption):
        with pytest.raises(InputError, match="no eos_token"):
            kind(wordpiece, 0)
        with pytest.raises(InputError, match="--noise_density 1 must be"):
            kind(bpe, 0, 1.0)
        with pytest.raises(InputError, match="--mean_span_length 0"):
            kind(bpe, 0, mean_span_length=0)
    with pytest.raises(InputError, match=r"has 30 spans, and the tokenizer 12 tokens.*--extra_ids"):
        SpanCorruption(bpe, 0, 0.5, mean_span_length=1)(packed, 0)


# Patches


def test_patches_that_are_seen():
    reads = SimpleNamespace(image_mean=[0.4], image_std=[0.3])
    rows = {"pixels": np.full((300, 1, 8, 8), 51, dtype=np.uint8), "example": np.arange(300)}
    batch = MaskPatches(reads, 7, 16, 0.75)(rows, 0)
    seen = batch["ids_keep"]
    assert seen.shape == (300, 4) and (seen[:, 1:] > seen[:, :-1]).all()  # in order, none twice
    shares = np.bincount(seen.flatten(), minlength=16) / 300
    assert abs(shares - 0.25).max() < 0.1 and len(shares) == 16  # no place is preferred
    assert batch["num_items_in_batch"].tolist() == [300 * 12, 300]
    assert batch["pixel_values"].unique().item() == pytest.approx((0.2 - 0.4) / 0.3)
    part = {name: values[40:43] for name, values in rows.items()}
    assert torch.equal(MaskPatches(reads, 7, 16, 0.75)(part, 40)["ids_keep"], seen[40:43])
    with pytest.raises(InputError, match=r"--mask_ratio 0\.99: of 16 patches this leaves 0 to see"):
        MaskPatches(reads, 7, 16, 0.99)
