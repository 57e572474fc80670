"""THE reader: files, folders, globs, .gz and datasets of the Hub become rows that know their place.

A file is read as a whole or in parts (`parts`), each by itself. Each mistake is a message that says which file and line.
"""

import csv
import hashlib
import io
import json
import logging
import os
import re
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from glob import glob
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import datasets
import pyarrow as pa
import pyarrow.parquet
from datasets.exceptions import DatasetGenerationError

from hf_tiny.data.encoding import UTF8, Decoding, Recoded, is_gzip, open_bytes
from hf_tiny.errors import InputError, similar

logger = logging.getLogger(__name__)

TEXT = ".txt"
HUB = ".hub"  # stands where a file has its suffix: this is a split of a dataset on the Hub, to be streamed
SAVED = {  # files of other programs, and how to make of them what is read here
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "Save the sheet as CSV; in Excel: Save As, CSV UTF-8."),
    **dict.fromkeys((".docx", ".doc", ".hwp", ".hwpx", ".pdf", ".odt", ".rtf"), "Save the text as plain text, .txt."),
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".tgz", ".xz", ".bz2", ".zst"), "Unpack the archive first."),
}
DELIMITERS = ",;\t|"  # of .csv files: the first that the header has
SMALL_BYTES = 1 << 26  # A file that is larger is not read as a whole for a message.
LONGEST_LINE = 1 << 26  # bytes of a row, or of a line that must stay whole
LONGEST_NAME = 40  # of a column, in a message: without a header it is a text
PIECE_BYTES = 1 << 16  # Longer lines of a text file may be read in pieces.


@dataclass(frozen=True)
class Part:
    """A part of a file: bytes [start, stop) of lines, row groups [start, stop) of Parquet or Arrow. Of a dataset that is
    streamed from the Hub, shard `start`."""

    # A stream that goes on is recognised by the representation of its parts: copies have other paths and times.
    path: str = field(repr=False)
    start: int = 0
    stop: int = sys.maxsize
    size: int = 0
    number: int = 0  # of the file in its corpus
    version: int = field(default=0, repr=False)  # when the file was changed, or at which commit the dataset is


class Place(NamedTuple):
    """A line, as `file:line`. How many lines are before its part of the file is counted only when a message says it."""

    part: Part
    number: int
    offset: int

    def __str__(self) -> str:
        path, start = self.part.path, self.part.start
        lines = raw_lines(Part(path, stop=start), Decoding(), PIECE_BYTES) if start else ()
        before = sum(raw.endswith(b"\n") for _, raw in lines)
        return f"{path}:{before + self.number}"


Rows = Iterator[tuple[Place | str, dict]]


# Finding files


def expand(patterns: list[str], flag: str, supported: tuple[str, ...], any_suffix: bool = False) -> list[str]:
    """The files of files, folders and globs. Of a folder only those with a supported suffix, and none that is hidden; with
    `any_suffix` a file that is named itself may have another."""
    found = []
    for pattern in map(os.path.expanduser, patterns):
        matches = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
        matches = [match for match in matches if os.path.exists(match)]  # not a link to what is gone
        if not matches:
            raise InputError(
                f"{flag} {pattern}: there is no such file or folder, and as a pattern it matches nothing.{similar(pattern)}"
            )
        for path in map(Path, matches):
            files = [file for file in path.rglob("*") if not is_hidden(file.relative_to(path))]
            if runs := {file.parent for file in files if file.parent != path and is_of_run(file)}:
                logger.warning(f"{flag} {path}: {min(runs)} is the folder of a run: what runs have left is not read.")
                files = [file for file in files if not runs.intersection(file.parents)]
            inside = sorted(str(file) for file in files if kind(file) in supported and file.is_file())
            others = {kind(file) for file in files} if path.is_dir() else {kind(path)}
            advice = "".join(f" {SAVED[other]}" for other in sorted(others & SAVED.keys()))
            if path.is_dir() and not inside:
                raise InputError(f"{flag} {path}: this folder has no file that ends in {', '.join(supported)}.{advice}")
            if not path.is_dir() and kind(path) not in supported and (advice or not any_suffix):
                ends = ", ".join(supported)
                raise InputError(f"{flag} {path}: the name must end in {ends}, with or without .gz.{advice}")
            if inside and advice:
                left_out = ", ".join(sorted(others & SAVED.keys()))
                logger.warning(f"{flag} {path}: files that end in {left_out} are left out.{advice}")
            found += inside or [str(path)]
    return list(dict.fromkeys(map(os.path.realpath, found)))


