"""Pairs of texts: every format gives the same pairs, every mistake is named with its place, micro-batches keep to their
budget in any epoch, and BPE dropout is the same again after a seek."""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from fixtures import files, modules
from sacrebleu.metrics import BLEU
from torch import nn
from transformers.utils import ModelOutput

from hf_tiny import HfTinySeq2SeqConfig, HfTinySeq2SeqForConditionalGeneration, InputError, report
from hf_tiny.arguments import Arguments, parse
from hf_tiny.data.batches import BucketedBatches
from hf_tiny.tasks import translate
from hf_tiny.tasks.translate import (
    SIDES,
    BpeDropout,
    CollatePairs,
    DenoisingEvaluation,
    Pair,
    PairArguments,
    PairEvaluation,
    PairTask,
    Translation,
)
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

dates = modules.load("benchmarks/make_builtin.py")
PAIRS = [
    ("A dog runs.", "개가 달린다."),
    ('He said "no', "그는 아니라고 했다"),
    ("Two men sit.", "두 남자가 앉아 있다."),
]
LANGUAGES = {"source_lang": "en", "target_lang": "ko"}


@pytest.fixture
def write(tmp_path):
    return partial(files.write, tmp_path)


@pytest.fixture
def drawn(monkeypatch) -> list[tuple]:
    """What would be drawn, of a model that need not be one."""
    calls = []
    monkeypatch.setattr(translate, "cross_attention", lambda model, tokenizer, pair: (pair.source, "rows", "columns"))
    monkeypatch.setattr(report, "draw_attention", lambda path, *given: calls.append((path.name, *given)))
    return calls


def pairs_of(*paths: str, **settings) -> list[Pair]:
    paths = list(paths)
    return PairTask(PairArguments(train_file=paths, validation_file=paths, **settings)).splits()["train"]


def written(pairs: list[Pair], texts: list[str], folder: Path) -> Path:
    """The file of these predictions."""
    judge = PairEvaluation(None, pairs, "predicted", PairTask(PairArguments(), None, None))
    order = np.random.default_rng(0).permutation(len(pairs))  # batches have them in any order
    judge.results = {"texts": np.array(texts, dtype=object)[order], "example": order}
    judge.report(folder)
    (path,) = folder.glob("predicted_predictions.*")
    return path


def lines(side: int, pairs=PAIRS) -> str:
    return "".join(f"{pair[side]}\n" for pair in pairs)


