"""The tables of models and of their sizes. A new model is one file in this folder and its rows here."""

from collections.abc import Iterator
from types import ModuleType

import transformers
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from . import electra, linking, pair, reformer, seq2seq, vit
from .electra import *  # noqa: F403
from .image_processing import HfTinyGreyImageProcessor
from .linking import *  # noqa: F403
from .pair import *  # noqa: F403
from .reformer import *  # noqa: F403
from .seq2seq import *  # noqa: F403
from .vit import *  # noqa: F403

__all__ = ["AUTO_CLASSES", "SIZES", "model_classes"]
__all__ += electra.__all__ + linking.__all__ + pair.__all__ + reformer.__all__ + seq2seq.__all__ + vit.__all__

FAMILIES = (electra, seq2seq, reformer, linking, vit)
# The tasks of the Auto classes that a head belongs to, where its name has others.
TASKS = {"ConditionalGeneration": ["Seq2SeqLM"], "MaskedImageModeling": ["PreTraining", "MaskedImageModeling"]}


def auto_classes(family: ModuleType) -> dict:
    """HfTinyElectraForMaskedLM is what AutoModelForMaskedLM makes, HfTinyElectraModel what AutoModel does."""
    found: dict = {}
    for name in family.__all__:
        task = name.partition("For")[2]
        if task:
            found |= {
                getattr(transformers, f"AutoModelFor{one}"): vars(family)[name] for one in TASKS.get(task, [task])
            }
        elif name.endswith("Model"):
            found[AutoModel] = vars(family)[name]
    return found


AUTO_CLASSES: dict[type[PreTrainedConfig], dict] = {
    vars(family)[name]: auto_classes(family)
    for family in FAMILIES
    for name in family.__all__
    if name.endswith("Config")
}


# Known to the Auto classes, too, but nothing to start from scratch or to fine-tune: what it wraps is.
WRAPPERS: dict[type[PreTrainedConfig], dict] = {pair.HfTinyPairConfig: auto_classes(pair)}


def widths(size: int, head_size: int = 64, side: str = "") -> dict[str, int]:
    """The fields of a Transformer that is `size` wide, with a feed-forward layer of 4 times that."""
    return {
        f"{side}hidden_size": size,
        f"{side}num_attention_heads": size // head_size,
        f"{side}intermediate_size": 4 * size,
    }


def vit_sizes(size: int, decoder_size: int, decoder_layers: int) -> dict[str, int]:
    """A ViT of 12 layers with MAE's decoder."""
    decoder = {**widths(decoder_size, 32, "decoder_"), "decoder_num_hidden_layers": decoder_layers}
    return {**widths(size), "num_hidden_layers": 12, **decoder}


SMALL_TEXTS = {"embedding_size": 128, "num_hidden_layers": 4, "sharing": "disentangled", "position_embedding_type": "rotary",
               "norm_first": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
SMALL_IMAGES = {**widths(96, 24), **widths(64, 16, "decoder_"), "num_hidden_layers": 4, "initializer_range": 0.08,
                "pooling": "mean"}  # fmt: skip
# The config fields of each size: those of the papers, and tiny ones for a few minutes on a laptop.
SIZES: dict[type, dict[str, dict]] = {
    electra.HfTinyElectraConfig: {
        "tiny": {**SMALL_TEXTS, **widths(128), "generator_size": 9 / 32, "generator_layers": 1, "initializer_range": 0.1},
        "mini": {**SMALL_TEXTS, **widths(256), "generator_size": 1 / 4, "generator_layers": 2, "initializer_range": 0.07},
        "small": {**widths(256), "embedding_size": 128, "num_hidden_layers": 12, "generator_size": 1 / 4},
        "base": {**widths(768), "embedding_size": 768, "num_hidden_layers": 12, "generator_size": 1 / 3},
        "large": {**widths(1024), "embedding_size": 1024, "num_hidden_layers": 24, "generator_size": 1 / 4},
    },
    seq2seq.HfTinySeq2SeqConfig: {
        "tiny": {**widths(128, 32), "intermediate_size": 256, "encoder_layers": 4, "norm_first": True},
        "base": {**widths(512), "encoder_layers": 6},
        "big": {**widths(1024), "encoder_layers": 6},
    },
    reformer.HfTinyReformerConfig: {  # half of the width is a stream's; the paper's is for enwik8
        "tiny": {**widths(256), "intermediate_size": 512, "attn_layers": ["local", "lsh"] * 2, "num_hashes": 2,
                 "hash_centred_keys": True, "position_embedding_type": "rotary", "initializer_range": 0.05,
                 "hidden_dropout_prob": 0.0},
        "base": {**widths(2048, 256), "intermediate_size": 4096, "attn_layers": ["local", "lsh"] * 6, "num_hashes": 4,
                 "hash_centred_keys": True, "position_embedding_type": "rotary", "hidden_dropout_prob": 0.1},
    },
    vit.HfTinyViTConfig: {  # two for small images; DeiT's tiny and small, ViT's base
        "tiny": {**SMALL_IMAGES, "decoder_num_hidden_layers": 1},
        "mini": {**SMALL_IMAGES, "decoder_num_hidden_layers": 2},
        "ti": vit_sizes(192, 128, 2),
        "small": vit_sizes(384, 256, 4),
        "base": vit_sizes(768, 512, 8),
    },
}  # fmt: skip


def model_classes() -> Iterator[tuple[type, type, type]]:
    """(config class, Auto class, model class) of every row."""
    for config_class, heads in AUTO_CLASSES.items():
        for auto_class, model_class in heads.items():
            yield config_class, auto_class, model_class


def register() -> None:
    """Make every model known to the Auto classes, here and in the checkpoints that it saves."""
    for config_class, heads in (AUTO_CLASSES | WRAPPERS).items():
        file = config_class.__module__.rpartition(".")[2]
        names = {AutoConfig: config_class, **heads}
        config_class.registered_auto_map = {auto.__name__: f"{file}.{cls.__name__}" for auto, cls in names.items()}
        config_class.register_for_auto_class()
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        for auto_class, model_class in heads.items():
            model_class.register_for_auto_class(auto_class.__name__)
            auto_class.register(config_class, model_class, exist_ok=True)
    HfTinyGreyImageProcessor.register_for_auto_class()
    transformers.AutoImageProcessor.register(
        vit.HfTinyViTConfig, image_processor_classes={"pil": HfTinyGreyImageProcessor}, exist_ok=True
    )


register()
