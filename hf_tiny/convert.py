"""Between hf_tiny's checkpoints and native transformers ones, either way; SRC may be a Hub id.

python -m hf_tiny.convert runs/electra native  # makes native/discriminator and native/generator
python -m hf_tiny.convert native runs/again  # and back
python -m hf_tiny.convert electra_small runs/small  # from TensorFlow: electra_small.index ..., vocab.txt
"""

import argparse
import copy
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from . import checkpoint, from_tensorflow, models
from .errors import InputError, exit_codes
from .models.heads import head_dropout

PAIR = ("discriminator", "generator")
NO_COUNTERPART = f"has no counterpart. Two native ELECTRAs go into one folder, as {PAIR}."
PROJECTIONS = ("query", "key", "value")
COUNTERPARTS: dict[type[PreTrainedModel], type[PreTrainedModel]] = {  # native class -> the class here
    transformers.ElectraForSequenceClassification: models.HfTinyElectraForSequenceClassification,
    transformers.ElectraForTokenClassification: models.HfTinyElectraForTokenClassification,
    transformers.MarianMTModel: models.HfTinySeq2SeqForConditionalGeneration,
    transformers.ModernBertForMaskedLM: models.HfTinyElectraForMaskedLM,
    transformers.ModernBertForSequenceClassification: models.HfTinyElectraForSequenceClassification,
    transformers.ModernBertForTokenClassification: models.HfTinyElectraForTokenClassification,
    transformers.ModernBertModel: models.HfTinyElectraModel,
    transformers.ReformerForMaskedLM: models.HfTinyReformerForMaskedLM,
    transformers.ReformerModelWithLMHead: models.HfTinyReformerForCausalLM,
    transformers.ViTForImageClassification: models.HfTinyViTForImageClassification,
    transformers.ViTMAEForPreTraining: models.HfTinyViTForMaskedImageModeling,
    transformers.ViTModel: models.HfTinyViTModel,
}
# Fields that the generator of a pair must share with the discriminator, and those by which it is smaller.
EQUAL_IN_BOTH = (
    *("vocab_size", "embedding_size", "num_hidden_layers", "max_position_embeddings", "type_vocab_size"),
    *("hidden_act", "layer_norm_eps"),
)
SIZES = ("hidden_size", "num_attention_heads", "intermediate_size")
MARIAN_FIELDS = {  # native name -> the name here, where it is another
    "d_model": "hidden_size",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
    "activation_function": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_std": "initializer_range",
}
MODERN_FIELDS = {
    "hidden_activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "embedding_dropout": "hidden_dropout_prob",
}
MODERN_FIELDS |= {"mlp_dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob"}
# What our model must be for a native one to say the same, or the native one for ours.
NATIVE_MODERN: dict[str, object] = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), False)
NATIVE_MODERN |= {"decoder_bias": True, "classifier_activation": "gelu", "tie_word_embeddings": True}
NATIVE = "the native model of transformers"
NATIVE_ELECTRA = {"position_embedding_type": "absolute", "norm_first": False}
NATIVE_TAGGER = {"tagger_lstm_size": 0, "tagger_ngram_buckets": 0}
NATIVE_CLASSIFIER = {"classifier_pooling": "cls", "classifier_pairs": False, "classifier_buckets": 0}
NATIVE_MARIAN = {"position_embedding_type": "sinusoidal", "norm_first": False, "layer_norm_eps": 1e-5}
NATIVE_MARIAN |= {"tie_word_embeddings": True, "copy_attention": False}
NATIVE_VIT = {"position_embedding_type": "learned", "num_register_tokens": 0, "layer_scale_init_value": None}
NATIVE_VIT |= {"drop_path_rate": 0, "stem": "patch"}
NATIVE_REFORMER = {"axial_pos_embds": True, "lsh_num_chunks_before": 1, "lsh_num_chunks_after": 0}
NATIVE_REFORMER |= {"local_num_chunks_before": 1, "local_num_chunks_after": 0}


def parts(native: str, ours: str, names: Sequence[str]) -> dict[str, tuple[str, int, int]]:
    """Native names -> the name here, and which part each is of how many: queries, keys and values are one projection."""
    return {native.format(name): (ours, part, len(names)) for part, name in enumerate(names)}


