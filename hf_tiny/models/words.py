"""Words to tokens and affixes, in training and in a parser's pipeline alike. This file travels with a parser."""

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from zlib import crc32

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerBase

PREFIXES, SUFFIXES, SHAPE = 4, 6, 6  # characters, at most
NUM_AFFIXES = PREFIXES + SUFFIXES + 2


def affixes(words: Sequence[str], buckets: int) -> np.ndarray:
    """(words, NUM_AFFIXES): the number, from 1 to buckets - 1, of each word itself, of its shape, and of its beginnings and
    endings; 0 for those that a short word lacks. Case counts in the shape only. Hangul is taken apart, since much of its
    grammar is inside of syllables: 간 and 갈 both begin with 가, and end in ᆫ and ᆯ."""
    rows = np.zeros((len(words), NUM_AFFIXES), dtype=np.int64)
    for row, word in zip(rows, words, strict=True):
        numbers = [1 + crc32(part.encode(errors="replace")) % (buckets - 1) for part in _parts(word)]
        row[: len(numbers)] = numbers
    return rows


def _parts(word: str) -> Iterator[str]:
    whole = unicodedata.normalize("NFD", word)
    low = whole.lower()
    yield f"={low}"
    yield "#" + "".join(islice((kind for kind, _ in groupby(whole, _kind)), SHAPE))
    yield from (f"{size}-{low[-size:]}" for size in range(1, 1 + min(SUFFIXES, len(low))))
    yield from (f"{size}+{low[:size]}" for size in range(1, 1 + min(PREFIXES, len(low))))


def _kind(character: str) -> str:
    """Letters by their case, digits; other ASCII characters are their own kind."""
    if character.isdigit():
        return "9"
    if character.isupper() or character.islower():
        return "X" if character.isupper() else "x"
    return character if character.isascii() else "-"


def split_words(text: str) -> list[str]:
    """Words at white space; punctuation at the edges of a word is split off, equal marks in a row together.

    '"그래...", 했다.' gives: " 그래 ... " , 했다 . - but the marks inside of "don't" or "3.5" stay, and abbreviations
    lose their last dot. Give a list of words where that is not good enough.
    """
    words = []
    for chunk in text.split():
        edge = [unicodedata.category(character).startswith("P") for character in chunk]
        if all(edge):
            words += marks(chunk)
        else:
            start, end = edge.index(False), len(chunk) - edge[::-1].index(False)
            words += [*marks(chunk[:start]), chunk[start:end], *marks(chunk[end:])]
    return words


def marks(punctuation: str) -> list[str]:
    return ["".join(run) for _, run in groupby(punctuation)]


def plain_tokenizer(content: str) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json that neither cuts nor pads, and takes "[SEP]" in a text for text."""
    backend = tokenizers.Tokenizer.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


class WordTokenizer:
    """Words are tokenized one by one, and framed by the special tokens afterwards.

    before: the number of special tokens in front of the first word.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.backend = plain_tokenizer(tokenizer.backend_tokenizer.to_str())
        self.token_types = "token_type_ids" in tokenizer.model_input_names
        self.nothing = [tokenizer.pad_token_id if tokenizer.unk_token_id is None else tokenizer.unk_token_id]
        token = self.backend.encode("a", add_special_tokens=False)
        token.truncate(1)
        # What the special tokens around a text, or a pair of texts, are: each text is one token here.
        self.frames = (self.backend.post_process(token), self.backend.post_process(token, token))
        self.before = self.frames[0].special_tokens_mask.index(0)
        # Byte-level tokenizers keep the space before a word; the words of a list have none unless it is put there.
        joined = self.backend.encode("a a", add_special_tokens=False).ids
        spaced = self.backend.encode(["a", " a"], is_pretokenized=True, add_special_tokens=False).ids
        apart = self.backend.encode(["a", "a"], is_pretokenized=True, add_special_tokens=False).ids
        self.space = " " if spaced == joined != apart else ""

    def tokens(self, words: Sequence[str]) -> list[list[int]]:
        """Of each word by itself; one that the tokenizer leaves nothing of is unknown."""
        alone = [[word] for word in words]
        encodings = self.backend.encode_batch_fast(alone, is_pretokenized=True, add_special_tokens=False)
        return [encoding.ids or self.nothing for encoding in encodings]

    def framed(self, *texts: Sequence[int]) -> dict[str, np.ndarray]:
        """The tokens of a text, or of two, between the special tokens."""
        frame, parts = self.frames[len(texts) - 1], iter(texts)
        ids, kinds = [], []
        for special, token, kind in zip(frame.special_tokens_mask, frame.ids, frame.type_ids, strict=True):
            part = [token] if special else next(parts)
            ids += part
            kinds += [kind] * len(part)
        arrays = {"input_ids": np.array(ids, dtype=np.int64), "token_type_ids": np.array(kinds, dtype=np.int64)}
        return arrays if self.token_types else {"input_ids": arrays["input_ids"]}
