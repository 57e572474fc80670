"""N → path: another word for each word: the head of each word, or the subject of each predicate."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import datasets
import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput

from hf_tiny import report
from hf_tiny.arguments import flag
from hf_tiny.data import builtin, conllu, sources
from hf_tiny.data.batches import Batch
from hf_tiny.data.conllu import LISTS, TREEBANK, Sentence
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.windows import IGNORED, Feature, WindowArguments
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Results, array, mean_loss
from hf_tiny.metrics import Metric, share
from hf_tiny.models import HfTinyTokenLinkingConfig, HfTinyTokenLinkingModel
from hf_tiny.models.trees import maximum_spanning_tree
from hf_tiny.models.words import affixes, split_words
from hf_tiny.tasks import Line, Task, TaskEvaluation, label_names

logger = logging.getLogger(__name__)

TREE_COLUMNS = ("tokens", "upos", "head", "deprel")  # as the treebanks of the Hub have them
KLUE_COLUMNS = ("word_form", "pos", "head", "deprel")
PREDICATES, PREDICATE = ("VERB", "ADJ"), "*"
OMITTED = "omitted"
DESCRIBED = {  # by --task: what the model is, and how it is scored
    "parse": (
        "A dependency parser",
        "By the rules of CoNLL 2018 on given words: all words count, punctuation too; `las` ignores the subtypes of "
        "relations, `las_full` does not.",
    ),
    "subject": (
        "A finder of subjects",
        "Over the predicates (VERB and ADJ): the right subject, or rightly that there is none. `majority` is the share "
        "of predicates without one.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ParseArguments(WindowArguments):
    """What the links between words are."""

    task: str = flag(
        "parse", "parse: the head of each word; subject: the subject of each predicate.", choices=tuple(DESCRIBED)
    )


class LinkingOn:
    """Makes a new linking head on an encoder, as an Auto class makes other heads."""

    SETTINGS: ClassVar[dict] = {"affix_buckets": 16_384, "lstm_size": 256}

    @classmethod
    def from_pretrained(cls, name: str, **config) -> HfTinyTokenLinkingModel:
        return HfTinyTokenLinkingModel.from_encoder(name, **cls.SETTINGS, **config)

    @classmethod
    def from_config(cls, encoder: PreTrainedConfig, **config) -> HfTinyTokenLinkingModel:
        return HfTinyTokenLinkingModel(HfTinyTokenLinkingConfig(encoder=encoder, **cls.SETTINGS, **config))


# Rows to sentences


def _linked(rows: list[list[str]], name: str) -> dict:
    return {"heads": conllu.heads(rows, name), "word_labels": tuple(row[conllu.DEPREL] for row in rows)}


def _unlinked(rows: list[list[str]], name: str) -> dict:
    return {"heads": (None,) * len(rows), "word_labels": (None,) * len(rows)}


def _marked(line: str, place: str) -> Sentence:
    """Raw text in which PREDICATE stands before each predicate."""
    sentence = conllu.from_text(line.replace(PREDICATE, ""), place, _unlinked)
    marks = [number for number, word in enumerate(split_words(line)) if word == PREDICATE]
    predicates = {number - before for before, number in enumerate(marks)}
    upos = tuple(PREDICATES[0] if number in predicates else "_" for number in range(len(sentence.words)))
    return replace(sentence, upos=upos)


def subjects(sentences: Sequence[Sentence]) -> list[Sentence]:
    """The sentences with, for each predicate, its subject, or 0 when it is omitted; other words are not scored."""
    found, dropped = [], 0
    for sentence in sentences:
        of_head: dict[int, list] = {}
        for place, (head, relation) in enumerate(zip(sentence.heads, sentence.word_labels, strict=True), 1):
            if head is not None and relation is not None and relation.split(":")[0] == "nsubj":
                of_head.setdefault(head, []).append((abs(place - head), place, relation))
        heads: list[int | None] = [None] * len(sentence.words)
        relations: list[str | None] = [None] * len(sentence.words)
        for place, upos in enumerate(sentence.upos, 1):
            if upos in PREDICATES:
                _, heads[place - 1], relations[place - 1] = min(of_head.pop(place, [(0, 0, OMITTED)]))
        dropped += sum(map(len, of_head.values()))
        found.append(replace(sentence, heads=tuple(heads), word_labels=tuple(relations)))
    logger.info(f"{dropped:,} subjects of words that are neither {' nor '.join(PREDICATES)} are left out")
    return found


# Figures


class Parsing(Metric):
    """Attachment scores of dependency trees by the rules of the CoNLL 2018 shared task, on given words: every word
    counts, punctuation too. `uas`: the right head. `las`: the right head and relation, without the relation's subtype
    (what follows the colon). `las_full`: with it. `label_accuracy`: the right relation without its subtype, whatever
    the head."""

    INPUTS: ClassVar[dict] = {
        **Metric.INPUTS,
        "relations": datasets.Value("string"),
        "reference_relations": datasets.Value("string"),
    }

    def _compute(
        self,
        predictions: Sequence[int],
        references: Sequence[int],
        relations: Sequence[str],
        reference_relations: Sequence[str],
    ) -> dict[str, float]:
        attached = np.asarray(predictions) == np.asarray(references)
        pairs = list(zip(relations, reference_relations, strict=True))
        same = np.array([found == gold for found, gold in pairs], dtype=bool)
        alike = np.array([found.split(":")[0] == gold.split(":")[0] for found, gold in pairs], dtype=bool)
        return {
            "uas": share(attached),
            "las": share(attached & alike),
            "las_full": share(attached & same),
            "label_accuracy": share(alike),
        }


class Subjects(Metric):
    """How often a predicate's subject was found: 0 says that it is omitted. `overt_accuracy` is over the predicates that
    have one, `omitted_accuracy` over the others; `majority` is the accuracy of always answering "omitted"."""

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        found, gold = np.asarray(predictions), np.asarray(references)
        right, omitted = found == gold, gold == 0
        return {
            "subject_accuracy": share(right),
            "overt_accuracy": share(right[~omitted]),
            "omitted_accuracy": share(right[omitted]),
            "majority": share(omitted),
        }


class LinkEvaluation(TaskEvaluation):
    def answers(self, outputs: ModelOutput, batch: Batch) -> Results:
        about = batch["about"]
        sizes, width = about["num_words"], outputs.logits.shape[1]
        words = torch.arange(width, device=sizes.device) < sizes[:, None]  # (windows, words) that are not padding
        heads = torch.arange(width + 1, device=sizes.device) <= sizes[:, None]
        pairs = words[:, :, None] & heads[:, None, :]
        return {
            "scores": array(outputs.logits[pairs]),
            "best_labels": array(outputs.label_logits.argmax(-1)[pairs].to(torch.int32)),
            **{name: array(about[name]) for name in ("num_words", "first_word", "example")},
            **{name: array(about[name][words]) for name in ("owned", "gold_heads", "gold_labels")},
        }

    def compute(self, results: Results) -> dict[str, float]:
        sentences = [
            (*decode(one, self.task.task), one["gold_heads"], one["gold_labels"]) for _, one in whole_sentences(results)
        ]
        heads, found, gold_heads, gold_found = map(np.concatenate, zip(*sentences, strict=True))
        scored = gold_heads != IGNORED
        relations = np.array(self.task.labels, dtype=object)
        links = (heads[scored], relations[found[scored]], gold_heads[scored], relations[gold_found[scored]])
        return {"loss": mean_loss(results), **score_links(self.metric, *(side.tolist() for side in links))}

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        decoded = {example: decode(one, self.task.task) for example, one in whole_sentences(self.results)}
        relations, nothing = np.array(self.task.labels, dtype=object), np.empty(0, dtype=np.int64)
        for example, sentence in enumerate(self.items):
            heads, numbers = decoded.get(example, (nothing, nothing))
            # Windows in which nothing is scored are not asked: some words at the end may have no answer.
            rest = [None] * (len(sentence.words) - len(heads))
            yield self.predicted(sentence, heads.tolist() + rest, relations[numbers].tolist() + rest)

    def predicted(self, sentence: Sentence, heads: list, relations: list) -> tuple[str, str | dict]:
        """Heads and relations in HEAD and DEPREL of CoNLL-U, subjects (of predicates only) as `Subject=` in MISC; in the row
        of a table as the column `prediction`, pairs of head and relation."""
        if self.task.task == "subject":
            asked = [gold is not None for gold in sentence.heads]
            heads = [head if scored else None for head, scored in zip(heads, asked, strict=True)]
        if sentence.kind in LISTS:
            row = json.loads(sentence.lines[0])
            return sentence.kind, {**row, "prediction": list(zip(heads, relations, strict=True))}
        if self.task.task == "subject":
            found = [None if head is None else str(head) for head in heads]
            return TREEBANK, conllu.fill(sentence, {}, {"Subject": found})
        columns = {
            conllu.HEAD: ["_" if head is None else str(head) for head in heads],
            conllu.DEPREL: [relation or "_" for relation in relations],
            conllu.DEPS: ["_"] * len(heads),
        }
        return TREEBANK if sentence.kind == TREEBANK else ".conll", conllu.fill(sentence, columns)


def score_links(
    metric: Metric, heads: list, relations: list, gold_heads: list, gold_relations: list
) -> dict[str, float]:
    links = {"predictions": heads, "references": gold_heads}
    if isinstance(metric, Parsing):
        links |= {"relations": relations, "reference_relations": gold_relations}
    return metric.compute(**links)


def whole_sentences(results: Results) -> Iterator[tuple[int, Results]]:
    """Each example, in order, put together from its windows: `scores` and `best_labels` (words, words + 1), `gold_heads`
    and `gold_labels` (words,). A word's row comes from the one window that owns the word; a pair that no window has seen,
    or of a word with itself, scores -inf."""
    sizes, first_word, example = results["num_words"], results["first_word"], results["example"]
    pair_ends, word_ends = np.cumsum(sizes * (sizes + 1)), np.cumsum(sizes)
    order = np.argsort(example, kind="stable")
    for windows in np.split(order, np.flatnonzero(np.diff(example[order])) + 1):
        length = int((first_word[windows] + sizes[windows]).max())
        sentence = {
            "scores": np.full((length, length + 1), -np.inf),
            "best_labels": np.zeros((length, length + 1), dtype=np.int64),
            "gold_heads": np.full(length, IGNORED),
            "gold_labels": np.full(length, IGNORED),
        }
        for window in windows:
            size, first = int(sizes[window]), int(first_word[window])
            pairs = slice(pair_ends[window] - size * (size + 1), pair_ends[window])
            words = slice(word_ends[window] - size, word_ends[window])
            owned = np.flatnonzero(results["owned"][words])
            heads = np.r_[0, first + 1 : first + size + 1]
            for name in ("scores", "best_labels"):
                sentence[name][(first + owned)[:, None], heads] = results[name][pairs].reshape(size, size + 1)[owned]
            for name in ("gold_heads", "gold_labels"):
                sentence[name][first + owned] = results[name][words][owned]
        np.fill_diagonal(sentence["scores"][:, 1:], -np.inf)
        yield int(example[windows[0]]), sentence


def decode(sentence: Results, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Heads (0, or a word counted from 1) and label ids. "parse": the best tree; "subject": each word's best, by itself."""
    scores = sentence["scores"]
    heads = maximum_spanning_tree(scores) if task == "parse" else scores.argmax(1)
    return heads, sentence["best_labels"][np.arange(len(heads)), heads]


