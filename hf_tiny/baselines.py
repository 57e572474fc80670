"""What a user would pick instead: a cheap baseline on the same data, beside every score. scikit-learn is loaded by what needs
it."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from .arguments import flag
from .callbacks import Callback, TrainState
from .processes import on_main

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
MOST_ITEMS = 10_000  # that a baseline learns from
FOLDS = 3  # of the training data, to choose between words and characters
LONGEST_SUFFIX = 4
SAME_FOR_ALL = ("majority",)  # figures of the data, whoever answers
# Words and pairs of them, or what is inside of words: Korean ones have many forms.
WORDS = {"ngram_range": (1, 2), "token_pattern": r"(?u)\b\w+\b"}
CHARACTERS = {"analyzer": "char_wb", "ngram_range": (1, 5)}
VIEWS = {"words": WORDS, "characters": CHARACTERS}


@dataclass(frozen=True, kw_only=True)
class BaselineArguments:
    """What the model is compared with."""

    GROUP: ClassVar[str] = "training"

    baseline: bool = flag(True, "Also score a cheap baseline on the same data, such as a bag of words.")


@dataclass(frozen=True)
class Baseline:
    """figures: of each split, by the metric that the model is scored with."""

    name: str
    figures: dict[str, dict[str, float]]


class BaselineScores(Callback):
    """Joins the figures of a baseline to those of the run: `baseline_accuracy` stands beside `eval_accuracy`,
    `baseline_test_accuracy` beside `test_accuracy`."""

    needs_whole_weights = False

    def __init__(self, measure: Callable[[], Baseline]):
        self.measured = on_main(lambda: self._timed(measure))

    def _timed(self, measure: Callable[[], Baseline]) -> dict[str, float | str]:
        start = time.perf_counter()
        baseline = measure()
        measured: dict[str, float | str] = {"baseline_name": baseline.name}
        for split, figures in baseline.figures.items():
            prefix = "baseline_" if split == "validation" else f"baseline_{split}_"
            measured |= {f"{prefix}{name}": value for name, value in figures.items() if name not in SAME_FOR_ALL}
        shown = "  ".join(f"{name} {value:.3f}" for name, value in baseline.figures["validation"].items())
        logger.info(f"Baseline, {baseline.name}, {time.perf_counter() - start:.1f} s: {shown}")
        return measured

    def on_train_end(self, state: TrainState, model) -> dict:
        return self.measured


def sample(items: Sequence[Item], what: str) -> Sequence[Item]:
    """What a baseline learns from: of many items some, always the same."""
    if len(items) <= MOST_ITEMS:
        return items
    logger.info(f"The baseline learns from {MOST_ITEMS:,} of {len(items):,} {what}.")
    return [items[place] for place in np.sort(np.random.default_rng(0).permutation(len(items))[:MOST_ITEMS])]


# Texts


class TextFeatures:
    """TF-IDF of a text. Of a pair of texts: the product and the difference of both, and their cosine."""

    def __init__(self, view: str):
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.vectorizer = TfidfVectorizer(sublinear_tf=True, **VIEWS[view])

    def fit(self, texts: Sequence[Sequence[str]], labels=None) -> "TextFeatures":
        self.vectorizer.fit([text for both in texts for text in both])
        return self

    def cosines(self, texts: Sequence[Sequence[str]]) -> np.ndarray:
        first, second = self.sides(texts)
        return np.asarray(first.multiply(second).sum(1)).ravel()

    def sides(self, texts: Sequence[Sequence[str]]) -> list:
        return [self.vectorizer.transform(side) for side in zip(*texts, strict=True)]

    def transform(self, texts: Sequence[Sequence[str]]):
        from scipy import sparse

        if len(texts[0]) == 1:
            return self.sides(texts)[0]
        first, second = self.sides(texts)
        cosines = sparse.csr_matrix(self.cosines(texts)[:, None])
        return sparse.hstack([first.multiply(second), abs(first - second), cosines]).tocsr()

    def fit_transform(self, texts: Sequence[Sequence[str]], labels=None):
        return self.fit(texts).transform(texts)


def fit_texts(texts: Sequence[Sequence[str]], labels: Sequence, *, regression: bool) -> tuple[str, Callable]:
    """The name of a bag of words or of characters, whichever is better on folds of the data, and its answers to texts, each a
    text or a pair of them.

    labels: a class number of each text, 0 or 1 for each class, or a number to come close to.
    """
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import LinearSVC

    gold = np.asarray(labels)
    alike = not regression and gold.ndim == 1 and min(Counter(gold.tolist()).values()) >= FOLDS
    folds = (StratifiedKFold if alike else KFold)(FOLDS, shuffle=True, random_state=0)
    learner = Ridge() if regression else LinearSVC() if gold.ndim == 1 else OneVsRestClassifier(LinearSVC())
    learners = {view: make_pipeline(TextFeatures(view), learner) for view in VIEWS}
    scores = {
        view: np.nan_to_num(cross_val_score(learner, texts, gold, cv=folds)).mean()
        for view, learner in learners.items()
        if len(texts) >= 2 * FOLDS
    }
    view = max(scores, key=lambda view: scores[view], default="characters")
    learned = learners[view].fit(texts, gold)
    return f"TF-IDF of {view} + {'ridge regression' if regression else 'linear SVM'}", learned.predict


# Words


def fit_tags(words: Sequence[Sequence[str]], tags: Sequence[Sequence[Item | None]]) -> Callable[[Sequence[str]], list]:
    """Answers with each word's most frequent tag; of a word that is not known, with that of its longest known suffix."""
    counts: defaultdict[str, Counter] = defaultdict(Counter)
    for sentence, own in zip(words, tags, strict=True):
        for word, tag in zip(sentence, own, strict=True):
            if tag is not None:
                for key in (f"={word}", *_suffixes(word)):
                    counts[key][tag] += 1
    best = {key: min(found, key=lambda tag: (-found[tag], tag)) for key, found in counts.items()}
    return lambda sentence: [next(best[key] for key in (f"={w}", *_suffixes(w)) if key in best) for w in sentence]


def _suffixes(word: str) -> list[str]:
    """From the longest to none."""
    return [word[-size:] if size else "" for size in range(min(LONGEST_SUFFIX, len(word)), -1, -1)]
