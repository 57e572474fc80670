"""N → M: another text for a text: translation, dialogue, restoration.

The data are two aligned text files, whose lines belong together, or tables and datasets with a column for each side.
"""

import json
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import ClassVar

import datasets
import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_tiny import report
from hf_tiny.arguments import flag
from hf_tiny.callbacks import AverageCheckpoints, Callback
from hf_tiny.data import builtin, sources
from hf_tiny.data.batches import Batch, pair_batch
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.splits import TextSplitArguments
from hf_tiny.data.windows import Feature
from hf_tiny.errors import InputError, require
from hf_tiny.evaluation import Evaluation, Results, array, loss_and_items, mean_loss, perplexity
from hf_tiny.hub import Card
from hf_tiny.metrics import Metric, share
from hf_tiny.models import HfTinySeq2SeqConfig
from hf_tiny.models.words import plain_tokenizer
from hf_tiny.start import ENCODER_DECODER, read_config, start_model
from hf_tiny.tasks import FILE, Line, Task, TaskEvaluation, log_texts
from hf_tiny.tokenizer import fitting_size

logger = logging.getLogger(__name__)

SIDES = ("input_ids", "labels")  # what of a feature is padded: for `BucketedBatches`
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
COPIED = 0.1  # share of the target's tokens from which on a model may copy
COMPARED = 1000  # training pairs by which a baseline is chosen
SHOWN = 3  # number of examples in the log after each evaluation


@dataclass(frozen=True, kw_only=True)
class PairArguments(TextSplitArguments):
    """Which pairs, and how long they may be."""

    source_lang: str | None = flag(None, "Ending of the aligned source files (en: a.en), or its key or column.")
    target_lang: str | None = flag(None, "The same for the target (de: a.de).")
    source_column: str | None = flag(None, "Column of the source; in a .tsv without a header its number, from 1.")
    target_column: str | None = flag(None, "Column of the target. By default they are `source` and `target`.")
    max_source_length: int = flag(128, "Number of tokens of a source, special tokens included, at most.", low=8)
    max_target_length: int = flag(128, "Number of tokens of a target, special tokens included, at most.", low=8)
    truncate_pairs: bool = flag(True, "Cut off the ends of what is longer, and count it; else it is an error.")
    skip_empty_pairs: bool = flag(False, "Leave out pairs with an empty side, and count them; else it is an error.")
    copy_attention: bool | None = flag(
        None,
        "Let the model copy from the source; by default where sources and targets share a tenth of their tokens.",
        group="model",
    )
    bpe_dropout: float = flag(
        0.0, "Share of BPE merges that are left out in training, so that a text has many forms.", low=0, below=1
    )
    num_beams: int = flag(4, "Beams of the search that is evaluated; 1 is greedy.", low=1, group="saving")
    length_penalty: float = flag(
        1.0, "Above 0 prefers longer texts: a hypothesis scores sum / length ** penalty.", group="saving"
    )


@dataclass(frozen=True)
class Pair:
    """kind: the suffix of its file; of aligned text that of the target. row: all columns of a table."""

    source: str
    target: str
    place: str
    target_place: str
    kind: str
    row: dict
    labels: tuple[str, ...] = ()


# Files to pairs


def _expand(patterns: list[str], option: str, supported: tuple[str, ...]) -> list[str]:
    found = list(chain.from_iterable(sources.expand([one], option, supported, any_suffix=True) for one in patterns))
    for path, times in Counter(found).items():
        if times > 1:
            raise InputError(f"{option}: {path} is given {times} times.")
        if sources.kind(path) not in supported:
            raise InputError(
                f"{option} {path}: the name must end in {', '.join(sources.TABLES)}, or, for two aligned text files, as "
                "--source_lang and --target_lang say: a.en and a.de with --source_lang en --target_lang de."
            )
    return found


def _aligned_pairs(source: str, target: str, decoding: Decoding) -> Iterator[Pair]:
    first, second = (list(sources.numbered_lines(path, decoding)) for path in (source, target))
    if len(first) != len(second):
        raise InputError(
            f"{source} has {len(first):,} lines and {target} has {len(second):,}: each line must be the other side of "
            "the line with its number."
        )
    for (number, one), (_, other) in zip(first, second, strict=True):
        yield Pair(one.strip(), other.strip(), f"{source}:{number}", f"{target}:{number}", sources.kind(target), {})


# Pairs to features