def sample(count: int, seed: int = 0) -> list[Pair]:
    """Pairs of dates of very different length."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(count):
        days = [date(1800 + int(year), 1 + number % 12, 1 + number % 28) for year in generator.integers(0, 250, 3)]
        texts = [dates.pair(day, number % 3) for day in days]
        sizes = generator.integers(1, 4, 2)
        source, target = (" ".join(text[side] for text in texts[: sizes[side]]) for side in (0, 1))
        found.append(Pair(source, target, "here", "here", ".tsv", {"source": source, "target": target}))
    return found


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for pair in sample(300) for text in (pair.source, pair.target)]
    return train_tokenizer(texts, TokenizerArguments(tokenizer_model="bpe", vocab_size=600))


# Reading


@pytest.mark.parametrize(
    ("name", "content", "settings"),
    [
        ("a.tsv", "source\ttarget\n" + "".join("\t".join(pair) + "\n" for pair in PAIRS), {}),
        ("a.tsv.gz", "".join("\t".join(("0", *pair)) + "\n" for pair in PAIRS), {"source_column": "2", "target_column": "3"}),
        ("a.csv", 'n,Q,A\n1,A dog runs.,개가 달린다.\n2,"He said ""no",그는 아니라고 했다\n3, Two men sit. ,두 남자가 앉아 있다.\n',
         {"source_column": "Q", "target_column": "A"}),
        ("a.jsonl", "".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in PAIRS), {}),
        ("a.json", json.dumps([{"translation": {"en": a, "ko": b}} for a, b in PAIRS]), LANGUAGES),
        ("a.jsonl.gz", "".join(json.dumps({"en": a, "ko": b}) + "\n" for a, b in PAIRS), LANGUAGES),
    ],
)  # fmt: skip
def test_every_table_gives_the_same_pairs(write, tmp_path, drawn, name, content, settings):
    path = write(name, content)
    pairs = pairs_of(path, **settings)
    assert [(pair.source, pair.target) for pair in pairs] == PAIRS
    assert all(pair.place.startswith(path) for pair in pairs)
    content = written(pairs, ["x", "y", "z"], tmp_path).read_text()
    if name == "a.json":
        assert [row["prediction"] for row in json.loads(content)] == ["x", "y", "z"]
    else:
        assert "x" in content.splitlines()[-3] and "prediction" in content
    assert drawn == [("predicted_attention.png", pairs[0].source, "rows", "columns")]


@pytest.mark.parametrize("names", [("a.en", "a.ko"), ("a.b.en.gz", "a.b.ko"), ("d/x.en.gz", "d/x.ko.gz")])
def test_aligned_files_in_any_order_and_by_folder_or_pattern(write, tmp_path, drawn, names):
    paths = [write(name, lines(side)) for side, name in enumerate(names)]
    for given in (paths, paths[::-1], [str(tmp_path / "**" / "*.*")], [str(tmp_path)]):
        pairs = pairs_of(*given, **LANGUAGES)
        assert [(pair.source, pair.target) for pair in pairs] == PAIRS
        assert (pairs[1].place, pairs[1].target_place) == (f"{paths[0]}:2", f"{paths[1]}:2")
    turned = pairs_of(*paths, source_lang="ko", target_lang="en")
    assert [(pair.target, pair.source) for pair in turned] == PAIRS
    path = written(pairs, ["하나", "둘\n셋", ""], tmp_path)
    assert path.name == "predicted_predictions.ko" and path.read_text() == "하나\n둘 셋\n\n"


def test_parquet_and_the_hub(tmp_path):
    for split in ("train", "test"):
        rows = [{"translation": {"en": f"{a} {split}", "ko": b}} for a, b in PAIRS * 10]
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / f"set/{split}.parquet"))
    splits = PairTask(
        PairArguments(dataset_name=str(tmp_path / "set"), validation_split_percentage=40, **LANGUAGES)
    ).splits()
    assert list(splits) == ["train", "validation", "test"] and len(splits["test"]) == 30
    # Pairs with the same source are on one side.
    assert {pair.source for pair in splits["train"]}.isdisjoint(pair.source for pair in splits["validation"])
    assert (len(splits["train"]), len(splits["validation"])) == (20, 10)
    pairs = pairs_of(str(tmp_path / "set/test.parquet"), **LANGUAGES)
    assert [(one.source, one.target) for one in pairs] == [(one.source, one.target) for one in splits["test"]]
    assert pairs[2].place.endswith("test.parquet, row 3")
    with pytest.raises(InputError, match=r"set, train, row 1: there is no column 'de', only 'en', 'ko'.*--target_lang"):
        PairTask(PairArguments(dataset_name=str(tmp_path / "set"), source_lang="en", target_lang="de")).splits()


def test_samples_and_held_out_pairs_do_not_depend_on_chance(write):
    path = write("a.tsv", "source\ttarget\n" + "".join(f"s{n}\tt{n}\n" for n in range(100)))
    settings = {"train_file": [path], "max_train_samples": 20, "max_eval_samples": 3, "validation_split_percentage": 10}
    first, again = (PairTask(PairArguments(**settings)).splits() for _ in range(2))
    assert first == again and {split: len(pairs) for split, pairs in first.items()} == {"train": 20, "validation": 3}
    places = [int(pair.source[1:]) for pair in first["train"]]
    assert places == sorted(places) and places != list(range(20))


BAD = [
    ({"a.en": "x\ny\n", "a.ko": "z\n"}, LANGUAGES, r"a\.en has 2 lines and .*a\.ko has 1"),
    ({"a.en": "x\n\n", "a.ko": "z\ny\n"}, LANGUAGES, r"a\.en:2: the source is empty.*--skip_empty_pairs"),
    ({"a.en": "x\ny\n", "a.ko": "z\n \n"}, LANGUAGES, r"a\.ko:2: the target is empty"),
    ({"a.tsv": "source\ttarget\nx\t\n"}, {}, r"a\.tsv:2: the target is empty"),
    ({"a.en": "x\n"}, LANGUAGES, r"a\.ko, its other side, is missing"),
    ({"a.ko": "x\n", "b.en": "x\n"}, LANGUAGES, "its other side, is missing"),
    ({"a.en": "x\n", "a.ko": "x\n"}, {}, r"a\.en: the name must end in .*--source_lang en --target_lang de"),
    ({"a.tsv": "a\tb\nx\ty\n"}, {}, r"a\.tsv:2: there is no column 'source', only 'a', 'b'.*--source_column"),
    ({"a.tsv": "x\ty\nz\n"}, {"source_column": "1", "target_column": "2"}, r"a\.tsv:2: there is no column '2'"),
    ({"a.jsonl": '{"source": "x", "target": 3}\n'}, {}, r"a\.jsonl:1: 'target' is 3 and must be text"),
    ({"a.tsv": "source\ttarget\n"}, {}, "there are no pairs in it to train on"),
    ({"a.tsv": b"source\ttarget\n\xff\ty\n"}, {}, r"a\.tsv:2: the byte at offset 14"),
    ({"a.tsv": "source\ttarget\nx\ty\n"}, {"source_lang": "en"}, "--source_lang en --target_lang None: give both"),
    ({"a.tsv": "source\ttarget\nx\ty\n"}, {"source_column": "a", "target_column": "a"}, "two different ones"),
    ({"a.tsv": "source\ttarget\nx\ty\n"}, {"dataset_name": "x"}, "not both"),
]  # fmt: skip


@pytest.mark.parametrize(("contents", "settings", "message"), BAD)
def test_bad_input(write, contents, settings, message):
    with pytest.raises(InputError, match=message):
        pairs_of(*(write(name, content) for name, content in contents.items()), **settings)


def test_a_file_given_twice_and_too_little_to_hold_out(write, tmp_path):
    path, other = write("a.en", "x\n"), write("a.ko", "y\n")
    for given in ([path, path, other], [path, str(tmp_path), other], [path, str(tmp_path / "*.en"), other]):
        with pytest.raises(InputError, match=r"--train_file: .*a\.en is given 2 times"):
            pairs_of(*given, **LANGUAGES)
    with pytest.raises(InputError, match="--validation_split_percentage 10: of 1 examples this holds out 0"):
        PairTask(PairArguments(train_file=[path, other], **LANGUAGES)).splits()
    with pytest.raises(InputError, match="need --train_file"):
        PairTask(PairArguments(validation_file=[path, other], **LANGUAGES)).splits()


def test_empty_pairs_are_counted(write, caplog):
    path = write("a.tsv", "source\ttarget\nx\ty\n\ty\nx\t \n")
    pairs = pairs_of(path, skip_empty_pairs=True)
    assert len(pairs) == 1 and "4 pairs with an empty side are left out" in caplog.text  # in both splits


@dataclass(frozen=True, kw_only=True)
class Flags(PairArguments, Arguments):
    """Only what the task has."""


def test_flags_have_the_usual_names():
    given = ["--train_file", "a.en", "a.de", "--source_lang", "en", "--target_lang", "de", "--skip_empty_pairs"]
    parsed = parse(Flags, given)
    assert parsed.train_file == ["a.en", "a.de"] and parsed.skip_empty_pairs and parsed.data_name("") == "a.en, a.de"
    for wrong in ("--max_target_length 3", "--max_source_length 7", "--bpe_dropout 1"):
        with pytest.raises(InputError, match=f"{wrong}: it must be"):
            parse(Flags, wrong.split())


# Token ids


def test_features_are_what_the_tokenizer_gives(tokenizer):
    pairs = [*sample(20), Pair("the </s> first", "일일 <pad>", "here", "here", ".tsv", {})]
    for feature, pair in zip(PairTask(PairArguments(), None, tokenizer).features(pairs), pairs, strict=True):
        source, target = (feature[side].tolist() for side in SIDES)
        assert source[-1] == target[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in source[:-1]  # "</s>" in the text is text
        assert tokenizer.decode(source[:-1]) == pair.source and tokenizer.decode(target[:-1]) == pair.target
        if "</s>" not in pair.source:
            assert source == tokenizer(pair.source)["input_ids"]
            assert pairs[feature["example"]] is pair


def test_long_pairs_are_cut_and_counted_or_refused(tokenizer, caplog):
    pairs = sample(50)
    short = PairArguments(max_source_length=12, max_target_length=20, truncate_pairs=False)
    full = PairTask(PairArguments(), None, tokenizer).features(pairs)
    long = [i for i, one in enumerate(full) if len(one["input_ids"]) > 12 or len(one["labels"]) > 20]
    most = max(len(one["input_ids"]) for one in full)
    message = (
        rf"{len(long)} of 50 pairs are longer than --max_source_length 12.*source has {most} tokens.*Raise the lengths"
    )
    with pytest.raises(InputError, match=message):
        PairTask(short, None, tokenizer).features(pairs)
    cut = PairArguments(max_source_length=12, max_target_length=20)
    for feature, whole in zip(PairTask(cut, None, tokenizer).features(pairs), full, strict=True):
        for side, length in zip(SIDES, (12, 20), strict=True):
            kept = whole[side] if len(whole[side]) <= length else np.append(whole[side][: length - 1], whole[side][-1])
            np.testing.assert_array_equal(feature[side], kept)
    assert re.search(message, caplog.text)


def test_a_tokenizer_without_the_tokens(tokenizer):
    wordpiece = train_tokenizer(["some words"] * 9, TokenizerArguments(vocab_size=100))
    with pytest.raises(InputError, match=r"no eos_token.*--tokenizer_model bpe"):
        PairTask(PairArguments(), None, wordpiece).features(sample(1))


def test_collate(tokenizer):
    features = PairTask(PairArguments(), None, tokenizer).features(sample(9))
    batch = CollatePairs(tokenizer.pad_token_id)(features[3:7])
    assert batch["about"]["example"].tolist() == [3, 4, 5, 6]
    assert batch["input_ids"].dtype == batch["labels"].dtype == batch["attention_mask"].dtype == torch.int64
    for row, feature in enumerate(features[3:7]):
        size = len(feature["input_ids"])
        assert batch["attention_mask"][row].tolist() == [1] * size + [0] * (batch["input_ids"].shape[1] - size)
        assert batch["input_ids"][row, :size].tolist() == feature["input_ids"].tolist()
        assert (batch["input_ids"][row, size:] == tokenizer.pad_token_id).all()
        assert batch["labels"][row][batch["labels"][row] != -100].tolist() == feature["labels"].tolist()
    targets = int((batch["labels"] != -100).sum())
    assert batch["num_items_in_batch"].tolist() == [targets, targets + int(batch["attention_mask"].sum())]


# Batches of pairs


def batches_of(pairs, tokenizer, max_tokens=512, dropout=0.0, **settings) -> BucketedBatches:
    arguments = PairArguments(bpe_dropout=dropout)
    features = PairTask(arguments, None, tokenizer).features(pairs)
    vary = BpeDropout(pairs, tokenizer, arguments) if dropout else None
    collate = CollatePairs(tokenizer.pad_token_id)
    return BucketedBatches(features, collate, 64, max_tokens, **{"seed": 3, "sides": SIDES, "vary": vary, **settings})


def test_the_budget_counts_both_sides_with_their_padding(tokenizer):
    pairs = sample(400)
    batches = batches_of(pairs, tokenizer)
    found = [batches[index] for index in range(len(batches))]
    assert sorted(torch.cat([batch["about"]["example"] for batch in found]).tolist()) == list(range(400))
    sizes = [batch["input_ids"].numel() + batch["labels"].numel() for batch in found]
    assert max(sizes) <= 512 and len(found) < 1.2 * sum(sizes) / 512 + 8
    tokens = sum(int(batch["num_items_in_batch"][1]) for batch in found)
    assert tokens / sum(sizes) > 0.85
    again = batches_of(pairs, tokenizer)
    index = len(found) + 5  # in the second epoch, at once
    assert torch.equal(again[index]["labels"], batches[index]["labels"])
    assert not torch.equal(again[index]["about"]["example"], found[5]["about"]["example"])


def test_bpe_dropout_of_nothing_is_the_tokenizer(tokenizer):
    pairs = [*sample(60), Pair("漢字 the first ☃", "똠방각하 일일", "here", "here", ".tsv", {})]
    vary = BpeDropout(pairs, tokenizer, PairArguments())
    for number, feature in enumerate(PairTask(PairArguments(), None, tokenizer).features(pairs)):
        varied = vary(feature, (0, 0, number))
        assert all(np.array_equal(varied[side], feature[side]) for side in SIDES)


def test_bpe_dropout_is_a_function_of_seed_epoch_and_sample(tokenizer):
    pairs = sample(200)
    batches = batches_of(pairs, tokenizer, dropout=0.1)
    walk = [batches[index] for index in range(2 * len(batches))]
    for index in (len(walk) - 1, 3, len(batches) + 1):
        again = batches_of(pairs, tokenizer, dropout=0.1)[index]
        assert all(
            torch.equal(again[name], walk[index][name]) for name in ("input_ids", "labels", "num_items_in_batch")
        )
    assert "BPE dropout 0.1" in batches.fingerprint and batches.fingerprint != batches_of(pairs, tokenizer).fingerprint
    forms = Counter()
    for batch in walk:
        for example, labels in zip(batch["about"]["example"].tolist(), batch["labels"], strict=True):
            text = tokenizer.decode(labels[labels != -100], skip_special_tokens=True)
            assert text == pairs[example].target  # cut otherwise, it is the same text
            forms[example, tuple(labels[labels != -100].tolist())] += 1
    assert len(forms) > 300  # of 200 pairs twice: most are new in the second epoch


def test_bpe_dropout_is_drawn_as_in_the_paper(tokenizer):
    """Against its Algorithm 1, word for word: at every step each possible merge is left out by itself."""
    word, rate, count = "▁thirteenth", 0.2, 4000
    vary = BpeDropout([], tokenizer, PairArguments(bpe_dropout=rate))
    chance = random.Random(0)

    def algorithm() -> tuple[str, ...]:
        pieces = list(word)
        while True:
            merges = [(vary.ranks[pair], at) for at, pair in enumerate(pairwise(pieces)) if pair in vary.ranks]
            merges = [merge for merge in merges if chance.random() >= rate]
            if not merges:
                return tuple(pieces)
            _, at = min(merges)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]

    theirs = Counter(algorithm() for _ in range(count))
    ours = Counter(tuple(vary._pieces(word, chance.random)) for _ in range(count))
    assert len(ours) > 10
    for form in ours | theirs:
        assert abs(ours[form] - theirs[form]) < 5 * np.sqrt(ours[form] + theirs[form])


def test_bpe_dropout_needs_bpe_and_leaves_what_would_not_fit(tokenizer):
    for_bytes = train_tokenizer([], TokenizerArguments(tokenizer_model="bytes"))
    with pytest.raises(InputError, match=r"--bpe_dropout 0\.1: it needs a tokenizer as --tokenizer_model bpe"):
        BpeDropout(sample(1), for_bytes, PairArguments(bpe_dropout=0.1))
    pairs = sample(20)
    lengths = [
        max(len(one[side]) for one in PairTask(PairArguments(), None, tokenizer).features(pairs)) for side in SIDES
    ]
    arguments = PairArguments(bpe_dropout=0.5, max_source_length=lengths[0], max_target_length=max(8, lengths[1]))
    vary = BpeDropout(pairs, tokenizer, arguments)
    for number, feature in enumerate(PairTask(arguments, None, tokenizer).features(pairs)):
        varied = vary(feature, (0, 0, number))
        assert len(varied["input_ids"]) <= lengths[0] and len(varied["labels"]) <= max(8, lengths[1])


# Figures


def test_numbers_are_counted_where_they_were_copied():
    sources = ["Room 12 is open from 9:30 to 17.", "It costs 1,250 won.", "Nothing to count."]
    written = ["12호실은 9:30부터 문을 엽니다.", "1,25원입니다.", "3"]
    assert translate.numbers_kept(sources, written) == {"numbers": 4, "numbers_kept": 0.5}
    assert translate.numbers_kept(sources[2:], written[2:]) == {}


def test_translation_figures():
    references = ["The cat sat on the mat.", "It is 5 o'clock, isn't it?", "나는 어제 책을 읽었다."]
    metric = Translation()
    same = metric.compute(predictions=references, references=references)
    assert same["exact_match"] == 1 and [round(same[name]) for name in ("bleu", "chrf", "bleu_tok")] == [100] * 3
    assert "nw:2" in metric.signatures["chrf"] and "tok:13a" in metric.signatures["bleu"]
    assert "case:lc" in metric.signatures["bleu_tok"] and "case:mixed" in metric.signatures["bleu"]
    other = ["the Cat sat on a mat.", "It is 5  o'clock, isn't it?", "나는 어제 책을 읽었습니다."]
    figures = metric.compute(predictions=other, references=references)
    assert figures["exact_match"] == pytest.approx(1 / 3) and figures["bleu_tok"] > figures["bleu"]
    assert figures["bleu"] == BLEU().corpus_score(other, [references]).score
    # Tokenised by 13a, lower-cased and not tokenised again.
    cut = BLEU()
    texts = [[cut.tokenizer(text.lower()) for text in side] for side in (other, references)]
    plain = BLEU(tokenize="none", force=True).corpus_score(texts[0], [texts[1]]).score
    assert figures["bleu_tok"] == pytest.approx(plain)


class Echo(nn.Module):
    """Writes the source again; its loss is twice its nll, as if it were smoothed."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids, attention_mask, labels, num_items_in_batch):
        nll = (labels != -100).sum() * 0.5 * self.scale / num_items_in_batch[0]
        return ModelOutput(loss=2 * nll, nll=nll)

    def generate(self, input_ids, attention_mask, num_beams, **settings):
        assert num_beams == 2
        return input_ids


