"""Links between words: trees are read and written as they were, windows know which links they hold, whole sentences are put
together from windows."""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fixtures import files, tagged_words
from fixtures.tagged_words import EMPTY, EXTREME, LONG, SECOND_TREE, TREE, gather, groupings, sentence
from transformers.utils import ModelOutput

from hf_tiny import InputError
from hf_tiny.arguments import Arguments, parse
from hf_tiny.data.conllu import Sentence
from hf_tiny.data.windows import CollateWindows
from hf_tiny.models.trees import is_tree
from hf_tiny.tasks.parse import (
    LinkEvaluation,
    LinkingOn,
    LinkTask,
    ParseArguments,
    Parsing,
    Subjects,
    decode,
    whole_sentences,
)

N = -100
LABELS = ["root", "nsubj", "obj", "nsubj:pass"]
LINKER = SimpleNamespace(config=SimpleNamespace(affix_buckets=LinkingOn.SETTINGS["affix_buckets"], tree=True))


@pytest.fixture
def write(tmp_path):
    return partial(files.write, tmp_path)


def trees_of(path: str, **settings) -> list[Sentence]:
    return LinkTask(ParseArguments(train_file=[path], validation_file=[path], **settings)).splits()["train"]


def written(trees: list[Sentence], heads: list, relations: list, folder: Path, task: str = "parse") -> Path:
    """The file of these predictions; a word with None has no answer. The answers come as scores, as those of a model do."""
    labels = sorted({relation for own in relations for relation in own if relation is not None})
    judge, asked = LinkEvaluation(None, trees, "out", LinkTask(ParseArguments(task=task), labels=labels)), []
    for example, (own_heads, own_relations) in enumerate(zip(heads, relations, strict=True)):
        answered = [
            (head, relation) for head, relation in zip(own_heads, own_relations, strict=True) if head is not None
        ]
        size = len(answered)
        scores, best = np.zeros((size, size + 1)), np.zeros((size, size + 1), dtype=int)
        for word, (head, relation) in enumerate(answered):
            scores[word, head], best[word, head] = 1.0, labels.index(relation)
        asked.append({
            "scores": scores.ravel(), "best_labels": best.ravel(), "owned": np.ones(size, bool), "num_words": [size],
            "gold_heads": np.zeros(size, int), "gold_labels": np.zeros(size, int), "first_word": [0], "example": [example],
        })  # fmt: skip
    judge.results = gather(asked)
    judge.report(folder)
    (path,) = folder.glob("out_predictions.*")
    return path


def links_in(path: Path) -> list[list[str]]:
    return [line.split("\t")[6:8] for line in path.read_text().split("\n") if line[:2] in ("1\t", "2\t", "3\t")]


# Reading and writing


def test_trees_are_read_and_written_as_they_were(write, tmp_path):
    path = write("a.conllu", f"{TREE}\n{SECOND_TREE}\n")
    trees = trees_of(path)
    assert [(t.words, t.heads, t.word_labels) for t in trees] == [
        (("돈을", "vamos", "주었다"), (3, 3, 0), ("obj", "advcl", "root")),
        (("fox", "runs"), (2, 0), ("nsubj", "root")),
    ]
    content = written(trees, [t.heads for t in trees], [t.word_labels for t in trees], tmp_path).read_text()
    for old, new in zip(f"{TREE}\n{SECOND_TREE}\n".split("\n"), content.split("\n"), strict=True):
        assert old.split("\t")[:8] == new.split("\t")[:8]
    assert "3\tobj\t_\t_\n" in content and "2.1\t있\t_\t_\t_\t_\t_\t_\t3:dep\t_\n" in content
    path = written(trees[:1], [(2, 0, None)], [("a", "root", None)], tmp_path)  # the last word was in no window
    assert links_in(path) == [["2", "a"], ["0", "root"], ["_", "_"]]


def test_rows_with_lists(write, tmp_path):
    row = {"tokens": ["fox", "runs"], "upos": ["NOUN", "VERB"], "head": [2, 0], "deprel": ["nsubj", "root"]}
    (listed,) = trees_of(write("a.jsonl", json.dumps(row)))
    (tree,) = trees_of(write("a.conllu", SECOND_TREE))
    for name in ("words", "upos", "heads", "word_labels"):
        assert vars(listed)[name] == vars(tree)[name]
    content = json.loads(written([listed], [(0, 1)], [("root", "x")], tmp_path).read_text())
    assert content == {**row, "prediction": [[0, "root"], [1, "x"]]}