@dataclass(frozen=True)
class Names:
    """What native tensors are called here.

    renamed: pairs of a regular expression and its replacement, applied in this order.
    fused: see `parts`.
    """

    renamed: tuple[tuple[str, str], ...]
    fused: dict[str, tuple[str, int, int]]

    def here(self, name: str) -> tuple[str, int, int]:
        """The name of a native tensor here, and which part it is of how many."""
        for old, new in self.renamed:
            name = re.sub(old, new, name)
        for old, (new, part, count) in self.fused.items():
            if old in name:
                return name.replace(old, new), part, count
        return name, 0, 1

    def from_native(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Native tensors under our names, the parts of a projection together."""
        found: dict[str, dict[int, Tensor]] = {}
        for name, tensor in state.items():
            if COPIED not in name:
                ours, part, _ = self.here(name)
                found.setdefault(ours, {})[part] = tensor
        return {name: torch.cat([several[part] for part in sorted(several)]) for name, several in found.items()}

    @torch.no_grad()
    def to_native(self, native: PreTrainedModel, state: dict[str, Tensor]) -> PreTrainedModel:
        """Our tensors into a native model."""
        for name, tensor in native.state_dict().items():
            if COPIED not in name:
                ours, part, count = self.here(name)
                tensor.copy_(state[ours].chunk(count)[part].view_as(tensor))
        return native.eval()


COPIED = "embed_"  # Marian's copies of the shared embeddings, and sinusoids
LAYER = (  # what the parts of a layer are called here and in each family
    "here               electra                     modern     marian                vit               reformer",
    "attention.out      attention.output.dense      attn.Wo    self_attn.out_proj    attention.o_proj  attention.output.dense",
    "attention_norm     attention.output.LayerNorm  attn_norm  self_attn_layer_norm  layernorm_before  attention.layer_norm",
    "feed_forward.up    intermediate.dense          mlp.Wi     fc1                   mlp.fc1           feed_forward.dense.dense",
    "feed_forward.down  output.dense                mlp.Wo     fc2                   mlp.fc2           feed_forward.output.dense",
    "feed_forward_norm  output.LayerNorm            mlp_norm   final_layer_norm      layernorm_after   feed_forward.layer_norm",
)


def in_layers(family: str) -> list[tuple[str, str]]:
    """See `Names.renamed`."""
    families, *rows = (row.split() for row in LAYER)
    return [(re.escape(row[families.index(family)]), row[0]) for row in rows]


ELECTRA = Names(
    (
        *in_layers("electra"),
        (r"embeddings_project", "encoder.project"),
        (r"encoder\.layer\.", "encoder.layers."),
        (r"LayerNorm", "norm"),
        (r"generator_predictions", "generator_head"),
        (r"discriminator_predictions\.dense_prediction", "discriminator_head.2"),
        (r"discriminator_predictions\.dense", "discriminator_head.0"),
        (r"classifier\.out_proj", "classifier.out"),
    ),
    parts("attention.self.{}", "attention.qkv", PROJECTIONS),
)
MODERN_NAMES = (
    *in_layers("modern"),
    (r"^decoder\.", "generator_lm_head."),
    (r"^(model\.)?(?=embeddings|layers|final_norm)", "electra."),
    (r"tok_embeddings", "word_embeddings"),
    (r"^electra\.layers", "electra.encoder.layers"),
    (r"final_norm", "encoder.norm"),
    (r"attn\.Wqkv", "attention.qkv"),
)
MARIAN = Names(
    (
        *in_layers("marian"),
        (r"^model\.shared", "model.encoder.word_embeddings"),
        (r"^final_logits_bias", "lm_head.bias"),
        (r"encoder_attn_layer_norm", "cross_attention_norm"),
        (r"encoder_attn\.out_proj", "cross_attention.out"),
        (r"encoder_attn\.q_proj", "cross_attention.query"),
    ),
    parts("self_attn.{}_proj", "attention.qkv", "qkv")
    | parts("encoder_attn.{}_proj", "cross_attention.key_value", "kv"),
)
VIT = Names(
    (
        *in_layers("vit"),
        (r"patch_embeddings\.projection", "projection"),
        (r"decoder\.decoder_pos_embed", "decoder.positions.table.weight"),
        (r"decoder\.mask_token", "decoder.mask_token.weight"),
        (r"decoder\.decoder_pred", "decoder.out"),
        (r"decoder\.decoder_", "decoder."),
        (r"layernorm\.", "norm."),
    ),
    parts("attention.{}_proj", "attention.qkv", "qkv"),
)
REFORMER_NAMES = (
    *in_layers("reformer"),
    (r"^lm_head\.decoder", "lm_head"),
    (r"encoder\.layer_norm", "norm"),
    (r"encoder\.layers", "layers"),
    (r"attention\.self_attention", "attention"),
)


def blank(model_class: type[PreTrainedModel], config: PreTrainedConfig, **changes) -> PreTrainedModel:
    """A new model with those settings that its kind of configuration has too, and with changes."""
    config_class = model_class.config_class
    known, own = config_class().to_dict(), ("model_type", "architectures")
    given = {name: value for name, value in config.to_dict().items() if name in known and name not in own}
    # What is not set keeps its default.
    settings = {name: value for name, value in given.items() if value is not None or known[name] is None}
    return model_class(config_class(**settings | changes))


def require(config: PreTrainedConfig, needed: dict, side: str = NATIVE) -> None:
    """Refuse what the other side cannot be; a tuple holds several values that will do."""
    allowed = {name: value if isinstance(value, tuple) else (value,) for name, value in needed.items()}
    wrong = {name: values[0] for name, values in allowed.items() if getattr(config, name) not in values}
    if wrong:
        name, value = next(iter(wrong.items()))
        flags = " ".join(f"--{name} {value}" for name, value in wrong.items())
        advice = f" A model trained with {flags} can be converted." if side == NATIVE else ""
        raise InputError(f"{name} is {getattr(config, name)!r}: {side} only has {value!r}.{advice}")


def require_equal(name: str, one, other, sides: tuple[str, str]) -> None:
    if one != other:
        raise InputError(f"{name} is {one} in the {sides[0]} and {other} in the {sides[1]}: here it is one for both.")


def counterpart(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class on the other side."""
    modern = isinstance(model.config, models.HfTinyElectraConfig) and model.config.modern
    for native, ours in COUNTERPARTS.items():
        if type(model) is native:
            return ours
        # One of ours may have a twin in each architecture.
        if type(model) is ours and modern == (native.config_class is transformers.ModernBertConfig):
            return native
    names = ", ".join(one.__name__ for one in COUNTERPARTS)
    raise InputError(f"{type(model).__name__} has no counterpart here: give one of {names}.")


def filled(model: PreTrainedModel, state: dict[str, Tensor]) -> PreTrainedModel:
    model.load_state_dict(state)
    return model.eval()


def electra_from_native(
    discriminator: transformers.ElectraForPreTraining, generator: transformers.ElectraForMaskedLM, sharing: str = "none"
) -> models.HfTinyElectraForPreTraining:
    """The joint model of two native ones. With sharing "embeddings" the discriminator's embeddings serve both."""
    if sharing == "all":
        raise InputError('Two native models cannot share "all": choose "none" or "embeddings".')
    native, other = discriminator.config, generator.config
    for name in EQUAL_IN_BOTH:
        require_equal(name, getattr(native, name), getattr(other, name), PAIR)
    require(other, {"tie_word_embeddings": True}, "hf_tiny's generator, whose output layer is its embeddings,")
    size = other.hidden_size / native.hidden_size
    model = blank(models.HfTinyElectraForPreTraining, native, sharing=sharing, generator_size=size)
    found, wanted = tuple(getattr(other, name) for name in SIZES), model.config.sizes(size)[: len(SIZES)]
    if found != wanted:
        raise InputError(f"{SIZES} are {found} in the generator: at {size:.3g} times the discriminator, {wanted}.")
    state = ELECTRA.from_native(discriminator.state_dict())
    for name, tensor in ELECTRA.from_native(generator.state_dict()).items():
        if not (sharing == "embeddings" and name.startswith("electra.embeddings")):
            state[re.sub(r"^electra\.", "generator.", name)] = tensor
    if sharing == "embeddings":
        state["generator_lm_head.weight"] = state["electra.embeddings.word_embeddings.weight"]  # tied
    return filled(model, state)


def joint_to_native(model: models.HfTinyElectraForPreTraining) -> dict[str, PreTrainedModel]:
    """The native models of a joint one, by the folders that they are saved in."""
    if not model.config.modern:
        return dict(zip(PAIR, electra_to_native(model), strict=True))
    found = {"encoder": modern_to_native(model, transformers.ModernBertModel)}
    if model.config.generator_size == 1:
        return found | {"masked_lm": modern_to_native(model, transformers.ModernBertForMaskedLM)}
    size = f"generator_size is {model.config.generator_size}"
    print(f"{size}: ModernBERT has no narrower generator, and only the encoder is converted.", file=sys.stderr)
    return found


def of_generator(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of a joint model with the generator's own weights in the place of the discriminator's."""
    return state | {
        name.replace("generator.", "electra.", 1): state[name] for name in state if name.startswith("generator.")
    }


def electra_to_native(model: models.HfTinyElectraForPreTraining) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Discriminator and generator; what they share, both have."""
    require(model.config, NATIVE_ELECTRA)
    config, state = model.config, model.state_dict()
    sizes = dict(
        zip(SIZES, config.sizes(config.generator_size), strict=False), num_hidden_layers=config.generator_depth
    )
    return (
        ELECTRA.to_native(blank(transformers.ElectraForPreTraining, config), state),
        ELECTRA.to_native(blank(transformers.ElectraForMaskedLM, config, **sizes), of_generator(state)),
    )


def electra_from_tensorflow(folder: Path) -> models.HfTinyElectraForPreTraining:
    """The joint model of google-research/electra, with sharing as it was."""
    fields, state = from_tensorflow.read_electra(folder)
    model, state = models.HfTinyElectraForPreTraining(models.HfTinyElectraConfig(**fields)), ELECTRA.from_native(state)
    owner = "generator" if fields["sharing"] == "none" else "electra"
    state["generator_lm_head.weight"] = state[f"{owner}.embeddings.word_embeddings.weight"]  # tied
    for name, tensor in model.state_dict().items():
        if state[name].shape != tensor.shape:
            found, needed = tuple(state[name].shape), tuple(tensor.shape)
            raise InputError(f"{folder}: {name} is {found}, where hf_tiny's ELECTRA has {needed}.")
    return filled(model, state)


def electra_head_from_native(model: PreTrainedModel) -> PreTrainedModel:
    """A native classifier of texts or of tokens, with its labels. It has no generator: of size 1, every encoder allows it."""
    ours = blank(counterpart(model), model.config, generator_size=1, classifier_pooling="cls")
    return filled(ours, ELECTRA.from_native(model.state_dict()))


def electra_head_to_native(model: PreTrainedModel) -> PreTrainedModel:
    """A native classifier of texts or of tokens, with its labels."""
    if model.config.modern:
        return modern_to_native(model)
    of_texts = type(model) is models.HfTinyElectraForSequenceClassification
    require(model.config, NATIVE_ELECTRA | (NATIVE_CLASSIFIER if of_texts else NATIVE_TAGGER))
    return ELECTRA.to_native(blank(counterpart(model), model.config), model.state_dict())


def modern_names(native_class: type[PreTrainedModel]) -> Names:
    head = "generator_head." if native_class is transformers.ModernBertForMaskedLM else "classifier."
    return Names(((r"^classifier\.", "classifier.out."), (r"^head\.", head), *MODERN_NAMES), {})


def modern_from_native(model: PreTrainedModel) -> PreTrainedModel:
    """A native ModernBERT whose layers are all global, with its labels."""
    native = model.config
    needed = NATIVE_MODERN | {"layer_types": ["full_attention"] * native.num_hidden_layers}
    require(native, needed, "hf_tiny's modern architecture")
    fields = {ours: getattr(native, name) for name, ours in MODERN_FIELDS.items()}
    fields["rope_theta"] = native.rope_parameters["full_attention"]["rope_theta"]
    ours = blank(counterpart(model), native, architecture="modern", sharing="all", generator_size=1, **fields)
    prefix = "electra." if type(ours) is models.HfTinyElectraModel else ""
    state = modern_names(type(model)).from_native(model.state_dict())
    return filled(ours, {name.removeprefix(prefix): tensor for name, tensor in state.items()})


def modern_to_native(model: PreTrainedModel, native_class: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """A native ModernBERT, with its labels. native_class: what to make of a joint model."""
    config, state = model.config, model.state_dict()
    require(config, {"architecture": "modern"}, "a native twin of this class")
    pooled = {"classifier_pooling": "mean"} if config.classifier_pooling == "words" else {}
    require(config, {**NATIVE_TAGGER, "classifier_pairs": False, "classifier_buckets": 0, **pooled})
    native_class = native_class or counterpart(model)
    fields = {name: getattr(config, ours) for name, ours in MODERN_FIELDS.items()}
    fields |= {
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "classifier_dropout": head_dropout(config).p,
    }
    fields["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": config.rope_theta}}
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))  # only the tokenizer's
    if native_class is transformers.ModernBertForMaskedLM:
        require(config, {"generator_size": 1}, "native ModernBERT, which is as wide as its embeddings,")
        state = of_generator(state)
    elif type(model) is models.HfTinyElectraModel:
        state = {f"electra.{name}": tensor for name, tensor in state.items()}
    return modern_names(native_class).to_native(blank(native_class, config, **fields), state)


