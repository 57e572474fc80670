"""Raw text that is planned once: a sample for a tokenizer, blocks of tokens for a model.

A corpus is files; they are cut into shards by their content alone, and each shard is packed by itself (packing.py). The
blocks, cached as memory-mapped Arrow, and the files that hold them therefore do not depend on who makes them: one process,
several, or machines that know nothing of each other, each with its part of the work (recipes/prepare_corpus.py).
"""

import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from accelerate import PartialState
from datasets.table import MemoryMappedTable, concat_tables
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from hf_tiny.arguments import check, flag
from hf_tiny.data import builtin, cache, packing, sources, statistics
from hf_tiny.data.batches import Batch, Batches, Source
from hf_tiny.data.encoding import Decoding, EncodingArguments
from hf_tiny.data.packing import Packing, Reading, Shard
from hf_tiny.data.splits import DataArguments
from hf_tiny.data.stream import Mixture, StreamedBatches, first_blocks
from hf_tiny.data.workers import workers
from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

SUPPORTED = (sources.TEXT, *sources.TABLES)
SHARD_BYTES = 4 << 20
MOST_FILES = 256  # that hold the blocks of a split: enough for many machines, few enough to keep them all open
FEW_SHARDS, FEW_CHARACTERS = 50, 10_000_000  # of a stream, for the vocabulary
FEW_DOCUMENTS = 100  # With fewer, what is held out is not whole documents.


@dataclass(frozen=True, kw_only=True)
class CorpusArguments(DataArguments, EncodingArguments):
    """Which text, and how it becomes blocks. With neither files nor a dataset the built-in corpus is used."""

    train_file: list[str] | None = flag(None, f"Files, folders or globs of {', '.join(SUPPORTED)}, each also .gz.")
    text_column: str = flag("text", "The column of a table that holds the text.")
    sample_by: str = flag(
        "line", "What is a document in a text file: a line, a paragraph, or document (all).", choices=packing.SAMPLE_BY
    )
    max_seq_length: int = flag(128, "Tokens in a block, special tokens included.", low=8)
    validation_split_percentage: float = flag(
        5.0, "How much of the corpus is held out when there is no validation text.", above=0, below=100
    )
    preprocessing_num_workers: int | None = flag(None, "Processes that pack; all cores by default.", low=1)
    overwrite_cache: bool = flag(False, "Pack the blocks again.")
    streaming: bool = flag(False, "Read and pack the text while training, and keep nothing of it on the disk.")
    shuffle_buffer_size: int = flag(4096, "Number of blocks of a stream that are shuffled together.", low=1)
    dataset_weights: list[float] | None = flag(
        None, "The share of each --train_file entry in the blocks of a stream, such as 0.7 0.3.", above=0
    )
    dataloader_num_workers: int = flag(
        0, "Number of processes beside each training process that read and pack a stream.", low=0
    )

    @property
    def corpus_name(self) -> str:
        """As the model card names it."""
        return ", ".join(self.train_file or [self.dataset_name or "hf_tiny's built-in corpus of Python documentation"])


