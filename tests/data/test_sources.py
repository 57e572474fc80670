"""The one reader: every format gives the same rows, whole or in parts, to fine-tuning and to the corpus; messages name the
place."""

import csv
import gzip
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from hf_tiny import InputError
from hf_tiny.arguments import Arguments, parse
from hf_tiny.data import sources
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.sources import Part

TABLE = [
    {"id": "1", "text": 'She said "yes", and left', "label": "good"},
    {"id": "2", "text": 'an unpaired " is text', "label": "bad"},
    {"id": "3", "text": "한국어, with commas; and 'quotes'", "label": "good"},
    {"id": "4", "text": '"begins with a quote', "label": "bad"},
    {"id": "5", "text": "the last row", "label": "good"},
]


def csv_bytes(rows: list[dict]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()  # with \r\n


def tsv_bytes(rows: list[dict]) -> bytes:
    return "".join("\t".join(row) + "\n" for row in [rows[0], *(row.values() for row in rows)]).encode()


def json_lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def json_list(rows: list[dict]) -> bytes:
    return b"\xef\xbb\xbf\n" + json.dumps(rows, ensure_ascii=False, indent=1).encode()


def parquet_table(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=2)
    return file.getvalue()


def parquet(rows: list[dict]) -> bytes:
    return parquet_table(pa.Table.from_pylist(rows))


def arrow(rows: list[dict]) -> bytes:
    file, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


FORMATS = {
    "a.csv": csv_bytes,
    "a.tsv": tsv_bytes,
    "a.jsonl": json_lines,
    "lines.json": json_lines,
    "list.json": json_list,
    "list.jsonl": json_list,
    "a.parquet": parquet,
    "a.arrow": arrow,
}


@pytest.fixture
def write(tmp_path):
    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return write


def read(path: str, **how) -> list[dict]:
    return [row for _, row in sources.table_rows(path, Decoding(**how))]


def corpus(path: str, **settings) -> Corpus:
    return Corpus(CorpusArguments(train_file=[path], validation_file=[path], **settings))


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("name", FORMATS)
def test_one_table_through_every_reader(write, name, end):
    """In .tsv an unpaired quote swallowed rows of the corpus, which refused a list in .json altogether."""
    path = write(name + end, FORMATS[name](TABLE))
    assert read(path) == TABLE
    places = [place for place, _ in sources.table_rows(path, Decoding())]
    by_row = name.startswith("list") or name.endswith((".parquet", ".arrow"))
    first = 1 if name.endswith(".jsonl") or name == "lines.json" else 2  # after a header
    expected = [f"{path}, row {n}" if by_row else f"{path}:{n + first - 1}" for n in range(1, 6)]
    assert places == expected
    assert list(corpus(path).documents()) == [row["text"] for row in TABLE]
    assert list(corpus(path, text_column="label").documents("validation")) == [row["label"] for row in TABLE]


def test_a_cell_of_csv_may_have_lines(write):
    rows = [{"text": "one\ntwo", "label": "x"}, {"text": "three", "label": "y"}]
    path = write("a.csv", csv_bytes(rows))
    assert read(path) == rows
    assert [place for place, _ in sources.table_rows(path, Decoding())] == [f"{path}:3", f"{path}:4"]


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_csv_with_other_signs_between(write, sign):
    """As spreadsheets of many countries write it."""
    path = write("a.csv", f'text{sign}label\n"a{sign} b, c"{sign}1\nd, e{sign}2\n')
    assert read(path) == [{"text": f"a{sign} b, c", "label": "1"}, {"text": "d, e", "label": "2"}]


def test_classes_are_read_by_name(tmp_path):
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["bad", "good"]))
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features=features)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a.parquet", tmp_path / "saved" / "data-00000-of-00001.arrow"):
        assert [row["label"] for row in read(str(path))] == ["good", "bad", None]
        part = Part(str(path))
        assert next(sources.rows(part, Decoding(), ["text"])) == (f"{path}, row 1", {"text": "a"})


