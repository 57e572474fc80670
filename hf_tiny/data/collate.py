"""Micro-batches as a pure function of the seed and their place in the run: no state, so a resume is a seek."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Batch = dict[str, Tensor]


def uniform(seed: int, first: int, count: int, width: int) -> np.ndarray:
    """`width` numbers in [0, 1) for each of the samples first, first + 1, ...: (count, width).

    A counter-based generator gives sample n the same numbers in whatever batch, process or resumed run it appears.
    """
    padded = -(-width // 4) * 4  # Philox makes four numbers per count
    generator = np.random.Generator(np.random.Philox(key=seed, counter=first * padded // 4))
    return generator.random((count, padded))[:, :width]


class Batches:
    """Micro-batch i holds the samples i * batch_size, i * batch_size + 1, ... of an endless run over shuffled epochs,
    or of the data in order, once, with `shuffle=False`.

    `collate(rows, first)` turns rows (a dict of arrays) into tensors; `first` is the place of its first sample.
    """

    def __init__(
        self, data: Dataset, collate: Callable[[dict, int], Batch], batch_size: int, seed: int, shuffle: bool = True
    ):
        self.data = data.with_format("numpy")
        self.collate, self.batch_size, self.seed, self.shuffle = collate, batch_size, seed, shuffle
        self.fingerprint = f"{_digest(data)}, {collate}"
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Micro-batches per epoch."""
        return -(-len(self.data) // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        first = index * self.batch_size
        size = len(self.data)
        places = np.arange(first, first + self.batch_size if self.shuffle else min(first + self.batch_size, size))
        rows = [self._row(epoch, place) for epoch, place in zip(places // size, places % size, strict=True)]
        return self.collate(self.data[rows], first)

    def _row(self, epoch: int, place: int) -> int:
        if not self.shuffle:
            return place
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.data))
        return self._order[place]


class BucketedBatches:
    """Like `Batches`, for samples of different length: a micro-batch holds samples of about the same length, at most
    `batch_size` of them and at most `max_tokens` tokens with the padding (but always one sample).

    data: one dict a sample, with `input_ids`. `collate(rows)` turns some of them into tensors.
    """

    POOL = 50  # micro-batches' worth of samples that are sorted together: enough to match lengths, few enough to mix

    def __init__(
        self,
        data: Sequence[dict],
        collate: Callable[[list[dict]], Batch],
        batch_size: int,
        max_tokens: int,
        seed: int,
        shuffle: bool = True,
    ):
        self.data, self.collate, self.max_samples, self.max_tokens = data, collate, batch_size, max_tokens
        self.seed, self.shuffle = seed, shuffle
        self.lengths = np.array([len(sample["input_ids"]) for sample in data])
        self.epochs = [self._cut_epoch(0)]  # the micro-batches of each epoch so far: arrays of sample numbers
        self.batch_size = len(data) / len(self)  # on average
        content = hashlib.sha256()
        for sample in data:
            for value in sample.values():  # the labels too
                content.update(np.asarray(value).tobytes())
        self.fingerprint = (
            f"{len(data)} samples {content.hexdigest()[:16]}, at most {batch_size} or {max_tokens} tokens"
        )

    def __len__(self) -> int:
        """Micro-batches of the first epoch; later ones may have a few more or less."""
        return len(self.epochs[0])

    def __getitem__(self, index: int) -> Batch:
        epoch = 0
        while index >= len(self.epochs[epoch]):
            index -= len(self.epochs[epoch])
            epoch += 1
            if epoch == len(self.epochs):
                self.epochs.append(self._cut_epoch(epoch))
        return self.collate([self.data[sample] for sample in self.epochs[epoch][index]])

    def _cut_epoch(self, epoch: int) -> list[np.ndarray]:
        if not self.shuffle:
            return self._cut(np.argsort(self.lengths, kind="stable"))
        generator = np.random.default_rng((self.seed, epoch))
        order, pool = generator.permutation(len(self.data)), self.POOL * self.max_samples
        batches = []
        for start in range(0, len(order), pool):
            samples = order[start : start + pool]
            batches += self._cut(samples[np.argsort(self.lengths[samples], kind="stable")])
        return [batches[place] for place in generator.permutation(len(batches))]

    def _cut(self, samples: np.ndarray) -> list[np.ndarray]:
        """Samples in order of their length, the shortest first, into micro-batches."""
        batches, start = [], 0
        for end in range(1, len(samples) + 1):
            full = end - start == self.max_samples
            if end == len(samples) or full or (end - start + 1) * self.lengths[samples[end]] > self.max_tokens:
                batches.append(samples[start:end])
                start = end
        return batches


def _digest(data: Dataset) -> str:
    """Of the number of rows and of some of them: it stays the same when the files behind the data are moved."""
    rows = data.with_format(None)[np.linspace(0, len(data) - 1, min(len(data), 256), dtype=int).tolist()]
    return f"{len(data)} rows {hashlib.sha256(repr(rows).encode()).hexdigest()[:16]}"


class MaskTokens:
    """Blocks of token ids to ELECTRA's input: of the chosen tokens 85% become [MASK] and 15% stay (there are no random
    tokens); [CLS], [SEP] and [PAD] are never chosen."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float, seed: int, stay_probability: float = 0.15
    ):
        self.mask_token_id = tokenizer.mask_token_id
        self.special_ids = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
        self.mlm_probability, self.stay_probability, self.seed = mlm_probability, stay_probability, seed

    def __repr__(self) -> str:
        return f"masked {self.mlm_probability}, stay {self.stay_probability}"

    def __call__(self, rows: dict[str, np.ndarray], first: int) -> Batch:
        ids = rows["input_ids"].astype(np.int64)  # (batch, length)
        count, length = ids.shape
        choose, stay, noise = np.split(uniform(self.seed, first, count, 3 * length), 3, axis=1)
        special = np.isin(ids, self.special_ids)
        chosen = max(1, round(self.mlm_probability * length))
        order = np.argpartition(np.where(special, 2.0, choose), chosen - 1, axis=1)[:, :chosen]
        masked = np.zeros_like(special)
        np.put_along_axis(masked, order, True, axis=1)
        masked &= ~special
        return {
            "input_ids": torch.from_numpy(np.where(masked & (stay >= self.stay_probability), self.mask_token_id, ids)),
            "token_type_ids": torch.from_numpy((np.arange(length) >= rows["segment_start"][:, None]).astype(np.int64)),
            "labels": torch.from_numpy(np.where(masked, ids, -100)),
            "sampling_noise": torch.from_numpy(noise.astype(np.float32)),
            "num_items_in_batch": torch.tensor([masked.sum(), ids.size]),
        }
