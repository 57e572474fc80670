"""A shard of raw text to full blocks of tokens, `[CLS] A [SEP] B [SEP]`.

A shard is read, tokenized and packed by itself: its blocks do not depend on who makes them, or on the other shards.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tokenizers

from hf_tiny.data import sources
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.sources import Part
from hf_tiny.models.words import plain_tokenizer

FORMAT_VERSION = 3  # Raise it when the same text and settings give other blocks than before.
SAMPLE_BY = ("line", "paragraph", "document")
FLAWS = ("rows without text", "characters replaced")
BATCH_CHARACTERS = 1 << 18
ONE_SEGMENT = 0.1  # The share of blocks with one segment, as in the original ELECTRA.

Shard = tuple[Part, ...]
Texts = Iterator[tuple[bool, str]]  # Whether a document starts here, and text of it.


@dataclass(frozen=True)
class Reading:
    """How a shard is read and what of it is held out."""

    text_column: str
    sample_by: str
    decoding: Decoding
    held_out: float = 0.0
    by_document: bool = True


@dataclass(frozen=True)
class Packing:
    """The shards of a split, and all that their blocks depend on."""

    shards: tuple[Shard, ...]
    split: str
    reading: Reading
    length: int
    cls: int
    sep: int
    seed: int
    tokenizer: str
    versions: tuple = (FORMAT_VERSION, tokenizers.__version__)

    def blocks(self, number: int, counts: Counter, turn: int = 0, of: int = 1) -> Iterator[dict]:
        """The blocks of a shard, or of each `of`-th text of it from `turn` on."""
        tokenizer, starts_word = _tokenizer(self.tokenizer)
        random = np.random.default_rng([self.seed, number] if of == 1 else [self.seed, number, turn])
        texts = islice(split_texts(self.shards[number], self.reading, self.split, counts), turn, None, of)
        yield from _pack(_tokenized(texts, tokenizer), self, starts_word, random, counts)

    def texts(self, number: int) -> Iterator[list[int]]:
        """The tokens of each text of a shard."""
        texts = split_texts(self.shards[number], self.reading, self.split, Counter())
        return (ids for _, ids in _tokenized(texts, _tokenizer(self.tokenizer)[0]) if ids)


def digest(shards: Iterable[Shard], how: Reading | Packing) -> str:
    """The folder of a file may change, its name and time may not: copies on other machines give the same."""
    files = [(Path(part.path).name, part.version, part) for shard in shards for part in shard]
    return hashlib.sha256(repr((files, how)).encode()).hexdigest()[:32]


# From a shard to texts


def split_texts(shard: Shard, reading: Reading, split: str, counts: Counter) -> Texts:
    """The texts of a shard that belong to the split. A very long document comes in several pieces."""
    if not reading.held_out:
        return read_texts(shard, reading, counts)
    return (_split_by_document if reading.by_document else _split_at_the_end)(shard, reading, split, counts)


def _split_by_document(shard: Shard, reading: Reading, split: str, counts: Counter) -> Texts:
    """Held out by a hash of the document's place. It knows no seed: all runs are evaluated on the same text."""
    for part in shard:
        whole_file = sources.kind(part.path) == sources.TEXT and reading.sample_by == "document"
        index, chosen = 0, None
        for start, text in read_texts((part,), reading, counts):
            if start or chosen is None:
                place = (part.number,) if whole_file else (part.number, part.start, index)
                chosen = sources.hashed_below(reading.held_out, repr(place)) == (split == "validation")
                index += 1
            if chosen:
                yield start, text


def _split_at_the_end(shard: Shard, reading: Reading, split: str, counts: Counter) -> Texts:
    """Held out is the end of the shard, from a word on."""
    left = math.ceil(sum(len(text) for _, text in read_texts(shard, reading, Counter())) * (1 - reading.held_out))
    for start, text in read_texts(shard, reading, counts):
        cut = max(left, 0)
        if cut < len(text):
            cut = text.rfind(" ", 0, cut) + 1 or cut
        left -= len(text)
        kept = text[:cut] if split == "train" else text[cut:]
        if kept.strip():
            yield start, kept


def read_texts(shard: Shard, reading: Reading, counts: Counter) -> Texts:
    """All texts of a shard."""
    for part in shard:
        yield from (_file_texts if sources.kind(part.path) == sources.TEXT else _row_texts)(part, reading, counts)


