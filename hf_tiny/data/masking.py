"""What is hidden from a model: tokens, spans of text, patches of images; all chance is a function of seed and place."""

import re
from collections.abc import Iterable

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_tiny.data.augment import Augment
from hf_tiny.data.batches import Batch, pad_right, pair_batch, uniform
from hf_tiny.data.images import Normalize
from hf_tiny.data.packing import word_starts
from hf_tiny.errors import InputError

SENTINEL = re.compile(r"<extra_id_(\d+)>$")


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
            raise InputError("The tokenizer has no eos_token. Train one with --tokenizer_model bpe.")
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
            raise InputError("The tokenizer has no mask_token. Train one with --tokenizer_model bpe.")
        lengths = np.arange(1, 10 * max(1, round(mean_span_length)))
        shares = np.exp(-mean_span_length) * np.cumprod(np.append(1.0, mean_span_length / lengths))
        self.length_cdf = np.cumsum(shares)[:-1]
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.begins = word_starts(tokens)
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


def _replaced(text: np.ndarray, starts: np.ndarray, lengths: np.ndarray, marks: Iterable[int]) -> np.ndarray:
    """The text with a mark in place of each span."""
    pieces, done = [], 0
    for start, length, mark in zip(starts, lengths, marks, strict=True):
        pieces += [text[done:start], [mark]]
        done = start + length
    return np.concatenate([*pieces, text[done:]]).astype(np.int64)


class MaskPatches(Normalize):
    """Batches for a masked autoencoder: which patches the encoder sees, chosen by the image's place in the run."""

    def __init__(self, processor, seed: int, patches: int, mask_ratio: float, augment: Augment | None = None):
        super().__init__(processor, seed, augment)
        self.patches, self.kept = patches, round(patches * (1 - mask_ratio))
        if not 0 < self.kept < patches:
            raise InputError(
                f"--mask_ratio {mask_ratio:g}: of {patches} patches this leaves {self.kept} to see. Use 0.75."
            )

    def __repr__(self) -> str:
        return f"{super().__repr__()}, {self.kept} of {self.patches} patches seen"

    def __call__(self, rows: dict[str, np.ndarray], first: int) -> Batch:
        count = len(rows["pixels"])
        numbers = uniform(self.seed, first, count, self.width + self.patches)
        seen = np.argpartition(numbers[:, self.width :], self.kept, axis=1)[:, : self.kept]
        return {
            "pixel_values": self.normalized(self.images(rows, numbers[:, : self.width])),
            "ids_keep": torch.from_numpy(np.sort(seen, axis=1)),
            "about": {"example": torch.from_numpy(rows["example"])},
            "num_items_in_batch": torch.tensor([count * (self.patches - self.kept), count]),
        }
