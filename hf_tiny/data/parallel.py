"""Pairs of a source and a target text: read from files or the Hub, turned into token ids, written back.

Two aligned text files, whose lines belong together, or tables and data sets with a column for each side.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from hf_tiny.arguments import flag
from hf_tiny.data import builtin, files
from hf_tiny.data.collate import Batch, pair_batch
from hf_tiny.data.predictions import write_texts
from hf_tiny.data.splits import SPLITS, SplitArguments, check, finish
from hf_tiny.data.windows import Feature, Frame
from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

SIDES = ("input_ids", "labels")  # what of a feature is padded: for `BucketedBatches`


@dataclass(frozen=True, kw_only=True)
class ParallelArguments(SplitArguments):
    """Which pairs, and how long they may be."""

    source_lang: str | None = flag(None, "How names of aligned source files end (en: a.en), or its key or column.")
    target_lang: str | None = flag(None, "The same for the target (de: a.de).")
    source_column: str | None = flag(None, "The source's column; of a .tsv without a header its number, from 1.")
    target_column: str | None = flag(None, "The target's column. By default they are `source` and `target`.")
    validation_split_percentage: float = flag(5.0, "How much is held out when there is no validation data.")
    encoding_errors: str = flag("strict", "Bytes that are not UTF-8: strict stops, replace counts and replaces them.")
    max_source_length: int = flag(128, "Tokens of a source, special tokens included.")
    max_target_length: int = flag(128, "Tokens of a target, special tokens included.")
    truncate_pairs: bool = flag(False, "Cut what is longer, and count it; else it is an error.")
    skip_empty_pairs: bool = flag(False, "Leave out pairs with an empty side, and count them; else it is an error.")
    bpe_dropout: float = flag(0.0, "How often a merge of BPE is left out, in training: a text then has many forms.")

    @property
    def data_name(self) -> str:
        return self.name_of_data("dates in English and Korean")


@dataclass(frozen=True)
class Pair:
    source: str
    target: str
    place: str
    target_place: str
    kind: str  # the suffix of its file; of aligned text that of the target
    row: dict  # all columns of a table


# Reading


def read_pairs(arguments: ParallelArguments) -> dict[str, list[Pair]]:
    """The pairs of `train`, `validation` and, if there is one, `test`."""
    _check(arguments)
    counts, found = Counter(), {}
    paths = {split: _expand(patterns, f"--{split}_file", arguments) for split, patterns in arguments.patterns.items()}
    with PartialState().local_main_process_first():  # the first fills the cache for the others
        if arguments.dataset_name:
            data = files.load_hub(arguments.dataset_name, arguments.dataset_config_name)
            for split in filter(data.__contains__, SPLITS):
                rows = ((f"{arguments.dataset_name}, {split}, row {n}", row) for n, row in enumerate(data[split], 1))
                found[split] = [_row_pair(".jsonl", place, row, arguments) for place, row in rows]
        elif not arguments.train_file:
            paths["train"], paths["validation"] = builtin.pair_files()
    for split, names in paths.items():
        found[split] = _file_pairs(names, f"--{split}_file", arguments, counts)
    splits = {split: list(_filled(found[split], arguments, counts)) for split in SPLITS if split in found}
    for split, pairs in splits.items():
        if not pairs:
            raise InputError(f"The {split} data has no pair with both sides. Check --{split}_file or --dataset_name.")
    for what, count in counts.items():
        logger.warning(f"{count:,} {what}")
    return finish(splits, arguments, "pairs", together=lambda pair: pair.source)  # no source on both sides


def _check(arguments: ParallelArguments) -> None:
    check(arguments)
    files.check_encoding_errors(arguments.encoding_errors)
    for name in ("max_source_length", "max_target_length"):
        if vars(arguments)[name] < 8:
            raise InputError(f"--{name} {vars(arguments)[name]}: a text needs at least 8 tokens.")
    for kind in ("lang", "column"):
        source, target = (vars(arguments)[f"{side}_{kind}"] for side in ("source", "target"))
        if (source is None) != (target is None) or (source is not None and source == target):
            raise InputError(f"--source_{kind} {source} --target_{kind} {target}: give both, and two different ones.")
    if not 0 <= arguments.bpe_dropout < 1:
        raise InputError(f"--bpe_dropout {arguments.bpe_dropout:g}: it must be at least 0 and below 1.")


def _expand(patterns: list[str], flag_name: str, arguments: ParallelArguments) -> list[str]:
    supported = (*files.TABLES, f".{arguments.source_lang}".lower(), f".{arguments.target_lang}".lower())
    found = list(chain.from_iterable(files.expand([one], flag_name, supported, any_suffix=True) for one in patterns))
    for path, times in Counter(found).items():
        if times > 1:
            raise InputError(f"{flag_name}: {path} is given {times} times.")
        if files.kind(path) not in supported:
            raise InputError(
                f"{flag_name} {path}: the name must end in {', '.join(files.TABLES)}, or, for two aligned text files, as "
                "--source_lang and --target_lang say: a.en and a.de with --source_lang en --target_lang de."
            )
    return found


def _file_pairs(paths: list[str], flag_name: str, arguments: ParallelArguments, counts: Counter) -> list[Pair]:
    pairs, aligned = [], {}
    for path in paths:
        if files.kind(path) in files.TABLES:
            rows = _table_rows(path, arguments, counts)
            pairs += [_row_pair(files.kind(path), place, row, arguments) for place, row in rows]
        else:
            stem = path[: path.lower().removesuffix(".gz").rindex(".")]
            aligned.setdefault(stem, {})[files.kind(path)] = path
    suffixes = [f".{language}".lower() for language in (arguments.source_lang, arguments.target_lang)]
    for stem, sides in aligned.items():
        for suffix in suffixes:
            if suffix not in sides:
                raise InputError(
                    f"{flag_name} {next(iter(sides.values()))}: {stem}{suffix}, its other side, is missing."
                )
        pairs += _aligned_pairs(*(sides[suffix] for suffix in suffixes), arguments, counts)
    return pairs


def _aligned_pairs(source: str, target: str, arguments: ParallelArguments, counts: Counter) -> Iterator[Pair]:
    sources, targets = (
        list(files.numbered_lines(path, arguments.encoding_errors, counts)) for path in (source, target)
    )
    if len(sources) != len(targets):
        raise InputError(
            f"{source} has {len(sources):,} lines and {target} has {len(targets):,}: each line must be the other side of "
            "the line with its number."
        )
    for (number, first), (_, second) in zip(sources, targets, strict=True):
        yield Pair(first.strip(), second.strip(), f"{source}:{number}", f"{target}:{number}", files.kind(target), {})


def _table_rows(path: str, arguments: ParallelArguments, counts: Counter) -> Iterator[tuple[str, dict]]:
    columns = (arguments.source_column or "", arguments.target_column or "")
    if files.kind(path) != ".tsv" or not all(map(str.isdecimal, columns)):
        yield from files.table_rows(path, arguments.encoding_errors, counts)
        return
    for number, line in files.numbered_lines(path, arguments.encoding_errors, counts):
        if line:
            yield f"{path}:{number}", {str(column): cell for column, cell in enumerate(line.split("\t"), 1)}


def _row_pair(kind: str, place: str, row: dict, arguments: ParallelArguments) -> Pair:
    """The columns that are named; else those of the Hub's `translation`, or of the row, that are named by language."""
    inner = row.get("translation")
    cells = inner if arguments.source_column is None and isinstance(inner, dict) else row
    texts = []
    for side in ("source", "target"):
        name = vars(arguments)[f"{side}_column"] or vars(arguments)[f"{side}_lang"] or side
        if name not in cells:
            raise InputError(
                f"{place}: there is no column {name!r}, only {', '.join(map(repr, cells))}. Name the right one with "
                f"--{side}_column{f' or --{side}_lang' if cells is inner else ''}."
            )
        if not isinstance(cells[name], str | None):
            raise InputError(f"{place}: {name!r} is {cells[name]!r} and must be text. See --{side}_column.")
        texts.append((cells[name] or "").strip())
    return Pair(*texts, place, place, kind, row)