def seq2seq_from_native(model: transformers.MarianMTModel) -> models.HfTinySeq2SeqForConditionalGeneration:
    """A native Marian model, with its way to generate."""
    native = model.config
    one_table = "hf_tiny's encoder-decoder, with one table of embeddings for source, target and output layer,"
    require(native, {"share_encoder_decoder_embeddings": True, "tie_word_embeddings": True}, one_table)
    for name in ("attention_heads", "ffn_dim"):
        sizes = (getattr(native, f"encoder_{name}"), getattr(native, f"decoder_{name}"))
        require_equal(name, *sizes, ("encoder", "decoder"))
    ours = blank(counterpart(model), native, **{ours: getattr(native, name) for name, ours in MARIAN_FIELDS.items()})
    ours.generation_config = copy.deepcopy(model.generation_config)
    state = MARIAN.from_native(model.state_dict())
    return filled(ours, state | {"lm_head.bias": state["lm_head.bias"].squeeze(0)})


def seq2seq_to_native(model: models.HfTinySeq2SeqForConditionalGeneration) -> transformers.MarianMTModel:
    """A Marian model, with its way to generate."""
    config, size = model.config, model.config.hidden_size // model.config.num_attention_heads
    require(config, NATIVE_MARIAN | {"qk_head_dim": (size, None), "v_head_dim": (size, None)})
    changes = {name: getattr(config, ours) for name, ours in MARIAN_FIELDS.items()} | {"forced_eos_token_id": None}
    changes |= {"decoder_ffn_dim": config.intermediate_size, "decoder_attention_heads": config.num_attention_heads}
    native = blank(counterpart(model), config, **changes)
    native.generation_config = copy.deepcopy(model.generation_config)
    return MARIAN.to_native(native, model.state_dict())


