"""Finding and reading the files that a person names: each mistake is a message that says which file and which line."""

import csv
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
from datasets.exceptions import DatasetGenerationError

from hf_tiny.errors import InputError

ENCODING_ERRORS = ("strict", "replace")


def expand(patterns: list[str], flag: str, supported: tuple[str, ...], any_suffix: bool = False) -> list[str]:
    """The files of files, folders and globs. Of a folder only those with a supported suffix; with `any_suffix` a file
    that is named itself may have another."""
    found = []
    for pattern in map(os.path.expanduser, patterns):
        matches = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
        if not matches:
            raise InputError(f"{flag} {pattern}: there is no such file or folder, and as a pattern it matches nothing.")
        for path in map(Path, matches):
            inside = sorted(str(file) for file in path.rglob("*") if kind(file) in supported and file.is_file())
            if path.is_dir() and not inside:
                raise InputError(f"{flag} {path}: this folder has no file that ends in {', '.join(supported)}.")
            if not path.is_dir() and kind(path) not in supported and not any_suffix:
                raise InputError(f"{flag} {path}: the name must end in {', '.join(supported)}, with or without .gz.")
            found += inside or [str(path)]
    return list(dict.fromkeys(map(os.path.realpath, found)))


def kind(path: str | Path) -> str:
    """The suffix that says how to read a file; .gz is no such suffix."""
    return Path(str(path).lower().removesuffix(".gz")).suffix


def check_encoding_errors(value: str) -> None:
    if value not in ENCODING_ERRORS:
        raise InputError(f"--encoding_errors {value}: must be strict or replace.")


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Files that are missing, broken or not ours to read are the person's to mend."""
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: the file cannot be read: {error}") from error


def open_bytes(path: str):
    return (gzip.open if path.lower().endswith(".gz") else open)(path, "rb")


def decode(raw: bytes, offset: int, place: Callable[[], str], encoding_errors: str, counts: Counter) -> str:
    """UTF-8 bytes that begin at `offset` of their file; `place()` names the line when it is needed."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        if encoding_errors == "strict":
            raise InputError(
                f"{place()}: the byte at offset {offset + error.start} of the file is not UTF-8. "
                "Convert the file to UTF-8, or have such bytes replaced and counted with --encoding_errors replace."
            ) from None
        text = raw.decode(errors="replace")
        counts["characters replaced"] += text.count("\ufffd") - raw.count("\ufffd".encode())
    return text.removeprefix("\ufeff") if offset == 0 else text


def load_hub(name: str, config: str | None) -> datasets.DatasetDict:
    """The splits of a data set on the Hub; `train` is one of them."""
    with _loadable(name):
        splits = datasets.load_dataset(name, config)
    return _with_train(name, splits)


def stream_hub(name: str, config: str | None) -> tuple[datasets.IterableDatasetDict, int]:
    """The same as streams, and a number that says which repository it is, and at which commit."""
    with _loadable(name):
        builder = datasets.load_dataset_builder(name, config)
        splits = builder.as_streaming_dataset()
    origins = [files.origin_metadata for files in builder.config.data_files.values()]
    return _with_train(name, splits), zlib.crc32(repr(origins).encode())


@contextmanager
def _loadable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise InputError(f"--dataset_name {name}: it could not be loaded: {error}") from error


def _with_train(name: str, splits: dict) -> dict:
    if "train" not in splits:
        raise InputError(f"--dataset_name {name}: it has no split train, only {', '.join(splits)}.")
    return splits


def numbered_lines(path: str, encoding_errors: str, counts: Counter) -> Iterator[tuple[int, str]]:
    """Each line of a text file with its number, from 1, without its line break."""
    offset = 0
    with readable(path), open_bytes(path) as file:
        for number, raw in enumerate(file, 1):
            text = decode(raw, offset, lambda number=number: f"{path}:{number}", encoding_errors, counts)
            offset += len(raw)
            yield number, text.rstrip("\r\n")


def table_rows(path: str, encoding_errors: str, counts: Counter) -> Iterator[tuple[str, dict]]:
    """Each row of a table with its place, such as `file.csv:3`."""
    return TABLES[kind(path)](path, encoding_errors, counts)


def _csv_rows(path: str, encoding_errors: str, counts: Counter) -> Iterator[tuple[str, dict]]:
    csv.field_size_limit(2**31 - 1)
    lines = (f"{line}\n" for _, line in numbered_lines(path, encoding_errors, counts))
    reader = csv.reader(lines, strict=True)
    try:
        yield from _with_header(path, ((reader.line_num, row) for row in reader if row))
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not a table: {error}.") from None


def _tsv_rows(path: str, encoding_errors: str, counts: Counter) -> Iterator[tuple[str, dict]]:
    """A line is a row: quotes are text in .tsv, and people write them unpaired."""
    lines = numbered_lines(path, encoding_errors, counts)
    yield from _with_header(path, ((number, line.split("\t")) for number, line in lines if line))


def _with_header(path: str, rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[str, dict]]:
    _, header = next(rows, (0, []))
    for number, row in rows:
        if len(row) != len(header):
            raise InputError(
                f"{path}:{number}: this row has {len(row)} columns, and the first line names {len(header)}: "
                f"{', '.join(header)}."
            )
        yield f"{path}:{number}", dict(zip(header, row, strict=True))


def _json_rows(path: str, encoding_errors: str, counts: Counter) -> Iterator[tuple[str, dict]]:
    """An object a line, or one list of objects."""
    lines = ((number, line) for number, line in numbered_lines(path, encoding_errors, counts) if line.strip())
    for first, line in lines:
        whole_list = line.lstrip().startswith("[")
        if whole_list:
            line = "\n".join([line, *(rest for _, rest in lines)])
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{first}: not JSON: {error}. A line must be an object.") from None
        for number, row in enumerate(value, 1) if whole_list else [(first, value)]:
            place = f"{path}, row {number}" if whole_list else f"{path}:{number}"
            if not isinstance(row, dict):
                raise InputError(f"{place}: not a JSON object. A line must be an object.")
            yield place, row


def _parquet_rows(path: str, encoding_errors: str, counts: Counter) -> Iterator[tuple[str, dict]]:
    with readable(path), pyarrow.parquet.ParquetFile(path) as file:
        names = class_names(datasets.Features.from_arrow_schema(file.schema_arrow))
        rows = (row for batch in file.iter_batches(1000) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", named(row, names)


TABLES = {
    ".csv": _csv_rows,
    ".tsv": _tsv_rows,
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}


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