def is_hidden(path: Path) -> bool:
    """As `.ipynb_checkpoints/a.txt`, or `._a.png` in an archive of a Mac: a copy, or no text and no image at all."""
    return any(part.startswith(".") for part in path.parts)


def is_of_run(path: Path) -> bool:
    """Whether a file lies in the folder that a run has written to, beside the data perhaps: it is no data."""
    return path.name == "recipe.yaml" and path.with_name("metrics.jsonl").exists()


def kind(path: str | Path) -> str:
    """The suffix that says how to read a file; .gz is no such suffix."""
    return Path(str(path).lower().removesuffix(".gz")).suffix


def open_text(path: str, decoding: Decoding) -> io.BufferedIOBase:
    """The bytes of a text file; those of another encoding become UTF-8."""
    file = open_bytes(path)
    encoding = decoding.encoding_of(file)
    return file if encoding == UTF8 else io.BufferedReader(Recoded(file, path, encoding, decoding))


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Files that are missing, broken or not ours to read are the person's to mend."""
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the file cannot be read: {error}") from error


def parts(path: str, size: int, decoding: Decoding, number: int = 0, mark: bytes = b"\n") -> Iterator[Part]:
    """A file cut into parts of about `size` bytes; a text file after a `mark`, such as the end of a line. What is
    compressed or in another encoding than UTF-8 stays whole."""
    with readable(path):
        version, total = os.stat(path).st_mtime_ns, os.path.getsize(path)
        whole = is_gzip(path) or kind(path) in (".csv", ".tsv")
        if kind(path) in GROUP_SIZES and not whole:
            ranges = _group_ranges(GROUP_SIZES[kind(path)](path), size)
        elif whole or not _is_utf8(path, decoding) or (kind(path) in JSON and _is_list(path, decoding)):
            ranges = iter([(0, sys.maxsize, total)])
        else:
            ranges = _byte_ranges(path, size, total, mark)
        for start, stop, bytes_ in ranges:
            yield Part(path, start, stop, bytes_, number, version)


def _group_ranges(sizes: list[int], size: int) -> Iterator[tuple[int, int, int]]:
    start = 0
    for stop in range(1, len(sizes) + 1):
        if sum(sizes[start:stop]) >= size or stop == len(sizes):
            yield start, stop, sum(sizes[start:stop])
            start = stop


def _byte_ranges(path: str, size: int, total: int, mark: bytes) -> Iterator[tuple[int, int, int]]:
    start = 0
    with open(path, "rb") as file:
        while start < total:
            file.seek(start + size)
            if kind(path) == TEXT:
                window = file.read(PIECE_BYTES)
                more = window.find(mark) + len(mark) if mark in window else _last_break(window)
            else:
                more = len(file.readline(LONGEST_LINE))  # a row of a table stays whole
            stop = min(start + size + more, total)
            yield start, stop, stop - start
            start = stop


def _last_break(window: bytes) -> int:
    """The last place where UTF-8 can be cut: after a line or a word, else between two characters."""
    between = (place for place in range(len(window) - 1, 0, -1) if window[place] & 0xC0 != 0x80)
    return window.rfind(b"\n") + 1 or window.rfind(b" ") + 1 or next(between, len(window))


# Lines


def raw_lines(part: Part, decoding: Decoding, limit: int = sys.maxsize) -> Iterator[tuple[Place, bytes]]:
    """The lines of a part, in UTF-8, with their line breaks; a line longer than the limit comes in pieces."""
    number, offset, rest = 1, part.start, b""
    with readable(part.path), open_text(part.path, decoding) as file:
        if offset:
            file.seek(offset)
        while line := rest + file.readline(min(limit, part.stop - offset) - len(rest)):
            cut = len(line) if len(line) < limit or line.endswith(b"\n") else _last_break(line)
            yield Place(part, number, offset), line[:cut]
            number += line.endswith(b"\n")
            offset, rest = offset + cut, line[cut:]


