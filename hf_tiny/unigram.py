"""Training of a Unigram vocabulary (Kudo, 2018): the same words always give the same pieces and scores.

The trainer of `tokenizers` does neither: it adds up in the order of a randomly seeded hash map, and it looks for pieces
in a list in which each different word stands once, so that a frequent word that is part of no other is never found.
"""

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

LONGEST_PIECE = 16
LONGEST_WORD = 32  # Longer ones are cut: probabilities of pieces are multiplied, and must not vanish.
MOST_WORDS = 200_000
SEEDS = 10  # As many pieces to begin with as there are to be in the end, times this.
SHRINKING = 0.75
EM_STEPS = 2
RARE = 0.5  # The least that a character counts, so that it is never impossible.


class Lattice:
    """All ways to cut texts into pieces: edges between the places in a text, for all texts at once."""

    def __init__(self, texts: Sequence[str], index: dict[str, int], whole: bool):
        """whole: whether a text may be a piece itself."""
        starts, ends, pieces, first, last = (array("q") for _ in range(5))
        base = 0
        self.sources, self.sinks = [], []
        for text in texts:
            size = len(text)
            for start in range(size):
                for end in range(start + 1, min(size, start + LONGEST_PIECE) + 1):
                    piece = index.get(text[start:end])
                    if piece is not None and (whole or end - start < size):
                        starts.append(base + start)
                        ends.append(base + end)
                        pieces.append(piece)
                        first.append(start)
                        last.append(end)
            self.sources.append(base)
            self.sinks.append(base + size)
            base += size + 1
        self.starts, self.ends, self.pieces = (np.array(values, dtype=np.int64) for values in (starts, ends, pieces))
        self.text_of = np.searchsorted(self.sources, self.starts, side="right") - 1
        self.places, self.kinds = base, len(index)
        self.forward, self.backward = _groups(np.array(last)), _groups(np.array(first))[::-1]

    def expected(self, probabilities: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """How often each piece is used, over all ways to cut (forward-backward). counts: how often each text comes."""
        before, after = np.zeros(self.places), np.zeros(self.places)
        before[self.sources], after[self.sinks] = 1.0, 1.0
        edges = probabilities[self.pieces]
        for group in self.forward:
            np.add.at(before, self.ends[group], before[self.starts[group]] * edges[group])
        for group in self.backward:
            np.add.at(after, self.starts[group], after[self.ends[group]] * edges[group])
        weights = counts / before[self.sinks]
        used = before[self.starts] * edges * after[self.ends] * weights[self.text_of]
        return np.bincount(self.pieces, used, minlength=self.kinds)

    def best(self, scores: np.ndarray) -> np.ndarray:
        """The log probability of the best way to cut each text (Viterbi)."""
        reached = np.full(self.places, -np.inf)
        reached[self.sources] = 0.0
        for group in self.forward:
            np.maximum.at(reached, self.ends[group], reached[self.starts[group]] + scores[self.pieces[group]])
        return reached[self.sinks]


def _groups(levels: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(levels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(levels[order])) + 1)


def train_unigram(words: Counter[str], alphabet: Sequence[str], size: int) -> list[tuple[str, float]]:
    """At most `size` pieces, all characters of the alphabet among them, with their log probabilities, the best first."""
    parts = Counter()
    for word, count in sorted(words.items(), key=lambda one: (-one[1], one[0]))[:MOST_WORDS]:
        for start in range(0, len(word), LONGEST_WORD):
            parts[word[start : start + LONGEST_WORD]] += count
    found = Counter()
    for word, count in parts.items():
        for start in range(len(word)):
            for end in range(start + 2, min(len(word), start + LONGEST_PIECE) + 1):
                found[word[start:end]] += count
    seeds = sorted(
        (piece for piece in found if found[piece] > 1), key=lambda piece: (-found[piece] * len(piece), piece)
    )
    pieces = [*alphabet, *seeds[: SEEDS * size]]
    index = {piece: number for number, piece in enumerate(pieces)}
    lattice, inner = Lattice(list(parts), index, whole=True), Lattice(pieces, index, whole=False)
    counts, single = np.array(list(parts.values()), dtype=np.float64), np.arange(len(pieces)) < len(alphabet)
    used = np.array([found[piece] for piece in pieces], dtype=np.float64)
    kept = np.ones(len(pieces), dtype=bool)
    while True:
        for _ in range(EM_STEPS):
            used = np.where(kept, np.where(single, np.maximum(used, RARE), used), 0.0)
            used = lattice.expected(used / used.sum(), counts)
        kept &= single | (used >= RARE)
        used = np.where(kept, np.where(single, np.maximum(used, RARE), used), 0.0)
        scores = np.log(used / used.sum(), out=np.full(len(used), -np.inf), where=kept)
        if kept.sum() <= size:
            break
        # What the text would lose if a piece were cut in the best other way: the pieces that matter least go.
        room = max(size, int(SHRINKING * kept.sum())) - len(alphabet)
        several = np.flatnonzero(kept & ~single)
        losses = used[several] * (scores - inner.best(scores))[several]
        kept = single.copy()
        kept[several[np.argsort(-losses, kind="stable")[:room]]] = True
    best = sorted(((round(float(scores[number]), 6), pieces[number]) for number in np.flatnonzero(kept)), reverse=True)
    return [(piece, score) for score, piece in best]
