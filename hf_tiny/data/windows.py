"""Texts and sentences to windows of tokens, and windows to batches.

Each feature is one window. A text or sentence that is longer than a window becomes several that overlap.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import tokenizers
import torch
from transformers import PreTrainedTokenizerBase

from hf_tiny.arguments import flag
from hf_tiny.data.batches import Batch, attention_mask, pad_right
from hf_tiny.data.conllu import Sentence
from hf_tiny.data.splits import TextSplitArguments
from hf_tiny.errors import InputError
from hf_tiny.models.words import WordTokenizer

IGNORED = -100  # what the losses of torch and transformers skip
FILLERS = {"token_type_ids": 0, "word_spans": 0, "affixes": 0, "owned": False, "word": -1}  # others: IGNORED

Feature = dict[str, Any]  # arrays, a value for each token or word, and numbers


@dataclass(frozen=True, kw_only=True)
class WindowArguments(TextSplitArguments):
    """Which labelled data, and how long a window is."""

    max_seq_length: int = flag(128, "Number of tokens in a window, special tokens included.", low=8)
    doc_stride: int = flag(32, "Number of tokens that neighbouring windows of a long text share, at least.", low=0)

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> "WindowEncoder":
        if self.doc_stride > self.max_seq_length // 2:
            raise InputError(
                f"--doc_stride {self.doc_stride}: windows of --max_seq_length {self.max_seq_length} can share 0 to "
                f"{self.max_seq_length // 2} tokens."
            )
        return WindowEncoder(tokenizer, self.max_seq_length, self.doc_stride)


@dataclass(frozen=True)
class Window:
    """Words [start, stop) of a sentence.

    feature: the tokens, framed by the special tokens.
    spans: the first token of each word, and the one after its last. A character has none of its own (the two are equal)
        where the token of one before stands for it, too.
    owned: whether each word belongs to this window. A word belongs to exactly one of the windows that it is in, the one
        where it has the most context, so that every word is learned and scored once.
    """

    start: int
    stop: int
    feature: Feature
    spans: np.ndarray
    owned: np.ndarray

    def own(self, values: Sequence[int]) -> np.ndarray:
        """Of values for each word of the sentence, those of this window's own words, and IGNORED for the others."""
        return np.where(self.owned, np.array(values[self.start : self.stop], dtype=np.int64), IGNORED)


class WindowEncoder(WordTokenizer):
    """A tokenizer and the size of windows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, stride: int = 0):
        super().__init__(tokenizer)
        self.max_length, self.stride = max_length, stride
        self.room = max_length - len(self.frames[0].ids) + 1

    # Texts

    def texts(self, texts: Sequence[str], pairs: Sequence[str | None]) -> Iterator[list[Feature]]:
        """The windows of each text, or of each pair of texts."""
        encode = self.backend.encode_batch_fast
        first = encode(list(texts), add_special_tokens=False)
        second = encode([pair or "" for pair in pairs], add_special_tokens=False)
        for one, other, pair in zip(first, second, pairs, strict=True):
            windows = [(part,) for part in self.cut(one, self.room)] if pair is None else self.pair_windows(one, other)
            yield [self.framed(*window) for window in windows]

    def cut(self, encoding: tokenizers.Encoding, room: int) -> list[list[int]]:
        encoding.truncate(room, stride=min(self.stride, room // 2))
        return [part.ids for part in (encoding, *encoding.overflowing)]

    def pair_windows(self, first: tokenizers.Encoding, second: tokenizers.Encoding) -> Iterator[list[list[int]]]:
        """The longer text is cut into windows. When both fill more than half of a window, both are cut, and their parts go
        together in order."""
        room = self.max_length - len(self.frames[1].ids) + 2
        if min(len(first), len(second)) > room // 2:
            rooms = (room // 2, room // 2)
        elif len(first) >= len(second):
            rooms = (room - len(second), room)
        else:
            rooms = (room, room - len(first))
        parts = [self.cut(side, limit) for side, limit in zip((first, second), rooms, strict=True)]
        count = max(map(len, parts))
        return ([part[number * len(part) // count] for part in parts] for number in range(count))

    # Words

    def words(self, sentences: Sequence[Sentence]) -> Iterator[tuple[int, Window]]:
        """The windows of each sentence with its index. A sentence without words has none. These are cut by hand, since
        `tokenizers` would also cut within words, and does not say in which window a word has the most context."""
        for example, words in enumerate(self.word_ids(sentences)):
            stride = self.stride
            if sum(map(len, words)) > self.room:
                # A word is cut where it would fill a window: two words and what windows share must fit into one.
                longest = max(1, (self.room - stride) // 2)
                stride = min(stride, self.room - 2 * longest)
                words = [word[:longest] for word in words]
            ends = np.array([0, *accumulate(map(len, words))])
            bounds = _cut(ends, self.room, stride)
            # A word without tokens goes with the last one before that has any.
            carriers = np.maximum.accumulate(np.where(np.diff(ends) > 0, np.arange(len(words)), 0))
            owners = _owners(ends, bounds)[carriers]
            for number, (start, stop) in enumerate(bounds):
                spans = np.stack([ends[start:stop], ends[start + 1 : stop + 1]], axis=1) - ends[start]
                feature = self.framed(list(chain.from_iterable(words[start:stop])))
                yield example, Window(start, stop, feature, spans + self.before, owners[start:stop] == number)

    def word_ids(self, sentences: Sequence[Sentence]) -> Iterator[list[list[int]]]:
        """The tokens of each word. A word is tokenized by itself, so each different one is tokenized once; characters are
        what a tokenizer makes of their text."""
        apart = {word for sentence in sentences if sentence.places is None for word in sentence.words}
        different = [space + word for word in sorted(apart) for space in {"", self.space}]
        ids = dict(zip(different, self.tokens(different), strict=True))
        for sentence in sentences:
            if sentence.places is None:
                yield [ids[(self.space if index else "") + word] for index, word in enumerate(sentence.words)]
            else:
                yield self.character_ids(sentence.text, sentence.places)

    def character_ids(self, text: str, places: Sequence[int]) -> list[list[int]]:
        """The tokens of a text as they are, each given to the first character that it stands for, or to the one before."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        found: list[list[int]] = [[] for _ in places]
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True) if places else ():
            spaces = len(text[start:end]) - len(text[start:end].lstrip())  # that some tokens begin with
            found[max(0, bisect_right(places, start + spaces) - 1)].append(token)
        return found


