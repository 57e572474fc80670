"""The best tree over the words of a sentence. This file travels with a parser."""

from collections.abc import Sequence

import numpy as np


def maximum_spanning_tree(scores: np.ndarray) -> np.ndarray:
    """The heads (n,) of the tree with exactly one root whose arcs have the highest sum (Chu-Liu/Edmonds).

    scores: (n, n + 1). Row i is word i + 1 as dependent, column 0 the root, column j word j as head; a word's own column
    is ignored. A pair of -inf is impossible: it is taken only where every tree needs one, and then as rarely as can be.
    """
    count = len(scores)
    weights = scores.astype(np.float64)
    words = np.arange(count)
    weights[words, words + 1] = -np.inf
    heads = weights.argmax(1)
    possible = np.isfinite(weights)
    if possible[words, heads].all() and is_tree(heads):
        return heads
    # What must not happen is counted in the real part and the scores are added up in the imaginary one: numpy compares
    # complex numbers by the real part first. A penalty mixed into the scores would cost them their last digits.
    nodes = np.full((count + 1, count + 1), -np.inf, dtype=np.complex128)
    nodes[1:] = np.where(possible, 1j * np.where(possible, weights, 0.0), -1.0)
    nodes[words + 1, words + 1] = -np.inf
    heads = _best_heads(nodes.copy())
    if (heads == 0).sum() != 1:
        nodes[1:, 0] -= count + 1  # a second root is worse than all else that can happen
        heads = _best_heads(nodes)
    return heads


def is_tree(heads: Sequence[int] | np.ndarray) -> bool:
    """Whether the heads (0 = root, else a word counted from 1) are in range, have one root and no cycle."""
    heads = np.asarray(heads)
    if (heads == 0).sum() != 1 or heads.min() < 0 or heads.max() > len(heads):
        return False
    return _find_cycle([0, *heads.tolist()]) is None


def _find_cycle(heads: list[int]) -> list[int] | None:
    """Some cycle of the graph in which node i points at heads[i]; node 0 ends every path."""
    seen_from = [0] * len(heads)
    for start in range(1, len(heads)):
        node = start
        while node and not seen_from[node]:
            seen_from[node] = start
            node = heads[node]
        if node and seen_from[node] == start:  # the path of this start, not one that was followed before
            cycle = [node]
            while heads[cycle[-1]] != node:
                cycle.append(heads[cycle[-1]])
            return cycle
    return None


def _best_heads(weights: np.ndarray) -> np.ndarray:
    """The best heads of the nodes 1, 2, ... of a square matrix (dependents by heads), which it overwrites.

    Every node takes its best head. While that makes a cycle, the cycle becomes one node (named by its first member): an
    arc into it counts what it gains over the member's arc in the cycle, an arc out of it comes from the best member.
    Then the cycles are opened again, the last one first, where the arc into each of them enters.
    """
    contracted = []
    weights[0, 0] = 0.0
    heads = weights.argmax(1)
    while cycle := _find_cycle(heads.tolist()):
        members = np.array(cycle)
        inside = heads[members]
        gains = weights[members] - weights[members, inside][:, None]
        enter, leave = gains.argmax(0), weights[:, members].argmax(1)
        contracted.append((members, inside, members[enter], members[leave]))
        first, others = members[0], members[1:]
        weights[:, first] = weights[:, members].max(1)
        weights[first] = gains.max(0)
        weights[first, members] = -np.inf
        weights[:, others] = -np.inf
        weights[others, 0] = np.inf  # they stay out of the way, at the root
        heads = weights.argmax(1)
    for members, inside, enter, leave in reversed(contracted):
        head = heads[members[0]]
        outgoing = heads == members[0]
        heads[outgoing] = leave[outgoing]
        heads[members] = inside
        heads[enter[head]] = head
    return heads[1:]
