"""The decoder against every tree there is."""

import itertools
from functools import cache

import numpy as np
import pytest

from hf_tiny.models.trees import is_tree, maximum_spanning_tree


def reaches_root(heads: tuple[int, ...], word: int) -> bool:
    for _ in heads:
        word = heads[word - 1]
        if word == 0:
            return True
    return False


@cache
def all_trees(count: int) -> np.ndarray:
    """Every tree with one root, (trees, count): there are count ** (count - 1)."""
    trees = [
        heads
        for heads in itertools.product(range(count + 1), repeat=count)
        if heads.count(0) == 1 and all(reaches_root(heads, word) for word in range(1, count + 1))
    ]
    return np.array(trees)


def value(scores: np.ndarray, heads: np.ndarray) -> tuple[int, float]:
    """How many arcs are possible, and the sum of their scores."""
    taken = scores[np.arange(len(scores)), heads].astype(np.float64)
    possible = np.isfinite(taken)
    return int(possible.sum()), float(taken[possible].sum())


def best_value(scores: np.ndarray) -> tuple[int, float]:
    taken = scores[np.arange(len(scores)), all_trees(len(scores))].astype(np.float64)
    possible = np.isfinite(taken)
    sums = np.where(possible, taken, 0.0).sum(1)
    most = possible.sum(1).max()
    return int(most), float(sums[possible.sum(1) == most].max())


def test_brute_force_knows_all_trees():
    for count in range(1, 6):
        assert len(all_trees(count)) == count ** (count - 1)
        assert all(is_tree(heads) for heads in all_trees(count))


KINDS = {
    "normal": lambda random, shape: random.normal(size=shape),
    "float32": lambda random, shape: random.normal(size=shape).astype(np.float32),
    "many roots": lambda random, shape: random.normal(size=shape) + 5.0 * (np.arange(shape[1]) == 0),
    "no root": lambda random, shape: random.normal(size=shape) - 50.0 * (np.arange(shape[1]) == 0),
    "ties": lambda random, shape: random.integers(0, 3, size=shape).astype(float),
    "all equal": lambda random, shape: np.zeros(shape),
    "large": lambda random, shape: random.normal(size=shape) * 1e12,
    "mixed sizes": lambda random, shape: random.normal(size=shape) * 10.0 ** random.integers(-6, 7, size=shape),
    "small beside large": lambda random, shape: random.normal(size=shape) + 1e6 * (random.random(size=(shape[0], 1))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_best_tree(kind):
    random = np.random.default_rng(0)
    for count, impossible in ((2, 0.5), (3, 0.2), (4, 0.0), (5, 0.0), (5, 0.5), (5, 0.8)):
        scores = KINDS[kind](random, (count, count + 1))
        scores[random.random(size=scores.shape) < impossible] = -np.inf
        before = scores.copy()
        heads = maximum_spanning_tree(scores)
        assert is_tree(heads)
        found, best = value(scores, heads), best_value(scores)
        assert found[0] == best[0]
        if kind in ("ties", "all equal"):  # whole numbers are added up exactly
            assert found[1] == best[1]
        else:
            largest = np.abs(scores[np.isfinite(scores)]).max(initial=0.0)
            assert found[1] == pytest.approx(best[1], rel=0, abs=1e-13 * float(largest))
        np.testing.assert_array_equal(scores, before)


def test_single_word():
    assert maximum_spanning_tree(np.array([[-3.0, 9.0]])).tolist() == [0]
    assert maximum_spanning_tree(np.array([[-np.inf, 9.0]])).tolist() == [0]


def test_greedy_choice_that_is_a_tree_is_kept():
    scores = np.array([[0.0, 9.0, 5.0, 1.0], [7.0, 1.0, 9.0, 2.0], [3.0, 1.0, 4.0, 9.0]])
    assert maximum_spanning_tree(scores).tolist() == [2, 0, 2]


def test_cycle_is_opened_where_it_costs_least():
    """Words 1 and 2 choose each other; 2 -> root costs 1 and 1 -> root costs 4."""
    assert maximum_spanning_tree(np.array([[1.0, 0.0, 5.0], [4.0, 5.0, 0.0]])).tolist() == [2, 0]


def test_two_roots_become_one():
    """Greedily both are roots; as dependent of the other word 1 loses 4 and word 2 loses 3."""
    assert maximum_spanning_tree(np.array([[5.0, 0.0, 1.0], [5.0, 2.0, 0.0]])).tolist() == [0, 1]


def test_small_differences_decide_beside_impossible_pairs():
    """A penalty added to the scores would swallow the last digit of 0.3."""
    never = -np.inf
    scores = np.array([[1.0, never, never, never], [1.0, 0.5, never, 0.0], [1.0, 0.3, 0.3 + 1e-15, never]])
    assert maximum_spanning_tree(scores).tolist() == [0, 1, 2]
    scores[2, 1:3] = scores[2, 2:0:-1]
    assert maximum_spanning_tree(scores).tolist() == [0, 1, 1]


def test_parts_that_see_nothing_of_each_other():
    """Two windows without a common word: one arc between them is made up, and only one."""
    scores = np.full((4, 5), -np.inf)
    scores[:, 0] = [3.0, 0.0, 2.0, 0.0]
    scores[0, 2] = scores[1, 1] = scores[2, 4] = scores[3, 3] = 1.0
    heads = maximum_spanning_tree(scores)
    assert is_tree(heads)
    assert value(scores, heads) == (3, 5.0)


@pytest.mark.parametrize("direction", [-1, 1])
def test_long_chain(direction):
    """Each word's head is the word before it (or after it), and every other arc is worse: 200 words deep."""
    words = np.arange(1, 201)
    chain = words + direction
    chain[chain == 201] = 0
    scores = np.random.default_rng(0).normal(size=(200, 201))
    scores[words - 1, chain] = 10.0
    assert maximum_spanning_tree(scores).tolist() == chain.tolist()


def test_long_chain_from_cycles():
    """All but one of 200 words choose the next one, the last chooses the first: one cycle, opened at word 1."""
    words = np.arange(1, 201)
    scores = np.zeros((200, 201))
    scores[words - 1, words % 200 + 1] = 10.0
    scores[0, 0] = 1.0
    assert maximum_spanning_tree(scores).tolist() == [0, *(words[1:] % 200 + 1)]


def test_cycles_within_cycles():
    """Words 1 and 2 choose each other, and each cycle's best arc leads to the next word, which chooses the word before:
    399 cycles within one another."""
    count = 400
    words = np.arange(1, count + 1)
    scores = np.full((count, count + 1), -1e6)
    scores[words[1:] - 1, words[1:] - 1] = 10.0
    scores[words[:-1] - 1, words[:-1] + 1] = 9.0 - words[:-1] / count
    scores[0, 2], scores[-1, 0] = 10.0, 0.0
    assert maximum_spanning_tree(scores).tolist() == [*range(2, count + 1), 0]


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ([0], True),
        ([2, 0], True),
        ([0, 1, 2, 3], True),
        ([], False),
        ([1], False),  # its own head
        ([0, 0], False),  # two roots
        ([2, 1], False),  # no root
        ([0, 3, 2], False),  # a cycle beside the tree
        ([0, 3, 4, 2], False),
        ([0, 3], False),  # out of range
        ([0, -1], False),
    ],
)
def test_is_tree(heads, expected):
    assert is_tree(heads) is expected
