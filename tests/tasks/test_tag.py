"""Tags of words: every format is read and written back, mistakes are named with their place, each word is scored once."""

import copy
import json
import math
import unicodedata
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import seqeval.metrics
import torch
from fixtures import files, tagged_words
from fixtures.tagged_words import EMPTY, EXTREME, LONG, SECOND_TREE, TREE, gather, groupings, sentence
from seqeval.scheme import IOB2
from transformers.utils import ModelOutput

from hf_tiny import InputError, report
from hf_tiny.arguments import Arguments, parse
from hf_tiny.data.conllu import Sentence
from hf_tiny.data.splits import find_labels
from hf_tiny.data.windows import CollateWindows
from hf_tiny.tasks.tag import (
    Entities,
    TagArguments,
    TagEvaluation,
    Tags,
    TagTask,
    consistent,
    is_entity_scheme,
    score_tags,
    tag_tokenizer,
)

COLUMNS = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\nGerman JJ B-MISC\n"


@pytest.fixture
def write(tmp_path):
    return partial(files.write, tmp_path)


@pytest.fixture
def drawn(monkeypatch) -> list[tuple]:
    """What would be drawn."""
    calls = []
    monkeypatch.setattr(report, "draw_confusion", lambda path, labels, *ids: calls.append((path.name, labels, *ids)))
    return calls


def sentences_of(path: str, **settings) -> list[Sentence]:
    return TagTask(TagArguments(train_file=[path], validation_file=[path], **settings)).splits()["train"]


def predicted(sentences: list[Sentence], answers: list, folder: Path, field: str = "upos", split: str = "out") -> Path:
    """The file that is written when these are the tags; a word with None was not asked."""
    gold = [one.word_labels for one in sentences]
    labels = sorted({tag for tags in [*answers, *gold] for tag in tags if tag is not None})
    judge = TagEvaluation(None, sentences, split, TagTask(TagArguments(tag_field=field), labels=labels))
    asked = [
        (example, word, labels.index(tag))
        for example, tags in enumerate(answers)
        for word, tag in enumerate(tags)
        if tag is not None
    ]
    judge.results = dict(zip(("example", "word", "predicted"), np.array(asked).T, strict=True))
    judge.report(folder)
    (written,) = folder.glob(f"{split}_predictions.*")
    return written


# Reading and writing


def test_tags_that_look_the_same_are_the_same(write):
    """A Mac may write Hangul in pieces."""
    tagged = sentences_of(write("a.conll", f"서울 {unicodedata.normalize('NFD', '지명')}\n부산 지명\n"))
    assert tagged[0].word_labels == ("지명", "지명")


def test_columns(write, tmp_path, drawn):
    spaced = sentences_of(write("a.conll", COLUMNS))
    tabbed = sentences_of(write("b.bio", COLUMNS.replace(" ", "\t").replace("\n\n", "\n\t\n")))
    plain = sentences_of(write("c.words.gz", COLUMNS))
    for sentences in (spaced, tabbed, plain):
        assert [s.words for s in sentences] == [("EU", "rejects"), ("German",)]
        assert [s.word_labels for s in sentences] == [("B-ORG", "O"), ("B-MISC",)]
    assert spaced[0].place.endswith("a.conll:3") and spaced[1].place.endswith("a.conll:7")
    written = predicted(spaced, [["O", None], ["B-ORG"]], tmp_path)
    assert written.read_text() == "EU NNP B-ORG O\nrejects VBZ O _\n\nGerman JJ B-MISC B-ORG\n\n"
    written = predicted(tabbed, [["O", "O"], ["B-ORG"]], tmp_path)
    assert written.read_text().startswith("EU\tNNP\tB-ORG\tO\n")
    name, labels, gold, found = drawn[-1]
    assert (name, labels) == ("out_confusion.png", ["B-MISC", "B-ORG", "O"])
    assert gold.tolist() == [1, 2, 0] and found.tolist() == [2, 2, 1]


