"""BPE dropout (Provilkov et al., 2020): the same text cut into pieces in another way in every epoch.

`tokenizers` has it too, but draws from a generator that cannot be seeded: a resumed run would see other pieces.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from hf_tiny.data.parallel import SIDES, Pair, PairCoder, ParallelArguments
from hf_tiny.data.windows import Feature
from hf_tiny.errors import InputError


class BpeDropout:
    """Features of pairs as an epoch sees them, for `BucketedBatches(vary=...)`: every merge is left out now and then, so
    that a text is also cut into the small pieces that rare words are made of. Drawn by (seed, epoch, number of the
    feature). A side that would become too long stays as it is."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, arguments: ParallelArguments):
        self.coder, self.rate = PairCoder(tokenizer, arguments), arguments.bpe_dropout
        backend = self.coder.backend
        model = json.loads(backend.to_str())["model"]
        changed = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if model["type"] != "BPE" or changed or backend.pre_tokenizer is None:
            raise InputError(f"--bpe_dropout {self.rate:g}: it needs a tokenizer as --tokenizer_model bpe trains it.")
        self.vocabulary, self.unknown = model["vocab"], [] if model["byte_fallback"] else [model["unk_token"]]
        self.ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
        self.words = [(self._words(pair.source), self._words(pair.target)) for pair in pairs]
        self.states: dict[str, list[list[str]]] = {}

    def __repr__(self) -> str:
        return f"BPE dropout {self.rate}"

    def __call__(self, feature: Feature, key: tuple[int, int, int]) -> Feature:
        drawn = random.Random(repr(key)).random
        varied = dict(feature)
        for side, (name, words) in enumerate(zip(SIDES, self.words[feature["example"]], strict=True)):
            ids = [self.vocabulary[piece] for word in words for piece in self._pieces(word, drawn)]
            if len(ids) <= self.coder.room(side):
                varied[name] = self.coder.framed(ids, side)
        return varied

    def _words(self, text: str) -> list[str]:
        normalizer = self.coder.backend.normalizer
        normal = text if normalizer is None else normalizer.normalize_str(text)
        return [word for word, _ in self.coder.backend.pre_tokenizer.pre_tokenize_str(normal)]

    def _pieces(self, word: str, drawn: Callable[[], float]) -> list[str]:
        """At every step the first merge that is not left out. Most words meet none that is: one number says how many
        steps go as they do without dropout, and these are known."""
        if word not in self.states:
            self.states[word] = self._plain_states(word)
        states = self.states[word]
        steps = int(math.log(1 - drawn()) / math.log(1 - self.rate)) if self.rate else len(states)
        if steps >= len(states) - 1:
            return states[-1]
        pieces, left_out = states[steps], 1
        while merge := next((one for one in self._merges(pieces)[left_out:] if drawn() >= self.rate), None):
            pieces, left_out = _merged(pieces, merge), 0
        return pieces

    def _plain_states(self, word: str) -> list[list[str]]:
        """From the characters, or their bytes, to the pieces."""
        pieces = []
        for character in word:
            known = character in self.vocabulary
            pieces += [character] if known else self.unknown or [f"<0x{byte:02X}>" for byte in character.encode()]
        states = [pieces]
        while merges := self._merges(states[-1]):
            states.append(_merged(states[-1], merges[0]))
        return states

    def _merges(self, pieces: list[str]) -> list[tuple[int, int]]:
        """Rank and place, the first merge first."""
        ranked = ((self.ranks.get(pair), place) for place, pair in enumerate(pairwise(pieces)))
        return sorted(merge for merge in ranked if merge[0] is not None)


def _merged(pieces: list[str], merge: tuple[int, int]) -> list[str]:
    place = merge[1]
    return [*pieces[:place], pieces[place] + pieces[place + 1], *pieces[place + 2 :]]