def _row_texts(part: Part, reading: Reading, counts: Counter) -> Texts:
    decoding = replace(reading.decoding, counts=counts)
    for place, row in sources.rows(part, decoding, [reading.text_column]):
        text = sources.text_cell(row, reading.text_column, place, "--text_column")
        if text and not text.isspace():
            yield True, text
        else:
            counts["rows without text"] += 1


def _file_texts(part: Part, reading: Reading, counts: Counter) -> Texts:
    pieces, size, line_start, limit = [], 0, True, sources.PIECE_BYTES
    starts = part.start == 0 or reading.sample_by != "document"
    decoding = replace(reading.decoding, counts=counts)
    for place, raw in sources.raw_lines(part, decoding, limit):
        text = decoding.text(raw, place).strip()
        ends = line_start and (reading.sample_by == "line" or (reading.sample_by == "paragraph" and not text))
        if ends or size >= limit:
            if pieces:
                yield starts, "\n".join(pieces)
            pieces, size, starts = [], 0, ends or (starts and not pieces)
        if text:
            pieces.append(text)
            size += len(raw)
        line_start = raw.endswith(b"\n")
    if pieces:
        yield starts, "\n".join(pieces)


# From texts to blocks


@lru_cache(maxsize=2)
def _tokenizer(content: str) -> tuple[tokenizers.Tokenizer, np.ndarray]:
    """The tokenizer, and whether each of its tokens starts a word."""
    tokenizer = plain_tokenizer(content)
    numbers = range(max(tokenizer.get_vocab().values()) + 1)
    return tokenizer, word_starts([tokenizer.id_to_token(number) or "" for number in numbers])


def word_starts(tokens: Sequence[str]) -> np.ndarray:
    """Whether each token starts a word."""
    spaces = any(token.startswith("▁") for token in tokens)  # BPE and Unigram mark words where they begin
    return np.array([token.startswith("▁") if spaces else not token.startswith("##") for token in tokens])


def _tokenized(texts: Texts, tokenizer: tokenizers.Tokenizer) -> Iterator[tuple[bool, list[int]]]:
    only_bytes = tokenizer.token_to_id("<0x0A>") is not None and tokenizer.token_to_id("▁") is None
    before = "\n" if only_bytes else ""  # other tokens show where a word begins
    starts, batch, size = [], [], 0
    for start, text in chain(texts, [(False, "")]):
        starts.append(start)
        batch.append(text and before + text)
        size += len(text)
        if size > BATCH_CHARACTERS or not text:
            encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            yield from zip(starts, (encoding.ids for encoding in encodings), strict=True)
            starts, batch, size = [], [], 0


def _pack(
    documents: Iterable[tuple[bool, list[int]]],
    packing: Packing,
    starts_word: np.ndarray,
    random: np.random.Generator,
    counts: Counter,
) -> Iterator[dict]:
    """Cut the documents, one after the other, into full blocks. What is left at the end is only counted."""
    cls, sep, length = packing.cls, packing.sep, packing.length
    tokens, starts = [], []  # What is not yet in a block, and where documents start in it.
    one_segment = random.random() < ONE_SEGMENT
    for start, ids in documents:
        counts["documents"] += start
        counts["tokens"] += len(ids)
        if start:
            starts.append(len(tokens))
        tokens += ids
        done = 0
        while len(tokens) - done >= (size := length - 2 - (not one_segment)):
            content = tokens[done : done + size]
            if one_segment:
                block, segment_start = [cls, *content, sep], length
            else:
                cut = _segment_cut(content, [place - done for place in starts], starts_word, random)
                block, segment_start = [cls, *content[:cut], sep, *content[cut:], sep], cut + 2
            yield {"input_ids": np.array(block, dtype=np.int32), "segment_start": segment_start}
            done += size
            counts["blocks"] += 1
            one_segment = random.random() < ONE_SEGMENT
        if done:
            del tokens[:done]
            starts = [place - done for place in starts if place > done]
    counts["tokens left over"] += len(tokens)


def _segment_cut(content: list[int], starts: list[int], starts_word: np.ndarray, random: np.random.Generator) -> int:
    """Where the second segment begins: at the document start nearest the middle, else at a word of the middle half."""
    low, high = len(content) // 4, 3 * len(content) // 4
    between = [place for place in starts if low <= place <= high]
    if between:
        return min(between, key=lambda place: abs(2 * place - len(content)))
    cut = int(random.integers(low, high + 1))
    words = np.flatnonzero(starts_word[content[cut : high + 1]])
    return cut + int(words[0]) if len(words) else cut