def swapped(x: Tensor, rows: int, columns: int) -> Tensor:
    """The first dimension as (rows, columns), the other way round."""
    return x.unflatten(0, (rows, columns)).transpose(0, 1).flatten(0, 1)


def vit_from_native(model: PreTrainedModel) -> PreTrainedModel:
    """A native ViT, with its labels, or a masked autoencoder, whose positions, sinusoids that stay as they are, become learned
    ones. The pooler of a `ViTModel`, a layer for a task of its own, is left behind."""
    ours = blank(counterpart(model), model.config)
    state = VIT.from_native({k: tensor for k, tensor in model.state_dict().items() if not k.startswith("pooler.")})
    prefix = "embeddings." if type(ours) is models.HfTinyViTModel else "vit.embeddings."
    positions = state.pop(f"{prefix}position_embeddings").squeeze(0)  # (1 + patches, hidden)
    # The class token's position becomes a part of it.
    state[f"{prefix}prefix.weight"] = state.pop(f"{prefix}cls_token").squeeze(0) + positions[:1]
    state[f"{prefix}positions.table.weight"] = positions[1:]
    state[f"{prefix}projection.weight"] = state[f"{prefix}projection.weight"].flatten(1)
    if type(ours) is models.HfTinyViTForMaskedImageModeling:
        positions = state["decoder.positions.table.weight"].squeeze(0)  # (1 + patches, size)
        if positions[0].any():
            raise InputError("The decoder of this model gives the class token a position: here it has none.")
        state["decoder.positions.table.weight"] = positions[1:]
        state["decoder.mask_token.weight"] = state["decoder.mask_token.weight"].squeeze(0)
        for name in ("decoder.out.weight", "decoder.out.bias"):  # the native order within a patch has the channels last
            state[name] = swapped(state[name], -1, ours.config.num_channels)
    return filled(ours, state)


