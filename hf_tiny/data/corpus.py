"""Raw text to full blocks of tokens, `[CLS] A [SEP] B [SEP]`, cached as memory-mapped Arrow.

A corpus is files; they are cut into shards by their content alone, and each shard is read, tokenized and packed by
itself. The blocks, and the files that hold them, therefore do not depend on who makes them: one process, several, or
machines that know nothing of each other, each with its part of the work (of parts 1 to 16, here the third):

python -m hf_tiny.data.corpus prepare --part 3/16 --train_file my_texts/ --tokenizer_name runs/mine --max_seq_length 128
"""

import csv
import hashlib
import json
import logging
import math
import multiprocessing
import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import ClassVar

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import tokenizers
from accelerate import PartialState
from datasets.table import MemoryMappedTable, concat_tables
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from hf_tiny import arguments as flags
from hf_tiny.arguments import flag
from hf_tiny.data import builtin, files
from hf_tiny.errors import InputError
from hf_tiny.tokenizer import TokenizerArguments, load_tokenizer

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2  # Raise it when the same text and settings give other blocks than before.
SUPPORTED = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
SAMPLE_BY = ("line", "paragraph", "document")
SHARD_BYTES = 4 << 20
MOST_FILES = 256  # that hold the blocks of a split: enough for many machines, few enough to keep them all open
FEW_SHARDS, FEW_CHARACTERS = 50, 10_000_000  # of a stream, for the vocabulary
PIECE_BYTES = 1 << 16  # Longer documents of a text file are read in pieces.
BATCH_CHARACTERS = 1 << 18
FEW_DOCUMENTS = 100
HUB = ".hub"  # stands where a file has its suffix: this is a data set of the Hub, to be streamed
ONE_SEGMENT = 0.1  # The share of blocks with one segment, as in the original ELECTRA.


@dataclass(frozen=True, kw_only=True)
class CorpusArguments:
    """Which text, and how it becomes blocks. With neither files nor a data set the built-in corpus is used."""

    train_file: list[str] | None = flag(None, f"Files, folders or globs of {', '.join(SUPPORTED)}, each also .gz.")
    validation_file: list[str] | None = flag(
        None, "The same for held-out text; without it a part of the corpus is held out."
    )
    dataset_name: str | None = flag(None, "A data set on the Hub, or a folder of one.")
    dataset_config_name: str | None = flag(None, "Its configuration.")
    text_column: str = flag("text", "The column of a table that holds the text.")
    sample_by: str = flag("line", "What is a document in a text file: a line, a paragraph, or document (all).")
    encoding_errors: str = flag("strict", "Bytes that are not UTF-8: strict stops, replace counts and replaces them.")
    max_seq_length: int = flag(128, "Tokens in a block, special tokens included.")
    validation_split_percentage: float = flag(
        5.0, "How much of the corpus is held out when there is no validation text."
    )
    preprocessing_num_workers: int | None = flag(None, "Processes; all cores by default.")
    overwrite_cache: bool = flag(False, "Pack the blocks again.")
    streaming: bool = flag(False, "Read and pack the text while training, and keep nothing of it on the disk.")
    shuffle_buffer_size: int = flag(4096, "Of a stream: blocks that are shuffled together.")
    dataset_weights: list[float] | None = flag(
        None, "Of a stream: the share of each --train_file entry in the blocks, such as 0.7 0.3."
    )
    dataloader_num_workers: int = flag(0, "Of a stream: processes beside each training process that read and pack.")

    @property
    def corpus_name(self) -> str:
        """As the model card names it."""
        return ", ".join(self.train_file or [self.dataset_name or "hf_tiny's built-in corpus of Python documentation"])


@dataclass(frozen=True)
class Stretch:
    """A part of a file: bytes [start, stop) of text, row groups [start, stop) of a table. Of a data set that is
    streamed from the Hub, shard `start`."""

    path: str
    changed: int
    number: int
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Rules:
    """How a shard is read and what of it is held out."""

    text_column: str
    sample_by: str
    encoding_errors: str
    held_out: float
    by_document: bool


@dataclass(frozen=True)
class Packing:
    """All that the blocks of a split depend on, beside the shards."""

    split: str
    rules: Rules
    length: int
    cls: int
    sep: int
    seed: int
    tokenizer: str
    versions: tuple = (FORMAT_VERSION, tokenizers.__version__)


