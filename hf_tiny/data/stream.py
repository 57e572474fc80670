"""Text that is read, packed and shuffled while the model trains on it: nothing grows with the corpus but the list of its
shards.

The micro-batches of a step come from as many lanes, each with its own shards. A lane is a stream, but what it gives is
still a function of the seed and the place: that is why a run can go on, exactly, from a few numbers per lane.
"""

import hashlib
import logging
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import NamedTuple

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hf_tiny.data.batches import Batch, Source, uniform
from hf_tiny.data.packing import FLAWS, Packing
from hf_tiny.data.workers import fork_context
from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

REMEMBERED = 4  # micro-batches of a lane: the loop prepares the next ones while it saves
ENDLESS = 2**60
EMPTY_EPOCHS = 100  # in which a lane finds no block, before it gives up


class Position(NamedTuple):
    """How far a lane has read a corpus: whole epochs, of this one whole shards, of the next shard some blocks."""

    epoch: int = 0
    shard: int = 0
    block: int = 0


@dataclass(frozen=True)
class Mixture:
    """The corpora of a stream with their shares of the blocks, and how the blocks are dealt out and shuffled."""

    packings: tuple[Packing, ...]
    weights: tuple[float, ...]
    seed: int = 0
    lanes: int = field(default=1, repr=False)
    buffer_size: int = 1

    @property
    def fingerprint(self) -> str:
        """Neither the names of the files nor their times are in it: a stream may go on from copies. Nor are the lanes: that
        a step must keep its micro-batches is a message of its own."""
        shards = sum(len(packing.shards) for packing in self.packings)
        return f"{shards} shards {hashlib.sha256(repr(self).encode()).hexdigest()[:16]}"

    def choose(self, place: int) -> int:
        """The corpus of a sample, by its place in the run, as its masks; the numbers are others than theirs."""
        bounds = np.cumsum(self.weights)[:-1]
        return int(np.searchsorted(bounds, uniform(self.seed + 1, place, 1, 1)[0, 0], side="right"))