def _cut(ends: np.ndarray, room: int, stride: int) -> list[tuple[int, int]]:
    """Start and stop of windows of whole words, as full as can be, of which neighbours share at least `stride` tokens.
    `ends` says how many tokens come before each word, and before the end."""
    windows, start, count = [], 0, len(ends) - 1
    while not windows or windows[-1][1] < count:
        stop = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
        if stop >= count:  # The last one reaches back as far as it can.
            start, stop = int(np.searchsorted(ends, ends[count] - room, side="left")), count
        windows.append((start, stop))
        start = int(np.searchsorted(ends, ends[stop] - stride, side="right")) - 1
    return windows if count else []


def _owners(ends: np.ndarray, windows: list[tuple[int, int]]) -> np.ndarray:
    """For each word the number of the window in which the nearer end of the window is farthest away."""
    owners, context = np.zeros(len(ends) - 1, dtype=np.int64), np.full(len(ends) - 1, -1)
    for number, (start, stop) in enumerate(windows):
        nearer = np.minimum(ends[start:stop] - ends[start], ends[stop] - ends[start + 1 : stop + 1])
        better = nearer > context[start:stop]
        owners[start:stop][better] = number
        context[start:stop][better] = nearer[better]
    return owners


@dataclass(frozen=True)
class CollateWindows:
    """Features to a batch: arrays are padded on the right, numbers are stacked. What is not for the model stands under
    `about`. The loss is divided by the number of labels, or by the sum of their weights."""

    pad_token_id: int
    about: tuple[str, ...] = ("example",)

    def __call__(self, features: Sequence[Feature]) -> Batch:
        tokens = [feature["input_ids"] for feature in features]
        columns = {name: self.column(name, [feature[name] for feature in features]) for name in features[0]}
        labels, weights = columns.get("labels"), columns.pop("weight", None)
        items: float = 0
        if weights is not None:
            items = float(weights.sum())
        elif labels is not None:
            items = len(labels) if labels.is_floating_point() else int(labels.ne(IGNORED).sum())
        return {
            **{name: column for name, column in columns.items() if name not in self.about},
            "attention_mask": attention_mask(tokens),
            "about": {name: columns[name] for name in self.about},
            "num_items_in_batch": torch.tensor([items, sum(map(len, tokens))]),
        }

    def column(self, name: str, values: list) -> torch.Tensor:
        if np.ndim(values[0]) == 0:
            column = torch.from_numpy(np.array(values))
            return column.float() if column.is_floating_point() else column
        return pad_right(values, self.pad_token_id if name == "input_ids" else FILLERS.get(name, IGNORED))
