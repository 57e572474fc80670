"""The pipeline for dependency parsing."""

import copy
import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from fixtures.tiny_models import randomised
from transformers import PreTrainedTokenizerFast, pipeline

from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraModel,
    HfTinyTokenLinkingConfig,
    HfTinyTokenLinkingModel,
)
from hf_tiny.models.trees import is_tree, maximum_spanning_tree
from hf_tiny.models.words import affixes, split_words
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

SIZES = {
    "vocab_size": 99,
    "embedding_size": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}
LINKING = {"arc_size": 16, "label_size": 8, "linking_dropout": 0.0, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def korean() -> PreTrainedTokenizerFast:
    texts = ["나는 오늘 학교에 간다 .", "그는 학교에서 오늘 책을 읽는다 !", "나는 책을 오늘 읽는다 ."]
    return train_tokenizer(texts * 4, TokenizerArguments(vocab_size=75), model_max_length=20)


def saved(model, tokenizer: PreTrainedTokenizerFast, folder) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("나는 학교에 간다.", "나는 학교에 간다 ."),
        ('"그래...", 했다!?', '" 그래 ... " , 했다 ! ?'),
        ("don't pay 3.5% (U.S. only)", "don't pay 3.5 % ( U.S . only )"),
        (" -- \n …", "-- …"),
        ("a $5 ~b", "a $5 ~b"),  # symbols are no punctuation
        ("", ""),
    ],
)
def test_split_words(text, words):
    assert split_words(text) == words.split()


@pytest.mark.parametrize("tree", [True, False])
def test_dependency_parsing_pipeline(tree, korean, tmp_path):
    names = {0: "root", 1: "nsubj", 2: "obl"}
    encoder = {"model_type": "hf_tiny_electra", **SIZES, "vocab_size": len(korean)}
    sentences = [
        ["나는", "오늘", "학교에", "간다", "."],
        ["책을", "읽는다"],
        ["책"],
        ["그는", "책을", "오늘", "읽는다", "!"] * 2,
    ]
    greedy_trees = set()
    for seed in range(3):
        torch.manual_seed(seed)
        model = randomised(
            HfTinyTokenLinkingModel(
                HfTinyTokenLinkingConfig(
                    encoder=encoder, id2label=names, tree=tree, affix_buckets=99, lstm_size=8, **LINKING
                )
            )
        )
        run = pipeline("dependency-parsing", model=saved(model, korean, tmp_path), device="cpu")
        for words, found in zip(sentences, run(sentences), strict=True):
            assert [row["id"] for row in found] == list(range(1, len(words) + 1))
            assert [row["word"] for row in found] == words
            pieces = [korean(word, add_special_tokens=False)["input_ids"] for word in words]
            ends = np.cumsum([1, *map(len, pieces)]).tolist()
            ids = torch.tensor([[korean.cls_token_id, *itertools.chain(*pieces), korean.sep_token_id]])
            spans = torch.tensor([list(itertools.pairwise(ends))])
            with torch.no_grad():
                outputs = model(ids, word_spans=spans, affixes=torch.from_numpy(affixes(words, 99))[None])
            arcs = outputs.logits[0]
            heads = [row["head"] for row in found]
            greedy = arcs.argmax(-1).tolist()
            greedy_trees.add(is_tree(greedy))
            assert heads == (maximum_spanning_tree(arcs.numpy()).tolist() if tree else greedy)
            assert is_tree(heads) or not tree
            for word, row in enumerate(found):
                labels = outputs.label_logits[0, word, row["head"]].log_softmax(0)
                assert row["relation"] == names[labels.argmax().item()]
                expected = math.exp(arcs[word].log_softmax(0)[row["head"]] + labels.max())
                assert row["score"] == pytest.approx(expected, abs=1e-5)
    assert greedy_trees == {True, False}  # else the test could not tell the two ways apart


@pytest.fixture(scope="module")
def parser(korean, tmp_path_factory):
    torch.manual_seed(0)
    encoder = {"model_type": "hf_tiny_electra", **SIZES, "vocab_size": len(korean)}
    model = randomised(HfTinyTokenLinkingModel(HfTinyTokenLinkingConfig(encoder=encoder, num_labels=4, **LINKING)))
    left = copy.deepcopy(korean)
    left.padding_side = "left"  # of which the words must not be shifted
    folder = saved(model, korean, tmp_path_factory.mktemp("parser"))
    return pipeline("dependency-parsing", model=folder, tokenizer=left, device="cpu")


