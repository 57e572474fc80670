"""The tokenizer: Korean and English, deterministic, round trip through AutoTokenizer, clear messages."""

import gzip
import re
import subprocess
import sys
import unicodedata
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import datasets
import pytest
from fixtures import tiny_run
from transformers import AutoTokenizer, BertConfig

from hf_tiny import InputError
from hf_tiny.arguments import Arguments, parse
from hf_tiny.data import builtin
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.tokenizer import (
    NEEDED_TOKENS,
    SEQ2SEQ_NEEDED_TOKENS,
    TokenizerArguments,
    _sample,
    fertility,
    fitting_size,
    load_existing,
    load_tokenizer,
    train_tokenizer,
)

ENGLISH = ["The quick brown fox jumps over the lazy dog.", "A naïve café owner reads the morning paper."]
KOREAN = ["이 영화는 정말 재미있었습니다.", "한국어 문장을 토큰으로 나눕니다.", "음절은 자모로 찢어지지 않습니다."]
TEXTS = (ENGLISH + KOREAN) * 20


@cache
def trained(**settings):
    return train_tokenizer(TEXTS, TokenizerArguments(**{"vocab_size": 400, **settings}))


def is_jamo(character: str) -> bool:
    return 0x1100 <= ord(character) <= 0x11FF


def test_special_tokens_come_first_and_pairs_have_types():
    tokenizer = trained()
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    pair = tokenizer("quick fox", "lazy dog")
    boundary = pair["input_ids"].index(3) + 1
    assert pair["input_ids"][0] == 2 and pair["input_ids"][-1] == 3
    assert pair["token_type_ids"] == [0] * boundary + [1] * (len(pair["input_ids"]) - boundary)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [True, False])
@pytest.mark.parametrize("unicode_form", ["NFC", "NFKC"])
def test_hangul_stays_whole(lowercase, strip_accents, unicode_form):
    tokenizer = trained(lowercase=lowercase, strip_accents=strip_accents, unicode_form=unicode_form)
    assert not any(is_jamo(character) for token in tokenizer.get_vocab() for character in token)
    for text in KOREAN:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer(unicodedata.normalize("NFD", text))["input_ids"] == ids
        assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == text.replace(" ", "")


def test_case_and_accents_are_options():
    assert trained(lowercase=True).tokenize("The naïve") == trained(lowercase=True).tokenize("the NAÏVE")
    assert trained().tokenize("naïve") != trained().tokenize("naive")
    assert trained(strip_accents=True).tokenize("naïve") == trained(strip_accents=True).tokenize("naive")
    assert "The" in trained().get_vocab()


def test_ideographs_are_words_of_their_own():
    tokenizer = train_tokenizer(["漢字 and words"] * 9, TokenizerArguments(vocab_size=200))
    assert tokenizer.tokenize("漢字and") == ["漢", "字", "and"]


def test_saved_tokenizer_is_the_same(tmp_path):
    tokenizer = train_tokenizer(TEXTS, TokenizerArguments(vocab_size=400), model_max_length=77)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.model_max_length == 77
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert dict(loaded("재미있었습니다", "the dog")) == dict(tokenizer("재미있었습니다", "the dog"))


def test_training_is_deterministic_across_processes(capsys):
    # The hash maps of `tokenizers` are seeded anew in each process.
    code = (
        "import hashlib\nfrom pydoc_data.topics import topics\n"
        "from hf_tiny.tokenizer import MODELS, TokenizerArguments, train_tokenizer\n"
        "for model in MODELS:\n"
        "    arguments = TokenizerArguments(tokenizer_model=model, vocab_size=1000)\n"
        "    tokenizer = train_tokenizer(topics.values(), arguments)\n"
        "    print('md5', hashlib.md5(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())"
    )
    exec(code, {})
    here = re.findall("md5 (.*)", capsys.readouterr().out)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.findall("md5 (.*)", ended.stdout) == here and len(set(here)) == 3


# What writes text: BPE and bytes

WRITERS = pytest.mark.parametrize("model", ["bpe", "bytes"])
ODD = ["똠방각하의 펲시콜라 ☃", "漢字", "a  b\t c\n", "</s> <0x41> <pad>", '(he said: "no!")', "e.g. 3.14, naïve café"]


@cache
def writer(model: str, **settings):
    return train_tokenizer(TEXTS, TokenizerArguments(**{"tokenizer_model": model, "vocab_size": 600, **settings}))


@WRITERS
def test_decoding_gives_the_text_back_and_nothing_is_unknown(model, tmp_path):
    tokenizer = writer(model)
    tokenizer.save_pretrained(tmp_path)
    for loaded in (deepcopy(tokenizer), AutoTokenizer.from_pretrained(tmp_path)):
        backend = loaded.backend_tokenizer
        backend.encode_special_tokens = True  # as training does: "</s>" in a text is text
        for text in [*ENGLISH, *KOREAN, *ODD]:
            ids = backend.encode(text).ids
            assert ids[-1] == loaded.eos_token_id and loaded.unk_token_id not in ids
            assert not set(ids[:-1]) & set(range(5))
            expected = text if model == "bytes" else " ".join(text.split())
            assert loaded.decode(ids, skip_special_tokens=True) == expected
            assert backend.encode(unicodedata.normalize("NFD", text)).ids == ids
    assert not any(is_jamo(character) for token in tokenizer.get_vocab() for character in token)


