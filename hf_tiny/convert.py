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
    ReformerModelWithLMHead,
)

from .errors import InputError
from .models.electra import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
)
from .models.reformer import HfTinyReformerConfig, HfTinyReformerForCausalLM
from .models.seq2seq import HfTinySeq2SeqConfig, HfTinySeq2SeqForConditionalGeneration

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
REFORMER_NAMES = (
    (r"^lm_head\.decoder", "lm_head"),
    (r"encoder\.layer_norm", "norm"),
    (r"encoder\.layers", "layers"),
    (r"attention\.layer_norm", "attention_norm"),
    (r"attention\.self_attention", "attention"),
    (r"attention\.output\.dense", "attention.out"),
    (r"feed_forward\.layer_norm", "feed_forward_norm"),
    (r"feed_forward\.dense\.dense", "feed_forward.up"),
    (r"feed_forward\.output\.dense", "feed_forward.down"),
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


def reformer_from_native(model: ReformerModelWithLMHead) -> HfTinyReformerForCausalLM:
    """A native causal Reformer with axial positions. Its two streams begin with the same embeddings: here each has its half."""
    native = model.config
    if not native.axial_pos_embds:
        raise InputError("Only axial positions can be converted: this model has axial_pos_embds=False.")
    for name in ("lsh_num_chunks_before", "local_num_chunks_before"):
        if getattr(native, name) != 1:
            raise InputError(f"{name} is {getattr(native, name)}: here a chunk sees itself and the one before.")
    same = (
        "vocab_size",
        "num_attention_heads",
        "attention_head_size",
        "hidden_act",
        "hidden_dropout_prob",
        "attn_layers",
    )
    same += ("axial_pos_shape", "lsh_attn_chunk_length", "local_attn_chunk_length", "num_hashes", "num_buckets")
    same += ("layer_norm_eps", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
    config = HfTinyReformerConfig(
        **{name: getattr(native, name) for name in same},
        hidden_size=2 * native.hidden_size,
        intermediate_size=native.feed_forward_size,
        attend_across_buckets=True,
        tie_word_embeddings=False,
    )
    converted = HfTinyReformerForCausalLM(config)
    state = {}
    for name, tensor in model.state_dict().items():
        for old, new in REFORMER_NAMES:
            name = re.sub(old, new, name)
        state[name] = tensor
    for layer, kind in enumerate(native.attn_layers):
        prefix = f"reformer.layers.{layer}.attention."
        parts = ("query_key", "value") if kind == "lsh" else ("query", "key", "value")
        state[prefix + "qkv.weight"] = torch.cat([state.pop(f"{prefix}{part}.weight") for part in parts])
        state[prefix + "qkv.bias"] = torch.zeros(len(state[prefix + "qkv.weight"]))
        state[prefix + "out.bias"] = torch.zeros(native.hidden_size)
    prefix = "reformer.embeddings."
    rows, columns = (state.pop(f"{prefix}position_embeddings.weights.{axis}").flatten(0, 1) for axis in range(2))
    row, column = torch.zeros(len(rows), native.hidden_size), torch.zeros(len(columns), native.hidden_size)
    row[:, : rows.shape[1]], column[:, rows.shape[1] :] = rows, columns
    state[prefix + "row_embeddings.weight"], state[prefix + "column_embeddings.weight"] = row, column
    for name in ("word", "row", "column"):
        state[f"{prefix}{name}_embeddings.weight"] = state[f"{prefix}{name}_embeddings.weight"].repeat(1, 2)
    state["lm_head.bias"] = torch.zeros(native.vocab_size)  # the native one is not used
    converted.load_state_dict(state)
    return converted.eval()
