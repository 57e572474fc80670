"""From a pretrained encoder to a task: what to start from, what of it may move and how fast, and what it forgets."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from . import checkpoint
from .arguments import flag
from .data.collate import Batches, MaskTokens
from .data.corpus import CorpusArguments, documents
from .errors import InputError
from .metrics import collect_electra, compute_electra
from .models.electra import HfTinyElectraConfig, HfTinyElectraForPreTraining
from .models.reformer import HfTinyReformerConfig
from .optim import depths, layer_groups, learning_rate
from .tokenizer import load_tokenizer
from .train import Callback, TrainState

logger = logging.getLogger(__name__)

TINY = {  # the model that is trained from scratch when no other is named
    "embedding_size": 128, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 512, "position_embedding_type": "rotary", "norm_first": True, "initializer_range": 0.1,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
# With these the changes to the configuration go into it; others get them beside the encoder's configuration.
HEADS = (AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification)
LOWEST = {"slow_start_steps": 0, "unfreeze_steps": 0, "trainable_layers": -1, "l2_sp": 0, "reinit_layers": 0,
          "lora_rank": 0}  # fmt: skip
NEED_PRETRAINED = {"trainable_layers": -1, "reinit_layers": 0, "lora_rank": 0, "measure_forgetting": None}
FORGETTING_BLOCKS, FORGETTING_LENGTH, FORGETTING_MASKED = 256, 64, 0.15
FORGETTING_FIGURES = ("mlm_loss", "mlm_accuracy", "rtd_loss", "rtd_auc")


@dataclass(frozen=True, kw_only=True)
class StartArguments:
    """What to start from, and how to go on from there."""

    model_name_or_path: str | None = flag(None, "The encoder to start from: a folder or a Hub id.")
    config_name: str | None = flag(None, "From scratch, with the configuration (and the tokenizer) of this model.")
    layer_decay: float = flag(1.0, "Each layer learns at this fraction of the rate of the one above.")
    head_lr_factor: float = flag(1.0, "The head learns at this multiple of the rate.")
    slow_start_steps: int = flag(0, "For so many steps only the head learns.")
    unfreeze_steps: int = flag(0, "Then another layer begins to learn every so many steps, from the last one down.")
    trainable_layers: int = flag(-1, "-1 trains all; 0 only the head; n the head and the n last layers.")
    l2_sp: float = flag(1.0, "A pretrained encoder's weights decay towards where they started; 0: towards zero.")
    reinit_layers: int = flag(0, "Forget so many of the last layers before training.")
    lora_rank: int = flag(0, "Train adapters of this rank (and the head) instead of the encoder's weights.")


@dataclass(frozen=True, kw_only=True)
class TransferArguments(StartArguments):
    """The same for encoders of text."""

    measure_forgetting: list[str] | None = flag(
        None, "Raw text: files on which to measure the pretraining losses before and after."
    )


def check(recipe: StartArguments) -> None:
    """Refuse what has no meaning, before any data is prepared."""
    settings = vars(recipe)
    if recipe.model_name_or_path and recipe.config_name:
        raise InputError("Give --model_name_or_path (its weights) or --config_name (from scratch), not both.")
    for name, lowest in LOWEST.items():
        if settings[name] < lowest:
            raise InputError(f"--{name} {settings[name]}: it must be {lowest} or above.")
    if not 0 < recipe.layer_decay <= 1:
        raise InputError(f"--layer_decay {recipe.layer_decay:g}: it must be above 0 and at most 1.")
    if recipe.head_lr_factor <= 0:
        raise InputError(f"--head_lr_factor {recipe.head_lr_factor:g}: it must be above 0.")
    if recipe.lora_rank and recipe.reinit_layers:
        raise InputError("--lora_rank leaves the encoder's weights as they are: drop --reinit_layers.")
    if -1 < recipe.trainable_layers < recipe.reinit_layers:
        raise InputError("--reinit_layers must not exceed --trainable_layers: what is forgotten must be trained.")
    for name, unused in NEED_PRETRAINED.items():
        if settings.get(name, unused) != unused and not recipe.model_name_or_path:
            raise InputError(f"--{name} needs a pretrained encoder: give --model_name_or_path.")


# What to start from


def start_tokenizer(recipe, texts: Sequence[str], *, model_max_length: int = 512) -> PreTrainedTokenizerBase:
    """The tokenizer named in the recipe, else that of its model, else one trained on the texts."""
    check(recipe)
    option = "--model_name_or_path" if recipe.model_name_or_path else "--config_name"
    name = recipe.model_name_or_path or recipe.config_name
    if name:
        _encoder_config(option, name)  # a model that cannot be used is refused as such, not for its tokenizer
    if recipe.tokenizer_name or not name:
        fingerprint = hashlib.sha256(repr(texts).encode(errors="replace")).hexdigest()
        return load_tokenizer(recipe, lambda: texts, fingerprint, model_max_length=model_max_length)
    try:
        return load_tokenizer(replace(recipe, tokenizer_name=name), lambda: texts, "")
    except InputError as error:
        message = str(error).replace("--tokenizer_name", option, 1)
        raise InputError(f"{message} A tokenizer from elsewhere can be given by --tokenizer_name.") from error


def start_model(recipe, auto_class, tokenizer: PreTrainedTokenizerBase, **changes) -> PreTrainedModel:
    """The model to train: pretrained, or from scratch.

    auto_class: an Auto class of transformers, or anything that has `from_pretrained(name, **changes)` and
        `from_config(encoder_config, **changes)`.
    changes: to the configuration, such as the labels.
    """
    inside, beside = (changes, {}) if auto_class in HEADS else ({}, changes)
    name = recipe.model_name_or_path
    if name:
        _encoder_config("--model_name_or_path", name)
        model = pretrained(name, auto_class, changes)
        known = model.get_input_embeddings().num_embeddings
        if len(tokenizer) > known:
            raise InputError(
                f"--model_name_or_path {name} knows {known:,} tokens, the tokenizer has {len(tokenizer):,}: they do not "
                "belong together. Leave out --tokenizer_name."
            )
        return model
    vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if recipe.config_name:
        config = _encoder_config("--config_name", recipe.config_name, **vocabulary, **inside)
    else:
        length = max(512, min(tokenizer.model_max_length, 1 << 16))  # transformers' "no limit" is 1e30
        config = HfTinyElectraConfig(**TINY, **vocabulary, max_position_embeddings=length, **inside)
    try:
        model = auto_class.from_config(config, **beside)
    except ValueError as error:
        raise InputError(f"--config_name {recipe.config_name}: no such model for this task: {error}") from error
    logger.info(f"{type(model).__name__}: from scratch, {model.num_parameters():,} parameters.")
    return model


def _encoder_config(option: str, name: str, **changes) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(name, **changes)
    except (OSError, ValueError) as error:
        raise InputError(f"{option} {name}: no model could be found there: {error}") from error
    settings = config.to_dict()
    causal_too = type(config) is HfTinyReformerConfig  # whose head for a text reads the states of all tokens
    if settings.get("is_encoder_decoder"):
        kind = "an encoder-decoder"
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and (causal_too or not settings.get("is_decoder")):
        return config
    elif type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        kind = "a model of images"
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or settings.get("is_decoder"):
        kind = "a decoder, which sees only what comes before"
    else:
        kind = "not a language model that sees a whole text"
    raise InputError(
        f"{option} {name}: {config.model_type} is {kind}. Give an encoder: one made by recipes/pretrain_electra.py or "
        "pretrain_reformer.py, a BERT, RoBERTa, ELECTRA, DeBERTa or the like."
    )


def pretrained(name: str, auto_class, changes: dict) -> PreTrainedModel:
    """The model of this name with a head for the task; the encoder's weights must all be there."""
    option = "--model_name_or_path"
    with checkpoint.loaded(f"{option} {name}: its weights could not be loaded for this task"), _quiet():
        try:
            model = auto_class.from_pretrained(name, **changes)
        except RuntimeError:  # it has a head for another number of labels
            model = auto_class.from_pretrained(name, **changes, ignore_mismatched_sizes=True)
    new = [key for key, parameter in model.named_parameters() if not vars(parameter).get("_is_hf_initialized")]
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
def _quiet() -> Iterator[None]:
    """transformers reports every new weight in a table of its own."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


# What of it moves


def prepare(model: PreTrainedModel, recipe) -> tuple[list[dict], list[Callback]]:
    """Set up the model as the recipe says; returns the optimiser's groups and the callbacks for `train`."""
    places = depths(model)
    top = max((depth for depth in places.values() if depth is not None), default=0)
    for name in ("trainable_layers", "reinit_layers"):
        if vars(recipe)[name] > top:
            raise InputError(f"--{name} {vars(recipe)[name]}: {type(model).__name__} has {top} layers.")
    if not top and (recipe.lora_rank or recipe.unfreeze_steps or recipe.layer_decay != 1):
        raise InputError(
            f"{type(model).__name__} has no numbered layers: drop --lora_rank, --unfreeze_steps and --layer_decay."
        )
    last = {name: 0 if depth is None else top - depth + 1 for name, depth in places.items()}  # 1: the last layer
    reinitialize(model, [name for name in last if 0 < last[name] <= recipe.reinit_layers])
    if recipe.trainable_layers >= 0:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(last[name] <= recipe.trainable_layers)
    callbacks: list[Callback] = []
    if recipe.lora_rank:
        add_lora(model, recipe.lora_rank)
        callbacks.append(MergeLora())
    groups = layer_groups(
        model,
        recipe.weight_decay,
        layer_decay=recipe.layer_decay,
        head_lr_factor=recipe.head_lr_factor,
        slow_start_steps=recipe.slow_start_steps,
        unfreeze_steps=recipe.unfreeze_steps,
    )
    if recipe.l2_sp and recipe.model_name_or_path and not recipe.lora_rank:
        # What was forgotten has nowhere to be pulled to.
        pulled = [g for g in groups if g["depth"] is not None and g["depth"] <= top - recipe.reinit_layers]
        for group in pulled:
            group["weight_decay"] = 0.0  # the decay towards the start takes the place of the decay towards zero
        callbacks.append(L2SP(pulled, recipe))
    if isinstance(recipe, TransferArguments) and recipe.measure_forgetting:
        callbacks.append(Forgetting(recipe.model_name_or_path, recipe.measure_forgetting))
    moving = sum(parameter.numel() for group in groups for parameter in group["params"])
    latest = max(group["start"] for group in groups)
    if 0 < recipe.max_steps <= latest:
        raise InputError(
            f"--slow_start_steps and --unfreeze_steps: the last part of the encoder would begin to learn at step {latest}, "
            f"but the run has {recipe.max_steps} steps."
        )
    logger.info(f"{moving:,} of {model.num_parameters():,} parameters are trained, all of them from step {latest} on.")
    return groups, callbacks


