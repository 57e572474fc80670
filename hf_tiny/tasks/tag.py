"""N → N: a tag for each word: names, parts of speech, Korean morphemes."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any, ClassVar
from unicodedata import normalize

import datasets
import numpy as np
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_tiny import report
from hf_tiny.arguments import flag
from hf_tiny.baselines import fit_tags, sample
from hf_tiny.data import builtin, conllu, sources
from hf_tiny.data.batches import Batch
from hf_tiny.data.conllu import LISTS, TREEBANK, Sentence
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.windows import IGNORED, Feature, WindowArguments
from hf_tiny.errors import InputError, require
from hf_tiny.evaluation import Results, array, mean_loss
from hf_tiny.metrics import Metric, macro_f1, majority, share
from hf_tiny.models.words import split_words
from hf_tiny.tasks import Line, Task, TaskEvaluation, label_names
from hf_tiny.tasks.classify import label_name
from hf_tiny.tokenizer import is_wordpiece, split_into_characters

logger = logging.getLogger(__name__)

COLUMNS = (".conll", ".bio", ".iob", ".txt", ".tsv")
MOST_HIDDEN = 0.05  # of the tags of characters may begin inside of a token
COMMENT = "## "  # begins lines before a sentence, as in KLUE
TAG_FIELDS = {"upos": conllu.UPOS, "xpos": conllu.XPOS, "feats": conllu.FEATS, "morphemes": None}
UNIT = "tagged_unit"  # a field of the model's configuration: words or characters
OPEN_FIELDS = ("xpos", "feats", "morphemes")  # tags that are joined from parts: held-out text has some that are new


@dataclass(frozen=True, kw_only=True)
class TagArguments(WindowArguments):
    """Where words and their tags are."""

    tag_field: str | None = flag(None, "What of CoNLL-U is the tag; upos by default.", choices=tuple(TAG_FIELDS))
    text_column: str = flag("tokens", "The column of a table that holds the list of words.")
    label_column: str = flag("tags", "The column of a table that holds the list of tags.")
    character_tokens: bool | None = flag(
        None, "Make a token of each character that has a tag; by default where many tags begin inside of a token."
    )

    @property
    def field(self) -> str:
        """What of CoNLL-U is the tag."""
        return self.tag_field or "upos"


# Rows to sentences


def _are_characters(sentences: Iterable[Sentence]) -> bool:
    """Whether all words are single characters, spaces among them."""
    words = {word for sentence in sentences for word in sentence.words}
    return any(word.isspace() for word in words) and max(map(len, words)) == 1


def _untagged(sentence: Sentence) -> Sentence:
    return replace(sentence, word_labels=(None,) * len(sentence.words))


def _as_text(sentence: Sentence) -> Sentence:
    """Of a sentence whose words are single characters, spaces among them: the text, and which of it is tagged."""
    places = tuple(place for place, character in enumerate(sentence.words) if not character.isspace())
    words = tuple(sentence.words[place] for place in places)
    tags = tuple(sentence.word_labels[place] for place in places)
    return replace(sentence, words=words, word_labels=tags, text="".join(sentence.words), places=places)


def _column_sentences(path: str, decoding: Decoding, labelled: bool = True) -> Iterator[Sentence]:
    """First column the word, last column the tag, which those that are not labelled need not have."""
    width = None
    for block in conllu.blocks(sources.numbered_lines(path, decoding)):
        block = [(number, line) for number, line in block if not line.startswith("-DOCSTART-")]
        lines = tuple(line for _, line in block)
        comments = len(_comments(lines))
        rows = [line.split("\t") if "\t" in line else line.split() for line in lines[comments:]]
        for (number, _), row in zip(block[comments:], rows, strict=True):
            width = width or len(row)
            if len(row) < 1 + labelled or len(row) != width:
                raise InputError(
                    f"{path}:{number}: this line has {len(row)} columns. Each line needs a word and, last, its tag, and "
                    f"as many columns as the first line, {width}."
                )
        if rows:
            words, tags = tuple(row[0] for row in rows), tuple(normalize("NFC", row[-1].strip()) for row in rows)
            if len(words) > 1 and words == tuple(map(str, range(1, len(words) + 1))):
                raise InputError(
                    f"{path}:{block[comments][0]}: the words are the numbers 1, 2, ... as in a treebank. CoNLL-U needs a name that "
                    f"ends in {TREEBANK}; KLUE's trees are for finetune_parser.py."
                )
            yield Sentence(words, tags, f"{path}:{block[0][0]}", ".conll", lines)


def _comments(lines: Sequence[str]) -> list[str]:
    return list(takewhile(lambda line: line.startswith(COMMENT), lines))


def _tagged(rows: list[list[str]], name: str, field: str) -> dict:
    if (column := TAG_FIELDS[field]) is not None:
        return {"word_labels": tuple(row[column] for row in rows)}
    words = [conllu.characters(row[conllu.FORM]) for row in rows]
    text, begins = conllu.raw_text(rows)
    tags = [conllu.morpheme_tags(row[conllu.FORM], row[conllu.LEMMA], row[conllu.XPOS]) for row in rows]
    return {
        "words": tuple("".join(words)),
        "word_labels": tuple(chain.from_iterable(tags)),
        "text": text,
        "places": tuple(begin + place for begin, word in zip(begins, words, strict=True) for place in range(len(word))),
        "word_of": tuple(index for index, word in enumerate(words) for _ in word),
    }


def _log_aligned(split: str, sentences: list[Sentence]) -> None:
    words = sum(sentence.word_of[-1] + 1 for sentence in sentences)
    lost = sum(
        len({word for word, tag in zip(sentence.word_of, sentence.word_labels, strict=True) if tag is None})
        for sentence in sentences
    )
    logger.info(f"{split}: the morphemes of {1 - lost / words:.2%} of {words:,} words align; the others are not scored")


def tag_tokenizer(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sentence], arguments: TagArguments
) -> PreTrainedTokenizerBase:
    """The tokenizer, with a token for each character where characters have tags and the arguments, or the tags, want it
    so."""
    if sentences[0].places is None:
        return tokenizer
    wanted, share = arguments.character_tokens, hidden_tags(sentences, tokenizer, arguments)
    said = f"{share:.1%} of the tags begin inside of a token, which can have one only"
    if wanted or (wanted is None and share > MOST_HIDDEN and is_wordpiece(tokenizer)):
        logger.info(f"{said}: each character becomes a token")
        return split_into_characters(tokenizer)
    if share:
        logger.warning(f"{said}: they are not found. With --character_tokens each character is a token")
    return tokenizer


def hidden_tags(sentences: Sequence[Sentence], tokenizer: PreTrainedTokenizerBase, arguments: TagArguments) -> float:
    """The share of tags that begin at a character which has no token of its own."""
    hidden = total = 0
    for sentence, tokens in zip(sentences, arguments.encoder(tokenizer).word_ids(sentences), strict=True):
        before: str | None = None
        for tag, own in zip(sentence.word_labels, tokens, strict=True):
            begins = tag is not None and (before is None or tag != continued(before))
            total, hidden, before = total + begins, hidden + (begins and not own), tag
    return hidden / max(1, total)


def continued(tag: str) -> str:
    """The tag of a character that belongs to the one before."""
    return f"I-{tag[2:]}" if tag.startswith("B-") else tag


# Figures


class Tags(Metric):
    """Accuracy and macro F1 of single tags. `majority` is the accuracy of always answering with the most frequent tag."""

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        found, gold = np.asarray(predictions), np.asarray(references)
        return {"accuracy": share(found == gold), "f1": macro_f1(found, gold), "majority": majority(gold)}


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


def score_tags(runs: Sequence[Sequence[tuple[str, str]]], labels: Sequence[str], metric: Metric) -> dict[str, float]:
    """runs: found and gold tags. No entity reaches from one to the next. Gold tags are read as found ones are: a syllable of
    several morphemes that goes on with the one before (떠나: B-VV, I-VV+EC) is an entity by itself."""
    sides: list[list] = [[[pair[side] for pair in run] for run in runs] for side in (0, 1)]
    if isinstance(metric, Entities):
        sides[1] = list(map(consistent, sides[1]))
    else:
        numbers = {label: number for number, label in enumerate(labels)}
        sides = [[numbers.get(tag, -1) for tag in chain(*side)] for side in sides]
    return metric.compute(predictions=sides[0], references=sides[1])


class TagEvaluation(TaskEvaluation):
    """Entities where the tags are B-, I- and O, else single tags."""

    def answers(self, outputs: ModelOutput, batch: Batch) -> Results:
        """Every word that its window owns, scored or not: predictions are of all words."""
        word = batch["about"]["word"]
        words = word >= 0
        return {
            "predicted": array(outputs.logits.argmax(-1)[words]),
            "example": array(batch["about"]["example"][:, None].expand_as(word)[words]),
            "word": array(word[words]),
        }

    def decoded(self, results: Results) -> list[list[str]]:
        """The tags of all words, however windows and batches had them; `_` where none was asked for."""
        found = [["_"] * len(sentence.words) for sentence in self.items]
        for example, word, number in zip(results["example"], results["word"], results["predicted"], strict=True):
            found[example][word] = self.task.labels[number]
        for sentence, tags in zip(self.items, found, strict=True):
            if sentence.places is not None:
                for place, tag in enumerate(tags):  # a token also stands for the characters after its first
                    tags[place] = (continued(tags[place - 1]) if place else "O") if tag == "_" else tag
        return [consistent(tags) for tags in found] if isinstance(self.metric, Entities) else found

    def scored(self, results: Results) -> list[list[tuple[str, str]]]:
        """Found and gold tags of the words that have a gold one. A list ends with the sentence, and before words that are
        not scored: no entity reaches over them. Sentences of batches that were not evaluated are left out."""
        return [
            list(run)
            for sentence, tags in zip(self.items, self.decoded(results), strict=True)
            if set(tags) != {"_"}
            for has_tag, run in groupby(zip(tags, sentence.word_labels, strict=True), lambda pair: pair[1] is not None)
            if has_tag
        ]

    def compute(self, results: Results) -> dict[str, float]:
        return {"loss": mean_loss(results), **score_tags(self.scored(results), self.task.labels, self.metric)}

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        decoded = self.decoded(self.results)
        return (self.predicted(sentence, tags) for sentence, tags in zip(self.items, decoded, strict=True))

    def report(self, folder: Path) -> None:
        super().report(folder)
        labels = self.task.labels
        numbers = {label: number for number, label in enumerate(labels)}
        pairs = [(numbers[gold], numbers[f]) for f, gold in chain(*self.scored(self.results)) if f in numbers]
        report.draw_confusion(folder / f"{self.split}_confusion.png", labels, *np.array(pairs).reshape(-1, 2).T)

    def predicted(self, sentence: Sentence, tags: list[str]) -> tuple[str, str | dict]:
        """The tags as one more last column, as the column `prediction`, or in the tag field of CoNLL-U; of morphemes, as
        `Tags=` in MISC."""
        if sentence.word_of:
            words: list[list[str]] = [[] for _ in range(sentence.word_of[-1] + 1)]
            for tag, word in zip(tags, sentence.word_of, strict=True):
                words[word].append(tag)
            return TREEBANK, conllu.fill(sentence, {}, {"Tags": [",".join(word) for word in words]})
        column = TAG_FIELDS[self.task.arguments.field]
        if sentence.kind == TREEBANK and column is not None:
            return TREEBANK, conllu.fill(sentence, {column: tags})
        if sentence.places is not None:
            tags = with_spaces(sentence, tags)
        if sentence.kind in sources.TABLES:
            return sentence.kind, {**json.loads(sentence.lines[0]), "prediction": tags}
        comments = _comments(sentence.lines)
        lines = sentence.lines[len(comments) :]
        tab = "\t" if "\t" in lines[0] or sentence.places is not None else " "
        tagged = (f"{line}{tab}{tag}" for line, tag in zip(lines, tags, strict=True))
        return sentence.kind, "\n".join([*comments, *tagged, ""])


def consistent(tags: list[str]) -> list[str]:
    """An I- that goes on with nothing begins an entity: so transformers' pipelines understand it."""
    found: list[str] = []
    for tag in tags:
        begins = tag.startswith("I-") and (not found or found[-1][2:] != tag[2:])
        found.append(f"B-{tag[2:]}" if begins else tag)
    return found


