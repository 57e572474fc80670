"""What to start from: scratch, a checkpoint or a native model; which weights may move, and how fast."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from . import checkpoint
from .arguments import flag
from .callbacks import L2SP, Callback, MergeLora
from .data import sources, statistics
from .data.corpus import SUPPORTED, Corpus, CorpusArguments
from .errors import InputError, require, similar
from .hub import code
from .models import HfTinyReformerConfig
from .models.heads import EncoderConfig
from .optim import depths, layer_groups
from .processes import on_main
from .tokenizer import NEEDED_TOKENS, SEQ2SEQ_NEEDED_TOKENS, check_place, load_existing, load_tokenizer

logger = logging.getLogger(__name__)

# With these the changes to the configuration go into it; other loaders get them beside the encoder's configuration.
HEADS = (AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification)
TEXTS = 10_000  # counted at once
CHARACTERS = 200  # of raw text for each token of a large vocabulary, at least
NEED_PRETRAINED = {"trainable_layers": -1, "reinit_layers": 0, "lora_rank": 0, "measure_forgetting": None}


@dataclass(frozen=True, kw_only=True)
class InitArguments:
    """What a model from scratch knows."""

    GROUP: ClassVar[str] = "model"

    init: str | None = flag(
        None,
        "From scratch: statistics (of the data: similar words begin with similar embeddings; the default) or random.",
        choices=("statistics", "random"),
    )


@dataclass(frozen=True, kw_only=True)
class StartArguments(InitArguments):
    """What to start from."""

    model_name_or_path: str | None = flag(None, "The pretrained model to start from: a folder or a Hub id.")
    config_name: str | None = flag(
        None, "Start from scratch, with the configuration (and the tokenizer) of this model."
    )
    trust_remote_code: bool = flag(False, "Run the code that comes with the model: only if you have read it.")


@dataclass(frozen=True, kw_only=True)
class TransferArguments(StartArguments):
    """What of it moves, and how fast."""

    layer_decay: float = flag(1.0, "Each layer learns at this fraction of the rate of the one above.", above=0, high=1)
    head_lr_factor: float = flag(1.0, "The head learns at this multiple of the rate.", above=0)
    words_lr_factor: float = flag(
        1.0, "Word embeddings that start from statistics learn at this multiple of the rate.", low=0
    )
    slow_start_steps: int = flag(0, "Number of steps in which only the head learns.", low=0)
    unfreeze_steps: int = flag(
        0, "After that, one more layer begins to learn every so many steps, from the last one down.", low=0
    )
    trainable_layers: int = flag(-1, "-1 trains all layers, 0 only the head, n the head and the last n layers.", low=-1)
    l2_sp: float = flag(1.0, "Decay of a pretrained encoder's weights towards their start; 0: towards zero.", low=0)
    reinit_layers: int = flag(0, "Number of last layers that are initialised again before training.", low=0)
    lora_rank: int = flag(0, "Train adapters of this rank (and the head) instead of the encoder's weights.", low=0)


@dataclass(frozen=True)
class Kind:
    """The models that a task can start from: those of a mapping of transformers."""

    name: str
    mapping: Mapping
    advice: str
    needed_tokens: tuple[str, ...] = ()


ENCODER = Kind(
    "an encoder",
    MODEL_FOR_MASKED_LM_MAPPING,
    "Give one made by pretrain_electra.py or pretrain_reformer.py, a BERT, RoBERTa, ELECTRA, DeBERTa or the like.",
    NEEDED_TOKENS,
)
ENCODER_DECODER = Kind(
    "an encoder-decoder",
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "Give one made by pretrain_seq2seq.py, or a T5, BART or Marian; or leave it out to start from scratch.",
    SEQ2SEQ_NEEDED_TOKENS,
)
IMAGE_CLASSIFIER = Kind(
    "a model that classifies images",
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    "Give one made by pretrain_vit.py, or a ViT of transformers; `hf-tiny convert` makes the first from a ViTMAE.",
)


def check(recipe: StartArguments, kind: Kind = ENCODER) -> None:
    """Refuse combinations that have no meaning, and a model that cannot be used, before any data is read."""
    settings = vars(recipe)
    check_init(recipe)
    if recipe.model_name_or_path and recipe.config_name:
        raise InputError("Give --model_name_or_path (its weights) or --config_name (from scratch), not both.")
    for needy, unused in NEED_PRETRAINED.items():
        if settings.get(needy, unused) != unused and not recipe.model_name_or_path:
            raise InputError(f"--{needy} needs a pretrained encoder: give --model_name_or_path.")
    if settings.get("lora_rank") and settings.get("reinit_layers"):
        raise InputError("--lora_rank leaves the encoder's weights as they are: leave out --reinit_layers.")
    if -1 < settings.get("trainable_layers", -1) < settings.get("reinit_layers", 0):
        raise InputError("--reinit_layers must not exceed --trainable_layers: what is initialised must be trained.")
    option, name = named(recipe)
    if name:
        read_config(option, name, kind, trust_remote_code=recipe.trust_remote_code)


def check_init(recipe) -> None:
    """Both flags are for a model from scratch."""
    given = {"init": recipe.init if recipe.init == "statistics" else None, "raw_file": vars(recipe).get("raw_file")}
    for name, value in given.items():
        if value and recipe.model_name_or_path:
            raise InputError(
                f"--{name} is for a model from scratch: --model_name_or_path {recipe.model_name_or_path} has learned its "
                "embeddings. Leave out one of the two."
            )


def named(recipe: StartArguments) -> tuple[str, str | None]:
    """The flag that names a model, and the name."""
    if recipe.model_name_or_path:
        return "--model_name_or_path", recipe.model_name_or_path
    return "--config_name", recipe.config_name


def base_name(recipe: StartArguments) -> str:
    """As the model card names it."""
    if recipe.model_name_or_path:
        return code(recipe.model_name_or_path)
    return f"scratch, with the configuration of {code(recipe.config_name)}" if recipe.config_name else "scratch"


def load_config(option: str, name: str, *, trust_remote_code: bool = False, **changes) -> PreTrainedConfig:
    """The configuration of a model of any kind. option: the flag that names it, for messages; none where no flag does."""
    place = f"{option} {name}".lstrip()
    check_place(option, name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **changes)
    except (OSError, ValueError) as error:
        reason = str(error)
        if "trust_remote_code" in reason:
            reason = "it comes with code of its own. Read that, then give --trust_remote_code to run it."
        raise InputError(f"{place}: no model could be found there: {reason}{similar(name, folders=True)}") from error


def read_config(option: str, name: str, kind: Kind, *, trust_remote_code: bool = False, **changes) -> PreTrainedConfig:
    """The configuration of a model, which must be of the kind."""
    config = load_config(option, name, trust_remote_code=trust_remote_code, **changes)
    settings = config.to_dict()
    if trust_remote_code and type(config).__module__.startswith("transformers_modules"):
        return config  # what it can be is known to its code only
    decodes = settings.get("is_decoder") and not isinstance(config, HfTinyReformerConfig)  # whose heads see all tokens
    if type(config) in kind.mapping and (kind is not ENCODER or not (decodes or settings.get("is_encoder_decoder"))):
        return config
    found = "another kind of model"
    if settings.get("is_encoder_decoder"):
        found = ENCODER_DECODER.name
    elif decodes or (type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in ENCODER.mapping):
        found = "a decoder, which sees only what comes before"
    else:
        found = next((one.name for one in (ENCODER, IMAGE_CLASSIFIER) if type(config) in one.mapping), found)
    raise InputError(f"{option} {name}: {config.model_type} is {found}, and this needs {kind.name}. {kind.advice}")


def start_tokenizer(
    recipe,
    texts: Callable[[], Iterable[str]],
    fingerprint: str | None = None,
    *,
    kind: Kind = ENCODER,
    model_max_length: int = 512,
) -> PreTrainedTokenizerBase:
    """The tokenizer named in the recipe, else that of its model, else one trained on the texts.

    fingerprint: of the texts, where it is known without reading them.
    """
    option, name = named(recipe)
    raw = raw_corpus(recipe)
    if recipe.vocab_size is None:
        large = raw and sum(map(len, raw.documents())) >= CHARACTERS * recipe.RAW_VOCAB_SIZE
        recipe = replace(recipe, vocab_size=recipe.RAW_VOCAB_SIZE if large else recipe.VOCAB_SIZE)
    if recipe.lowercase is None:
        recipe = replace(recipe, lowercase=all(text == text.lower() for text in texts()))
    documents = (lambda: chain(raw.documents(), texts())) if raw else texts
    if name and not recipe.tokenizer_name:
        try:
            return load_existing(option, name, kind.needed_tokens, recipe.trust_remote_code)
        except InputError as error:
            raise InputError(f"{error} A tokenizer from elsewhere can be given by --tokenizer_name.") from error
    if fingerprint is None and not recipe.tokenizer_name:
        content = "\n".join(texts())
        fingerprint = hashlib.sha256(content.encode(errors="replace")).hexdigest() + (raw.fingerprint if raw else "")
    return load_tokenizer(
        recipe, documents, fingerprint or "", model_max_length=model_max_length, needed_tokens=kind.needed_tokens
    )


def start_model(
    recipe,
    auto_class,
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind = ENCODER,
    *,
    texts: Callable[[], Iterable[str]] | None = None,
    **changes,
):
    """The model to train: pretrained, or from scratch.

    auto_class: an Auto class of transformers, or anything that has `from_pretrained(name, **changes)` and
        `from_config(encoder_config, **changes)`.
    texts: to train on: a model from scratch starts from their statistics, and from those of --raw_file; None: it does not.
    changes: to the configuration, such as the labels.
    """
    option, name = named(recipe)
    trusted = {"trust_remote_code": recipe.trust_remote_code}
    if name and recipe.model_name_or_path:
        model = pretrained(name, auto_class, {**recipe.given_settings, **changes, **trusted})
        known = model.get_input_embeddings().num_embeddings
        if len(tokenizer) > known:
            raise InputError(
                f"--model_name_or_path {name} knows {known:,} tokens, but the tokenizer has {len(tokenizer):,}: they do not "
                "belong together. Leave out --tokenizer_name."
            )
        return model
    inside, beside = ({}, changes) if kind is ENCODER and auto_class not in HEADS else (changes, {})
    inside = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **inside}
    given = recipe.given_settings
    config = read_config(option, name, kind, **trusted, **inside, **given) if name else recipe.build_config(**inside)
    try:
        model = auto_class.from_config(config, **beside)
    except ValueError as error:
        raise InputError(f"{f'{option} {name}: ' if name else ''}no such model for this task: {error}") from error
    logger.info(f"{type(model).__name__}: from scratch, {model.num_parameters():,} parameters.")
    if texts is not None:
        start_words(recipe, model, lambda: text_statistics(recipe, tokenizer, texts()))
    return model


# Corpus statistics


def raw_corpus(recipe) -> Corpus | None:
    """The text of --raw_file. Given as validation text too, nothing of it is held out."""
    files = vars(recipe).get("raw_file")
    if not files:
        return None
    sources.expand(files, "--raw_file", SUPPORTED)  # what is missing is named with this flag
    encoding = {"encoding": recipe.encoding, "encoding_errors": recipe.encoding_errors}
    return Corpus(CorpusArguments(train_file=files, validation_file=files, **encoding))


def text_statistics(recipe, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]):
    """How often tokens stand near each other and together in the texts, and in --raw_file."""
    encode, rest = tokenizer.backend_tokenizer.encode_batch_fast, iter(texts)
    groups = iter(lambda: encode(list(islice(rest, TEXTS)), add_special_tokens=False), [])
    counts = statistics.text_counts((one.ids for group in groups for one in group), len(tokenizer))
    raw = raw_corpus(recipe)
    return counts + raw.pair_counts(tokenizer) if raw else counts


def start_words(recipe, model: PreTrainedModel, counts: Callable) -> bool:
    """Let the word embeddings of a new model start from the counts that `counts()` gives, unless the recipe or a lack of
    text forbids it; returns whether they do. The main process computes them for all. A run that goes on has its weights:
    they are only marked."""
    if recipe.init == "random" or vars(recipe).get("model_name_or_path"):
        return False
    table = model.get_input_embeddings()
    goes_on = on_main(lambda: checkpoint.goes_on(recipe))

    def vectors() -> np.ndarray | None:
        found = counts()
        tokens, size = statistics.num_tokens(found), found.shape[1]
        if tokens < statistics.LEAST_TOKENS * size:
            if not goes_on:
                logger.warning(
                    f"{tokens:,} tokens of text say too little of the {size:,} in the vocabulary: the embeddings start at random."
                    + " More text can be given by --raw_file." * ("raw_file" in vars(recipe))
                )
            return None
        return np.empty(0) if goes_on else statistics.token_vectors(found, table.embedding_dim)

    found = on_main(vectors)
    if found is None:
        return False
    others = [module.weight for name, module in model.named_modules() if name.endswith("word_embeddings")]
    tables = {id(weight): weight for weight in (table.weight, *others)}.values()  # tied ones once
    if not goes_on:
        set_words(tables, found)
        logger.info(
            f"Word embeddings start from corpus statistics: {int(found.any(1).sum()):,} tokens in {found.shape[1]} dimensions."
        )
    for weight in tables:
        weight._from_statistics = True
    return True


@torch.no_grad()
def set_words(tables: Iterable[torch.Tensor], vectors: np.ndarray) -> None:
    """Scaled to the mean norm of the usual initialisation, which tokens without a vector keep, and dimensions beyond the
    rank of the counts."""
    known = torch.from_numpy(np.flatnonzero(vectors.any(1)))
    rows = torch.from_numpy(vectors)[known]
    for table in tables:
        scale = table.norm(dim=1).mean() / rows.norm(dim=1).mean()
        table[known, : rows.shape[1]] = (rows * scale).to(table)


def pretrained(name: str, auto_class, changes: dict) -> PreTrainedModel:
    """The model of this name with a head for the task; the encoder's weights must all be there."""
    option, changes = "--model_name_or_path", {"trust_remote_code": False, **changes}
    with checkpoint.loaded(f"{option} {name}: its weights could not be loaded for this task"), quiet():
        try:
            model = auto_class.from_pretrained(name, **changes)
        except RuntimeError:  # it has a head for another number of labels
            model = auto_class.from_pretrained(name, **changes, ignore_mismatched_sizes=True)
    computed = model._keys_to_ignore_on_save or ()  # Marian's positions: what is not saved must not be learned
    for key in computed:
        model.get_parameter(key).requires_grad_(False)
    new = [
        key
        for key, parameter in model.named_parameters()
        if key not in computed and not vars(parameter).get("_is_hf_initialized")
    ]
    places = depths(model)
    lacking = [key for key in new if places[key] is not None]
    if lacking:
        raise InputError(
            f"{option} {name}: it lacks {len(lacking)} weights of the encoder, such as {lacking[0]}. Give the folder of "
            "a finished model."
        )
    parts = dict.fromkeys(key.rpartition(".")[0] for key in new)
    taken = len(places) - len(new)
    logger.info(f"{name}: {taken} weights taken, {len(new)} new{': ' if new else ''}{', '.join(parts)}.")
    return model.float()  # the optimiser needs float32, whatever the checkpoint was saved in


