"""Checkpoints that TensorFlow writes with the variables of google-research/electra, against that graph in NumPy."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, ElectraForMaskedLM, ElectraForPreTraining

from hf_tiny import HfTinyElectraForMaskedLM, HfTinyElectraForPreTraining, InputError, convert
from hf_tiny.from_tensorflow import read_tokenizer

try:
    import tensorflow as tf
except ImportError:
    missing = "NOT TESTED, TensorFlow is missing: pip install 'hf_tiny[tf]'"
    warnings.warn(f"checkpoints of TensorFlow: {missing}", stacklevel=1)
    pytest.skip(missing, allow_module_level=True)

pytestmark = pytest.mark.slow

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "##s",
    "영화",
    "##가",
    "재미",
    "##있다",
    "sat",
    ".",
]
EMBEDDING, HIDDEN, FEED, LAYERS, HEADS = 12, 16, 24, 2, 4


def variables_of(sharing: str) -> dict[str, np.ndarray]:
    """As run_pretraining.py makes them; the generator is half as wide, or the same where all is shared."""
    random, found = np.random.default_rng(0), {}

    def add(name: str, *shape: int) -> None:
        found[name] = random.normal(scale=0.3, size=shape).astype(np.float32)

    def dense(name: str, inside: int, outside: int) -> None:
        add(f"{name}/kernel", inside, outside)
        add(f"{name}/bias", outside)

    def norm(name: str, size: int) -> None:
        add(f"{name}/gamma", size)
        add(f"{name}/beta", size)

    widths = {"electra": (HIDDEN, FEED)} | ({} if sharing == "all" else {"generator": (HIDDEN // 2, FEED // 2)})
    for scope in ["electra", *(["generator"] if sharing == "none" else [])]:
        for table, size in (("word", len(PIECES)), ("position", 20), ("token_type", 2)):
            add(f"{scope}/embeddings/{table}_embeddings", size, EMBEDDING)
        norm(f"{scope}/embeddings/LayerNorm", EMBEDDING)
    for scope, (width, feed) in widths.items():
        dense(f"{scope}/embeddings_project", EMBEDDING, width)
        for layer in range(LAYERS):
            place = f"{scope}/encoder/layer_{layer}"
            for part in (
                "attention/self/query",
                "attention/self/key",
                "attention/self/value",
                "attention/output/dense",
            ):
                dense(f"{place}/{part}", width, width)
            dense(f"{place}/intermediate/dense", width, feed)
            dense(f"{place}/output/dense", feed, width)
            norm(f"{place}/attention/output/LayerNorm", width)
            norm(f"{place}/output/LayerNorm", width)
    dense("generator_predictions/dense", list(widths.values())[-1][0], EMBEDDING)
    norm("generator_predictions/LayerNorm", EMBEDDING)
    add("generator_predictions/output_bias", len(PIECES))
    dense("discriminator_predictions/dense", HIDDEN, HIDDEN)
    dense("discriminator_predictions/dense_1", HIDDEN, 1)
    return found


def write(folder: Path, variables: dict[str, np.ndarray], pieces: list[str] = PIECES) -> Path:
    """With the optimiser's variables, as a training leaves them."""
    folder.mkdir()
    moments = {f"{name}/adam_{kind}": tensor for name, tensor in variables.items() for kind in "mv"}
    every = {**variables, **moments, "global_step": np.int64(7)}
    names, tensors = list(every), [tf.constant(tensor) for tensor in every.values()]
    prefix = str(folder / "electra_tiny")
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors)
    (folder / "config.json").write_text(f'{{"num_attention_heads": {HEADS}}}')
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return folder


