"""Words to tokens, in training and in a parser's pipeline alike. This file travels with a parser."""

from collections.abc import Sequence

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerBase


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