@contextmanager
def quiet() -> Iterator[None]:
    """transformers reports every new weight in a table of its own."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


# What of it moves


def prepare(model: PreTrainedModel, recipe) -> tuple[list[dict], list[Callback]]:
    """Set up the model as the recipe says; returns the groups of the optimiser and the callbacks for `train`."""
    places = depths(model)
    top = max((depth for depth in places.values() if depth is not None), default=0)
    check_layers(model, recipe, top)
    last = {name: 0 if depth is None else top - depth + 1 for name, depth in places.items()}  # 1: the last layer
    reinitialize(model, [name for name in last if 0 < last[name] <= recipe.reinit_layers])
    if recipe.trainable_layers >= 0:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(last[name] <= recipe.trainable_layers)
    callbacks: list[Callback] = []
    if recipe.lora_rank:
        add_lora(model, recipe.lora_rank)
        callbacks.append(MergeLora())
    names = ("weight_decay", "layer_decay", "head_lr_factor", "slow_start_steps", "unfreeze_steps")
    if recipe.model_name_or_path and isinstance(model.base_model.config, EncoderConfig):
        model.get_input_embeddings().weight._from_statistics = True  # from where its own pretraining took them
    groups = slow_words(layer_groups(model, **{name: vars(recipe)[name] for name in names}), recipe.words_lr_factor)
    if recipe.l2_sp and recipe.model_name_or_path and not recipe.lora_rank:
        # What was initialised again has nowhere to be pulled to.
        pulled = [g for g in groups if g["depth"] is not None and g["depth"] <= top - recipe.reinit_layers]
        for group in pulled:
            group["weight_decay"] = 0.0  # the decay towards the start takes the place of the decay towards zero
        callbacks.append(L2SP(pulled, recipe))
    moving = sum(parameter.numel() for group in groups for parameter in group["params"])
    latest = max(group["start"] for group in groups)
    if 0 < recipe.max_steps <= latest:
        raise InputError(
            f"--slow_start_steps and --unfreeze_steps: the last part of the encoder would begin to learn at step {latest}, "
            f"but the run has {recipe.max_steps} steps."
        )
    logger.info(f"{moving:,} of {model.num_parameters():,} parameters are trained, all of them from step {latest} on.")
    return groups, callbacks


def slow_words(groups: list[dict], factor: float) -> list[dict]:
    """Word embeddings that start from statistics learn at this multiple of the rate of their group."""
    slow = []
    for group in groups if factor != 1 else ():
        words = [parameter for parameter in group["params"] if vars(parameter).get("_from_statistics")]
        group["params"] = [parameter for parameter in group["params"] if not vars(parameter).get("_from_statistics")]
        slow.append({**group, "params": words, "factor": factor * group["factor"]})
    return [group for group in (*groups, *slow) if group["params"]]


def check_layers(model: PreTrainedModel, recipe: TransferArguments, top: int) -> None:
    for name in ("trainable_layers", "reinit_layers"):
        if vars(recipe)[name] > top:
            raise InputError(f"--{name} {vars(recipe)[name]}: {type(model).__name__} has {top} layers.")
    if not top and (recipe.lora_rank or recipe.unfreeze_steps or recipe.layer_decay != 1):
        raise InputError(
            f"{type(model).__name__} has no numbered layers: leave out --lora_rank, --unfreeze_steps and --layer_decay."
        )


@torch.no_grad()
def reinitialize(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Initialise these parameters again, as the model itself does."""
    for name in names:
        model.get_parameter(name)._is_hf_initialized = False  # transformers does not touch what it has loaded
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
        model.base_model._init_weights(model.get_submodule(owner))


def add_lora(model: PreTrainedModel, rank: int) -> None:
    """Adapters on the linear layers inside the encoder's layers that may move. What is outside the encoder stays
    trainable, all else of it does not."""
    peft = require("peft", "lora")  # it takes seconds to import, and few runs need it
    places = depths(model)
    head = [parameter for name, parameter in model.named_parameters() if places[name] is None]
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and places.get(f"{name}.weight") and module.weight.requires_grad
    ]
    if not linear:
        raise InputError("--lora_rank: none of the encoder's layers may move. Leave out --trainable_layers.")
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear), model)
    for parameter in head:
        parameter.requires_grad_(True)