class PairEncoder:
    """A tokenizer and the lengths of both sides; side 0 is the source."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: PairArguments):
        for name in ENCODER_DECODER.needed_tokens:
            if name not in tokenizer.special_tokens_map:
                raise InputError(
                    f"The tokenizer has no {name}, which an encoder-decoder model needs. Train one with --tokenizer_model "
                    "bpe, or give another with --tokenizer_name."
                )
        self.backend = plain_tokenizer(tokenizer.backend_tokenizer.to_str())
        trial = self.backend.encode("a")
        place, ids = trial.sequence_ids, trial.ids
        last = len(ids) - place[::-1].index(0)
        self.before, self.after = ids[: place.index(0)], ids[last:]
        if self.after[-1:] != [tokenizer.eos_token_id]:  # a target ends with it, whatever the tokenizer does
            self.after = [*self.after, tokenizer.eos_token_id]
        lengths = (arguments.max_source_length, arguments.max_target_length)
        self.rooms = [length - len(self.before) - len(self.after) for length in lengths]

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def framed(self, ids: list[int], side: int) -> np.ndarray:
        return np.array([*self.before, *ids[: self.rooms[side]], *self.after], dtype=np.int64)


def copied_share(features: Sequence[Feature]) -> float:
    """How many of the targets' tokens stand in their own source, less those that stand in the source of another pair, as
    punctuation does."""
    own = other = count = 0
    for feature, another in zip(features, [*features[1:], *features[:1]], strict=True):
        target = feature["labels"]
        own += np.isin(target, feature["input_ids"]).sum()
        other += np.isin(target, another["input_ids"]).sum()
        count += len(target)
    return float(own - other) / count


@dataclass(frozen=True)
class CollatePairs:
    pad_token_id: int

    def __call__(self, rows: Sequence[Feature]) -> Batch:
        batch = pair_batch([row["input_ids"] for row in rows], [row["labels"] for row in rows], self.pad_token_id)
        return {**batch, "about": {"example": torch.tensor([row["example"] for row in rows])}}


class BpeDropout:
    """The same text cut into pieces in another way in every epoch (Provilkov et al., 2020), for `BucketedBatches(vary=...)`.

    Every merge is left out now and then, so that a text is also cut into the small pieces that rare words are made of.
    Drawn by (seed, epoch, number of the feature): `tokenizers` draws from a generator that cannot be seeded, and a
    resumed run would see other pieces. A side that would become too long stays as it is.
    """

    def __init__(self, pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, arguments: PairArguments):
        self.encoder, self.rate = PairEncoder(tokenizer, arguments), arguments.bpe_dropout
        backend = self.encoder.backend
        model = json.loads(backend.to_str())["model"]
        changed = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if model["type"] != "BPE" or changed or backend.pre_tokenizer is None:
            raise InputError(f"--bpe_dropout {self.rate:g}: it needs a tokenizer as --tokenizer_model bpe trains it.")
        self.vocabulary, self.unknown = model["vocab"], [] if model["byte_fallback"] else [model["unk_token"]]
        self.ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
        self.words = [(self._words(pair.source), self._words(pair.target)) for pair in pairs]
        self.states: dict[str, list[list[str]]] = {}

    def __repr__(self) -> str:
        return f"BPE dropout {self.rate}"

    def __call__(self, feature: Feature, key: tuple[int, int, int]) -> Feature:
        drawn = random.Random(repr(key)).random
        varied = dict(feature)
        for side, (name, words) in enumerate(zip(SIDES, self.words[feature["example"]], strict=True)):
            ids = [self.vocabulary[piece] for word in words for piece in self._pieces(word, drawn)]
            if len(ids) <= self.encoder.rooms[side]:
                varied[name] = self.encoder.framed(ids, side)
        return varied

    def _words(self, text: str) -> list[str]:
        normalizer = self.encoder.backend.normalizer
        normal = text if normalizer is None else normalizer.normalize_str(text)
        return [word for word, _ in self.encoder.backend.pre_tokenizer.pre_tokenize_str(normal)]

    def _pieces(self, word: str, drawn: Callable[[], float]) -> list[str]:
        """At every step the first merge that is not left out. Most words meet none that is: one number says how many
        steps go as they do without dropout, and these are known."""
        if word not in self.states:
            self.states[word] = self._plain_states(word)
        states = self.states[word]
        steps = int(math.log(1 - drawn()) / math.log(1 - self.rate)) if self.rate else len(states)
        if steps >= len(states) - 1:
            return states[-1]
        pieces, left_out = states[steps], 1
        while merge := next((one for one in self._merges(pieces)[left_out:] if drawn() >= self.rate), None):
            pieces, left_out = _merged(pieces, merge), 0
        return pieces

    def _plain_states(self, word: str) -> list[list[str]]:
        """From the characters, or their bytes, to the pieces."""
        pieces = []
        for character in word:
            known = character in self.vocabulary
            pieces += [character] if known else self.unknown or [f"<0x{byte:02X}>" for byte in character.encode()]
        states = [pieces]
        while merges := self._merges(states[-1]):
            states.append(_merged(states[-1], merges[0]))
        return states

    def _merges(self, pieces: list[str]) -> list[tuple[int, int]]:
        """Rank and place, the first merge first."""
        pairs = enumerate(pairwise(pieces))
        return sorted((self.ranks[pair], place) for place, pair in pairs if pair in self.ranks)


def _merged(pieces: list[str], merge: tuple[int, int]) -> list[str]:
    place = merge[1]
    return [*pieces[:place], pieces[place] + pieces[place + 1], *pieces[place + 2 :]]


# The model


def start_encoder_decoder(
    recipe,
    tokenizer: PreTrainedTokenizerBase,
    copied: float,
    texts: Callable[[], Iterable[str]] | None = None,
    **settings,
) -> PreTrainedModel:
    """The encoder-decoder named in the recipe, else one of its size from scratch.

    copied: by which it is decided whether the model may copy, if the recipe does not say: see `copied_share`.
    settings: dropout and label smoothing, which also a pretrained model gets.
    """
    settings["copy_attention"] = copied >= COPIED if recipe.copy_attention is None else recipe.copy_attention
    start = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id  # as T5 does
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": start,
    }
    if recipe.model_name_or_path:
        config = read_config("--model_name_or_path", recipe.model_name_or_path, ENCODER_DECODER)
        ids = {}
        if not isinstance(config, HfTinySeq2SeqConfig):
            settings = _native_settings(config, settings, recipe)
        elif recipe.copy_attention is None and config.copy_attention:
            settings["copy_attention"] = True  # it has learned to
        _check_lengths(recipe, config)
    if "copy_attention" in settings:
        logger.info(
            f"{copied:.0%} of the target's tokens stand in their source, beyond chance: copy attention is "
            f"{'on' if settings['copy_attention'] else 'off'} (--copy_attention changes that)."
        )
    return start_model(recipe, AutoModelForSeq2SeqLM, tokenizer, ENCODER_DECODER, texts=texts, **ids, **settings)


def _native_settings(config: PreTrainedConfig, settings: dict, recipe) -> dict:
    """Of the settings what a native model has: dropout, under its own name."""
    if recipe.copy_attention:
        raise InputError(
            f"--copy_attention: --model_name_or_path {recipe.model_name_or_path} is a {config.model_type} of transformers, "
            "which has none. Leave it out, or start from an encoder-decoder of hf_tiny."
        )
    if settings["label_smoothing"]:
        logger.warning(f"A {config.model_type} has no label smoothing: it is trained without.")
    known = config.to_dict()
    return {name: settings["hidden_dropout_prob"] for name in ("dropout", "dropout_rate") if name in known}


def _check_lengths(recipe, config: PreTrainedConfig) -> None:
    settings = config.to_dict()
    room = settings.get("max_position_embeddings")  # T5 has none; of hf_tiny's only learned ones end
    if room is None or settings.get("position_embedding_type", "learned") != "learned":
        return
    for name in ("max_source_length", "max_target_length", "max_seq_length"):
        if vars(recipe).get(name, 0) > room:
            raise InputError(
                f"--{name} {vars(recipe)[name]}: --model_name_or_path {recipe.model_name_or_path} has positions for "
                f"{room} tokens only. Use --{name} {room} or less."
            )


# Figures


class Translation(Metric):
    """Of whole texts, as people read them. `bleu`: sacreBLEU. `chrf`: chrF++, of characters and pairs of words, the first
    figure to look at for Korean, whose words BLEU counts as wrong for one syllable. `bleu_tok`: BLEU of lower-cased
    text cut into words by sacreBLEU's 13a, the nearest to the "tokenised lowercase BLEU" of papers. `exact_match`: the
    share of texts that are the reference, white space aside."""

    INPUTS: ClassVar[dict] = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
    signatures: dict[str, str] | None = None

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        metrics = require("sacrebleu.metrics", "translate")
        scorers = {
            "bleu": metrics.BLEU(),
            "chrf": metrics.CHRF(word_order=2),
            "bleu_tok": metrics.BLEU(lowercase=True, force=True),
        }
        figures = {name: one.corpus_score(predictions, [references]).score for name, one in scorers.items()}
        if self.signatures is None:
            self.signatures = {name: one.get_signature().format() for name, one in scorers.items()}
            for name, signature in self.signatures.items():
                logger.info(f"{name}: sacreBLEU {signature}")
        same = [a.split() == b.split() for a, b in zip(predictions, references, strict=True)]
        return {**figures, "exact_match": share(np.array(same))}


def numbers_kept(sources: Sequence[str], texts: Sequence[str]) -> dict[str, float]:
    """How many of the sources' numbers are in what was written, and how many there are; nothing if there are none."""
    pairs = zip(sources, texts, strict=True)
    kept = [number in NUMBER.findall(text) for source, text in pairs for number in NUMBER.findall(source)]
    return {"numbers": len(kept), "numbers_kept": share(np.array(kept))} if kept else {}


