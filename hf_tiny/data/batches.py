"""Micro-batches as a pure function of the seed and their place in the run: no state, so a resume is a seek."""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]


def num_items(batch: Batch) -> Tensor:
    """What the loss of a batch is divided by: the first number of `num_items_in_batch`."""
    return batch["num_items_in_batch"][0]


def num_tokens(batch: Batch) -> Tensor:
    """How many tokens (or images) a batch has: the last number of `num_items_in_batch`."""
    return batch["num_items_in_batch"][-1]


def uniform(seed: int, first: int, count: int, width: int) -> np.ndarray:
    """`width` numbers in [0, 1) for each of the samples first, first + 1, ...: (count, width).

    A counter-based generator gives sample n the same numbers in whatever batch, process or resumed run it appears.
    """
    padded = -(-width // 4) * 4  # Philox makes four numbers per count
    generator = np.random.Generator(np.random.Philox(key=seed, counter=first * padded // 4))
    return generator.random((count, padded))[:, :width]


class Source:
    """What the training loop reads: `source[i]` is micro-batch i of an endless run, whoever asks. It has a
    `batch_size` and a `fingerprint`, which says what a checkpoint belongs to."""

    batch_size: float
    fingerprint: str
    unit = "tokens"  # what `num_tokens` counts

    def __len__(self) -> int:
        """Micro-batches per epoch."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Batch:
        raise NotImplementedError

    def epoch(self, index: int) -> float:
        """How often the data has been seen before micro-batch `index`."""
        return index / len(self)

    def state_dict(self, index: int) -> dict:
        """What this process must save to go on with micro-batch `index`: nothing, where going on is a seek."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """What all processes saved."""


def say_if_few(count: int, batch_size: int) -> None:
    if batch_size > count:
        logger.warning(
            f"--per_device_train_batch_size {batch_size} is more than the {count} samples that there are to train on: each "
            "step sees all of them."
        )


class Batches(Source):
    """Micro-batch i holds the samples i * batch_size, i * batch_size + 1, ... of an endless run over shuffled epochs,
    or of the data in order, once, with `shuffle=False`.

    `collate(rows, first)` turns rows (a dict of arrays) into tensors; `first` is the place of its first sample.
    """

    batch_size: int
    _mapped: Mapping[str, os.stat_result] = {}  # files that the data is mapped from, as they were

    def __init__(
        self, data: Dataset, collate: Callable[[dict, int], Batch], batch_size: int, seed: int, shuffle: bool = True
    ):
        self.collate, self.batch_size, self.seed, self.shuffle = collate, batch_size, seed, shuffle
        self.fingerprint = f"{self._open(data)}, {collate}"
        say_if_few(len(data), batch_size * shuffle)
        self._epoch, self._order = -1, np.arange(len(data))

    def _open(self, data: Dataset) -> str:
        """Its digest, of the number of rows and of some of them: it stays the same when the files behind the data are
        moved."""
        self.data = data.with_format("numpy")
        self._mapped = {path: os.stat(path) for path in (file["filename"] for file in data.cache_files)}
        rows = data.with_format(None)[np.linspace(0, len(data) - 1, min(len(data), 256), dtype=int).tolist()]
        return f"{len(data)} rows {hashlib.sha256(repr(rows).encode()).hexdigest()[:16]}"

    def __len__(self) -> int:
        return -(-len(self.data) // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        first = index * self.batch_size
        size = len(self.data)
        places = range(first, first + self.batch_size if self.shuffle else min(first + self.batch_size, size))
        rows = [self._row(*divmod(place, size)) for place in places]
        self._check_files()
        return self.collate(self.data[rows], first)

    def _check_files(self) -> None:
        """A file that is cut short while it is mapped into memory would end the process without a word (SIGBUS)."""
        for path, before in self._mapped.items():
            with suppress(FileNotFoundError):  # what is deleted, or replaced by another, stays mapped
                now = os.stat(path)
                if now.st_ino == before.st_ino and now.st_size < before.st_size:
                    raise InputError(
                        f"{path} was cut short while it was used. Run the command again with --resume_from_checkpoint latest: "
                        "the file is then made again."
                    )

    def _row(self, epoch: int, place: int) -> int:
        if self.shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.data))
        return self._order[place]


class BucketedBatches(Source):
    """Like `Batches`, for samples of different length: a micro-batch holds samples of about the same length, at most
    `batch_size` of them and at most `max_tokens` tokens with the padding (but always one sample).

    data: one dict a sample, with `input_ids`. `collate(rows)` turns some of them into tensors.
    sides: the arrays of a sample that are padded and count as tokens; of a pair both, ("input_ids", "labels").
    vary: `vary(sample, (seed, epoch, number))` gives the sample as this epoch sees it. Micro-batches are cut by the
        lengths in `data`: where samples become longer, so do their micro-batches.
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
        sides: tuple[str, ...] = ("input_ids",),
        vary: Callable[[dict, tuple[int, int, int]], dict] | None = None,
    ):
        self.data, self.collate, self.max_samples, self.max_tokens = data, collate, batch_size, max_tokens
        self.seed, self.shuffle, self.vary = seed, shuffle, vary
        self.lengths = np.array([[len(sample[side]) for side in sides] for sample in data])  # (samples, sides)
        self.epochs = [self._cut_epoch(0)]  # the micro-batches of each epoch so far: arrays of sample numbers
        self.batch_size = len(data) / len(self)  # on average
        say_if_few(len(data), batch_size * shuffle)
        content = hashlib.sha256()
        for sample in data:
            for value in sample.values():  # the labels too
                content.update(np.asarray(value).tobytes())
        self.fingerprint = (
            f"{len(data)} samples {content.hexdigest()[:16]}, at most {batch_size} or {max_tokens} tokens"
            f"{'' if vary is None else f', {vary}'}"
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
        samples = self.epochs[epoch][index]
        if self.vary is None:
            return self.collate([self.data[sample] for sample in samples])
        return self.collate([self.vary(self.data[sample], (self.seed, epoch, int(sample))) for sample in samples])

    def _cut_epoch(self, epoch: int) -> list[np.ndarray]:
        if not self.shuffle:
            return self._cut(np.arange(len(self.data)))
        generator = np.random.default_rng((self.seed, epoch))
        order, pool = generator.permutation(len(self.data)), self.POOL * self.max_samples
        batches = []
        for start in range(0, len(order), pool):
            batches += self._cut(order[start : start + pool])
        return [batches[place] for place in generator.permutation(len(batches))]

    def _cut(self, samples: np.ndarray) -> list[np.ndarray]:
        """Samples into micro-batches, by length. Of pairs the second side goes up, two tokens at a time, and the first up
        and down by turns, so that a micro-batch has neighbours in both: a third to a half less padding than if it went
        up each time."""
        first, last = self.lengths[samples].T[[0, -1]]
        if self.lengths.shape[1] == 1:
            order = np.argsort(first, kind="stable")
        else:
            order = np.lexsort((np.where(last // 2 % 2, -first, first), last // 2))
        samples = samples[order]
        batches, start, longest = [], 0, [0] * self.lengths.shape[1]
        for end, lengths in enumerate(self.lengths[samples].tolist()):
            longer = list(map(max, longest, lengths))
            size = end - start
            if size and (size == self.max_samples or (size + 1) * sum(longer) > self.max_tokens):
                batches.append(samples[start:end])
                start, longer = end, lengths
            longest = longer
        return [*batches, samples[start:]]


# Pairs of a source and a target: a translation, or a damaged text and what a decoder has to write


def pair_batch(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], pad_token_id: int) -> Batch:
    """Counted are the target's tokens, by which the loss is divided, and the tokens of both sides."""
    items = sum(map(len, targets))
    return {
        "input_ids": pad_right(sources, pad_token_id),
        "attention_mask": attention_mask(sources),
        "labels": pad_right(targets, -100),
        "num_items_in_batch": torch.tensor([items, sum(map(len, sources)) + items]),
    }


def pad_right(arrays: Sequence[np.ndarray], value: int) -> Tensor:
    """The arrays one below the other, filled up on the right."""
    return pad_sequence(list(map(torch.from_numpy, arrays)), batch_first=True, padding_value=value)


def attention_mask(arrays: Sequence[np.ndarray]) -> Tensor:
    """1 where the arrays are, when padded, and 0 where they are filled up."""
    return pad_right([np.ones(len(array), dtype=np.int64) for array in arrays], 0)


# One step ahead


class Prefetcher:
    """Prepares the next step's micro-batches in a thread while the model works on this one's."""

    def __init__(self, batches, accelerator: Accelerator, first_step: int, accumulation: int):
        self.batches, self.accelerator = batches, accelerator
        self.step, self.accumulation = first_step, accumulation
        # One core: with more, the thread would get a team of its own, which waits for work by spinning on the model's cores.
        self.thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> "Prefetcher":
        torch.get_num_threads()  # a thread that has not asked yet would take the number that another thread set last
        self.pending = self.thread.submit(self.load, self.step)
        return self

    def __exit__(self, *exception) -> None:
        self.thread.shutdown(wait=True, cancel_futures=True)

    def __next__(self) -> list[Batch]:
        ready = self.pending.result()
        self.step += 1
        self.pending = self.thread.submit(self.load, self.step)
        return ready

    def load(self, step: int) -> list[Batch]:
        """Of the k = processes x accumulation micro-batches of a step, process r takes r, r + processes, ..."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        first = step * world * self.accumulation + rank
        indices = range(first, first + world * self.accumulation, world)
        return [self.send(self.batches[index]) for index in indices]

    def send(self, batch: Batch) -> Batch:
        """To the device, without waiting; its counts stay: the host adds them up."""
        device = self.accelerator.device
        if device.type == "cuda":  # what is not pinned would be waited for
            batch = {name: x.pin_memory() if torch.is_tensor(x) else x for name, x in batch.items()}
        return send_to_device(batch, device, non_blocking=True, skip_keys="num_items_in_batch")
