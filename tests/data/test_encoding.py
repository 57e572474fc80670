"""Text in any encoding: the same rows, the same lines, and messages that name the encoding instead of destroying text."""

import gzip
import json
from functools import partial
from pathlib import Path

import pytest
from fixtures import files

from hf_tiny import InputError
from hf_tiny.data import conllu, encoding, sources
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.data.encoding import Decoding, EncodingArguments
from hf_tiny.tasks.classify import ClassifyArguments, TextTask
from hf_tiny.tasks.translate import PairArguments, PairTask

LINES = ["정말 재미있게 봤다, 또 보고 싶다", "별로였다. 시간이 아깝다", "뷁 쀍 그리고 English", "마지막 줄"]
FRENCH = ["Le garçon a mangé une pêche à l'été dernier.", "Où est la forêt où l'on a été ?", "Voilà, c'est déjà fini."]
MARKED = {"utf-8-sig": "utf-8", "utf-16": "utf-8", "utf-32": "cp949"}  # a mark wins over what is asked for


@pytest.fixture
def write(tmp_path):
    return partial(files.write, tmp_path)


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("name", ["utf-8", "cp949", "utf-16-le", "utf-16-be", *MARKED])
def test_every_reader_reads_every_encoding(write, monkeypatch, name, end):
    """Pieces of 7 bytes: characters are torn."""
    monkeypatch.setattr(encoding, "SAMPLE_BYTES", 7)
    asked, text = MARKED.get(name, name), "\r\n".join(LINES) + "\r\n"
    path = write(f"a.txt{end}", text.encode(name))
    assert list(sources.numbered_lines(path, Decoding(asked))) == list(enumerate(LINES, 1))
    corpus = Corpus(CorpusArguments(train_file=[path], validation_file=[path], encoding=asked))
    assert list(corpus.documents()) == LINES

    table = write(f"b.csv{end}", ("text,label\n" + "".join(f'"{line}",{len(line)}\n' for line in LINES)).encode(name))
    texts = TextTask(ClassifyArguments(train_file=[table], validation_file=[table], encoding=asked)).splits()["train"]
    assert [(text.text, text.label) for text in texts] == [(line, str(len(line))) for line in LINES]
    assert texts[-1].place == f"{table}:5"

    listed = write(f"c.json{end}", json.dumps([{"text": line} for line in LINES], ensure_ascii=False).encode(name))
    assert [row["text"] for _, row in sources.table_rows(listed, Decoding(asked))] == LINES

    one, other = (write(f"d.{side}{end}", text.encode(name)) for side in ("ko", "en"))
    sides = {"source_lang": "ko", "target_lang": "en", "train_file": [one, other], "validation_file": [one, other]}
    assert [pair.target for pair in PairTask(PairArguments(**sides, encoding=asked)).splits()["train"]] == LINES

    row = "1\t봤다\t보다\tVERB\t_\t_\t0\troot\t_\t_\n\n"
    tree = write(f"e.conllu{end}", (row * 2).encode(name))
    found = conllu.read_treebank(tree, Decoding(asked), lambda rows, name: {"word_labels": ()})
    assert [sentence.words for sentence in found] == [("봤다",)] * 2


@pytest.mark.parametrize(
    ("lines", "name", "advice"),
    [
        (LINES, "cp949", "--encoding cp949, in which it begins '정말 재미있게 봤다"),
        (LINES, "utf-16-le", "--encoding utf-16-le, in which it begins '정말 재미있게 봤다"),
        (["plain words", "and more of them"], "utf-16-le", "--encoding utf-16-le, in which it begins 'plain words'"),
        (["plain words", "and more of them"], "utf-16-be", "--encoding utf-16-be, in which it begins 'plain words'"),
        (FRENCH, "latin-1", "--encoding cp1252, in which it begins 'Le garçon a mangé une pêche à"),
        (
            ["これはテストです。", "日本語の文章を読む。"],
            "shift-jis",
            "--encoding cp932, in which it begins 'これはテストです。'",
        ),
        (["Привет, как дела?", "Всё хорошо, спасибо."], "cp1251", "--encoding cp1251, in which it begins 'Привет"),
    ],
)
def test_the_message_names_the_encoding(write, lines, name, advice):
    """It advised to replace what it could not read: nearly all of the text."""
    path = write("a.txt", "\n".join([*lines, ""]).encode(name))
    with pytest.raises(InputError) as refusal:
        list(sources.numbered_lines(path, Decoding()))
    assert str(refusal.value).startswith(f"{path}:1: the byte at offset ")
    assert advice in str(refusal.value) and "replace" not in str(refusal.value)