def test_generation(tokenizer, tmp_path, caplog, drawn):
    pairs = sample(40)
    pairs = [replace(pair, target=pair.source) if number % 4 else pair for number, pair in enumerate(pairs)]
    model = Echo()
    judge = PairEvaluation(
        batches_of(pairs, tokenizer, shuffle=False),
        pairs,
        "dev",
        PairTask(PairArguments(num_beams=2), model, tokenizer),
    )
    with caplog.at_level("INFO", logger="hf_tiny"):
        figures = judge(model, Accelerator(cpu=True))
        assert judge(model, Accelerator(cpu=True)) == figures
    assert figures["exact_match"] == 0.75 and figures["chrf"] > 50 and figures["bleu"] > 50
    assert figures["nll"] == pytest.approx(0.5) and figures["ppl"] == pytest.approx(np.exp(0.5))
    assert figures["loss"] == pytest.approx(1.0)
    copied = PairTask(PairArguments()).baseline({"train": pairs, "validation": pairs})
    assert copied.name == "copying the source"
    for name in ("exact_match", "chrf", "bleu", "bleu_tok"):  # what it writes is a copy
        assert copied.figures["validation"][name] == pytest.approx(figures[name])
    judge.report(tmp_path)
    rows = (tmp_path / "dev_predictions.tsv").read_text().splitlines()
    assert rows[0].split("\t") == ["source", "target", "prediction"]
    assert [row.split("\t")[2] for row in rows[1:]] == [pair.source for pair in pairs]  # in the order of the data
    assert sum("nrefs:1" in message for message in caplog.messages) == 3  # each signature once
    assert sum(message.startswith(f"  {pairs[0].source!r} -> ") for message in caplog.messages) == 2
    assert drawn == [("dev_attention.png", pairs[0].source, "rows", "columns")]
    batch = judge.batches[0]
    outputs = model(*(batch[name] for name in ("input_ids", "attention_mask", "labels", "num_items_in_batch")))
    assert judge.training_figures(outputs, batch) == {}  # nothing is generated for the log