class LinkTask(Task):
    """Of trees, or of subjects."""

    ARGUMENTS, WHAT, FILES, EVALUATION = ParseArguments, "sentences", (*conllu.LAYOUTS, *LISTS), LinkEvaluation
    BUILTIN, BUILTIN_FILES = "treebank of Python source", builtin.treebank_files
    open_ended = True  # treebanks have rare relations
    ABOUT = ("example", "first_word", "num_words", "owned", "gold_heads", "gold_labels")

    @property
    def task(self) -> str:
        if self.model is None:
            return self.arguments.task
        return "parse" if self.model.config.tree else "subject"

    # Reading

    def splits(self) -> dict[str, list[Sentence]]:
        splits = self.read_splits()
        return splits if self.task == "parse" else {split: subjects(part) for split, part in splits.items()}

    def from_file(self, path: str, decoding: Decoding, labelled: bool = True) -> Iterable[Sentence]:
        if sources.kind(path) in conllu.LAYOUTS:
            return conllu.read_treebank(path, decoding, _linked if labelled else _unlinked)
        return super().from_file(path, decoding, labelled)

    def from_row(self, kind: str, place: str, row: dict, labelled: bool = True) -> Sentence:
        names = KLUE_COLUMNS if KLUE_COLUMNS[0] in row else TREE_COLUMNS
        if not labelled:
            row = {**{name: ["_"] * len(row.get(names[0]) or []) for name in names[1:]}, **row}
        words, *columns = (
            list(map(str, sources.list_cell(row, name, place, "a column of this name"))) for name in names
        )
        for name, values in zip(names[1:], columns, strict=True):
            if len(values) != len(words):
                raise InputError(
                    f"{place}: there are {len(words)} words and {len(values)} in {name!r}; each word needs one."
                )
        rows = [
            [str(number), word, "_", upos, "_", "_", head, relation, "_", "_"]
            for number, (word, upos, head, relation) in enumerate(zip(words, *columns, strict=True), 1)
        ]
        lines = (json.dumps(row, ensure_ascii=False, default=str),)
        fields = (_linked if labelled else _unlinked)(rows, f"{place}: in this row")
        return Sentence(tuple(words), place=place, kind=kind, lines=lines, upos=tuple(columns[0]), **fields)

    def from_texts(self, lines: list[Line]) -> list[Sentence]:
        """Of subjects, predicates have an asterisk before them."""
        if self.task == "parse":
            return [conllu.from_text(line, place, _unlinked) for place, line in lines]
        return self.asked([_marked(line, place) for place, line in lines])

    def read(self, patterns: Sequence[str], labelled: bool) -> list[Sentence]:
        return self.asked(super().read(patterns, labelled))

    def asked(self, sentences: list[Sentence]) -> list[Sentence]:
        """Of subjects only those of predicates are asked for."""
        if self.task == "parse":
            return sentences
        for sentence in sentences:
            if set(sentence.upos) <= {"_"}:
                raise InputError(
                    f"{sentence.place}: which words are predicates is not known. Write {PREDICATE} before each, as in 나는 책을 "
                    f"{PREDICATE}읽었다, or give CoNLL-U with {' and '.join(PREDICATES)} in its column UPOS: a model of "
                    "finetune_tagger.py writes such files."
                )
        return subjects(sentences)

    # Features and the model

    def texts(self, items: list[Sentence]) -> list[str]:
        return [" ".join(sentence.words) for sentence in items]

    def head(self, items: list[Sentence]) -> tuple:
        return LinkingOn, {"tree": self.task == "parse", **label_names(self.labels)}

    def features(self, items: list[Sentence], *, labelled: bool = True, training: bool = False) -> list[Feature]:
        """input_ids, token_type_ids, and for each of the W words of the window: word_spans (W, 2), its first token and the
        one after its last; affixes (W, NUM_AFFIXES); owned; gold_heads and gold_labels, -100 if it is not owned or not
        scored, with heads counted in the sentence; heads and labels, to learn from: counted in the window, and -100 also if
        the head is outside of it. first_word is the index of the first of them in the sentence, example that of the
        sentence. A window of labelled data in which nothing is scored is left out."""
        numbers: dict[str | None, int] = {label: number for number, label in enumerate(self.labels or ())}
        numbers[None] = IGNORED
        buckets, features = self.model.config.affix_buckets, []
        for example, window in self.arguments.encoder(self.processor).words(items):
            sentence = items[example]
            gold_heads = window.own([IGNORED if head is None else head for head in sentence.heads])
            gold_labels = window.own([numbers[relation] for relation in sentence.word_labels])
            outside = (gold_heads != 0) & ((gold_heads <= window.start) | (gold_heads > window.stop))
            if not labelled or (gold_heads != IGNORED).any():
                features.append(
                    {
                        **window.feature,
                        "word_spans": window.spans,
                        "affixes": affixes(sentence.words[window.start : window.stop], buckets),
                        "heads": np.where(outside, IGNORED, np.where(gold_heads == 0, 0, gold_heads - window.start)),
                        "labels": np.where(outside, IGNORED, gold_labels),
                        "gold_heads": gold_heads,
                        "gold_labels": gold_labels,
                        "owned": window.owned,
                        "first_word": window.start,
                        "num_words": len(gold_heads),
                        "example": example,
                    }
                )
        return features

    # The page of `hf-tiny demo`

    SHOWS = {"links between words": "html"}

    def show(self, text: str) -> list:
        """Of subjects, from each predicate to its subject."""
        judged = self.judged(text)
        (sentence,), ((_, one),) = judged.items, whole_sentences(judged.results)
        heads, numbers = decode(one, self.task)
        asked = [self.task == "parse" or gold is not None for gold in sentence.heads]
        drawn = [head if wanted else None for head, wanted in zip(heads.tolist(), asked, strict=True)]
        return [report.draw_arcs(sentence.words, drawn, [(self.labels or [])[number] for number in numbers])]

    # Figures

    def metric(self, items: Sequence[Sentence]) -> Metric:
        return Parsing() if self.task == "parse" else Subjects()

    def fit_baseline(self, items: list[Sentence]) -> tuple:
        """Each word is attached to its neighbour on the side that the treebank prefers, by the most frequent relation of such
        links; what has no neighbour there is the root. Of subjects: all are omitted."""
        links = [
            (head - place, relation)
            for tree in items
            for place, (head, relation) in enumerate(zip(tree.heads, tree.word_labels, strict=True), 1)
            if head
        ]
        sides = Counter(offset for offset, _ in links if abs(offset) == 1)
        side = sides.most_common(1)[0][0] if sides else 1
        usual = (
            Counter(relation for offset, relation in links if offset == side).most_common(1)[0][0] if sides else "root"
        )

        def score(part: Sequence[Sentence]) -> dict[str, float]:
            pairs = []
            for tree in part:
                neighbours = range(1 + side, 1 + side + len(tree.words))
                heads = [head if head <= len(tree.words) and self.task == "parse" else 0 for head in neighbours]
                found = ((head, usual if head else "root") for head in heads)
                pairs += zip(found, zip(tree.heads, tree.word_labels, strict=True), strict=True)
            scored = [(*found, *gold) for found, gold in pairs if gold[0] is not None]
            return score_links(self.metric(part), *map(list, zip(*scored, strict=True)))

        neighbour = "next" if side == 1 else "previous"
        name = f"each word depends on the {neighbour} one" if self.task == "parse" else "every subject is omitted"
        return name, score

    def described(self, shown: Sentence) -> dict:
        task, scoring = DESCRIBED[self.task]
        example = (shown.text or " ".join(shown.words))[:100]
        return {"pipeline": "dependency-parsing", "task": task, "example": example, "scoring": scoring}