class DenoisingEvaluation(Evaluation):
    """The loss, which may be smoothed, and the perplexity, which is not."""

    def collect(self, outputs: ModelOutput, batch: Batch) -> Results:
        nll = outputs.get("nll", outputs.loss)  # a native model has no smoothing
        return {**loss_and_items(ModelOutput(nll=nll), batch, "nll"), **loss_and_items(outputs, batch)}

    def compute(self, results: Results) -> dict[str, float]:
        nll = mean_loss(results, "nll")
        return {"loss": mean_loss(results), "nll": nll, "ppl": perplexity(nll)}


class PairEvaluation(TaskEvaluation, DenoisingEvaluation):
    """What the model writes."""

    def generate(self, model: nn.Module, batch: Batch) -> Results:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        ids = model.generate(**inputs, **self.task.generation)
        texts = self.task.processor.batch_decode(ids, skip_special_tokens=True)
        written = np.array([text.strip() for text in texts], dtype=object)
        return {"texts": written, "example": array(batch["about"]["example"])}

    def compute(self, results: Results) -> dict[str, float]:
        texts, pairs = written_texts(results), [self.items[example] for example in np.sort(results["example"])]
        figures = self.metric.compute(predictions=texts, references=[pair.target for pair in pairs])
        figures |= numbers_kept([pair.source for pair in pairs], texts)
        for pair, text in zip(pairs[:SHOWN], texts, strict=False):
            logger.info(f"  {pair.source!r} -> {text!r} (right: {pair.target!r})")
        return {**super().compute(results), **figures}

    def answer(self, model: nn.Module, batch: Batch) -> Results:
        return self.generate(model, batch)

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        """Tables as they were read, with a column `prediction`; of aligned files the predictions, a line each, in a file
        that ends as those of the targets."""
        for pair, text in zip(self.items, written_texts(self.results), strict=True):
            table = pair.kind in sources.TABLES
            yield pair.kind, {**pair.row, "prediction": text} if table else " ".join(text.splitlines())

    def report(self, folder: Path) -> None:
        """The predictions, and an image of what the decoder looks at."""
        super().report(folder)
        weights, *tokens = cross_attention(self.task.model, self.task.processor, self.items[0])
        report.draw_attention(folder / f"{self.split}_attention.png", weights, *tokens)