KLUE = """\
## klue-dp-v1_train_00000_wikitree	그는 책을 읽었다.
1	그는	그 는	NP+JX	3	NP_SBJ
2	책을	책 을	NNG+JKO	3	NP_OBJ
3	읽었다.	읽 었 다 .	VV+EP+EF+SF	0	VP
"""


def test_trees_of_klue(write, tmp_path):
    (tree,) = trees_of(write("klue-dp_train.tsv", KLUE))
    assert tree.words == ("그는", "책을", "읽었다.") and tree.text == "그는 책을 읽었다."
    assert (tree.heads, tree.word_labels) == ((3, 3, 0), ("NP_SBJ", "NP_OBJ", "VP"))
    path = written([tree], [(2, 0, 2)], [("NP_SBJ", "VP", "NP_OBJ")], tmp_path)
    lines = KLUE.splitlines()
    changed = zip(lines[1:], ("2\tNP_SBJ", "0\tVP", "2\tNP_OBJ"), strict=True)
    assert path.read_text().splitlines()[:4] == [
        lines[0],
        *(f"{old.rsplit(chr(9), 2)[0]}\t{new}" for old, new in changed),
    ]
    row = {
        "word_form": list(tree.words),
        "pos": ["NP", "NNG", "VV"],
        "head": [3, 3, 0],
        "deprel": list(tree.word_labels),
    }
    (listed,) = trees_of(write("a.jsonl", json.dumps(row)))
    assert (listed.words, listed.heads, listed.word_labels) == (tree.words, tree.heads, tree.word_labels)
    with pytest.raises(InputError, match=r"b.tsv:1: this line has 3 columns; .* as KLUE has it, has 6, with tabs"):
        trees_of(write("b.tsv", "1\tfox\tNOUN\n"))