@torch.no_grad()
def reinitialize(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Draw these parameters anew, as the model itself draws them."""
    for name in names:
        model.get_parameter(name)._is_hf_initialized = False  # transformers does not touch what it has loaded
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
        model.base_model._init_weights(model.get_submodule(owner))


def add_lora(model: PreTrainedModel, rank: int) -> None:
    """Adapters on the linear layers inside the encoder's layers that may move; what is outside the encoder stays
    trainable, all else of it does not."""
    try:
        from peft import LoraConfig, inject_adapter_in_model  # it takes seconds to import, and few runs need it
    except ImportError as error:
        raise InputError('--lora_rank needs peft: pip install "hf_tiny[lora]"') from error

    places = depths(model)
    head = [parameter for name, parameter in model.named_parameters() if places[name] is None]
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and places.get(f"{name}.weight") and module.weight.requires_grad
    ]
    if not linear:
        raise InputError("--lora_rank: none of the encoder's layers may move. Leave out --trainable_layers.")
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear), model)
    for parameter in head:
        parameter.requires_grad_(True)


class MergeLora(Callback):
    """Adds the adapters to the weights they belong to: what is saved in the end is a model like any other."""

    @torch.no_grad()
    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        from peft.tuners.lora import LoraLayer

        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge()
                model.set_submodule(name, module.get_base_layer())
        del model.peft_config
        return {}


class L2SP(Callback):
    """Pulls weights towards where they started (Li et al., 2018), apart from the gradient, as AdamW does its decay."""

    def __init__(self, groups: list[dict], config):
        self.groups, self.config = groups, config
        self.starts = [[parameter.detach().clone() for parameter in group["params"]] for group in groups]

    @torch.no_grad()
    def on_step_end(self, state: TrainState, model: nn.Module) -> None:
        for group, starts in zip(self.groups, self.starts, strict=True):
            rate = learning_rate(self.config, group, state.step - 1, state.max_steps)  # of the step that was taken
            starts[:] = [start.to(p.device) for start, p in zip(starts, group["params"], strict=True)]  # moves once
            torch._foreach_lerp_(group["params"], starts, min(1.0, rate * self.config.l2_sp))


# What it forgets


def load_pretraining(option: str, name: str) -> HfTinyElectraForPreTraining:
    """Generator and discriminator of a folder of pretrain_electra.py."""
    if not isinstance(_encoder_config("--model_name_or_path", name), HfTinyElectraConfig):
        raise InputError(f"{option}: {name} was not pretrained by hf_tiny: its losses cannot be measured.")
    with checkpoint.loaded(f"{option} {name} cannot be loaded"), torch.random.fork_rng(), _quiet():
        model, info = HfTinyElectraForPreTraining.from_pretrained(name, output_loading_info=True)
    if info["missing_keys"]:
        raise InputError(
            f"{option}: {name} has no generator or no discriminator. Give a folder of pretrain_electra.py."
        )
    return model


class PretrainingLosses(Callback):
    """The pretraining losses on raw text, before and after. Every process measures by itself; random numbers are left
    alone."""

    def __init__(self, model: HfTinyElectraForPreTraining, tokenizer: PreTrainedTokenizerBase, files: list[str]):
        self.model = model
        length = min(FORGETTING_LENGTH, model.config.max_position_embeddings)
        mask = MaskTokens(tokenizer, FORGETTING_MASKED, seed=0)
        self.batches = Batches(raw_blocks(files, tokenizer, length), mask, batch_size=32, seed=0, shuffle=False)
        self.before = self.measure()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        self.model.eval()
        batches = (send_to_device(self.batches[index], self.model.device) for index in range(len(self.batches)))
        results = [collect_electra(self.model(**batch), batch) for batch in batches]
        compute = compute_electra(self.model.config.discriminator_weight)
        figures = compute({name: np.concatenate([result[name] for result in results]) for name in results[0]})
        return {name: figures[name] for name in FORGETTING_FIGURES}

    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        measured = {"before": self.before, "after": self.measure()}
        return {f"forgetting_{name}_{when}": measured[when][name] for name in FORGETTING_FIGURES for when in measured}


class Forgetting(PretrainingLosses):
    """Of an encoder that learns a task: it is put back between the heads that it was pretrained with."""

    def __init__(self, name: str, files: list[str]):
        model = load_pretraining("--measure_forgetting", name)
        super().__init__(model, AutoTokenizer.from_pretrained(name), files)

    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        self.model.electra.load_state_dict(model.base_model.state_dict())
        return super().on_train_end(state, model)


def raw_blocks(files: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """`[CLS] A [SEP]`, full blocks from the beginning of the text; every file (or folder, or glob) has an equal share."""
    share = -(-FORGETTING_BLOCKS // len(files))
    blocks = []
    for file in files:
        tokens: list[int] = []
        # Given as validation text too, nothing of it is held out.
        for text in documents(CorpusArguments(train_file=[file], validation_file=[file])):
            tokens += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(tokens) >= share * (length - 2):
                break
        count = min(share, len(tokens) // (length - 2))
        blocks.append(np.array(tokens[: count * (length - 2)], dtype=np.int32).reshape(count, length - 2))
    content = np.concatenate(blocks)
    ends = ((0, 0), (tokenizer.cls_token_id, tokenizer.sep_token_id))
    packed = np.pad(content, ((0, 0), (1, 1)), constant_values=ends)
    if not len(packed):
        raise InputError(f"--measure_forgetting {' '.join(files)}: too short, it has fewer than {length - 2} tokens.")
    return Dataset.from_dict({"input_ids": packed, "segment_start": np.full(len(packed), length, dtype=np.int32)})
