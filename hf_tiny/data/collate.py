"""Micro-batches as a pure function of the seed and their place in the run: no state, so a resume is a seek."""

import hashlib
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_tiny.errors import InputError

Batch = dict[str, Tensor]

SENTINEL = re.compile(r"<extra_id_(\d+)>$")


def uniform(seed: int, first: int, count: int, width: int) -> np.ndarray:
    """`width` numbers in [0, 1) for each of the samples first, first + 1, ...: (count, width).

    A counter-based generator gives sample n the same numbers in whatever batch, process or resumed run it appears.
    """
    padded = -(-width // 4) * 4  # Philox makes four numbers per count
    generator = np.random.Generator(np.random.Philox(key=seed, counter=first * padded // 4))
    return generator.random((count, padded))[:, :width]


class Source:
    """What the training loop reads: `source[i]` is micro-batch i of an endless run, whoever asks. It has a
    `batch_size` and a `fingerprint`, which says what a checkpoint belongs to."""

    def epoch(self, index: int) -> float:
        """How often the data has been seen before micro-batch `index`."""
        return index / len(self)

    def state_dict(self, index: int) -> dict:
        """What this process must save to go on with micro-batch `index`: nothing, where going on is a seek."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """What all processes saved."""


class Batches(Source):
    """Micro-batch i holds the samples i * batch_size, i * batch_size + 1, ... of an endless run over shuffled epochs,
    or of the data in order, once, with `shuffle=False`.

    `collate(rows, first)` turns rows (a dict of arrays) into tensors; `first` is the place of its first sample.
    """

    def __init__(
        self, data: Dataset, collate: Callable[[dict, int], Batch], batch_size: int, seed: int, shuffle: bool = True
    ):
        self.data = data.with_format("numpy")
        self.collate, self.batch_size, self.seed, self.shuffle = collate, batch_size, seed, shuffle
        self.fingerprint = f"{_digest(data)}, {collate}"
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Micro-batches per epoch."""
        return -(-len(self.data) // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        first = index * self.batch_size
        size = len(self.data)
        places = np.arange(first, first + self.batch_size if self.shuffle else min(first + self.batch_size, size))
        rows = [self._row(epoch, place) for epoch, place in zip(places // size, places % size, strict=True)]
        return self.collate(self.data[rows], first)

    def _row(self, epoch: int, place: int) -> int:
        if not self.shuffle:
            return place
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.data))
        return self._order[place]


class BucketedBatches(Source):
    """Like `Batches`, for samples of different length: a micro-batch holds samples of about the same length, at most
    `batch_size` of them and at most `max_tokens` tokens with the padding (but always one sample).

    data: one dict a sample, with `input_ids`. `collate(rows)` turns some of them into tensors.
    sides: the arrays of a sample that are padded and count as tokens; of a pair both, ("input_ids", "labels").
    vary: `vary(sample, (seed, epoch, number))` gives the sample as this epoch sees it. Micro-batches are cut by the
        lengths in `data`: where samples become longer, so do their micro-batches.
    """

    POOL = 50  # micro-batches' worth of samples that are sorted together: enough to match lengths, few enough to mix

    def __init__(
        self,
        data: Sequence[dict],
        collate: Callable[[list[dict]], Batch],
        batch_size: int,
        max_tokens: int,
        seed: int,
        shuffle: bool = True,
        sides: tuple[str, ...] = ("input_ids",),
        vary: Callable[[dict, tuple[int, int, int]], dict] | None = None,
    ):
        self.data, self.collate, self.max_samples, self.max_tokens = data, collate, batch_size, max_tokens
        self.seed, self.shuffle, self.vary = seed, shuffle, vary
        self.lengths = np.array([[len(sample[side]) for side in sides] for sample in data])  # (samples, sides)
        self.epochs = [self._cut_epoch(0)]  # the micro-batches of each epoch so far: arrays of sample numbers
        self.batch_size = len(data) / len(self)  # on average
        content = hashlib.sha256()
        for sample in data:
            for value in sample.values():  # the labels too
                content.update(np.asarray(value).tobytes())
        self.fingerprint = (
            f"{len(data)} samples {content.hexdigest()[:16]}, at most {batch_size} or {max_tokens} tokens"
            f"{'' if vary is None else f', {vary}'}"
        )

    def __len__(self) -> int:
        """Micro-batches of the first epoch; later ones may have a few more or less."""
        return len(self.epochs[0])

    def __getitem__(self, index: int) -> Batch:
        epoch = 0
        while index >= len(self.epochs[epoch]):
            index -= len(self.epochs[epoch])
            epoch += 1
            if epoch == len(self.epochs):
                self.epochs.append(self._cut_epoch(epoch))
        samples = self.epochs[epoch][index]
        if self.vary is None:
            return self.collate([self.data[sample] for sample in samples])
        return self.collate([self.vary(self.data[sample], (self.seed, epoch, int(sample))) for sample in samples])

    def _cut_epoch(self, epoch: int) -> list[np.ndarray]:
        if not self.shuffle:
            return self._cut(np.arange(len(self.data)))
        generator = np.random.default_rng((self.seed, epoch))
        order, pool = generator.permutation(len(self.data)), self.POOL * self.max_samples
        batches = []
        for start in range(0, len(order), pool):
            batches += self._cut(order[start : start + pool])
        return [batches[place] for place in generator.permutation(len(batches))]

    def _cut(self, samples: np.ndarray) -> list[np.ndarray]:
        """Samples into micro-batches, by length. Of pairs the first side goes up, two tokens at a time, and the second up
        and down by turns, so that a micro-batch has neighbours in both: a third to a half less padding than if it went
        up each time."""
        first, last = self.lengths[samples].T[[0, -1]]
        if self.lengths.shape[1] == 1:
            order = np.argsort(first, kind="stable")
        else:
            order = np.lexsort((np.where(first // 2 % 2, -last, last), first // 2))
        samples = samples[order]
        batches, start, longest = [], 0, [0] * self.lengths.shape[1]
        for end, lengths in enumerate(self.lengths[samples].tolist()):
            longer = list(map(max, longest, lengths))
            size = end - start
            if size and (size == self.max_samples or (size + 1) * sum(longer) > self.max_tokens):
                batches.append(samples[start:end])
                start, longer = end, lengths
            longest = longer
        return [*batches, samples[start:]]


def _digest(data: Dataset) -> str:
    """Of the number of rows and of some of them: it stays the same when the files behind the data are moved."""
    rows = data.with_format(None)[np.linspace(0, len(data) - 1, min(len(data), 256), dtype=int).tolist()]
    return f"{len(data)} rows {hashlib.sha256(repr(rows).encode()).hexdigest()[:16]}"


class MaskTokens:
    """Blocks of token ids to ELECTRA's input: of the chosen tokens 85% become [MASK] and 15% stay (there are no random
    tokens); [CLS], [SEP] and [PAD] are never chosen."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float, seed: int, stay_probability: float = 0.15
    ):
        self.mask_token_id = tokenizer.mask_token_id
        self.special_ids = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
        self.mlm_probability, self.stay_probability, self.seed = mlm_probability, stay_probability, seed

    def __repr__(self) -> str:
        return f"masked {self.mlm_probability}, stay {self.stay_probability}"

    def __call__(self, rows: dict[str, np.ndarray], first: int) -> Batch:
        ids = rows["input_ids"].astype(np.int64)  # (batch, length)
        count, length = ids.shape
        choose, stay, noise = np.split(uniform(self.seed, first, count, 3 * length), 3, axis=1)
        special = np.isin(ids, self.special_ids)
        chosen = max(1, round(self.mlm_probability * length))
        order = np.argpartition(np.where(special, 2.0, choose), chosen - 1, axis=1)[:, :chosen]
        masked = np.zeros_like(special)
        np.put_along_axis(masked, order, True, axis=1)
        masked &= ~special
        return {
            "input_ids": torch.from_numpy(np.where(masked & (stay >= self.stay_probability), self.mask_token_id, ids)),
            "token_type_ids": torch.from_numpy((np.arange(length) >= rows["segment_start"][:, None]).astype(np.int64)),
            "labels": torch.from_numpy(np.where(masked, ids, -100)),
            "sampling_noise": torch.from_numpy(noise.astype(np.float32)),
            "num_items_in_batch": torch.tensor([masked.sum(), ids.size]),
        }


class NextTokens:
    """Blocks of token ids to what a causal model reads: the token that begins a text, and text. Whatever else frames a block
    is taken off: nothing in the text says where it stands."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.begin, self.pad = tokenizer.cls_token_id, tokenizer.pad_token_id
        self.frame_ids = [self.begin, tokenizer.sep_token_id, self.pad]

    def __repr__(self) -> str:
        return "next tokens"

    def __call__(self, rows: dict[str, np.ndarray], first: int) -> Batch:
        texts = [row[~np.isin(row, self.frame_ids)] for row in rows["input_ids"].astype(np.int64)]
        labels = pad_right([np.append(-100, text) for text in texts], -100)  # (batch, 1 + text)
        begins = torch.arange(labels.shape[1]) == 0
        items = sum(map(len, texts))
        return {
            "input_ids": labels.masked_fill(labels.eq(-100), self.pad).masked_fill(begins, self.begin),
            "attention_mask": (labels.ne(-100) | begins).long(),
            "labels": labels,
            "num_items_in_batch": torch.tensor([items, items + len(texts)]),
        }


# Pairs of a source and a target: a translation, or a damaged text and what a decoder has to write


def pair_batch(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], pad_token_id: int) -> Batch:
    """Counted are the target's tokens, by which the loss is divided, and the tokens of both sides."""
    sizes = torch.tensor([len(source) for source in sources])
    items = sum(map(len, targets))
    return {
        "input_ids": pad_right(sources, pad_token_id),
        "attention_mask": (torch.arange(int(sizes.max())) < sizes[:, None]).long(),
        "labels": pad_right(targets, -100),
        "num_items_in_batch": torch.tensor([items, int(sizes.sum()) + items]),
    }


def pad_right(arrays: Sequence[np.ndarray], value: int) -> Tensor:
    """The arrays one below the other, filled up on the right."""
    longest = max(map(len, arrays))
    padded = np.full((len(arrays), longest, *arrays[0].shape[1:]), value, dtype=arrays[0].dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(padded)


class Denoise:
    """Blocks of token ids to pairs. What frames a block is taken off, so that </s> only ever ends a text, as it does on
    both sides of a translation: what is pretrained here is fine-tuned without a change of form."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, noise_density: float, mean_span_length: float, seed: int):
        if not 0 < noise_density < 1 or mean_span_length <= 0:
            raise InputError(
                f"--noise_density {noise_density:g} must be between 0 and 1, and --mean_span_length "
                f"{mean_span_length:g} above 0."
            )
        if tokenizer.eos_token_id is None:
            raise InputError("The tokenizer has no eos_token. Train one with --tokenizer_model bpe or unigram.")
        self.eos, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.frame_ids = [tokenizer.cls_token_id, tokenizer.sep_token_id, self.pad]
        self.noise_density, self.mean_span_length, self.seed = noise_density, mean_span_length, seed

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.noise_density}, spans of {self.mean_span_length}"

    def __call__(self, rows: dict[str, np.ndarray], first: int) -> Batch:
        ids = rows["input_ids"].astype(np.int64)  # (batch, length)
        count, length = ids.shape
        numbers = uniform(self.seed, first, count, 3 * length).reshape(count, 3, length)
        texts = (row[~np.isin(row, self.frame_ids)] for row in ids)
        pairs = [self.damage(text, own) for text, own in zip(texts, numbers, strict=True)]
        sources, targets = ([np.append(side, self.eos) for side in sides] for sides in zip(*pairs, strict=True))
        return pair_batch(sources, targets, self.pad)

    def damage(self, text: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two sides. numbers: (3, more than the text has tokens), all the chance there is."""
        raise NotImplementedError


class TextInfilling(Denoise):
    """BART: sentences change places, and spans of Poisson length are replaced by one mask token each; where the length
    is 0, a mask token is put in. The target is the whole text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        noise_density: float = 0.3,
        mean_span_length: float = 3.0,
        permute_sentences: bool = True,
    ):
        super().__init__(tokenizer, noise_density, mean_span_length, seed)
        self.mask, self.permute_sentences = tokenizer.mask_token_id, permute_sentences
        if self.mask is None:
            raise InputError("The tokenizer has no mask_token. Train one with --tokenizer_model bpe or unigram.")
        lengths = np.arange(1, 10 * max(1, round(mean_span_length)))
        shares = np.exp(-mean_span_length) * np.cumprod(np.append(1.0, mean_span_length / lengths))
        self.length_cdf = np.cumsum(shares)[:-1]
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        spaces = any(token.startswith("▁") for token in tokens)
        self.begins = np.array([t.startswith("▁") if spaces else not t.startswith("##") for t in tokens])
        self.ends = np.array([t.rstrip("\"')]”’」』").endswith((".", "!", "?", "…", "。")) for t in tokens])

    def __repr__(self) -> str:
        return f"{super().__repr__()}{', sentences permuted' if self.permute_sentences else ''}"

    def damage(self, text: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        source = self.permuted(text, numbers[0]) if self.permute_sentences else text
        starts, lengths = self.spans(len(text), *numbers[1:])
        return _replaced(source, starts, lengths, [self.mask] * len(starts)), text

    def permuted(self, text: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        sentences = np.split(text, np.flatnonzero(self.ends[text[:-1]] & self.begins[text[1:]]) + 1)
        return np.concatenate([sentences[place] for place in np.argsort(numbers[: len(sentences)])])

    def spans(self, size: int, length_numbers: np.ndarray, place_numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Starts and lengths of spans that cover the wanted share, the last one cut to fit. Each goes between two other
        tokens that stay, so that no two touch."""
        wanted = round(self.noise_density * size)
        lengths = np.searchsorted(self.length_cdf, length_numbers, side="right")
        count = int(np.searchsorted(np.cumsum(lengths), wanted)) + 1
        lengths = lengths[: min(count, size - wanted + 1)] if wanted else lengths[:0]
        lengths[-1:] -= max(0, lengths.sum() - wanted)
        gaps = np.argsort(place_numbers[: size - lengths.sum() + 1])[: len(lengths)]
        order = np.argsort(gaps)
        lengths = lengths[order]
        return gaps[order] + np.cumsum(lengths) - lengths, lengths


class SpanCorruption(Denoise):
    """T5: spans are replaced by sentinels, <extra_id_0>, <extra_id_1> and so on; the target is each sentinel followed by
    what it stands for. A text begins with a token that stays and ends with a span."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        noise_density: float = 0.15,
        mean_span_length: float = 3.0,
    ):
        super().__init__(tokenizer, noise_density, mean_span_length, seed)
        matches = ((SENTINEL.match(token), number) for token, number in tokenizer.get_vocab().items())
        found = {int(match[1]): number for match, number in matches if match}
        self.sentinels = np.array([found[number] for number in sorted(found)])

    def damage(self, text: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts, lengths = self.spans(len(text), *numbers[:2])
        if len(starts) > len(self.sentinels):
            raise InputError(
                f"A block of {len(text)} tokens has {len(starts)} spans, and the tokenizer {len(self.sentinels)} tokens "
                "<extra_id_0>, <extra_id_1> ... for them. Train one with more --extra_ids, or use shorter blocks."
            )
        marks = self.sentinels[: len(starts)]
        spans = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        target = [np.append(mark, span) for mark, span in zip(marks, spans, strict=True)]
        return _replaced(text, starts, lengths, marks), np.concatenate([text[:0], *target])

    def spans(self, size: int, noise_numbers: np.ndarray, kept_numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        noise = min(max(1, round(self.noise_density * size)), size - 1)
        if noise < 1:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        count = min(max(1, round(noise / self.mean_span_length)), noise, size - noise)
        lengths = _parts(noise, count, noise_numbers)
        return np.cumsum(_parts(size - noise, count, kept_numbers)) + np.cumsum(lengths) - lengths, lengths


def _parts(total: int, count: int, numbers: np.ndarray) -> np.ndarray:
    """The lengths of `count` parts, none empty, that make up the total; every way of cutting is as likely."""
    cuts = np.sort(np.argsort(numbers[: total - 1])[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def _replaced(text: np.ndarray, starts: np.ndarray, lengths: np.ndarray, marks: Sequence[int]) -> np.ndarray:
    """The text with a mark in place of each span."""
    pieces, done = [], 0
    for start, length, mark in zip(starts, lengths, marks, strict=True):
        pieces += [text[done:start], [mark]]
        done = start + length
    return np.concatenate([*pieces, text[done:]]).astype(np.int64)
