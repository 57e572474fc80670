"""What every model here must do, as in transformers' own common model tests. A new model adds one entry to TINY."""

import ast
import copy
import inspect
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments, pipeline

import hf_tiny
from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraForMaskedLM,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
    HfTinyReformerConfig,
    HfTinyReformerForCausalLM,
    HfTinyReformerForMaskedLM,
    HfTinyReformerForSequenceClassification,
    HfTinyReformerForTokenClassification,
    HfTinySeq2SeqConfig,
    HfTinySeq2SeqForConditionalGeneration,
    HfTinyTokenLinkingConfig,
    HfTinyTokenLinkingModel,
    HfTinyViTConfig,
    HfTinyViTForImageClassification,
    HfTinyViTForMaskedImageModeling,
)
from hf_tiny.models import AUTO_CLASSES, model_classes

ELECTRA = {
    "vocab_size": 50,
    "embedding_size": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "generator_size": 0.5,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}
BERT = {name: ELECTRA[name] for name in ELECTRA if name not in ("embedding_size", "generator_size")}
LINKING = {"arc_size": 16, "label_size": 8, "linking_dropout": 0.0, "num_labels": 3}
SEQ2SEQ = {
    "vocab_size": 50,
    "hidden_size": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
}
VIT = {  # 8 patches and the class token: as long as the texts
    "image_size": [4, 8],
    "patch_size": 2,
    "num_channels": 1,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "decoder_hidden_size": 24,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 40,
    "num_labels": 3,
}
REFORMER = {
    "vocab_size": 50,
    "hidden_size": 32,
    "attn_layers": ["local", "lsh"],
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "axial_pos_shape": [5, 5],
    "lsh_attn_chunk_length": 4,
    "local_attn_chunk_length": 4,
    "hidden_dropout_prob": 0.0,
    "num_labels": 3,
}
# Config class -> variants of a tiny config. The first one also goes through the slow tests (export, compile).
TINY = {
    HfTinyElectraConfig: {
        "embeddings": ELECTRA,
        "none": {**ELECTRA, "sharing": "none", "norm_first": True},
        "all": {
            **ELECTRA,
            "sharing": "all",
            "generator_size": 1,
            "position_embedding_type": "rotary",
            "norm_first": True,
        },
    },
    HfTinySeq2SeqConfig: {
        "sinusoidal": SEQ2SEQ,
        "learned": {
            **SEQ2SEQ,
            "position_embedding_type": "learned",
            "tie_word_embeddings": False,
            "hidden_act": "gelu",
        },
        "rotary": {
            **SEQ2SEQ,
            "position_embedding_type": "rotary",
            "norm_first": True,
            "qk_head_dim": 8,
            "v_head_dim": 12,
        },
    },
    HfTinyReformerConfig: {
        "hashed": REFORMER,
        "short": {
            **REFORMER,
            "position_embedding_type": "rotary",
            "lsh_attn_chunk_length": 8,
            "tie_word_embeddings": False,
        },
    },
    HfTinyTokenLinkingConfig: {
        "electra": {**LINKING, "encoder": {"model_type": "hf_tiny_electra", **ELECTRA}},
        "bert": {**LINKING, "encoder": {"model_type": "bert", **BERT}},
    },
    HfTinyViTConfig: {
        "learned": VIT,
        "sinusoidal": {
            **VIT,
            "position_embedding_type": "sinusoidal",
            "pooling": "mean",
            "norm_pix_loss": True,
            "layer_scale_init_value": 0.5,
            "qkv_bias": False,
        },
        "registers": {**VIT, "patch_size": [2, 2], "num_register_tokens": 2},
    },
}
ROWS = list(model_classes())


def variants(config_class: type) -> dict[str, dict]:
    if config_class not in TINY:
        pytest.fail(f"{config_class.__name__} is registered but has no tiny config: add it to TINY in {__file__}.")
    return TINY[config_class]


CASES = [
    pytest.param((row, variant), id=f"{row[2].__name__}-{variant}")
    for row in ROWS
    for variant in TINY.get(row[0], ["missing"])
]
TEXTS = [case for case in CASES if case.values[0][0][0] is not HfTinyViTConfig]
FLEX = [case for case in CASES if case.values[0][0][2]._supports_flex_attn]  # the Reformer has its own attention
FIRST = [pytest.param((row, next(iter(TINY.get(row[0], ["missing"])))), id=row[2].__name__) for row in ROWS]