class Graph:
    """The original's forward pass."""

    def __init__(self, variables: dict[str, np.ndarray]):
        self.variables = {name: tensor.astype(np.float64) for name, tensor in variables.items()}

    def dense(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.variables[f"{name}/kernel"] + self.variables[f"{name}/bias"]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * self.variables[f"{name}/gamma"] + self.variables[f"{name}/beta"]

    def gelu(self, x: np.ndarray) -> np.ndarray:
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    def encode(self, scope: str, ids: np.ndarray, types: np.ndarray, heads: int) -> np.ndarray:
        """Of one text (length,)."""
        owner = scope if f"{scope}/embeddings/word_embeddings" in self.variables else "electra"
        tables = [
            self.variables[f"{owner}/embeddings/{name}_embeddings"] for name in ("word", "position", "token_type")
        ]
        x = self.norm(f"{owner}/embeddings/LayerNorm", tables[0][ids] + tables[1][: len(ids)] + tables[2][types])
        x = self.dense(f"{scope}/embeddings_project", x)
        for layer in range(LAYERS):
            place = f"{scope}/encoder/layer_{layer}"
            query, key, value = (
                self.dense(f"{place}/attention/self/{name}", x).reshape(len(ids), heads, -1).swapaxes(0, 1)
                for name in ("query", "key", "value")
            )
            scores = query @ key.swapaxes(1, 2) / math.sqrt(query.shape[-1])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            seen = (weights / weights.sum(-1, keepdims=True) @ value).swapaxes(0, 1).reshape(len(ids), -1)
            attended = self.dense(f"{place}/attention/output/dense", seen)
            x = self.norm(f"{place}/attention/output/LayerNorm", attended + x)
            fed = self.dense(f"{place}/output/dense", self.gelu(self.dense(f"{place}/intermediate/dense", x)))
            x = self.norm(f"{place}/output/LayerNorm", fed + x)
        return x

    def discriminate(self, ids: np.ndarray, types: np.ndarray) -> np.ndarray:
        hidden = self.gelu(self.dense("discriminator_predictions/dense", self.encode("electra", ids, types, HEADS)))
        return self.dense("discriminator_predictions/dense_1", hidden)[:, 0]

    def generate(self, ids: np.ndarray, types: np.ndarray) -> np.ndarray:
        apart = "generator/embeddings_project/kernel" in self.variables
        scope, heads = ("generator", HEADS // 2) if apart else ("electra", HEADS)
        x = self.gelu(self.dense("generator_predictions/dense", self.encode(scope, ids, types, heads)))
        x = self.norm("generator_predictions/LayerNorm", x)
        own = self.variables.get("generator/embeddings/word_embeddings")
        words = self.variables["electra/embeddings/word_embeddings"] if own is None else own
        return x @ words.T + self.variables["generator_predictions/output_bias"]


@pytest.mark.parametrize("sharing", ["none", "embeddings", "all"])
@torch.no_grad()
def test_a_checkpoint_becomes_ours_and_a_native_one(sharing, tmp_path):
    variables = variables_of(sharing)
    convert.main([str(write(tmp_path / "tf", variables)), str(tmp_path / "ours")])
    joint = HfTinyElectraForPreTraining.from_pretrained(tmp_path / "ours")
    assert joint.config.sharing == sharing and joint.config.num_attention_heads == HEADS
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    batch = tokenizer("The cats sat.", "영화가 재미있다.", return_tensors="pt")
    expected_ids = [2, 5, 6, 7, 12, 13, 3, 8, 9, 10, 11, 13, 3]
    assert batch["input_ids"][0].tolist() == expected_ids
    graph, types = Graph(variables), batch["token_type_ids"][0].numpy()
    expected = [
        torch.from_numpy(f(np.array(expected_ids), types)).float() for f in (graph.discriminate, graph.generate)
    ]
    assert expected[0].abs().mean() > 0.05 and expected[1].abs().mean() > 0.05
    convert.main([str(tmp_path / "ours"), str(tmp_path / "native")])
    discriminators = joint, ElectraForPreTraining.from_pretrained(tmp_path / "native/discriminator")
    generators = (
        HfTinyElectraForMaskedLM.from_pretrained(tmp_path / "ours"),
        ElectraForMaskedLM.from_pretrained(tmp_path / "native/generator"),
    )
    for models, logits in zip((discriminators, generators), expected, strict=True):
        for model in models:
            torch.testing.assert_close(model.eval()(**batch).logits[0], logits, atol=1e-5, rtol=1e-5)
    convert.main([str(tmp_path / "native"), str(tmp_path / "back")])
    back = HfTinyElectraForPreTraining.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(back(**batch).logits[0], expected[0], atol=1e-5, rtol=1e-5)
    for folder in ("native/discriminator", "native/generator", "back"):
        again = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert again("The cats sat.", "영화가 재미있다.")["input_ids"] == expected_ids


def test_what_cannot_be_read(tmp_path):
    variables = variables_of("embeddings")
    some = {name: tensor for name, tensor in variables.items() if "layer_1/output" not in name}
    cases = {
        "cut": (
            some,
            PIECES,
            r"lacks 8 variables: electra/encoder/layer_1/output/dense/kernel, .*generator/encoder/layer_1",
        ),
        "bert": (
            {"bert/pooler/dense/bias": np.zeros(3)},
            PIECES,
            "is no ELECTRA: it has no .*word_embeddings, but bert",
        ),
        "words": (variables, PIECES[:-1], "vocab.txt has 13 word pieces, but the model 14"),
    }
    for name, (saved, pieces, message) in cases.items():
        with pytest.raises(InputError, match=message):
            convert.convert(str(write(tmp_path / name, saved, pieces)), tmp_path / "new")
        assert not (tmp_path / "new").exists()
    (tmp_path / "words/electra_tiny.data-00000-of-00001").write_bytes(b"short")
    with pytest.raises(InputError, match="electra_tiny cannot be read"):
        convert.convert(str(tmp_path / "words"), tmp_path / "new")


def test_tokenizers_keep_case_and_syllables(tmp_path):
    for pieces, text, expected in (
        (["[UNK]", "Seoul", "seoul"], "Seoul", ["Seoul"]),
        (["[UNK]", "seoul", "cafe"], "Seoul café", ["seoul", "cafe"]),
        (["[UNK]", "seoul", "한글"], "SEOUL 한글", ["seoul", "한글"]),
    ):
        (tmp_path / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
        assert read_tokenizer(tmp_path, 3).tokenize(text) == expected