@WRITERS
def test_special_tokens_of_what_writes_text(model):
    tokenizer = writer(model, extra_ids=3)
    names = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(8)) and set(names) == set(tokenizer.all_special_tokens)
    assert (
        (tokenizer.bos_token_id, tokenizer.eos_token_id) == (tokenizer.cls_token_id, tokenizer.sep_token_id) == (1, 2)
    )
    assert list(tokenizer("the dog")) == ["input_ids", "attention_mask"]
    masked = tokenizer("the <mask> dog <extra_id_1>")["input_ids"]
    assert [masked.count(number) for number in (2, 4, 6)] == [1, 1, 1]
    pair = tokenizer("the dog", "the fox")["input_ids"]
    assert pair == tokenizer("the dog")["input_ids"] + tokenizer("the fox")["input_ids"]
    assert "<extra_id_0>" not in writer(model).get_vocab()


def test_words_keep_their_space_and_punctuation_is_apart():
    tokenizer = writer("bpe")
    assert "▁the" in tokenizer.get_vocab() and not any("g." in token for token in tokenizer.get_vocab())


@WRITERS
def test_case_and_accents_are_options_of_writers_too(model):
    lower = writer(model, lowercase=True)
    assert lower.tokenize("The NAÏVE") == lower.tokenize("the naïve") != writer(model).tokenize("The NAÏVE")
    plain = writer(model, strip_accents=True)
    assert (
        plain.tokenize("naïve") == plain.tokenize("naive")
        and plain.decode(plain("영화는")["input_ids"][:-1]) == "영화는"
    )


def test_rare_characters_become_bytes():
    text = "".join(chr(0xAC00 + number) for number in range(300))
    tokenizer = train_tokenizer([*TEXTS * 20, text], TokenizerArguments(tokenizer_model="bpe", vocab_size=600))
    assert len(tokenizer) <= 600
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert sum(token.startswith("<0x") for token in tokenizer.tokenize(text)) > 300


def test_bytes_are_not_trained():
    tokenizer = writer("bytes")
    assert len(tokenizer) == 5 + 256
    assert (
        tokenizer.backend_tokenizer.to_str()
        == train_tokenizer([], TokenizerArguments(tokenizer_model="bytes", vocab_size=600)).backend_tokenizer.to_str()
    )
    assert tokenizer.tokenize("a한") == ["<0x61>", "<0xED>", "<0x95>", "<0x9C>"]


def test_needed_tokens_depend_on_the_model(tmp_path):
    trained().save_pretrained(tmp_path)
    arguments = TokenizerArguments(tokenizer_name=str(tmp_path))
    with pytest.raises(InputError, match=r"it has no eos_token\. Give a tokenizer made for encoder-decoder models"):
        load_tokenizer(arguments, list, "", needed_tokens=SEQ2SEQ_NEEDED_TOKENS)
    writer("bpe").save_pretrained(tmp_path)
    assert load_tokenizer(arguments, list, "").eos_token == "</s>"  # it can also mask, and frames blocks


def test_sample_is_spread_over_the_corpus():
    texts = [f"{number:10d}" for number in range(1000)]
    assert _sample(texts, 10_000) == texts
    assert _sample(texts, 2600) == texts[::4]
    assert _sample(["a" * 100], 10) == ["a" * 100]


def test_load_trains_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    arguments = TokenizerArguments(vocab_size=400)
    first = load_tokenizer(arguments, lambda: TEXTS, "these texts", model_max_length=64)
    again = load_tokenizer(arguments, lambda: pytest.fail("trained again"), "these texts", model_max_length=64)
    assert again.get_vocab() == first.get_vocab() and again.model_max_length == 64
    (folder,) = (tmp_path / "hf_tiny_tokenizers").iterdir()
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:-50])
    again = load_tokenizer(arguments, lambda: TEXTS, "these texts", model_max_length=64)
    assert again.get_vocab() == first.get_vocab() and "is damaged (tokenizer.json: it has" in caplog.text
    named = load_tokenizer(TokenizerArguments(tokenizer_name=str(folder)), list, "")
    assert named.get_vocab() == first.get_vocab()
    for changed, texts in ((TokenizerArguments(vocab_size=300), "these texts"), (arguments, "other texts")):
        assert len(load_tokenizer(changed, lambda: TEXTS, texts)) <= changed.vocab_size
    assert len(list((tmp_path / "hf_tiny_tokenizers").iterdir())) == 3


def test_little_text_is_told(caplog):
    tokenizer = trained(vocab_size=5000)
    assert len(tokenizer) < 5000 and f"{len(tokenizer):,}" in caplog.text


