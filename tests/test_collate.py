import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_tiny.data.collate import Batches, MaskTokens, uniform

LENGTH = 16


def rows_and_first(rows: dict, first: int) -> dict:
    """The simplest collator: what came in."""
    return {"input_ids": torch.from_numpy(rows["input_ids"].astype(np.int64)), "first": first}


def concatenate(batches: list[dict]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0] if name != "num_items_in_batch"}


@pytest.mark.parametrize("width", [1, 3, 4, 48, 50])
@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_uniform_does_not_depend_on_the_split(width, size):
    whole = uniform(7, 0, 14, width)
    assert whole.shape == (14, width)
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


def test_the_fingerprint_is_of_the_rows_not_of_where_they_are(tokenizer, blocks, tmp_path):
    mask = MaskTokens(tokenizer, 0.15, seed=0)
    blocks.save_to_disk(tmp_path / "moved")
    same = Batches(Dataset.load_from_disk(tmp_path / "moved"), mask, 4, seed=0).fingerprint
    assert Batches(blocks, mask, 4, seed=0).fingerprint == same
    assert Batches(blocks.select(range(20)), mask, 4, seed=0).fingerprint != same
    assert Batches(blocks, MaskTokens(tokenizer, 0.25, seed=0), 4, seed=0).fingerprint != same