Shard = tuple[Stretch, ...]
Texts = Iterator[tuple[bool, str]]  # Whether a document starts here, and text of it.


def documents(arguments: CorpusArguments, split: str = "train") -> Iterator[str]:
    """The texts of a split one by one, of a stream some of them. A very long document comes in several pieces."""
    shards, rules = _plan(arguments)[split]
    if arguments.streaming:
        shards = shards[:: max(1, len(shards) // FEW_SHARDS)]
    for shard in shards:
        left = FEW_CHARACTERS / len(shards) if arguments.streaming else math.inf
        for _, text in _split_texts(shard, rules, split, Counter()):
            yield text
            left -= len(text)
            if left <= 0:
                break


def fingerprint(arguments: CorpusArguments) -> str:
    """Changes when a training file does, or how it is read."""
    with PartialState().local_main_process_first():  # planning may have to write the built-in corpus first
        shards, rules = _plan(arguments)["train"]
    return _digest(shards, rules)


def load_blocks(arguments: CorpusArguments, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> datasets.DatasetDict:
    """`train` and `validation` with columns `input_ids` and `segment_start`, where token type 1 begins."""
    blocks = datasets.DatasetDict()
    with PartialState().local_main_process_first():
        for split, (shards, packing) in plan_packing(arguments, tokenizer, seed).items():
            blocks[split] = _packed(shards, packing, arguments)
    return blocks


def plan_packing(
    arguments: CorpusArguments, tokenizer: PreTrainedTokenizerBase, seed: int
) -> dict[str, tuple[list[Shard], Packing]]:
    """The shards of each split, and how they become blocks."""
    special = tokenizer.cls_token_id, tokenizer.sep_token_id
    backend = tokenizer.backend_tokenizer.to_str()
    return {
        split: (shards, Packing(split, rules, arguments.max_seq_length, *special, seed, backend))
        for split, (shards, rules) in _plan(arguments).items()
    }


# From arguments to shards


def _digest(shards: Sequence[Shard], how: Rules | Packing) -> str:
    """The folder of a file may change, its name and time may not: copies on other machines give the same."""
    known = [[replace(stretch, path=Path(stretch.path).name) for stretch in shard] for shard in shards]
    return hashlib.sha256(repr((known, how)).encode()).hexdigest()[:32]


def _plan(arguments: CorpusArguments) -> dict[str, tuple[list[Shard], Rules]]:
    """The shards of each split and how to read them."""
    _check(arguments)
    shards, validation_shards = _split_shards(arguments)
    rules = Rules(arguments.text_column, arguments.sample_by, arguments.encoding_errors, 0.0, True)
    if validation_shards:
        return {"train": (shards, rules), "validation": (validation_shards, rules)}
    if not 0 < arguments.validation_split_percentage < 100:
        raise InputError(
            f"--validation_split_percentage {arguments.validation_split_percentage:g}: a run needs text to train on "
            "and held-out text to evaluate on. Use a number between 0 and 100, such as 5, or give --validation_file."
        )
    starts = (start for shard in shards for start, _ in _read(shard, rules, Counter()) if start)
    many = sum(islice(starts, FEW_DOCUMENTS)) == FEW_DOCUMENTS
    rules = replace(rules, held_out=arguments.validation_split_percentage / 100, by_document=many)
    return {"train": (shards, rules), "validation": (shards, rules)}


def _check(arguments: CorpusArguments) -> None:
    if arguments.sample_by not in SAMPLE_BY:
        raise InputError(f"--sample_by {arguments.sample_by}: must be one of {', '.join(SAMPLE_BY)}.")
    files.check_encoding_errors(arguments.encoding_errors)
    if arguments.max_seq_length < 8:
        raise InputError(f"--max_seq_length {arguments.max_seq_length}: a block needs at least 8 tokens.")
    if arguments.train_file and arguments.dataset_name:
        raise InputError("Give --train_file or --dataset_name, not both.")
    if arguments.validation_file and not (arguments.train_file or arguments.dataset_name):
        raise InputError("--validation_file needs --train_file or --dataset_name beside it.")


def _split_shards(arguments: CorpusArguments) -> tuple[list[Shard], list[Shard]]:
    """To train on and, if there is text for that, to evaluate on."""
    cut = partial(_shards, sample_by=arguments.sample_by)
    validation_shards = cut(files.expand(arguments.validation_file or [], "--validation_file", SUPPORTED))
    if arguments.train_file:
        return cut(files.expand(arguments.train_file, "--train_file", SUPPORTED)), validation_shards
    if arguments.dataset_name:
        train_shards, own_validation_shards = _dataset_shards(arguments)
        return train_shards, validation_shards or own_validation_shards
    train_files, validation_files = builtin.corpus_files()
    return cut(train_files), cut(validation_files)


def _dataset_shards(arguments: CorpusArguments) -> tuple[list[Shard], list[Shard]]:
    """Of the Arrow files in which `datasets` keeps the data set, or of the stream of it."""
    name, config = arguments.dataset_name, arguments.dataset_config_name
    if arguments.streaming:
        splits, version = _hub_stream(name, config)
        paths = {split: f"{name}:{config or ''}:{split}{HUB}" for split in splits}
        found = {
            split: [(Stretch(paths[split], version, shard, shard, shard + 1, 0),) for shard in range(data.num_shards)]
            for split, data in splits.items()
        }
    else:
        splits = files.load_hub(name, config)
        paths = {split: [file["filename"] for file in dataset.cache_files] for split, dataset in splits.items()}
        found = {
            split: _shards(paths[split], arguments.sample_by) for split in ("train", "validation") if split in paths
        }
    return found["train"], found.get("validation", [])


@lru_cache(maxsize=8)
def _hub_stream(name: str, config: str | None) -> tuple[dict[str, datasets.IterableDataset], int]:
    """The splits, in as many shards as their files allow (of Parquet, a row group is one), and their version."""
    splits, version = files.stream_hub(name, config)
    return {split: data.reshard() for split, data in splits.items()}, version


def _shards(paths: list[str], sample_by: str) -> list[Shard]:
    """Small files share a shard, so that little is left over when it is packed."""
    shards, shard = [], []
    for number, path in enumerate(paths):
        changed = os.stat(path).st_mtime_ns
        for start, stop, size in _ranges(path, sample_by):
            shard.append(Stretch(path, changed, number, start, stop, size))
            if sum(stretch.size for stretch in shard) >= SHARD_BYTES:
                shards.append(tuple(shard))
                shard = []
    return [*shards, tuple(shard)] if shard else shards


def _ranges(path: str, sample_by: str) -> Iterator[tuple[int, int, int]]:
    """Start, stop and size of stretches of about `SHARD_BYTES`."""
    kind, size, start = files.kind(path), os.path.getsize(path), 0
    if kind in GROUP_SIZES:
        with files.readable(path):
            sizes = GROUP_SIZES[kind](path)
        for stop in range(1, len(sizes) + 1):
            if sum(sizes[start:stop]) >= SHARD_BYTES or stop == len(sizes):
                yield start, stop, sum(sizes[start:stop])
                start = stop
    elif path.lower().endswith(".gz") or kind in (".csv", ".tsv"):
        yield 0, sys.maxsize, size
    else:
        mark = b"\n\n" if sample_by == "paragraph" else b"\n"
        with files.readable(path), open(path, "rb") as file:
            while start < size:
                file.seek(start + SHARD_BYTES)
                if kind == ".txt":
                    window = file.read(PIECE_BYTES)
                    more = window.find(mark) + len(mark) if mark in window else _last_break(window)
                else:
                    more = len(file.readline())  # a row of a table stays whole, however long it is
                stop = min(start + SHARD_BYTES + more, size)
                yield start, stop, stop - start
                start = stop


def _last_break(window: bytes) -> int:
    """The last place where UTF-8 can be cut: after a line or a word, else between two characters."""
    between = (place for place in range(len(window) - 1, 0, -1) if window[place] & 0xC0 != 0x80)
    return window.rfind(b"\n") + 1 or window.rfind(b" ") + 1 or next(between, len(window))


# From a shard to texts


def _split_texts(shard: Shard, rules: Rules, split: str, counts: Counter) -> Texts:
    """The texts of a shard that belong to the split."""
    if not rules.held_out:
        return _read(shard, rules, counts)
    return (_split_by_document if rules.by_document else _split_at_the_end)(shard, rules, split, counts)


def _split_by_document(shard: Shard, rules: Rules, split: str, counts: Counter) -> Texts:
    """Held out by a hash of the document's place. It knows no seed: all runs are evaluated on the same text."""
    for stretch in shard:
        whole_file = files.kind(stretch.path) == ".txt" and rules.sample_by == "document"
        index, chosen = 0, None
        for start, text in _read((stretch,), rules, counts):
            if start or chosen is None:
                place = (stretch.number,) if whole_file else (stretch.number, stretch.start, index)
                digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
                held_out = int.from_bytes(digest, "big") < rules.held_out * 2**64
                chosen = held_out == (split == "validation")
                index += 1
            if chosen:
                yield start, text


def _split_at_the_end(shard: Shard, rules: Rules, split: str, counts: Counter) -> Texts:
    """Held out is the end of the shard, from a word on."""
    left = math.ceil(sum(len(text) for _, text in _read(shard, rules, Counter())) * (1 - rules.held_out))
    for start, text in _read(shard, rules, counts):
        cut = max(left, 0)
        if cut < len(text):
            cut = text.rfind(" ", 0, cut) + 1 or cut
        left -= len(text)
        part = text[:cut] if split == "train" else text[cut:]
        if part.strip():
            yield start, part


def _read(shard: Shard, rules: Rules, counts: Counter) -> Texts:
    for stretch in shard:
        with files.readable(stretch.path):
            yield from READERS[files.kind(stretch.path)](stretch, rules, counts)


def _read_text(stretch: Stretch, rules: Rules, counts: Counter) -> Texts:
    parts, size, line_start = [], 0, True
    starts = stretch.start == 0 or rules.sample_by != "document"
    for offset, raw in _lines(stretch, PIECE_BYTES):
        text = _decode(raw, offset, stretch, rules, counts).strip()
        ends = line_start and (rules.sample_by == "line" or (rules.sample_by == "paragraph" and not text))
        if ends or size >= PIECE_BYTES:
            if parts:
                yield starts, "\n".join(parts)
            parts, size, starts = [], 0, ends or (starts and not parts)
        if text:
            parts.append(text)
            size += len(raw)
        line_start = raw.endswith(b"\n")
    if parts:
        yield starts, "\n".join(parts)


def _read_json(stretch: Stretch, rules: Rules, counts: Counter) -> Texts:
    for offset, raw in _lines(stretch):
        line = _decode(raw, offset, stretch, rules, counts)
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{_place(stretch, offset)}: not JSON: {error}. A line must be an object.") from None
            if not isinstance(row, dict):
                raise InputError(f"{_place(stretch, offset)}: not a JSON object. A line must be an object.")
            if not isinstance(row.get(rules.text_column, 0), str | None):
                raise _no_text(_place(stretch, offset), rules, row)
            yield from _cells([row[rules.text_column]], counts)


def _read_csv(stretch: Stretch, rules: Rules, counts: Counter) -> Texts:
    csv.field_size_limit(2**31 - 1)
    lines = (_decode(raw, offset, stretch, rules, counts) for offset, raw in _lines(stretch))
    rows = csv.DictReader(lines, delimiter="\t" if files.kind(stretch.path) == ".tsv" else ",")
    try:
        if rows.fieldnames and rules.text_column not in rows.fieldnames:
            raise _no_column(f"{stretch.path}:1", rules, rows.fieldnames)
        yield from _cells((row[rules.text_column] for row in rows), counts)
    except csv.Error as error:
        raise InputError(f"{stretch.path}:{rows.line_num}: not a table: {error}.") from None


def _read_parquet(stretch: Stretch, rules: Rules, counts: Counter) -> Texts:
    with pyarrow.parquet.ParquetFile(stretch.path) as file:
        _check_schema(file.schema_arrow, stretch, rules)
        for batch in file.iter_batches(1000, range(stretch.start, stretch.stop), [rules.text_column]):
            yield from _cells(batch[0].to_pylist(), counts)


def _read_arrow(stretch: Stretch, rules: Rules, counts: Counter) -> Texts:
    with pa.memory_map(stretch.path) as file, pa.ipc.open_stream(file) as batches:
        _check_schema(batches.schema, stretch, rules)
        for batch in islice(batches, stretch.start, stretch.stop):
            yield from _cells((value.as_py() for value in batch[rules.text_column]), counts)


def _read_hub(stretch: Stretch, rules: Rules, counts: Counter) -> Texts:
    name, config, split = stretch.path.removesuffix(HUB).rsplit(":", 2)
    data = _hub_stream(name, config or None)[0][split]
    for number, row in enumerate(data.shard(data.num_shards, stretch.start)):
        if not isinstance(row.get(rules.text_column, 0), str | None):
            raise _no_text(f"{name}, {split}, shard {stretch.start}, row {number}", rules, row)
        yield from _cells([row[rules.text_column]], counts)


def _check_schema(schema: pa.Schema, stretch: Stretch, rules: Rules) -> None:
    if rules.text_column not in schema.names:
        raise _no_column(stretch.path, rules, schema.names)
    kind = schema.field(rules.text_column).type
    if kind not in (pa.string(), pa.large_string(), pa.string_view()):
        raise InputError(f"{stretch.path}: column {rules.text_column!r} holds {kind}, not text. See --text_column.")


def _parquet_sizes(path: str) -> list[int]:
    metadata = pyarrow.parquet.read_metadata(path)
    return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]


def _arrow_sizes(path: str) -> list[int]:
    with pa.memory_map(path) as file, pa.ipc.open_stream(file) as batches:
        return [batch.nbytes for batch in batches]


GROUP_SIZES = {".parquet": _parquet_sizes, ".arrow": _arrow_sizes}
READERS = {
    ".txt": _read_text,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    HUB: _read_hub,
}


def _cells(values: Iterable[str | None], counts: Counter) -> Texts:
    for value in values:
        if value and not value.isspace():
            yield True, value
        else:
            counts["rows without text"] += 1


def _lines(stretch: Stretch, limit: int = sys.maxsize) -> Iterator[tuple[int, bytes]]:
    """The lines of a stretch with their offsets; a line longer than the limit comes in parts."""
    with files.open_bytes(stretch.path) as file:
        file.seek(stretch.start)
        offset, rest = stretch.start, b""
        while line := rest + file.readline(min(limit, stretch.stop - offset) - len(rest)):
            cut = len(line) if len(line) < limit or line.endswith(b"\n") else _last_break(line)
            yield offset, line[:cut]
            offset, rest = offset + cut, line[cut:]


def _decode(raw: bytes, offset: int, stretch: Stretch, rules: Rules, counts: Counter) -> str:
    return files.decode(raw, offset, lambda: _place(stretch, offset), rules.encoding_errors, counts)


def _place(stretch: Stretch, offset: int) -> str:
    lines_before = sum(part.endswith(b"\n") for _, part in _lines(replace(stretch, start=0, stop=offset), PIECE_BYTES))
    return f"{stretch.path}:{lines_before + 1}"


def _no_text(place: str, rules: Rules, row: dict) -> InputError:
    if rules.text_column not in row:
        return _no_column(place, rules, row)
    return InputError(f"{place}: {rules.text_column!r} must be text in double quotes.")


def _no_column(place: str, rules: Rules, columns: Iterable[str]) -> InputError:
    return InputError(
        f"{place}: there is no column {rules.text_column!r}, only {', '.join(map(repr, columns))}. "
        "Name the one that holds the text with --text_column."
    )


# From texts to blocks


def _packed(shards: list[Shard], packing: Packing, arguments: CorpusArguments) -> datasets.Dataset:
    targets = _targets(shards, packing)
    folder = next(iter(targets)).parent
    again = arguments.overwrite_cache and PartialState().is_local_main_process
    _write({target: part for target, part in targets.items() if again or not target.exists()}, packing, arguments)
    if not _counts(folder)["blocks"]:
        raise _too_short(folder, packing)
    if PartialState().is_main_process:
        _log_counts(folder, packing)
    table = concat_tables([MemoryMappedTable.from_file(str(target)) for target in targets])
    return datasets.Dataset(table, split=datasets.Split(packing.split), fingerprint=folder.name)


def _targets(shards: list[Shard], packing: Packing) -> dict[Path, list[tuple[int, Shard]]]:
    """The files of a split in the cache, and the numbered shards that each is made of."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_tiny_blocks" / _digest(shards, packing)
    parts = np.array_split(np.arange(len(shards)), max(1, min(len(shards), MOST_FILES)))
    names = (f"{packing.split}-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts)))
    return {
        folder / name: [(number, shards[number]) for number in part.tolist()]
        for name, part in zip(names, parts, strict=True)
    }


def _write(targets: dict[Path, list[tuple[int, Shard]]], packing: Packing, arguments: CorpusArguments) -> None:
    processes = min(arguments.preprocessing_num_workers or os.cpu_count(), len(targets))
    if processes > 1:
        # Each process tokenizes in one thread. It must be said before they fork: threads do not survive that.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with (
        ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) if processes > 1 else nullcontext() as pool
    ):
        written = (pool.map if pool else map)(partial(_write_file, packing), targets.keys(), targets.values())
        for _ in tqdm(written, f"Packing {packing.split}", len(targets), unit=" files", disable=not targets):
            pass


def _write_file(packing: Packing, target: Path, shards: list[tuple[int, Shard]]) -> None:
    """Complete or absent; the counts are written first."""
    ids = datasets.List(datasets.Value("int32"), length=packing.length)
    schema = datasets.Features(input_ids=ids, segment_start=datasets.Value("int32")).arrow_schema
    counts = Counter(blocks=0)
    blocks = chain.from_iterable(pack_shard(number, shard, packing, counts) for number, shard in shards)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        with pa.OSFile(str(draft), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            while rows := list(islice(blocks, 1000)):
                tokens = pa.array(np.concatenate([row["input_ids"] for row in rows]))
                starts = pa.array([row["segment_start"] for row in rows], pa.int32())
                columns = [pa.FixedSizeListArray.from_arrays(tokens, packing.length), starts]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        target.with_suffix(".json").write_text(json.dumps(counts))
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _too_short(folder: Path, packing: Packing) -> InputError:
    advice = "Give more text with --train_file, or shorter blocks with --max_seq_length."
    if packing.split == "validation":
        advice = "Hold out more with --validation_split_percentage, or give more text with --validation_file."
    return InputError(
        f"The {packing.split} text is shorter than one block: it has {_counts(folder)['tokens']} tokens, and a block "
        f"of --max_seq_length {packing.length} needs {packing.length - 2}. {advice}"
    )


def _counts(folder: Path) -> Counter:
    return sum((Counter(json.loads(path.read_text())) for path in folder.glob("*.json")), Counter())


def _log_counts(folder: Path, packing: Packing) -> None:
    counts = _counts(folder)
    found = ", ".join(f"{counts[what]:,} {what}" for what in ("blocks", "documents", "tokens", "tokens left over"))
    logger.info(f"{packing.split}: {found}")
    for what in ("rows without text", "characters replaced"):
        if counts[what]:
            logger.warning(f"{packing.split}: {counts[what]:,} {what} in its files")


def pack_shard(
    number: int, shard: Shard, packing: Packing, counts: Counter, turn: int = 0, of: int = 1
) -> Iterator[dict]:
    """The blocks of a shard, or of each `of`-th text of it from `turn` on."""
    tokenizer, starts_word = _backend(packing.tokenizer)
    random = np.random.default_rng([packing.seed, number] if of == 1 else [packing.seed, number, turn])
    texts = islice(_split_texts(shard, packing.rules, packing.split, counts), turn, None, of)
    yield from _pack(_tokenized(texts, tokenizer), packing, starts_word, random, counts)


@lru_cache(maxsize=2)
def _backend(content: str) -> tuple[tokenizers.Tokenizer, np.ndarray]:
    """A tokenizer that only tokenizes, and whether each of its tokens starts a word."""
    tokenizer = tokenizers.Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "[SEP]" in the text is text.
    vocabulary = tokenizer.get_vocab()
    spaces = any(token.startswith("▁") for token in vocabulary)  # BPE and Unigram mark words where they begin
    starts_word = np.ones(max(vocabulary.values()) + 1, dtype=bool)
    for token, number in vocabulary.items():
        starts_word[number] = token.startswith("▁") if spaces else not token.startswith("##")
    return tokenizer, starts_word


def _tokenized(texts: Texts, tokenizer: tokenizers.Tokenizer) -> Iterator[tuple[bool, list[int]]]:
    only_bytes = tokenizer.token_to_id("<0x0A>") is not None and tokenizer.token_to_id("▁") is None
    before = "\n" if only_bytes else ""  # other tokens show where a word begins
    batch, size = [], 0
    for start, text in chain(texts, [(False, "")]):
        batch.append((start, text))
        size += len(text)
        if size > BATCH_CHARACTERS or not text:
            encodings = tokenizer.encode_batch_fast(
                [text and before + text for _, text in batch], add_special_tokens=False
            )
            yield from zip((start for start, _ in batch), (encoding.ids for encoding in encodings), strict=True)
            batch, size = [], 0


def _pack(
    documents: Iterable[tuple[bool, list[int]]],
    packing: Packing,
    starts_word: np.ndarray,
    random: np.random.Generator,
    counts: Counter,
) -> Iterator[dict]:
    """Cut the documents, one after the other, into full blocks. What is left at the end is only counted."""
    cls, sep, length = packing.cls, packing.sep, packing.length
    tokens, starts = [], []  # What is not yet in a block, and where documents start in it.
    one_segment = random.random() < ONE_SEGMENT
    for start, ids in documents:
        counts["documents"] += start
        counts["tokens"] += len(ids)
        if start:
            starts.append(len(tokens))
        tokens += ids
        done = 0
        while len(tokens) - done >= (size := length - 2 - (not one_segment)):
            content = tokens[done : done + size]
            if one_segment:
                block, segment_start = [cls, *content, sep], length
            else:
                cut = _segment_cut(content, [place - done for place in starts], starts_word, random)
                block, segment_start = [cls, *content[:cut], sep, *content[cut:], sep], cut + 2
            yield {"input_ids": np.array(block, dtype=np.int32), "segment_start": segment_start}
            done += size
            counts["blocks"] += 1
            one_segment = random.random() < ONE_SEGMENT
        if done:
            del tokens[:done]
            starts = [place - done for place in starts if place > done]
    counts["tokens left over"] += len(tokens)


def _segment_cut(content: list[int], starts: list[int], starts_word: np.ndarray, random: np.random.Generator) -> int:
    """Where the second segment begins: at the document start nearest the middle, else at a word of the middle half."""
    low, high = len(content) // 4, 3 * len(content) // 4
    between = [place for place in starts if low <= place <= high]
    if between:
        return min(between, key=lambda place: abs(2 * place - len(content)))
    cut = int(random.integers(low, high + 1))
    words = np.flatnonzero(starts_word[content[cut : high + 1]])
    return cut + int(words[0]) if len(words) else cut


# In parts


@dataclass(frozen=True, kw_only=True)
class Prepare(TokenizerArguments, CorpusArguments):
    """Pack a part of a corpus into the cache, where a run with the same text, tokenizer, length and seed finds it."""

    SIZES: ClassVar[dict[str, dict]] = {}

    part: str = flag("1/1", "3/16 is the third of 16 parts, which are 1/16 to 16/16. The order does not matter.")
    seed: int = flag(42, "The run's.")


def prepare(arguments: Prepare) -> None:
    number, slash, parts = arguments.part.partition("/")
    if not (slash and number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise InputError(f"--part {arguments.part}: the parts of 16 are 1/16, 2/16 and so on to 16/16.")
    if arguments.streaming:
        raise InputError("--streaming keeps nothing on the disk: there is nothing to prepare.")
    length = max(512, arguments.max_seq_length)
    texts = partial(documents, arguments)
    tokenizer = load_tokenizer(arguments, texts, fingerprint(arguments), model_max_length=length)
    for split, (shards, packing) in plan_packing(arguments, tokenizer, arguments.seed).items():
        targets = _targets(shards, packing)
        mine = dict(islice(targets.items(), int(number) - 1, None, int(parts)))
        _write(
            {path: part for path, part in mine.items() if arguments.overwrite_cache or not path.exists()},
            packing,
            arguments,
        )
        missing = sum(not target.exists() for target in targets)
        state = f"{missing} of the {len(targets)} files are still to come" if missing else "all files are there"
        print(f"{split}: part {arguments.part} is in {next(iter(targets)).parent}; {state}.")


def main() -> None:
    if sys.argv[1:2] != ["prepare"]:
        sys.exit("usage: python -m hf_tiny.data.corpus prepare --part 3/16 [--train_file ...]; --help lists every flag")
    try:
        prepare(flags.parse(Prepare, sys.argv[2:]))
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
