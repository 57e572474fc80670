"""Text that is read, packed and shuffled while the model trains on it: nothing grows with the corpus but the list of its
shards.

The micro-batches of a step come from as many lanes, each with its own share of the shards. A lane is a stream, but what it
gives is still a function of the seed and the place: that is why a run can go on, exactly, from a few numbers per lane.
"""

import hashlib
import logging
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from multiprocessing.util import Finalize

import datasets
import numpy as np
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from hf_tiny.data.collate import Batch, Batches, Source, uniform
from hf_tiny.data.corpus import Packing, Shard, load_blocks, pack_shard, plan_packing
from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

REMEMBERED = 4  # micro-batches of a lane: the loop prepares the next ones while it saves
ENDLESS = 2**60
POINTLESS = 100  # epochs in which a lane finds no block
COUNTED = ("rows without text", "characters replaced")


@dataclass(frozen=True)
class Corpus:
    """The shards of one of the corpora that are mixed, and its share of the blocks."""

    shards: Sequence[Shard]
    packing: Packing
    weight: float


def text_batches(
    recipe, tokenizer: PreTrainedTokenizerBase, collate: Callable[[dict, int], Batch]
) -> tuple[Source, datasets.Dataset]:
    """Micro-batches of the training text, and at most `max_eval_samples` blocks of held-out text."""
    if not recipe.streaming:
        if recipe.dataset_weights or recipe.dataloader_num_workers:
            raise InputError("--dataset_weights and --dataloader_num_workers are for --streaming.")
        blocks = load_blocks(recipe, tokenizer, recipe.seed)
        held_out = blocks["validation"].shuffle(seed=0).take(min(recipe.max_eval_samples, len(blocks["validation"])))
        return Batches(blocks["train"], collate, recipe.per_device_train_batch_size, recipe.seed), held_out
    corpora = {split: open_corpora(recipe, tokenizer, split) for split in ("train", "validation")}
    world = PartialState().num_processes
    batches = StreamedBatches(
        corpora["train"],
        collate,
        recipe.per_device_train_batch_size,
        recipe.seed,
        lanes=world * recipe.gradient_accumulation_steps * max(1, recipe.dataloader_num_workers),
        buffer_size=recipe.shuffle_buffer_size,
        workers=recipe.dataloader_num_workers,
        stride=world,
    )
    return batches, first_blocks(corpora["validation"], recipe.max_eval_samples)


def open_corpora(recipe, tokenizer: PreTrainedTokenizerBase, split: str) -> list[Corpus]:
    """One, or with --dataset_weights one for each --train_file."""
    if recipe.max_steps <= 0:
        raise InputError("--streaming needs --max_steps: how long an epoch is, only its end tells.")
    if recipe.shuffle_buffer_size < 1 or recipe.dataloader_num_workers < 0:
        raise InputError("--shuffle_buffer_size must be above 0, and --dataloader_num_workers not below.")
    entries, weights = recipe.train_file or [], recipe.dataset_weights
    if weights is None:
        return [Corpus(*plan_packing(recipe, tokenizer, recipe.seed)[split], 1.0)]
    if len(weights) != len(entries) or min(weights) <= 0:
        raise InputError(
            f"--dataset_weights {' '.join(map(str, weights))}: give a weight above 0 for each of the {len(entries)} entries of "
            "--train_file."
        )
    plans = [plan_packing(replace(recipe, train_file=[entry]), tokenizer, recipe.seed)[split] for entry in entries]
    return [Corpus(*plan, weight / sum(weights)) for plan, weight in zip(plans, weights, strict=True)]


def first_blocks(corpora: Sequence[Corpus], count: int) -> datasets.Dataset:
    """Of the shards of each corpus in an order that is always the same, as many as its weight says."""
    found = []
    for corpus in corpora:
        order = np.random.default_rng(0).permutation(len(corpus.shards)).tolist()
        blocks = _packed([(number, corpus.shards[number], 0, 1) for number in order], corpus.packing)
        found += islice(blocks, max(1, round(count * corpus.weight)))
    if not found:
        raise InputError(
            f"The held-out text is shorter than one block of --max_seq_length {corpora[0].packing.length}. Hold out more "
            "with --validation_split_percentage, or give text with --validation_file."
        )
    return datasets.Dataset.from_dict({name: [block[name] for block in found] for name in found[0]})


def _packed(turns: list[tuple[int, Shard, int, int]], packing: Packing) -> Iterator[dict]:
    for number, shard, turn, of in turns:
        counts = Counter()
        yield from pack_shard(number, shard, packing, counts, turn, of)
        flaws = ", ".join(f"{counts[what]:,} {what}" for what in COUNTED if counts[what])
        if flaws:
            logger.warning(f"{packing.split}, {shard[0].path} at {shard[0].start}: {flaws}")


