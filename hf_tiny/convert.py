"""Between hf_tiny's checkpoints and native transformers ones, either way; SRC may be a Hub id.

python -m hf_tiny.convert runs/electra native  # makes native/discriminator and native/generator
python -m hf_tiny.convert native runs/again  # and back
"""

import argparse
import copy
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedModel,
    ReformerConfig,
    ReformerForMaskedLM,
    ReformerModelWithLMHead,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTModel,
)

from . import checkpoint
from .errors import InputError
from .models.electra import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
)
from .models.reformer import HfTinyReformerConfig, HfTinyReformerForCausalLM, HfTinyReformerForMaskedLM
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
# Native name -> the name here, and which part it is of how many: queries, keys and values are one projection.
ELECTRA_FUSED = {f"attention.self.{n}": ("attention.qkv", i, 3) for i, n in enumerate(("query", "key", "value"))}
MARIAN_FUSED = {
    **{f"self_attn.{name}_proj": ("attention.qkv", part, 3) for part, name in enumerate("qkv")},
    **{f"encoder_attn.{name}_proj": ("cross_attention.key_value", part, 2) for part, name in enumerate("kv")},
}
VIT_FUSED = {f"attention.{name}_proj": ("attention.qkv", part, 3) for part, name in enumerate("qkv")}
COPIED = "embed_"  # Marian's copies of the shared embeddings, and sinusoids
SAME = ("vocab_size", "encoder_layers", "decoder_layers", "max_position_embeddings", "scale_embedding")
SAME += ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
MARIAN_FIELDS = {  # native name -> the name here
    "d_model": "hidden_size",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
    "activation_function": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_std": "initializer_range",
    **dict(zip(SAME, SAME, strict=True)),
}
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
REFORMER_PARTS = {"lsh": ("query_key", "value"), "local": ("query", "key", "value")}
REFORMERS = {ReformerModelWithLMHead: HfTinyReformerForCausalLM, ReformerForMaskedLM: HfTinyReformerForMaskedLM}
EMBEDDINGS = "reformer.embeddings."
HERE = "hf_tiny's Reformer"
HEADS = {
    ElectraForSequenceClassification: HfTinyElectraForSequenceClassification,
    ElectraForTokenClassification: HfTinyElectraForTokenClassification,
}
EQUAL_IN_BOTH = (
    *("vocab_size", "embedding_size", "num_hidden_layers", "max_position_embeddings", "type_vocab_size"),
    *("hidden_act", "layer_norm_eps"),
)
SIZES = ("hidden_size", "num_attention_heads", "intermediate_size")


def our_name(name: str, names: tuple, fused: dict) -> tuple[str, int, int]:
    """What a native tensor is called here, and which part it is of how many."""
    for old, new in names:
        name = re.sub(old, new, name)
    for old, (new, part, parts) in fused.items():
        if old in name:
            return name.replace(old, new), part, parts
    return name, 0, 1


def from_native(state: dict[str, Tensor], names: tuple, fused: dict) -> dict[str, Tensor]:
    """Native tensors under our names, the parts of a projection together."""
    found: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        if COPIED not in name:
            ours, part, _ = our_name(name, names, fused)
            found.setdefault(ours, {})[part] = tensor
    return {name: torch.cat([parts[part] for part in sorted(parts)]) for name, parts in found.items()}


@torch.no_grad()
def fill(native: PreTrainedModel, state: dict[str, Tensor], names: tuple, fused: dict) -> PreTrainedModel:
    """Our tensors into a native model."""
    for name, tensor in native.state_dict().items():
        if COPIED not in name:
            ours, part, parts = our_name(name, names, fused)
            tensor.copy_(state[ours].chunk(parts)[part].view_as(tensor))
    return native.eval()


def known_settings(config: PreTrainedConfig, other: type[PreTrainedConfig]) -> dict:
    """What the other kind of configuration has too."""
    known = other().to_dict().keys() - {"model_type", "architectures"}
    return {name: value for name, value in config.to_dict().items() if name in known}