@pytest.mark.parametrize(
    ("name", "size"), [("a.txt", 90), ("a.jsonl", 300), ("a.parquet", 400), ("a.arrow", 100), ("a.tsv", 90)]
)
def test_the_parts_of_a_file_are_the_whole(write, name, size):
    """Where each row is, too. (A part of .csv or .tsv would not know the header.)"""
    rows = [{"text": f"row {number} {'한' * (number % 7)}", "number": str(number)} for number in range(96)]
    lines = "".join(row["text"] + "\n" for row in rows)
    path = write(name, lines if name == "a.txt" else FORMATS[name](rows))
    parts = list(sources.parts(path, size, Decoding()))
    assert len(parts) == 1 if name == "a.tsv" else 10 < len(parts) < 48
    if name == "a.txt":
        raw = [(str(place), line) for part in parts for place, line in sources.raw_lines(part, Decoding())]
        assert raw == [(f"{path}:{n}", f"{row['text']}\n".encode()) for n, row in enumerate(rows, 1)]
    else:
        found = [(str(place), row) for part in parts for place, row in sources.rows(part, Decoding())]
        assert found == list(sources.table_rows(path, Decoding())) and len(found) == 96


def test_a_line_without_an_end_is_refused(write, monkeypatch):
    """It filled the memory. Raw text has no such limit: a long line is read in pieces."""
    monkeypatch.setattr(sources, "LONGEST_LINE", 1000)
    text = "a word " * 300
    for name, content in (("a.tsv", f"text\n{text}\n"), ("a.jsonl", '{"text": "b"}\n{"text": "' + text + '"}\n')):
        path = write(name, content)
        for reading in (lambda path=path: read(path), lambda path=path: list(corpus(path).documents())):
            with pytest.raises(InputError, match=rf"{name}:2: this line has more than 1,000 bytes"):
                reading()
    assert list(corpus(write("a.txt", text)).documents()) == [text.strip()]


def test_numbered_lines(write):
    path = write("a.txt.gz", "\ufeffone\r\n\ntwo\x85three")
    assert list(sources.numbered_lines(path, Decoding())) == [(1, "one"), (2, ""), (3, "two\x85three")]


def test_replaced_characters_are_counted(write):
    decoding = Decoding(errors="replace")
    path = write("a.tsv", b"text\na\xff\xfeb\n\xef\xbf\xbd was there\n\0\n")
    rows = [row["text"] for _, row in sources.table_rows(path, decoding)]
    assert rows == ["a\ufffd\ufffdb", "\ufffd was there", "\ufffd"]
    assert decoding.counts == {"characters replaced": 3}


def test_documents_that_a_folder_holds_beside_texts_are_named(write, caplog):
    folder = str(Path(write("texts/a.txt", "one\n")).parent)
    write("texts/b.hwp", "HWP")
    assert [Path(path).name for path in sources.expand([folder], "--train_file", (".txt",))] == ["a.txt"]
    assert f"--train_file {folder}: files that end in .hwp are left out. Save the text" in caplog.text


def test_what_runs_have_left_in_a_folder_is_no_data(write, caplog):
    """`--train_file .` a second time: predictions of the first run would be trained on."""
    folder = Path(write("a.csv", "text\n하나\n")).parent
    for name in ("recipe.yaml", "metrics.jsonl", "validation_predictions.csv", "seed-1/more.csv"):
        (folder / "runs" / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "runs" / "a" / name).write_text("text\n둘\n", encoding="utf-8")
    supported = (".csv", ".jsonl")
    assert sources.expand([str(folder)], "--train_file", supported) == [os.path.realpath(folder / "a.csv")]
    assert f"{folder / 'runs' / 'a'} is the folder of a run: what runs have left is not read" in caplog.text
    assert len(sources.expand([str(folder / "runs" / "a")], "--train_file", supported)) == 3  # it is asked for


def test_names_of_columns_may_be_written_by_a_mac(write):
    path = write("a.csv", normalize("NFD", "질문,분류\n하나,둘\n"))
    assert [list(row) for _, row in sources.table_rows(path, Decoding())] == [["질문", "분류"]]


def test_hidden_files_of_a_folder_are_no_data(write):
    """Jupyter keeps copies, a Mac's archives have a `._` file beside each; all of them were read."""
    folder = Path(write("texts/a.txt", "one\n")).parent
    for name in (".a.txt", "._a.txt", ".ipynb_checkpoints/a-checkpoint.txt"):
        write(f"texts/{name}", "one\n")
    assert sources.expand([str(folder)], "--train_file", (".txt",)) == [os.path.realpath(folder / "a.txt")]
    named = str(folder / ".a.txt")  # asked for
    assert sources.expand([named], "--train_file", (".txt",)) == [os.path.realpath(named)]


