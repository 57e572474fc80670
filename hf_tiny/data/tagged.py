"""Texts with a label, sentences with tags or links: read from files or the Hub, cut into windows, written back.

A text or sentence that is longer than a window becomes several that overlap. Whatever is read keeps its place, for
messages, and all that is needed to write it again with what a model predicts.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np
from accelerate import PartialState

from hf_tiny.data import builtin, conllu, files
from hf_tiny.errors import InputError
from hf_tiny.train import flag

logger = logging.getLogger(__name__)

LINES = ".txt"  # "label text" lines
TREES = ".conllu"
COLUMNS = (".conll", ".bio", ".iob", ".txt")
LISTS = (".jsonl", ".json", ".parquet")  # tables whose cells can be lists
TAG_FIELDS = {"upos": conllu.UPOS, "xpos": conllu.XPOS, "feats": conllu.FEATS, "morphemes": None}
OPEN_FIELDS = ("xpos", "feats", "morphemes")  # Tags that are put together: held-out text has some that are new.
TASKS = ("parse", "subject")
PREDICATES = ("VERB", "ADJ")
OMITTED = "omitted"


@dataclass(frozen=True, kw_only=True)
class TaggedArguments:
    """Which labelled data, and how long a window is. With neither files nor a data set the built-in data is used."""

    train_file: list[str] | None = flag(None, "Files, folders or globs of labelled data, each also .gz.")
    validation_file: list[str] | None = flag(None, "The same to evaluate on; without it a part of it is held out.")
    test_file: list[str] | None = flag(None, "The same to evaluate the finished model on.")
    dataset_name: str | None = flag(None, "A data set on the Hub, or a folder of one.")
    dataset_config_name: str | None = flag(None, "Its configuration.")
    validation_split_percentage: float = flag(10.0, "How much is held out when there is no validation data.")
    encoding_errors: str = flag("strict", "Bytes that are not UTF-8: strict stops, replace counts and replaces them.")
    max_seq_length: int = flag(128, "Tokens in a window, special tokens included.")
    doc_stride: int = flag(32, "Tokens that neighbouring windows of a long text share, at least.")
    max_train_samples: int | None = flag(None, "Train on this many examples, the same for every --seed.")
    max_eval_samples: int | None = flag(None, "Evaluate on this many examples, the same for every --seed.")

    @property
    def open_ended(self) -> bool:
        """Whether held-out labels that the training data lacks are to be expected."""
        return False

    @property
    def data_name(self) -> str:
        """As the model card names it."""
        return ", ".join(self.train_file or [self.dataset_name or "hf_tiny's built-in data of Python source"])


@dataclass(frozen=True, kw_only=True)
class TextArguments(TaggedArguments):
    """Where a text and its label are."""

    text_column: str = flag("text", "The column that holds the text.")
    text_pair_column: str | None = flag(None, "The column that holds the second text of a pair.")
    label_column: str = flag("label", "The column that holds the label.")
    do_regression: bool | None = flag(
        None, "Predict numbers; by default when all labels are numbers and some not whole."
    )


@dataclass(frozen=True, kw_only=True)
class WordArguments(TaggedArguments):
    """Where words and their tags are."""

    tag_field: str = flag("upos", f"What of CoNLL-U is the tag: {', '.join(TAG_FIELDS)}.")
    text_column: str = flag("tokens", "The column of a table that holds the list of words.")
    label_column: str = flag("tags", "The column of a table that holds the list of tags.")

    @property
    def open_ended(self) -> bool:
        return self.tag_field in OPEN_FIELDS


@dataclass(frozen=True, kw_only=True)
class LinkArguments(TaggedArguments):
    """What the links between words are."""

    task: str = flag("parse", "parse: the head of each word; subject: the subject of each predicate.")

    @property
    def open_ended(self) -> bool:
        return True  # treebanks have rare relations


@dataclass(frozen=True)
class Text:
    text: str
    text_pair: str | None
    label: str
    place: str
    kind: str  # the suffix of its file
    row: dict  # all columns of a table; of a line what stands between label and text

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,)


@dataclass(frozen=True)
class Sentence:
    """Of a tag, head or relation, None says that it is not scored."""

    words: tuple[str, ...]
    tags: tuple[str | None, ...] | None
    upos: tuple[str, ...] | None
    heads: tuple[int | None, ...] | None
    relations: tuple[str | None, ...] | None
    place: str
    name: str
    kind: str
    lines: tuple[str, ...]  # as in the file; a table's row is one line of JSON
    word_of: tuple[int, ...] | None = None  # when characters stand for words: which word of the file each belongs to

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for label in self.tags or self.relations or () if label is not None)


class Labelled(Protocol):
    place: str

    @property
    def labels(self) -> tuple[str, ...]: ...


Item = TypeVar("Item", bound=Labelled)


# Reading


def read_texts(arguments: TextArguments) -> dict[str, list[Text]]:
    """The texts of `train`, `validation` and, if there is one, `test`."""
    from_file, from_row = partial(_file_texts, arguments=arguments), partial(_row_text, arguments=arguments)
    return _splits(
        arguments,
        (*files.TABLES, LINES),
        builtin.classified_files,
        from_file,
        from_row,
        classes=lambda texts: not is_regression({"train": texts}, arguments),
    )


def read_sentences(arguments: WordArguments) -> dict[str, list[Sentence]]:
    """The sentences of each split with the tags of their words."""
    if arguments.tag_field not in TAG_FIELDS:
        raise InputError(f"--tag_field {arguments.tag_field}: must be one of {', '.join(TAG_FIELDS)}.")
    from_file, from_row = partial(_file_sentences, arguments=arguments), partial(_row_sentence, arguments=arguments)
    splits = _splits(arguments, (TREES, *COLUMNS, *LISTS), builtin.treebank_files, from_file, from_row)
    if arguments.tag_field == "morphemes":
        for split, sentences in splits.items():
            _log_aligned(split, sentences)
    return splits


def read_trees(arguments: LinkArguments) -> dict[str, list[Sentence]]:
    """The sentences of each split with the links that the task is about."""
    if arguments.task not in TASKS:
        raise InputError(f"--task {arguments.task}: must be one of {', '.join(TASKS)}.")
    splits = _splits(arguments, (TREES, *LISTS), builtin.treebank_files, _file_trees, _row_tree)
    return {split: links(sentences, arguments.task) for split, sentences in splits.items()}


def _splits(
    arguments: TaggedArguments,
    supported: tuple[str, ...],
    builtin_files: Callable[[], tuple[list[str], list[str]]],
    from_file: Callable[[str, str, Counter], Iterable[Item]],
    from_row: Callable[[str, str, dict], Item],
    classes: Callable[[list[Item]], bool] = lambda items: True,
) -> dict[str, list[Item]]:
    """`classes` says whether labels are classes, of which training needs all, or numbers."""
    _check(arguments)
    counts, splits = Counter(), {}
    named = {"train": arguments.train_file, "validation": arguments.validation_file, "test": arguments.test_file}
    paths = {
        split: files.expand(patterns, f"--{split}_file", supported, any_suffix=True)
        for split, patterns in named.items()
        if patterns
    }
    with PartialState().local_main_process_first():  # the first fills the cache for the others
        if arguments.dataset_name:
            splits = _hub_splits(arguments, from_row)
        elif not arguments.train_file:
            paths["train"], paths["validation"] = builtin_files()
    for split, found in paths.items():
        splits[split] = list(chain.from_iterable(from_file(path, arguments.encoding_errors, counts) for path in found))
        if not splits[split]:
            raise InputError(
                f"{', '.join(found)}: there is nothing in it to {'train' if split == 'train' else 'evaluate'} on."
            )
    if counts["characters replaced"]:
        logger.warning(f"{counts['characters replaced']:,} characters replaced in the files")
    every_label = not arguments.open_ended and classes(splits["train"])
    if "validation" not in splits:
        splits["train"], splits["validation"] = hold_out(
            splits["train"], arguments.validation_split_percentage, every_label
        )
    splits["train"] = sample(splits["train"], arguments.max_train_samples, every_label)
    for split in {"validation", "test"} & splits.keys():
        splits[split] = sample(splits[split], arguments.max_eval_samples, every_label=False)
    splits = {split: splits[split] for split in ("train", "validation", "test") if split in splits}
    logger.info(", ".join(f"{split}: {len(items):,} examples" for split, items in splits.items()))
    return splits


def _check(arguments: TaggedArguments) -> None:
    files.check_encoding_errors(arguments.encoding_errors)
    if arguments.max_seq_length < 8:
        raise InputError(f"--max_seq_length {arguments.max_seq_length}: a window needs at least 8 tokens.")
    if not 0 <= arguments.doc_stride <= arguments.max_seq_length // 2:
        raise InputError(
            f"--doc_stride {arguments.doc_stride}: windows of --max_seq_length {arguments.max_seq_length} can share 0 to "
            f"{arguments.max_seq_length // 2} tokens."
        )
    for name in ("max_train_samples", "max_eval_samples"):
        if (limit := vars(arguments)[name]) is not None and limit < 1:
            raise InputError(f"--{name} {limit}: it must be above 0.")
    if arguments.train_file and arguments.dataset_name:
        raise InputError("Give --train_file or --dataset_name, not both.")
    if (arguments.validation_file or arguments.test_file) and not (arguments.train_file or arguments.dataset_name):
        raise InputError("--validation_file and --test_file need --train_file or --dataset_name beside them.")


def _hub_splits(arguments: TaggedArguments, from_row: Callable[[str, str, dict], Item]) -> dict[str, list[Item]]:
    splits = {}
    for split, data in files.load_hub(arguments.dataset_name, arguments.dataset_config_name).items():
        names = files.class_names(data.features)
        rows = [files.named(row, names) for row in data] if split in ("train", "validation", "test") else []
        if split == "test" and rows and any(all(_hidden(row[column]) for row in rows) for column in names):
            logger.warning(
                f"--dataset_name {arguments.dataset_name}: the labels of its test split are hidden; left out."
            )
        elif rows:
            place = f"{arguments.dataset_name}, {split}, row "
            splits[split] = [from_row(".jsonl", f"{place}{number}", row) for number, row in enumerate(rows, 1)]
    return splits


def _hidden(label: str | list | None) -> bool:
    return label is None or label == [None] * len(label)


def hold_out(items: list[Item], percentage: float, every_label: bool) -> tuple[list[Item], list[Item]]:
    """Held out by chance, but the same for every seed: all runs are evaluated on the same. With `every_label` an example
    with a label that no other has stays in training, where it can be learned."""
    count = round(len(items) * percentage / 100) if 0 < percentage < 100 else 0
    chosen = set(np.random.default_rng(0).permutation(len(items))[:count].tolist())
    if every_label:
        known = {label for index, item in enumerate(items) if index not in chosen for label in item.labels}
        chosen = {index for index in chosen if known.issuperset(items[index].labels)}
    if not 0 < len(chosen) < len(items):
        raise InputError(
            f"--validation_split_percentage {percentage:g}: of {len(items)} examples this holds out {len(chosen)}, and a "
            "run needs some to train on and some to evaluate on. Use another number, such as 10, or give --validation_file."
        )
    train = [item for index, item in enumerate(items) if index not in chosen]
    return train, [items[index] for index in sorted(chosen)]


def sample(items: list[Item], limit: int | None, every_label: bool) -> list[Item]:
    """A choice that is the same for every seed, in the order of the files; of each label at least one, if asked."""
    if limit is None or limit >= len(items):
        return items
    order = np.random.default_rng(0).permutation(len(items)).tolist()
    if every_label:
        seen, first, rest = set(), [], []
        for index in order:
            (rest if seen.issuperset(items[index].labels) else first).append(index)
            seen.update(items[index].labels)
        order = first + rest
    return [items[index] for index in sorted(order[:limit])]


def _file_texts(path: str, encoding_errors: str, counts: Counter, arguments: TextArguments) -> Iterator[Text]:
    kind = files.kind(path)
    if kind in files.TABLES:
        for place, row in files.table_rows(path, encoding_errors, counts):
            yield _row_text(kind, place, row, arguments)
        return
    for number, line in files.numbered_lines(path, encoding_errors, counts):
        if line.strip():
            end = min((line + " ").index(" "), (line + "\t").index("\t"))
            if not end:
                raise InputError(
                    f"{path}:{number}: the line begins with a blank and not with a label, as `label text` does."
                )
            yield Text(line[end + 1 :], None, line[:end], f"{path}:{number}", LINES, {"between": line[end : end + 1]})


def _row_text(kind: str, place: str, row: dict, arguments: TextArguments) -> Text:
    text = _text_cell(row, arguments.text_column, place, "--text_column")
    pair_column = arguments.text_pair_column
    pair = None if pair_column is None else _text_cell(row, pair_column, place, "--text_pair_column")
    label = _cell(row, arguments.label_column, place, "--label_column")
    if label is None or not (label := str(label).strip()):
        raise InputError(f"{place}: the label, column {arguments.label_column!r}, is empty. Give one, or drop the row.")
    return Text(text, pair, label, place, kind, row)


def _cell(row: dict, column: str, place: str, flag_name: str):
    if column not in row:
        raise InputError(
            f"{place}: there is no column {column!r}, only {', '.join(map(repr, row))}. Name the right one with {flag_name}."
        )
    return row[column]


def _text_cell(row: dict, column: str, place: str, flag_name: str) -> str:
    value = _cell(row, column, place, flag_name)
    if not isinstance(value, str | None):
        raise InputError(f"{place}: {column!r} is {value!r} and must be text. See {flag_name}.")
    return value or ""


def _list_cell(row: dict, column: str, place: str, flag_name: str) -> list:
    value = _cell(row, column, place, flag_name)
    if not isinstance(value, list):
        raise InputError(f"{place}: {column!r} is {value!r} and must be a list. See {flag_name}.")
    return value


def _file_sentences(path: str, encoding_errors: str, counts: Counter, arguments: WordArguments) -> Iterator[Sentence]:
    kind = files.kind(path)
    if kind == TREES:
        yield from _treebank(path, encoding_errors, counts, partial(_tagged, field=arguments.tag_field))
    elif arguments.tag_field != "upos":
        raise InputError(f"--tag_field {arguments.tag_field}: this is for CoNLL-U, and {path} does not end in {TREES}.")
    elif kind in LISTS:
        for place, row in files.table_rows(path, encoding_errors, counts):
            yield _row_sentence(kind, place, row, arguments)
    else:
        yield from _column_sentences(path, encoding_errors, counts)


def _column_sentences(path: str, encoding_errors: str, counts: Counter) -> Iterator[Sentence]:
    """First column the word, last column the tag."""
    width = None
    for block in conllu.blocks(files.numbered_lines(path, encoding_errors, counts)):
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
            place = f"{path}:{block[0][0]}"
            words, tags = tuple(row[0] for row in rows), tuple(row[-1].strip() for row in rows)
            lines = tuple(line for _, line in block)
            yield Sentence(words, tags, None, None, None, place, place, ".conll", lines)


def _row_sentence(kind: str, place: str, row: dict, arguments: WordArguments) -> Sentence:
    words = _list_cell(row, arguments.text_column, place, "--text_column")
    tags = _list_cell(row, arguments.label_column, place, "--label_column")
    if len(words) != len(tags):
        raise InputError(f"{place}: there are {len(words)} words and {len(tags)} tags; each word needs one.")
    lines = (json.dumps(row, ensure_ascii=False, default=str),)
    tags = tuple(None if tag is None else str(tag) for tag in tags)
    return Sentence(tuple(map(str, words)), tags, None, None, None, place, place, kind, lines)


def _treebank(
    path: str, encoding_errors: str, counts: Counter, finish: Callable[[Sentence, list[list[str]]], Sentence]
) -> Iterator[Sentence]:
    for block in conllu.blocks(files.numbered_lines(path, encoding_errors, counts)):
        rows = conllu.words(block, path)
        if rows:
            place = f"{path}:{block[0][0]}"
            words, upos = tuple(row[conllu.FORM] for row in rows), tuple(row[conllu.UPOS] for row in rows)
            name, lines = conllu.sentence_id(block, place), tuple(line for _, line in block)
            yield finish(Sentence(words, None, upos, None, None, place, name, TREES, lines), rows)


def _tagged(sentence: Sentence, rows: list[list[str]], field: str) -> Sentence:
    if field != "morphemes":
        return replace(sentence, tags=tuple(row[TAG_FIELDS[field]] for row in rows))
    words = [conllu.characters(row[conllu.FORM]) for row in rows]
    tags = [conllu.morpheme_tags(row[conllu.FORM], row[conllu.LEMMA], row[conllu.XPOS]) for row in rows]
    word_of = tuple(index for index, word in enumerate(words) for _ in word)
    return replace(
        sentence, words=tuple("".join(words)), tags=tuple(chain.from_iterable(tags)), upos=None, word_of=word_of
    )


def _log_aligned(split: str, sentences: list[Sentence]) -> None:
    words = sum(sentence.word_of[-1] + 1 for sentence in sentences)
    lost = sum(
        len({word for word, tag in zip(sentence.word_of, sentence.tags, strict=True) if tag is None})
        for sentence in sentences
    )
    logger.info(f"{split}: the morphemes of {1 - lost / words:.2%} of {words:,} words align; the others are not scored")


def _file_trees(path: str, encoding_errors: str, counts: Counter) -> Iterator[Sentence]:
    kind = files.kind(path)
    if kind in LISTS:
        for place, row in files.table_rows(path, encoding_errors, counts):
            yield _row_tree(kind, place, row)
    elif kind == TREES:
        yield from _treebank(path, encoding_errors, counts, _linked)
    else:
        raise InputError(f"{path}: links are read from CoNLL-U; the name must end in {TREES}, with or without .gz.")


def _linked(sentence: Sentence, rows: list[list[str]]) -> Sentence:
    heads = conllu.heads(rows, sentence.name, sentence.place)
    return replace(sentence, heads=tuple(heads), relations=tuple(row[conllu.DEPREL] for row in rows))


def _row_tree(kind: str, place: str, row: dict) -> Sentence:
    """A row as the Hub's treebanks have it: tokens, upos, head, deprel."""
    names = ("tokens", "upos", "head", "deprel")
    words, *columns = (list(map(str, _list_cell(row, name, place, "a column of this name"))) for name in names)
    for name, values in zip(names[1:], columns, strict=True):
        if len(values) != len(words):
            raise InputError(
                f"{place}: there are {len(words)} words and {len(values)} in {name!r}; each word needs one."
            )
    rows = []
    for number, (word, upos, head, deprel) in enumerate(zip(words, *columns, strict=True), 1):
        rows.append([str(number), word, "_", upos, "_", "_", head, deprel, "_", "_"])
    lines = (json.dumps(row, ensure_ascii=False, default=str),)
    return _linked(Sentence(tuple(words), None, tuple(columns[0]), None, None, place, place, kind, lines), rows)