class Corpus:
    """Text to train on and to evaluate on, split `train` and split `validation`."""

    def __init__(self, arguments: CorpusArguments, seed: int = 0):
        check(arguments)
        self.arguments, self.seed = arguments, seed
        self.told: set[str] = set()  # what was found, and said: blocks are asked for more than once

    @cached_property
    def plan(self) -> dict[str, tuple[tuple[Shard, ...], Reading]]:
        """The shards of each split and how to read them."""
        arguments = self.arguments
        if arguments.train_file and arguments.dataset_name:
            raise InputError("Give --train_file or --dataset_name, not both.")
        if arguments.validation_file and not (arguments.train_file or arguments.dataset_name):
            raise InputError("--validation_file needs --train_file or --dataset_name beside it.")
        splits = _split_shards(arguments)
        shards, held_out = splits["train"], splits.get("validation")
        reading = Reading(arguments.text_column, arguments.sample_by, arguments.decoding)
        if held_out:
            return {"train": (shards, reading), "validation": (held_out, reading)}
        starts = (start for shard in shards for start, _ in packing.read_texts(shard, reading, Counter()) if start)
        many = sum(islice(starts, FEW_DOCUMENTS)) == FEW_DOCUMENTS
        reading = replace(reading, held_out=arguments.validation_split_percentage / 100, by_document=many)
        return {"train": (shards, reading), "validation": (shards, reading)}

    @property
    def fingerprint(self) -> str:
        """Changes when a training file does, or how it is read."""
        with PartialState().local_main_process_first():  # planning may have to write the built-in corpus first
            return packing.digest(*self.plan["train"])

    def documents(self, split: str = "train") -> Iterator[str]:
        """The texts of a split one by one, of a stream some of them. A very long document comes in several pieces."""
        shards, reading = self.plan[split]
        limit = math.inf
        if self.arguments.streaming:
            shards = shards[:: max(1, len(shards) // FEW_SHARDS)]
            limit = FEW_CHARACTERS / len(shards)
        for shard in shards:
            left = limit
            for _, text in packing.split_texts(shard, reading, split, Counter()):
                yield text
                left -= len(text)
                if left <= 0:
                    break

    def packings(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Packing]:
        """How the shards of each split become blocks."""
        special = tokenizer.cls_token_id, tokenizer.sep_token_id
        content = tokenizer.backend_tokenizer.to_str()
        return {
            split: Packing(shards, split, reading, self.arguments.max_seq_length, *special, self.seed, content)
            for split, (shards, reading) in self.plan.items()
        }

    def blocks(self, tokenizer: PreTrainedTokenizerBase) -> datasets.DatasetDict:
        """`train` and `validation` with columns `input_ids` and `segment_start`, where token type 1 begins."""
        with PartialState().local_main_process_first():
            return datasets.DatasetDict({split: self._cached(plan) for split, plan in self.packings(tokenizer).items()})

    def _cached(self, plan: Packing) -> datasets.Dataset:
        files = _files(plan)
        self._write(plan, files)
        folder = next(iter(files)).parent
        with cache.readable(folder):
            counts = sum((Counter(json.loads(_counts_file(file).read_text())) for file in files), Counter())
            table = concat_tables([MemoryMappedTable.from_file(str(file)) for file in files])
        _check_counts(plan, counts, self.told)
        return datasets.Dataset(table, split=datasets.Split(plan.split), fingerprint=folder.name)

    def pair_counts(self, tokenizer: PreTrainedTokenizerBase):
        """How often tokens stand near each other and in the same passage of the training text: see statistics.py."""
        plan = self.packings(tokenizer)["train"]
        groups = list(_files(plan).values())
        return statistics.corpus_counts(plan, groups, len(tokenizer), self.arguments.preprocessing_num_workers)

    def prepare(self, tokenizer: PreTrainedTokenizerBase, number: int, of: int) -> dict[str, tuple[Path, int, int]]:
        """Write the number-th of so many parts of the cache; returns for each split the folder, how many files it will
        have, and how many of them are missing."""
        found = {}
        for split, plan in self.packings(tokenizer).items():
            files = _files(plan)
            self._write(plan, dict(islice(files.items(), number - 1, None, of)))
            found[split] = next(iter(files)).parent, len(files), sum(not file.exists() for file in files)
        return found

    def _write(self, plan: Packing, files: dict[Path, list[int]]) -> None:
        again = self.arguments.overwrite_cache and PartialState().is_local_main_process
        whole = {file: all(cache.is_whole(path) for path in (file, _counts_file(file))) for file in files}
        files = {file: shards for file, shards in files.items() if again or not whole[file]}
        with workers(self.arguments.preprocessing_num_workers, len(files)) as each:
            written = each(partial(_write_file, plan), files.keys(), files.values())
            for _ in tqdm(written, f"Packing {plan.split}", len(files), unit=" files", disable=not files):
                pass

    def batches(
        self, recipe, tokenizer: PreTrainedTokenizerBase, collate: Callable[[dict, int], Batch]
    ) -> tuple[Source, datasets.Dataset]:
        """Micro-batches of the training text, and at most `max_eval_samples` blocks of held-out text."""
        paths = [{part.path for shard in shards for part in shard} for shards, _ in self.plan.values()]
        if (same := set.intersection(*paths)) and not self.plan["train"][1].held_out:
            logger.warning(f"{min(same)} is trained on and evaluated on: the figures say nothing of new text.")
        size, readers = recipe.per_device_train_batch_size, recipe.dataloader_num_workers
        world = PartialState().num_processes
        if recipe.streaming:
            if recipe.max_steps <= 0:
                raise InputError("--streaming needs --max_steps: how long an epoch is, only its end tells.")
            mixed = self.mixed(tokenizer, world * recipe.gradient_accumulation_steps * max(1, readers))
            batches = StreamedBatches(mixed["train"], collate, size, readers, stride=world)
            return batches, first_blocks(mixed["validation"], recipe.max_eval_samples)
        if recipe.dataset_weights or readers:
            raise InputError("--dataset_weights and --dataloader_num_workers are for --streaming.")
        blocks = self.blocks(tokenizer)
        # In memory: an order that is kept in a file could be damaged there.
        held_out = blocks["validation"].shuffle(seed=0, keep_in_memory=True)
        held_out = held_out.take(min(recipe.max_eval_samples, len(held_out)))
        return Batches(blocks["train"], collate, size, self.seed), held_out

    def mixed(self, tokenizer: PreTrainedTokenizerBase, lanes: int) -> dict[str, Mixture]:
        """The corpora of each split of a stream: one, or with --dataset_weights one for each --train_file."""
        entries, weights, corpora = self.arguments.train_file or [], self.arguments.dataset_weights, [self]
        if weights:
            if len(weights) != len(entries):
                raise InputError(
                    f"--dataset_weights {' '.join(map(str, weights))}: give a weight for each of the {len(entries)} "
                    "entries of --train_file."
                )
            corpora = [Corpus(replace(self.arguments, train_file=[entry]), self.seed) for entry in entries]
        shares = tuple(weight / sum(weights) for weight in weights) if weights else (1.0,)
        plans = [corpus.packings(tokenizer) for corpus in corpora]
        how = (shares, self.seed, lanes, self.arguments.shuffle_buffer_size)
        return {split: Mixture(tuple(plan[split] for plan in plans), *how) for split in ("train", "validation")}


# From arguments to shards


def _split_shards(arguments: CorpusArguments) -> dict[str, tuple[Shard, ...]]:
    """To train on and, if there is text for that, to evaluate on."""
    mark = b"\n\n" if arguments.sample_by == "paragraph" else b"\n"
    cut, splits = partial(_shards, decoding=arguments.decoding, mark=mark), {}
    given = {"train": arguments.train_file, "validation": arguments.validation_file}
    for split, files in given.items():
        if not files:
            continue
        splits[split] = cut(sources.expand(files, option := f"--{split}_file", SUPPORTED))
        if not splits[split]:
            raise InputError(f"{option} {' '.join(files)}: there is no text in it.")
    if not (arguments.train_file or arguments.dataset_name):
        return dict(zip(("train", "validation"), map(cut, builtin.corpus_files()), strict=True))
    own: dict[str, tuple[Shard, ...]] = {}
    name, config = arguments.dataset_name, arguments.dataset_config_name
    if name and arguments.streaming:
        own = {split: tuple((part,) for part in parts) for split, parts in sources.hub_parts(name, config).items()}
    elif name:  # the Arrow files in which `datasets` keeps it
        hub = sources.load_hub(name, config).items()
        own = {split: cut([file["filename"] for file in data.cache_files]) for split, data in hub}
    return own | splits


def _shards(paths: list[str], decoding: Decoding, mark: bytes) -> tuple[Shard, ...]:
    """Small files share a shard, so that little is left over when it is packed."""
    shards, shard = [], []
    for number, path in enumerate(paths):
        for part in sources.parts(path, SHARD_BYTES, decoding, number, mark):
            shard.append(part)
            if sum(part.size for part in shard) >= SHARD_BYTES:
                shards.append(tuple(shard))
                shard = []
    return (*shards, tuple(shard)) if shard else tuple(shards)


# Blocks in the cache


def _files(plan: Packing) -> dict[Path, list[int]]:
    """The files of a split in the cache, and the numbers of the shards that each is made of."""
    key = packing.digest(plan.shards, plan)
    folder = cache.place("hf_tiny_blocks", key)
    parts = np.array_split(np.arange(len(plan.shards)), max(1, min(len(plan.shards), MOST_FILES)))
    names = (f"{plan.split}-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts)))
    return {folder / name: part.tolist() for name, part in zip(names, parts, strict=True)}


def _counts_file(file: Path) -> Path:
    """What was found in the text of a file of blocks."""
    return file.with_suffix(".json")


def _write_file(plan: Packing, target: Path, shards: list[int]) -> None:
    ids = datasets.List(datasets.Value("int32"), length=plan.length)
    schema = datasets.Features(input_ids=ids, segment_start=datasets.Value("int32")).arrow_schema
    counts = Counter(blocks=0)
    blocks = chain.from_iterable(plan.blocks(number, counts) for number in shards)

    def write(draft: Path) -> None:
        with pa.OSFile(str(draft), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            while rows := list(islice(blocks, 1000)):
                tokens = pa.array(np.concatenate([row["input_ids"] for row in rows]))
                starts = pa.array([row["segment_start"] for row in rows], pa.int32())
                columns = [pa.FixedSizeListArray.from_arrays(tokens, plan.length), starts]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))

    cache.write(target, write)
    cache.write(_counts_file(target), lambda draft: draft.write_text(json.dumps(counts)))


def _check_counts(plan: Packing, counts: Counter, told: set[str]) -> None:
    """Say what was found, or that it is not enough."""
    if not counts["blocks"]:
        advice = "Give more text with --train_file, or shorter blocks with --max_seq_length."
        if plan.split == "validation":
            advice = "Hold out more with --validation_split_percentage, or give more text with --validation_file."
        raise InputError(
            f"The {plan.split} text is shorter than one block: it has {counts['tokens']} tokens, and a block of "
            f"--max_seq_length {plan.length} needs {plan.length - 2}. {advice}"
        )
    found = ", ".join(f"{counts[what]:,} {what}" for what in ("blocks", "documents", "tokens", "tokens left over"))
    if PartialState().is_main_process and f"{plan.split}: {found}" not in told:
        told.add(f"{plan.split}: {found}")
        logger.info(f"{plan.split}: {found}")
        for what in packing.FLAWS:
            if counts[what]:
                logger.warning(f"{plan.split}: {counts[what]:,} {what} in its files")


if __name__ == "__main__":
    print("error: this command has moved: python recipes/prepare_corpus.py --part 3/16 ...", file=sys.stderr)
    sys.exit(2)