def vit_to_native(model: PreTrainedModel) -> PreTrainedModel:
    """A native ViT with its labels, or a native masked autoencoder."""
    config, state = model.config, model.state_dict()
    grid = list(config.grid_size(config.image_size))
    require(config, NATIVE_VIT | {"position_grid": grid})
    for name in ("vit.embeddings.positions.table.weight", "decoder.positions.table.weight"):
        if name in state:  # the class token has its position in itself
            state[name] = torch.cat((torch.zeros_like(state[name][:1]), state[name]))
    state["vit.embeddings.position_embeddings"] = state["vit.embeddings.positions.table.weight"]
    state["vit.embeddings.cls_token"] = state["vit.embeddings.prefix.weight"]
    if type(model) is models.HfTinyViTForImageClassification:
        require(config, {"pooling": "cls"})
    else:
        if grid[0] != grid[1]:
            raise InputError(f"image_size is {config.image_size}: transformers' ViTMAE only has square grids.")
        for name in ("decoder.out.weight", "decoder.out.bias"):
            state[name] = swapped(state[name], config.num_channels, -1)
    return VIT.to_native(blank(counterpart(model), config), state)


def reformer_from_native(model: PreTrainedModel) -> PreTrainedModel:
    """A native language model. Its two streams begin with the same embeddings: here each has its own half. With one hash
    and the same rotations both say the same; with more, native chunks also look back from one round into another. There is
    no way back: a native Reformer has no place for most of what a model here learns."""
    native, size, fused = model.config, model.config.hidden_size, {}
    if not native.is_decoder and "local" in native.attn_layers:
        raise InputError(
            f"attn_layers is {list(native.attn_layers)} in a model that is not causal: the first and the last chunk of a "
            "local layer see each other in transformers and not here. Only lsh layers can be converted."
        )
    require(native, NATIVE_REFORMER, "hf_tiny's Reformer")
    changes = {"hidden_size": 2 * size, "intermediate_size": native.feed_forward_size, "attend_across_buckets": True}
    dropout = max(native.lsh_attention_probs_dropout_prob, native.local_attention_probs_dropout_prob)
    ours = blank(counterpart(model), native, **changes, attention_probs_dropout_prob=dropout)
    for index, kind in enumerate(native.attn_layers):  # each kind of attention has its own projections
        layer, names = f"layers.{index}.attention.", PROJECTIONS if kind == "local" else ("query_key", "value")
        fused |= parts(layer + "{}.", f"{layer}qkv.", names)
    state, prefix = Names(REFORMER_NAMES, fused).from_native(model.state_dict()), "reformer.embeddings."
    rows, columns = (state.pop(f"{prefix}position_embeddings.weights.{axis}").flatten(0, 1) for axis in range(2))
    state[f"{prefix}row_embeddings.weight"] = F.pad(rows, (0, size - rows.shape[1]))
    state[f"{prefix}column_embeddings.weight"] = F.pad(columns, (size - columns.shape[1], 0))
    for name in ("word", "row", "column"):
        state[f"{prefix}{name}_embeddings.weight"] = state[f"{prefix}{name}_embeddings.weight"].repeat(1, 2)
    state.pop("lm_head.bias")  # the native model does not use it
    for name, tensor in ours.state_dict().items():
        if name.endswith("bias"):
            state.setdefault(name, torch.zeros_like(tensor))
    return filled(ours, state)