class Share:
    """The blocks of a corpus that fall to one lane, endlessly; None stands where an epoch ends.

    The shards of all epochs, each epoch in its own order, are dealt out to the lanes one by one. So every document is
    read once in each epoch, by one lane, and lanes stay abreast even where the shards cannot be divided evenly. Fewer
    shards than lanes are dealt out in parts: each is then read by several lanes, text by text in turn.
    """

    def __init__(self, corpus: Corpus, lane: int, lanes: int, seed: int, position: tuple[int, dict | None]):
        self.corpus, self.lane, self.lanes, self.seed = corpus, lane, lanes, seed
        self.of = -(-lanes // len(corpus.shards))
        self.epoch, self.state = position
        self.data: datasets.IterableDataset | None = None

    def dealt(self) -> list[tuple[int, Shard, int, int]]:
        """What falls to the lane in this epoch."""
        count = len(self.corpus.shards) * self.of
        order = np.random.default_rng((self.seed, self.epoch)).permutation(count)
        mine = order[(self.lane - self.epoch * count) % self.lanes :: self.lanes].tolist()
        return [(n // self.of, self.corpus.shards[n // self.of], n % self.of, self.of) for n in mine]

    def position(self) -> tuple[int, dict | None]:
        """The epoch, and the state of its data set."""
        return self.epoch, self.data.state_dict() if self.data else self.state

    def __iter__(self) -> Iterator[dict | None]:
        found, start = 0, self.epoch
        while found or self.epoch < start + POINTLESS:
            arguments = {"turns": self.dealt(), "packing": self.corpus.packing}
            self.data = datasets.IterableDataset.from_generator(_packed, gen_kwargs=arguments)
            if self.state:
                self.data.load_state_dict(self.state)
            for block in self.data:
                found += 1
                yield block
            self.epoch, self.state, self.data = self.epoch + 1, None, None
            yield None
        raise InputError(
            f"A stream of {len(self.corpus.shards)} shards, divided by {self.lanes}, gives no block. Give more text, or train "
            "without --streaming."
        )


class StreamedBatches(Source):
    """Micro-batch i comes from lane i % lanes: `batch_size` blocks of it.

    Of each `buffer_size` blocks of a lane (fewer, where an epoch ends) the order is shuffled. Where they begin is
    remembered as the state of the data sets there; to go on, a lane begins there and leaves out what has been seen.

    workers: processes in which this one's micro-batches are made, each its own lanes; it takes every `stride`-th.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        collate: Callable[[dict, int], Batch],
        batch_size: int,
        seed: int,
        *,
        lanes: int,
        buffer_size: int,
        workers: int = 0,
        stride: int = 1,
    ):
        self.corpora, self.collate, self.batch_size, self.seed = corpora, collate, batch_size, seed
        self.lanes, self.buffer_size, self.workers, self.stride = lanes, buffer_size, workers, stride
        self.bounds = np.cumsum([corpus.weight for corpus in corpora])[:-1]
        places = [[(s.number, s.start, s.stop, s.size) for shard in c.shards for s in shard] for c in corpora]
        known = repr((places, [(corpus.packing, corpus.weight) for corpus in corpora], buffer_size, workers))
        shards = sum(len(corpus.shards) for corpus in corpora)
        self.fingerprint = f"{shards} shards {hashlib.sha256(known.encode()).hexdigest()[:16]}, {collate}"
        # Of each lane: sample -> the positions of the corpora there; its next sample, and the samples from there on.
        self.starts: dict[int, dict[int, list]] = {}
        self.open: dict[int, tuple[int, Iterator[dict]]] = {}
        self.ready: tuple[int, Batch] = (-1, {})
        self.crew: Crew | None = None

    def __getitem__(self, index: int) -> Batch:
        last = self.ready[0]
        if index != last:
            if not self.workers:
                rows, _ = self.make(index)
            else:
                if self.crew is None or index != last + self.stride:
                    self.crew = Crew(self.make, self.workers, range(index, ENDLESS, self.stride))
                rows, self.starts[index % self.lanes] = next(self.crew)
            self.ready = index, self.collate(rows, index * self.batch_size)
        return self.ready[1]

    def make(self, index: int) -> tuple[dict[str, np.ndarray], dict[int, list]]:
        """The rows of a micro-batch, and from where its lane could be read again."""
        number, lane = divmod(index, self.lanes)
        first = number * self.batch_size
        at, samples = self.open.get(lane, (-1, iter(())))
        if at != first:
            start = self._start(lane, first)
            samples = self._samples(lane, start)
            for _ in islice(samples, first - start):
                pass
        blocks = list(islice(samples, self.batch_size))
        self.open[lane] = first + self.batch_size, samples
        rows = {name: np.array([block[name] for block in blocks]) for name in blocks[0]}
        oldest = self._start(lane, max(0, first - REMEMBERED * self.batch_size))
        self.starts[lane] = {start: at for start, at in self.starts[lane].items() if start >= oldest}
        return rows, self.starts[lane]

    def _start(self, lane: int, sample: int) -> int:
        known = self.starts.setdefault(lane, {})
        return max((start for start in dict(known) if start <= sample), default=0)

    def _samples(self, lane: int, first: int) -> Iterator[dict]:
        """The blocks of a lane from sample `first` on, in shuffled windows; while one is given, the next is read."""
        known = self.starts[lane].get(first, [(0, None)] * len(self.corpora))
        shares = [
            Share(corpus, lane, self.lanes, self.seed, at) for corpus, at in zip(self.corpora, known, strict=True)
        ]
        streams = [iter(share) for share in shares]
        window: list[dict] = []
        self.starts[lane] = {first: known}
        for _ in self._fill(window, streams, lane, first):
            pass
        while True:
            following: list[dict] = []
            after = first + len(window)
            self.starts[lane] = {**self.starts[lane], after: [share.position() for share in shares]}
            filling = self._fill(following, streams, lane, after)
            for place in np.random.default_rng((self.seed, lane, first)).permutation(len(window)):
                next(filling, None)
                yield window[place]
            for _ in filling:
                pass
            window, first = following, after

    def _fill(self, window: list[dict], streams: list[Iterator], lane: int, first: int) -> Iterator[None]:
        """One block at a time, until the window is full or an epoch ends."""
        while len(window) < self.buffer_size:
            block = next(streams[self._choose((first + len(window)) * self.lanes + lane) if len(streams) > 1 else 0])
            if block is not None:
                window.append(block)
                yield
            elif window:
                return

    def _choose(self, place: int) -> int:
        """The corpus of a sample, by its place in the run, as its masks; the numbers are others than theirs."""
        return int(np.searchsorted(self.bounds, uniform(self.seed + 1, place, 1, 1)[0, 0], side="right"))

    def epoch(self, index: int) -> float:
        """Of the corpus that is furthest, by the shards of this process's first lane."""
        lane = min(self.starts, default=0)
        start = self._start(lane, index // self.lanes * self.batch_size)
        positions = self.starts[lane].get(start, [])
        furthest = 0.0
        for corpus, (epoch, state) in zip(self.corpora, positions, strict=False):
            dealt = len(Share(corpus, lane, self.lanes, self.seed, (epoch, None)).dealt())
            done = state["examples_iterable"]["shard_idx"] if state else 0
            furthest = max(furthest, epoch + done / dealt)
        return furthest

    def state_dict(self, index: int) -> dict:
        """Of the lanes of this process; of the others it knows at most where they were when the run was resumed."""
        saved = {}
        for lane in range(self.ready[0] % self.stride, self.lanes, self.stride):
            number = -(-(index - lane) // self.lanes)  # of the lane's micro-batches, the first that is left
            start = self._start(lane, number * self.batch_size)
            if start in self.starts[lane]:
                saved[str(lane)] = [start, self.starts[lane][start]]
        return saved

    def load_state_dict(self, state: dict) -> None:
        self.starts = {int(lane): {start: positions} for lane, (start, positions) in state.items()}
        self.open, self.ready, self.crew = {}, (-1, {}), None
        logger.info(
            "The stream goes on by the state of its data sets, which is weaker than the seek of a prepared corpus: the shards "
            "that were being read are read again up to their places, and must not have changed."
        )


class Crew:
    """`make(index)` for each index, in order, by processes that take turns. (In workers of torch's DataLoader `datasets`
    would divide the shards once more.) A pipe that is full keeps a process from running ahead."""

    def __init__(self, make: Callable[[int], tuple], workers: int, indices: range):
        fork = multiprocessing.get_context("fork")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads do not survive a fork
        pipes = [fork.Pipe(duplex=False) for _ in range(workers)]
        crew = []
        for worker in range(workers):
            arguments = (make, indices[worker::workers], pipes, worker)
            crew.append(fork.Process(target=self.work, args=arguments, daemon=True))
            crew[-1].start()
        Finalize(self, self.end, [crew], exitpriority=0)  # at the latest before Python waits for them
        self.turns = cycle([receiving for receiving, _ in pipes])
        for _, sending in pipes:
            sending.close()

    @staticmethod
    def end(crew: list[multiprocessing.Process]) -> None:
        for process in crew:
            process.kill()

    @staticmethod
    def work(make: Callable[[int], tuple], indices: range, pipes: list, worker: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                number, signal.SIG_IGN
            )  # they are the training process's to answer, and it may wait for a batch
        for number, (receiving, sending) in enumerate(pipes):
            receiving.close()  # else nobody would notice that the training process is gone
            if number != worker:
                sending.close()
        with suppress(BrokenPipeError):
            try:
                for index in indices:
                    pipes[worker][1].send(make(index))
            except InputError as error:
                pipes[worker][1].send(error)

    def __next__(self) -> tuple:
        try:
            made = next(self.turns).recv()
        except (EOFError, OSError):  # between two messages, or within one
            raise InputError(
                "A process of --dataloader_num_workers has ended. Was it killed for lack of memory?"
            ) from None
        if isinstance(made, InputError):
            raise made
        return made
