"""Pretraining on raw text: ELECTRA's objectives, going on in a new field, language models; and what is forgotten later."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import ClassVar

import datasets
import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import (
    AutoTokenizer,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ModelOutput

from hf_tiny import checkpoint, convert
from hf_tiny.arguments import flag
from hf_tiny.callbacks import Callback, FollowGenerator, Stages, TrainState
from hf_tiny.data import sources, statistics
from hf_tiny.data.batches import Batch, Batches, Source
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.data.encoding import UTF8, Decoding
from hf_tiny.data.masking import MaskTokens
from hf_tiny.data.windows import Feature, WindowArguments
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Evaluation, Results, array, mean_loss, perplexity
from hf_tiny.metrics import Metric
from hf_tiny.models import HfTinyElectraConfig, HfTinyElectraForPreTraining
from hf_tiny.models.electra import OBJECTIVES, ElectraEncoder
from hf_tiny.models.pair import HfTinyPairForPreTraining
from hf_tiny.optim import parameter_groups
from hf_tiny.processes import on_main
from hf_tiny.start import ENCODER, InitArguments, check_init, quiet, read_config, start_words
from hf_tiny.tasks import Line, Task, TaskEvaluation
from hf_tiny.tasks.pairs import start_pair
from hf_tiny.tokenizer import NEEDED_TOKENS, extend_tokenizer, load_existing
from hf_tiny.train import train

logger = logging.getLogger(__name__)

CONTINUED = 40  # tokens that a causal language model writes in the demo

OBJECTIVE_NAMES = ("joint", *Stages.NAMES, "masked_rtd", "replace_mlm", "all_tokens_mlm", "mlm")
JUDGING = ("joint", "adversarial", "masked_rtd", "replace_mlm", "all_tokens_mlm")  # from the first step on
DISCRIMINATOR, GENERATOR = convert.PAIR
NEIGHBOUR_SCORE, NEIGHBOUR_LAYERS, SLOWEST_ANGLE = 8.0, 2, 0.3  # of heads that begin by looking at a neighbour
FORGETTING_BLOCKS, FORGETTING_LENGTH, FORGETTING_MASKED = 256, 64, 0.15
FORGETTING_FIGURES = ("mlm_loss", "mlm_accuracy", "rtd_loss", "rtd_auc")


@dataclass(frozen=True, kw_only=True)
class ElectraArguments(InitArguments):
    """What ELECTRA minimises, and what it goes on from."""

    GROUP: ClassVar[str] = "model"

    objective: str = flag("joint", "What to minimise.", choices=OBJECTIVE_NAMES)
    first_stage_steps: int = flag(
        -1,
        "Steps of MLM alone in two_stage (half of --max_steps by default), of joint training before adversarial (0).",
        low=-1,
    )
    freeze_words: bool = flag(
        False,
        "Keep the discriminator's word embeddings as they are, if they start from statistics (not with --sharing "
        "disentangled).",
    )
    mlm_probability: float = flag(0.15, "Share of tokens that are masked.", above=0, below=1)
    model_name_or_path: str | None = flag(
        None, "Go on from here: a folder of this recipe, or a native ELECTRA (…discriminator, beside it …generator)."
    )
    discriminator_name: str | None = flag(
        None, "Go on with native encoders as they are: a discriminator (electra, deberta-v2), with --generator_name."
    )
    generator_name: str | None = flag(None, "The native generator that goes with --discriminator_name.")
    extend_vocab: int = flag(0, "Number of word pieces of the new text that are added to its vocabulary.", low=0)
    measure_forgetting: list[str] | None = flag(None, "Raw text of the old field: the losses on it before and after.")


# The model and its objective


def start_electra(
    recipe, corpus: Corpus, train_tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> tuple[HfTinyElectraForPreTraining | HfTinyPairForPreTraining, PreTrainedTokenizerBase, list[Callback]]:
    """The model, its tokenizer and the callbacks for `train`: of native models, of an earlier run, or from scratch."""
    if recipe.discriminator_name or recipe.generator_name:
        return start_pair(recipe)
    check_init(recipe)
    if recipe.model_name_or_path:
        return continue_electra(recipe, corpus)
    if recipe.extend_vocab or recipe.measure_forgetting:
        raise InputError("--extend_vocab and --measure_forgetting need --model_name_or_path: what to go on from.")
    tokenizer = train_tokenizer()
    length = max(512, recipe.max_seq_length)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": length}
    model = HfTinyElectraForPreTraining(recipe.build_config(**sizes))
    if start_from_corpus(recipe, model, tokenizer, corpus):
        # The generator begins with how frequent words are: at the usual rates its biases would take thousands of steps.
        frequencies = on_main(lambda: statistics.log_frequencies(corpus.pair_counts(tokenizer)))
        model.generator_lm_head.bias.data.copy_(torch.from_numpy(frequencies))
        if recipe.freeze_words and recipe.objective in JUDGING and model.config.sharing != "disentangled":
            model.get_input_embeddings().weight.requires_grad_(False)
            logger.info("The word embeddings are not trained: see --freeze_words.")
    if recipe.init != "random" and model.config.norm_first:
        for encoder in {model.electra.encoder, model.generator_encoder}:
            start_layers(encoder)
    if model.config.sharing == "disentangled":  # what the discriminator adds to the generator's begins at 0
        model.electra.embeddings.load_state_dict(model.generator.embeddings.state_dict())
    return model, tokenizer, sharing_callbacks(model)


@torch.no_grad()
def start_layers(encoder: ElectraEncoder) -> None:
    """Layers begin by adding nothing. With rotary positions, heads of the first ones look at the token before or at the one
    after: an encoder takes long to find out that these say most of a token."""
    for layer in encoder.layers:
        layer.attention.out.weight.zero_()
        layer.feed_forward.down.weight.zero_()
    if encoder.config.position_embedding_type != "rotary" or encoder.config.modern:  # the latter has no biases
        return
    size = encoder.head_size
    angles = encoder.config.rope_theta ** (-torch.arange(0, size, 2) / size)  # from a token to the next one
    fast = angles > SLOWEST_ANGLE
    key = fast * (NEIGHBOUR_SCORE * size**0.5 / fast.sum()) ** 0.5
    sides = cycle((-1, 1))
    for layer in encoder.layers[:NEIGHBOUR_LAYERS]:
        queries, keys, _ = layer.attention.qkv.bias.split(layer.attention.sizes)
        for head in range(layer.attention.num_heads):
            turned, own = next(sides) * angles, slice(head * size, (head + 1) * size)
            queries[own] = torch.cat((key * turned.cos(), key * turned.sin()))
            keys[own] = torch.cat((key, torch.zeros_like(key)))


def sharing_callbacks(model: HfTinyElectraForPreTraining) -> list[Callback]:
    return [FollowGenerator(model)] if model.config.sharing == "disentangled" else []


def start_from_corpus(recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, corpus: Corpus) -> bool:
    """Let the word embeddings of a new model start from the statistics of the corpus."""
    return start_words(recipe, model, lambda: corpus.pair_counts(tokenizer))


def continue_electra(
    recipe, corpus: Corpus
) -> tuple[HfTinyElectraForPreTraining, PreTrainedTokenizerBase, list[Callback]]:
    """The model of an earlier run, with more words and a measure of what it forgets if the recipe says so."""
    if recipe.tokenizer_name:
        raise InputError("--model_name_or_path keeps its vocabulary: leave out --tokenizer_name (see --extend_vocab).")
    model, place = load_electra(recipe.model_name_or_path)
    tokenizer = load_existing("--model_name_or_path", place, NEEDED_TOKENS)
    longest = model.config.max_position_embeddings
    if recipe.max_seq_length > longest:
        raise InputError(f"--max_seq_length {recipe.max_seq_length}: {place} has {longest} positions.")
    old = deepcopy(tokenizer)  # the losses before and after are over the same tokens
    if recipe.extend_vocab:
        extend(model, tokenizer, extend_tokenizer(tokenizer, corpus.documents(), recipe.extend_vocab))
    files = recipe.measure_forgetting
    losses = [PretrainingLosses(model, old, files, recipe.encoding)] if files else []
    return model, tokenizer, [*losses, *sharing_callbacks(model)]


def load_electra(name: str) -> tuple[HfTinyElectraForPreTraining, str]:
    """The joint model, and where its tokenizer is."""
    place = str(Path(name, DISCRIMINATOR)) if Path(name, DISCRIMINATOR).is_dir() else name
    kind = read_config("--model_name_or_path", place, ENCODER).model_type
    if kind == HfTinyElectraConfig.model_type:
        return load_pretraining("--model_name_or_path", place).float(), place
    if kind != "electra":
        raise InputError(
            f"--model_name_or_path {name}: {kind} has no generator and no discriminator, and this recipe goes on with an "
            "ELECTRA only. Give a folder of pretrain-electra or a native ELECTRA; other pairs go on by --discriminator_name "
            "and --generator_name. For a task, fine-tune this one as it is."
        )
    if DISCRIMINATOR not in place:
        raise InputError(f"--model_name_or_path {name}: name the {DISCRIMINATOR}; the {GENERATOR} must be beside it.")
    discriminator = convert.load_model(ElectraForPreTraining, place)
    generator = convert.load_model(ElectraForMaskedLM, GENERATOR.join(place.rsplit(DISCRIMINATOR, 1)))
    tables = [pair.electra.embeddings.state_dict() for pair in (discriminator, generator)]
    same = all(torch.equal(tensor, tables[1][key]) for key, tensor in tables[0].items())
    return convert.electra_from_native(discriminator, generator, "embeddings" if same else "none").float(), place


def load_pretraining(option: str, name: str) -> HfTinyElectraForPreTraining:
    """Generator and discriminator of a folder of pretrain_electra.py."""
    if not isinstance(read_config("--model_name_or_path", name, ENCODER), HfTinyElectraConfig):
        raise InputError(f"{option}: {name} was not pretrained by hf_tiny: its losses cannot be measured.")
    with checkpoint.loaded(f"{option} {name} cannot be loaded"), torch.random.fork_rng(), quiet():
        model, info = HfTinyElectraForPreTraining.from_pretrained(name, output_loading_info=True)
    if info["missing_keys"]:
        raise InputError(
            f"{option}: {name} has no generator or no discriminator. Give a folder of pretrain_electra.py."
        )
    return model


@torch.no_grad()
def extend(
    model: HfTinyElectraForPreTraining, tokenizer: PreTrainedTokenizerBase, pieces: dict[str, list[int]]
) -> None:
    """New pieces start from the mean of the old ones that they consisted of."""
    size = max(tokenizer.get_vocab().values()) + 1
    model.resize_token_embeddings(size, mean_resizing=False)
    tables = {
        id(t): t for t in (model.get_input_embeddings().weight, model.generator_embeddings.word_embeddings.weight)
    }
    for table in (*tables.values(), model.generator_lm_head.bias):
        for number, old in enumerate(pieces.values(), start=size - len(pieces)):
            table[number] = table[old].mean(0)


def start_objective(model: HfTinyElectraForPreTraining, recipe) -> tuple[list[dict], Stages]:
    """Set up the model as the recipe says; returns the groups of the optimiser and the callback for `train`."""
    name, sharing = recipe.objective, model.config.sharing
    if name == "mlm" and sharing != "all":
        raise InputError(
            "--objective mlm trains the generator only: the encoder that is kept learns with --sharing all "
            "--generator_size 1."
        )
    if name == "two_stage" and sharing != "none":
        raise InputError(
            "--objective two_stage freezes the generator in its second stage, so that nothing can be shared: add "
            "--sharing none, and --generator_size 1 for a discriminator that starts from the generator's weights."
        )
    switch = recipe.first_stage_steps
    if switch < 0:
        switch = recipe.max_steps // 2 if name == "two_stage" else 0
    if name == "two_stage" and recipe.max_minutes:
        raise InputError("--objective two_stage: its stages are counted in steps. Give --max_steps, not --max_minutes.")
    if name == "two_stage" and not 0 < switch < recipe.max_steps:
        raise InputError(
            f"--objective two_stage: the first stage of {switch} steps must leave some of --max_steps {recipe.max_steps}."
        )
    stages = Stages(model, name, switch)
    head = OBJECTIVES[stages.stages[-1]].head
    if head is not None:
        model.objective_head = head(model.config).apply(model._init_weights)
    if name != "two_stage":
        return parameter_groups(model, recipe.weight_decay), stages
    if (size := model.config.generator_size) != 1:
        logger.info(f"The generator is {size:g} times as wide: the discriminator will start from its embeddings only.")
    first = nn.ModuleList([model.generator, model.generator_head, model.generator_lm_head])
    second = nn.ModuleList([model.electra, model.discriminator_head])
    groups = [{**group, "stop": switch} for group in parameter_groups(first, recipe.weight_decay)]
    groups += [{**group, "start": switch} for group in parameter_groups(second, recipe.weight_decay)]
    return groups, stages


def pretrain(
    recipe, corpus: Corpus, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, collate, evaluation, **others
) -> dict[str, float]:
    """Train on the blocks of the corpus, of which `collate` makes batches; `evaluation(batches)` is of held-out blocks.

    others: see `train`.
    """
    batches, held_out = corpus.batches(recipe, tokenizer, collate)
    judge = evaluation(Batches(held_out, collate, recipe.per_device_eval_batch_size, recipe.seed, shuffle=False))
    return train(model, batches, recipe, evaluate=judge, processor=tokenizer, **others)


# Figures


class ReplacedTokenDetection(Metric):
    """Scores above 0 say "replaced". The majority entropy is the loss of always answering with the overall share of
    replaced tokens: a discriminator that does no better has learned nothing."""

    INPUTS: ClassVar[dict] = {"predictions": datasets.Value("float32"), "references": datasets.Value("int8")}

    def _compute(self, predictions: Sequence[float], references: Sequence[int]) -> dict[str, float]:
        from sklearn.metrics import precision_recall_fscore_support, roc_auc_score

        scores, replaced = np.asarray(predictions), np.asarray(references)
        found = scores > 0
        precision, recall, _, _ = precision_recall_fscore_support(replaced, found, average="binary", zero_division=0)
        share = replaced.mean()
        both = 0 < share < 1
        entropy = -share * math.log(share) - (1 - share) * math.log(1 - share) if both else 0.0
        return {
            "rtd_accuracy": float((found == replaced).mean()),
            "rtd_precision": float(precision),
            "rtd_recall": float(recall),
            "rtd_auc": float(roc_auc_score(replaced, scores)) if both else math.nan,
            "rtd_majority_entropy": float(entropy),
        }


class ElectraEvaluation(Evaluation):
    def __init__(self, batches: Source, discriminator_weight: float):
        super().__init__(batches)
        self.discriminator_weight, self.metric = discriminator_weight, ReplacedTokenDetection()

    def collect(self, outputs: ModelOutput, batch: Batch) -> Results:
        valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        masked, tokens = batch["num_items_in_batch"]
        return {
            "scores": array(outputs.logits[valid]),
            "replaced": array(outputs.replaced[valid]),
            "mlm_correct": array(outputs.mlm_logits.argmax(-1).eq(outputs.mlm_labels)),
            # Sums and counts, not means: batches of different size then weigh what they should.
            "mlm_loss": array((outputs.mlm_loss * masked)[None]),
            "rtd_loss": array((outputs.rtd_loss * tokens)[None]),
        }

    def compute(self, results: Results) -> dict[str, float]:
        mlm_loss = float(results["mlm_loss"].sum() / results["mlm_correct"].size)
        rtd_loss = float(results["rtd_loss"].sum() / results["replaced"].size)
        return {
            "loss": mlm_loss + self.discriminator_weight * rtd_loss,
            "mlm_loss": mlm_loss,
            "mlm_accuracy": float(results["mlm_correct"].mean()),
            "rtd_loss": rtd_loss,
            **self.metric.compute(predictions=results["scores"], references=results["replaced"]),
        }

    def training_figures(self, outputs: ModelOutput, batch: Batch) -> dict[str, float]:
        """A falling loss hides a discriminator that has collapsed: the log has its accuracy, recall and AUC."""
        return self.compute(self.collect(outputs, batch))


class TokenEvaluation(Evaluation):
    """Of a token from those before it, or from those around it. `ppl`: perplexity, by which the loss compares models with
    one tokenizer. `bits_per_byte`: the information in the scored tokens over the bytes of their text, which compares
    models with any.

    token_bytes: how many bytes of text each token stands for.
    """

    def __init__(self, batches: Source, token_bytes: np.ndarray):
        super().__init__(batches)
        self.token_bytes = token_bytes

    def collect(self, outputs: ModelOutput, batch: Batch) -> Results:
        labels = array(batch["labels"])
        size = self.token_bytes[labels[labels != -100]].sum(keepdims=True)
        return {**super().collect(outputs, batch), "bytes": size}

    def compute(self, results: Results) -> dict[str, float]:
        loss, bits = mean_loss(results), results["loss"].sum(dtype=np.float64) / math.log(2)
        return {"loss": loss, "ppl": perplexity(loss), "bits_per_byte": float(bits / results["bytes"].sum())}


# A pretrained model at work


@dataclass(frozen=True, kw_only=True)
class TokenArguments(WindowArguments):
    """Which texts."""

    text_column: str = flag("text", "The column that holds the text.")
    top_k: int = flag(5, "Number of tokens that are proposed for each masked one.", low=1)


@dataclass(frozen=True)
class RawText:
    text: str
    place: str
    kind: str
    row: dict
    labels: tuple[str, ...] = ()


class TokenEvidence(TaskEvaluation):
    """What a discriminator thinks of each token, and what a generator proposes for each masked one."""

    def answer(self, model: nn.Module, batch: Batch) -> Results:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
        outputs, ids, tokenizer = model(**inputs), batch["input_ids"], self.task.processor
        logits = outputs.logits
        judged = logits.ndim == 2
        if judged and isinstance(model, HfTinyElectraForPreTraining):
            logits = model.generator_lm_head(model.generator_head(model.run_generator(**inputs)))
        special = torch.tensor(tokenizer.all_special_ids, device=ids.device)
        masked = ids.eq(tokenizer.mask_token_id)
        shown = masked | ~torch.isin(ids, special)
        scores, tokens = torch.zeros(*ids.shape, 0), torch.zeros(*ids.shape, 0, dtype=torch.long)
        if logits.ndim == 3:
            scores, tokens = (
                (logits * masked[:, :, None]).softmax(-1).topk(min(self.task.arguments.top_k, logits.shape[-1]))
            )
        replaced = outputs.logits.sigmoid() if judged else torch.full(ids.shape, math.nan)
        example = batch["about"]["example"][:, None].expand_as(ids)
        found = {"ids": ids, "example": example, "replaced": replaced}
        found |= {"masked": masked, "scores": scores, "tokens": tokens}
        return {name: array(value[shown.to(value.device)]) for name, value in found.items()}

    def rows(self) -> Iterator[tuple[str, str | dict]]:
        tokenizer, order = self.task.processor, np.argsort(self.results["example"], kind="stable")
        results = {name: values[order] for name, values in self.results.items()}
        bounds = np.searchsorted(results["example"], np.arange(len(self.items) + 1))
        for text, start, stop in zip(self.items, bounds, bounds[1:], strict=False):
            part = {name: values[start:stop] for name, values in results.items()}
            row = {**text.row, "tokens": tokenizer.convert_ids_to_tokens(part["ids"].tolist())}
            if not np.isnan(part["replaced"]).any():
                row["replaced"] = part["replaced"].round(4).tolist()
            if part["tokens"].size:
                proposed = (part[name][part["masked"]] for name in ("tokens", "scores"))
                row["prediction"] = [
                    dict(zip(tokenizer.convert_ids_to_tokens(ids.tolist()), scores.round(4).tolist(), strict=True))
                    for ids, scores in zip(*proposed, strict=True)
                ]
            yield text.kind, row


class TokenTask(Task):
    """Which tokens a discriminator suspects, each with its probability of being replaced; and for each [MASK] the tokens
    that a generator, or a masked language model, proposes."""

    ARGUMENTS, EVALUATION = TokenArguments, TokenEvidence

    LIVE = True

    @property
    def judges(self) -> bool:
        return isinstance(self.model, HfTinyElectraForPreTraining | ElectraForPreTraining)

    @property
    def shows(self) -> dict[str, str]:
        proposed = (
            {}
            if isinstance(self.model, ElectraForPreTraining)
            else {f"proposals for {self.processor.mask_token}": "table"}
        )
        return ({"tokens, the redder the more suspected": "heat"} if self.judges else {}) | proposed

    def show(self, text: str) -> list:
        """The text in tokens with the probability that each was replaced, and what is proposed for masked ones."""
        results, tokenizer = self.judged(text).results, self.processor
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        skipped = {*tokenizer.all_special_ids} - {tokenizer.mask_token_id}
        replaced, pieces, done = iter(results["replaced"].tolist()), [], 0
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            pieces += [(text[done:start], None)] if done < start else []
            pieces.append((text[start:end], None if token in skipped else round(next(replaced), 4)))
            done = end
        rows = [
            [str(place), token, f"{score:.4f}"]
            for place, (ids, scores) in enumerate(
                zip(*(results[name][results["masked"]].tolist() for name in ("tokens", "scores")), strict=True), 1
            )
            for token, score in zip(tokenizer.convert_ids_to_tokens(ids), scores, strict=True)
        ]
        kinds = {"heat": pieces, "table": [[tokenizer.mask_token, "token", "probability"], *rows]}
        return [kinds[kind] for kind in self.shows.values()]

    def from_file(self, path: str, decoding: Decoding, labelled: bool = True) -> Iterable[RawText]:
        if labelled:
            raise InputError(
                f"{path}: a model without a task is measured by its pretraining recipe. Fine-tune it first."
            )
        return super().from_file(path, decoding, labelled)

    def from_row(self, kind: str, place: str, row: dict, labelled: bool = True) -> RawText:
        return RawText(sources.text_cell(row, self.arguments.text_column, place, "--text_column"), place, kind, row)

    def from_texts(self, lines: list[Line]) -> list[RawText]:
        return [RawText(line, place, ".jsonl", {"text": line}) for place, line in lines]

    def features(self, items: list[RawText], *, labelled: bool = True, training: bool = False) -> list[Feature]:
        encoder, tokenizer, features = self.arguments.encoder(self.processor), self.processor, []
        for example, item in enumerate(items):
            ids = tokenizer(item.text, add_special_tokens=False, verbose=False)["input_ids"]
            if not self.judges and tokenizer.mask_token_id not in ids:
                raise InputError(
                    f"{item.place}: there is no {tokenizer.mask_token} in this text for the model to fill."
                )
            windows = [ids[start : start + encoder.room] for start in range(0, max(1, len(ids)), encoder.room)]
            features += [{**encoder.framed(window), "example": example} for window in windows]
        return features


class ContinueTask(TokenTask):
    """What a causal language model writes after a text."""

    PREDICTS, LIVE, SHOWS = False, False, {"how it goes on": "text"}
    shows = Task.shows

    def show(self, text: str) -> list:
        encoder = self.arguments.encoder(self.processor)
        new = min(CONTINUED, encoder.room // 2)
        ids = encoder.backend.encode(text, add_special_tokens=False).ids[new - encoder.room :]
        if not ids:
            raise InputError("There is no text yet. Write one.")
        given = torch.tensor([ids], device=self.model.device)
        choice = {"do_sample": True, "top_k": 50, "temperature": 0.8}
        written = self.model.generate(input_ids=given, max_new_tokens=new, **choice)
        return [self.processor.decode(written[0], skip_special_tokens=True)]


# What is forgotten


class PretrainingLosses(Callback):
    """The pretraining losses on raw text, before and after. Every process measures by itself; random numbers are left
    alone."""

    def __init__(
        self,
        model: HfTinyElectraForPreTraining,
        tokenizer: PreTrainedTokenizerBase,
        files: list[str],
        encoding: str = UTF8,
    ):
        self.model = model
        length = min(FORGETTING_LENGTH, model.config.max_position_embeddings)
        mask = MaskTokens(tokenizer, FORGETTING_MASKED, seed=0)
        batches = Batches(raw_blocks(files, tokenizer, length, encoding), mask, batch_size=32, seed=0, shuffle=False)
        self.evaluation = ElectraEvaluation(batches, model.config.discriminator_weight)
        self.before = self.measure()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        self.model.eval()
        batches = self.evaluation.batches
        given = (send_to_device(batches[index], self.model.device) for index in range(len(batches)))
        results = [self.evaluation.collect(self.model(**batch), batch) for batch in given]
        figures = self.evaluation.compute(
            {name: np.concatenate([result[name] for result in results]) for name in results[0]}
        )
        return {name: figures[name] for name in FORGETTING_FIGURES}

    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        measured = {"before": self.before, "after": self.measure()}
        return {f"forgetting_{name}_{when}": measured[when][name] for name in FORGETTING_FIGURES for when in measured}


class Forgetting(PretrainingLosses):
    """Of an encoder that learns a task: it is put back between the heads that it was pretrained with."""

    def __init__(self, name: str, files: list[str], encoding: str = UTF8):
        model = load_pretraining("--measure_forgetting", name)
        super().__init__(model, AutoTokenizer.from_pretrained(name, trust_remote_code=False), files, encoding)

    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        self.model.electra.load_state_dict(model.base_model.state_dict())
        return super().on_train_end(state, model)


def raw_blocks(
    files: list[str], tokenizer: PreTrainedTokenizerBase, length: int, encoding: str = UTF8
) -> datasets.Dataset:
    """`[CLS] A [SEP]`, full blocks from the beginning of the text; every file (or folder, or glob) has an equal share."""
    count = -(-FORGETTING_BLOCKS // len(files))
    blocks = [_first_blocks(file, tokenizer, count, length - 2, encoding) for file in files]
    ends = ((0, 0), (tokenizer.cls_token_id, tokenizer.sep_token_id))
    packed = np.pad(np.concatenate(blocks), ((0, 0), (1, 1)), constant_values=ends)
    if not len(packed):
        raise InputError(f"--measure_forgetting {' '.join(files)}: too short, it has fewer than {length - 2} tokens.")
    starts = np.full(len(packed), length, dtype=np.int32)
    return datasets.Dataset.from_dict({"input_ids": packed, "segment_start": starts})


def _first_blocks(file: str, tokenizer: PreTrainedTokenizerBase, count: int, size: int, encoding: str) -> np.ndarray:
    tokens: list[int] = []
    # Given as validation text too, nothing of it is held out.
    arguments = CorpusArguments(train_file=[file], validation_file=[file], encoding=encoding)
    texts: Iterable[str] = Corpus(arguments).documents()
    for text in texts:
        tokens += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= count * size:
            break
    count = min(count, len(tokens) // size)
    return np.array(tokens[: count * size], dtype=np.int32).reshape(count, size)