def links(sentences: Sequence[Sentence], task: str) -> list[Sentence]:
    """The sentences with the heads and relations that the task is about. `parse`: all, as they are given. `subject`: of
    each predicate, its subject or 0 when it is omitted; other words are not scored."""
    if task == "parse":
        return list(sentences)
    found, dropped = [], 0
    for sentence in sentences:
        subjects = {}
        for place, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True), 1):
            if relation == "nsubj" or relation.startswith("nsubj:"):
                subjects.setdefault(head, []).append((abs(place - head), place, relation))
        heads, relations = [None] * len(sentence.words), [None] * len(sentence.words)
        for place, upos in enumerate(sentence.upos, 1):
            if upos in PREDICATES:
                _, heads[place - 1], relations[place - 1] = min(subjects.pop(place, [(0, 0, OMITTED)]))
        dropped += sum(map(len, subjects.values()))
        found.append(replace(sentence, heads=tuple(heads), relations=tuple(relations)))
    logger.info(f"{dropped:,} subjects of words that are neither {' nor '.join(PREDICATES)} are left out")
    return found


# Labels


def find_labels(train: Iterable[Labelled], others: Iterable[Labelled], open_ended: bool = False) -> list[str]:
    """The labels of the training data, in order. One that only the others have is a mistake, unless labels are open
    ended, as tags that are put together of many features are: it then comes last, and is never predicted rightly."""
    labels = _ordered({label for item in train for label in item.labels})
    if len(labels) < 2:
        raise InputError(
            f"The training data has {len(labels)} kind of label{''.join(f', {label!r}' for label in labels)}. There is "
            "nothing to learn with fewer than 2. See --label_column or --tag_field."
        )
    known, unknown = set(labels), Counter()
    for item in others:
        for label in item.labels:
            if label not in known and not open_ended:
                raise InputError(
                    f"{item.place}: the label {label!r} is not in the training data. It has {_some(labels)}."
                )
            unknown[label] += label not in known
    new = _ordered(+unknown)
    if new:
        logger.warning(f"{unknown.total():,} held-out labels, {len(new):,} different, are not in the training data")
    return labels + new


def _ordered(labels: Iterable[str]) -> list[str]:
    """Whole numbers by value, else alphabetically."""
    labels = sorted(labels)
    return sorted(labels, key=int) if all(label.removeprefix("-").isdecimal() for label in labels) else labels


def _some(labels: list[str], count: int = 20) -> str:
    return ", ".join(labels[:count]) + (f" and {len(labels) - count} more" if len(labels) > count else "")


def is_regression(texts: dict[str, list[Text]], arguments: TextArguments) -> bool:
    """Whether labels are numbers to come near to: as the flag says, else when all are numbers and one is not whole."""
    if arguments.do_regression is False:
        return False
    values = []
    for text in chain.from_iterable(texts.values()):
        value = _number(text.label)
        if value is None:
            if arguments.do_regression:
                raise InputError(f"{text.place}: the label {text.label!r} is not a number, as --do_regression needs.")
            return False
        values.append(value)
    return bool(arguments.do_regression) or any(value != round(value) for value in values)


def _number(label: str) -> float | None:
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
