"""What every model here must do, as in transformers' own common model tests.

The models and what they are asked come from fixtures/tiny_models.py: a new one adds its entries there.
"""

import ast
import copy
import inspect
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
from fixtures.tiny_models import (
    CASES,
    ELECTRA,
    FAMILIES,
    FIRST,
    FULL_HEADS,
    TARGETS,
    TEXTS,
    assert_close,
    build_case,
    inputs,
    loss_of,
    main_output,
    run,
    tied_groups,
    tiny_config,
    typical_error,
    valid_output,
    variants,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments, pipeline

import hf_tiny
from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
    HfTinyReformerConfig,
    HfTinyReformerForCausalLM,
    HfTinyReformerForMaskedLM,
    HfTinySeq2SeqConfig,
    HfTinySeq2SeqForConditionalGeneration,
    HfTinyTokenLinkingConfig,
    HfTinyTokenLinkingModel,
    HfTinyViTConfig,
    HfTinyViTForImageClassification,
    HfTinyViTForMaskedImageModeling,
)
from hf_tiny.models import AUTO_CLASSES, SIZES
from hf_tiny.models.layers import dropout_factor
from hf_tiny.models.seq2seq import Pointer

EXPORTED = FAMILIES + [case for case in FIRST if case.values[0][0][2] is HfTinyViTForImageClassification]


@pytest.fixture(params=CASES)
def case(request):
    return request.param


@pytest.fixture
def auto_class(case):
    return case[0][1]


@pytest.fixture
def model(case) -> PreTrainedModel:
    return build_case(case)


