"""From native transformers checkpoints to hf_tiny's."""

import copy
import re

import torch
from torch import Tensor
from transformers import (
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
    MarianMTModel,
    PreTrainedConfig,
    ViTForImageClassification,
    ViTMAEForPreTraining,
    ViTModel,
)

from .errors import InputError
from .models.electra import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
)
from .models.seq2seq import HfTinySeq2SeqConfig, HfTinySeq2SeqForConditionalGeneration
from .models.vit import (
    HfTinyViTConfig,
    HfTinyViTForImageClassification,
    HfTinyViTForMaskedImageModeling,
    HfTinyViTModel,
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
MARIAN_NAMES = (
    (r"^model\.shared", "model.encoder.word_embeddings"),
    (r"^final_logits_bias", "lm_head.bias"),
    (r"self_attn_layer_norm", "attention_norm"),
    (r"encoder_attn_layer_norm", "cross_attention_norm"),
    (r"final_layer_norm", "feed_forward_norm"),
    (r"self_attn\.out_proj", "attention.out"),
    (r"encoder_attn\.out_proj", "cross_attention.out"),
    (r"encoder_attn\.q_proj", "cross_attention.query"),
    (r"fc1", "feed_forward.up"),
    (r"fc2", "feed_forward.down"),
)
VIT_NAMES = (
    (r"patch_embeddings\.projection", "projection"),
    (r"decoder\.decoder_pos_embed", "decoder.positions.table.weight"),
    (r"decoder\.mask_token", "decoder.mask_token.weight"),
    (r"decoder\.decoder_pred", "decoder.out"),
    (r"decoder\.decoder_", "decoder."),
    (r"attention\.o_proj", "attention.out"),
    (r"layernorm_before", "attention_norm"),
    (r"layernorm_after", "feed_forward_norm"),
    (r"layernorm\.", "norm."),
    (r"mlp\.fc1", "feed_forward.up"),
    (r"mlp\.fc2", "feed_forward.down"),
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


def known_settings(native: PreTrainedConfig, config_class: type = HfTinyElectraConfig) -> dict:
    """What hf_tiny's config has too."""
    known = config_class().to_dict()
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


def seq2seq_from_native(model: MarianMTModel) -> HfTinySeq2SeqForConditionalGeneration:
    """A native Marian model, with its way to generate."""
    native = model.config
    if not native.share_encoder_decoder_embeddings:
        raise InputError("Encoder and decoder of this model have vocabularies of their own: here they share one.")
    for name in ("attention_heads", "ffn_dim"):
        ours, theirs = getattr(native, f"encoder_{name}"), getattr(native, f"decoder_{name}")
        if ours != theirs:
            raise InputError(f"{name} is {ours} in the encoder and {theirs} in the decoder: here it is one number.")
    if not native.tie_word_embeddings:
        raise InputError("The output layer of this model is not tied to its embeddings.")
    same = ("vocab_size", "encoder_layers", "decoder_layers", "max_position_embeddings", "scale_embedding")
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    config = HfTinySeq2SeqConfig(
        **{name: getattr(native, name) for name in (*same, *tokens)},
        hidden_size=native.d_model,
        num_attention_heads=native.encoder_attention_heads,
        intermediate_size=native.encoder_ffn_dim,
        hidden_act=native.activation_function,
        hidden_dropout_prob=native.dropout,
        attention_probs_dropout_prob=native.attention_dropout,
        initializer_range=native.init_std,
    )
    converted = HfTinySeq2SeqForConditionalGeneration(config)
    state = {}
    for name, tensor in model.state_dict().items():
        for old, new in MARIAN_NAMES:
            name = re.sub(old, new, name)
        if "embed_" not in name:  # copies of the shared embeddings, and sinusoids
            state[name] = tensor
    for name in [name for name in state if "self_attn.q_proj" in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace("self_attn.q_proj", "attention.qkv")] = torch.cat(parts)
    for name in [name for name in state if "encoder_attn.k_proj" in name]:
        parts = [state.pop(name.replace("k_proj", f"{part}_proj")) for part in "kv"]
        state[name.replace("encoder_attn.k_proj", "cross_attention.key_value")] = torch.cat(parts)
    state["lm_head.bias"] = state["lm_head.bias"].squeeze(0)
    converted.load_state_dict(state)
    converted.generation_config = copy.deepcopy(model.generation_config)
    return converted.eval()


def rename_vit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Native names to ours; query, key and value become one projection, and the class token's position a part of it."""
    renamed = {}
    for name, tensor in state.items():
        for old, new in VIT_NAMES:
            name = re.sub(old, new, name)
        renamed[name] = tensor
    for name in [name for name in renamed if ".attention.q_proj." in name]:
        parts = [renamed.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        renamed[name.replace("q_proj", "qkv")] = torch.cat(parts)
    prefix = next(name for name in renamed if name.endswith("embeddings.cls_token")).removesuffix("cls_token")
    positions = renamed.pop(f"{prefix}position_embeddings").squeeze(0)  # (1 + patches, hidden)
    renamed[f"{prefix}prefix.weight"] = renamed.pop(f"{prefix}cls_token").squeeze(0) + positions[:1]
    renamed[f"{prefix}positions.table.weight"] = positions[1:]
    renamed[f"{prefix}projection.weight"] = renamed[f"{prefix}projection.weight"].flatten(1)
    return renamed


def vit_from_native(model: ViTModel | ViTForImageClassification) -> HfTinyViTModel | HfTinyViTForImageClassification:
    """A native ViT, with its labels; the pooler of a `ViTModel`, a layer for a task of its own, is left behind."""
    heads = {ViTModel: HfTinyViTModel, ViTForImageClassification: HfTinyViTForImageClassification}
    if type(model) not in heads:
        names = ", ".join(head.__name__ for head in (*heads, ViTMAEForPreTraining))
        raise InputError(f"{type(model).__name__} has no counterpart here: give one of {names}.")
    converted = heads[type(model)](HfTinyViTConfig(**known_settings(model.config, HfTinyViTConfig)))
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("pooler.")}
    converted.load_state_dict(rename_vit(state))
    return converted.eval()


def vit_mae_from_native(model: ViTMAEForPreTraining) -> HfTinyViTForMaskedImageModeling:
    """A native masked autoencoder. Its positions, sinusoids that stay as they are, become learned ones."""
    config = HfTinyViTConfig(**known_settings(model.config, HfTinyViTConfig))
    state = rename_vit(model.state_dict())
    positions = state["decoder.positions.table.weight"].squeeze(0)  # (1 + patches, size)
    if positions[0].any():
        raise InputError("The decoder of this model gives the class token a position: here it has none.")
    state["decoder.positions.table.weight"] = positions[1:]
    state["decoder.mask_token.weight"] = state["decoder.mask_token.weight"].squeeze(0)
    for name in ("decoder.out.weight", "decoder.out.bias"):  # the native order within a patch has the channels last
        state[name] = state[name].unflatten(0, (-1, config.num_channels)).transpose(0, 1).flatten(0, 1)
    converted = HfTinyViTForMaskedImageModeling(config)
    converted.load_state_dict(state)
    return converted.eval()