@dataclass(frozen=True, kw_only=True)
class Flags(TokenizerArguments, Arguments):
    """Only what a tokenizer needs."""


def test_bad_settings():
    with pytest.raises(
        InputError, match=r"--vocab_size 60 is too small: a third of it.* Use --vocab_size \d+ or more"
    ) as found:
        trained(vocab_size=60)
    trained(vocab_size=int(str(found.value).split()[-3]))  # the advice is enough
    with pytest.raises(InputError, match="--vocab_size 300 is too small: characters, bytes and special tokens alone"):
        writer("bpe", vocab_size=300)
    with pytest.raises(InputError, match="--extra_ids: only --tokenizer_model bpe"):
        trained(extra_ids=3)
    for wrong, message in (
        ("--unicode_form NFD", "choose one of NFC, NFKC"),
        ("--tokenizer_model unigram", "choose one of wordpiece, bpe, bytes"),
        ("--vocab_size 0", "it must be 1 or above"),
    ):
        with pytest.raises(InputError, match=f"{wrong}: {message}"):
            parse(Flags, wrong.split())


def test_no_text():
    with pytest.raises(InputError, match="no text"):
        train_tokenizer([], TokenizerArguments())


def test_a_model_without_a_tokenizer_is_no_tokenizer(tmp_path):
    """transformers would make one that knows special tokens only: all text is [UNK]."""
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"--model_name_or_path .*: there is no tokenizer: all text would be \[UNK\]"):
        load_existing("--model_name_or_path", str(tmp_path), NEEDED_TOKENS)


def test_bad_given_tokenizers(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        InputError, match=r"from there: the folder has none of tokenizer\.json"
    ):  # not: install sentencepiece
        load_tokenizer(TokenizerArguments(tokenizer_name=str(tmp_path / "empty")), list, "")
    with pytest.raises(InputError, match=r"--tokenizer_name .*none: there is no such folder"):
        load_tokenizer(TokenizerArguments(tokenizer_name=str(tmp_path / "none")), list, "")
    tokenizer = trained.__wrapped__()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="mask_token"):
        load_tokenizer(TokenizerArguments(tokenizer_name=str(tmp_path)), list, "")


@pytest.mark.parametrize("model", ["wordpiece", "bpe"])
def test_a_second_segment_begins_with_a_word(model, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    text = tiny_run.write_text(tmp_path / "text.txt", lines=100)
    lines = text.read_text().replace(".", "").splitlines()
    text.write_text("\n".join(lines))
    tokenizer = train_tokenizer(lines, TokenizerArguments(vocab_size=350, tokenizer_model=model))
    corpus = CorpusArguments(
        train_file=[str(text)], max_seq_length=32, sample_by="document", preprocessing_num_workers=1
    )
    blocks = [block for block in Corpus(corpus).blocks(tokenizer)["train"] if block["segment_start"] < 32]
    begins = [
        token[0] == "▁" if model != "wordpiece" else token[:2] != "##"
        for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    ]
    assert len(blocks) > 20
    found = []
    for block in blocks:
        start = block["segment_start"]
        reach = block["input_ids"][start : 3 * 29 // 4 + 3]  # to the end of the middle half of what is not framing
        found.append(begins[block["input_ids"][start]])
        assert found[-1] or not any(begins[token] for token in reach)  # cut anywhere where no word begins
    assert sum(found) > 20


def test_fertility_by_hand():
    texts = ["ab ab abc", "ab abc abc"] * 20
    tokenizer = train_tokenizer(texts, TokenizerArguments(vocab_size=20))
    assert tokenizer.tokenize("ab abc x") == ["ab", "abc", "[UNK]"]
    found = fertility(tokenizer, ["ab abc x", "abab"])
    pieces = 3 + len(tokenizer.tokenize("abab"))
    assert found == {"tokens per word": pieces / 4, "unknown": 1 / pieces, "bytes": 0}
    bytewise = train_tokenizer(texts, TokenizerArguments(vocab_size=275, tokenizer_model="bpe"))
    assert fertility(bytewise, ["한"])["bytes"] == 3 / 4  # after the sign for a space


def test_a_vocabulary_fits_the_text():
    """Few characters need few tokens, Hangul needs many; much text fills a large vocabulary."""
    with gzip.open(builtin.pair_files()[0][0], "rt", encoding="utf-8") as file:
        assert fitting_size(file) == 512
    syllables = "".join(chr(0xAC00 + 7 * number) for number in range(600))
    assert fitting_size([syllables] * 20) == 4096  # 4 x 588, and the next power of two
    assert fitting_size(["a few words"] * 100_000) == 2048 and fitting_size(["a few words"] * 1_000_000) == 8192
    arguments = TokenizerArguments(vocab_size=fitting_size([syllables] * 20), tokenizer_model="bpe")
    tokenizer = train_tokenizer([syllables] * 20, arguments)
    assert tokenizer.decode(tokenizer(syllables).input_ids, skip_special_tokens=True) == syllables