def test_lists_of_words(write, tmp_path, drawn):
    rows = [{"id": 1, "tokens": ["가", "b c"], "tags": ["A", None]}, {"id": 2, "tokens": [], "tags": []}]
    path, content = write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)), pa.Table.from_pylist(rows)
    pyarrow.parquet.write_table(content, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, content.schema) as stream:
        stream.write_table(content)
    for number, given in enumerate((path, str(tmp_path / "a.parquet"), str(tmp_path / "a.arrow"))):
        sentences = sentences_of(given)
        assert [(s.words, s.word_labels) for s in sentences] == [(("가", "b c"), ("A", None)), ((), ())]
        written = predicted(sentences, [["B", "A"], []], tmp_path, split=f"out{number}")
        assert [s.word_labels for s in sentences_of(str(written), label_column="prediction")] == [("B", "A"), ()]


def test_fields_of_a_treebank_are_read_and_written_as_they_were(write, tmp_path, drawn):
    path = write("a.conllu", f"{TREE}\n{SECOND_TREE}\n")
    for field, expected in {"upos": ("NOUN", "VERB"), "xpos": ("NN", "VBZ"), "feats": ("_", "_")}.items():
        sentences = sentences_of(path, tag_field=field)
        assert sentences[1].word_labels == expected
        written = predicted(sentences, [s.word_labels for s in sentences], tmp_path, field, split=field)
        assert written.read_text() == f"{TREE}\n{SECOND_TREE}\n"
    written = predicted(sentences_of(path), [["X", "Y", "Z"], ["X", None]], tmp_path)
    tags = [line.split("\t")[3] for line in written.read_text().split("\n") if line[:2] in ("1\t", "2\t", "3\t")]
    assert tags == ["X", "Y", "Z", "X", "_"]


def test_morphemes_of_a_file(write, tmp_path, caplog, drawn):
    caplog.set_level("INFO")
    path = write(
        "a.conllu", TREE.replace("vamos\tir", "친구다\t친구+이+다").replace("돈을\t", "\u1103\u1169\u11ab을\t")
    )
    (found,) = sentences_of(path, tag_field="morphemes")
    assert found.words == tuple("돈을친구다주었다") and found.word_of == (0, 0, 1, 1, 1, 2, 2, 2)
    assert found.word_labels == ("B-NNG", "B-JKO", None, None, None, "B-VV", "B-EP", "B-EF")
    assert "66.67% of 3 words align" in caplog.text
    assert found.text == "돈을 친구다주었다" and found.places == (0, 1, 3, 4, 5, 6, 7, 8)
    answers = [tag or "B-NNG" for tag in found.word_labels]
    written = predicted([found], [answers], tmp_path, "morphemes")
    misc = [line.split("\t")[-1] for line in written.read_text().split("\n") if line[:2] in ("1\t", "2\t", "3\t")]
    assert misc == ["Tags=B-NNG,B-JKO", "SpaceAfter=No|Tags=B-NNG,B-NNG,B-NNG", "Tags=B-VV,B-EP,B-EF"]
    labels = ["B-EF", "B-EP", "B-JKO", "B-NNG", "B-VV"]
    arguments = TagArguments(tag_field="morphemes")
    tokenizer = tag_tokenizer(copy.deepcopy(tagged_words.tokenizer("wordpiece")), [found], arguments)
    (feature,) = TagTask(arguments, None, tokenizer, labels).features([found])
    # 친 is not in the vocabulary: its word, whose end no space marks, is one token.
    assert tokenizer.convert_ids_to_tokens(feature["input_ids"].tolist()) == ["[CLS]", "돈", "##을", "[UNK]", "[SEP]"]
    assert feature["labels"].tolist() == [-100, 3, 2, -100, -100]
    (feature,) = TagTask(arguments, None, tagged_words.tokenizer("byte-level"), labels).features([found])
    assert feature["word"][feature["word"] >= 0].tolist() == [0, 2, 3, 4, 5, 6]
    assert feature["labels"][feature["labels"] >= 0].tolist() == [3, 4, 1]


