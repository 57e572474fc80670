"""Between hf_tiny's checkpoints and native transformers ones, either way; SRC may be a Hub id.

python -m hf_tiny.convert runs/electra native  # makes native/discriminator and native/generator
python -m hf_tiny.convert native runs/again  # and back
"""

import argparse
import copy
import re
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
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
)

from .errors import InputError
from .models.electra import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
)
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
# Native name -> the name here, and which part it is of how many: queries, keys and values are one projection.
ELECTRA_FUSED = {f"attention.self.{n}": ("attention.qkv", i, 3) for i, n in enumerate(("query", "key", "value"))}
MARIAN_FUSED = {
    **{f"self_attn.{name}_proj": ("attention.qkv", part, 3) for part, name in enumerate("qkv")},
    **{f"encoder_attn.{name}_proj": ("cross_attention.key_value", part, 2) for part, name in enumerate("kv")},
}
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


def require(config: PreTrainedConfig, **needed) -> None:
    """Refuse what a native model cannot be; a tuple holds several values that will do."""
    for name, value in needed.items():
        found, fitting = getattr(config, name), value if isinstance(value, tuple) else (value,)
        if found not in fitting:
            raise InputError(f"{name} is {found!r}: the native model of transformers only has {fitting[0]!r}.")


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


CONVERSIONS = {  # by the class that was saved
    **dict.fromkeys(HEADS, electra_head_from_native),
    **dict.fromkeys(HEADS.values(), electra_head_to_native),
    HfTinyElectraForPreTraining: electra_to_native,
    HfTinySeq2SeqForConditionalGeneration: seq2seq_to_native,
    MarianMTModel: seq2seq_from_native,
}
PAIR = ("discriminator", "generator")


def load(loader: type, source: str | Path):
    try:
        return loader.from_pretrained(source)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{source} cannot be loaded: {error}") from error


def convert(source: str, target: Path) -> None:
    """The model at `source`, with its tokenizer if it has one, in the other format at `target`."""
    if target.exists() and any(target.iterdir()):
        raise InputError(f"{target} is not empty: choose another folder.")
    pair = [Path(source, name) for name in PAIR]
    if pair[0].is_dir():
        models = (load(ElectraForPreTraining, pair[0]), load(ElectraForMaskedLM, pair[1]))
        source, converted = str(pair[0]), (electra_from_native(*models),)
    else:
        saved = (load(AutoConfig, source).architectures or ["A bare encoder"])[0]
        known = {model.__name__: (model, function) for model, function in CONVERSIONS.items()}
        if saved not in known:
            hint = f"Two native ELECTRAs go into one folder, as {PAIR}."
            raise InputError(f"{source}: {saved} has no counterpart. {hint}")
        model_class, function = known[saved]
        model = function(load(model_class, source))
        converted = model if model_class is HfTinyElectraForPreTraining else (model,)
    for name, model in zip(PAIR if len(converted) == 2 else [""], converted, strict=True):
        model.save_pretrained(target / name)
        try:
            load(AutoTokenizer, source).save_pretrained(target / name)
        except InputError:
            print(f"{source} has no tokenizer: {target / name} has none either.", file=sys.stderr)


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
