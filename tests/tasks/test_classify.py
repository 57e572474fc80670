"""Labels of texts: every format is read and written back, every mistake is named with its place, windows are averaged."""

import json
import math
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unicodedata import normalize

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from fixtures import files, tagged_words
from fixtures.encoders import CONFIGS
from fixtures.tagged_words import KOREAN, WORDS, gather, groupings
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification
from transformers.utils import ModelOutput

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForSequenceClassification, InputError, report
from hf_tiny.arguments import Arguments, parse
from hf_tiny.data.splits import find_labels
from hf_tiny.data.windows import CollateWindows
from hf_tiny.tasks import log_labels, log_texts
from hf_tiny.tasks.classify import (
    Classification,
    ClassifyArguments,
    Regression,
    SeveralLabelsEvaluation,
    Text,
    TextEvaluation,
    TextTask,
    is_regression,
    predict_texts,
    start_at_mean,
)

ROWS = [("a good film", "1"), ('he said "no', "0"), ("", "1"), ("끝까지 봤다", "0")]


@pytest.fixture
def write(tmp_path):
    return partial(files.write, tmp_path)


@pytest.fixture
def drawn(monkeypatch) -> list[tuple]:
    """What would be drawn."""
    calls = []
    monkeypatch.setattr(report, "draw_confusion", lambda path, labels, *ids: calls.append((path.name, labels, *ids)))
    return calls


def texts_of(path: str, **settings) -> list[Text]:
    return TextTask(ClassifyArguments(train_file=[path], validation_file=[path], **settings)).splits()["train"]


def text(content: str, pair: str | None = None, label: str = "0") -> Text:
    return Text(content, pair, label, "here", ".txt", {})


def predicted(texts: list[Text], answers: list[str], folder: Path) -> list[Path]:
    """The files that are written when these are the answers."""
    labels = sorted(set(answers))
    judge = TextEvaluation(None, texts, "test", TextTask(ClassifyArguments(), labels=labels))
    examples = np.arange(len(texts))
    logits = np.eye(len(labels))[[labels.index(answer) for answer in answers]]
    judge.results = {"logits": np.pad(logits, ((0, 0), (0, 1))), "labels": examples * 0, "example": examples}
    judge.report(folder)
    return sorted(folder.glob("test_predictions.*"))


# Reading and writing


def test_a_label_that_looks_the_same_is_the_same(write, caplog):
    """As a Mac writes Hangul, and with blanks that nobody sees; texts that are empty are counted."""
    rows = [("봤다", "긍정"), ("봤다", normalize("NFD", "긍정")), ("", "긍정 "), ("안 봤다", "부정")]
    assert {text.label for text in texts_of(write("a.tsv", table(rows, "\t")))} == {"긍정", "부정"}
    assert "2 texts are empty, such as " in caplog.text and "a.tsv:4: there is nothing to learn" in caplog.text
    lines = "".join(f"{label.strip()} {text}\n" for text, label in rows * 2)
    assert {text.label for text in texts_of(write("a.txt", lines))} == {"긍정", "부정"}


def table(rows, separator: str) -> str:
    return "".join(separator.join(row) + "\n" for row in [("text", "label"), *rows])


def as_jsonl(rows) -> str:
    return "".join(json.dumps({"text": t, "label": int(n)}, ensure_ascii=False) + "\n" for t, n in rows)


