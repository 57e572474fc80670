"""Texts and sentences to windows of tokens, and windows to batches.

Each feature is one window. A word belongs to exactly one of the windows that it is in, the one where it has the most
context, so that every word is learned and scored once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import tokenizers
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_tiny.data.collate import pad_right
from hf_tiny.data.tagged import Sentence, TaggedArguments, Text

IGNORED = -100  # What the losses of torch and transformers skip.

Feature = dict[str, np.ndarray | int | float]
Batch = dict[str, Tensor | dict[str, Tensor]]


def text_features(
    texts: Sequence[Text],
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str] | None,
    arguments: TaggedArguments,
) -> list[Feature]:
    """input_ids, token_type_ids (if the model has them), label (a number to come near to when `labels` is None) and
    example, the index of the text. All windows of a text have its label. Of a pair the longer text is cut into windows;
    when both fill more than half of a window, both are, and their parts go together in order."""
    coder = Coder(tokenizer, arguments)
    numbers = {label: number for number, label in enumerate(labels or [])}
    first = coder.encode_texts([text.text for text in texts])
    second = coder.encode_texts([text.text_pair or "" for text in texts])
    features = []
    for example, text in enumerate(texts):
        label = float(text.label) if labels is None else numbers[text.label]
        if text.text_pair is None:
            contents = ([part] for part in coder.parts(first[example], coder.single.room))
        else:
            contents = coder.pair_parts(first[example], second[example])
        features += [{**coder.framed(content), "label": label, "example": example} for content in contents]
    return features


def tag_features(
    sentences: Sequence[Sentence],
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    arguments: TaggedArguments,
) -> list[Feature]:
    """input_ids, token_type_ids, and of each token: labels, the tag if it is the first of a word that belongs to the
    window, and word, the index of that word in the sentence, else -1; example, the index of the sentence. A window
    without any tag is left out."""
    coder = Coder(tokenizer, arguments)
    numbers = {None: IGNORED, **{label: number for number, label in enumerate(labels)}}
    features = []
    for example, window in coder.word_windows(sentences):
        tags = np.array([numbers[tag] for tag in sentences[example].tags[window.start : window.stop]])
        tags[~window.owned] = IGNORED
        feature = coder.framed([list(chain.from_iterable(window.ids))])
        size, firsts = len(feature["input_ids"]), window.spans[:, 0]
        feature["labels"], feature["word"] = np.full(size, IGNORED), np.full(size, -1)
        feature["labels"][firsts] = tags
        feature["word"][firsts] = np.where(window.owned, np.arange(window.start, window.stop), -1)
        if (tags != IGNORED).any():
            features.append({**feature, "example": example})
    return features


def link_features(
    sentences: Sequence[Sentence],
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    arguments: TaggedArguments,
) -> list[Feature]:
    """input_ids, token_type_ids, and of each of the W words of the window: word_spans (W, 2), its first token and the
    one after its last; owned; gold_heads and gold_labels, -100 if it is not owned or not scored, with heads counted in
    the sentence; heads and labels, to learn from: counted in the window, and -100 also if the head is outside of it.
    first_word is the index of the first of them in the sentence, example that of the sentence. A window in which
    nothing is scored is left out."""
    coder = Coder(tokenizer, arguments)
    numbers = {None: IGNORED, **{label: number for number, label in enumerate(labels)}}
    features = []
    for example, window in coder.word_windows(sentences):
        words = slice(window.start, window.stop)
        sentence = sentences[example]
        gold_heads = np.array([IGNORED if head is None else head for head in sentence.heads[words]])
        gold_labels = np.array([numbers[relation] for relation in sentence.relations[words]])
        gold_heads[~window.owned] = gold_labels[~window.owned] = IGNORED
        outside = (gold_heads != 0) & ((gold_heads <= window.start) | (gold_heads > window.stop))
        if (gold_heads != IGNORED).any():
            features.append(
                {
                    **coder.framed([list(chain.from_iterable(window.ids))]),
                    "word_spans": window.spans,
                    "heads": np.where(outside, IGNORED, np.where(gold_heads == 0, 0, gold_heads - window.start)),
                    "labels": np.where(outside, IGNORED, gold_labels),
                    "gold_heads": gold_heads,
                    "gold_labels": gold_labels,
                    "owned": window.owned,
                    "first_word": window.start,
                    "example": example,
                }
            )
    return features


@dataclass(frozen=True)
class Window:
    """Words [start, stop) of a sentence: the tokens of each, where they are among those of the window, and which of the
    words belong to this window."""

    start: int
    stop: int
    ids: list[list[int]]
    spans: np.ndarray
    owned: np.ndarray


class Frame:
    """What a tokenizer puts around and between texts, found by trying it."""

    def __init__(self, encoding: tokenizers.Encoding, length: int):
        # Each special token by itself, and each text as one place, whatever number of tokens the trial had.
        self.places = []
        for sequence, token, kind in zip(encoding.sequence_ids, encoding.ids, encoding.type_ids, strict=True):
            if sequence is None or not self.places or self.places[-1][0] != sequence:
                self.places.append((sequence, [token], kind))
        specials = [place for place, (sequence, *_) in enumerate(self.places) if sequence is None]
        self.before = next(place for place, (sequence, *_) in enumerate(self.places) if sequence is not None)
        self.room = length - len(specials)

    def around(self, contents: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and token type ids."""
        ids, kinds = [], []
        for sequence, special, kind in self.places:
            part = special if sequence is None else contents[sequence]
            ids += part
            kinds += [kind] * len(part)
        return np.array(ids, dtype=np.int64), np.array(kinds, dtype=np.int64)


