"""The tokenizer: Korean and English, deterministic, round trip through AutoTokenizer, clear messages."""

import subprocess
import sys
import unicodedata

import pytest
from transformers import AutoTokenizer

from hf_tiny import InputError
from hf_tiny.tokenizer import TokenizerArguments, _sample, load_tokenizer, train_tokenizer

ENGLISH = ["The quick brown fox jumps over the lazy dog.", "A naïve café owner reads the morning paper."]
KOREAN = ["이 영화는 정말 재미있었습니다.", "한국어 문장을 토큰으로 나눕니다.", "음절은 자모로 찢어지지 않습니다."]
TEXTS = (ENGLISH + KOREAN) * 20


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


def test_training_is_deterministic_across_processes():
    # The hash maps of `tokenizers` are seeded anew in each process.
    code = (
        "import hashlib\nfrom pydoc_data.topics import topics\n"
        "from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer\n"
        "tokenizer = train_tokenizer(topics.values(), TokenizerArguments(vocab_size=1000))\n"
        "print(hashlib.md5(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())"
    )
    run = [sys.executable, "-c", code]
    first, second = (subprocess.run(run, capture_output=True, text=True, check=True).stdout.split() for _ in range(2))
    assert first == second and first


def test_sample_is_spread_over_the_corpus():
    texts = [f"{number:10d}" for number in range(1000)]
    assert _sample(texts, 10_000) == texts
    assert _sample(texts, 2600) == texts[::4]
    assert _sample(["a" * 100], 10) == ["a" * 100]


def test_load_trains_once(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_tiny.tokenizer.HF_DATASETS_CACHE", tmp_path)
    arguments = TokenizerArguments(vocab_size=400)
    first = load_tokenizer(arguments, lambda: TEXTS, "these texts", model_max_length=64)
    again = load_tokenizer(arguments, lambda: pytest.fail("trained again"), "these texts", model_max_length=64)
    assert again.get_vocab() == first.get_vocab() and again.model_max_length == 64
    (folder,) = (tmp_path / "hf_tiny_tokenizers").iterdir()
    named = load_tokenizer(TokenizerArguments(tokenizer_name=str(folder)), list, "")
    assert named.get_vocab() == first.get_vocab()
    for changed, texts in ((TokenizerArguments(vocab_size=300), "these texts"), (arguments, "other texts")):
        assert len(load_tokenizer(changed, lambda: TEXTS, texts)) <= changed.vocab_size
    assert len(list((tmp_path / "hf_tiny_tokenizers").iterdir())) == 3


def test_little_text_is_told(caplog):
    tokenizer = trained(vocab_size=5000)
    assert len(tokenizer) < 5000 and f"{len(tokenizer):,}" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"vocab_size": 60}, "--vocab_size 60 is too small"), ({"unicode_form": "NFD"}, "--unicode_form NFD")],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        trained(**settings)


def test_no_text():
    with pytest.raises(InputError, match="no text"):
        train_tokenizer([], TokenizerArguments())


def test_bad_given_tokenizers(tmp_path):
    with pytest.raises(InputError, match="no tokenizer could be loaded"):
        load_tokenizer(TokenizerArguments(tokenizer_name=str(tmp_path / "none")), list, "")
    tokenizer = trained()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="mask_token"):
        load_tokenizer(TokenizerArguments(tokenizer_name=str(tmp_path)), list, "")