def test_nll_is_the_loss_of_models_that_give_none(tokenizer):
    judge = DenoisingEvaluation(batches_of(sample(4), tokenizer))
    results = judge.collect(ModelOutput(loss=torch.tensor(2.0)), judge.batches[0])
    assert judge.compute(results) == {"loss": 2.0, "nll": 2.0, "ppl": pytest.approx(np.exp(2))}


@pytest.mark.parametrize("copying", [False, True])
def test_attention_of_a_pair(tokenizer, copying):
    config = HfTinySeq2SeqConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id, copy_attention=copying,
    )  # fmt: skip
    model = HfTinySeq2SeqForConditionalGeneration(config)
    (pair,) = sample(1)
    weights, rows, columns = translate.cross_attention(model, tokenizer, pair)
    assert rows[-1] == columns[-1] == "</s>" and weights.shape == (len(rows), len(columns))
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    assert (columns[0] == "vocabulary") == copying
    if copying:  # a gate that was not trained, and the rest for the source
        assert weights[:, 0].min() > 0.2 and weights[:, 0].max() < 0.8


def test_share_of_copied_tokens():
    """Beyond chance: token 9 stands everywhere."""
    rows = [([1, 2, 9], [1, 2, 9, 7]), ([3, 4, 9], [3, 8, 9, 7])]
    features = [{"input_ids": np.array(source), "labels": np.array(target)} for source, target in rows]
    assert translate.copied_share(features) == 3 / 8
    assert translate.copied_share([features[0], {**features[1], "labels": np.array([5, 6, 9, 7])}]) == 2 / 8


