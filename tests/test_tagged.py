"""Labelled data: every format is read and written back, every mistake is named with its place, windows lose nothing."""

import gzip
import json
from collections import Counter
from itertools import pairwise

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import HfArgumentParser, PreTrainedTokenizerFast

from hf_tiny import InputError
from hf_tiny.data import builtin, conllu
from hf_tiny.data.predictions import write_links, write_tags, write_texts
from hf_tiny.data.tagged import (
    LinkArguments,
    Sentence,
    Text,
    TextArguments,
    WordArguments,
    find_labels,
    is_regression,
    read_sentences,
    read_texts,
    read_trees,
)
from hf_tiny.data.windows import CollateLinks, CollateTags, CollateTexts, link_features, tag_features, text_features
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "nobody", "sees", "red", "water"]
KOREAN = "잡스는 워즈니악에게 보수를 반씩 나누는 조건으로 도움을 청하고 절반인 돈을 주었다 했다 가는"
CORPUS = [" ".join(WORDS), " ".join(reversed(WORDS)), KOREAN] * 3
ROWS = [("a good film", "1"), ('he said "no', "0"), ("", "1"), ("끝까지 봤다", "0")]
TREE = """\
# sent_id = one
# text = 돈을 vámonos 주었다
1	돈을	돈+을	NOUN	NNG+JKO	_	3	obj	3:obj	_
2-3	vámonos	_	_	_	_	_	_	_	_
2	vamos	ir	VERB	VV	Mood=Imp	3	advcl	3:advcl	SpaceAfter=No
2.1	있	_	_	_	_	_	_	3:dep	_
3	주었다	주+었+다	VERB	VV+EP+EF	_	0	root	0:root	_
"""
SECOND = """\
1	fox	fox	NOUN	NN	_	2	nsubj	_	_
2	runs	run	VERB	VBZ	_	0	root	_	_
"""