def test_a_mistyped_file_is_answered_with_the_nearest_name(write, monkeypatch):
    folder = Path(write("내글/감상.txt", "one\n")).parent.parent
    for name, meant in (
        (folder / "내들", folder / "내글"),
        (folder / "내글" / "감상문.txt", folder / "내글" / "감상.txt"),
    ):
        with pytest.raises(InputError, match=f"it matches nothing. Did you mean {re.escape(str(meant))}"):
            sources.expand([str(name)], "--train_file", (".txt",))
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match="Did you mean 내글"):
        sources.expand(["내들/"], "--train_file", (".txt",))
    with pytest.raises(InputError, match=r"it matches nothing\.$"):
        sources.expand(["elsewhere/x.txt"], "--train_file", (".txt",))


def test_tables_as_excel_saves_them(write):
    """The delimiter above the header, rows below the table and columns behind it that hold nothing."""
    content = '\ufeffsep=;\r\nid;text;label;;\r\n1;"one; two";a;;\r\n;;;;\r\n2;;b;;\r\n;;;;\r\n;;;;\r\n'
    path = write("a.csv", content)
    rows = [("1", "one; two", "a"), ("2", "", "b")]
    found = [(place, tuple(row.values())) for place, row in sources.table_rows(path, Decoding())]
    assert found == [(f"{path}:3", rows[0]), (f"{path}:5", rows[1])]