@pytest.mark.parametrize(
    ("given", "copied", "expected"), [(None, 0.1, True), (None, 0.09, False), (True, 0.0, True), (False, 0.9, False)]
)
def test_a_model_copies_where_texts_share_tokens(tokenizer, caplog, given, copied, expected):
    """One from scratch, unless the recipe says otherwise."""
    settings = {} if given is None else {"copy_attention": given}
    recipe = parse(modules.load("recipes/finetune_seq2seq.py").Recipe, settings=settings)
    with caplog.at_level("INFO"):
        model = translate.start_encoder_decoder(recipe, tokenizer, copied, label_smoothing=0.0)
    assert model.config.copy_attention is expected
    assert f"{copied:.0%} of the target's tokens" in caplog.text
    assert f"copy attention is {'on' if expected else 'off'}" in caplog.text


# The built-in pairs


@pytest.mark.parametrize(
    ("day", "form", "expected"),
    [
        ((2026, 11, 16), 0, ("Monday, November sixteenth, twenty twenty-six", "이천이십육년 십일월 십육일 월요일")),
        ((1905, 6, 12), 1, ("Monday the twelfth of June nineteen oh five", "천구백오년 유월 십이일 월요일")),
        ((2000, 10, 31), 2, ("the thirty-first of October, two thousand, a Tuesday", "이천년 시월 삼십일일 화요일")),
        ((1900, 1, 20), 2, ("the twentieth of January, nineteen hundred, a Saturday", "천구백년 일월 이십일 토요일")),
        ((2007, 8, 8), 1, ("Wednesday the eighth of August two thousand seven", "이천칠년 팔월 팔일 수요일")),
        ((2010, 5, 5), 0, ("Wednesday, May fifth, twenty ten", "이천십년 오월 오일 수요일")),
    ],
)
def test_dates(day, form, expected):
    assert dates.pair(date(*day), form) == expected


def test_builtin_pairs():
    splits = PairTask(PairArguments()).splits()
    made = {split: content.splitlines()[1:] for split, content in dates.pairs().items()}
    assert {split: [f"{p.source}\t{p.target}" for p in pairs] for split, pairs in splits.items()} == made
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 5000, "validation": 500}
    targets = {split: {pair.target for pair in pairs} for split, pairs in splits.items()}
    assert [len(found) for found in targets.values()] == [5000, 500]
    assert targets["train"].isdisjoint(targets["validation"])
    words = {split: {word for pair in pairs for word in pair.source.split()} for split, pairs in splits.items()}
    assert words["validation"] <= words["train"]
    forms = Counter(pair.source.startswith("the ") for pair in splits["train"])
    assert all(count > 1000 for count in forms.values())