def spans(text: str, words: Sequence[str], tags: Sequence[str], entities: bool) -> list[tuple[str, str | None]]:
    """A text in pieces with their tags: whole entities, or words; None for what is between."""
    found: list[tuple[str, str | None]] = []
    done = 0
    for word, tag in zip(words, tags, strict=True):
        start = text.index(word, done)
        gap, done = text[done:start], start + len(word)
        name = None if tag in ("O", "_") else tag[2:] if entities else tag
        if found and name == found[-1][1] and (name is None or (entities and tag.startswith("I-"))):
            found[-1] = (found[-1][0] + gap + word, name)
        else:
            found += [(gap, None), (word, name)] if gap else [(word, name)]
    return found


def with_spaces(sentence: Sentence, tags: list[str]) -> list[str]:
    """The tags of all characters of the text: a space inside of an entity belongs to it."""
    own = dict(zip(sentence.places or (), tags, strict=True))
    found, following = [], "O"
    for place in reversed(range(len(sentence.text))):
        following = own.get(place, following if following.startswith("I-") else "O")
        found.append(following)
    return found[::-1]


class TagTask(Task):
    ARGUMENTS, WHAT, FILES, EVALUATION = TagArguments, "sentences", (TREEBANK, *COLUMNS, *LISTS), TagEvaluation
    BUILTIN, BUILTIN_FILES = "treebank of Python source", builtin.treebank_files
    ABOUT = ("example", "word")

    # Reading

    def splits(self) -> dict[str, list[Sentence]]:
        splits = self.read_splits(labels=lambda sentences: not self.open_ended)
        if self.arguments.tag_field == "morphemes":
            for split, sentences in splits.items():
                _log_aligned(split, sentences)
        if _are_characters(chain.from_iterable(splits.values())):
            return {split: [_as_text(sentence) for sentence in part] for split, part in splits.items()}
        return splits

    @property
    def of_characters(self) -> bool:
        """Whether a trained model tags characters."""
        return self.model is not None and self.model.config.to_dict().get(UNIT) == "characters"

    def from_file(self, path: str, decoding: Decoding, labelled: bool = True) -> Iterator[Sentence]:
        kind, field = sources.kind(path), self.arguments.tag_field
        found: Iterable[Sentence] = super().from_file(path, decoding, labelled)
        if kind == TREEBANK:
            found = conllu.read_treebank(path, decoding, partial(_tagged, field=self.arguments.field))
        elif field is not None and labelled:
            raise InputError(f"--tag_field {field}: this is for CoNLL-U, and {path} does not end in {TREEBANK}.")
        elif kind not in LISTS:
            found = _column_sentences(path, decoding, labelled)
        found = list(found)
        as_text = self.of_characters and _are_characters(found)
        for sentence in found if labelled else map(_untagged, found):
            yield _as_text(sentence) if as_text else sentence

    def from_row(self, kind: str, place: str, row: dict, labelled: bool = True) -> Sentence:
        words, column = (
            sources.list_cell(row, self.arguments.text_column, place, "--text_column"),
            self.arguments.label_column,
        )
        tags = sources.list_cell(row, column, place, "--label_column") if labelled else [None] * len(words)
        if len(words) != len(tags):
            raise InputError(f"{place}: there are {len(words)} words and {len(tags)} tags; each word needs one.")
        names = tuple(None if tag is None else label_name(tag, place, column) for tag in tags)
        lines = (json.dumps(row, ensure_ascii=False, default=str),)
        return Sentence(tuple(map(str, words)), names, place, kind, lines)

    def from_texts(self, lines: list[Line]) -> Iterator[Sentence]:
        """Morphemes are written as CoNLL-U, other tags as columns."""
        for place, line in lines:
            if self.arguments.tag_field == "morphemes":
                sentence = conllu.from_text(line, place, partial(_tagged, field="morphemes"))
            else:
                words = tuple(line) if self.of_characters else tuple(split_words(line))
                sentence = Sentence(words, (), place, ".conll", words)
            sentence = _untagged(sentence)
            yield _as_text(sentence) if self.of_characters and sentence.places is None else sentence

    def are_labelled(self, lines: list[Line]) -> bool:
        """Columns: a word, and last a tag."""
        rows = [line.split() for _, line in lines if not line.startswith((COMMENT, "-DOCSTART-"))]
        return all(len(row) > 1 and row[-1] in (self.known or ()) for row in rows)

    # Features and the model

    @property
    def open_ended(self) -> bool:
        return self.arguments.field in OPEN_FIELDS

    def texts(self, items: list[Sentence]) -> list[str]:
        return [sentence.tokenized_text for sentence in items]

    def start_tokenizer(self, items: list[Sentence], texts) -> PreTrainedTokenizerBase:
        return tag_tokenizer(super().start_tokenizer(items, texts), items, self.arguments)

    def head(self, items: list[Sentence]) -> tuple:
        return AutoModelForTokenClassification, label_names(self.labels)

    def start(self, splits: dict[str, list[Sentence]]) -> dict[str, list[Feature]]:
        """The configuration then says what the tags are of: native models take no such field when they are made."""
        features = super().start(splits)
        self.model.config.update({UNIT: "words" if splits["train"][0].places is None else "characters"})
        return features

    def features(self, items: list[Sentence], *, labelled: bool = True, training: bool = False) -> list[Feature]:
        """input_ids, token_type_ids, and for each token: labels, the tag if it is the first token of a word that belongs to
        the window, and word, the index of that word in the sentence, else -1; example, the index of the sentence. A window of
        labelled data without any tag is left out, unless it is one of characters."""
        numbers: dict[str | None, int] = {label: number for number, label in enumerate(self.labels or ())}
        numbers[None] = IGNORED
        tags = [[numbers[tag] for tag in sentence.word_labels] for sentence in items]
        features = []
        for example, window in self.arguments.encoder(self.processor).words(items):
            own = window.own(tags[example])
            if not labelled or items[example].places is not None or (own != IGNORED).any():
                size, (firsts, ends) = len(window.feature["input_ids"]), window.spans.T
                has_token, places = firsts < ends, np.arange(window.start, window.stop)
                token_labels, word = np.full(size, IGNORED), np.full(size, -1)
                token_labels[firsts[has_token]] = own[has_token]
                word[firsts[has_token]] = np.where(window.owned, places, -1)[has_token]
                features.append({**window.feature, "labels": token_labels, "word": word, "example": example})
        return features

    # The page of `hf-tiny demo`

    SHOWS = {"tags": "marks"}

    def show(self, text: str) -> list:
        judged = self.judged(text)
        (sentence,), (tags,) = judged.items, judged.decoded(judged.results)
        words: Sequence[str] = sentence.words
        if sentence.places is not None:
            text = sentence.text
            words, tags = text, with_spaces(sentence, tags)
        return [spans(text, words, tags, is_entity_scheme(self.labels or ()))]

    # Figures

    def metric(self, items: Sequence[Sentence]) -> Metric:
        return Entities() if is_entity_scheme(self.labels or ()) else Tags()

    def fit_baseline(self, items: list[Sentence]) -> tuple:
        learned, labels, metric = sample(items, "sentences"), self.labels or (), self.metric(items)
        predict = fit_tags([one.words for one in learned], [one.word_labels for one in learned])

        def score(part: Sequence[Sentence]) -> dict[str, float]:
            """Words without a tag are not scored."""
            read = consistent if isinstance(metric, Entities) else list
            tagged: Any = (zip(read(predict(one.words)), one.word_labels, strict=True) for one in part)
            return score_tags([[pair for pair in one if pair[1] is not None] for one in tagged], labels, metric)

        return "each word's most frequent tag, of unknown words by suffix", score

    def described(self, shown: Sentence) -> dict:
        # Entities, and not their tokens. The first token of a word has its tag; of characters every token has one.
        groups = f'aggregation_strategy="{"first" if shown.places is None else "simple"}"'
        return {
            "pipeline_tag": "token-classification",
            "pipeline": "token-classification",
            "options": groups if is_entity_scheme(self.labels or ()) else "",
            "task": "A tagger of words" if shown.places is None else "A tagger of characters",
            "example": (shown.text or " ".join(shown.words))[:100],
            "scoring": "Each word is tagged by its first token and scored once; characters have the tag of the token that they "
            "are in. An I- that follows no B- or I- of its type begins an entity. Where the tags are B-, I- and O, F1 is of "
            'whole entities (seqeval, mode="strict", scheme IOB2); else it is the mean over tags.',
        }