def test_what_the_parser_takes(parser):
    words = ["나는", "학교에", "간다", "."]
    one, other = parser(words), parser(["읽는다", "!"])
    assert [row["word"] for row in one] == words
    assert parser("나는 학교에 간다.") == one
    assert parser([words]) == [one]
    assert parser([words, "읽는다!"]) == [one, other]
    assert parser(["나는 학교에 간다.", "읽는다!"]) == [one, other]
    assert parser(["읽는다!"], is_split_into_words=False) == [other]
    assert [row["word"] for row in parser(["읽는다!"])] == ["읽는다!"]
    assert list(parser(sentence for sentence in [words, "읽는다!"])) == [one, other]
    assert parser("") == parser([]) == []


def test_the_parser_in_batches(parser):
    sentences = [["나는", "학교에", "간다", "."], ["책"], "그는 오늘 학교에서 책을 읽는다!", ""]
    for found, expected in zip(parser(sentences, batch_size=4), parser(sentences), strict=True):
        for row, other in zip(found, expected, strict=True):
            assert row.pop("score") == pytest.approx(other.pop("score"), abs=1e-5)
            assert row == other


def test_a_word_of_no_token(parser):
    """Every word is answered, also one that the tokenizer leaves nothing of."""
    assert parser.tokenizer.tokenize("\u200b\ufeff\x07") == []
    found = parser(["나는", "\x07", "간다"])
    assert [row["word"] for row in found] == ["나는", "\x07", "간다"]
    assert is_tree([row["head"] for row in found])


def test_a_sentence_beyond_the_window(parser):
    parser(["책"] * 18)
    with pytest.raises(
        ValueError, match="at most 20 tokens, but the 19 words from '책' to '책' are 21: give one sentence"
    ):
        parser(["책"] * 19)


def test_the_parser_refuses_other_models(korean, tmp_path):
    model = HfTinyElectraModel(HfTinyElectraConfig(**{**SIZES, "vocab_size": len(korean)}))
    with pytest.raises(ValueError, match="dependency-parsing needs a model that links words"):
        pipeline("dependency-parsing", model=saved(model, korean, tmp_path), device="cpu")


def test_the_parser_refuses_unknown_settings(parser):
    with pytest.raises(ValueError, match="does not know top_k"):
        parser("책", top_k=3)


def test_a_saved_parser(parser, tmp_path):
    """With hf_tiny the pipeline is its own, which needs no trust."""
    parser.save_pretrained(tmp_path)
    sentence = "나는 학교에 간다."
    for remote in (False, True):
        again = pipeline("dependency-parsing", model=str(tmp_path), device="cpu", trust_remote_code=remote)
        assert type(again) is type(parser)
        for row, other in zip(again(sentence), parser(sentence), strict=True):
            assert row == {**other, "score": pytest.approx(other["score"], abs=1e-6)}


ALONE = """
import json, sys
sys.modules["hf_tiny"] = None  # as if it were not installed: importing it fails
from transformers import pipeline
for folder in ("saved", "again"):
    parse = pipeline("dependency-parsing", model=folder, trust_remote_code=True, device="cpu")
    print(json.dumps(parse("나는 학교에 간다.")))
    parse.save_pretrained("again")
"""


@pytest.mark.slow
def test_a_parser_where_hf_tiny_is_not_installed(parser, tmp_path):
    """The pipeline comes with the model, also when that is saved again."""
    parser.save_pretrained(tmp_path / "saved")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", ALONE]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    for line in done.stdout.splitlines():
        for row, other in zip(json.loads(line), parser("나는 학교에 간다."), strict=True):
            assert row == {**other, "score": pytest.approx(other["score"], abs=1e-6)}
    for folder in ("saved", "again"):
        named = json.loads((tmp_path / folder / "config.json").read_text())["custom_pipelines"]
        assert named["dependency-parsing"]["impl"] == "parsing.DependencyParsingPipeline"
