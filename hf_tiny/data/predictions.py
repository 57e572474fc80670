"""Texts and sentences written as they were read, with what a model predicts."""

import csv
import json
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from hf_tiny.data import conllu, files
from hf_tiny.data.tagged import LINES, TAG_FIELDS, TREES, Sentence, Text


def write_texts(texts: Sequence[Text], predictions: Sequence[str], folder: Path, name: str) -> list[Path]:
    """As they were read, with a column `prediction`, or with the predicted label before the text; `folder/name.suffix`
    for each suffix of the files that they came from."""
    rows = {}
    for text, prediction in zip(texts, predictions, strict=True):
        if text.kind == LINES:
            row = f"{prediction}{text.row['between'] or ' '}{text.text}"
        else:
            row = {**text.row, "prediction": prediction}
        rows.setdefault(text.kind, []).append(row)
    return [_write(folder / f"{name}{kind}", kind, found) for kind, found in rows.items()]


def write_tags(
    sentences: Sequence[Sentence], predictions: Sequence[Sequence[str | None]], folder: Path, name: str, tag_field: str
) -> list[Path]:
    """The predicted tag (None: there is none) as one more last column, as the column `prediction`, or in the tag field
    of CoNLL-U; of morphemes, as `Tags=` in MISC."""
    rows = {}
    for sentence, found in zip(sentences, predictions, strict=True):
        tags = [tag or "_" for tag in found]
        if sentence.kind == TREES:
            if sentence.word_of is not None:
                change = partial(_change_misc, "Tags", _joined(tags, sentence.word_of))
            else:
                change = partial(_change_columns, {TAG_FIELDS[tag_field]: tags})
            row = "\n".join([*conllu.fill(sentence.lines, change), ""])
        elif sentence.kind in files.TABLES:
            row = {**json.loads(sentence.lines[0]), "prediction": tags}
        else:
            tab = "\t" if "\t" in sentence.lines[0] else " "
            row = "\n".join([*(f"{line}{tab}{tag}" for line, tag in zip(sentence.lines, tags, strict=True)), ""])
        rows.setdefault(sentence.kind, []).append(row)
    return [_write(folder / f"{name}{kind}", kind, found) for kind, found in rows.items()]


def write_links(
    sentences: Sequence[Sentence],
    heads: Sequence[Sequence[int | None]],
    relations: Sequence[Sequence[str | None]],
    folder: Path,
    name: str,
    task: str,
) -> list[Path]:
    """The predicted heads and relations of all words (None: there is none) in HEAD and DEPREL of CoNLL-U, subjects as
    `Subject=` in MISC; of a table's row as the column `prediction`, pairs of head and relation."""
    rows = {}
    for sentence, to, labels in zip(sentences, heads, relations, strict=True):
        words = ["_" if head is None else str(head) for head in to]
        if sentence.kind != TREES:
            row = {**json.loads(sentence.lines[0]), "prediction": list(zip(to, labels, strict=True))}
        else:
            if task == "subject":
                change = partial(_change_misc, "Subject", [None if head is None else str(head) for head in to])
            else:
                columns = {conllu.HEAD: words, conllu.DEPREL: [label or "_" for label in labels]}
                change = partial(_change_columns, {**columns, conllu.DEPS: ["_"] * len(words)})
            row = "\n".join([*conllu.fill(sentence.lines, change), ""])
        rows.setdefault(sentence.kind, []).append(row)
    return [_write(folder / f"{name}{kind}", kind, found) for kind, found in rows.items()]


def _joined(tags: list[str], word_of: tuple[int, ...]) -> list[str]:
    """The tags of the characters of each word."""
    words = [[] for _ in range(word_of[-1] + 1)]
    for tag, word in zip(tags, word_of, strict=True):
        words[word].append(tag)
    return [",".join(word) for word in words]


def _change_columns(values: dict[int, list[str]], index: int, columns: list[str]) -> None:
    for column, found in values.items():
        columns[column] = found[index]


def _change_misc(key: str, values: list[str | None], index: int, columns: list[str]) -> None:
    if values[index] is not None:
        columns[conllu.MISC] = conllu.add_misc(columns[conllu.MISC], key, values[index])


def _write(path: Path, kind: str, rows: list) -> Path:
    if kind == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
        return path
    with open(path, "w", encoding="utf-8", newline="") as file:
        if kind in (".csv", ".tsv"):
            names = list(dict.fromkeys(chain.from_iterable(rows)))  # files may differ in their columns
            table = [names, *([row.get(name, "") for name in names] for row in rows)]
            if kind == ".csv":
                csv.writer(file, lineterminator="\n").writerows(table)
            else:
                file.writelines("\t".join(row) + "\n" for row in table)
        elif kind in (".jsonl", ".json"):
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        else:
            file.writelines(f"{row}\n" for row in rows)
    return path
