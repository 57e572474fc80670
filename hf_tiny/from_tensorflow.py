"""The checkpoints of google-research/electra, which TensorFlow has written: generator and discriminator in one set of files."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import ElectraTokenizer

from .errors import InputError

LAYER = (
    *("attention/self/query", "attention/self/key", "attention/self/value", "attention/output/dense"),
    *("intermediate/dense", "output/dense", "attention/output/LayerNorm", "output/LayerNorm"),
)
HEADS = (
    *("generator_predictions/dense", "discriminator_predictions/dense", "discriminator_predictions/dense_1"),
    "generator_predictions/LayerNorm",
)
TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
HEAD_SIZE = 64  # of all published models; the shapes of weights do not tell it
NAMES = (  # the variable's name -> that of a native tensor
    (r"/", "."),
    (r"layer_(\d+)", r"layer.\1"),
    (r"(gamma|kernel)$", "weight"),
    (r"beta$", "bias"),
    (r"_embeddings$", "_embeddings.weight"),
    (r"^generator_predictions\.output_bias", "generator_lm_head.bias"),
    (r"predictions\.dense_1", "predictions.dense_prediction"),
)


def found_in(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.index"))


def read_variables(folder: Path) -> dict[str, Tensor]:
    """Those of the model, without the optimiser's."""
    try:
        import tensorflow as tf
    except ImportError:
        raise InputError(f"{folder} is a checkpoint of TensorFlow, which reads it: pip install 'hf_tiny[tf]'") from None
    prefixes = sorted(path.with_suffix("") for path in folder.glob("*.index"))
    if len(prefixes) > 1 and tf.train.latest_checkpoint(str(folder)) is None:
        several = ", ".join(path.name for path in prefixes)
        raise InputError(
            f"{folder} has several checkpoints ({several}) and no file that names the last: leave one of them."
        )
    prefix = prefixes[0] if len(prefixes) == 1 else tf.train.latest_checkpoint(str(folder))
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        names = [name for name in reader.get_variable_to_shape_map() if not re.search(r"/adam_[mv]|global_step", name)]
        return {name: torch.from_numpy(reader.get_tensor(name).copy()) for name in names}
    except (tf.errors.OpError, IndexError, ValueError) as error:  # its reader turns some codes into others
        raise InputError(f"{prefix} cannot be read: {error}") from error


def layers_of(variables: dict[str, Tensor], scope: str) -> int:
    numbers = [int(found[1]) for name in variables if (found := re.match(rf"{scope}/encoder/layer_(\d+)/", name))]
    return max(numbers, default=-1) + 1


def variables_of(modules: Iterable[str]) -> list[str]:
    """A dense layer has a kernel and a bias, a norm a gamma and a beta, and a table is a variable itself."""
    kinds = {"LayerNorm": ("/gamma", "/beta"), "embeddings": ("",)}
    dense = ("/kernel", "/bias")
    return [f"{name}{kind}" for name in modules for kind in kinds.get(re.split("[/_]", name)[-1], dense)]


def encoder_of(variables: dict[str, Tensor], scope: str, layers: int) -> list[str]:
    """The modules of an encoder behind its embeddings."""
    projected = [f"{scope}/embeddings_project"] if f"{scope}/embeddings_project/kernel" in variables else []
    return projected + [f"{scope}/encoder/layer_{layer}/{name}" for layer in range(layers) for name in LAYER]


def embeddings_of(scope: str) -> list[str]:
    return [f"{scope}/embeddings/{name}" for name in (*TABLES, "LayerNorm")]


def heads_of(folder: Path, hidden_size: int) -> int:
    """From config.json or hparams.json, if one is there."""
    for path in (folder / "config.json", folder / "hparams.json"):
        if path.exists() and "num_attention_heads" in (settings := json.loads(path.read_text(encoding="utf-8"))):
            return settings["num_attention_heads"]
    return max(1, hidden_size // HEAD_SIZE)


def read_electra(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """The fields of a joint model's config, and its weights under the names of native ones; the generator's own begin with
    `generator.`."""
    variables = read_variables(folder)
    if "electra/embeddings/word_embeddings" not in variables:
        first = sorted({name.split("/")[0] for name in variables})
        raise InputError(
            f"{folder} is no ELECTRA: it has no electra/embeddings/word_embeddings, but {', '.join(first)}."
        )
    own = any(name.startswith("generator/embeddings/") for name in variables)
    apart = layers_of(variables, "generator") > 0
    words, layers = variables["electra/embeddings/word_embeddings"], max(1, layers_of(variables, "electra"))
    modules = [*embeddings_of("electra"), *encoder_of(variables, "electra", layers)]
    modules += embeddings_of("generator") if own else []
    modules += encoder_of(variables, "generator", layers) if apart else []
    names = [*variables_of([*modules, *HEADS]), "generator_predictions/output_bias"]
    if lacking := [name for name in names if name not in variables]:
        raise InputError(f"{folder} lacks {len(lacking)} variables: {', '.join(lacking)}.")
    hidden = len(variables["electra/encoder/layer_0/output/LayerNorm/beta"])
    width = len(variables["generator/encoder/layer_0/output/LayerNorm/beta"]) if apart else hidden
    config = {
        "vocab_size": len(words),
        "embedding_size": words.shape[1],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads_of(folder, hidden),
        "intermediate_size": len(variables["electra/encoder/layer_0/intermediate/dense/bias"]),
        "max_position_embeddings": len(variables["electra/embeddings/position_embeddings"]),
        "type_vocab_size": len(variables["electra/embeddings/token_type_embeddings"]),
        "generator_size": width / hidden,
        "sharing": "none" if own else "embeddings" if apart else "all",
    }
    return config, dict(native(name, variables[name]) for name in names)


def native(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A kernel is (in, out) there, and (out, in) in PyTorch."""
    tensor = tensor.T.contiguous() if name.endswith("kernel") else tensor
    for old, new in NAMES:
        name = re.sub(old, new, name)
    return name, tensor


def read_tokenizer(folder: Path, vocab_size: int) -> ElectraTokenizer:
    """Of vocab.txt. Words with capitals say that it is cased. Hangul keeps its syllables: where accents are stripped, they
    come apart."""
    path = folder / "vocab.txt"
    if not path.exists():
        raise InputError(f"{folder} has no vocab.txt, the vocabulary of its tokenizer.")
    pieces = path.read_text(encoding="utf-8").splitlines()
    if len(pieces) != vocab_size:
        raise InputError(
            f"{path} has {len(pieces)} word pieces, but the model {vocab_size}: it is that of another one."
        )
    lower = not any(re.search("[A-Z]", piece) for piece in pieces if not re.fullmatch(r"\[.*\]", piece))
    hangul = any(re.search("[가-힣]", piece) for piece in pieces)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return ElectraTokenizer(vocabulary, do_lower_case=lower, strip_accents=False if hangul else None)
