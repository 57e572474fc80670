"""Windows lose nothing: they overlap as asked for, each word belongs to one of them, and padding is none of it."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from fixtures import tagged_words
from fixtures.tagged_words import EMPTY, EXTREME, KOREAN, LONG, WORDS, decoded, sentence

from hf_tiny import InputError
from hf_tiny.arguments import Arguments, parse
from hf_tiny.data.conllu import Sentence
from hf_tiny.data.windows import IGNORED, CollateWindows, WindowArguments, WindowEncoder
from hf_tiny.models.words import plain_tokenizer


@pytest.fixture(params=tagged_words.TOKENIZERS)
def tokenizer(request):
    return tagged_words.tokenizer(request.param)


def windows_of(encoder: WindowEncoder, text: str, pair: str | None = None) -> list[dict]:
    (found,) = encoder.texts([text], [pair])
    return found


# Texts


def test_a_short_text_is_what_the_tokenizer_makes_of_it(tokenizer):
    texts, pairs = ["the lazy dog", "", KOREAN, "the fox"], [None, None, None, "a dog"]
    encoder = WindowEncoder(tokenizer, 128, 32)
    for text, pair, (window,) in zip(texts, pairs, encoder.texts(texts, pairs), strict=True):
        expected = tokenizer(text, pair)
        assert window["input_ids"].tolist() == expected["input_ids"] and window["input_ids"].dtype == np.int64
        assert ("token_type_ids" in window) == ("token_type_ids" in tokenizer.model_input_names)
        if "token_type_ids" in window:
            assert window["token_type_ids"].tolist() == expected["token_type_ids"]


@pytest.mark.parametrize("stride", [0, 5, 15])
def test_a_long_text_gives_windows_that_share_the_stride(tokenizer, stride):
    text = " ".join(WORDS * 10)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = windows_of(WindowEncoder(tokenizer, 32, stride), text)
    assert all(w["input_ids"][[0, -1]].tolist() == [tokenizer.cls_token_id, tokenizer.sep_token_id] for w in found)
    step = 30 - stride
    assert len(found) == 1 + -(-(len(ids) - 30) // step) > 3
    for number, window in enumerate(found):  # all are full, but for the last one
        assert window["input_ids"][1:-1].tolist() == ids[number * step : number * step + 30]


def test_of_a_pair_the_longer_text_is_cut(tokenizer):
    encoder, short, long = WindowEncoder(tokenizer, 24, 4), "the fox", " ".join(WORDS * 4)
    ids = tokenizer(long, add_special_tokens=False)["input_ids"]
    first, second = windows_of(encoder, long, short), windows_of(encoder, short, long)
    assert len(first) == len(second) > 3
    assert all(decoded(tokenizer, window["input_ids"]).endswith("thefox") for window in first)
    assert all(decoded(tokenizer, window["input_ids"]).startswith("thefox") for window in second)
    special = tokenizer.num_special_tokens_to_add(pair=True)
    room = 24 - special - len(tokenizer(short, add_special_tokens=False)["input_ids"])
    inside = [window["input_ids"][1 : 1 + room].tolist() for window in first]
    assert inside[0] == ids[:room] and inside[1] == ids[room - 4 : 2 * room - 4]
    both = [window["input_ids"].tolist() for window in windows_of(encoder, long, long)]
    half = (24 - special) // 2
    assert all(len(window["input_ids"]) <= 24 for window in (*first, *second)) and max(map(len, both)) <= 24
    for number, window in enumerate(both):  # both are cut, and their parts go together
        part = ids[number * (half - 4) :][:half]
        assert window[1 : len(part) + 1] == part == window[-len(part) - 1 : -1]
    assert both[-1][-2] == ids[-1]  # nothing is lost
    assert len(windows_of(encoder, "", "")) == len(windows_of(encoder, short, "a dog")) == 1


def test_a_pair_of_uneven_long_texts_repeats_the_shorter_ones_parts(tokenizer):
    """Of long texts, too: the time must not grow with the product of their lengths."""
    long, longer = " ".join(WORDS * 100), " ".join(WORDS * 450)
    found = windows_of(WindowEncoder(tokenizer, 24, 0), long, longer)
    half = (24 - tokenizer.num_special_tokens_to_add(pair=True)) // 2
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (long, longer)]
    count = -(-len(ids[1]) // half)
    assert len(found) == count
    starts = [half * (number * -(-len(ids[0]) // half) // count) for number in range(count)]
    for window, start in zip(found, starts, strict=True):
        part = ids[0][start : start + half]
        assert window["input_ids"][1 : 1 + len(part)].tolist() == part


def test_special_tokens_in_the_text_are_text():
    tokenizer = tagged_words.tokenizer("wordpiece")
    (window,) = windows_of(WindowEncoder(tokenizer, 128), "a [SEP] b")
    assert window["input_ids"].tolist().count(tokenizer.sep_token_id) == 1


def test_a_tokenizer_that_cuts_and_pads_does_neither_here():
    tokenizer = tagged_words.tokenizer("wordpiece")
    cuts = plain_tokenizer(tokenizer.backend_tokenizer.to_str())
    cuts.enable_truncation(4)
    cuts.enable_padding(length=9)
    assert plain_tokenizer(cuts.to_str()).encode(KOREAN).ids == tokenizer(KOREAN)["input_ids"]


# Words


def test_words_keep_the_space_before_them(tokenizer):
    words = ["the", "lazy", "dog"]
    ((example, window),) = WindowEncoder(tokenizer, 128).words([sentence(words, (None,) * 3)])
    assert example == 0 and window.feature["input_ids"].tolist() == tokenizer(" ".join(words))["input_ids"]


def characters(text: str) -> Sentence:
    places = tuple(place for place, letter in enumerate(text) if not letter.isspace())
    words = tuple(text[place] for place in places)
    return Sentence(words, (None,) * len(words), "here", ".conll", (), text=text, places=places)


@pytest.mark.parametrize("text", [KOREAN, "돈을  주었다! the fox", "", " ", "\u1103\u1169\u11ab을", "\x07돈"])
def test_a_text_of_characters_is_what_the_tokenizer_makes_of_it(tokenizer, text):
    """A character that shares its token with one before has none of its own."""
    encoded = tokenizer(text, return_offsets_mapping=True)
    for window in (window for _, window in WindowEncoder(tokenizer, 128).words([characters(text)])):
        assert window.feature["input_ids"].tolist() == encoded["input_ids"]
        place_of = dict(enumerate(characters(text).places))
        for word, (first, end) in enumerate(window.spans.tolist()):
            tokens = [text[start:stop].lstrip()[:1] for start, stop in encoded["offset_mapping"][first:end]]
            assert set(tokens) <= {text[place_of[word]], ""}  # a space by itself goes with the character before
        assert window.spans[0, 0] == 1 and (window.spans[1:, 0] == window.spans[:-1, 1]).all() and window.owned.all()


@pytest.mark.parametrize("stride", [0, 6])
def test_characters_of_one_token_belong_to_one_window(tokenizer, stride):
    sentence = characters(" ".join([KOREAN] * 4))
    found = [window for _, window in WindowEncoder(tokenizer, 16, stride).words([sentence])]
    owned = sorted(window.start + int(word) for window in found for word in np.flatnonzero(window.owned))
    assert owned == list(range(len(sentence.words))) and len(found) > 3
    shared = 0
    for window in found:
        has_token = window.spans[:, 0] < window.spans[:, 1]
        for word in np.flatnonzero(window.owned & ~has_token):
            assert window.owned[np.flatnonzero(has_token[:word])[-1]]
            shared += 1
    assert shared > 0 or tokenizer is tagged_words.tokenizer("byte-level")


@pytest.mark.parametrize(("max_length", "stride"), [(8, 0), (8, 4), (24, 6), (64, 32), (512, 0)])
def test_every_word_belongs_to_one_window(tokenizer, max_length, stride):
    sentences = [LONG, EMPTY, EXTREME, sentence(["fox"], ("C",), (0,))]
    found = list(WindowEncoder(tokenizer, max_length, stride).words(sentences))
    owned = sorted((example, w.start + int(word)) for example, w in found for word in np.flatnonzero(w.owned))
    assert owned == [(example, word) for example, one in enumerate(sentences) for word in range(len(one.words))]
    for example, window in found:
        ids, spans = window.feature["input_ids"], window.spans
        assert len(spans) == len(window.owned) == window.stop - window.start
        assert (spans[:, 0] < spans[:, 1]).all() and (spans[1:, 0] == spans[:-1, 1]).all()
        assert spans[0, 0] == 1 and spans[-1, 1] == len(ids) - 1 and len(ids) <= max_length
        own = window.own(list(range(len(sentences[example].words))))
        assert own[window.owned].tolist() == [window.start + word for word in np.flatnonzero(window.owned)]
        assert (own[~window.owned] == IGNORED).all()


def test_windows_of_words_share_the_stride_and_words_lie_inside(tokenizer):
    found = [window for _, window in WindowEncoder(tokenizer, 32, 8).words([LONG])]
    assert len(found) > 3
    for before, after in pairwise(found):
        shared = before.stop - after.start
        spans = before.spans[-shared:]
        size = spans[-1, 1] - spans[0, 0]
        assert shared > 0 and size >= 8
        ids = before.feature["input_ids"], after.feature["input_ids"]
        assert ids[0][spans[0, 0] : -1].tolist() == ids[1][1 : 1 + size].tolist()
        assert not before.owned[-1] and not after.owned[0]


# Batches


def test_arrays_are_padded_and_numbers_are_stacked():
    features = [
        {"input_ids": np.arange(3), "token_type_ids": np.ones(3, int), "labels": np.array([-100, 4]), "word": np.array([7]),
         "word_spans": np.ones((2, 2), int), "owned": np.array([True]), "example": 5},
        {"input_ids": np.arange(5), "token_type_ids": np.ones(5, int), "labels": np.array([1, 2, 3]), "word": np.arange(2),
         "word_spans": np.ones((1, 2), int), "owned": np.array([True, True]), "example": 6},
    ]  # fmt: skip
    batch = CollateWindows(9, about=("example", "owned", "word"))(features)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 9, 9], [0, 1, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["token_type_ids"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"].tolist() == [[-100, 4, -100], [1, 2, 3]]
    assert batch["word_spans"].tolist() == [[[1, 1], [1, 1]], [[1, 1], [0, 0]]]
    about = batch["about"]
    assert about["example"].tolist() == [5, 6] and about["word"].tolist() == [[7, -1], [0, 1]]
    assert about["owned"].tolist() == [[True, False], [True, True]] and about["owned"].dtype == torch.bool
    assert batch["num_items_in_batch"].tolist() == [4, 8]  # labels, and tokens without the padding
    assert batch.keys() == {"input_ids", "attention_mask", "token_type_ids", "labels", "word_spans", "about",
                            "num_items_in_batch"}  # fmt: skip


def test_labels_of_texts():
    features = [{"input_ids": np.arange(3), "labels": label, "example": label} for label in (1, 0)]
    batch = CollateWindows(0)(features)
    assert batch["labels"].tolist() == [1, 0] and batch["labels"].dtype == torch.int64
    assert batch["num_items_in_batch"].tolist() == [2, 6]
    features = [{"input_ids": np.arange(3), "labels": label, "example": 0} for label in (1.5, -100.0)]
    batch = CollateWindows(0)(features)
    assert batch["labels"].tolist() == [1.5, -100.0] and batch["labels"].dtype == torch.float32
    assert batch["num_items_in_batch"].tolist() == [2, 6]  # -100 is a number like any other


# Flags


@dataclass(frozen=True, kw_only=True)
class Flags(WindowArguments, Arguments):
    """Only what windows are made of."""


def test_sizes_that_cannot_be():
    with pytest.raises(InputError, match="--max_seq_length 4: it must be 8 or above"):
        parse(Flags, ["--max_seq_length", "4"])
    encoder = Flags(max_seq_length=32, doc_stride=16).encoder(tagged_words.tokenizer("wordpiece"))
    assert (encoder.max_length, encoder.stride, encoder.room) == (32, 16, 30)
    with pytest.raises(InputError, match=r"--doc_stride 17: .* share 0 to 16"):
        Flags(max_seq_length=32, doc_stride=17).encoder(tagged_words.tokenizer("wordpiece"))