def require(config: PreTrainedConfig, side: str = "the native model of transformers", **needed) -> None:
    """Refuse what the other side cannot be; a tuple holds several values that will do."""
    for name, value in needed.items():
        found, fitting = getattr(config, name), value if isinstance(value, tuple) else (value,)
        if found not in fitting:
            raise InputError(f"{name} is {found!r}: {side} only has {fitting[0]!r}.")


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
    if not generator.config.tie_word_embeddings:
        raise InputError("The output layer of the generator is not tied to its embeddings.")
    size = generator.config.hidden_size / native.hidden_size
    config = HfTinyElectraConfig(**known_settings(native, HfTinyElectraConfig), sharing=sharing, generator_size=size)
    found = tuple(getattr(generator.config, name) for name in SIZES)
    if found != config.sizes(size):
        raise InputError(
            f"{SIZES} are {found} in the generator: at {size:.3g} times the discriminator, {config.sizes(size)}."
        )
    model = HfTinyElectraForPreTraining(config)
    state = from_native(discriminator.state_dict(), ELECTRA_NAMES, ELECTRA_FUSED)
    for name, tensor in from_native(generator.state_dict(), ELECTRA_NAMES, ELECTRA_FUSED).items():
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
    known = known_settings(model.config, HfTinyElectraConfig)
    converted = HEADS[type(model)](HfTinyElectraConfig(**{**known, **no_generator, "classifier_pooling": "cls"}))
    converted.load_state_dict(from_native(model.state_dict(), ELECTRA_NAMES, ELECTRA_FUSED))
    return converted.eval()


def electra_to_native(model: HfTinyElectraForPreTraining) -> tuple[ElectraForPreTraining, ElectraForMaskedLM]:
    """Discriminator and generator; what they share, both have."""
    require(model.config, position_embedding_type="absolute", norm_first=False)
    known, state = known_settings(model.config, ElectraConfig), model.state_dict()
    sizes = dict(zip(SIZES, model.config.sizes(model.config.generator_size), strict=True))
    own = {re.sub(r"^generator\.", "electra.", name): state[name] for name in state if name.startswith("generator.")}
    return (
        fill(ElectraForPreTraining(ElectraConfig(**known)), state, ELECTRA_NAMES, ELECTRA_FUSED),
        fill(ElectraForMaskedLM(ElectraConfig(**known | sizes)), state | own, ELECTRA_NAMES, ELECTRA_FUSED),
    )


def electra_head_to_native(
    model: HfTinyElectraForSequenceClassification | HfTinyElectraForTokenClassification,
) -> ElectraForSequenceClassification | ElectraForTokenClassification:
    """A fine-tuned model, with its labels."""
    require(model.config, position_embedding_type="absolute", norm_first=False)
    if type(model) is HfTinyElectraForSequenceClassification:
        require(model.config, classifier_pooling="cls")
    native_class = {ours: native for native, ours in HEADS.items()}[type(model)]
    native = native_class(ElectraConfig(**known_settings(model.config, ElectraConfig)))
    return fill(native, model.state_dict(), ELECTRA_NAMES, ELECTRA_FUSED)


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
    config = HfTinySeq2SeqConfig(**{ours: getattr(native, name) for name, ours in MARIAN_FIELDS.items()})
    converted = HfTinySeq2SeqForConditionalGeneration(config)
    state = from_native(model.state_dict(), MARIAN_NAMES, MARIAN_FUSED)
    state["lm_head.bias"] = state["lm_head.bias"].squeeze(0)
    converted.load_state_dict(state)
    converted.generation_config = copy.deepcopy(model.generation_config)
    return converted.eval()


def seq2seq_to_native(model: HfTinySeq2SeqForConditionalGeneration) -> MarianMTModel:
    """A Marian model, with its way to generate."""
    config, size = model.config, model.config.hidden_size // model.config.num_attention_heads
    require(config, position_embedding_type="sinusoidal", norm_first=False, layer_norm_eps=1e-5)
    require(config, tie_word_embeddings=True, qk_head_dim=(size, None), v_head_dim=(size, None))
    settings = {name: getattr(config, ours) for name, ours in MARIAN_FIELDS.items()}
    decoder = {"decoder_ffn_dim": config.intermediate_size, "decoder_attention_heads": config.num_attention_heads}
    native = MarianMTModel(MarianConfig(**settings, **decoder, forced_eos_token_id=None))
    native.generation_config = copy.deepcopy(model.generation_config)
    return fill(native, model.state_dict(), MARIAN_NAMES, MARIAN_FUSED)


def rename_vit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Native names to ours; the class token's position becomes a part of it."""
    renamed = from_native(state, VIT_NAMES, VIT_FUSED)
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
        state[name] = swapped(state[name], -1, config.num_channels)
    converted = HfTinyViTForMaskedImageModeling(config)
    converted.load_state_dict(state)
    return converted.eval()


def swapped(x: Tensor, rows: int, columns: int) -> Tensor:
    """The first dimension as (rows, columns), the other way round."""
    return x.unflatten(0, (rows, columns)).transpose(0, 1).flatten(0, 1)


