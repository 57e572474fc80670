"""From native transformers checkpoints to hf_tiny's."""

import re

import torch
from torch import Tensor
from transformers import (
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
)

from .errors import InputError
from .models.electra import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
)

ELECTRA_NAMES = (  # native name, hf_tiny name; in this order
    (r"embeddings\.LayerNorm", "embeddings.norm"),
    (r"embeddings_project", "encoder.project"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"attention\.output\.dense", "attention.out"),
    (r"attention\.output\.LayerNorm", "attention_norm"),
    (r"intermediate\.dense", "feed_forward.up"),
    (r"(?<!attention\.)output\.dense", "feed_forward.down"),
    (r"(?<!attention\.)output\.LayerNorm", "feed_forward_norm"),
    (r"generator_predictions\.LayerNorm", "generator_head.norm"),
    (r"generator_predictions\.dense", "generator_head.dense"),
    (r"discriminator_predictions\.dense_prediction", "discriminator_head.2"),
    (r"discriminator_predictions\.dense", "discriminator_head.0"),
    (r"classifier\.out_proj", "classifier.out"),
)
HEADS = {
    ElectraForSequenceClassification: HfTinyElectraForSequenceClassification,
    ElectraForTokenClassification: HfTinyElectraForTokenClassification,
}
EQUAL_IN_BOTH = (
    "vocab_size",
    "embedding_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "type_vocab_size",
    "hidden_act",
    "layer_norm_eps",
)
SIZES = ("hidden_size", "num_attention_heads", "intermediate_size")


def rename_electra(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Native names to ours; query, key and value become one projection."""
    renamed = {}
    for name, tensor in state.items():
        for old, new in ELECTRA_NAMES:
            name = re.sub(old, new, name)
        renamed[name] = tensor
    for name in [name for name in renamed if ".attention.self.query." in name]:
        parts = [renamed.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        renamed[name.replace("self.query", "qkv")] = torch.cat(parts)
    return renamed


def known_settings(native: ElectraConfig) -> dict:
    """What hf_tiny's config has too."""
    known = HfTinyElectraConfig().to_dict()
    return {name: value for name, value in native.to_dict().items() if name in known and name != "model_type"}


def electra_from_native(
    discriminator: ElectraForPreTraining, generator: ElectraForMaskedLM, sharing: str = "none"
) -> HfTinyElectraForPreTraining:
    """The joint model of two native ones. With sharing "embeddings" the discriminator's embeddings serve both."""
    if sharing == "all":
        raise InputError('Two native models cannot share "all": choose "none" or "embeddings".')
    native: ElectraConfig = discriminator.config
    for name in EQUAL_IN_BOTH:
        ours, theirs = getattr(native, name), getattr(generator.config, name)
        if ours != theirs:
            raise InputError(f"{name} is {ours} in the discriminator and {theirs} in the generator.")
    size = generator.config.hidden_size / native.hidden_size
    config = HfTinyElectraConfig(**known_settings(native), sharing=sharing, generator_size=size)
    found = tuple(getattr(generator.config, name) for name in SIZES)
    if found != config.sizes(size):
        raise InputError(
            f"{SIZES} are {found} in the generator: at {size:.3g} times the discriminator, {config.sizes(size)}."
        )
    model = HfTinyElectraForPreTraining(config)
    state = rename_electra(discriminator.state_dict())
    for name, tensor in rename_electra(generator.state_dict()).items():
        if not (sharing == "embeddings" and name.startswith("electra.embeddings")):
            state[re.sub(r"^electra\.", "generator.", name)] = tensor
    if sharing == "embeddings":
        state["generator_lm_head.weight"] = state["electra.embeddings.word_embeddings.weight"]  # tied
    model.load_state_dict(state)
    return model.eval()


def electra_head_from_native(
    model: ElectraForSequenceClassification | ElectraForTokenClassification,
) -> HfTinyElectraForSequenceClassification | HfTinyElectraForTokenClassification:
    """A fine-tuned native model, with its labels."""
    if type(model) not in HEADS:
        raise InputError(
            f"{type(model).__name__} has no counterpart here: give one of {', '.join(head.__name__ for head in HEADS)}."
        )
    no_generator = {"generator_size": 1}  # a size that every encoder allows
    config = HfTinyElectraConfig(**{**known_settings(model.config), **no_generator, "classifier_pooling": "cls"})
    converted = HEADS[type(model)](config)
    converted.load_state_dict(rename_electra(model.state_dict()))
    return converted.eval()
