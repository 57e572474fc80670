"""Predictions in the format of the input: a file for each suffix of the files that were read."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet

BINARY = {".parquet", ".arrow"}  # formats that are no text


def write(rows: Iterable[tuple[str, str | dict]], folder: Path, name: str) -> list[Path]:
    """`folder/name.suffix` for each suffix. rows: the suffix and a line, or the columns of a table."""
    paths = []
    for suffix, found in _by_suffix(rows).items():
        path = folder / f"{name}{suffix}"
        paths.append(path)
        if suffix == ".parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist(found), path)
        elif suffix == ".arrow":
            table = pa.Table.from_pylist(found)
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table)
        else:
            # Excel takes a .csv without the mark for one in the encoding of the system, and spoils its Korean.
            encoding = "utf-8-sig" if suffix == ".csv" and not str(found).isascii() else "utf-8"
            with open(path, "w", encoding=encoding, newline="") as file:
                _write_text(file, suffix, found)
    return paths


def print_rows(rows: Iterable[tuple[str, str | dict]], file: TextIO) -> None:
    """The same to a stream; none of them may be of a binary format."""
    for suffix, found in _by_suffix(rows).items():
        _write_text(file, suffix, found)


def _by_suffix(rows: Iterable[tuple[str, str | dict]]) -> dict[str, list]:
    found = defaultdict(list)
    for suffix, row in rows:
        found[suffix].append(row)
    return found


def _write_text(file, suffix: str, rows: list) -> None:
    if suffix in (".csv", ".tsv"):
        names = list(dict.fromkeys(chain.from_iterable(rows)))  # files may differ in their columns
        table = [names, *([row.get(name, "") for name in names] for row in rows)]
        if suffix == ".csv":
            csv.writer(file, lineterminator="\n").writerows(table)
        else:
            file.writelines("\t".join(map(str, row)) + "\n" for row in table)
    elif suffix == ".json":
        json.dump(rows, file, ensure_ascii=False, default=str, indent=1)
    elif suffix == ".jsonl":
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    else:
        file.writelines(f"{row}\n" for row in rows)