def vit_to_native(
    model: HfTinyViTForImageClassification | HfTinyViTForMaskedImageModeling,
) -> ViTForImageClassification | ViTMAEForPreTraining:
    """A native ViT with its labels, or a native masked autoencoder."""
    config, state = model.config, model.state_dict()
    grid = list(config.grid_size(config.image_size))
    require(config, position_embedding_type="learned", position_grid=grid, num_register_tokens=0)
    require(config, layer_scale_init_value=None, drop_path_rate=0)
    for name in ("vit.embeddings.positions.table.weight", "decoder.positions.table.weight"):
        if name in state:  # the class token has its position in itself
            state[name] = torch.cat((torch.zeros_like(state[name][:1]), state[name]))
    state["vit.embeddings.position_embeddings"] = state["vit.embeddings.positions.table.weight"]
    state["vit.embeddings.cls_token"] = state["vit.embeddings.prefix.weight"]
    if type(model) is HfTinyViTForImageClassification:
        require(config, pooling="cls")
        native = ViTForImageClassification(ViTConfig(**known_settings(config, ViTConfig)))
    else:
        if grid[0] != grid[1]:
            raise InputError(f"image_size is {config.image_size}: transformers' ViTMAE only has square grids.")
        for name in ("decoder.out.weight", "decoder.out.bias"):
            state[name] = swapped(state[name], config.num_channels, -1)
        native = ViTMAEForPreTraining(ViTMAEConfig(**known_settings(config, ViTMAEConfig)))
    return fill(native, state, VIT_NAMES, VIT_FUSED)


def reformer_fused(kinds: Sequence[str]) -> dict[str, tuple[str, int, int]]:
    """Like the tables above: what is one projection depends on the kind of attention of each layer."""
    return {
        f"layers.{layer}.attention.{name}.": (f"layers.{layer}.attention.qkv.", part, len(REFORMER_PARTS[kind]))
        for layer, kind in enumerate(kinds)
        for part, name in enumerate(REFORMER_PARTS[kind])
    }


def refuse_both_sides(config: PreTrainedConfig) -> None:
    if not config.is_decoder and "local" in config.attn_layers:
        raise InputError(
            f"attn_layers is {list(config.attn_layers)} in a model that is not causal: the first and the last chunk of a "
            "local layer see each other in transformers and not here. Only lsh layers can be converted."
        )


def reformer_from_native(
    model: ReformerModelWithLMHead | ReformerForMaskedLM,
) -> HfTinyReformerForCausalLM | HfTinyReformerForMaskedLM:
    """A native language model. Its two streams begin with the same embeddings: here each has its own half. With one hash
    and the same rotations both say the same; with more, native chunks also look back from one round into another."""
    native, size = model.config, model.config.hidden_size
    refuse_both_sides(native)
    require(native, HERE, axial_pos_embds=True, lsh_num_chunks_before=1, lsh_num_chunks_after=0)
    require(native, HERE, local_num_chunks_before=1, local_num_chunks_after=0)
    dropout = max(native.lsh_attention_probs_dropout_prob, native.local_attention_probs_dropout_prob)
    sizes = {"hidden_size": 2 * size, "intermediate_size": native.feed_forward_size}
    known = {**known_settings(native, HfTinyReformerConfig), **sizes, "attention_probs_dropout_prob": dropout}
    converted = REFORMERS[type(model)](HfTinyReformerConfig(**known, attend_across_buckets=True))
    state = from_native(model.state_dict(), REFORMER_NAMES, reformer_fused(native.attn_layers))
    rows, columns = (state.pop(f"{EMBEDDINGS}position_embeddings.weights.{axis}").flatten(0, 1) for axis in range(2))
    state[f"{EMBEDDINGS}row_embeddings.weight"] = F.pad(rows, (0, size - rows.shape[1]))
    state[f"{EMBEDDINGS}column_embeddings.weight"] = F.pad(columns, (size - columns.shape[1], 0))
    for name in ("word", "row", "column"):
        state[f"{EMBEDDINGS}{name}_embeddings.weight"] = state[f"{EMBEDDINGS}{name}_embeddings.weight"].repeat(1, 2)
    state.pop("lm_head.bias")  # the native model does not use it
    for name, tensor in converted.state_dict().items():
        if name.endswith("bias"):
            state.setdefault(name, torch.zeros_like(tensor))
    converted.load_state_dict(state)
    return converted.eval()