def as_arrow(rows) -> bytes:
    sink, content = pa.BufferOutputStream(), pa.table({"text": [t for t, _ in rows], "label": [n for _, n in rows]})
    with pa.ipc.new_stream(sink, content.schema) as stream:
        stream.write_table(content)
    return sink.getvalue().to_pybytes()


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
        ("a.arrow", as_arrow(ROWS)),
        ("a.txt", "".join(f"{label} {t}\n" for t, label in ROWS)),
        ("a.train", "".join(f"{label}\t{t}\n" for t, label in ROWS) + "\n"),
    ],
)
def test_every_format_gives_the_same_texts(write, tmp_path, drawn, name, content):
    path = write(name, content)
    texts = texts_of(path)
    assert [(text.text, text.label) for text in texts] == ROWS
    assert all(text.place.startswith(path) for text in texts)
    (written,) = predicted(texts, ["0", "1", "0", "1"], tmp_path)
    score = math.e / (math.e + 2)  # three logits: 1, 0 and 0
    if written.suffix == ".txt":
        lines = [line.split("\t", 3) for line in written.read_text().splitlines()]
        assert lines == [[label, "01"[label == "0"], f"{score:.4f}", t] for t, label in ROWS]
    else:
        again = texts_of(str(written), label_column="prediction")
        assert [(text.text, text.label) for text in again] == [(t, "01"[label == "0"]) for t, label in ROWS]
        assert [text.row["label"] for text in again] == [text.row["label"] for text in texts]
        assert [float(text.row["prediction_score"]) for text in again] == [pytest.approx(score, abs=1e-4)] * len(ROWS)
    ((name, labels, gold, found),) = drawn
    assert (name, labels, found.tolist(), gold.tolist()) == ("test_confusion.png", ["0", "1"], [0, 1, 0, 1], [0] * 4)


def test_parquet_keeps_the_names_of_classes(tmp_path, drawn):
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["bad", "good"]))
    rows = {"text": ["가", "b", None], "label": [1, 0, 1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "a.parquet"))
    texts = texts_of(str(tmp_path / "a.parquet"))
    assert [(text.text, text.label) for text in texts] == [("가", "good"), ("b", "bad"), ("", "good")]
    assert texts[1].place.endswith("a.parquet, row 2")
    (written,) = predicted(texts, ["bad"] * 3, tmp_path)
    assert pyarrow.parquet.read_table(written)["prediction"].to_pylist() == ["bad"] * 3


def test_files_of_several_kinds_and_columns_are_written_by_kind(write, tmp_path, drawn):
    paths = [write("d/a.tsv", "text\tlabel\na\tx\n"), write("d/b.tsv", "id\tlabel\ttext\n7\ty\tb\n")]
    write("d/c.jsonl", '{"text": "c", "label": true}\n')
    texts = texts_of(str(tmp_path / "d"))
    assert [text.label for text in texts] == ["x", "y", "True"] and texts[1].place == f"{paths[1]}:2"
    jsonl, tsv = predicted(texts, ["p", "q", "r"], tmp_path)
    header = "text\tlabel\tprediction\tprediction_score\tid\n"
    assert tsv.read_text() == header + "a\tx\tp\t0.4754\t\nb\ty\tq\t0.4754\t7\n"
    expected = {"text": "c", "label": True, "prediction": "r", "prediction_score": 0.4754}
    assert json.loads(jsonl.read_text()) == expected


@pytest.mark.parametrize(
    ("name", "text", "marked"), [("a.csv", "재미", True), ("a.csv", "fun", False), ("a.tsv", "재미", False)]
)
def test_korean_in_a_csv_has_the_mark_that_excel_needs(write, tmp_path, drawn, name, text, marked):
    separator = "," if name == "a.csv" else "\t"
    (written,) = predicted(texts_of(write(name, f"text{separator}label\n{text}{separator}x\n")), ["x"], tmp_path)
    assert written.read_bytes().startswith(b"\xef\xbb\xbf") == marked
    assert [(row.text, row.row["prediction"]) for row in texts_of(str(written))] == [(text, "x")]


def test_predictions_in_json_are_json(write, tmp_path, drawn):
    """They were an object a line, which no other program reads as .json."""
    texts = texts_of(write("a.json", json.dumps([{"text": "가", "label": "x"}, {"text": "b", "label": "y"}])))
    (written,) = predicted(texts, ["x", "x"], tmp_path)
    assert [row["prediction"] for row in json.loads(written.read_text())] == ["x", "x"]


