"""The affixes of words, as a parser sees them in training and in its pipeline."""

import unicodedata
from zlib import crc32

import numpy as np

from hf_tiny.models.words import NUM_AFFIXES, affixes

BUCKETS = 1000


def number(part: str) -> int:
    return 1 + crc32(part.encode()) % (BUCKETS - 1)


def test_a_word_its_shape_its_endings_and_beginnings():
    expected = ["=cats", "#Xx", "1-s", "2-ts", "3-ats", "4-cats", "1+c", "2+ca", "3+cat", "4+cats"]
    (row,) = affixes(["Cats"], BUCKETS)
    assert row.tolist() == [*map(number, expected), 0, 0] and len(row) == NUM_AFFIXES == 12
    (longer,) = affixes(["iPhone-15s"], BUCKETS)
    assert longer[1] == number("#xXx-9x") and longer[7] == number("6-ne-15s") and longer[11] == number("4+ipho")


def test_hangul_is_taken_apart():
    """간 and 갈 have the beginning in common, and not the ending; composed or not, a word is the same."""
    first, second = affixes(["간", "갈"], BUCKETS)
    parts = unicodedata.normalize("NFD", "간")
    assert len(parts) == 3 and first[2] == number(f"1-{parts[-1]}") and first[2] != second[2]
    both = [number(f"{size}+{parts[:size]}") for size in (1, 2)]
    assert first[5:7].tolist() == second[5:7].tolist() == both and first[7] != second[7]
    assert (affixes([unicodedata.normalize("NFD", "학교에서")], BUCKETS) == affixes(["학교에서"], BUCKETS)).all()


def test_any_word_has_numbers_within_the_table():
    words = ["", "a", "\ud800", "가" * 300, "\U0001f600", "Straße", "١٢"]
    found = affixes(words, 2)
    assert found.shape == (len(words), NUM_AFFIXES) and set(np.unique(found)) == {0, 1}
    assert affixes([], 2).shape == (0, NUM_AFFIXES)