def _filled(pairs: Iterable[Pair], arguments: ParallelArguments, counts: Counter) -> Iterator[Pair]:
    for pair in pairs:
        if pair.source and pair.target:
            yield pair
        elif not arguments.skip_empty_pairs:
            empty, place = ("target", pair.target_place) if pair.source else ("source", pair.place)
            raise InputError(
                f"{place}: the {empty} is empty. Mend it, or leave such pairs out with --skip_empty_pairs."
            )
        else:
            counts["pairs with an empty side are left out"] += 1


# To token ids


def pair_features(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, arguments: ParallelArguments
) -> list[Feature]:
    """input_ids and labels, both with what the tokenizer puts around a text and </s> at the end, and example, the index
    of the pair."""
    coder = PairCoder(tokenizer, arguments)
    sides = [coder.encode([pair.source for pair in pairs]), coder.encode([pair.target for pair in pairs])]
    sizes = np.array([list(map(len, side)) for side in sides])  # (2, pairs)
    rooms = np.array([coder.room(side) for side in (0, 1)])[:, None]
    long = np.flatnonzero((sizes > rooms).any(0))
    if len(long):
        lengths = " or ".join(
            f"--max_{name}_length {vars(arguments)[f'max_{name}_length']}" for name in ("source", "target")
        )
        what = f"{len(long):,} of {len(pairs):,} pairs are longer than {lengths}"
        if not arguments.truncate_pairs:
            source, target = sizes.max(1) + coder.lengths - rooms[:, 0]
            raise InputError(
                f"{pairs[long[0]].place}: this is the first of those that are too long: {what}. Of the longest the source "
                f"has {source} tokens, or the target {target}. Raise the lengths, or cut the ends off with --truncate_pairs."
            )
        logger.warning(f"{what}: their ends are cut off.")
    return [
        {"input_ids": coder.framed(source, 0), "labels": coder.framed(target, 1), "example": example}
        for example, (source, target) in enumerate(zip(*sides, strict=True))
    ]