def test_a_dataset_of_the_hub(tmp_path):
    kinds = datasets.List(datasets.ClassLabel(names=["O", "B-x"]))
    features = datasets.Features(words=datasets.List(datasets.Value("string")), ner=kinds)
    for split in ("train", "validation"):
        rows = [{"words": ["a", split], "ner": [0, 1]}, {"words": ["b"], "ner": [1]}]
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / f"set/{split}.parquet"))
    arguments = TagArguments(dataset_name=str(tmp_path / "set"), text_column="words", label_column="ner")
    splits = TagTask(arguments).splits()
    assert [s.words for s in splits["validation"]] == [("a", "validation"), ("b",)]
    assert splits["train"][0].word_labels == ("O", "B-x")
    with pytest.raises(InputError, match=r"set, train, row 1: there is no column 'tokens'.*--text_column"):
        TagTask(TagArguments(dataset_name=str(tmp_path / "set"))).splits()


KLUE = """\
## a line about the data
## klue-ner-v1_train_00000-nsmc	<서울 시:LC>가 #1
서	B-LC
울	I-LC
\x20	I-LC
시	I-LC
가	O
\x20	O
#	O
1	O

## klue-ner-v1_train_00001-nsmc	비
비	O
"""


def test_characters_with_tags_are_the_text_that_they_are_of(write, tmp_path, drawn):
    """As KLUE has them: lines with a space are spaces, lines that begin with ## are comments, also in .tsv."""
    sentences = sentences_of(write("klue-ner_train.tsv", KLUE))
    assert [one.text for one in sentences] == ["서울 시가 #1", "비"]
    assert sentences[0].words == tuple("서울시가#1") and sentences[0].places == (0, 1, 3, 4, 6, 7)
    assert sentences[0].word_labels == ("B-LC", "I-LC", "I-LC", "O", "O", "O")
    answers = [["B-LC", "I-LC", "I-LC", "O", "I-LC", "O"], ["O"]]
    written = predicted(sentences, answers, tmp_path).read_text()
    lines = KLUE.splitlines()
    tags = ["B-LC", "I-LC", "I-LC", "I-LC", "O", "O", "B-LC", "O"]
    assert written.splitlines()[:10] == [*lines[:2], *(f"{a}\t{b}" for a, b in zip(lines[2:10], tags, strict=True))]
    rows = [{"tokens": list(one.text), "tags": ["O"] * len(one.text)} for one in sentences]
    listed = sentences_of(write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert [(one.text, one.words, one.places) for one in listed] == [(o.text, o.words, o.places) for o in sentences]
    again = predicted(listed, answers, tmp_path, split="lists").read_text().splitlines()
    assert json.loads(again[0])["prediction"] == tags


def test_a_stray_space_among_words_does_not_join_them(write):
    (found,) = sentences_of(
        write("a.jsonl", json.dumps({"tokens": ["EU", "\xa0", "rejects"], "tags": ["B", "O", "O"]}))
    )
    assert found.words == ("EU", "\xa0", "rejects") and found.places is None


def test_a_token_stands_for_all_its_characters(write, caplog):
    """A token has the tag of its first character; tags that begin inside of it cannot be found, and this is said."""
    tags = ["B-X", "I-X", "O", "O", "B-Y", "O"]
    content = "".join(f"{letter}\t{tag}\n" for letter, tag in zip("the fox", [*tags[:3], "O", *tags[3:]], strict=True))
    (found,) = sentences_of(write("a.tsv", content))
    labels, arguments = ["B-X", "B-Y", "I-X", "O"], TagArguments(character_tokens=False)
    tokenizer = tag_tokenizer(tagged_words.tokenizer("wordpiece"), [found], arguments)
    (feature,) = TagTask(arguments, None, tokenizer, labels).features([found])
    assert tokenizer.convert_ids_to_tokens(feature["input_ids"].tolist()) == ["[CLS]", "the", "fox", "[SEP]"]
    assert feature["labels"].tolist() == [-100, 0, 3, -100] and feature["word"].tolist() == [-1, 0, 3, -1]
    assert "75.0% of the tags begin inside of a token" in caplog.text and "--character_tokens" in caplog.text
    judge = TagEvaluation(None, [found], "dev", TagTask(TagArguments(tag_field="upos"), labels=labels))
    results = {"example": np.array([0, 0]), "word": np.array([0, 3]), "predicted": np.array([2, 3])}
    assert judge.decoded(results) == [["B-X", "I-X", "I-X", "O", "O", "O"]]
    arguments = TagArguments()
    tokenizer = tag_tokenizer(copy.deepcopy(tokenizer), [found], arguments)
    (feature,) = TagTask(arguments, None, tokenizer, labels).features([found])
    assert tokenizer.tokenize("the fox") == ["t", "##h", "##e", "f", "##o", "##x"]
    assert feature["labels"].tolist() == [-100, 0, 2, 3, 3, 1, 3, -100]
    with pytest.raises(InputError, match="--character_tokens: only a WordPiece"):
        tag_tokenizer(tagged_words.tokenizer("byte-level"), [found], TagArguments(character_tokens=True))
    assert tag_tokenizer(tagged_words.tokenizer("byte-level"), [found], arguments).tokenize("the") == ["the"]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("I-X I-X O I-X", "B-X I-X O B-X"),
        ("B-X I-Y I-Y", "B-X B-Y I-Y"),
        ("B-X B-X I-X O", "B-X B-X I-X O"),
        ("_ I-X", "_ B-X"),
    ],
)
def test_an_entity_has_a_beginning(tags, expected):
    assert consistent(tags.split()) == expected.split()