def test_pairs_and_numbers(write, tmp_path):
    path = write("a.tsv", "s1\ts2\tscore\na\tb\t5.000\nc\td\t3.800\n")
    arguments = ClassifyArguments(
        train_file=[path], validation_file=[path], text_column="s1", text_pair_column="s2", label_column="score"
    )
    splits = TextTask(arguments).splits()
    assert [(t.text, t.text_pair, t.label) for t in splits["train"]] == [("a", "b", "5.000"), ("c", "d", "3.800")]
    assert splits["train"][0].texts == ["a", "b"] and text("a").texts == ["a"]
    assert is_regression(splits, arguments)
    whole = {"train": [text("a", label="1"), text("b", label="2.0")]}
    plain, number = ClassifyArguments(), ClassifyArguments(do_regression=True)
    assert not is_regression(whole, plain) and is_regression(whole, number)
    assert not is_regression(splits, ClassifyArguments(do_regression=False))
    with pytest.raises(InputError, match=r"there: the label 'N/A' is not a number, as that of here is, '1.5'"):
        is_regression({"train": [text("a", label="1.5"), replace(text("a", label="N/A"), place="there")]}, plain)
    assert not is_regression({"train": [text("a", label="1"), text("a", label="N/A")]}, plain)
    with pytest.raises(InputError, match="here: the label 'x' is not a number"):
        is_regression({"train": [text("a", label="x")]}, number)
    judge = TextEvaluation(None, splits["train"], "test", TextTask(ClassifyArguments(), labels=None))
    judge.results = {"logits": np.array([[1.5], [2.0]]), "labels": np.zeros(2), "example": np.arange(2)}
    judge.report(tmp_path)
    written = (tmp_path / "test_predictions.tsv").read_text()
    assert written == "s1\ts2\tscore\tprediction\na\tb\t5.000\t1.5000\nc\td\t3.800\t2.0000\n"


def test_numbers_are_held_out_though_none_comes_twice(write):
    path = write("a.txt", "".join(f"{n + 0.5} text\n" for n in range(50)))
    assert len(TextTask(ClassifyArguments(train_file=[path])).splits()["validation"]) == 5
    with pytest.raises(InputError, match="of 50 examples this holds out 0"):
        TextTask(ClassifyArguments(train_file=[path], do_regression=False)).splits()


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
        ("a.tsv", "text\tlabel\na\t1.5\nb\tnan\n", r"a.tsv:3: the label, column 'label', is nan. Give one, or drop the row"),
        ("a.csv", "text,label\na,1\nb,#REF!\nc,1\n", r"a.csv:3: the label, column 'label', is #REF!. Give one, or drop the row"),
        ("a.csv", "text,label\na,\nb,1\nc,nan\nd,\ne,\nf,\n", r"a.csv:2: the label, column 'label', is empty. 5 of 6 rows lack a "
         r"label, also \S*a.csv:4, \S*a.csv:5, \S*a.csv:6 and others. Give them, or drop these rows."),
        ("a.jsonl", '{"text": "a", "label": NaN}\n', r"a.jsonl:1: the label, column 'label', is nan"),
        ("a.jsonl", '{"text": "a", "label": [["x"]]}\n', r"a.jsonl:1: 'label' holds \['x'\]. A label is a text or a number"),
        ("a.jsonl", '{"text": "a", "label": {"x": 1}}\n', r"a.jsonl:1: 'label' holds {'x': 1}"),
        ("a.jsonl", '{"text": "a", "label": ["x"]}\n{"text": "b", "label": "x"}', r"a.jsonl:2: labels are lists in some rows"),
        ("a.txt", "A ship sails.\nThe moon is up.\nThe end\n", r"a.txt:1: is 'A' the label of this line\? 1 of 2 first words"),
        ("a.txt", "1 a\n b\n", r"a.txt:2: the line begins with a blank"),
        ("a.tsv", b"text\tlabel\na\t1\n\xff\t1\n", r"a.tsv:3: the byte at offset 15 of the file is not UTF-8"),
        ("a.tsv", "text\tlabel\n", r"a.tsv: there are no texts in it to train on"),
        ("a.txt", "", r"a.txt: there are no texts in it to train on"),
    ],
)  # fmt: skip
def test_mistakes_in_texts_are_named_with_their_place(write, name, content, message):
    with pytest.raises(InputError, match=f"(?s){message}"):
        texts_of(write(name, content))