def written_texts(results: Results) -> list[str]:
    """What was written, in the order of the data."""
    return results["texts"][np.argsort(results["example"])].tolist()


@torch.no_grad()
def cross_attention(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pair: Pair
) -> tuple[np.ndarray, list[str], list[str]]:
    """The last layer's attention from the tokens of the target to those of the source, the mean over heads; and these
    tokens. Of a model that copies: the probability with which each token is copied, and the vocabulary's share first."""
    source = tokenizer(pair.source, return_tensors="pt", truncation=True, max_length=48).to(model.device)
    labels = tokenizer(text_target=pair.target, return_tensors="pt", truncation=True, max_length=48).to(model.device)
    with report.recorded_attention(model):
        outputs = model(
            input_ids=source["input_ids"],
            attention_mask=source["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels["input_ids"]),
            output_attentions=True,
        )
    rows, columns = (tokenizer.convert_ids_to_tokens(side["input_ids"][0]) for side in (labels, source))
    copied = outputs.get("copy_attentions")  # native models have none
    if copied is None:
        return array(outputs.cross_attentions[-1][0].mean(0)), rows, columns
    gate = 1 - copied[0].sum(-1, keepdim=True)
    return array(torch.cat((gate, copied[0]), dim=-1)), rows, ["vocabulary", *columns]


class PairTask(Task):
    """The model writes; there is nothing to choose from."""

    ARGUMENTS, KIND, WHAT, SIDES, EVALUATION = PairArguments, ENCODER_DECODER, "pairs", SIDES, PairEvaluation
    BUILTIN, BUILTIN_FILES = "dates in English and Korean", builtin.pair_files

    # Reading

    def splits(self) -> dict[str, list[Pair]]:
        for kind in ("lang", "column"):
            source, target = (vars(self.arguments)[f"{side}_{kind}"] for side in ("source", "target"))
            if (source is None) != (target is None) or (source is not None and source == target):
                raise InputError(
                    f"--source_{kind} {source} --target_{kind} {target}: give both, and two different ones."
                )
        return self.read_splits(keep=self.is_filled, together=lambda pair: pair.source)  # no source is in two splits

    def from_files(self, patterns: list[str], option: str, decoding: Decoding) -> Iterator[Pair]:
        suffixes = [f".{language}".lower() for language in (self.arguments.source_lang, self.arguments.target_lang)]
        aligned: dict[str, dict[str, str]] = {}
        for path in _expand(patterns, option, (*sources.TABLES, *suffixes)):
            if sources.kind(path) in sources.TABLES:
                yield from self.from_file(path, decoding)
            else:
                stem = path[: path.lower().removesuffix(".gz").rindex(".")]
                aligned.setdefault(stem, {})[sources.kind(path)] = path
        for stem, sides in aligned.items():
            for suffix in suffixes:
                if suffix not in sides:
                    found = next(iter(sides.values()))
                    raise InputError(f"{option} {found}: {stem}{suffix}, its other side, is missing.")
            source, target = (sides[suffix] for suffix in suffixes)
            yield from _aligned_pairs(source, target, decoding)

    def from_file(self, path: str, decoding: Decoding, labelled: bool = True) -> Iterator[Pair]:
        """In a .tsv without a header, columns have numbers."""
        columns = (self.arguments.source_column or "", self.arguments.target_column or "")
        if sources.kind(path) != ".tsv" or not all(map(str.isdecimal, columns)):
            yield from super().from_file(path, decoding, labelled)
            return
        for number, line in sources.numbered_lines(path, decoding):
            if line:
                row = {str(column): cell for column, cell in enumerate(line.split("\t"), 1)}
                yield self.from_row(".tsv", f"{path}:{number}", row, labelled)

    def from_row(self, kind: str, place: str, row: dict, labelled: bool = True) -> Pair:
        """The columns that are named; else those of the Hub's `translation`, or of the row, that are named by language. Without
        `labelled` there need be no target."""
        given, inner, texts = vars(self.arguments), row.get("translation"), []
        cells = inner if given["source_column"] is None and isinstance(inner, dict) else row
        for side in ("source", "target") if labelled else ("source",):
            name = given[f"{side}_column"] or given[f"{side}_lang"] or side
            option = f"--{side}_column or --{side}_lang" if cells is inner else f"--{side}_column"
            texts.append(sources.text_cell(cells, name, place, option).strip())
        return Pair(texts[0], "".join(texts[1:]), place, place, kind, row)

    def from_texts(self, lines: list[Line]) -> list[Pair]:
        return [Pair(line.strip(), "", place, place, sources.TEXT, {}) for place, line in lines]

    def read(self, patterns: Sequence[str], labelled: bool) -> list[Pair]:
        if not labelled:
            return super().read(patterns, labelled)
        pairs, counts = self.from_files(list(patterns), FILE, self.arguments.decoding), Counter[str]()
        return [pair for pair in pairs if self.is_filled(pair, counts)]

    def is_filled(self, pair: Pair, counts: Counter) -> bool:
        if pair.source and pair.target:
            return True
        if not self.arguments.skip_empty_pairs:
            side, place = ("target", pair.target_place) if pair.source else ("source", pair.place)
            raise InputError(
                f"{place}: the {side} is empty. Correct it, or leave such pairs out with --skip_empty_pairs."
            )
        counts["pairs with an empty side are left out"] += 1
        return False

    # Features and the model

    def know_labels(self, items: list[Pair], labelled: bool) -> None:
        """There are none."""

    def texts(self, items: list[Pair]) -> list[str]:
        return [text for pair in items for text in (pair.source, pair.target)]

    def features(self, items: list[Pair], *, labelled: bool = True, training: bool = False) -> list[Feature]:
        """input_ids and, with `labelled`, labels, both with the tokenizer's special tokens around the text and </s> at the
        end, and example, the index of the pair."""
        given, encoder = self.arguments, PairEncoder(self.processor, self.arguments)
        sides = [encoder.encode([pair.source for pair in items]), encoder.encode([pair.target for pair in items])]
        sizes = np.array([list(map(len, side)) for side in sides])  # (2, pairs)
        rooms = np.array(encoder.rooms)
        long = np.flatnonzero((sizes > rooms[:, None]).any(0))
        if len(long):
            lengths = np.array([given.max_source_length, given.max_target_length])
            what = (
                f"{len(long):,} of {len(items):,} pairs are longer than --max_source_length {lengths[0]} or "
                f"--max_target_length {lengths[1]}"
            )
            source, target = sizes.max(1) + lengths - rooms
            most = f"The longest source has {source} tokens, the longest target {target}."
            if not given.truncate_pairs:
                place = items[long[0]].place
                raise InputError(f"{place}: the first of those that are too long: {what}. {most} Raise the lengths.")
            logger.warning(f"{what}: their ends are cut off. {most} Raise the lengths to keep them.")
        kept = list(enumerate(self.SIDES if labelled else self.SIDES[:1]))
        return [
            {**{name: encoder.framed(sides[side][example], side) for side, name in kept}, "example": example}
            for example in range(len(items))
        ]

    def collate(self, labelled: bool):
        return CollatePairs(self.processor.pad_token_id) if labelled else super().collate(labelled)

    def vary(self, items: list[Pair]) -> BpeDropout | None:
        return BpeDropout(items, self.processor, self.arguments) if self.arguments.bpe_dropout else None

    def start(self, splits: dict[str, list[Pair]]) -> dict[str, list[Feature]]:
        texts = partial(self.texts, splits["train"])
        if self.arguments.vocab_size is None:
            self.arguments = replace(self.arguments, vocab_size=fitting_size(texts()))
        recipe = self.arguments
        self.processor = self.start_tokenizer(splits["train"], texts)
        features = {split: self.features(part) for split, part in splits.items()}
        settings = {name: vars(recipe)[name] for name in ("hidden_dropout_prob", "label_smoothing")}
        copied = copied_share(features["train"])
        self.model = start_encoder_decoder(recipe, self.processor, copied, texts, **settings)
        log_texts(self.processor, features["train"], self.SIDES)
        return features

    def prepare(self) -> tuple[None, list[Callback]]:
        count = self.arguments.average_checkpoints
        return None, [AverageCheckpoints(self.arguments.output_dir, count)] if count > 1 else []

    # The page of `hf-tiny demo`

    SHOWS = {"what it writes": "text", "what it looks at, or copies, for each token": "html"}

    def show(self, text: str) -> list:
        (written,) = written_texts(self.judged(text).results)
        pair = Pair(text.strip(), written, "", "", "", {})
        return [written, report.draw_table(*cross_attention(self.model, self.processor, pair)) if written else ""]

    # Figures

    def metric(self, items: Sequence[Pair]) -> Translation:
        return Translation()

    @property
    def generation(self) -> dict:
        """The settings of `model.generate`."""
        given = self.arguments
        beams = {"num_beams": given.num_beams, "length_penalty": given.length_penalty}
        return {**beams, "max_new_tokens": given.max_target_length}

    def fit_baseline(self, items: list[Pair]) -> tuple:
        """A copy of the source, or always the most frequent target: what has the higher chrF++ on the training data."""
        metric, usual = Translation(), Counter(pair.target for pair in items).most_common(1)[0][0]
        ways: dict[str, Callable[[Pair], str]] = {
            "copying the source": lambda pair: pair.source,
            "the most frequent target": lambda pair: usual,
        }

        def score(way: str, part: Sequence[Pair]) -> dict[str, float]:
            return metric.compute(predictions=list(map(ways[way], part)), references=[pair.target for pair in part])

        best = max(ways, key=lambda way: score(way, items[:COMPARED])["chrf"])
        return best, partial(score, best)

    def card(self, splits: dict[str, list[Pair]]) -> Card:
        return pair_card(self.arguments, splits["validation"][0].source, self.arguments.data_name(self.BUILTIN))


def pair_card(recipe, example: str, data: str) -> Card:
    beams = vars(recipe).get("num_beams", 4)
    return Card(template="seq2seq", data=data, example=example, num_beams=beams)