def _lines(part: Part, decoding: Decoding) -> Iterator[tuple[Place, str]]:
    end = Place(part, 0, 0), b""
    for (place, raw), (after, _) in pairwise(chain(raw_lines(part, decoding, LONGEST_LINE), [end])):
        if after.number == place.number:
            raise InputError(
                f"{place}: this line has more than {LONGEST_LINE:,} bytes. Is it text? Break it into lines."
            )
        yield place, decoding.text(raw, place).rstrip("\r\n")


def numbered_lines(path: str, decoding: Decoding) -> Iterator[tuple[int, str]]:
    """Each line of a text file with its number, from 1, without its line break."""
    return ((place.number, line) for place, line in _lines(Part(path), decoding))


# Rows


def table_rows(path: str, decoding: Decoding) -> Iterator[tuple[str, dict]]:
    """Each row of a table with its place, such as `file.csv:3`."""
    return ((str(place), row) for place, row in rows(Part(path), decoding))


def rows(part: Part, decoding: Decoding, columns: list[str] | None = None) -> Rows:
    """The same for a part of a file; of the formats that allow it, only these columns are read."""
    with readable(part.path):
        yield from READERS[kind(part.path)](part, decoding, columns)


def _csv_rows(part: Part, decoding: Decoding, columns: list[str] | None) -> Rows:
    csv.field_size_limit(2**31 - 1)
    lines = (f"{line}\n" for _, line in _lines(part, decoding))
    first = next(lines, "")
    delimiter = next((sign for sign in DELIMITERS if sign in first), ",")
    if named := re.fullmatch(r'"?sep=(.)"?[,;\s]*', first):  # of Excel: above the header
        delimiter, first = named[1], "\n"
    reader, read = csv.reader(chain([first], lines), delimiter=delimiter, strict=True), 0

    def table() -> Iterator[tuple[str, list[str]]]:
        nonlocal read
        for row in reader:
            read = reader.line_num
            if any(row) or len(row) == 1:
                yield f"{part.path}:{read}", row

    try:
        yield from _with_header(table())
    except csv.Error as error:
        raise InputError(
            f"{part.path}:{read + 1}: not a table: {error}, in the row that begins here. Is a quotation mark not closed? Inside of "
            "a cell it is written twice."
        ) from None


def _tsv_rows(part: Part, decoding: Decoding, columns: list[str] | None) -> Rows:
    """A line is a row: quotes are text in .tsv, and people write them unpaired."""
    lines = _lines(part, decoding)
    yield from _with_header((place, line.split("\t")) for place, line in lines if line)


def _with_header(table: Iterator[tuple[Place | str, list[str]]]) -> Rows:
    """Excel leaves empty columns behind the last one: they have no name. A Mac may write names in another form than people
    type them."""
    start, header = next(table, ("", []))
    header, width = [normalize("NFC", name) for name in header], len(header)
    while len(header) > 1 and not header[-1].strip():
        header = header[:-1]
    _refuse_twice(header, start)
    for place, row in table:
        unnamed = len(row) == width and not any(row[len(header) :])
        if len(row) != len(header) and not unnamed:
            raise InputError(
                f"{place}: this row has {len(row)} columns, and the first line names {len(header)}: {', '.join(header)}."
                + " If a title stands above the names of the columns, delete it." * (len(header) < width)
            )
        yield place, dict(zip(header, row, strict=False))


def _refuse_twice(columns: list[str], place: Place | str) -> None:
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice and not twice[0].strip():
        raise InputError(
            f"{place}: several columns have no name here. If their names stand in a line below, delete what is above it."
        )
    if twice:
        raise InputError(f"{place}: the column {twice[0]!r} is there twice. Give each column a name of its own.")