def reformer_to_native(
    model: HfTinyReformerForCausalLM | HfTinyReformerForMaskedLM,
) -> ReformerModelWithLMHead | ReformerForMaskedLM:
    """A native language model, if this one has no weights that a native one lacks."""
    config, size, state = model.config, model.config.hidden_size // 2, model.state_dict()
    require(config, position_embedding_type="axial", attend_across_buckets=(True, config.is_decoder))  # if causal
    refuse_both_sides(config)
    names = (f"{EMBEDDINGS}{name}_embeddings.weight" for name in ("word", "row", "column"))
    word, rows, columns = (state[name][:, :size] for name in names)
    first = int(rows.any(0).sum())  # so many dimensions are the row's, the others the column's
    rate = config.attention_probs_dropout_prob
    settings = known_settings(config, ReformerConfig) | {
        "hidden_size": size,
        "feed_forward_size": config.intermediate_size,
        "attention_head_size": config.head_size,
        "axial_pos_embds_dim": [first, size - first],
        "max_position_embeddings": math.prod(config.axial_pos_shape),
        "lsh_attention_probs_dropout_prob": rate,
        "local_attention_probs_dropout_prob": rate,
        "chunk_size_feed_forward": 0,  # native pieces only fit some lengths
        "tie_word_embeddings": False,
    }
    native = {ours: native for native, ours in REFORMERS.items()}[type(model)](ReformerConfig(**settings))
    halves = {
        f"{EMBEDDINGS}word_embeddings.weight": word,
        f"{EMBEDDINGS}position_embeddings.weights.0": rows[:, :first],
        f"{EMBEDDINGS}position_embeddings.weights.1": columns[:, first:],
    }
    fill(native, state | halves, REFORMER_NAMES, reformer_fused(config.attn_layers))
    back = reformer_from_native(native).state_dict()
    lost = [name for name, tensor in state.items() if not torch.equal(tensor, back[name])]
    if lost:
        raise InputError(
            f"{lost[0]} and {len(lost) - 1} other weights have no place in a native Reformer, which has no biases in "
            "attention and at the output, and one embedding for both streams: only a model that came from there can go back."
        )
    return native


CONVERSIONS = {  # by the class that was saved
    **dict.fromkeys(HEADS, electra_head_from_native),
    **dict.fromkeys(HEADS.values(), electra_head_to_native),
    HfTinyElectraForPreTraining: electra_to_native,
    HfTinySeq2SeqForConditionalGeneration: seq2seq_to_native,
    MarianMTModel: seq2seq_from_native,
    **dict.fromkeys((HfTinyViTForImageClassification, HfTinyViTForMaskedImageModeling), vit_to_native),
    **dict.fromkeys(REFORMERS, reformer_from_native),
    **dict.fromkeys(REFORMERS.values(), reformer_to_native),
    ViTForImageClassification: vit_from_native,
    ViTMAEForPreTraining: vit_mae_from_native,
}
PAIR = ("discriminator", "generator")


def load(loader: type, source: str | Path):
    with checkpoint.loaded(f"{source} cannot be loaded"):
        return loader.from_pretrained(source)


def load_model(model_class: type[PreTrainedModel], source: str | Path) -> PreTrainedModel:
    """All of it: what a checkpoint lacks would be random."""
    with checkpoint.loaded(f"{source} cannot be loaded"):
        model, info = model_class.from_pretrained(source, output_loading_info=True)
    if lacking := sorted(info["missing_keys"]):
        raise InputError(
            f"{source} is no {model_class.__name__}: it lacks {len(lacking)} weights, such as {lacking[0]}."
        )
    return model


def convert(source: str, target: Path) -> None:
    """The model at `source`, with its tokenizer or image processor if it has one, in the other format at `target`."""
    if target.exists() and any(target.iterdir()):
        raise InputError(f"{target} is not empty: choose another folder.")
    pair = [Path(source, name) for name in PAIR]
    if pair[0].is_dir():
        models = (load_model(ElectraForPreTraining, pair[0]), load_model(ElectraForMaskedLM, pair[1]))
        source, converted = str(pair[0]), (electra_from_native(*models),)
    else:
        saved = (load(AutoConfig, source).architectures or ["A bare encoder"])[0]
        known = {model.__name__: (model, function) for model, function in CONVERSIONS.items()}
        if saved not in known:
            hint = f"Two native ELECTRAs go into one folder, as {PAIR}."
            raise InputError(f"{source}: {saved} has no counterpart. {hint}")
        model_class, function = known[saved]
        model = function(load_model(model_class, source))
        converted = model if model_class is HfTinyElectraForPreTraining else (model,)
    for name, model in zip(PAIR if len(converted) == 2 else [""], converted, strict=True):
        model.save_pretrained(target / name)
        try:
            loader = AutoImageProcessor if model.main_input_name == "pixel_values" else AutoTokenizer
            load(loader, source).save_pretrained(target / name)
        except InputError:
            print(f"{source} has no tokenizer or image processor: {target / name} has none either.", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_tiny.convert", description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    try:
        convert(given.source, given.target)
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