def test_subjects_of_predicates(write, tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [
        ("그가", "PRON", 4, "nsubj"), ("책이", "NOUN", 4, "nsubj:pass"), ("빨리", "ADV", 4, "advmod"), ("팔려", "VERB", 0, "root"),
        ("웃는", "VERB", 6, "acl"), ("사람", "NOUN", 4, "obl"), ("나는", "PRON", 6, "nsubj"),
    ]  # fmt: skip
    lines = [f"{i}\t{w}\t_\t{u}\t_\t_\t{h}\t{r}\t_\t_" for i, (w, u, h, r) in enumerate(rows, 1)]
    (found,) = trees_of(write("a.conllu", "\n".join(lines) + "\n"), task="subject")
    assert found.heads == (None, None, None, 2, 0, None, None)  # the nearest of two; none
    assert found.word_labels == (None, None, None, "nsubj:pass", "omitted", None, None)
    assert "1 subjects of words that are neither VERB nor ADJ" in caplog.text
    heads, relations = (1, 1, 1, 2, 0, 1, 1), ("x", "x", "x", "nsubj:pass", "omitted", "x", "x")
    path = written([found], [heads], [relations], tmp_path, "subject")
    misc = [line.split("\t")[-1] for line in path.read_text().split("\n")[:7]]
    assert misc == ["_", "_", "_", "Subject=2", "Subject=0", "_", "_"]  # only predicates are answered


def test_mistakes_in_trees_are_named(write):
    with pytest.raises(InputError, match=r"--train_file .*a.conll: the name must end in .conllu"):
        trees_of(write("a.conll", "EU O\n"))
    with pytest.raises(InputError, match=r"a.conllu:1: in sentence one the heads go round in a cycle"):
        trees_of(write("a.conllu", TREE.replace("\t0\troot", "\t2\troot")))
    row = {"tokens": ["a", "b", "c"], "upos": ["X"] * 3, "head": [0, 1], "deprel": ["x"] * 3}
    with pytest.raises(InputError, match=r"a.jsonl:1: there are 3 words and 2 in 'head'"):
        trees_of(write("a.jsonl", json.dumps(row)))
    with pytest.raises(InputError, match=r"a.jsonl:1: in this row the HEAD of word 2 .b. is '9'"):
        trees_of(write("a.jsonl", json.dumps({**row, "head": [0, 9, 1]})))


@dataclass(frozen=True, kw_only=True)
class Flags(ParseArguments, Arguments):
    """Only what the task has."""


def test_what_links_can_be():
    with pytest.raises(InputError, match="--task tree: choose one of parse, subject"):
        parse(Flags, ["--task", "tree"])


def test_the_built_in_data_is_the_default(write, monkeypatch):
    path = write("a.conllu", TREE)
    monkeypatch.setattr(LinkTask, "BUILTIN_FILES", lambda: ([path], [path]))
    assert LinkTask(ParseArguments()).splits()["train"][0].heads == (3, 3, 0)


# Features


@pytest.mark.parametrize("kind", tagged_words.TOKENIZERS)
@pytest.mark.parametrize(("max_seq_length", "doc_stride"), [(8, 4), (24, 6), (512, 0)])
def test_a_window_learns_the_links_that_it_holds(kind, max_seq_length, doc_stride):
    sentences = [LONG, EMPTY, EXTREME, sentence(["fox"], ("C",), (0,))]
    arguments = ParseArguments(max_seq_length=max_seq_length, doc_stride=doc_stride)
    features = LinkTask(arguments, LINKER, tagged_words.tokenizer(kind), list("ABC")).features(sentences)
    words = [(example, word) for example, s in enumerate(sentences) for word in range(len(s.words))]
    owned = [(f["example"], f["first_word"] + int(w)) for f in features for w in np.flatnonzero(f["owned"])]
    assert sorted(owned) == words
    for f in features:
        s, first = sentences[f["example"]], f["first_word"]
        assert len(f["word_spans"]) == f["num_words"] == len(f["owned"]) and len(f["input_ids"]) <= max_seq_length
        for place, is_owned in enumerate(f["owned"]):
            gold, head = f["gold_heads"][place], f["heads"][place]
            label = "ABC".index(s.word_labels[first + place])
            assert (gold, f["gold_labels"][place]) == ((s.heads[first + place], label) if is_owned else (N, N))
            inside = is_owned and (gold == 0 or first < gold <= first + f["num_words"])
            assert head == ((gold and gold - first) if inside else N)
            assert f["labels"][place] == (f["gold_labels"][place] if inside else N)


def test_what_is_not_scored_is_left_out():
    silent = sentence(["the", "fox"], (None, None), (None, None))
    partly = sentence(["the", "fox"], (None, "x"), (None, 0))
    (feature,) = LinkTask(ParseArguments(), LINKER, tagged_words.tokenizer("wordpiece"), ["x"]).features(
        [silent, partly]
    )
    assert feature["heads"].tolist() == feature["gold_heads"].tolist() == [N, 0] and feature["owned"].all()
    assert feature["example"] == 1 and feature["labels"].tolist() == [N, 0]


def test_batches_of_links():
    tokenizer = tagged_words.tokenizer("wordpiece")
    sentences = [LONG, sentence(["fox", "\x00"], ("C", "A"), (2, 0))]
    features = LinkTask(ParseArguments(max_seq_length=24, doc_stride=4), LINKER, tokenizer, list("ABC")).features(
        sentences
    )[-3:]
    batch = CollateWindows(tokenizer.pad_token_id, LinkTask.ABOUT)(features)
    about, sizes = batch["about"], [f["num_words"] for f in features]
    assert batch["word_spans"].shape == (3, max(sizes), 2)
    assert batch["heads"].shape == batch["labels"].shape == about["owned"].shape == (3, max(sizes))
    assert about["num_words"].tolist() == sizes and about["owned"].dtype == torch.bool
    assert about["first_word"].tolist() == [f["first_word"] for f in features] and not about["owned"][-1, 2:].any()
    assert batch["heads"][-1, :3].tolist() == [2, 0, N] and (about["gold_labels"][-1, 2:] == N).all()
    counts = [int((batch["heads"] >= 0).sum()), int(batch["attention_mask"].sum())]
    assert batch["num_items_in_batch"].tolist() == counts
    assert not set(LinkTask.ABOUT) & set(batch)


# Figures

PARSES = [  # head, relation, gold head, gold relation; uas, las, las_full, label_accuracy
    ((2, "nsubj", 2, "nsubj"), (1, 1, 1, 1)),
    ((2, "nsubj", 2, "nsubj:pass"), (1, 1, 0, 1)),  # the gold subtype is missing
    ((2, "nsubj:outer", 2, "nsubj:pass"), (1, 1, 0, 1)),  # another subtype
    ((2, "acl:relcl", 2, "acl"), (1, 1, 0, 1)),
    ((2, "aclx", 2, "acl"), (1, 0, 0, 0)),  # no subtype: another relation
    ((3, "nsubj", 2, "nsubj"), (0, 0, 0, 1)),  # wrong head, right label
    ((2, "obj", 2, "nsubj"), (1, 0, 0, 0)),  # right head, wrong label
    ((1, "obj", 2, "nsubj"), (0, 0, 0, 0)),
    ((0, "root", 0, "root"), (1, 1, 1, 1)),
    ((1, "punct", 2, "punct"), (0, 0, 0, 1)),  # punctuation counts
    ((2, "punct", 2, "punct"), (1, 1, 1, 1)),
]


def test_parsing_of_one_word_and_of_all():
    metric, names = Parsing(), ("uas", "las", "las_full", "label_accuracy")
    for words, expected in [([word], figures) for word, figures in PARSES] + [
        ([word for word, _ in PARSES], np.mean([figures for _, figures in PARSES], axis=0).tolist())
    ]:
        heads, relations, gold_heads, gold_relations = map(list, zip(*words, strict=True))
        figures = metric.compute(
            predictions=heads, references=gold_heads, relations=relations, reference_relations=gold_relations
        )
        assert figures == pytest.approx(dict(zip(names, expected, strict=True)))


def test_subjects_found():
    figures = Subjects().compute(predictions=[0, 0, 3, 2, 1], references=[0, 2, 3, 0, 0])
    expected = {"subject_accuracy": 2 / 5, "overt_accuracy": 1 / 2, "omitted_accuracy": 1 / 3, "majority": 3 / 5}
    assert figures == pytest.approx(expected)
    assert math.isnan(Subjects().compute(predictions=[0, 1], references=[0, 0])["overt_accuracy"])


def link_window(example: int, first: int, arcs, owned, gold_heads, gold_labels, labels=None) -> dict:
    """A window whose word i scores 5 with the head arcs[i] (within the window) and the label labels[i] there."""
    size = len(arcs)
    scores, label_logits = torch.zeros(size, size + 1), torch.zeros(size, size + 1, len(LABELS))
    scores[torch.arange(size), torch.tensor(arcs)] = 5.0
    label_logits[torch.arange(size), torch.tensor(arcs), torch.tensor(labels or [1] * size)] = 1.0
    return {
        "example": example, "first_word": first, "scores": scores, "label_logits": label_logits,
        "owned": owned, "gold_heads": gold_heads, "gold_labels": gold_labels,
    }  # fmt: skip


def collected(judge: LinkEvaluation, windows: list[dict], batches) -> dict[str, np.ndarray]:
    """In padded batches; what is padding scores highest of all, and the loss is 3 per item."""
    found = []
    for places in batches:
        chosen = [windows[place] for place in places]
        width = max(len(window["owned"]) for window in chosen) + 1
        logits = torch.full((len(chosen), width, width + 1), 99.0)
        label_logits = torch.zeros(len(chosen), width, width + 1, len(LABELS))
        about = {name: torch.full((len(chosen), width), N) for name in ("gold_heads", "gold_labels")}
        about["owned"] = torch.zeros(len(chosen), width, dtype=torch.bool)
        for row, window in enumerate(chosen):
            size = len(window["owned"])
            logits[row, :size, : size + 1] = window["scores"]
            label_logits[row, :size, : size + 1] = window["label_logits"]
            for name in ("owned", "gold_heads", "gold_labels"):
                about[name][row, :size] = torch.tensor(window[name])
        for name in ("example", "first_word"):
            about[name] = torch.tensor([window[name] for window in chosen])
        about["num_words"] = torch.tensor([len(window["owned"]) for window in chosen])
        outputs = ModelOutput(loss=torch.tensor(3.0), logits=logits, label_logits=label_logits)
        batch = {"num_items_in_batch": torch.tensor([int(about["gold_heads"].ne(N).sum()), 99]), "about": about}
        found.append(judge.collect(outputs, batch))
    return gather(found)


def decoded(results: dict[str, np.ndarray], task: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Heads and label ids of each sentence, in the order of the data."""
    found = list(whole_sentences(results))
    assert [example for example, _ in found] == sorted(example for example, _ in found)
    heads, labels = zip(*(decode(one, task) for _, one in found), strict=True)
    return list(heads), list(labels)


# Example 0 has the words 1-5: a window of 1-4 that owns 1-2, and one of 2-5 that owns 3-5.
WINDOWS = [
    link_window(1, 0, [2, 0], [1, 1], [2, 0], [3, 0], [1, 0]),
    link_window(0, 1, [0, 0, 2, 2], [0, 1, 1, 1], [N, 1, 3, 3], [N, 2, 2, 2], [0, 0, 2, 1]),
    link_window(0, 0, [0, 1, 0, 0], [1, 1, 0, 0], [0, 1, N, N], [0, 1, N, N], [0, 1, 0, 0]),
    link_window(2, 0, [0], [1], [0], [0], [0]),
]


def test_the_names_of_the_figures_are_known_before_training(monkeypatch):
    """--metric_for_best_model and --max_minutes ask for them."""
    figures = {"loss": 1.0, "las": 0.5}
    monkeypatch.setattr(LinkEvaluation, "__call__", lambda judge, model, accelerator, most: figures)
    assert LinkEvaluation(None, [], "dev", LinkTask(ParseArguments(task="parse"), labels=LABELS)).names(None, None) == [
        "loss",
        "las",
    ]


@pytest.mark.parametrize("batches", groupings(4))
def test_a_sentence_from_two_windows(batches):
    judge = LinkEvaluation(None, [], "dev", LinkTask(ParseArguments(task="parse"), labels=LABELS))
    results = collected(judge, WINDOWS, batches)
    before = {name: values.copy() for name, values in results.items()}
    heads, labels = decoded(results, "subject")
    assert [one.tolist() for one in heads] == [[0, 1, 0, 3, 3], [2, 0], [0]]
    assert [one.tolist() for one in labels] == [[0, 1, 0, 2, 1], [1, 0], [0]]
    # As a tree, one of the roots 1 and 3 must go; 3 has not seen 1 and goes to 2, 4 or 5: wrong, as the gold head is 1.
    heads, _ = decoded(results, "parse")
    assert all(is_tree(one) for one in heads)
    assert heads[0][[0, 1, 3, 4]].tolist() == [0, 1, 3, 3] and heads[0][2] == 2
    figures = judge.compute(results)
    assert figures["uas"] == pytest.approx(7 / 8)
    assert figures["las"] == pytest.approx(6 / 8)  # word 5 of example 0 has the wrong label
    assert figures["las_full"] == pytest.approx(5 / 8)  # and the first word of example 1 the wrong subtype
    assert figures["loss"] == pytest.approx(3.0)
    for name, values in before.items():
        np.testing.assert_array_equal(results[name], values)


@pytest.mark.parametrize("batches", groupings(3))
def test_subjects_over_windows(batches):
    windows = [
        link_window(1, 0, [2, 0, 0], [1, 1, 1], [N, 0, N], [N, 0, N]),
        link_window(0, 0, [0, 1, 0], [1, 1, 0], [N, 1, N], [N, 1, N]),
        link_window(0, 1, [0, 1, 2], [0, 1, 1], [N, 0, 3], [N, 0, 1]),
    ]
    judge = LinkEvaluation(None, [], "dev", LinkTask(ParseArguments(task="subject"), labels=LABELS))
    expected = {"loss": 3.0, "subject_accuracy": 3 / 4, "overt_accuracy": 1.0, "omitted_accuracy": 1 / 2}
    assert judge.compute(collected(judge, windows, batches)) == pytest.approx({**expected, "majority": 1 / 2})


def test_a_word_is_not_linked_to_itself():
    window = link_window(0, 0, [1, 2], [1, 1], [0, 0], [0, 0])
    judge = LinkEvaluation(None, [], "dev", LinkTask(ParseArguments(task="subject"), labels=LABELS))
    assert decoded(collected(judge, [window], [[0]]), "subject")[0][0].tolist() == [0, 0]


def test_a_sentence_without_answers_is_written_all_the_same(write, tmp_path):
    path = write("a.conllu", f"{TREE}\n{SECOND_TREE}\n")
    trees = trees_of(path)
    judge = LinkEvaluation(None, trees, "out", LinkTask(ParseArguments(task="parse"), labels=["nsubj", "root"]))
    window = link_window(1, 0, [2, 0], [1, 1], [2, 0], [0, 1], [0, 1])
    judge.results = collected(judge, [window], [[0]])
    judge.report(tmp_path)
    content = (tmp_path / "out_predictions.conllu").read_text()
    assert [line.split("\t")[6] for line in content.split("\n") if line[:2] in ("1\t", "2\t", "3\t")] == [*"___", *"20"]