def test_a_perfect_answer_scores_1():
    """Also where a syllable of several morphemes goes on with the one before."""
    tags, labels = ("B-VV", "I-VV+EC", "B-EF"), ["B-EF", "B-VV", "I-VV+EC"]
    sentence = Sentence(tuple("떠나다"), tags, "here", ".conll", tuple("떠나다"))
    judge = TagEvaluation(None, [sentence], "dev", TagTask(TagArguments(tag_field="upos"), labels=labels))
    predicted = np.array([labels.index(tag) for tag in tags])
    results = {"predicted": predicted, "example": np.zeros(3, int), "word": np.arange(3)}
    assert judge.decoded(results) == [["B-VV", "B-VV+EC", "B-EF"]]
    figures = score_tags(judge.scored(results), labels, judge.metric)
    assert figures["f1"] == figures["accuracy"] == 1


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("a.conll", "EU O\nrejects\n", {}, r"a.conll:2: this line has 1 columns"),
        ("a.conll", "EU O\nrejects VBZ O\n", {}, r"a.conll:2: this line has 3 columns.*the first line, 2"),
        ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}', {}, r"a.jsonl:1: there are 2 words and 1 tags"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [NaN]}', {}, r"a.jsonl:1: the label, column 'tags', is nan"),
        ("a.jsonl", '{"tokens": "a b", "tags": ["O"]}', {}, r"a.jsonl:1: 'tokens' is 'a b' and must be a list"),
        ("a.conll", SECOND_TREE, {}, r"a.conll:1: the words are the numbers 1, 2, ... as in a treebank"),
        ("a.conll", "EU O\n", {"tag_field": "xpos"}, r"--tag_field xpos: this is for CoNLL-U"),
        ("a.conll", "EU O\n", {"tag_field": "upos"}, r"--tag_field upos: this is for CoNLL-U"),
        ("a.conll", "-DOCSTART- O\n\n", {}, r"a.conll: there are no sentences in it to train on"),
    ],
)
def test_mistakes_in_sentences_are_named_with_their_place(write, name, content, settings, message):
    with pytest.raises(InputError, match=message):
        sentences_of(write(name, content), **settings)


@dataclass(frozen=True, kw_only=True)
class Flags(TagArguments, Arguments):
    """Only what the task has."""


def test_what_a_tag_can_be():
    with pytest.raises(InputError, match="--tag_field pos: choose one of upos, xpos, feats, morphemes"):
        parse(Flags, ["--tag_field", "pos"])
    assert TagTask(parse(Flags, ["--tag_field", "xpos"])).open_ended and not TagTask(parse(Flags, [])).open_ended