def dealt(packing: Packing, lane: int, lanes: int, seed: int, epoch: int) -> list[tuple[int, int, int]]:
    """The shards of a lane in an epoch: of each its number, and which text of how many is the lane's.

    The shards of all epochs, each epoch in its own order, are dealt out to the lanes one by one. So every document is
    read once in each epoch, by one lane, and lanes stay abreast even where the shards cannot be divided evenly. Fewer
    shards than lanes are dealt out in parts: each is then read by several lanes, text by text in turn.
    """
    of = -(-lanes // max(1, len(packing.shards)))
    count = len(packing.shards) * of
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return [(n // of, n % of, of) for n in order[(lane - epoch * count) % lanes :: lanes].tolist()]


def lane_blocks(
    packing: Packing, lane: int, lanes: int, seed: int, start: Position
) -> Iterator[tuple[Position, dict | None]]:
    """The blocks of a corpus that fall to a lane, endlessly, each with the position after it; None where an epoch ends."""
    (epoch, first_shard, first_block), found = start, 0
    while found or epoch < start.epoch + EMPTY_EPOCHS:
        turns = dealt(packing, lane, lanes, seed, epoch)
        for shard, turn in islice(enumerate(turns), first_shard, None):
            for block, row in islice(enumerate(_blocks(packing, *turn), 1), first_block, None):
                found += 1
                yield Position(epoch, shard, block), row
            first_block = 0
        epoch, first_shard = epoch + 1, 0
        yield Position(epoch), None
    raise InputError(
        f"A stream of {len(packing.shards)} shards, divided by {lanes}, gives no block. Give more text, or train without "
        "--streaming."
    )


def _blocks(packing: Packing, number: int, turn: int = 0, of: int = 1) -> Iterator[dict]:
    counts = Counter()
    yield from packing.blocks(number, counts, turn, of)
    flaws = ", ".join(f"{counts[what]:,} {what}" for what in FLAWS if counts[what])
    if flaws:
        part = packing.shards[number][0]
        logger.warning(f"{packing.split}, {part.path} at {part.start}: {flaws}")


def first_blocks(mixture: Mixture, count: int) -> datasets.Dataset:
    """Of the shards of each corpus in an order that is always the same, as many as its weight says."""
    found = []
    for packing, weight in zip(mixture.packings, mixture.weights, strict=True):
        order = np.random.default_rng(0).permutation(len(packing.shards)).tolist()
        blocks = (block for number in order for block in _blocks(packing, number))
        found += islice(blocks, max(1, round(count * weight)))
    if not found:
        raise InputError(
            f"The held-out text is shorter than one block of --max_seq_length {mixture.packings[0].length}. Hold out more "
            "with --validation_split_percentage, or give text with --validation_file."
        )
    return datasets.Dataset.from_dict({name: [block[name] for block in found] for name in found[0]})


class Lane:
    """The samples of a lane: its blocks, of which each `buffer_size` (fewer, where an epoch ends) are shuffled.

    starts: the sample that such a window begins with -> the positions of the corpora there. To go on, a lane begins at
        one and leaves out what has been seen. Replaced and never changed: another thread may be reading it.
    """

    def __init__(self, mixture: Mixture, number: int):
        self.mixture, self.number, self.next = mixture, number, -1
        self.origin = [Position()] * len(mixture.packings)
        self.starts: dict[int, list[Position]] = {0: self.origin}
        self.samples: Iterator[dict] = iter(())

    def start(self, sample: int) -> int:
        """Where the window begins in which the sample is, as far as it is known."""
        return max((start for start in self.starts if start <= sample), default=0)

    def read(self, first: int, count: int) -> list[dict]:
        if self.next != first:
            start = self.start(first)
            self.samples = self._shuffled(start)
            for _ in islice(self.samples, first - start):
                pass
        blocks = list(islice(self.samples, count))
        self.next = first + count
        oldest = self.start(max(0, first - REMEMBERED * count))
        self.starts = {start: positions for start, positions in self.starts.items() if start >= oldest}
        return blocks

    def _shuffled(self, first: int) -> Iterator[dict]:
        """The samples from `first` on; while a window is given out, the next is read."""
        mixture = self.mixture
        positions = list(self.starts.get(first, self.origin))
        streams = [
            lane_blocks(packing, self.number, mixture.lanes, mixture.seed, position)
            for packing, position in zip(mixture.packings, positions, strict=True)
        ]
        self.starts = {first: list(positions)}
        window = list(self._window(streams, positions, first))
        while True:
            after = first + len(window)
            self.starts = {**self.starts, after: list(positions)}
            following, filling = [], self._window(streams, positions, after)
            for place in np.random.default_rng((mixture.seed, self.number, first)).permutation(len(window)):
                following += islice(filling, 1)
                yield window[place]
            window, first = [*following, *filling], after

    def _window(self, streams: list[Iterator], positions: list[Position], first: int) -> Iterator[dict]:
        """Blocks until the window is full or an epoch ends; keeps the positions up to date."""
        size = 0
        while size < self.mixture.buffer_size:
            place = (first + size) * self.mixture.lanes + self.number
            corpus = self.mixture.choose(place) if len(streams) > 1 else 0
            positions[corpus], block = next(streams[corpus])
            if block is not None:
                size += 1
                yield block
            elif size:
                return


class StreamedBatches(Source):
    """Micro-batch i holds `batch_size` samples of lane i % lanes.

    workers: processes in which this one's micro-batches are made, each its own lanes; it takes every `stride`-th.
    """

    batch_size: int

    def __init__(
        self,
        mixture: Mixture,
        collate: Callable[[dict, int], Batch],
        batch_size: int,
        workers: int = 0,
        stride: int = 1,
    ):
        self.mixture, self.collate, self.batch_size = mixture, collate, batch_size
        self.worker_count, self.stride = workers, stride
        self.fingerprint = f"{mixture.fingerprint}, {workers} workers, {collate}"
        self.load_state_dict({})

    def load_state_dict(self, state: dict) -> None:
        self.lanes = [Lane(self.mixture, number) for number in range(self.mixture.lanes)]
        self.ready: tuple[int, Batch] = (-1, {})
        self.workers: Workers | None = None
        for number, (start, positions) in state.items():
            self.lanes[int(number)].starts = {start: [Position(*position) for position in positions]}
        if state:
            logger.info(
                "The stream goes on from the position of each lane, which is weaker than the seek of a prepared corpus: the "
                "shards that were being read are read again up to their places, and must not have changed."
            )

    def __getitem__(self, index: int) -> Batch:
        last = self.ready[0]
        if index != last:
            if self.worker_count and (self.workers is None or index != last + self.stride):
                self.workers = Workers(self.make, self.worker_count, range(index, ENDLESS, self.stride))
            rows, starts = self.workers.next() if self.workers else self.make(index)
            self.lanes[index % self.mixture.lanes].starts = starts
            rows = {name: column.numpy() for name, column in rows.items()}
            self.ready = index, self.collate(rows, index * self.batch_size)
        return self.ready[1]

    def make(self, index: int) -> tuple[dict[str, torch.Tensor], dict[int, list[Position]]]:
        """The rows of a micro-batch, and from where its lane could be read again."""
        number, lane = divmod(index, self.mixture.lanes)
        blocks = self.lanes[lane].read(number * self.batch_size, self.batch_size)
        rows = {name: torch.from_numpy(np.array([block[name] for block in blocks])) for name in blocks[0]}
        return rows, self.lanes[lane].starts

    @property
    def own_lanes(self) -> range:
        """Those of this process."""
        return range(self.ready[0] % self.stride, self.mixture.lanes, self.stride)

    def epoch(self, index: int) -> float:
        """Of the corpus that is furthest, by the shards of this process's first lane."""
        mixture, lane = self.mixture, self.lanes[self.own_lanes[0]]
        positions = lane.starts.get(lane.start(index // mixture.lanes * self.batch_size), [])
        return max(
            position.epoch
            + position.shard / len(dealt(packing, lane.number, mixture.lanes, mixture.seed, position.epoch))
            for packing, position in zip(mixture.packings, positions or lane.origin, strict=True)
        )

    def state_dict(self, index: int) -> dict:
        """Of the lanes of this process; of the others it knows at most where they were when the run was resumed."""
        saved = {}
        for lane in (self.lanes[number] for number in self.own_lanes):
            batch = -(
                -(index - lane.number) // self.mixture.lanes
            )  # of the lane's micro-batches, the first that is left
            start = lane.start(batch * self.batch_size)
            if start in lane.starts:
                saved[str(lane.number)] = [start, lane.starts[start]]
        return saved


class Workers:
    """`make(index)` for each index, in order, by processes of torch's DataLoader that take turns."""

    def __init__(self, make: Callable[[int], tuple], count: int, indices: range):
        loader = DataLoader(
            MadeInTurn(make, indices),
            batch_size=None,
            num_workers=count,
            multiprocessing_context=fork_context(),
            generator=torch.Generator(),  # else it would take a random number from the model's dropout
        )
        # By a thread of its own: when a worker dies, torch would raise an error in the middle of whatever the main thread
        # does; and a process that was forked by a thread of an executor waits for that thread when it ends, for ever.
        others, started = set(multiprocessing.active_children()), []
        thread = threading.Thread(target=lambda: started.append(iter(loader)))
        thread.start()
        thread.join()
        (self.made,) = started
        self.processes = set(multiprocessing.active_children()) - others
        Finalize(self, self.end, [self.processes], exitpriority=0)  # at the latest before Python waits for them

    @staticmethod
    def end(processes: set[multiprocessing.Process]) -> None:
        for process in processes:
            process.kill()

    def next(self) -> tuple:
        try:
            made = next(self.made)
        except (RuntimeError, OSError, EOFError) as error:  # the last where it was handing over a batch
            if not wait([process.sentinel for process in self.processes], timeout=1):
                raise
            raise InputError(
                "A process of --dataloader_num_workers has ended. Was it killed for lack of memory?"
            ) from error
        if isinstance(made, InputError):
            raise made
        return made


class MadeInTurn(IterableDataset):
    """Of the indices, those of a worker."""

    def __init__(self, make: Callable[[int], tuple], indices: range):
        self.make, self.indices = make, indices

    def __iter__(self) -> Iterator:
        worker = get_worker_info()
        for number in (signal.SIGINT, signal.SIGTERM):  # the training process's to answer, and it may wait for a batch
            signal.signal(number, signal.SIG_IGN)
        # A worker ends with the training process, of which it has inherited the lock on --output_dir, and at once.
        parent = multiprocessing.parent_process()
        threading.Thread(target=lambda: (parent and wait([parent.sentinel]), os._exit(1)), daemon=True).start()
        try:
            yield from map(self.make, self.indices[worker.id :: worker.num_workers])
        except InputError as error:
            yield error  # one that is raised would arrive with a traceback in its message