def test_a_late_line_of_another_encoding_is_judged_by_itself(write):
    path = write("a.txt", b"plain words\n" * 10_000 + "\n".join(LINES).encode("cp949"))
    with pytest.raises(InputError, match=r"a.txt:10001: the byte at offset 120000 .*--encoding cp949"):
        list(sources.numbered_lines(path, Decoding()))


def test_one_damaged_place_is_no_other_encoding(write):
    text = "\n".join(LINES).encode()
    for damaged in (text[:30] + b"\xff" + text[31:], text[:50] + b"\0" + text[51:]):
        path = write("a.txt", damaged)
        with pytest.raises(InputError, match=r"a.txt:\d: .*damaged there.*replaced and counted with --encoding_errors"):
            list(sources.numbered_lines(path, Decoding()))
        decoding = Decoding(errors="replace")
        assert "\ufffd" in "".join(line for _, line in sources.numbered_lines(path, decoding))
        assert 1 <= decoding.counts["characters replaced"] <= 3
    path = write("plain.txt", b"plain words, many of them\n" * 3 + b"and\0a zero\n")
    with pytest.raises(InputError, match=r"plain.txt:4: the byte at offset 81 of the file is 0, which no text has"):
        list(sources.numbered_lines(path, Decoding()))


def test_what_is_no_text_is_not_called_text(write):
    path = write("a.txt", bytes(range(256)) * 20)
    with pytest.raises(InputError, match=r"a.txt:1: .*No encoding fits: it does not look like text"):
        list(sources.numbered_lines(path, Decoding()))


@pytest.mark.parametrize("name", ["cp949", "utf-16-le"])
def test_wrong_bytes_of_another_encoding_have_a_place_and_are_counted(write, monkeypatch, name):
    monkeypatch.setattr(encoding, "SAMPLE_BYTES", 13)
    start = "\n".join(LINES[:2]).encode(name)
    wrong = {"cp949": b"\xff", "utf-16-le": b"\x00\xd8"}[name]  # half of a pair
    path = write("a.txt", start + wrong + "\n끝\n".encode(name))
    with pytest.raises(
        InputError, match=rf"a.txt:2: the byte at offset {len(start)} of the file is not {name.upper()}"
    ):
        list(sources.numbered_lines(path, Decoding(name)))
    decoding = Decoding(name, "replace")
    assert [line for _, line in sources.numbered_lines(path, decoding)][::2] == [LINES[0], "끝"]
    assert decoding.counts == {"characters replaced": 1}


@pytest.mark.parametrize("asked", ["cp949", "latin-1", "utf-16-le"])
def test_a_folder_of_older_files_may_have_some_in_utf_8(write, asked):
    """Else nothing could be given for --encoding: each would be wrong for some file."""
    lines = FRENCH if asked == "latin-1" else LINES
    folder = Path(write("texts/old.txt", "\n".join(lines).encode(asked))).parent
    write("texts/new.txt", "\n".join(lines).encode())
    write("texts/short.txt", lines[0][-1:].encode(asked))
    corpus = Corpus(CorpusArguments(train_file=[str(folder)], validation_file=[str(folder)], encoding=asked))
    assert sorted(corpus.documents()) == sorted([*lines, *lines, lines[0][-1:]])


def test_a_short_text_that_could_be_cut_utf_8_is_not(write):
    path = write("a.txt", "un café".encode("latin-1"))
    assert [line for _, line in sources.numbered_lines(path, Decoding("latin-1"))] == ["un café"]


def test_utf_8_that_begins_as_something_else(write):
    path = write("a.txt.gz", b"plain words\n" * 10_000 + "\n".join(LINES).encode())
    with pytest.raises(InputError, match=r"a.txt.gz:\d+: .* is not CP949. Likely is --encoding utf-8, in which"):
        list(sources.numbered_lines(path, Decoding("cp949")))


@pytest.mark.parametrize("name", ["utf-9", "base64", "한글"])
def test_an_unknown_encoding(name):
    with pytest.raises(InputError, match=f"--encoding {name}: there is no such encoding.*cp949"):
        _ = EncodingArguments(encoding=name).decoding


def test_the_encoding_is_part_of_what_a_corpus_is(write):
    path = write("a.txt", gzip.compress(b""))
    plans = [
        Corpus(CorpusArguments(train_file=[path], validation_file=[path], encoding=name)) for name in ("utf-8", "cp949")
    ]
    assert plans[0].fingerprint != plans[1].fingerprint