class PairCoder:
    """A tokenizer and the lengths of both sides; side 0 is the source."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: ParallelArguments):
        for name in ("eos_token", "pad_token"):
            if name not in tokenizer.special_tokens_map:
                raise InputError(
                    f"The tokenizer has no {name}, which an encoder-decoder model needs. Train one with --tokenizer_model "
                    "bpe or unigram, or give another with --tokenizer_name."
                )
        self.backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # "</s>" in the text is text.
        self.lengths = np.array([arguments.max_source_length, arguments.max_target_length])
        self.frames = [Frame(self.backend.encode("a"), length) for length in self.lengths.tolist()]
        self.end = [] if self.frames[0].places[-1][:2] == (None, [tokenizer.eos_token_id]) else [tokenizer.eos_token_id]

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def room(self, side: int) -> int:
        return self.frames[side].room - len(self.end)

    def framed(self, ids: list[int], side: int) -> np.ndarray:
        return np.append(self.frames[side].around([ids[: self.room(side)]])[0], np.array(self.end, dtype=np.int64))


@dataclass(frozen=True)
class CollatePairs:
    pad_token_id: int

    def __call__(self, rows: Sequence[Feature]) -> Batch:
        batch = pair_batch([row["input_ids"] for row in rows], [row["labels"] for row in rows], self.pad_token_id)
        return {**batch, "about": {"example": torch.tensor([row["example"] for row in rows])}}


# Writing


def write_pairs(pairs: Sequence[Pair], predictions: Sequence[str], folder: Path, name: str) -> list[Path]:
    """Tables as they were read, with a column `prediction`; of aligned files the predictions, a line each, in a file that
    ends as those of the targets."""
    written, lines, tables = [], {}, []
    for pair, prediction in zip(pairs, predictions, strict=True):
        if pair.kind in files.TABLES:
            tables.append((pair, prediction))
        else:
            lines.setdefault(pair.kind, []).append(" ".join(prediction.splitlines()))
    for kind, found in lines.items():
        written.append(folder / f"{name}{kind}")
        written[-1].write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    return written + write_texts(*zip(*tables, strict=True), folder, name) if tables else written