def _json_rows(part: Part, decoding: Decoding, columns: list[str] | None) -> Rows:
    """An object a line, or one list of objects, which is read as a whole."""
    lines = _lines(part, decoding)
    if _is_list(part.path, decoding):
        values = _parsed("\n".join(line for _, line in lines), f"{part.path}:1", part.path, decoding)
        found: Rows = ((f"{part.path}, row {number}", value) for number, value in enumerate(values, 1))
    else:
        found = ((place, _parsed(line, place, part.path, decoding)) for place, line in lines if line.strip())
    for place, row in found:
        if not isinstance(row, dict):
            raise InputError(f"{place}: not a JSON object. A line, or a row of the list, must be an object.")
        yield place, row


def _is_utf8(path: str, decoding: Decoding) -> bool:
    with open(path, "rb") as file:
        return decoding.encoding_of(file) == UTF8


def _is_list(path: str, decoding: Decoding) -> bool:
    with open_text(path, decoding) as file:
        return file.read(PIECE_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _parsed(text: str, place: Place | str, path: str, decoding: Decoding):
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{place}: not JSON: {error}. {_json_advice(path, decoding)}") from None


def _json_advice(path: str, decoding: Decoding) -> str:
    """Some files, as those of question answering, are one object with a list in it."""
    with suppress(ValueError, RecursionError), open_text(path, decoding) as file:
        whole = json.loads(file.read(SMALL_BYTES))
        if isinstance(whole, dict):
            names = ", ".join(map(repr, whole))
            return f"The file is one object, of {names}. Write the rows, a list of objects, to a file."
    return "A line must be an object, or the file a list of objects."


def _parquet_rows(part: Part, decoding: Decoding, columns: list[str] | None) -> Rows:
    with open_bytes(part.path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
        wanted, classes = _described(part.path, file.schema_arrow, columns)
        groups = range(part.start, min(part.stop, file.num_row_groups))
        before = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
        yield from _batch_rows(part, file.iter_batches(1000, groups, wanted), classes, before)


def _arrow_rows(part: Part, decoding: Decoding, columns: list[str] | None) -> Rows:
    """As `datasets` writes it: Arrow's format for streams."""
    opened = open_bytes(part.path) if is_gzip(part.path) else pa.memory_map(part.path)
    with opened as file, pa.ipc.open_stream(file) as stream:
        wanted, classes = _described(part.path, stream.schema, columns)
        before = sum(batch.num_rows for batch in islice(stream, part.start))
        batches = (batch.select(wanted) for batch in islice(stream, part.stop - part.start))
        yield from _batch_rows(part, batches, classes, before)


def _described(path: str, schema: pa.Schema, columns: list[str] | None) -> tuple[list[str], dict[str, list[str]]]:
    """The columns to read and the names of their classes. All columns when one that is asked for is missing: a message can
    then say which there are."""
    try:
        wanted = columns if columns and set(columns) <= set(schema.names) else schema.names
        classes = class_names(datasets.Features.from_arrow_schema(schema))
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # it is read without a look at what it is
        raise InputError(
            f"{path}: the file cannot be read: the names or types of its columns are damaged: {error}"
        ) from error
    _refuse_twice(schema.names, path)
    return wanted, {column: names for column, names in classes.items() if column in wanted}


def _batch_rows(part: Part, batches: Iterator, classes: dict[str, list[str]], before: int) -> Rows:
    for number, row in enumerate((row for batch in batches for row in _checked(batch).to_pylist()), before + 1):
        yield f"{part.path}, row {number}", named(row, classes)


def _checked(batch: pa.RecordBatch, full: bool = True) -> pa.RecordBatch:
    """What is damaged could be read as anything, or end the process."""
    batch.validate(full=full)
    return batch


def _parquet_sizes(path: str) -> list[int]:
    metadata = pyarrow.parquet.read_metadata(path)
    return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]


def _arrow_sizes(path: str) -> list[int]:
    with pa.memory_map(path) as file, pa.ipc.open_stream(file) as stream:
        return [_checked(batch, full=False).nbytes for batch in stream]


def _hub_rows(part: Part, decoding: Decoding, columns: list[str] | None) -> Rows:
    name, config, split = part.path.removesuffix(HUB).rsplit(":", 2)
    data = _hub_stream(name, config or None)[0][split]
    for number, row in enumerate(data.shard(data.num_shards, part.start), 1):
        yield f"{name}, {split}, shard {part.start}, row {number}", row


GROUP_SIZES = {".parquet": _parquet_sizes, ".arrow": _arrow_sizes}
JSON = (".jsonl", ".json")
TABLES = {
    ".csv": _csv_rows,
    ".tsv": _tsv_rows,
    **dict.fromkeys(JSON, _json_rows),
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
READERS = {**TABLES, HUB: _hub_rows}


# Cells


def cell(row: dict, column: str, place: Place | str, flag_name: str):
    """What a column of a row holds; `flag_name` is the flag that names the column."""
    if column not in row:
        alike = [name for name in row if name.strip().casefold() == column.strip().casefold()]
        header = kind(str(place).rpartition(":")[0]) in (".csv", ".tsv")
        advice = f"Give {flag_name} {shlex.quote(alike[0])}." if alike else f"Name the right one with {flag_name}."
        advice += " The first line of the file must name the columns." * (header and not alike)
        names = ", ".join(repr(name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…") for name in row)
        raise InputError(f"{place}: there is no column {column!r}, only {names}. {advice}")
    return row[column]


def text_cell(row: dict, column: str, place: Place | str, flag_name: str) -> str:
    return _typed_cell(row, column, place, flag_name, str | None, "text") or ""


def list_cell(row: dict, column: str, place: Place | str, flag_name: str) -> list:
    return _typed_cell(row, column, place, flag_name, list, "a list")


def _typed_cell(row: dict, column: str, place: Place | str, flag_name: str, wanted, name: str):
    value = cell(row, column, place, flag_name)
    if not isinstance(value, wanted):
        raise InputError(f"{place}: {column!r} is {value!r} and must be {name}. See {flag_name}.")
    return value


def class_names(features: datasets.Features) -> dict[str, list[str]]:
    """The columns that hold class numbers, or lists of them, and the names of the classes."""
    inner = {column: f.feature if isinstance(f, datasets.List) else f for column, f in features.items()}
    return {column: feature.names for column, feature in inner.items() if isinstance(feature, datasets.ClassLabel)}


def named(row: dict, names: dict[str, list[str]]) -> dict:
    """The row with names in place of class numbers; -1, which stands for a hidden label, becomes None."""
    for column, classes in names.items():
        value = row[column]
        lookup = dict(enumerate(classes))
        row[column] = [lookup.get(each) for each in value] if isinstance(value, list) else lookup.get(value)
    return row


def hashed_below(share: float, key: str) -> bool:
    """True for this share of all keys, and for the same ones on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") < share * 2**64


# The Hub


def load_hub(name: str, config: str | None) -> datasets.DatasetDict:
    """The splits of a dataset on the Hub; `train` is one of them."""
    with _loadable(name):
        splits = datasets.load_dataset(name, config)
    return _with_train(name, splits)


def hub_parts(name: str, config: str | None) -> dict[str, list[Part]]:
    """The shards of each split, to be streamed."""
    splits, version = _hub_stream(name, config)
    paths = {split: f"{name}:{config or ''}:{split}{HUB}" for split in splits}
    return {
        split: [Part(paths[split], shard, shard + 1, 0, shard, version) for shard in range(data.num_shards)]
        for split, data in splits.items()
    }


@lru_cache(maxsize=8)
def _hub_stream(name: str, config: str | None) -> tuple[dict[str, datasets.IterableDataset], int]:
    """The splits, in as many shards as their files allow (of Parquet, a row group is one), and a number that says which
    repository it is, and at which commit."""
    with _loadable(name):
        builder = datasets.load_dataset_builder(name, config)
        splits = builder.as_streaming_dataset()
    origins = [files.origin_metadata for files in builder.config.data_files.values()]
    streams = {split: data.reshard() for split, data in _with_train(name, splits).items()}
    return streams, zlib.crc32(repr(origins).encode())


@contextmanager
def _loadable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, DatasetGenerationError) as error:  # a RuntimeError: it is a script
        raise InputError(f"--dataset_name {name}: it could not be loaded: {error}") from error


def _with_train(name: str, splits: dict) -> dict:
    if "train" not in splits:
        raise InputError(f"--dataset_name {name}: it has no split train, only {', '.join(splits)}.")
    return splits