def test_raw_text_is_not_taken_for_labels(write):
    """Of the first words of prose about half occur once: here of a licence."""
    lines = (Path(__file__).parents[2] / "LICENSE").read_text().splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    with pytest.raises(InputError, match=r"a.txt:\d+: is '\S+' the label of this line\?.*raw text is for pretraining"):
        texts_of(write("a.txt", "\n".join(lines)))
    many = [f"intent_{number % 150} text" for number in range(1000)] + ["rare text"]
    assert len(texts_of(write("b.txt", "\n".join(many)))) == 1001


def test_a_table_by_the_name_of_a_text(write):
    """Excel's "Unicode Text" is one."""
    path = write("excel.txt", "번호\t문장\t분류\n" + "".join(f"{n}\t좋다 {n}\t{n % 2}\n" for n in range(20)))
    with pytest.raises(InputError, match=r"excel.txt:1: --text_column 문장 names a column.*in \.tsv"):
        texts_of(path, text_column="문장", label_column="분류")


def test_numbers_with_a_comma_are_no_names(write):
    """Spreadsheets in many languages write them so; five classes were made of them."""
    path = write("a.csv", "text;label\n" + "".join(f"film {n};{n % 5}{',5' if n % 5 else ''}\n" for n in range(20)))
    with pytest.raises(
        InputError, match=r"a.csv:3: the label '1,5' has a comma .* Write 1\.5, or give --do_regression"
    ):
        texts_of(path)
    assert len(texts_of(path, do_regression=False)) == 20


SEVERAL = [("a good film", ["fun", "long"]), ("끝까지 봤다", []), ("he said no", ["long"]), ("no", ["sad", "fun"])]


@pytest.mark.parametrize("separator", [None, ";"])
def test_texts_with_several_labels(write, tmp_path, separator):
    if separator is None:
        rows = [json.dumps({"text": text, "label": labels}, ensure_ascii=False) for text, labels in SEVERAL]
        path = write("a.jsonl", "\n".join(rows))
    else:
        path = write("a.tsv", "text\tlabel\n" + "".join(f"{text}\t{'; '.join(labels)}\n" for text, labels in SEVERAL))
    texts = texts_of(path, label_separator=separator)
    assert [text.several for text in texts] == [tuple(labels) for _, labels in SEVERAL]
    labels, arguments = find_labels({"train": texts}), ClassifyArguments(label_separator=separator)
    assert labels == ["fun", "long", "sad"] and not is_regression({"train": texts}, arguments)
    tokenizer = tagged_words.tokenizer("wordpiece")
    batch = CollateWindows(0)(TextTask(arguments, None, tokenizer, labels).features(texts))
    assert batch["labels"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 1]]
    assert batch["labels"].dtype == torch.float32 and batch["num_items_in_batch"][0] == 4
    judge = SeveralLabelsEvaluation(None, texts, "dev", TextTask(arguments, labels=labels))
    logits = torch.tensor([[3.0, -1.0, -2.0], [-1.0, -1.0, -3.0], [-1.0, 1.0, -2.0], [2.0, 1.0, 1.0]])
    outputs = ModelOutput(loss=torch.tensor(0.5), logits=logits)
    judge.results = judge.collect(outputs, batch)
    # Right: fun twice, long once, sad once; found beside these: long; missed: long.
    expected = {"loss": 0.5, "micro_f1": 8 / 10, "macro_f1": (1 + 1 / 2 + 1) / 3, "accuracy": 1 / 2}
    assert judge.compute(judge.results) == pytest.approx(expected)
    judge.report(tmp_path)
    (written,) = tmp_path.glob("dev_predictions.*")
    again = texts_of(str(written), label_column="prediction", label_separator=separator)
    assert [text.several for text in again] == [("fun",), (), ("long",), ("fun", "long", "sad")]
    score = again[0].row["prediction_score"]
    assert ([score] if separator else score) == [pytest.approx(0.9526, abs=1e-4) if separator is None else "0.9526"]


def test_what_is_not_gzip_is_named(tmp_path):
    (tmp_path / "a.tsv.gz").write_bytes(b"plain")
    with pytest.raises(InputError, match="the file cannot be read"):
        texts_of(str(tmp_path / "a.tsv.gz"))