ROWS = '{"text": "one"}\n' * 200
BAD = {
    "row": ("a.csv", "id,text\n1,x\n2,a,b\n", "a.csv:3: this row has 3 columns, and the first line names 2: id, text"),
    "title": (
        "a.csv",
        "Bills of 2024;;\n;;\nid;text;label\n1;x;a\n",
        "a.csv:3: this row has 3 columns, and the first line names 1: Bills of 2024. If a title stands above the names",
    ),
    "column without a name": ("a.csv", "id,text,\n1,x,\n2,y,z\n", "a.csv:3: this row has 3 columns"),
    "short row": ("a.tsv", "id\ttext\n1\n", "a.tsv:2: this row has 1 columns"),
    "quotes": (
        "a.csv",
        'text\nb\n"a\nc\nd\n',
        "a.csv:3: not a table: unexpected end of data, in the row that begins here. Is a quotation mark",
    ),
    "not json": ("a.jsonl", ROWS + "{bad\n", "a.jsonl:201: not JSON"),
    "not a json list": ("a.json", '[{"text": "one"},\n{bad}]', "a.json:1: not JSON: .* line 2 column 2"),
    "not an object": ("a.jsonl", '{"text": "one"}\n3\n', "a.jsonl:2: not a JSON object"),
    "not an object in a list": ("a.json", '[{"text": "one"}, [1]]', "a.json, row 2: not a JSON object"),
    "not text": ("a.jsonl", '{"text": 3}\n', "a.jsonl:1: 'text' is 3 and must be text. See --text_column"),
    "no column": ("a.jsonl.gz", ROWS + '{"body": "x", "id": 1}\n', "a.jsonl.gz:201: .* only 'body', 'id'"),
    "column of another case": (
        "a.jsonl",
        '{"Text ": "x", "label": 1}\n',
        "a.jsonl:1: there is no column 'text', only 'Text ', 'label'. Give --text_column 'Text '.",
    ),
    "no header": (
        "a.csv",
        "good,1\nbad,0\n",
        "a.csv:2: .*only 'good', '1'.*The first line of the file must name",
    ),
    "a text for a header": ("a.tsv", f"{'long ' * 99}\tb\nx\ty\n", r"only '(long ){7}long…', 'b'\. Name the right one"),
    "column twice": ("a.csv", "text,text\na,b\n", "a.csv:1: the column 'text' is there twice"),
    "columns without a name": (
        "a.csv",
        "접수;;상담;;결과\n번호;;text;;label\n",
        "a.csv:1: several columns have no name here. If their",
    ),
    "column twice in tsv": ("a.tsv", "text\tid\tid\na\tb\tc\n", "a.tsv:1: the column 'id' is there twice"),
    "column twice in parquet": (
        "a.parquet",
        parquet_table(pa.Table.from_arrays([pa.array(["x"])] * 2, names=["text", "text"])),
        "a.parquet: the column 'text' is there twice",
    ),
    "one object": (
        "klue-mrc.json",
        '{\n "version": "1",\n "data": [\n  {"text": "x"}]}',
        "klue-mrc.json:1: not JSON: .* is one object, of 'version', 'data'. Write the rows, a list of objects",
    ),
    "deep": ("a.jsonl", '{"a":' * 100_000, "a.jsonl:1: not JSON: maximum recursion depth"),
    "csv column": ("a.csv", "id,body\n1,x\n", "a.csv:2: there is no column 'text', only 'id', 'body'. .*--text_column"),
    "parquet column": (
        "a.parquet",
        parquet([{"body": "x"}]),
        "a.parquet, row 1: there is no column 'text', only 'body'",
    ),
    "not utf-8": ("a.txt", b"ok\nab\xff\n", r"a.txt:2: the byte at offset 5 .* is not UTF-8"),
    "not utf-8, late": ("a.txt", b"line\n" * 200 + b"\n\xff", r"a.txt:202: the byte at offset 1001"),
    "not gzip": ("a.txt.gz", None, "a.txt.gz: the file cannot be read"),
    "not parquet": ("a.parquet", "text", "a.parquet: the file cannot be read"),
    "not arrow": ("a.arrow", "some text that is no table", "a.arrow: the file cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case, write, tmp_path, monkeypatch):
    """As the corpus meets them, in parts of 100 bytes."""
    monkeypatch.setattr("hf_tiny.data.corpus.SHARD_BYTES", 100)
    name, content, message = BAD[case]
    path = write(name, content) if content is not None else str(tmp_path / name)
    if content is None:
        (tmp_path / name).write_bytes(b"no gzip")
    with pytest.raises(InputError, match=message):
        list(corpus(path).documents())


PATTERNS = {
    "missing": ("nowhere.txt", "nowhere.txt: there is no such file"),
    "no match": ("nowhere/*.txt", "matches nothing"),
    "kind": ("a.docx", "a.docx: the name must end in .txt, .jsonl"),
    "empty folder": ("f", "f: this folder has no file that ends in .txt, .jsonl. Save the text as plain text"),
    "spreadsheet": ("b.xlsx", "b.xlsx: the name must end in .txt, .jsonl, .* Save the sheet as CSV"),
    "archive": ("c.tar.gz", "c.tar.gz: the name .* Unpack the archive"),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_bad_patterns(case, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a.docx", "x")
    for name in ("f/a.docx", "b.xlsx", "c.tar.gz"):
        write(name, "x")
    pattern, message = PATTERNS[case]
    with pytest.raises(InputError, match=message):
        sources.expand([pattern], "--train_file", (".txt", ".jsonl"))
    if case in ("spreadsheet", "archive"):  # it is read as no lines, either
        with pytest.raises(InputError, match=message):
            sources.expand([pattern], "--train_file", (".txt", ".jsonl"), any_suffix=True)


def test_the_folder_of_a_dataset_script_is_refused(tmp_path):
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text("raise SystemExit('it has run')")
    with pytest.raises(InputError, match=r"--dataset_name .*scripted: it could not be loaded: .*scripts"):
        sources.load_hub(str(tmp_path / "scripted"), None)


def test_cells():
    row = {"text": None, "tags": ["a"], "number": 3}
    assert sources.text_cell(row, "text", "here", "--text_column") == ""
    assert sources.list_cell(row, "tags", "here", "--label_column") == ["a"]
    with pytest.raises(InputError, match=r"here: 'number' is 3 and must be a list. See --label_column."):
        sources.list_cell(row, "number", "here", "--label_column")
    with pytest.raises(
        InputError, match=r"here: there is no column 'x', only 'text', .*right one with --label_column."
    ):
        sources.cell(row, "x", "here", "--label_column")


@dataclass(frozen=True, kw_only=True)
class Recipe(CorpusArguments, Arguments):
    """The flags of a corpus."""


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("sample_by", "word", "line, paragraph, document"),
        ("encoding_errors", "ignore", "strict, replace"),
        ("max_seq_length", "4", "8"),
        ("shuffle_buffer_size", "0", "1"),
        ("preprocessing_num_workers", "0", "1"),
        ("dataloader_num_workers", "-1", "0"),
    ],
)
def test_flags_have_bounds(flag, value, message):
    with pytest.raises(InputError, match=f"--{flag} {value}: .*{message}"):
        parse(Recipe, [f"--{flag}", value])


def test_arguments_are_flags():
    given = ["--train_file", "a.txt", "b.txt", "--overwrite_cache", "--validation_split_percentage", "2.5"]
    expected = Recipe(train_file=["a.txt", "b.txt"], overwrite_cache=True, validation_split_percentage=2.5)
    assert parse(Recipe, given) == expected
    assert expected.corpus_name == "a.txt, b.txt"
