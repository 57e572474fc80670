"""Micro-batches: a function of seed and place, whatever their size, and a seek is a walk."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_tiny import InputError
from hf_tiny.data.batches import Batches, BucketedBatches, uniform
from hf_tiny.data.masking import MaskTokens


def rows_and_first(rows: dict, first: int) -> dict:
    """The simplest collator: what came in."""
    return {"input_ids": torch.from_numpy(rows["input_ids"].astype(np.int64)), "first": first}


def concatenate(batches: list[dict]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0] if name != "num_items_in_batch"}


@pytest.mark.parametrize("width", [1, 4, 50])
def test_uniform_does_not_depend_on_the_split(width):
    whole = uniform(7, 0, 14, width)
    assert whole.shape == (14, width)
    for size in (1, 2, 5):
        parts = [uniform(7, first, min(size, 14 - first), width) for first in range(0, 14, size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_uniform_is_uniform_and_depends_on_the_seed():
    numbers = uniform(7, 0, 1000, 40)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 5 / np.sqrt(12 * numbers.size)
    assert abs(numbers.var() - 1 / 12) < 0.002
    assert np.unique(numbers).size == numbers.size
    assert not np.isin(uniform(8, 0, 1000, 40), numbers).any()
    np.testing.assert_array_equal(uniform(7, 2**40, 2, 40)[1:], uniform(7, 2**40 + 1, 1, 40))


@pytest.mark.parametrize("shuffle", [True, False])
def test_two_small_batches_are_one_large_batch(blocks, tokenizer, shuffle):
    mask = MaskTokens(tokenizer, 0.15, seed=3)
    small, large = (Batches(blocks, mask, size, seed=3, shuffle=shuffle) for size in (4, 8))
    for index in range(4 if shuffle else 2):  # 32 samples: past the end of the first epoch when shuffled
        halves = [small[2 * index], small[2 * index + 1]]
        for name, tensor in concatenate(halves).items():
            assert torch.equal(tensor, large[index][name]), name
        counts = sum(half["num_items_in_batch"] for half in halves)
        assert torch.equal(counts, large[index]["num_items_in_batch"])


def test_every_row_once_per_epoch_and_epochs_differ(blocks):
    size = len(blocks)
    batches = Batches(blocks, rows_and_first, 4, seed=0)
    rows = torch.cat([batches[index]["input_ids"] for index in range(3 * size // 4 + 1)]).numpy()
    epochs = [rows[epoch * size : (epoch + 1) * size] for epoch in range(3)]
    original = np.array(blocks["input_ids"])
    for epoch in epochs:
        np.testing.assert_array_equal(np.unique(epoch, axis=0), np.unique(original, axis=0))
        assert not np.array_equal(epoch, original)
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


def test_another_seed_gives_another_order(blocks):
    first, second = (Batches(blocks, rows_and_first, len(blocks), seed=seed)[0]["input_ids"] for seed in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(0).values, second.sort(0).values)


def test_seek_equals_walk(blocks, tokenizer):
    def make() -> Batches:
        return Batches(blocks, MaskTokens(tokenizer, 0.15, seed=5), 4, seed=5)

    walked = make()
    walk = [walked[index] for index in range(15)]
    for index in (14, 3, 9, 0):
        for name, tensor in make()[index].items():
            assert torch.equal(tensor, walk[index][name]), (index, name)
        for name, tensor in walked[index].items():  # also backwards, on a used object
            assert torch.equal(tensor, walk[index][name]), (index, name)


@pytest.mark.parametrize(("batch_size", "sizes"), [(8, [8, 8, 5]), (7, [7, 7, 7]), (21, [21]), (50, [21])])
def test_in_order_once_with_a_short_last_batch(blocks, batch_size, sizes):
    batches = Batches(blocks, rows_and_first, batch_size, seed=0, shuffle=False)
    assert len(batches) == len(sizes)
    found = [batches[index] for index in range(len(batches))]
    assert [len(batch["input_ids"]) for batch in found] == sizes
    assert [batch["first"] for batch in found] == [batch_size * index for index in range(len(sizes))]
    assert torch.cat([batch["input_ids"] for batch in found]).tolist() == blocks["input_ids"][:]


def test_the_fingerprint_is_of_the_rows_not_of_where_they_are(tokenizer, blocks, tmp_path):
    mask = MaskTokens(tokenizer, 0.15, seed=0)
    blocks.save_to_disk(tmp_path / "moved")
    same = Batches(Dataset.load_from_disk(tmp_path / "moved"), mask, 4, seed=0).fingerprint
    assert Batches(blocks, mask, 4, seed=0).fingerprint == same
    assert Batches(blocks.select(range(20)), mask, 4, seed=0).fingerprint != same
    assert Batches(blocks, MaskTokens(tokenizer, 0.25, seed=0), 4, seed=0).fingerprint != same


# Samples of different length


def skewed(count: int = 1000, seed: int = 0) -> list[dict]:
    """Samples whose only content is their number; most are short, a few are very long."""
    lengths = 1 + np.random.default_rng(seed).gamma(0.8, 20, count).astype(int)
    return [{"input_ids": np.full(length, number)} for number, length in enumerate(lengths)]


def numbers(rows: list[dict]) -> list[int]:
    """The simplest collator: which samples came in."""
    return [int(row["input_ids"][0]) for row in rows]


def bucketed(data, batch_size=16, max_tokens=512, seed=0, **settings) -> BucketedBatches:
    return BucketedBatches(data, numbers, batch_size, max_tokens, seed, **settings)


def padded_size(data: list[dict], batch: list[int]) -> int:
    return len(batch) * max(len(data[number]["input_ids"]) for number in batch)


def epochs_of(batches: BucketedBatches, samples: int, count: int) -> list[list[list[int]]]:
    """The micro-batches of the first epochs, each of which ends when all samples were seen."""
    epochs, index = [], 0
    for _ in range(count):
        epoch = []
        while sum(map(len, epoch)) < samples:
            epoch.append(batches[index])
            index += 1
        epochs.append(epoch)
    return epochs


@pytest.mark.parametrize(("batch_size", "max_tokens"), [(16, 512), (7, 4096), (1, 512), (64, 100)])
def test_bucketed_every_sample_once_per_epoch_within_the_limits(batch_size, max_tokens):
    data = skewed(300)
    epochs = epochs_of(bucketed(data, batch_size, max_tokens), len(data), 3)
    for epoch in epochs:
        assert sorted(number for batch in epoch for number in batch) == list(range(len(data)))
        for batch in epoch:
            assert len(batch) <= batch_size
            assert len(batch) == 1 or padded_size(data, batch) <= max_tokens
    assert len(epochs[0]) == len(bucketed(data, batch_size, max_tokens))
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_sample_longer_than_a_micro_batch_is_alone():
    data = [{"input_ids": np.full(length, number)} for number, length in enumerate([5, 40, 3, 41, 6])]
    (epoch,) = epochs_of(bucketed(data, 16, 20), 5, 1)
    assert sorted(map(sorted, epoch)) == [[0, 2, 4], [1], [3]]  # 3 samples of at most 6 tokens are 18


def test_bucketed_seek_equals_walk():
    def make() -> BucketedBatches:
        return bucketed(data, batch_size=4, max_tokens=60, seed=5)

    data = skewed()
    walked = make()
    epochs = epochs_of(walked, len(data), 4)
    assert len(set(map(len, epochs))) > 1  # epochs of different length, which a seek has to know of
    walk = [batch for epoch in epochs for batch in epoch]
    for index in (len(walk) - 1, 3, len(walk) // 2, 0):
        assert make()[index] == walk[index]
        assert walked[index] == walk[index]  # also backwards, on a used object
    for last, epoch in zip(np.cumsum([len(epoch) for epoch in epochs]), epochs, strict=True):
        assert make()[int(last) - 1] == epoch[-1]


def test_another_seed_gives_other_micro_batches():
    data = skewed(200)
    first, same, second = (bucketed(data, seed=seed) for seed in (0, 0, 1))
    assert [first[index] for index in range(10)] == [same[index] for index in range(10)]
    assert [first[index] for index in range(10)] != [second[index] for index in range(10)]


def test_bucketed_in_order_of_length_once():
    data = skewed(300)
    batches = bucketed(data, shuffle=False)
    order = [number for index in range(len(batches)) for number in batches[index]]
    assert order == sorted(range(300), key=lambda number: len(data[number]["input_ids"]))  # equal ones as they came
    assert order == [number for index in range(len(batches)) for number in bucketed(data, seed=9, shuffle=False)[index]]


def test_the_mean_size_of_a_micro_batch():
    data = skewed(300)
    for batches in (bucketed(data), bucketed(data, shuffle=False)):
        sizes = [len(batches[index]) for index in range(len(batches))]
        assert batches.batch_size == pytest.approx(np.mean(sizes))


def test_samples_of_a_micro_batch_have_similar_lengths_and_its_places_are_mixed():
    data = skewed()
    lengths = np.array([len(sample["input_ids"]) for sample in data])

    def padding(epoch: list[list[int]]) -> float:
        return 1 - lengths.sum() / sum(padded_size(data, batch) for batch in epoch)

    (epoch,) = epochs_of(bucketed(data, 16, 1 << 20), len(data), 1)
    order = np.random.default_rng(0).permutation(len(data)).tolist()
    chance = [order[start : start + 16] for start in range(0, len(order), 16)]
    assert padding(chance) > 0.6
    assert padding(epoch) < 0.15
    means = [lengths[batch].mean() for batch in epoch]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4  # short and long ones come in any order


def test_few_pairs_need_little_padding():
    chance = np.random.default_rng(0)
    targets = chance.gamma(4, 6, 2400).astype(int) + 4
    lengths = np.stack((chance.binomial(targets, 0.8) + 1, targets), axis=1)
    data = [{"input_ids": np.zeros(source), "labels": np.zeros(target)} for source, target in lengths]
    parts = [
        lengths[batch] for batch in BucketedBatches(data, list, 1024, 4096, 0, sides=("input_ids", "labels")).epochs[0]
    ]
    assert lengths.sum() / sum((part.max(0) * len(part)).sum() for part in parts) > 0.92


def test_the_fingerprint_changes_with_samples_labels_and_limits():
    data = [{**sample, "label": 1} for sample in skewed(50)]
    same = bucketed(data).fingerprint
    assert bucketed([dict(sample) for sample in data], seed=3).fingerprint == same  # the seed is known by itself
    assert bucketed(data[:-1]).fingerprint != same
    assert bucketed([*data[:-1], {**data[-1], "input_ids": data[-1]["input_ids"] + 1}]).fingerprint != same
    assert bucketed([*data[:-1], {**data[-1], "label": 0}]).fingerprint != same
    assert bucketed(data, batch_size=8).fingerprint != same
    assert bucketed(data, max_tokens=256).fingerprint != same


def test_a_batch_that_is_larger_than_the_data_is_said(blocks, caplog):
    Batches(blocks, MaskTokens, batch_size=21, seed=0)
    Batches(blocks, MaskTokens, batch_size=22, seed=0, shuffle=False)
    assert caplog.text == ""
    Batches(blocks, MaskTokens, batch_size=22, seed=0)
    assert "--per_device_train_batch_size 22 is more than the 21 samples that there are to train on" in caplog.text


def test_a_file_that_is_cut_short_while_it_is_used_gets_a_message(tmp_path):
    """Reading it would end the process with SIGBUS, without a word."""
    Dataset.from_dict({"x": np.arange(100_000)}).save_to_disk(tmp_path / "data")
    data = Dataset.load_from_disk(str(tmp_path / "data"))
    (file,) = (Path(file["filename"]) for file in data.cache_files)
    batches = Batches(data, lambda rows, first: rows, 4, seed=0)
    assert len(batches[0]["x"]) == 4
    os.truncate(file, 1000)
    with pytest.raises(InputError, match=f"{file} was cut short while it was used"):
        batches[1]
    file.unlink()  # what is mapped stays
    batches._check_files()