def tiny_config(config_class: type, variant: str, *, encoder: dict | None = None, **changes):
    """A variant with changes; `encoder` are those that in a composite config belong to the encoder inside it."""
    sizes, encoder = variants(config_class)[variant], encoder or {}
    if "encoder" in sizes:
        return config_class(**{**sizes, "encoder": {**sizes["encoder"], **encoder}, **changes})
    return config_class(**{**sizes, **encoder, **changes})


@pytest.fixture(params=CASES)
def case(request):
    return request.param


@pytest.fixture
def auto_class(case):
    return case[0][1]


@pytest.fixture
def model(case) -> PreTrainedModel:
    """A tiny model without dropout whose weights are large enough for outputs of order 1."""
    (config_class, _, model_class), variant = case
    wide = {"initializer_range": 0.2}
    model = model_class(tiny_config(config_class, variant, encoder=wide, **wide))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model.eval()


# Each row's words, as (first token, one past the last); (0, 0) is no word.
WORD_SPANS = torch.tensor(
    [[[1, 3], [3, 4], [4, 6], [6, 8]], [[1, 2], [2, 5], [5, 6], [0, 0]], [[0, 1], [2, 3], [3, 8], [8, 9]]]
)
TEXT_LABELS = {"labels": torch.tensor([2, 0, 1])}
TOKEN_LABELS = {
    "labels": torch.tensor([[-100, *row, -100] for row in ([0, 1, 2, -100, 1, 0, 2], [2, -100, 1, 0, *[-100] * 3])])[
        [0, 1, 0]
    ]
}
TARGETS = {  # what gives a loss; other models have masked tokens or patches to guess
    HfTinyViTForImageClassification: TEXT_LABELS,
    HfTinyElectraForSequenceClassification: TEXT_LABELS,
    HfTinyElectraForTokenClassification: TOKEN_LABELS,
    HfTinyReformerForSequenceClassification: TEXT_LABELS,
    HfTinyReformerForTokenClassification: TOKEN_LABELS,
    HfTinyTokenLinkingModel: {
        "heads": torch.tensor([[2, 0, 2, 3], [0, 1, 2, -100], [4, -100, 0, 3]]),
        "labels": torch.tensor([[1, 0, 2, 1], [0, 2, 1, -100], [2, -100, 0, 1]]),
    },
}


def inputs(model_class: type, config, *, training: bool = False) -> dict[str, Tensor]:
    """A batch of 3, texts with one padded row; `training` adds what gives a loss."""
    generator = torch.Generator().manual_seed(1)
    if model_class.main_input_name == "pixel_values":
        return image_inputs(model_class, config, training)
    ids = torch.randint(5, config.get_text_config().vocab_size, (3, 9), generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][1, 6:] = 0
    names = inspect.signature(model_class.forward).parameters
    if "decoder_input_ids" in names:
        return {**batch, **decoder_inputs(training and "labels" in names)}
    batch["token_type_ids"] = (torch.arange(9) > 4).long().repeat(3, 1)
    if "word_spans" in names:
        batch["word_spans"] = WORD_SPANS.clone()
    if training and model_class in TARGETS:
        batch.update({name: tensor.clone() for name, tensor in TARGETS[model_class].items()})
    elif training and "labels" in names:
        batch["labels"] = torch.full_like(ids, -100)
        batch["labels"][:, 2:5] = ids[:, 2:5]
        batch["input_ids"] = ids.index_fill(1, torch.tensor([2, 3]), 4)
    if training and "sampling_noise" in names:
        batch["sampling_noise"] = torch.rand(ids.shape, generator=generator)
    return batch