def byte_level() -> PreTrainedTokenizerFast:
    """As RoBERTa's: the space before a word is part of it, no token types, no unknown token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(names.values()), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=["input_ids", "attention_mask"], **names)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return {
        "wordpiece": train_tokenizer(CORPUS, TokenizerArguments(vocab_size=300)),
        "byte-level": byte_level(),
    }


@pytest.fixture(params=["wordpiece", "byte-level"])
def tokenizer(request, tokenizers):
    return tokenizers[request.param]


@pytest.fixture
def write(tmp_path):
    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return write


def texts_of(path: str, **settings) -> list[Text]:
    return read_texts(TextArguments(train_file=[path], validation_file=[path], **settings))["train"]


def sentences_of(path: str, **settings) -> list[Sentence]:
    return read_sentences(WordArguments(train_file=[path], validation_file=[path], **settings))["train"]


def trees_of(path: str, **settings) -> list[Sentence]:
    return read_trees(LinkArguments(train_file=[path], validation_file=[path], **settings))["train"]


def sentence(words: list[str], **columns) -> Sentence:
    empty = dict.fromkeys(("tags", "upos", "heads", "relations"))
    return Sentence(
        **{"words": tuple(words), "place": "here", "name": "one", "kind": ".conll", "lines": (), **empty, **columns}
    )


def text(content: str, pair: str | None = None, label: str = "0") -> Text:
    return Text(content, pair, label, "here", ".txt", {})


def decoded(tokenizer, ids) -> str:
    return tokenizer.decode([i for i in ids if i not in tokenizer.all_special_ids]).replace(" ", "").replace("Ġ", "")


# Texts


def table(rows, separator: str) -> str:
    return "".join(separator.join(row) + "\n" for row in [("text", "label"), *rows])


def as_jsonl(rows) -> str:
    return "".join(json.dumps({"text": t, "label": int(n)}, ensure_ascii=False) + "\n" for t, n in rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", table(ROWS, "\t")),
        ("a.tsv.gz", table(ROWS, "\t")),
        ("a.TSV", "\ufeff" + table(ROWS, "\t").replace("\n", "\r\n")),
        ("a.csv", table([(t.replace('"', '""').join('""'), label) for t, label in ROWS], ",")),
        ("a.jsonl", as_jsonl(ROWS)),
        ("a.json.gz", as_jsonl(ROWS)),
        ("a.json", json.dumps([{"text": t, "label": label} for t, label in ROWS], indent=1)),
        ("a.txt", "".join(f"{label} {t}\n" for t, label in ROWS)),
        ("a.train", "".join(f"{label}\t{t}\n" for t, label in ROWS) + "\n"),
    ],
)
def test_every_format_gives_the_same_texts(write, tmp_path, name, content):
    path = write(name, content)
    texts = texts_of(path)
    assert [(text.text, text.label) for text in texts] == ROWS
    assert all(text.place.startswith(path) for text in texts)
    (written,) = write_texts(texts, ["0", "1", "0", "1"], tmp_path, "predicted")
    again = texts_of(str(written), **({} if written.suffix == ".txt" else {"label_column": "prediction"}))
    assert [(text.text, text.label) for text in again] == [(t, "01"[label == "0"]) for t, label in ROWS]
    assert [text.row.get("label", 0) for text in again] == [text.row.get("label", 0) for text in texts]


def test_parquet_keeps_the_names_of_classes(tmp_path):
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["bad", "good"]))
    rows = {"text": ["가", "b", None], "label": [1, 0, 1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "a.parquet"))
    texts = texts_of(str(tmp_path / "a.parquet"))
    assert [(text.text, text.label) for text in texts] == [("가", "good"), ("b", "bad"), ("", "good")]
    assert texts[1].place.endswith("a.parquet, row 2")
    (written,) = write_texts(texts, ["bad"] * 3, tmp_path, "predicted")
    assert pyarrow.parquet.read_table(written)["prediction"].to_pylist() == ["bad"] * 3


def test_a_data_set_of_the_hub_has_its_own_splits(write, tmp_path):
    for split in ("train", "validation", "test"):
        hidden = split == "test"
        rows = [{"words": ["a", split], "ner": [-1, -1] if hidden else [0, 1]}, {"words": ["b"], "ner": [-hidden or 1]}]
        kinds = datasets.List(datasets.ClassLabel(names=["O", "B-x"]))
        features = datasets.Features(words=datasets.List(datasets.Value("string")), ner=kinds)
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / f"set/{split}.parquet"))
    arguments = WordArguments(dataset_name=str(tmp_path / "set"), text_column="words", label_column="ner")
    splits = read_sentences(arguments)
    assert [s.words for s in splits["validation"]] == [("a", "validation"), ("b",)]
    assert splits["train"][0].tags == ("O", "B-x") and "test" not in splits  # its labels are hidden
    with pytest.raises(InputError, match=r"set, train, row 1: there is no column 'tokens'.*--text_column"):
        read_sentences(WordArguments(dataset_name=str(tmp_path / "set")))


def test_files_of_several_kinds_and_columns_are_written_by_kind(write, tmp_path):
    paths = [write("d/a.tsv", "text\tlabel\na\tx\n"), write("d/b.tsv", "id\tlabel\ttext\n7\ty\tb\n")]
    write("d/c.jsonl", '{"text": "c", "label": true}\n')
    texts = texts_of(str(tmp_path / "d"))
    assert [text.label for text in texts] == ["x", "y", "True"] and texts[1].place == f"{paths[1]}:2"
    tsv, jsonl = write_texts(texts, ["p", "q", "r"], tmp_path, "out")
    assert tsv.read_text() == "text\tlabel\tprediction\tid\na\tx\tp\t\nb\ty\tq\t7\n"
    assert json.loads(jsonl.read_text()) == {"text": "c", "label": True, "prediction": "r"}


def test_pairs_and_numbers(write):
    path = write("a.tsv", "s1\ts2\tscore\na\tb\t5.000\nc\td\t3.800\n")
    arguments = TextArguments(
        train_file=[path], validation_file=[path], text_column="s1", text_pair_column="s2", label_column="score"
    )
    splits = read_texts(arguments)
    assert [(t.text, t.text_pair, t.label) for t in splits["train"]] == [("a", "b", "5.000"), ("c", "d", "3.800")]
    assert is_regression(splits, arguments)
    whole = {"train": [text("a", label="1"), text("b", label="2.0")]}
    assert not is_regression(whole, TextArguments()) and is_regression(whole, TextArguments(do_regression=True))
    assert not is_regression(splits, TextArguments(do_regression=False))
    assert not is_regression({"train": [text("a", label="1.5"), text("a", label="nan")]}, TextArguments())
    with pytest.raises(InputError, match="here: the label 'x' is not a number"):
        is_regression({"train": [text("a", label="x")]}, TextArguments(do_regression=True))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "document\tlabel\na\t1\n", r"a.tsv:2: there is no column 'text', only 'document', 'label'.*--text_column"),
        ("a.jsonl", '{"text": "a", "tag": 1}\n', r"a.jsonl:1: there is no column 'label'.*--label_column"),
        ("a.tsv", "text\tlabel\na\t1\nb\n", r"a.tsv:3: this row has 1 columns, and the first line names 2: text, label"),
        ("a.csv", 'text,label\n"a\nb",1\nb,1,2\n', r"a.csv:4: this row has 3 columns"),
        ("a.csv", 'text,label\n"a,1\n', r"a.csv:2: not a table"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text"\n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", '"a"\n', r"a.jsonl:1: not a JSON object"),
        ("a.json", '[{"text": "a", "label": 1}, 2]', r"a.json, row 2: not a JSON object"),
        ("a.jsonl", '{"text": 3, "label": 1}\n', r"a.jsonl:1: 'text' is 3 and must be text"),
        ("a.jsonl", '{"text": "a", "label": null}\n', r"a.jsonl:1: the label, column 'label', is empty"),
        ("a.tsv", "text\tlabel\na\t \n", r"a.tsv:2: the label, column 'label', is empty"),
        ("a.txt", "1 a\n b\n", r"a.txt:2: the line begins with a blank"),
        ("a.tsv", b"text\tlabel\na\t1\n\xff\t1\n", r"a.tsv:3: the byte at offset 15 of the file is not UTF-8"),
        ("a.tsv", "text\tlabel\n", r"a.tsv: there is nothing in it to train on"),
        ("a.txt", "", r"a.txt: there is nothing in it to train on"),
        ("a.tsv.gz.tsv.gz", b"", None),
    ],
)  # fmt: skip
def test_mistakes_in_texts_are_named_with_their_place(write, name, content, message):
    path = write(name, content)
    if message is None:  # not gzip at all
        with open(path, "wb") as file:
            file.write(b"plain")
        message = "the file cannot be read"
    with pytest.raises(InputError, match=f"(?s){message}"):
        texts_of(path)


def test_bytes_that_are_not_utf_8_can_be_replaced(write, caplog):
    texts = texts_of(write("a.tsv", b"text\tlabel\n\xffb\t1\n"), encoding_errors="replace")
    assert texts[0].text == "\ufffdb" and "2 characters replaced" in caplog.text  # read for train and validation


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_file": ["no/such"]}, "--train_file no/such: there is no such file"),
        ({"validation_file": ["a.tsv"]}, "need --train_file or --dataset_name"),
        ({"train_file": ["a"], "dataset_name": "b"}, "not both"),
        ({"dataset_name": "no/such/set"}, "--dataset_name no/such/set: it could not be loaded"),
        ({"encoding_errors": "ignore"}, "--encoding_errors ignore"),
        ({"max_seq_length": 4}, "--max_seq_length 4"),
        ({"max_seq_length": 32, "doc_stride": 17}, "--doc_stride 17: .* share 0 to 16"),
        ({"max_train_samples": 0}, "--max_train_samples 0: it must be above 0"),
    ],
)
def test_flags_that_cannot_be(settings, message):
    with pytest.raises(InputError, match=message):
        read_texts(TextArguments(**settings))


def test_arguments_are_flags():
    (parsed,) = HfArgumentParser(TextArguments).parse_args_into_dataclasses(
        ["--train_file", "a.tsv", "b", "--do_regression", "true", "--text_pair_column", "s2"]
    )
    assert parsed == TextArguments(train_file=["a.tsv", "b"], do_regression=True, text_pair_column="s2")


# Splits and labels


def test_what_is_held_out_is_the_same_every_time_and_has_no_label_of_its_own(write):
    path = write("a.txt", "".join(f"{'rare' if n == 7 else n % 3} text {n}\n" for n in range(100)))
    splits = [read_texts(TextArguments(train_file=[path], validation_split_percentage=p)) for p in (20, 20, 80)]
    assert splits[0] == splits[1]
    for split, share in zip(splits, (80, 80, 20), strict=True):
        assert len(split["train"]) in (share, share + 1)
        assert len({t.text for t in split["train"]} | {t.text for t in split["validation"]}) == 100
        assert any(t.label == "rare" for t in split["train"])
        assert find_labels(split["train"], split["validation"]) == ["0", "1", "2", "rare"]
    with pytest.raises(InputError, match=r"--validation_split_percentage 0\.1: of 100 examples this holds out 0"):
        read_texts(TextArguments(train_file=[path], validation_split_percentage=0.1))


def test_numbers_are_held_out_though_none_comes_twice(write):
    path = write("a.txt", "".join(f"{n + 0.5} text\n" for n in range(50)))
    splits = read_texts(TextArguments(train_file=[path], max_train_samples=30))
    assert len(splits["validation"]) == 5 and len(splits["train"]) == 30
    with pytest.raises(InputError, match="of 50 examples this holds out 0"):
        read_texts(TextArguments(train_file=[path], do_regression=False))


def test_a_sample_has_every_label_and_keeps_the_order(write):
    path = write("a.txt", "".join(f"{'rare' if n == 7 else n % 3} {n}\n" for n in range(100)))
    files = {"train_file": [path], "validation_file": [path], "test_file": [path]}
    splits = read_texts(TextArguments(**files, max_train_samples=10, max_eval_samples=5))
    assert {split: len(texts) for split, texts in splits.items()} == {"train": 10, "validation": 5, "test": 5}
    numbers = [int(t.text) for t in splits["train"]]
    assert numbers == sorted(numbers) and {t.label for t in splits["train"]} == {"0", "1", "2", "rare"}


def test_labels_are_ordered_and_checked():
    numbers = [text("", label=label) for label in ("10", "9", "-1")]
    assert find_labels(numbers, []) == ["-1", "9", "10"]
    assert find_labels([text("", label=label) for label in ("10", "9", "x")], []) == ["10", "9", "x"]
    with pytest.raises(InputError, match=r"here: the label '3' is not in the training data\. It has -1, 9, 10"):
        find_labels(numbers, [text("", label="3")])
    with pytest.raises(InputError, match="1 kind of label, '9'"):
        find_labels(numbers[1:2], [])
    tagged = sentence(["a", "b", "c"], tags=("X=1", None, "X=2"))
    assert find_labels([tagged], [sentence(["a"], tags=("A=1",))], open_ended=True) == ["X=1", "X=2", "A=1"]


# Sentences


COLUMNS = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\nGerman JJ B-MISC\n"


def test_columns(write, tmp_path):
    spaced = sentences_of(write("a.conll", COLUMNS))
    tabbed = sentences_of(write("b.bio", COLUMNS.replace(" ", "\t").replace("\n\n", "\n\t\n")))
    plain = sentences_of(write("c.words.gz", COLUMNS))
    for sentences in (spaced, tabbed, plain):
        assert [s.words for s in sentences] == [("EU", "rejects"), ("German",)]
        assert [s.tags for s in sentences] == [("B-ORG", "O"), ("B-MISC",)]
    assert spaced[0].place.endswith("a.conll:3") and spaced[1].place.endswith("a.conll:7")
    (written,) = write_tags(spaced, [["O", None], ["B-ORG"]], tmp_path, "out", "upos")
    assert written.read_text() == "EU NNP B-ORG O\nrejects VBZ O _\n\nGerman JJ B-MISC B-ORG\n\n"
    (written,) = write_tags(tabbed, [["O", "O"], ["B-ORG"]], tmp_path, "out", "upos")
    assert written.read_text().startswith("EU\tNNP\tB-ORG\tO\n")


def test_lists_of_words(write, tmp_path):
    rows = [{"id": 1, "tokens": ["가", "b c"], "tags": ["A", None]}, {"id": 2, "tokens": [], "tags": []}]
    path = write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for sentences in (sentences_of(path), sentences_of(str(tmp_path / "a.parquet"))):
        assert [(s.words, s.tags) for s in sentences] == [(("가", "b c"), ("A", None)), ((), ())]
        (written,) = write_tags(sentences, [["B", "A"], []], tmp_path, "out", "upos")
        assert [s.tags for s in sentences_of(str(written), label_column="prediction")] == [("B", "A"), ()]


def test_trees_are_read_and_written_as_they_were(write, tmp_path):
    path = write("a.conllu", f"{TREE}\n{SECOND}\n")
    one, two = trees_of(path)
    assert (one.words, one.heads, one.relations) == (("돈을", "vamos", "주었다"), (3, 3, 0), ("obj", "advcl", "root"))
    assert (one.name, one.place, two.name) == ("one", f"{path}:1", f"{path}:9")
    (written,) = write_links(
        [one, two], [one.heads, two.heads], [one.relations, two.relations], tmp_path, "out", "parse"
    )
    for old, new in zip(f"{TREE}\n{SECOND}\n".split("\n"), written.read_text().split("\n"), strict=True):
        assert old.split("\t")[:8] == new.split("\t")[:8]
    assert "3\tobj\t_\t_\n" in written.read_text() and "2.1\t있\t_\t_\t_\t_\t_\t_\t3:dep\t_\n" in written.read_text()
    write_links([one], [(2, 0, None)], [("a", "root", None)], tmp_path, "out", "parse")
    assert [s.split("\t")[6:8] for s in written.read_text().split("\n") if s[:2] in ("1\t", "2\t", "3\t")] == [
        ["2", "a"], ["0", "root"], ["_", "_"]
    ]  # fmt: skip
    for tag_field, expected in {"upos": ("NOUN", "VERB"), "xpos": ("NN", "VBZ"), "feats": ("_", "_")}.items():
        sentences = sentences_of(path, tag_field=tag_field)
        assert sentences[1].tags == expected
        (written,) = write_tags(sentences, [s.tags for s in sentences], tmp_path, tag_field, tag_field)
        assert written.read_text() == f"{TREE}\n{SECOND}\n"
    rows = [{"tokens": ["fox", "runs"], "upos": ["NOUN", "VERB"], "head": [2, 0], "deprel": ["nsubj", "root"]}]
    (listed,) = trees_of(write("a.jsonl", json.dumps(rows[0])))
    assert (listed.words, listed.upos, listed.heads, listed.relations) == (
        two.words,
        two.upos,
        two.heads,
        two.relations,
    )
    (written,) = write_links([listed], [(0, 1)], [("root", "x")], tmp_path, "out", "parse")
    assert json.loads(written.read_text())["prediction"] == [[0, "root"], [1, "x"]]


def changed(old: str, new: str) -> str:
    assert old in TREE
    return TREE.replace(old, new)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            changed("\t3\tobj", "\t4\tobj"),
            r"a.conllu:1: in sentence one the HEAD of word 1 .돈을. is '4'; .* from 0 to 3",
        ),
        (changed("\t3\tobj", "\t_\tobj"), r"sentence one the HEAD of word 1 .돈을. is '_'"),
        (changed("\t0\troot", "\t2\troot"), r"a.conllu:1: in sentence one the heads go round in a cycle: 3 -> 2 -> 3"),
        (changed("\t3\tobj", "\t1\tobj"), r"a cycle: 1 -> 1"),
        (changed("\t3:obj\t_", ""), r"a.conllu:3: this line has 8 columns; CoNLL-U has 10"),
        (changed("3\t주었다", "4\t주었다"), r"a.conllu:7: the word's ID is '4' and should be 3"),
    ],
)
def test_broken_trees_are_named(write, content, message):
    with pytest.raises(InputError, match=message):
        trees_of(write("a.conllu", content))


def test_two_roots_are_kept(write):
    assert trees_of(write("a.conllu", changed("\t3\tobj", "\t0\tobj")))[0].heads == (0, 3, 0)


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("a.conll", "EU O\nrejects\n", {}, r"a.conll:2: this line has 1 columns"),
        ("a.conll", "EU O\nrejects VBZ O\n", {}, r"a.conll:2: this line has 3 columns.*the first line, 2"),
        ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}', {}, r"a.jsonl:1: there are 2 words and 1 tags"),
        ("a.jsonl", '{"tokens": "a b", "tags": ["O"]}', {}, r"a.jsonl:1: 'tokens' is 'a b' and must be a list"),
        ("a.conll", "EU O\n", {"tag_field": "xpos"}, r"--tag_field xpos: this is for CoNLL-U"),
        ("a.conll", "EU O\n", {"tag_field": "pos"}, r"--tag_field pos: must be one of upos, xpos"),
    ],
)
def test_mistakes_in_sentences_are_named_with_their_place(write, name, content, settings, message):
    with pytest.raises(InputError, match=message):
        sentences_of(write(name, content), **settings)


def test_links_need_trees(write):
    with pytest.raises(InputError, match=r"a.conll: links are read from CoNLL-U"):
        trees_of(write("a.conll", "EU O\n"))
    with pytest.raises(InputError, match="--task tree: must be one of parse, subject"):
        trees_of(write("a.conllu", TREE), task="tree")
    with pytest.raises(InputError, match="3 words and 2 in 'head'"):
        row = {"tokens": ["a", "b", "c"], "upos": ["X"] * 3, "head": [0, 1], "deprel": ["x"] * 3}
        trees_of(write("a.jsonl", json.dumps(row)))


def test_subjects(write, tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [
        ("그가", "PRON", 4, "nsubj"), ("책이", "NOUN", 4, "nsubj:pass"), ("빨리", "ADV", 4, "advmod"), ("팔려", "VERB", 0, "root"),
        ("웃는", "VERB", 6, "acl"), ("사람", "NOUN", 4, "obl"), ("나는", "PRON", 6, "nsubj"),
    ]  # fmt: skip
    lines = [f"{i}\t{w}\t_\t{u}\t_\t_\t{h}\t{r}\t_\t_" for i, (w, u, h, r) in enumerate(rows, 1)]
    (found,) = trees_of(write("a.conllu", "\n".join(lines) + "\n"), task="subject")
    assert found.heads == (None, None, None, 2, 0, None, None)  # the nearest of two; none
    assert found.relations == (None, None, None, "nsubj:pass", "omitted", None, None)
    assert "1 subjects of words that are neither VERB nor ADJ" in caplog.text
    (written,) = write_links([found], [found.heads], [found.relations], tmp_path, "out", "subject")
    assert [line.split("\t")[-1] for line in written.read_text().split("\n")[:5]] == [
        "_",
        "_",
        "_",
        "Subject=2",
        "Subject=0",
    ]
    assert conllu.add_misc("Subject=9|SpaceAfter=No", "Subject", "0") == "SpaceAfter=No|Subject=0"


# Morphemes


@pytest.mark.parametrize(
    ("form", "lemmas", "tags", "expected"),
    [
        ("청하고", "청+하+고", "NNG+XSV+EC", "B-NNG B-XSV B-EC"),
        ("했다", "하+었+다", "XSV+EP+EF", "B-XSV+EP B-EF"),
        ("가는", "가+는", "VV+ETM", "B-VV B-ETM"),
        ("절반인", "절반+이+ㄴ", "NNG+VCP+ETM", "B-NNG I-NNG B-VCP+ETM"),
        ("주었다", "주+었+다", "VX+EP+EF", "B-VX B-EP B-EF"),
        ("가까운", "가깝+ㄴ", "VA+ETM", "B-VA I-VA I-VA+ETM"),
        ("봐서", "보+아서", "VV+EC", "B-VV+EC I-EC"),
        ("려", "리+어", "VV+EC", "B-VV+EC"),
        ("1+1", "1+++1", "SN+SW+SN", "B-SN B-SW B-SN"),
        ("A를", "A+를", "SL+JKO", "B-SL B-JKO"),
        ("했다", "하+었+다", "XSV+EP", None),  # three morphemes, two tags
        ("친구다", "친구+이+다", "NNG+VCP+EF", None),  # a morpheme that is not there
        ("로부터", "부터", "JX", None),  # a syllable of no morpheme
        ("나무", "강아지", "NNG", None),  # another word
        ("가", "_", "_", None),
    ],
)
def test_a_character_has_the_tag_of_its_morphemes(form, lemmas, tags, expected):
    found = conllu.morpheme_tags(form, lemmas, tags)
    assert found == (tuple(expected.split()) if expected else (None,) * len(form))


def test_morphemes_of_a_file(write, tmp_path, tokenizers, caplog):
    caplog.set_level("INFO")
    path = write(
        "a.conllu", TREE.replace("vamos\tir", "친구다\t친구+이+다").replace("돈을\t", "\u1103\u1169\u11ab을\t")
    )
    (found,) = sentences_of(path, tag_field="morphemes")
    assert found.words == tuple("돈을친구다주었다") and found.word_of == (0, 0, 1, 1, 1, 2, 2, 2)
    assert found.tags == ("B-NNG", "B-JKO", None, None, None, "B-VV", "B-EP", "B-EF")
    assert "66.67% of 3 words align" in caplog.text
    (written,) = write_tags([found], [found.tags], tmp_path, "out", "morphemes")
    misc = [line.split("\t")[-1] for line in written.read_text().split("\n") if line[:2] in ("1\t", "2\t", "3\t")]
    assert misc == ["Tags=B-NNG,B-JKO", "SpaceAfter=No|Tags=_,_,_", "Tags=B-VV,B-EP,B-EF"]
    arguments, labels = WordArguments(), ["B-EF", "B-EP", "B-JKO", "B-NNG", "B-VV"]
    (feature,) = tag_features([found], tokenizers["wordpiece"], labels, arguments)
    tokens = tokenizers["wordpiece"].convert_ids_to_tokens(feature["input_ids"].tolist())
    assert tokens[1:3] + tokens[6:9] == ["돈", "##을", "주", "##었", "##다"]
    assert feature["labels"].tolist() == [-100, 3, 2, -100, -100, -100, 4, 1, 0, -100]
    (feature,) = tag_features([found], tokenizers["byte-level"], labels, arguments)
    assert decoded(tokenizers["byte-level"], feature["input_ids"]).count("Ġ") == 0
    assert (feature["word"] >= 0).sum() == 8


# Windows


def test_a_short_text_is_what_the_tokenizer_makes_of_it(tokenizer):
    texts = [text("the lazy dog"), text("", label="1"), text(KOREAN)]
    features = text_features(texts, tokenizer, ["0", "1"], TextArguments())
    for feature, expected in zip(features, tokenizer([t.text for t in texts])["input_ids"], strict=True):
        assert feature["input_ids"].tolist() == expected and feature["input_ids"].dtype == np.int64
    assert [(f["label"], f["example"]) for f in features] == [(0, 0), (1, 1), (0, 2)]
    assert all(("token_type_ids" in f) == ("token_type_ids" in tokenizer.model_input_names) for f in features)


@pytest.mark.parametrize("doc_stride", [0, 5, 16])
def test_a_long_text_gives_windows_that_share_the_stride(tokenizer, doc_stride):
    long = text(" ".join(WORDS * 10), label="1.5")
    arguments = TextArguments(max_seq_length=32, doc_stride=doc_stride)
    features = text_features([text("fox", label="2"), long], tokenizer, None, arguments)
    ids = tokenizer(long.text, add_special_tokens=False)["input_ids"]
    assert [f["example"] for f in features] == [0] + [1] * (len(features) - 1) and features[1]["label"] == 1.5
    windows = [f["input_ids"][1:-1].tolist() for f in features[1:]]
    assert all(len(window) == 30 for window in windows) and windows[0] == ids[:30] and windows[-1] == ids[-30:]
    starts = [next(i for i in range(len(ids)) if ids[i : i + 30] == window) for window in windows]
    assert max(b - a for a, b in pairwise(np.linspace(0, len(ids) - 30, len(windows)).astype(int))) <= 30 - doc_stride
    assert len(windows) == 1 + -(-(len(ids) - 30) // (30 - doc_stride)) and starts[0] == 0


def test_of_a_pair_the_longer_text_is_cut(tokenizer):
    arguments = TextArguments(max_seq_length=24, doc_stride=4)
    short, long = "the fox", " ".join(WORDS * 4)
    pairs = [text(short, "a dog"), text(short, long), text(long, short), text(long, long), text("", "")]
    features = text_features(pairs, tokenizer, ["0"], arguments)
    expected = tokenizer(short, "a dog")
    assert features[0]["input_ids"].tolist() == expected["input_ids"]
    if "token_type_ids" in features[0]:
        assert features[0]["token_type_ids"].tolist() == expected["token_type_ids"]
    counts = Counter(f["example"] for f in features)
    assert counts[0] == counts[4] == 1 and counts[1] == counts[2] > 3 and counts[3] > counts[1]
    assert all(len(f["input_ids"]) <= 24 for f in features)
    for f in features:
        if f["example"] == 1:
            assert decoded(tokenizer, f["input_ids"]).startswith("thefox")
        if f["example"] == 2:
            assert decoded(tokenizer, f["input_ids"]).endswith("thefox")
    both = [f["input_ids"].tolist() for f in features if f["example"] == 3]
    ids = tokenizer(long, add_special_tokens=False)["input_ids"]
    half = (24 - tokenizer.num_special_tokens_to_add(pair=True)) // 2
    assert both[0][1 : half + 1] == ids[:half] == both[0][-half - 1 : -1]  # both are cut, nothing is lost
    assert both[-1][1 : half + 1] == ids[-half:] == both[-1][-half - 1 : -1]


def test_special_tokens_in_the_text_are_text(tokenizers):
    (feature,) = text_features([text("a [SEP] b")], tokenizers["wordpiece"], ["0"], TextArguments())
    assert feature["input_ids"].tolist().count(tokenizers["wordpiece"].sep_token_id) == 1


def test_words_keep_the_space_before_them(tokenizers):
    tokenizer = tokenizers["byte-level"]
    words = ["the", "lazy", "dog"]
    (feature,) = tag_features([sentence(words, tags=("A", "B", "A"))], tokenizer, ["A", "B"], WordArguments())
    assert feature["input_ids"].tolist() == tokenizer(" ".join(words))["input_ids"]


LONG = sentence(
    [f"{word}{'s' * (place % 4)}" for place, word in enumerate(WORDS * 5)],
    tags=tuple("ABC"[place % 3] for place in range(5 * len(WORDS))),
    heads=tuple(max(0, place - 2) for place in range(5 * len(WORDS))),
    relations=tuple("xyz"[place % 3] for place in range(5 * len(WORDS))),
)
EXTREME = sentence(
    ["a" * 400, "\x00", "", "fox", "가" * 50], tags=tuple("ABCAB"), heads=(0, 1, 1, 1, 1), relations=tuple("xyzxy")
)
EMPTY = sentence([], tags=(), heads=(), relations=())


@pytest.mark.parametrize(("max_seq_length", "doc_stride"), [(8, 0), (8, 4), (24, 6), (64, 32), (512, 0)])
def test_every_word_belongs_to_one_window(tokenizer, max_seq_length, doc_stride):
    sentences = [LONG, EMPTY, EXTREME, sentence(["fox"], tags=("C",), heads=(0,), relations=("z",))]
    arguments = WordArguments(max_seq_length=max_seq_length, doc_stride=doc_stride)
    tags = tag_features(sentences, tokenizer, list("ABC"), arguments)
    links = link_features(sentences, tokenizer, list("xyz"), arguments)
    words = [(example, word) for example, s in enumerate(sentences) for word in range(len(s.words))]
    assert sorted((f["example"], int(w)) for f in tags for w in f["word"] if w >= 0) == words
    assert sorted((f["example"], f["first_word"] + int(w)) for f in links for w in np.flatnonzero(f["owned"])) == words
    for f in tags:
        assert len(f["input_ids"]) <= max_seq_length and ((f["labels"] >= 0) == (f["word"] >= 0)).all()
        for label, word in zip(f["labels"], f["word"], strict=True):
            assert word < 0 or "ABC"[label] == sentences[f["example"]].tags[word]
    for f in links:
        s, first = sentences[f["example"]], f["first_word"]
        spans = f["word_spans"]
        assert (spans[:, 0] < spans[:, 1]).all() and (spans[1:, 0] == spans[:-1, 1]).all()
        assert spans[0, 0] == 1 and spans[-1, 1] == len(f["input_ids"]) - 1 and len(f["input_ids"]) <= max_seq_length
        for place, owned in enumerate(f["owned"]):
            gold, head = f["gold_heads"][place], f["heads"][place]
            expected = (s.heads[first + place], "xyz".index(s.relations[first + place])) if owned else (-100, -100)
            assert (gold, f["gold_labels"][place]) == expected
            inside = owned and (gold == 0 or first < gold <= first + len(spans))
            assert head == ((gold and gold - first) if inside else -100)
            assert f["labels"][place] == (f["gold_labels"][place] if inside else -100)


def test_windows_of_words_share_the_stride_and_words_lie_inside(tokenizer):
    features = link_features([LONG], tokenizer, list("xyz"), LinkArguments(max_seq_length=32, doc_stride=8))
    assert len(features) > 3
    for before, after in pairwise(features):
        shared = before["first_word"] + len(before["owned"]) - after["first_word"]
        spans = before["word_spans"][-shared:]
        assert shared > 0 and spans[-1, 1] - spans[0, 0] >= 8
        size = spans[-1, 1] - spans[0, 0]
        assert before["input_ids"][spans[0, 0] : -1].tolist() == after["input_ids"][1 : 1 + size].tolist()
        assert not before["owned"][-1] and not after["owned"][0]


def test_what_is_not_scored_is_left_out(tokenizer):
    silent = sentence(["the", "fox"], tags=(None, None), heads=(None, None), relations=(None, None))
    partly = sentence(["the", "fox"], tags=(None, "A"), heads=(None, 0), relations=(None, "x"))
    (feature,) = tag_features([silent, partly], tokenizer, ["A"], WordArguments())
    assert feature["example"] == 1 and (feature["labels"] == 0).sum() == 1 and (feature["word"] >= 0).sum() == 2
    (feature,) = link_features([silent, partly], tokenizer, ["x"], LinkArguments())
    assert feature["heads"].tolist() == feature["gold_heads"].tolist() == [-100, 0] and feature["owned"].all()


# Batches


def test_batches(tokenizer):
    pad, types = tokenizer.pad_token_id, "token_type_ids" in tokenizer.model_input_names
    sentences = [LONG, sentence(["fox", "\x00"], tags=("C", None), heads=(2, 0), relations=("z", "x"))]
    arguments = WordArguments(max_seq_length=24, doc_stride=4)
    texts = text_features([text("the fox"), text(KOREAN, label="1")], tokenizer, ["0", "1"], TextArguments())
    batch = CollateTexts(pad)(texts)
    sizes = [len(f["input_ids"]) for f in texts]
    assert batch["labels"].tolist() == [0, 1] and batch["num_items_in_batch"].tolist() == [2, sum(sizes)]
    assert batch["attention_mask"].sum(1).tolist() == sizes and ("token_type_ids" in batch) == types
    assert (batch["input_ids"][batch["attention_mask"] == 0] == pad).all() and list(batch["about"]) == ["example"]
    numbers = CollateTexts(pad)(text_features([text("a", label="1.5")], tokenizer, None, TextArguments()))["labels"]
    assert numbers.dtype == torch.float32 and numbers.tolist() == [1.5]

    features = tag_features(sentences, tokenizer, list("ABC"), arguments)
    batch = CollateTags(pad)(features[-3:])
    assert batch["labels"].shape == batch["input_ids"].shape == batch["about"]["word"].shape
    assert batch["num_items_in_batch"][0] == (batch["labels"] >= 0).sum() and (batch["labels"][-1] >= 0).sum() == 1

    features = link_features(sentences, tokenizer, list("xyz"), arguments)
    batch = CollateLinks(pad)(features[-3:])
    about, longest = batch["about"], max(len(f["heads"]) for f in features[-3:])
    assert batch["word_spans"].shape == (3, longest, 2) and batch["heads"].shape == batch["labels"].shape == (
        3,
        longest,
    )
    assert (
        about["num_words"].tolist() == [len(f["heads"]) for f in features[-3:]] and about["owned"].dtype == torch.bool
    )
    assert about["first_word"].tolist() == [f["first_word"] for f in features[-3:]] and not about["owned"][-1, 2:].any()
    assert batch["heads"][-1, :3].tolist() == [2, 0, -100] and (about["gold_labels"][-1, 2:] == -100).all()
    assert batch["num_items_in_batch"].tolist() == [
        int((batch["heads"] >= 0).sum()),
        int(batch["attention_mask"].sum()),
    ]
    assert str(CollateLinks(pad)) == f"CollateLinks(pad_token_id={pad})"


def test_without_files_the_built_in_data_is_used(write, monkeypatch):
    path = write("a.jsonl", '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    monkeypatch.setattr(builtin, "classified_files", lambda: ([path], [path]))
    assert [t.label for t in read_texts(TextArguments())["validation"]] == ["x", "y"]
    path = write("a.conllu", TREE)
    monkeypatch.setattr(builtin, "treebank_files", lambda: ([path], [path]))
    assert read_sentences(WordArguments())["train"][0].tags == ("NOUN", "VERB", "VERB")
    assert read_trees(LinkArguments())["train"][0].heads == (3, 3, 0)