def test_the_built_in_data_is_the_default(write, monkeypatch):
    path = write("a.conllu", TREE)
    monkeypatch.setattr(TagTask, "BUILTIN_FILES", lambda: ([path], [path]))
    splits = TagTask(TagArguments()).splits()
    assert splits["train"][0].word_labels == ("NOUN", "VERB", "VERB") and find_labels(splits) == ["NOUN", "VERB"]


# Features


@pytest.mark.parametrize("kind", tagged_words.TOKENIZERS)
@pytest.mark.parametrize(("max_seq_length", "doc_stride"), [(8, 4), (24, 6), (512, 0)])
def test_every_word_is_tagged_once(kind, max_seq_length, doc_stride):
    tokenizer = tagged_words.tokenizer(kind)
    sentences = [LONG, EMPTY, EXTREME, sentence(["fox"], ("C",))]
    arguments = TagArguments(max_seq_length=max_seq_length, doc_stride=doc_stride)
    features = TagTask(arguments, None, tokenizer, list("ABC")).features(sentences)
    words = [(example, word) for example, s in enumerate(sentences) for word in range(len(s.words))]
    assert sorted((f["example"], int(w)) for f in features for w in f["word"] if w >= 0) == words
    for f in features:
        assert len(f["input_ids"]) <= max_seq_length and ((f["labels"] >= 0) == (f["word"] >= 0)).all()
        for label, word in zip(f["labels"], f["word"], strict=True):
            assert word < 0 or "ABC"[label] == sentences[f["example"]].word_labels[word]
    batch = CollateWindows(tokenizer.pad_token_id, TagTask.ABOUT)(features[-3:])
    assert batch["labels"].shape == batch["input_ids"].shape == batch["about"]["word"].shape
    assert batch["num_items_in_batch"][0] == (batch["labels"] >= 0).sum() and (batch["labels"][-1] >= 0).sum() == 1
    assert set(batch["about"]) == {"example", "word"} and "word" not in batch


def test_what_is_not_scored_is_left_out():
    silent = sentence(["the", "fox"], (None, None))
    partly = sentence(["the", "fox"], (None, "A"))
    (feature,) = TagTask(TagArguments(), None, tagged_words.tokenizer("wordpiece"), ["A"]).features([silent, partly])
    assert feature["example"] == 1 and (feature["labels"] == 0).sum() == 1 and (feature["word"] >= 0).sum() == 2


# Figures


def test_entities():
    references = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC", "B-LOC"]]
    predictions = [["B-PER", "I-PER", "O", "B-PER"], ["I-LOC", "B-LOC", "I-LOC"]]
    # Gold: PER 0-1, LOC 3, LOC 1, LOC 2. Found: PER 0-1 (right), PER 3, LOC 1-2; the I-LOC that begins nothing is none.
    figures = Entities().compute(predictions=predictions, references=references)
    assert figures == pytest.approx({"precision": 1 / 3, "recall": 1 / 4, "f1": 2 / 7, "accuracy": 4 / 7})
    for name, function in (("f1", seqeval.metrics.f1_score), ("precision", seqeval.metrics.precision_score)):
        assert figures[name] == pytest.approx(function(references, predictions, mode="strict", scheme=IOB2))


@pytest.mark.filterwarnings("error")
def test_no_entities_at_all():
    figures = Entities().compute(predictions=[["O", "O"]], references=[["O", "O"]])
    assert figures == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 1.0}


def test_tags():
    figures = Tags().compute(predictions=[0, 0, 1, 2], references=[0, 1, 1, 1])
    assert figures == pytest.approx({"accuracy": 1 / 2, "f1": (2 / 3 + 1 / 2 + 0) / 3, "majority": 3 / 4})


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["O", "B-PER", "I-PER"], True),
        (["B-NNG", "I-NNG", "B-XSV+EP"], True),
        (["NOUN", "VERB"], False),
        (["O", "X"], False),
        (["B-PER", "NOUN"], False),
        (["O", "B-PER", "E-PER"], False),  # IOBES is scored tag by tag
        (["O"], False),
    ],
)
def test_is_entity_scheme(labels, expected):
    assert is_entity_scheme(labels) is expected