def image_inputs(model_class: type, config, training: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    batch = {"pixel_values": torch.randn(3, config.num_channels, *config.image_size, generator=generator)}
    if model_class is HfTinyViTForMaskedImageModeling:
        batch["ids_keep"] = torch.tensor([[0, 4, 3], [7, 1, 2], [5, 4, 6]])
    if training and model_class in TARGETS:
        batch.update({name: tensor.clone() for name, tensor in TARGETS[model_class].items()})
    return batch


def decoder_inputs(labelled: bool) -> dict[str, Tensor]:
    """A batch of 3 with one padded row, as the decoder's input or as labels."""
    ids = torch.randint(5, 40, (3, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[2, 4:] = 0
    given = {"labels": ids.masked_fill(mask == 0, -100)} if labelled else {"decoder_input_ids": ids}
    return {**given, "decoder_attention_mask": mask}


def main_output(outputs) -> Tensor:
    return next(outputs[name] for name in ("logits", "last_hidden_state", "loss") if name in outputs)


def valid_output(outputs, batch: dict[str, Tensor]) -> Tensor:
    """What a model says about the tokens, texts or links that are not padding."""
    output = main_output(outputs)
    if "pixel_values" in batch:
        return output
    if "word_spans" in batch:
        return valid_links(outputs, batch["word_spans"])
    if "decoder_attention_mask" in batch:
        return output[batch["decoder_attention_mask"].bool()]
    return output if output.shape[:2] != batch["attention_mask"].shape else output[batch["attention_mask"].bool()]


def valid_links(outputs, word_spans: Tensor) -> Tensor:
    """The scores of the links that are possible, and of their labels, in one row; the others must be the least number."""
    arcs, exist = outputs["logits"], word_spans[:, :, 1] > word_spans[:, :, 0]
    batch, words = exist.shape
    assert arcs.shape == (batch, words, words + 1)
    possible = torch.zeros_like(arcs, dtype=torch.bool)
    for row, start, end in itertools.product(range(batch), range(words), range(words + 1)):
        possible[row, start, end] = end == 0 or (exist[row, end - 1] and end - 1 != start)
    assert arcs[~possible].eq(torch.finfo(arcs.dtype).min).all()
    asked = possible & exist[:, :, None]
    found = [arcs[asked]]
    if "label_logits" in outputs:
        assert outputs["label_logits"].shape == (batch, words, words + 1, 3)
        found.append(outputs["label_logits"][asked].flatten())
    return torch.cat(found)


def run(model: PreTrainedModel, **changes) -> Tensor:
    """What `valid_output` takes, without a gradient."""
    batch = {**inputs(type(model), model.config), **changes}
    with torch.no_grad():
        return valid_output(model(**batch), batch)


def loss_of(model: PreTrainedModel) -> Tensor:
    """The model's loss, or a number that depends on all of its output when it has none."""
    torch.manual_seed(1)
    outputs = model(**inputs(type(model), model.config, training=True))
    if "loss" in outputs:
        return outputs.loss
    weights = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0])
    return (outputs[0] * weights).sum()


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("config_class", AUTO_CLASSES, ids=lambda cls: cls.__name__)
def test_every_config_has_a_tiny_entry(config_class):
    assert len(variants(config_class)) >= 1


# Saving and loading


def assert_same(loaded: nn.Module, model: nn.Module) -> None:
    found, expected = loaded.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_save_and_load(model, auto_class, tmp_path):
    model.save_pretrained(tmp_path)
    for loader in (type(model), auto_class):
        loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is type(model)
        assert not any(info.values()), info
        assert_same(loaded, model)
        assert_close(run(loaded), run(model), 1e-6)  # not bit-equal: the weights lie elsewhere in memory


def test_config_round_trip(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    loaded = type(model.config).from_pretrained(tmp_path)
    assert loaded.to_dict() == model.config.to_dict()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model.config.model_type


def tied_groups(model: nn.Module) -> list[list[str]]:
    """The names of the parameters that are one and the same."""
    groups = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)


def test_tied_weights(model, tmp_path):
    tied = tied_groups(model)
    declared = [sorted(pair) for pair in model.all_tied_weights_keys.items()]
    assert sorted(sorted(group) for group in tied) == sorted(declared)
    head = model.get_output_embeddings()
    if head is not None and model.config.tie_word_embeddings:
        assert any(model.get_parameter(group[0]) is head.weight for group in tied), "the output layer is not tied"
    model.tie_weights()
    assert tied_groups(model) == tied
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert len(saved) == len(dict(model.named_parameters()))  # every tensor once
    loaded = type(model).from_pretrained(tmp_path)
    assert tied_groups(loaded) == tied
    for first, second in tied:
        assert torch.equal(loaded.get_parameter(first), model.get_parameter(second))


def test_a_missing_weight_is_initialised(model, tmp_path):
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    linear = next(n for n, m in model.named_modules() if isinstance(m, nn.Linear) and f"{n}.weight" in saved)
    norm = next(n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm))
    dropped = {f"{linear}.weight", f"{linear}.bias", f"{norm}.weight", f"{norm}.bias"}
    save_file({k: v for k, v in saved.items() if k not in dropped}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == dropped
    weight = loaded.get_parameter(f"{linear}.weight")
    assert abs(weight.std().item() / model.config.initializer_range - 1) < 0.2
    assert loaded.get_parameter(f"{linear}.bias").abs().max() == 0
    assert loaded.get_parameter(f"{norm}.weight").eq(1).all()
    assert loaded.get_parameter(f"{norm}.bias").eq(0).all()
    for name, parameter in loaded.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert parameter.device.type == "cpu", name
        assert name in dropped or torch.equal(parameter, saved[name]), name


def parts(model: PreTrainedModel) -> Iterator[tuple[object, nn.Module]]:
    """(config, module) of a model, or of the encoder and the head that a composite model consists of."""
    if model.config.get_text_config() is model.config:
        yield model.config, model
    else:
        yield model.config.encoder, model.encoder
        yield model.config, model.head


def test_initialisation(case):
    (config_class, _, model_class), variant = case
    for config, part in parts(model_class(tiny_config(config_class, variant))):
        matrices = []
        for name, module in part.named_modules():
            if isinstance(module, nn.LayerNorm):
                assert module.weight.eq(1).all(), name
                assert module.bias.eq(0).all(), name
            if isinstance(module, nn.Linear):
                assert module.bias is None or module.bias.eq(0).all(), name
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                assert module.weight[module.padding_idx].eq(0).all(), name
            if isinstance(module, nn.Linear | nn.Embedding):
                weight = module.weight.detach()
                matrices.append(weight.flatten())
                assert weight.mean().abs() < 5 * config.initializer_range / weight.numel() ** 0.5, name
        assert abs(torch.cat(matrices).std().item() / config.initializer_range - 1) < 0.05


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies(model, how):
    expected = run(model)
    copied = how(model)
    assert tied_groups(copied) == tied_groups(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run(copied), expected)


# Embeddings


@pytest.mark.parametrize("case", TEXTS, indirect=True)
def test_get_and_set_input_embeddings(model):
    old = model.get_input_embeddings()
    assert isinstance(old, nn.Embedding)
    assert old.weight.shape[0] == model.config.get_text_config().vocab_size
    expected = run(model)
    new = nn.Embedding(*old.weight.shape)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    assert (run(model) - expected).abs().max() > 1e-3
    with torch.no_grad():
        new.weight.copy_(old.weight)
    assert torch.equal(run(model), expected)
    head = model.get_output_embeddings()
    assert head is None or (
        isinstance(head, nn.Linear) and head.out_features == model.config.get_text_config().vocab_size
    )


@pytest.mark.parametrize("case", TEXTS, indirect=True)
@pytest.mark.parametrize("new_size", [61, 44])
def test_resize_token_embeddings(model, new_size, tmp_path):
    old_size = model.config.get_text_config().vocab_size
    keep = min(old_size, new_size)
    ids = inputs(type(model), model.config)["input_ids"].clamp(max=keep - 1)
    expected = run(model, input_ids=ids)
    tied = tied_groups(model)
    model.resize_token_embeddings(new_size)
    assert model.config.get_text_config().vocab_size == new_size
    assert tied_groups(model) == tied
    for name, parameter in model.named_parameters():
        assert old_size not in parameter.shape, f"{name} kept the old vocabulary: {tuple(parameter.shape)}"
    found = run(model, input_ids=ids)
    if found.shape[-1] == new_size:
        expected, found = expected[..., :keep], found[..., :keep]
    assert_close(found, expected, 1e-6)
    assert torch.isfinite(run(model, input_ids=ids.index_fill(1, torch.tensor([3]), new_size - 1))).all()
    assert torch.isfinite(loss_of(model) if new_size > old_size else run(model, input_ids=ids)).all()
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same(loaded, model)


@pytest.mark.parametrize("case", TEXTS, indirect=True)
def test_inputs_embeds(model):
    batch = inputs(type(model), model.config)
    embedded = model.get_input_embeddings()(batch["input_ids"])
    assert_close(run(model, input_ids=None, inputs_embeds=embedded), run(model), 1e-6)
    with pytest.raises(ValueError, match=r"exactly one of input_ids (and|or) inputs_embeds"):
        run(model, inputs_embeds=embedded)
    with pytest.raises(ValueError, match=r"exactly one of input_ids (and|or) inputs_embeds"):
        run(model, input_ids=None)


# What comes out


def test_signature(model):
    names = list(inspect.signature(type(model).forward).parameters)
    of_images = isinstance(model.config, HfTinyViTConfig)
    first = ["pixel_values"] if of_images else ["input_ids", "attention_mask"]
    assert names[: len(first) + 1] == ["self", *first]
    assert names[-1] == "kwargs"
    assert model.main_input_name == first[0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("how", ["argument", "config"])
def test_tuple_equals_dict(model, training, how):
    batch = inputs(type(model), model.config, training=training)
    model.set_attn_implementation("eager")
    wanted = {"output_hidden_states": True, "output_attentions": True}
    expected = model(**batch, **wanted).to_tuple()
    if how == "config":
        model.config.return_dict = False
        found = model(**batch, **wanted)
    else:
        found = model(**batch, **wanted, return_dict=False)
    assert isinstance(found, tuple)
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def of_encoder(outputs, name: str):
    """`outputs.<name>`, or that of the encoder where there is a decoder too."""
    return getattr(outputs, f"encoder_{name}" if "encoder_last_hidden_state" in outputs else name)


def test_hidden_states_and_attentions(model):
    config = model.config.get_text_config()
    model.set_attn_implementation("eager")
    batch = inputs(type(model), model.config)
    plain = model(**batch)
    assert of_encoder(plain, "hidden_states") is None
    assert of_encoder(plain, "attentions") is None
    outputs = model(**batch, output_hidden_states=True, output_attentions=True)
    # Only where all tokens are recorded, an image classifier's last block serves all of them.
    assert_close(main_output(outputs), main_output(plain), 1e-6 if "pixel_values" in batch else 0)
    hidden_states, attentions = of_encoder(outputs, "hidden_states"), of_encoder(outputs, "attentions")
    assert len(hidden_states) == config.num_hidden_layers + 1
    assert len({tuple(state.shape) for state in hidden_states}) == 1
    length = hidden_states[0].shape[1]
    of_images = "pixel_values" in batch
    patches = batch["ids_keep"].shape[1] if "ids_keep" in batch else 8
    assert hidden_states[0].shape[0] == 3
    assert length == (1 + config.num_register_tokens + patches if of_images else 9)
    assert len(attentions) == config.num_hidden_layers
    for weights in attentions:
        heads = weights.shape[1]
        assert heads > 0
        assert weights.shape == (3, heads, length, length)
        assert_close(weights.sum(-1), torch.ones(3, heads, length), 1e-5)
        asking = slice(6) if isinstance(config, HfTinyReformerConfig) else slice(None)  # there, padding may see itself
        assert of_images or weights[1, :, asking, 6:].max() == 0  # nobody looks at padding
    if "last_hidden_state" in outputs or "encoder_last_hidden_state" in outputs:
        assert torch.equal(hidden_states[-1], of_encoder(outputs, "last_hidden_state"))
    config.output_hidden_states = True
    assert len(of_encoder(model(**batch), "hidden_states")) == config.num_hidden_layers + 1


def test_hidden_states_and_attentions_retain_grad(model):
    model.set_attn_implementation("eager")
    batch = inputs(type(model), model.config)
    outputs = model(**batch, output_hidden_states=True, output_attentions=True)
    attentions = of_encoder(outputs, "attentions")
    kept = [of_encoder(outputs, "hidden_states")[0], attentions[0], attentions[-1]]
    for tensor in kept:
        tensor.retain_grad()
    valid_output(outputs, batch).square().sum().backward()
    for tensor in kept:
        assert tensor.grad.abs().max() > 0


def test_determinism(model):
    assert torch.equal(run(model), run(model))
    assert torch.equal(loss_of(model), loss_of(model))


def test_dropout_only_in_training(case):
    (config_class, _, model_class), variant = case
    dropout = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    model = model_class(tiny_config(config_class, variant, encoder=dropout)).train()
    assert not torch.equal(run(model), run(model))
    assert torch.equal(run(model.eval()), run(model))


# Attention and padding


@pytest.mark.parametrize("padded", [True, False])
def test_eager_equals_sdpa(model, padded):
    of_images = isinstance(model.config, HfTinyViTConfig)
    changes = {} if padded or of_images else {"attention_mask": torch.ones(3, 9, dtype=torch.long)}
    results = {}
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        assert model.config.get_text_config()._attn_implementation == name
        results[name] = run(model, **changes)
    assert_close(results["eager"], results["sdpa"])
    model.set_attn_implementation("eager")
    eager = loss_of(model)
    model.set_attn_implementation("sdpa")
    assert_close(eager, loss_of(model))


@pytest.mark.parametrize("case", FLEX, indirect=True)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_sdpa(model):
    """Uncompiled: compiling the kernel would take longer than all tests of this file."""
    expected = run(model)
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        assert_close(run(model), expected)


def test_a_row_does_not_depend_on_its_batch(model):
    batch = inputs(type(model), model.config)
    with torch.no_grad():
        together = model(**batch)
        for row in range(3):
            one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            expected = {name: tensor[row : row + 1] for name, tensor in together.items() if name != "loss"}
            assert_close(valid_output(model(**one), one), valid_output(expected, one))


def padded(batch: dict[str, Tensor], token: int) -> dict[str, Tensor]:
    """4 more places after all tokens (`token` stands there) and after all words."""
    fill = {"input_ids": token, "labels": -100, "heads": -100}
    result = dict(batch)
    for name, tensor in batch.items():
        if tensor.dim() > 1:  # a text's one label needs no padding
            more = tensor.new_full((tensor.shape[0], 4, *tensor.shape[2:]), fill.get(name, 0))
            result[name] = torch.cat((tensor, more), dim=1)
    return result


@pytest.mark.parametrize("case", TEXTS, indirect=True)
def test_padding_changes_nothing(model):
    batch = inputs(type(model), model.config, training=True)
    with torch.no_grad():
        expected = model(**batch)
        for token in (0, 7):  # whatever stands in the padding
            longer = padded(batch, token)
            found = model(**longer)
            assert_close(valid_output(found, longer), valid_output(expected, batch))
            if "loss" in expected:
                assert_close(found.loss, expected.loss)


@pytest.mark.parametrize("case", TEXTS, indirect=True)
def test_no_mask_is_a_mask_of_ones(model):
    batch = inputs(type(model), model.config)
    ids = batch["input_ids"]
    rest = {name: tensor for name, tensor in batch.items() if name == "decoder_input_ids"}
    with torch.no_grad():
        expected = model(ids, attention_mask=torch.ones_like(ids), **rest)
        assert_close(main_output(model(ids, **rest)), main_output(expected), 1e-6)


# Training


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_every_parameter_gets_a_gradient(model):
    found = gradients(model.train())
    for name, _ in model.named_parameters():
        assert name in found, f"{name} has no gradient"
        assert torch.isfinite(found[name]).all(), name
        assert found[name].abs().max() > 0, f"the gradient of {name} is 0"


def test_gradient_checkpointing(model):
    model.train()
    expected_loss, expected = loss_of(model), gradients(model)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert_close(loss_of(model), expected_loss, 1e-6)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name in expected:
        assert_close(found[name], expected[name], 1e-5)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def typical_error(model: PreTrainedModel, error: Tensor) -> Tensor:
    """The mean; where tokens are hashed, the median: rounding moves some of them into other buckets, and they see others."""
    config = model.config
    hashed = isinstance(config, HfTinyReformerConfig) and 2 * config.lsh_attn_chunk_length < 9
    return error.abs().median() if hashed else error.abs().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(model, dtype):
    expected = run(model)
    found = run(copy.deepcopy(model).to(dtype))
    assert found.dtype == dtype
    assert typical_error(model, found.float() - expected) < 0.05 * expected.abs().mean()


def test_bf16_autocast(model):
    expected, loss = run(model), loss_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, low_loss = run(model), loss_of(model)
    assert typical_error(model, found.float() - expected) < 0.05 * expected.abs().mean()
    low_loss.backward()
    if "loss" in model(**inputs(type(model), model.config, training=True)):
        assert low_loss.dtype == torch.float32  # losses are computed in full precision
        # Another sampled token may follow from the rounding, so the bound is wide.
        assert abs(low_loss.item() / loss.item() - 1) < 0.2


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_torch_export(model):
    batch = inputs(type(model), model.config)
    program = torch.export.export(model, (), batch)
    with torch.no_grad():
        assert_close(main_output(program.module()(**batch)), main_output(model(**batch)), 1e-6)


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_torch_compile(model):
    torch._dynamo.reset()
    batch = inputs(type(model), model.config)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_close(main_output(compiled(**batch)), main_output(model(**batch)), 1e-6)


# The checkpoint's own code

LOAD_REMOTE = """
import importlib.abc, json, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_tiny":
            raise ModuleNotFoundError("hf_tiny is blocked in this process")

sys.meta_path.insert(0, Blocker())
import torch, transformers
from safetensors.torch import load_file, save_file

jobs, batch_file, results = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
batch, outputs = load_file(batch_file), {}
for folder, auto_class in jobs:
    load = getattr(transformers, auto_class).from_pretrained
    model, info = load(folder, trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], (folder, auto_class, info)
    with torch.no_grad():
        outputs[f"{folder}|{auto_class}"] = model.eval()(**batch)[0].contiguous()
    model.save_pretrained(folder + "-again")  # remote code saves again with the same table of classes
    tables = [json.load(open(path + "/config.json"))["auto_map"] for path in (folder, folder + "-again")]
    before, after = ({auto: name.split("--")[-1] for auto, name in table.items()} for table in tables)
    assert before == after, (before, after)
save_file(outputs, results)
assert not any(name.split(".")[0] == "hf_tiny" for name in sys.modules)
"""


REMOTE_FILES = {
    HfTinyElectraConfig: {"electra.py", "heads.py", "layers.py"},
    HfTinyReformerConfig: {"reformer.py", "chunks.py", "heads.py", "layers.py"},
    HfTinySeq2SeqConfig: {"seq2seq.py", "heads.py", "layers.py"},
    HfTinyTokenLinkingConfig: {"linking.py", "electra.py", "heads.py", "layers.py"},
    HfTinyViTConfig: {"vit.py", "heads.py", "layers.py"},
}


OWN_CHECKPOINTS = {*TARGETS, HfTinyReformerForMaskedLM}  # the others load from one of pretraining


@pytest.mark.parametrize("config_class", AUTO_CLASSES, ids=lambda cls: cls.__name__)
def test_remote_code(config_class, tmp_path):
    """Where hf_tiny is not installed, every variant loads from its folder with every Auto class: a joint checkpoint
    with those of pretraining, and a task's checkpoint, which has a head of its own, with the task's."""
    heads = AUTO_CLASSES[config_class]
    whole = ("ForPreTraining", "ForConditionalGeneration", "ForMaskedImageModeling", "ForCausalLM")
    full = [head for head in heads.values() if head.__name__.endswith(whole)] or list(heads.values())
    jobs, expected = [], {}
    for variant in variants(config_class):
        for saved in {full[0], *(head for head in heads.values() if head in OWN_CHECKPOINTS)}:
            model = saved(tiny_config(config_class, variant)).eval()
            folder = str(tmp_path / f"{variant}-{saved.__name__}")
            model.save_pretrained(folder)
            table = json.loads(Path(folder, "config.json").read_text())["auto_map"]
            assert set(table) == {"AutoConfig", *(auto.__name__ for auto in heads)}
            assert {name.split(".")[-1] for name in table.values()} == {
                config_class.__name__,
                *(h.__name__ for h in heads.values()),
            }
            assert {path.name for path in Path(folder).glob("*.py")} == REMOTE_FILES[config_class]
            for auto_class, head in heads.items():
                if head is saved or (head not in OWN_CHECKPOINTS and saved is full[0]):
                    jobs.append((folder, auto_class.__name__))
                    loaded = auto_class.from_pretrained(folder).eval()
                    with torch.no_grad():
                        expected[f"{folder}|{auto_class.__name__}"] = loaded(**inputs(head, model.config))[0]
    assert {auto_class for _, auto_class in jobs} == {auto_class.__name__ for auto_class in heads}
    save_file(inputs(full[0], model.config), tmp_path / "batch.safetensors")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    results = tmp_path / "results.safetensors"
    arguments = [json.dumps(jobs), str(tmp_path / "batch.safetensors"), str(results)]
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD_REMOTE, *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = load_file(results)
    assert found.keys() == expected.keys()
    for name in expected:
        assert_close(found[name], expected[name], 1e-6)


MODEL_FILES = sorted((Path(hf_tiny.__file__).parent / "models").glob("*.py"))


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.name)
def test_model_files_can_travel(path):
    """transformers finds the files to copy by a regular expression, also inside docstrings."""
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub"}
    siblings = {file.stem for file in MODEL_FILES}
    source = path.read_text()
    imports = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            assert names <= allowed, f"{path.name}:{node.lineno} imports {names - allowed}"
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in allowed, f"{path.name}:{node.lineno} imports from {node.module}"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, f"{path.name}:{node.lineno} imports from a parent package"
            assert node.module in siblings, f"{path.name}:{node.lineno}: write `from .file import name`"
            assert node.col_offset == 0, f"{path.name}:{node.lineno} imports inside a block"
            imports += 1
    assert len(re.findall(r"(?:from|import)\s+\.", source)) == imports, (
        f"{path.name} has import text in a string or comment"
    )


# In transformers' own tools


def test_fill_mask_pipeline(tokenizer, tmp_path):
    """A joint checkpoint that knows one answer."""
    config = HfTinyElectraConfig(**{**ELECTRA, "vocab_size": len(tokenizer)})
    model = HfTinyElectraForPreTraining(config)
    answer = tokenizer.convert_tokens_to_ids("the")
    with torch.no_grad():
        model.generator_lm_head.bias[answer] = 20
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    best = pipeline("fill-mask", model=str(tmp_path), device="cpu")(f"over {tokenizer.mask_token} lazy dog")[0]
    assert (best["token"], best["token_str"]) == (answer, "the")
    assert best["score"] > 0.99


@pytest.mark.parametrize(
    "model_class",
    [
        HfTinyElectraForPreTraining,
        HfTinyElectraForMaskedLM,
        HfTinyElectraForSequenceClassification,
        HfTinyElectraForTokenClassification,
        HfTinyReformerForCausalLM,
        HfTinyReformerForMaskedLM,
        HfTinyReformerForSequenceClassification,
        HfTinyReformerForTokenClassification,
        HfTinySeq2SeqForConditionalGeneration,
        HfTinyTokenLinkingModel,
        HfTinyViTForImageClassification,
        HfTinyViTForMaskedImageModeling,
    ],
)
def test_trainer(model_class, tmp_path):
    """Trainer, 3 steps: a batch of 4 gives the losses of 4 batches of 1. In pretraining as many tokens are masked in
    every row; the rows of token classification and of targets have different numbers of labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (12, 10), generator=generator)
    rows = {"input_ids": ids}
    if model_class is HfTinyElectraForPreTraining:
        rows["labels"] = torch.full_like(ids, -100)
        rows["labels"][:, 3:5] = ids[:, 3:5]
        rows["sampling_noise"] = torch.rand(ids.shape, generator=generator)
    elif model_class in (HfTinyElectraForSequenceClassification, HfTinyReformerForSequenceClassification):
        rows["labels"] = ids[:, 3] % 3
    elif model_class is HfTinyViTForImageClassification:
        rows = {"pixel_values": torch.randn(12, 1, 4, 8, generator=generator), "labels": ids[:, 3] % 3}
    elif model_class is HfTinyViTForMaskedImageModeling:
        rows = {"pixel_values": torch.randn(12, 1, 4, 8, generator=generator)}
        rows["ids_keep"] = torch.rand(12, 8, generator=generator).argsort(1)[:, :3]
    elif model_class is HfTinyTokenLinkingModel:  # to the word before; each row has one more
        known = torch.arange(10) <= torch.arange(12)[:, None]
        rows |= {"heads": torch.where(known, torch.arange(10), -100), "labels": (ids % 3).masked_fill(~known, -100)}
    else:
        rows["labels"] = (ids % 3).masked_fill(torch.arange(10) > torch.arange(12)[:, None], -100)
    data = Dataset.from_dict({name: tensor.numpy() for name, tensor in rows.items()}).with_format("torch")
    config_class = model_class.config_class
    # A chunk that holds a whole text: otherwise each pass has hashes of its own.
    whole = {"lsh_attn_chunk_length": 16} if config_class is HfTinyReformerConfig else {}
    losses, weights = [], []
    for batch_size in (4, 1):
        torch.manual_seed(0)
        model = model_class(tiny_config(config_class, next(iter(variants(config_class))), **whole))
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(batch_size)),
            max_steps=3,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=4 // batch_size,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    # Adam divides by the gradient's size: where it is nearly 0, rounding decides its sign.
    assert (weights[0] - weights[1]).abs().mean() < 1e-5