FROM_NATIVE = {
    transformers.ElectraConfig: electra_head_from_native,
    transformers.MarianConfig: seq2seq_from_native,
    transformers.ModernBertConfig: modern_from_native,
    transformers.ReformerConfig: reformer_from_native,
    transformers.ViTConfig: vit_from_native,
    transformers.ViTMAEConfig: vit_from_native,
}
CONVERSIONS = {  # by the class that was saved
    **{native: FROM_NATIVE[native.config_class] for native in COUNTERPARTS},
    models.HfTinyElectraForMaskedLM: modern_to_native,
    models.HfTinyElectraForPreTraining: joint_to_native,
    models.HfTinyElectraModel: modern_to_native,
    models.HfTinyElectraForSequenceClassification: electra_head_to_native,
    models.HfTinyElectraForTokenClassification: electra_head_to_native,
    models.HfTinySeq2SeqForConditionalGeneration: seq2seq_to_native,
    models.HfTinyViTForImageClassification: vit_to_native,
    models.HfTinyViTForMaskedImageModeling: vit_to_native,
}


def load(loader, source: str | Path, **options):
    with checkpoint.loaded(f"{source} cannot be loaded"):
        return loader.from_pretrained(checkpoint.usable(str(source)), trust_remote_code=False, **options)


def load_model(model_class: type[PreTrainedModel], source: str | Path) -> PreTrainedModel:
    """All of it: what a checkpoint lacks would be random."""
    model, info = load(model_class, source, output_loading_info=True)
    if lacking := sorted(info["missing_keys"]):
        raise InputError(
            f"{source} is no {model_class.__name__}: it lacks {len(lacking)} weights, such as {lacking[0]}."
        )
    return model


