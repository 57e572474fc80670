"""What texts are written with: their tokens, and the characters inside of these. This file travels with every encoder's head."""

from collections.abc import Sequence
from itertools import groupby
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

FACTOR, PRIME = 1_000_003, 2**31 - 1  # of hashes


def bucket(first: Tensor, second: Tensor, buckets: int) -> Tensor:
    """A number from 1 on for each pair."""
    return 1 + (first * FACTOR + second) % PRIME % (buckets - 1)


class Spelling(nn.Module):
    """Characters, pairs of neighbouring ones, and the shape of each token of a vocabulary, hashed into numbers from 1 to
    `buckets` - 1; 0 is none. The table is made of the tokenizer (`read`) and travels with the weights."""

    LONGEST = 16  # numbers of a token

    def __init__(self, config: PreTrainedConfig, buckets: int):
        super().__init__()
        self.buckets = buckets
        self.register_buffer("numbers", torch.zeros(config.vocab_size, self.LONGEST, dtype=torch.int32))

    def reset(self) -> None:
        init.zeros_(self.numbers)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(..., LONGEST)."""
        return self.numbers[input_ids].long()

    @torch.no_grad()
    def read(self, tokens: Sequence[str | None]) -> None:
        """tokens: the vocabulary in order, as WordPiece writes it; None for special tokens, which are spelled by nothing."""
        for number, token in enumerate(tokens):
            if token is not None:
                parts = [1 + crc32(part.encode()) % (self.buckets - 1) for part in spelled(token)[: self.LONGEST]]
                self.numbers[number, : len(parts)] = torch.tensor(parts, dtype=torch.int32)


def spelled(token: str) -> list[str]:
    """Its shape, pairs of characters, its characters. A token that begins a word has a mark in front."""
    text = token[2:] if token.startswith("##") else f"▁{token}"
    kinds = (
        "X" if c.isupper() else "x" if c.islower() else "9" if c.isdigit() else c if c.isascii() else "-" for c in text
    )
    shape = "#" + "".join(kind for kind, _ in groupby(kinds))
    return [shape, *(text[place : place + 2] for place in range(len(text) - 1)), *text]
