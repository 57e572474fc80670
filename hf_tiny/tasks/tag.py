"""N → N: a tag for each word: names, parts of speech, Korean morphemes."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_tiny import report
from hf_tiny.arguments import flag
from hf_tiny.data import builtin, conllu, predictions, sources
from hf_tiny.data.batches import Batch, Source
from hf_tiny.data.conllu import LISTS, TREEBANK, Sentence
from hf_tiny.data.splits import read_splits
from hf_tiny.data.windows import IGNORED, Feature, WindowArguments
from hf_tiny.errors import InputError, require
from hf_tiny.evaluation import Evaluation, Results, array, loss_and_items, mean_loss
from hf_tiny.hub import Card
from hf_tiny.metrics import Metric, macro_f1, majority, share
from hf_tiny.start import base_name

logger = logging.getLogger(__name__)

COLUMNS = (".conll", ".bio", ".iob", ".txt")
TAG_FIELDS = {"upos": conllu.UPOS, "xpos": conllu.XPOS, "feats": conllu.FEATS, "morphemes": None}
OPEN_FIELDS = ("xpos", "feats", "morphemes")  # tags that are joined from parts: held-out text has some that are new


@dataclass(frozen=True, kw_only=True)
class TagArguments(WindowArguments):
    """Where words and their tags are."""

    tag_field: str = flag("upos", "What of CoNLL-U is the tag.", choices=tuple(TAG_FIELDS))
    text_column: str = flag("tokens", "The column of a table that holds the list of words.")
    label_column: str = flag("tags", "The column of a table that holds the list of tags.")

    @property
    def open_ended(self) -> bool:
        """Whether held-out tags that the training data lacks are to be expected."""
        return self.tag_field in OPEN_FIELDS


# Rows to features


def read_sentences(arguments: TagArguments) -> dict[str, list[Sentence]]:
    splits = read_splits(
        arguments,
        builtin.treebank_files,
        partial(_file_sentences, arguments=arguments),
        partial(_row_sentence, arguments=arguments),
        "sentences",
        labels=lambda sentences: not arguments.open_ended,
    )
    if arguments.tag_field == "morphemes":
        for split, sentences in splits.items():
            _log_aligned(split, sentences)
    return splits


def _file_sentences(patterns: list[str], option: str, counts: Counter, arguments: TagArguments) -> Iterator[Sentence]:
    for path in sources.expand(patterns, option, (TREEBANK, *COLUMNS, *LISTS), any_suffix=True):
        kind = sources.kind(path)
        if kind == TREEBANK:
            tagged = partial(_tagged, field=arguments.tag_field)
            yield from conllu.read_treebank(path, arguments.encoding_errors, counts, tagged)
        elif arguments.tag_field != "upos":
            raise InputError(
                f"--tag_field {arguments.tag_field}: this is for CoNLL-U, and {path} does not end in {TREEBANK}."
            )
        elif kind in LISTS:
            for place, row in sources.table_rows(path, arguments.encoding_errors, counts):
                yield _row_sentence(kind, place, row, arguments)
        else:
            yield from _column_sentences(path, arguments.encoding_errors, counts)


def _column_sentences(path: str, encoding_errors: str, counts: Counter) -> Iterator[Sentence]:
    """First column the word, last column the tag."""
    width = None
    for block in conllu.blocks(sources.numbered_lines(path, encoding_errors, counts)):
        block = [(number, line) for number, line in block if not line.startswith("-DOCSTART-")]
        rows = [line.split("\t") if "\t" in line else line.split() for _, line in block]
        for (number, _), row in zip(block, rows, strict=True):
            width = width or len(row)
            if len(row) < 2 or len(row) != width:
                raise InputError(
                    f"{path}:{number}: this line has {len(row)} columns. Each line needs a word and, last, its tag, and "
                    f"as many columns as the first line, {width}."
                )
        if rows:
            words, tags = tuple(row[0] for row in rows), tuple(row[-1].strip() for row in rows)
            yield Sentence(words, tags, f"{path}:{block[0][0]}", ".conll", tuple(line for _, line in block))


def _row_sentence(kind: str, place: str, row: dict, arguments: TagArguments) -> Sentence:
    words = sources.list_cell(row, arguments.text_column, place, "--text_column")
    tags = sources.list_cell(row, arguments.label_column, place, "--label_column")
    if len(words) != len(tags):
        raise InputError(f"{place}: there are {len(words)} words and {len(tags)} tags; each word needs one.")
    tags = tuple(None if tag is None else str(tag) for tag in tags)
    return Sentence(tuple(map(str, words)), tags, place, kind, (json.dumps(row, ensure_ascii=False, default=str),))


def _tagged(rows: list[list[str]], name: str, field: str) -> dict:
    if field != "morphemes":
        return {"word_labels": tuple(row[TAG_FIELDS[field]] for row in rows)}
    words = [conllu.characters(row[conllu.FORM]) for row in rows]
    tags = [conllu.morpheme_tags(row[conllu.FORM], row[conllu.LEMMA], row[conllu.XPOS]) for row in rows]
    return {
        "words": tuple("".join(words)),
        "word_labels": tuple(chain.from_iterable(tags)),
        "word_of": tuple(index for index, word in enumerate(words) for _ in word),
    }


def _log_aligned(split: str, sentences: list[Sentence]) -> None:
    words = sum(sentence.word_of[-1] + 1 for sentence in sentences)
    lost = sum(
        len({word for word, tag in zip(sentence.word_of, sentence.word_labels, strict=True) if tag is None})
        for sentence in sentences
    )
    logger.info(f"{split}: the morphemes of {1 - lost / words:.2%} of {words:,} words align; the others are not scored")


def tag_features(
    sentences: Sequence[Sentence], tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], arguments: TagArguments
) -> list[Feature]:
    """input_ids, token_type_ids, and for each token: labels, the tag if it is the first token of a word that belongs to the
    window, and word, the index of that word in the sentence, else -1; example, the index of the sentence. A window
    without any tag is left out."""
    numbers = {None: IGNORED, **{label: number for number, label in enumerate(labels)}}
    tags = [[numbers[tag] for tag in sentence.word_labels] for sentence in sentences]
    features = []
    for example, window in arguments.encoder(tokenizer).words(sentences):
        own = window.own(tags[example])
        if (own != IGNORED).any():
            size, firsts = len(window.feature["input_ids"]), window.spans[:, 0]
            token_labels, word = np.full(size, IGNORED), np.full(size, -1)
            token_labels[firsts] = own
            word[firsts] = np.where(window.owned, np.arange(window.start, window.stop), -1)
            features.append({**window.feature, "labels": token_labels, "word": word, "example": example})
    return features


ABOUT = ("example", "word")  # what of a feature is not for the model


# Figures


class Tags(Metric):
    """Accuracy and macro F1 of single tags. `majority` is the accuracy of always answering with the most frequent tag."""

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        return {
            "accuracy": share(predictions == references),
            "f1": macro_f1(predictions, references),
            "majority": majority(references),
        }


class Entities(Metric):
    """Precision, recall and F1 of whole entities by seqeval, mode="strict", scheme=IOB2: an entity counts when its type
    and both its ends are right, and it begins with B-; an I- that follows no B- or I- of its type is no entity.
    `accuracy` is that of single tags."""

    INPUTS: ClassVar[dict] = {
        "predictions": datasets.List(datasets.Value("string")),
        "references": datasets.List(datasets.Value("string")),
    }

    def _compute(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
        strict = require("seqeval.metrics.v1", "tag")  # what seqeval's own figures call in mode="strict"
        scheme = require("seqeval.scheme", "tag").IOB2
        precision, recall, f1, _ = strict.precision_recall_fscore_support(
            references, predictions, average="micro", scheme=scheme, zero_division=0
        )
        right = [a == b for a, b in zip(chain(*predictions), chain(*references), strict=True)]
        figures = {"f1": float(f1), "precision": float(precision), "recall": float(recall)}
        return {**figures, "accuracy": share(np.array(right))}


def is_entity_scheme(labels: Sequence[str]) -> bool:
    """Whether the tags mark the beginning (B-) and the inside (I-) of entities, and nothing else but O."""
    return any(label.startswith("B-") for label in labels) and all(
        label == "O" or label.startswith(("B-", "I-")) for label in labels
    )


class TagEvaluation(Evaluation):
    """Entities where the tags are B-, I- and O, else single tags."""

    def __init__(self, batches: Source, sentences: Sequence[Sentence], labels: Sequence[str], split: str, field: str):
        super().__init__(batches)
        self.sentences, self.labels, self.split, self.field = sentences, labels, split, field
        self.names = np.array(labels, dtype=object)
        self.metric = Entities() if is_entity_scheme(labels) else Tags()

    def collect(self, outputs: ModelOutput, batch: Batch) -> Results:
        """Every word that its window owns, scored or not (then its label is -100): predictions are of all words."""
        word = batch["about"]["word"]
        words = word >= 0
        return {
            "predicted": array(outputs.logits.argmax(-1)[words]),
            "labels": array(batch["labels"][words]),
            "example": array(batch["about"]["example"][:, None].expand_as(word)[words]),
            "word": array(word[words]),
            **loss_and_items(outputs, batch),
        }

    def compute(self, results: Results) -> dict[str, float]:
        words = scored_words(results)
        found, gold = words["predicted"], words["labels"]
        if is_entity_scheme(self.labels):
            # No entity reaches over the end of a sentence, nor over words that are not scored.
            ends = np.flatnonzero((np.diff(words["example"]) != 0) | (np.diff(words["word"]) != 1)) + 1
            found, gold = ([part.tolist() for part in np.split(self.names[ids], ends)] for ids in (found, gold))
        return {"loss": mean_loss(results), **self.metric.compute(predictions=found, references=gold)}

    def report(self, folder: Path) -> None:
        tags = [["_"] * len(sentence.words) for sentence in self.sentences]  # windows without a tag are not asked
        for example, word, number in zip(*(self.results[n] for n in ("example", "word", "predicted")), strict=True):
            tags[example][word] = self.labels[number]
        rows = (self.predicted(sentence, own) for sentence, own in zip(self.sentences, tags, strict=True))
        predictions.write(rows, folder, f"{self.split}_predictions")
        words = scored_words(self.results)
        report.draw_confusion(folder / f"{self.split}_confusion.png", self.labels, words["labels"], words["predicted"])

    def predicted(self, sentence: Sentence, tags: list[str]) -> tuple[str, str | dict]:
        """The tags as one more last column, as the column `prediction`, or in the tag field of CoNLL-U; of morphemes, as
        `Tags=` in MISC."""
        if sentence.word_of is not None:
            words = [[] for _ in range(sentence.word_of[-1] + 1)]
            for tag, word in zip(tags, sentence.word_of, strict=True):
                words[word].append(tag)
            return TREEBANK, conllu.fill(sentence, {}, {"Tags": [",".join(word) for word in words]})
        if sentence.kind == TREEBANK:
            return TREEBANK, conllu.fill(sentence, {TAG_FIELDS[self.field]: tags})
        if sentence.kind in sources.TABLES:
            return sentence.kind, {**json.loads(sentence.lines[0]), "prediction": tags}
        tab = "\t" if "\t" in sentence.lines[0] else " "
        lines = (f"{line}{tab}{tag}" for line, tag in zip(sentence.lines, tags, strict=True))
        return sentence.kind, "\n".join([*lines, ""])


def scored_words(results: Results) -> Results:
    """The words of the data that have a gold tag, in their order, however windows and batches had them."""
    order = np.lexsort((results["word"], results["example"]))
    words = {name: results[name][order] for name in ("predicted", "labels", "example", "word")}
    return {name: values[words["labels"] != IGNORED] for name, values in words.items()}


def tag_card(recipe, sentences: dict[str, list[Sentence]], labels: Sequence[str]) -> Card:
    return Card(
        template="finetuned",
        data=recipe.data_name("treebank of Python source"),
        pipeline_tag="token-classification",
        pipeline="token-classification",
        task="A tagger of words",
        base=base_name(recipe),
        example=" ".join(sentences["validation"][0].words)[:100],
        labels=labels,
        scoring="Each word is tagged by its first token and scored once. Where the tags are B-, I- and O, F1 is of whole "
        'entities (seqeval, mode="strict", scheme IOB2); else it is the mean over tags.',
    )