def converted(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """In the other format: by the folder that each model is saved in, of which the first is the main one."""
    if type(model) not in CONVERSIONS:
        raise InputError(f"{type(model).__name__} {NO_COUNTERPART}")
    found = CONVERSIONS[type(model)](model)
    return found if type(model) is models.HfTinyElectraForPreTraining else {"": found}


def convert(source: str, target: Path, main_at_top: bool = False) -> None:
    """The model at `source`, with its tokenizer or image processor if it has one, in the other format at `target`."""
    if target.exists() and any(target.iterdir()):
        raise InputError(f"{target} is not empty: choose another folder.")
    pair, tokenizer = [Path(source, name) for name in PAIR], None
    if from_tensorflow.found_in(Path(source)):
        found = {"": electra_from_tensorflow(Path(source))}
        tokenizer = from_tensorflow.read_tokenizer(Path(source), found[""].config.vocab_size)
    elif pair[0].is_dir():
        discriminator = load_model(transformers.ElectraForPreTraining, pair[0])
        generator = load_model(transformers.ElectraForMaskedLM, pair[1])
        source, found = str(pair[0]), {"": electra_from_native(discriminator, generator)}
    else:
        saved = (load(transformers.AutoConfig, source).architectures or ["A bare encoder"])[0]
        known = {model.__name__: model for model in CONVERSIONS}
        if saved not in known:
            raise InputError(f"{source}: {saved} {NO_COUNTERPART}")
        found = converted(load_model(known[saved], source))
    for number, (name, model) in enumerate(found.items()):
        place = target if main_at_top and number == 0 else target / name
        model.save_pretrained(place)
        checkpoint.open_weights(place)
        try:
            images = model.main_input_name == "pixel_values"
            loader = transformers.AutoImageProcessor if images else transformers.AutoTokenizer
            (tokenizer or load(loader, source)).save_pretrained(place)
        except InputError:
            print(f"{source} has no tokenizer or image processor: {place} has none either.", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_tiny.convert", description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    with exit_codes():
        convert(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