# Example, word, label and predicted tag of each token. Example 0 comes in two windows, its words 0-1 owned by one and 2-3
# by the other; its -1 are sub-words and others' words.
WINDOWS = [
    (1, [0, 1], [0, 0], [0, 0]),
    (0, [-1, 2, -1, 3], [-100, 2, -100, 0], [1, 2, 2, 0]),
    (0, [0, 1, -1], [0, 1, -100], [0, 1, 0]),
    (2, [0, 1, 2], [1, -100, 1], [1, 2, 2]),  # word 1 is not scored
    (3, [0], [-100], [1]),  # nothing to score
]


def window_sentences(labels: list[str]) -> list[Sentence]:
    """What the windows are of."""
    tags = [(0, 1, 2, 0), (0, 0), (1, None, 1), (None,)]
    named = [tuple(None if tag is None else labels[tag] for tag in one) for one in tags]
    return [Sentence(tuple("abcd"[: len(one)]), one, "here", ".conll", tuple("abcd"[: len(one)])) for one in named]


def collected(judge: TagEvaluation, batches) -> dict[str, np.ndarray]:
    """Of the windows in padded batches; the loss is 2 per item."""
    found = []
    for places in batches:
        chosen = [WINDOWS[place] for place in places]
        width = max(len(word) for _, word, _, _ in chosen) + 2
        word, labels = torch.full((len(chosen), width), -1), torch.full((len(chosen), width), -100)
        logits = torch.zeros(len(chosen), width, 3)
        for row, (_, words, gold, tags) in enumerate(chosen):
            word[row, 1 : len(words) + 1], labels[row, 1 : len(words) + 1] = torch.tensor(words), torch.tensor(gold)
            logits[row, torch.arange(1, len(words) + 1), torch.tensor(tags)] = 1.0
        items = int(labels.ne(-100).sum())
        batch = {
            "labels": labels,
            "num_items_in_batch": torch.tensor([items, 99]),
            "about": {"example": torch.tensor([example for example, *_ in chosen]), "word": word},
        }
        loss = torch.tensor(2.0 if items else math.nan)  # a mean of nothing
        found.append(judge.collect(ModelOutput(loss=loss, logits=logits), batch))
    return gather(found)


@pytest.mark.parametrize("batches", groupings(5))
def test_entities_over_windows(batches):
    judge = TagEvaluation(
        None,
        window_sentences(["O", "B-X", "I-X"]),
        "dev",
        TagTask(TagArguments(tag_field="upos"), labels=["O", "B-X", "I-X"]),
    )
    # Gold: 0:1-2, 2:0, 2:2. Found: 0:1-2 over both windows, 2:0; its I-X after the unscored word goes on with nothing.
    expected = {"loss": 2.0, "precision": 1.0, "recall": 2 / 3, "f1": 4 / 5, "accuracy": 7 / 8}
    assert judge.compute(collected(judge, batches)) == pytest.approx(expected)


@pytest.mark.parametrize("batches", groupings(5))
def test_tags_over_windows(batches, tmp_path, drawn):
    labels = ["ADJ", "NOUN", "VERB"]
    judge = TagEvaluation(None, window_sentences(labels), "dev", TagTask(TagArguments(tag_field="upos"), labels=labels))
    judge.results = collected(judge, batches)
    expected = {"loss": 2.0, "accuracy": 7 / 8, "f1": (1 + 4 / 5 + 2 / 3) / 3, "majority": 1 / 2}
    assert judge.compute(judge.results) == pytest.approx(expected)
    judge.report(tmp_path)
    ((_, _, gold, found),) = drawn
    assert gold.tolist() == [0, 1, 2, 0, 0, 0, 1, 1] and found.tolist() == [0, 1, 2, 0, 0, 0, 1, 2]
    written = (tmp_path / "dev_predictions.conll").read_text()  # also what is not scored
    assert written == "a ADJ\nb NOUN\nc VERB\nd ADJ\n\na ADJ\nb ADJ\n\na NOUN\nb VERB\nc VERB\n\na NOUN\n\n"