def test_the_built_in_data_is_the_default(write, monkeypatch):
    path = write("a.jsonl", '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    monkeypatch.setattr(TextTask, "BUILTIN_FILES", lambda: ([path], [path]))
    splits = TextTask(ClassifyArguments()).splits()
    assert [t.label for t in splits["validation"]] == ["x", "y"] and find_labels(splits) == ["x", "y"]


@dataclass(frozen=True, kw_only=True)
class Flags(ClassifyArguments, Arguments):
    """Only what the task has."""


def test_arguments_are_flags():
    parsed = parse(Flags, ["--train_file", "a.tsv", "b", "--do_regression", "true", "--text_pair_column", "s2"])
    assert parsed == Flags(train_file=["a.tsv", "b"], do_regression=True, text_pair_column="s2")


# Features


@pytest.mark.parametrize("kind", tagged_words.TOKENIZERS)
def test_all_windows_of_a_text_have_its_label(kind):
    tokenizer = tagged_words.tokenizer(kind)
    texts = [text("the lazy dog"), text(" ".join(WORDS * 5), "a fox", label="1"), text(KOREAN)]
    features = TextTask(ClassifyArguments(max_seq_length=32, doc_stride=4), None, tokenizer, ["0", "1"]).features(texts)
    assert {(f["example"], f["labels"]) for f in features} == {(0, 0), (1, 1), (2, 0)}
    assert sum(f["example"] == 1 for f in features) > 2
    batch = CollateWindows(tokenizer.pad_token_id)(features)
    sizes = [len(f["input_ids"]) for f in features]
    assert batch["labels"].tolist() == [f["labels"] for f in features] and list(batch["about"]) == ["example"]
    assert batch["num_items_in_batch"].tolist() == [len(features), sum(sizes)]
    assert batch["attention_mask"].sum(1).tolist() == sizes
    (feature,) = TextTask(ClassifyArguments(), None, tokenizer, None).features([text("fox", label="1.5")])
    assert feature["labels"] == 1.5 and feature["input_ids"].tolist() == tokenizer("fox")["input_ids"]


def small_classifier(**settings) -> HfTinyElectraForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = HfTinyElectraConfig(vocab_size=300, embedding_size=16, hidden_dropout_prob=0.0, **sizes, **settings)
    return HfTinyElectraForSequenceClassification(config).eval()


def test_weights_of_classes_are_exact_in_any_number_of_micro_batches():
    """The loss of all is the weighted mean, as torch's cross entropy has it with weights."""
    labels = ["a", "b", "c"]
    texts = [text(" ".join(WORDS[: 2 + place]), label=label) for place, label in enumerate("aaabaacaab")]
    arguments = ClassifyArguments(class_weights="balanced")
    model, tokenizer = small_classifier(num_labels=3), tagged_words.tokenizer("wordpiece")
    weights = TextTask(arguments, model, labels=labels).weights(texts)
    assert weights.tolist() == [1.0, 3.5, 7.0]  # 7, 2 and 1 of 10
    features = TextTask(arguments, model, tokenizer, labels).features(texts, training=True)
    collate, plain = CollateWindows(0), TextTask(arguments, None, tokenizer, labels).features(texts)
    batch = CollateWindows(0)(plain)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    expected = F.cross_entropy(model(**inputs).logits, batch["labels"], weight=torch.from_numpy(weights))
    for parts in groupings(len(features)):
        batches = [collate([features[place] for place in places]) for places in parts]
        counts = torch.stack([batch["num_items_in_batch"] for batch in batches]).sum(0)
        assert counts[0] == 21.0 and all(batch.keys() == inputs.keys() | OTHERS for batch in batches)
        calls = ({name: batch[name] for name in (*inputs, "labels")} for batch in batches)
        loss = sum(model(**call, num_items_in_batch=counts).loss for call in calls)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


OTHERS = {"labels", "about", "num_items_in_batch"}


def test_what_weights_of_classes_are_not_for():
    arguments, texts = ClassifyArguments(class_weights="balanced"), [text("a", label="1.5")]
    with pytest.raises(InputError, match="--class_weights: this is for texts with one label each"):
        TextTask(arguments, small_classifier(), labels=None).weights(texts)
    bert = BertForSequenceClassification(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(
        InputError, match="--class_weights: transformers' BertForSequenceClassification has a loss of its own"
    ):
        TextTask(arguments, bert, labels=["1.5"]).weights(texts)
    assert TextTask(ClassifyArguments(), bert, labels=["1.5"]).weights(texts) is None


# What a run says of its data


def test_labels_and_texts_are_told_before_training(caplog):
    caplog.set_level("INFO")
    tokenizer, arguments = tagged_words.tokenizer("wordpiece"), ClassifyArguments(max_seq_length=16, doc_stride=4)
    texts = [text("the fox", label="b"), text(" ".join(WORDS * 3), label="a"), text("a dog", label="b")]
    features = TextTask(arguments, None, tokenizer, ["a", "b"]).features(texts)
    assert len(features) > 3
    log_labels(features, {0: "a", 1: "b"})
    log_texts(tokenizer, features)
    assert "labels: b 2, a 1" in caplog.text  # texts, not windows
    assert "for example: [CLS] the fox [SEP]" in caplog.text and "[UNK]: 0.00% of the training text" in caplog.text
    log_labels([{"labels": value, "example": place} for place, value in enumerate((1.5, 4.0))], {})
    log_labels([{"labels": 0.0, "example": place} for place in range(2)], {})  # pairs that mean the same: no labels
    assert "labels: numbers from 1.5 to 4, on average 2.75" in caplog.text and "from 0 to 0" not in caplog.text
    log_labels(
        [{"labels": np.array(row, np.float32), "example": sum(row)} for row in ([1, 1], [0, 1])], {0: "x", 1: "y"}
    )
    assert "labels: y 2, x 1" in caplog.text
    words = [{"labels": np.array([-100, place, place % 25]), "example": 0} for place in range(40)]
    log_labels(words, {place: f"t{place}" for place in range(40)})
    assert "t0 3, t1 3" in caplog.text and "and 20 more" in caplog.text
    assert not any(record.levelname == "WARNING" for record in caplog.records if "training text" in record.message)
    log_texts(tokenizer, TextTask(arguments, None, tokenizer, ["0"]).features([text("日本語 fox the dog")]))
    assert "The tokenizer does not know 50% of the training text: the model sees [UNK] in its place" in caplog.text


# Figures


@pytest.mark.parametrize(
    ("predictions", "references", "accuracy", "f1", "matthews", "majority"),
    [
        # Label 0: precision 2/3, recall 1; label 1: precision 1, recall 1/3; label 2 is never right.
        ([0, 0, 0, 1, 2], [0, 0, 1, 1, 1], 3 / 5, (4 / 5 + 1 / 2 + 0) / 3, None, 3 / 5),
        ([1, 1, 0, 0], [1, 0, 1, 0], 1 / 2, 1 / 2, 0.0, 1 / 2),
        ([1, 1, 1, 0], [1, 1, 0, 0], 3 / 4, (4 / 5 + 2 / 3) / 2, (2 * 1 - 1 * 0) / math.sqrt(3 * 2 * 2 * 1), 1 / 2),
        ([1, 0], [0, 1], 0.0, 0.0, -1.0, 1 / 2),
        ([1, 1, 1], [1, 1, 1], 1.0, 1.0, 0.0, 1.0),  # one label only
    ],
)
@pytest.mark.filterwarnings("error")
def test_classification(predictions, references, accuracy, f1, matthews, majority):
    figures = Classification().compute(predictions=predictions, references=references)
    assert figures["accuracy"] == pytest.approx(accuracy)
    assert figures["f1"] == pytest.approx(f1)
    assert figures["majority"] == pytest.approx(majority)
    if matthews is not None:
        assert figures["matthews_correlation"] == pytest.approx(matthews)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["hf_tiny", "bert", "roberta"])
def test_a_new_regressor_starts_at_the_mean(kind):
    config = deepcopy(CONFIGS[kind])
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    start_at_mean(model, 2.5)
    answers = model.eval()(torch.arange(5, 25).reshape(2, 10)).logits
    assert (answers - 2.5).abs().max() < 1
    start_at_mean(model, 4.0)  # it is no longer new
    assert torch.equal(model(torch.arange(5, 25).reshape(2, 10)).logits, answers)


def test_regression():
    metric = Regression()
    figures = metric.compute(predictions=[1.0, 2.0, 4.0], references=[0.0, 3.0, 5.0])
    # Deviations (-4, -1, 5) / 3 and (-8, 1, 7) / 3: 66 / sqrt(42 * 114).
    assert figures == pytest.approx({"pearson": 66 / math.sqrt(42 * 114), "spearmanr": 1.0, "mse": 1.0})
    ties = metric.compute(predictions=[1.0, 1.0, 2.0], references=[3.0, 1.0, 2.0])  # ranks 1.5, 1.5, 3 and 3, 1, 2
    assert ties["spearmanr"] == pytest.approx(0.0)
    for predictions, references in (([1.0, 1.0], [0.0, 1.0]), ([0.0, 1.0], [2.0, 2.0]), ([1.0], [1.0])):
        constant = metric.compute(predictions=predictions, references=references)
        assert math.isnan(constant["pearson"]) and math.isnan(constant["spearmanr"])


def collected(judge: TextEvaluation, windows: list[tuple[int, list[float], float]], batches) -> dict[str, np.ndarray]:
    """Of windows (example, logits, label) in batches, whose losses are 0, 1, 2, ... of the window's place."""
    found = []
    for places in batches:
        examples, logits, labels = zip(*[windows[place] for place in places], strict=True)
        outputs = ModelOutput(loss=torch.tensor(float(np.mean(places))), logits=torch.tensor(logits))
        batch = {
            "labels": torch.tensor(labels),
            "num_items_in_batch": torch.tensor([len(places), 99]),
            "about": {"example": torch.tensor(examples)},
        }
        found.append(judge.collect(outputs, batch))
    return gather(found)


@pytest.mark.parametrize("batches", groupings(5))
def test_windows_of_a_text_are_averaged(batches, tmp_path, drawn):
    windows = [
        (2, [0.0, 0.0, 1.0], 2),
        (0, [1.0, 0.0, 0.0], 1),  # the surer window of example 0 decides
        (0, [0.0, 5.0, 0.0], 1),
        (0, [1.0, 0.0, 0.0], 1),
        (1, [3.0, 1.0, 2.0], 2),
    ]
    judge = TextEvaluation(
        None,
        [Text(c, None, "x", "", ".txt", {}) for c in "uvw"],
        "dev",
        TextTask(ClassifyArguments(), labels=list("abc")),
    )
    judge.results = collected(judge, windows, batches)
    assert predict_texts(judge.results).tolist() == [1, 0, 2]
    figures = judge.compute(judge.results)
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert figures["f1"] == pytest.approx((0 + 1 + 2 / 3) / 3)
    assert figures["majority"] == pytest.approx(2 / 3)
    assert figures["loss"] == pytest.approx(2.0)
    judge.report(tmp_path)
    assert (tmp_path / "dev_predictions.txt").read_text() == "x\tb\t0.6424\tu\nx\ta\t0.6652\tv\nx\tc\t0.5761\tw\n"
    ((_, _, gold, found),) = drawn
    assert (gold.tolist(), found.tolist()) == ([1, 2, 2], [1, 0, 2])


@pytest.mark.parametrize("batches", groupings(4))
def test_windows_of_a_regression_are_averaged(batches):
    windows = [(5, [4.0], 5.0), (3, [1.0], 0.0), (4, [1.0], 3.0), (4, [3.0], 3.0)]
    judge = TextEvaluation(None, [], "dev", TextTask(ClassifyArguments(), labels=None))
    results = collected(judge, windows, batches)
    assert predict_texts(results) == pytest.approx(np.array([1.0, 2.0, 4.0]))
    expected = {"loss": 1.5, "pearson": 66 / math.sqrt(42 * 114), "spearmanr": 1.0, "mse": 1.0}
    assert judge.compute(results) == pytest.approx(expected)