class Coder:
    """A tokenizer and the sizes of windows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: TaggedArguments):
        self.backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # "[SEP]" in the text is text.
        self.single = Frame(self.backend.encode("a"), arguments.max_seq_length)
        self.pair = Frame(self.backend.encode("a", "a"), arguments.max_seq_length)
        self.token_types = "token_type_ids" in tokenizer.model_input_names
        self.nothing = [tokenizer.pad_token_id if tokenizer.unk_token_id is None else tokenizer.unk_token_id]
        self.stride = arguments.doc_stride
        # Byte-level tokenizers keep the space before a word; the words of a list have none unless it is put there.
        joined = self.backend.encode("a a", add_special_tokens=False).ids
        spaced = self.backend.encode(["a", " a"], is_pretokenized=True, add_special_tokens=False).ids
        apart = self.backend.encode(["a", "a"], is_pretokenized=True, add_special_tokens=False).ids
        self.space = " " if spaced == joined != apart else ""

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def framed(self, contents: Sequence[Sequence[int]]) -> Feature:
        ids, kinds = (self.single if len(contents) == 1 else self.pair).around(contents)
        return {"input_ids": ids, "token_type_ids": kinds} if self.token_types else {"input_ids": ids}

    def parts(self, ids: list[int], room: int) -> Iterator[list[int]]:
        """Evenly spread parts of `room` tokens, of which neighbours share the stride or more."""
        if len(ids) <= room:
            yield ids
            return
        stride = min(self.stride, room // 2)
        steps = -(-(len(ids) - room) // (room - stride))
        for step in range(steps + 1):
            start = step * (len(ids) - room) // steps
            yield ids[start : start + room]

    def pair_parts(self, first: list[int], second: list[int]) -> Iterator[list[list[int]]]:
        room = self.pair.room
        half = room // 2
        if min(len(first), len(second)) > half:
            sides = [list(self.parts(side, half)) for side in (first, second)]
            count = max(map(len, sides))
            yield from ([side[number * len(side) // count] for side in sides] for number in range(count))
        elif len(first) >= len(second):
            yield from ([part, second] for part in self.parts(first, room - len(second)))
        else:
            yield from ([first, part] for part in self.parts(second, room - len(first)))

    def word_windows(self, sentences: Sequence[Sentence]) -> Iterator[tuple[int, Window]]:
        """The windows of each sentence with its index; a sentence without words has none."""
        for example, words in enumerate(self._encode_words(sentences)):
            stride = self.stride
            if sum(map(len, words)) > self.single.room:
                # A word is cut where it would fill a window: two words and what windows share must fit into one.
                longest = max(1, (self.single.room - stride) // 2)
                stride = min(stride, self.single.room - 2 * longest)
                words = [word[:longest] for word in words]
            ends = np.array([0, *accumulate(map(len, words))])
            starts_and_stops = _cut(ends, self.single.room, stride)
            owners = _owners(ends, starts_and_stops)
            for number, (start, stop) in enumerate(starts_and_stops):
                spans = np.stack([ends[start:stop], ends[start + 1 : stop + 1]], axis=1) - ends[start]
                owned = owners[start:stop] == number
                yield example, Window(start, stop, words[start:stop], spans + self.single.before, owned)

    def _encode_words(self, sentences: Sequence[Sentence]) -> Iterator[list[list[int]]]:
        """The tokens of each word. A word is tokenized by itself, so each different one is tokenized once."""
        keys = [self._keys(sentence) for sentence in sentences]
        different = list(dict.fromkeys(key for sentence in keys for key in sentence))
        encodings = self.backend.encode_batch_fast(
            [[text] for text, _ in different], is_pretokenized=True, add_special_tokens=False
        )
        ids = {key: encoding.ids or self.nothing for key, encoding in zip(different, encodings, strict=True)}
        for text, inner in different:
            piece = self.backend.token_to_id(f"##{self._normal(text)}") if inner else None
            if piece is not None:
                ids[text, inner] = [piece]
        return ([ids[key] for key in sentence] for sentence in keys)

    def _keys(self, sentence: Sentence) -> list[tuple[str, bool]]:
        """What to tokenize, and whether it is a character inside of a word."""
        inner = [False] * len(sentence.words)
        if sentence.word_of is not None:
            inner[1:] = [word == last for last, word in zip(sentence.word_of, sentence.word_of[1:], strict=False)]
        spaces = [self.space if index and not inside else "" for index, inside in enumerate(inner)]
        return [(space + word, inside) for space, word, inside in zip(spaces, sentence.words, inner, strict=True)]

    def _normal(self, text: str) -> str:
        return text if self.backend.normalizer is None else self.backend.normalizer.normalize_str(text)


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


# Batches: what the model gets, and under `about` what it does not


@dataclass(frozen=True)
class CollateTexts:
    pad_token_id: int

    def __call__(self, rows: Sequence[Feature]) -> Batch:
        labels = torch.from_numpy(np.array([row["label"] for row in rows]))
        labels = labels.float() if labels.is_floating_point() else labels
        about = {"example": _numbers(rows, "example")}
        return {**_tokens(rows, self.pad_token_id, len(rows)), "labels": labels, "about": about}


@dataclass(frozen=True)
class CollateTags:
    pad_token_id: int

    def __call__(self, rows: Sequence[Feature]) -> Batch:
        labels = _padded(rows, "labels", IGNORED)
        about = {"example": _numbers(rows, "example"), "word": _padded(rows, "word", -1)}
        items = int((labels != IGNORED).sum())
        return {**_tokens(rows, self.pad_token_id, items), "labels": labels, "about": about}


@dataclass(frozen=True)
class CollateLinks:
    pad_token_id: int

    def __call__(self, rows: Sequence[Feature]) -> Batch:
        heads = _padded(rows, "heads", IGNORED)
        about = {
            "example": _numbers(rows, "example"),
            "first_word": _numbers(rows, "first_word"),
            "num_words": torch.tensor([len(row["heads"]) for row in rows]),
            "owned": _padded(rows, "owned", False),
            "gold_heads": _padded(rows, "gold_heads", IGNORED),
            "gold_labels": _padded(rows, "gold_labels", IGNORED),
        }
        return {
            **_tokens(rows, self.pad_token_id, int((heads != IGNORED).sum())),
            "word_spans": _padded(rows, "word_spans", 0),
            "heads": heads,
            "labels": _padded(rows, "labels", IGNORED),
            "about": about,
        }


def _tokens(rows: Sequence[Feature], pad_token_id: int, items: int) -> dict[str, Tensor]:
    sizes = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(int(sizes.max())) < sizes[:, None]).long()
    batch = {"input_ids": _padded(rows, "input_ids", pad_token_id), "attention_mask": mask}
    if "token_type_ids" in rows[0]:
        batch["token_type_ids"] = _padded(rows, "token_type_ids", 0)
    return {**batch, "num_items_in_batch": torch.tensor([items, int(sizes.sum())])}


def _padded(rows: Sequence[Feature], name: str, value: int) -> Tensor:
    return pad_right([row[name] for row in rows], value)


def _numbers(rows: Sequence[Feature], name: str) -> Tensor:
    return torch.tensor([row[name] for row in rows])
