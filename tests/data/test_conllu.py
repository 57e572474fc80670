"""CoNLL-U: read and written back as it was, every mistake named with its place; Korean morphemes."""

from functools import partial

import pytest
from fixtures import files
from fixtures.tagged_words import SECOND_TREE, TREE

from hf_tiny import InputError
from hf_tiny.data import conllu
from hf_tiny.data.conllu import Sentence
from hf_tiny.data.encoding import Decoding


@pytest.fixture
def write(tmp_path):
    return partial(files.write, tmp_path)


def linked(rows: list[list[str]], name: str) -> dict:
    return {"heads": conllu.heads(rows, name), "word_labels": tuple(row[conllu.DEPREL] for row in rows)}


def trees_of(path: str) -> list[Sentence]:
    return list(conllu.read_treebank(path, Decoding(), linked))


def changed(old: str, new: str) -> str:
    assert old in TREE
    return TREE.replace(old, new)


def test_words_are_neither_ranges_nor_empty_nodes(write):
    path = write("a.conllu", f"{TREE}\n{SECOND_TREE}\n# nothing but a comment\n")
    one, two = trees_of(path)
    assert one.words == ("돈을", "vamos", "주었다") and one.upos == ("NOUN", "VERB", "VERB")
    assert (one.heads, one.word_labels) == ((3, 3, 0), ("obj", "advcl", "root"))
    assert (one.place, two.place, one.kind) == (f"{path}:1", f"{path}:9", ".conllu")
    assert one.lines == tuple(TREE.splitlines()) and one.labels == one.word_labels


def test_a_label_that_is_not_scored_is_none_of_the_labels():
    assert Sentence(("a", "b"), ("X", None), "here", ".conllu", ()).labels == ("X",)


def test_filling_changes_words_only(write):
    (tree,) = trees_of(write("a.conllu", TREE))
    assert conllu.fill(tree, {}) == TREE
    filled = conllu.fill(
        tree, {conllu.UPOS: ["A", "B", "C"]}, {"New": ["1", None, "3"], "SpaceAfter": [None, "Yes", None]}
    )
    for old, new in zip(TREE.splitlines(), filled.splitlines(), strict=True):
        cells = old.split("\t")
        if cells[0] in "123":
            cells[conllu.UPOS] = {"1": "A", "2": "B", "3": "C"}[cells[0]]
            cells[conllu.MISC] = {"1": "New=1", "2": "SpaceAfter=Yes", "3": "New=3"}[cells[0]]
        assert new == "\t".join(cells)
    assert "Subject=0" in conllu.fill(tree, {}, {"Subject": ["0", None, None]})


def test_an_entry_of_misc_is_replaced_and_others_stay(write):
    (tree,) = trees_of(write("a.conllu", changed("SpaceAfter=No", "Subject=9|SpaceAfter=No")))
    assert "\tSpaceAfter=No|Subject=0\n" in conllu.fill(tree, {}, {"Subject": [None, "0", None]})


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
        (changed("# sent_id = one\n", "").replace("\t3\tobj", "\t1\tobj"), r"a.conllu:1: in sentence .*a.conllu:1 the"),
        (changed("\t3:obj\t_", ""), r"a.conllu:3: this line has 8 columns; CoNLL-U has 10"),
        (changed("3\t주었다", "4\t주었다"), r"a.conllu:7: the word's ID is '4' and should be 3"),
    ],
)
def test_broken_trees_are_named(write, content, message):
    with pytest.raises(InputError, match=message):
        trees_of(write("a.conllu", content))


def test_two_roots_are_kept(write):
    assert trees_of(write("a.conllu", changed("\t3\tobj", "\t0\tobj")))[0].heads == (0, 3, 0)


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


def test_characters_are_whole_syllables():
    assert conllu.characters("\u1103\u1169\u11ab을") == "돈을"
    assert conllu.morpheme_tags("\u1103\u1169\u11ab을", "돈+을", "NNG+JKO") == ("B-NNG", "B-JKO")