@pytest.mark.parametrize("config_class", AUTO_CLASSES, ids=lambda cls: cls.__name__)
def test_every_config_has_a_tiny_entry(config_class):
    assert len(variants(config_class)) >= 1
    assert FULL_HEADS[config_class] in AUTO_CLASSES[config_class].values()


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
    dropped = {f"{linear}.weight", f"{linear}.bias", f"{norm}.weight", f"{norm}.bias"} & saved.keys()
    save_file({k: v for k, v in saved.items() if k not in dropped}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == dropped
    weight = loaded.get_parameter(f"{linear}.weight")
    assert abs(weight.std().item() / model.config.initializer_range - 1) < 0.2
    assert loaded.get_parameter(f"{norm}.weight").eq(1).all()
    for bias in (f"{linear}.bias", f"{norm}.bias"):
        assert bias not in dropped or loaded.get_parameter(bias).eq(0).all()
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
                assert module.bias is None or module.bias.eq(0).all(), name
            if isinstance(module, nn.Linear):
                start = Pointer.START[-1] if name == "copy_attention.gate" else 0
                assert module.bias is None or module.bias.eq(start).all(), name
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                assert module.weight[module.padding_idx].eq(0).all(), name
            if isinstance(module, nn.Linear | nn.Embedding):
                weight = module.weight.detach()
                matrices.append(weight.flatten())
                assert weight.mean().abs() < 5 * config.initializer_range / weight.numel() ** 0.5, name
        assert abs(torch.cat(matrices).std().item() / config.initializer_range - 1) < 0.05


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_copies(model):
    expected = run(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert tied_groups(copied) == tied_groups(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert torch.equal(run(copied), expected)
        model = copied


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


@pytest.mark.parametrize("new_size", [61, 44])
@pytest.mark.parametrize("case", TEXTS, indirect=True)
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
    if not model.config.to_dict().get("copy_attention"):  # whose probabilities are of another number of tokens
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
    if not model.config.get_text_config().to_dict().get("copy_attention"):
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


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_tuple_equals_dict(model):
    model.set_attn_implementation("eager")
    wanted = {"output_hidden_states": True, "output_attentions": True}
    plain, labelled = (inputs(type(model), model.config, training=training) for training in (False, True))
    expected = [model(**batch, **wanted).to_tuple() for batch in (plain, labelled)]
    found = [model(**plain, **wanted, return_dict=False)]
    model.config.return_dict = False
    found.append(model(**labelled, **wanted))
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, tuple)
        assert len(one) == len(other)
        torch.testing.assert_close(one, other, rtol=0, atol=0)


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
    kept += outputs.cross_attentions if "cross_attentions" in outputs else []
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(p, dtype):
    torch.manual_seed(0)
    factor = dropout_factor(torch.empty(1000, 1001, dtype=dtype), p)
    dropped = factor == 0
    assert factor.dtype == dtype
    assert dropped.float().mean().item() == pytest.approx(p, abs=3e-3)
    assert dropped.float().mean(0).std().item() == pytest.approx((p * (1 - p) / 1000) ** 0.5, rel=0.1)  # no pattern
    table = dropped.flatten()[: 977 * 1024].view(977, 1024).double()
    for lines in (table, table.mT):
        correlations = torch.corrcoef(lines) - torch.eye(len(lines))
        assert correlations.square().mean().item() == pytest.approx(1 / lines.shape[1], rel=0.02)  # that of chance
    assert factor[~dropped].unique().tolist() == [
        pytest.approx(1 / (1 - p), rel=0.004 if dtype == torch.bfloat16 else 3e-4)
    ]


# Attention and padding


def test_eager_equals_sdpa(model):
    of_images = isinstance(model.config, HfTinyViTConfig)
    unpadded = {} if of_images else {"attention_mask": torch.ones(3, 9, dtype=torch.long)}
    results = []
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        assert model.config.get_text_config()._attn_implementation == name
        results.append((run(model), run(model, **unpadded), loss_of(model)))
    for eager, sdpa in zip(*results, strict=True):
        assert_close(eager, sdpa)


@pytest.mark.parametrize("case", [one for one in FAMILIES if one.values[0][0][2]._supports_flex_attn], indirect=True)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_sdpa(model):
    """Uncompiled: compiling the kernel would take longer than all tests of this file. The Reformer has its own attention."""
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


@pytest.mark.parametrize("case", [one for one in FAMILIES if one.values[0][0][2].can_generate()], indirect=True)
@torch.no_grad()
def test_use_cache(model, tmp_path):
    """A field of the config: what `forward` does unless it is told."""
    model.save_pretrained(tmp_path)
    batch = inputs(type(model), model.config)
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for given in (None, False, True):
        loaded = type(model).from_pretrained(tmp_path, use_cache=given)
        assert (loaded(**batch).past_key_values is not None) == bool(given)
        assert (loaded(**batch, use_cache=True).past_key_values is not None) and (
            loaded(**batch, use_cache=False).past_key_values is None
        )
        assert torch.equal(loaded.generate(**prompt, max_new_tokens=4), model.generate(**prompt, max_new_tokens=4))


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


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_gradient_checkpointing(model, reentrant):
    model.train()
    expected_loss, expected = loss_of(model), gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    assert_close(loss_of(model), expected_loss, 1e-6)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name in expected:
        assert_close(found[name], expected[name], 1e-5)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_half_precision(model):
    """bfloat16 is in test_together.py."""
    expected = run(model)
    found = run(model.to(torch.float16))
    assert found.dtype == torch.float16
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


@pytest.mark.parametrize("case", EXPORTED, indirect=True)
def test_torch_export(model):
    """For any number of rows."""
    batch = inputs(type(model), model.config)
    batch.pop("token_type_ids", None)  # not an argument of each model, and no export names it then
    free = {name: {0: torch.export.Dim("rows")} for name in batch}
    program = torch.export.export(model, (), batch, dynamic_shapes=free).module()
    for rows in (3, 2):
        some = {name: tensor[:rows] for name, tensor in batch.items()}
        with torch.no_grad():
            assert_close(main_output(program(**some)), main_output(model(**some)), 1e-6)


@pytest.mark.parametrize("case", EXPORTED, indirect=True)
def test_torch_compile(model):
    torch._dynamo.reset()
    batch = inputs(type(model), model.config)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_close(main_output(compiled(**batch)), main_output(model(**batch)), 1e-6)


ONE_LAYER = {
    HfTinyElectraConfig: {"num_hidden_layers": 1},
    HfTinySeq2SeqConfig: {"encoder_layers": 1, "decoder_layers": 1},
    HfTinyReformerConfig: {"attn_layers": ["lsh"]},
    HfTinyTokenLinkingConfig: {"encoder": {"num_hidden_layers": 1}},
    HfTinyViTConfig: {"num_hidden_layers": 1, "decoder_num_hidden_layers": 1},
}


def five_steps(model: PreTrainedModel, forward) -> list[tuple[float, dict[str, Tensor]]]:
    """The loss and the gradients of each."""
    results, optimizer = [], torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = inputs(type(model), model.config, training=True)
    for step in range(5):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = forward(**batch).loss
        loss.backward()
        results.append((loss.item(), {name: one.grad.clone() for name, one in model.named_parameters()}))
        optimizer.step()
    return results


def assert_same_steps(model: PreTrainedModel, **how) -> None:
    """Compiled and not."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    other = copy.deepcopy(model)
    found, expected = five_steps(model, torch.compile(model, **how)), five_steps(other, other)
    for (loss, grads), (eager_loss, eager_grads) in zip(found, expected, strict=True):
        assert loss == pytest.approx(eager_loss, rel=1e-5)
        for name, gradient in eager_grads.items():
            assert (grads[name] - gradient).abs().max() < 1e-4 * gradient.abs().max() + 1e-7, name


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("case", EXPORTED, indirect=True)
def test_training_is_one_graph(model, captured):
    """But for a Reformer's layers, which stay out, and for the places that ELECTRA masks: their number is in the data, and by
    default dynamo breaks there. It meets both in `forward` and in its decorator; the first also in the model inside."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=captured):
        assert_same_steps(model.train(), backend="eager")
    known = {HfTinyElectraConfig: 0 if captured else 2, HfTinyReformerConfig: 4}
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == known.get(type(model.config), 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_compiled_steps(case):
    (config_class, _, model_class), variant = case
    model = model_class(tiny_config(config_class, variant, initializer_range=0.2, **ONE_LAYER[config_class]))
    assert_same_steps(model.train(), backend="inductor")


@pytest.mark.slow
def test_compiled_steps_of_a_reformer_in_eval_mode():
    model = HfTinyReformerForCausalLM(tiny_config(HfTinyReformerConfig, initializer_range=0.2))
    assert_same_steps(model.eval(), backend="inductor")


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

jobs, results = json.loads(sys.argv[1]), sys.argv[2]
outputs = {}
for folder, auto_class in jobs:
    load = getattr(transformers, auto_class).from_pretrained
    model, info = load(folder, trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], (folder, auto_class, info)
    with torch.no_grad():
        outputs[f"{folder}|{auto_class}"] = model.eval()(**load_file(folder + ".safetensors"))[0].contiguous()
    model.save_pretrained(folder + "-again")  # remote code saves again with the same table of classes
    tables = [json.load(open(path + "/config.json"))["auto_map"] for path in (folder, folder + "-again")]
    before, after = ({auto: name.split("--")[-1] for auto, name in table.items()} for table in tables)
    assert before == after, (before, after)
save_file(outputs, results)
assert not any(name.split(".")[0] == "hf_tiny" for name in sys.modules)
"""


REMOTE_FILES = {
    HfTinyElectraConfig: {"electra.py", "joint.py", "heads.py", "spelling.py", "layers.py"},
    HfTinyReformerConfig: {"reformer.py", "chunks.py", "reversible.py", "heads.py", "spelling.py", "layers.py"},
    HfTinySeq2SeqConfig: {"seq2seq.py", "heads.py", "spelling.py", "layers.py"},
    HfTinyTokenLinkingConfig: {
        *(
            "linking.py",
            "electra.py",
            "joint.py",
            "reformer.py",
            "chunks.py",
            "reversible.py",
            "heads.py",
            "spelling.py",
            "layers.py",
        ),
        *("parsing.py", "trees.py", "words.py"),  # its pipeline
    },
    HfTinyViTConfig: {"vit.py", "heads.py", "spelling.py", "layers.py"},
}


OWN_CHECKPOINTS = {*TARGETS, HfTinyReformerForMaskedLM}  # the others load from one of pretraining


def saved_for_others(config_class: type, folder: Path) -> dict[str, Tensor]:
    """Every variant of the full head, and the first of each head with weights of its own, saved with a batch; the outputs by
    folder and Auto class."""
    heads, full, expected = AUTO_CLASSES[config_class], FULL_HEADS[config_class], {}
    for number, variant in enumerate(variants(config_class)):
        for saved in {full, *(head for head in heads.values() if head in OWN_CHECKPOINTS and number == 0)}:
            model = saved(tiny_config(config_class, variant)).eval()
            path = folder / f"{saved.__name__}-{variant}"
            model.save_pretrained(path)
            save_file(inputs(saved, model.config), f"{path}.safetensors")
            table = json.loads((path / "config.json").read_text())["auto_map"]
            assert set(table) == {"AutoConfig", *(auto.__name__ for auto in heads)}
            names = {config_class.__name__, *(head.__name__ for head in heads.values())}
            assert {name.split(".")[-1] for name in table.values()} == names
            assert {file.name for file in path.glob("*.py")} == REMOTE_FILES[config_class]
            for auto_class, head in heads.items():
                if head is saved or (head not in OWN_CHECKPOINTS and saved is full):
                    loaded = auto_class.from_pretrained(path).eval()
                    with torch.no_grad():
                        expected[f"{path}|{auto_class.__name__}"] = loaded(**inputs(saved, model.config))[0]
    assert {name.split("|")[1] for name in expected} == {auto_class.__name__ for auto_class in heads}
    return expected


@pytest.mark.parametrize("linking", [False, True], ids=["heads", "linking"])
def test_remote_code(linking, tmp_path):
    """Where hf_tiny is not installed, every variant loads from its folder with every Auto class: a joint checkpoint
    with those of pretraining, and a task's checkpoint, which has a head of its own, with the task's. The linking head, on
    each encoder, in a process of its own: it makes encoders known to the Auto classes."""
    classes = [one for one in AUTO_CLASSES if (one is HfTinyTokenLinkingConfig) == linking]
    expected = {name: tensor for one in classes for name, tensor in saved_for_others(one, tmp_path).items()}
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    results = tmp_path / "results.safetensors"
    arguments = [json.dumps([name.split("|") for name in expected]), str(results)]
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


MODEL_FILES = sorted((Path(hf_tiny.__file__).parent / "models").glob("[!_]*.py"))


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.name)
def test_model_files_can_travel(path):
    """transformers finds the files to copy by a regular expression, also inside docstrings."""
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub", "numpy", "tokenizers"}
    siblings = {file.stem for file in MODEL_FILES}
    source = path.read_text()
    imports = 0
    tree = ast.parse(source)
    # Files that are named for transformers to find, and not imported.
    blocks = [block for block in tree.body if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"]
    named = [node for block in blocks for node in block.body]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            assert names <= allowed, f"{path.name}:{node.lineno} imports {names - allowed}"
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in allowed, f"{path.name}:{node.lineno} imports from {node.module}"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, f"{path.name}:{node.lineno} imports from a parent package"
            assert node.module in siblings, f"{path.name}:{node.lineno}: write `from .file import name`"
            assert node.col_offset == 0 or node in named, f"{path.name}:{node.lineno} imports inside a block"
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
        HfTinyElectraForSequenceClassification,
        HfTinyElectraForTokenClassification,
        HfTinyReformerForCausalLM,
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
    elif model_class is HfTinyElectraForSequenceClassification:
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
        model = model_class(tiny_config(config_class, **whole))
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


# The sizes of the papers

MILLIONS = {  # of the discriminator, and with vocabularies of 30,522 and 37,000
    (HfTinyElectraConfig, "small"): 13.5,
    (HfTinyElectraConfig, "base"): 109.5,
    (HfTinyElectraConfig, "large"): 335.1,
    (HfTinySeq2SeqConfig, "base"): 63.1,  # the paper says 65
    (HfTinySeq2SeqConfig, "big"): 213,
    (HfTinyViTConfig, "ti"): 5.7,
    (HfTinyViTConfig, "small"): 22,
    (HfTinyViTConfig, "base"): 86,
}


def counted(config_class: type, config) -> list[nn.Module]:
    """What a paper counts: of ELECTRA the discriminator, of ViT the classifier."""
    if config_class is HfTinyElectraConfig:
        model = HfTinyElectraForPreTraining(config)
        return [model.electra, model.discriminator_head]
    return [(HfTinyViTForImageClassification if config_class is HfTinyViTConfig else FULL_HEADS[config_class])(config)]


@pytest.mark.parametrize(("config_class", "size"), [(one, size) for one, sizes in SIZES.items() for size in sizes])
def test_sizes(config_class, size):
    fields = SIZES[config_class][size]
    config = config_class(**fields, num_labels=1000)  # ImageNet's
    assert {name: getattr(config, name) for name in fields} == fields
    with torch.device("meta"):
        count = sum(parameter.numel() for part in counted(config_class, config) for parameter in part.parameters())
    if (config_class, size) in MILLIONS:
        assert count / 1e6 == pytest.approx(MILLIONS[config_class, size], rel=0.02)


@pytest.mark.parametrize(
    ("size", "sizes"), [("small", (64, 1, 256)), ("base", (256, 4, 1024)), ("large", (256, 4, 1024))]
)
def test_sizes_of_the_papers_generators(size, sizes):
    config = HfTinyElectraConfig(**SIZES[HfTinyElectraConfig][size])
    assert config.sizes(config.generator_size)[:3] == sizes
