"""Whatever bytes a file has: rows, or an InputError that names the file; never another exception."""

import gzip
import io
import random
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hf_tiny import InputError
from hf_tiny.data import sources
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.data.encoding import Decoding
from hf_tiny.tasks.classify import ClassifyArguments, TextTask
from hf_tiny.tasks.parse import LinkTask, ParseArguments
from hf_tiny.tasks.tag import TagArguments, TagTask
from hf_tiny.tasks.translate import PairArguments, PairTask

quick = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PIECES = [
    *(
        b"\n",
        b"\r\n",
        b"\t",
        b",",
        b";",
        b'"',
        b" ",
        b"\0",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\x00\x00\xfe\xff",
        b"\x1f\x8b",
    ),
    *(
        b"text",
        b"label",
        b"words",
        b"tags",
        b"1",
        b"-1",
        b"_",
        b"#",
        b"nan",
        b"1e999",
        b"[",
        b"]",
        b"{",
        b"}",
        b":",
        b"null",
    ),
    *("한국어".encode(), "한국어".encode("cp949"), "가".encode("utf-16-le"), "é".encode("latin-1"), b"\xed\xa0\x80"),
    *(b'{"text": "a", "label": 1}\n', b'{"text": ["a"], "label": {}}\n', b"text,label\na,b\n", b"text\tlabel\na\tb\n"),
    *(b'{"words": ["a"], "tags": ["b"]}\n', b'{"words": "a", "tags": 1}\n', b'{"text": "\\ud800"}\n', b"a\tb\tc\n\n"),
    *(b"1\ta\ta\tX\t_\t_\t0\troot\t_\t_\n", b"2\tb\tb\tX\t_\t_\t1\tdep\t_\t_\n\n", b"1-2\ta\n", b"source\ttarget\n"),
]
anything = st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join))
encodings = st.sampled_from(["utf-8", "cp949", "utf-16", "utf-16-le", "utf-32", "latin-1"])
errors = st.sampled_from(["strict", "replace"])


def refused_or_read(path: Path, read) -> None:
    """`read` gives something to iterate over, or refuses the file."""
    try:
        list(read())
    except InputError as error:
        assert str(path.parent) in str(error) or str(error).startswith(("The ", "--validation_split_percentage"))


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") and not content.startswith(b"\x1f") else content)
    return path


@quick
@given(anything, encodings, errors, st.sampled_from(["", ".gz"]))
@example(b"text\n" + b"\xed\xa0\x80", "utf-8", "strict", "")
def test_lines_tables_and_raw_text(tmp_path, content, encoding, mode, end):
    how = {"encoding": encoding, "encoding_errors": mode}
    for name in ("a.txt", "a.csv", "a.tsv", "a.jsonl", "a.json"):
        path = written(tmp_path, name + end, content)
        if name == "a.txt":
            refused_or_read(path, lambda path=path: sources.numbered_lines(str(path), Decoding(encoding, mode)))
        else:
            refused_or_read(path, lambda path=path: sources.table_rows(str(path), Decoding(encoding, mode)))
        for sample_by in ("line", "paragraph"):
            given = {"train_file": [str(path)], "validation_file": [str(path)], "sample_by": sample_by, **how}
            refused_or_read(path, lambda given=given: Corpus(CorpusArguments(**given)).documents())


@quick
@given(anything, errors)
def test_labelled_data(tmp_path, content, mode):
    readers = {
        "a.txt": [(ClassifyArguments, TextTask, {}), (TagArguments, TagTask, {})],
        "a.csv": [(ClassifyArguments, TextTask, {}), (PairArguments, PairTask, {})],
        "a.jsonl": [
            (ClassifyArguments, TextTask, {}),
            (TagArguments, TagTask, {}),
            (ParseArguments, LinkTask, {}),
        ],
        "a.conllu": [
            (TagArguments, TagTask, {}),
            (TagArguments, TagTask, {"tag_field": "morphemes"}),
            (ParseArguments, LinkTask, {}),
        ],
        "a.tsv": [
            (PairArguments, PairTask, {"source_column": "0", "target_column": "1"}),
            (ParseArguments, LinkTask, {}),
        ],
    }
    for name, tasks in readers.items():
        path = written(tmp_path, name, content)
        for arguments, read, more in tasks:
            flags = {"train_file": [str(path)], "validation_file": [str(path)], "encoding_errors": mode, **more}
            refused_or_read(
                path, lambda arguments=arguments, read=read, flags=flags: read(arguments(**flags)).splits().items()
            )


def parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=2)
    return file.getvalue()


def arrow(table: pa.Table) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


@quick
@pytest.mark.parametrize("make", [parquet, arrow])
@given(seed=st.integers(0, 10_000), changes=st.integers(1, 8), cut=st.booleans())
@example(seed=6353, changes=1, cut=False)
def test_damaged_tables_of_arrow(tmp_path, make, seed, changes, cut):
    rows = [{"text": f"{number} 한국어 글", "label": number, "words": ["a", "b"]} for number in range(9)]
    features = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["no", "yes"]),
        words=datasets.List(datasets.Value("string")),
    )
    table = pa.Table.from_pylist(rows, schema=features.arrow_schema)
    content, numbers = bytearray(make(table)), random.Random(seed)
    for _ in range(changes):
        content[numbers.randrange(len(content))] = numbers.randrange(256)
    content = content[: numbers.randrange(len(content))] if cut else content
    path = written(tmp_path, f"a.{make.__name__}", bytes(content))
    refused_or_read(path, lambda: sources.table_rows(str(path), Decoding()))
    given = {"train_file": [str(path)], "validation_file": [str(path)]}
    refused_or_read(path, lambda: Corpus(CorpusArguments(**given)).documents())
