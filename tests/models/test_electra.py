"""ELECTRA against transformers' own, and everything that other reimplementations got wrong."""

import logging
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fixtures.tiny_models import assert_close
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
)

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForMaskedLM, HfTinyElectraForPreTraining, InputError
from hf_tiny.convert import electra_from_native
from hf_tiny.data.masking import MaskTokens
from hf_tiny.models import SIZES as PRESETS
from hf_tiny.models.electra import OBJECTIVES
from hf_tiny.models.layers import rotary_angles, rotate, sample_inverse_cdf

CLS, SEP, MASK, PAD = 2, 3, 4, 0
SIZES = {
    "vocab_size": 99,
    "embedding_size": 24,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}
MODES = {
    "none": {"sharing": "none", "generator_size": 0.5},
    "embeddings": {"sharing": "embeddings", "generator_size": 0.5},
    "all": {"sharing": "all", "generator_size": 1},
    "disentangled": {"sharing": "disentangled", "generator_size": 0.5},
}
every_mode = pytest.mark.parametrize("mode", MODES)


def build(mode: str = "embeddings", **changes) -> HfTinyElectraForPreTraining:
    return HfTinyElectraForPreTraining(HfTinyElectraConfig(**{**SIZES, **MODES[mode], **changes})).eval()


def batch_of(rows: int = 4, length: int = 12, vocab_size: int = 99, padded: bool = True) -> dict[str, Tensor]:
    """[CLS] A [SEP] B [SEP] with masked tokens, and the last row and a half of padding when `padded`."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, vocab_size, (rows, length), generator=generator)
    ids[:, 0], ids[:, 5], ids[:, -1] = CLS, SEP, SEP
    batch = {
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (torch.arange(length) > 5).long().repeat(rows, 1),
    }
    if padded:
        batch["attention_mask"][0, 9:] = 0
        batch["attention_mask"][-1, 7:] = 0
        ids = ids.masked_fill(batch["attention_mask"] == 0, PAD)
    chosen = torch.zeros_like(ids, dtype=torch.bool)
    chosen[:, [2, 6]] = True
    chosen[1, 8] = True
    batch["labels"] = ids.masked_fill(~chosen, -100)
    batch["input_ids"] = ids.masked_fill(chosen, MASK)
    batch["input_ids"][0, 2] = ids[0, 2]  # chosen, but it stays
    batch["sampling_noise"] = torch.rand(ids.shape, generator=generator)
    return batch


def originals(batch: dict[str, Tensor]) -> Tensor:
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


def run_and_look(model: HfTinyElectraForPreTraining, batch: dict[str, Tensor]):
    """The outputs, and the tokens that the discriminator was given."""
    seen = []
    hook = model.electra.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    outputs = model(**batch)
    hook.remove()
    (tokens,) = seen
    return outputs, tokens


# Parity with transformers


def native_pair(**generator_changes) -> tuple[ElectraForPreTraining, ElectraForMaskedLM]:
    """transformers' discriminator and generator with random weights everywhere, also in norms and biases."""
    half = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    models = (
        ElectraForPreTraining(ElectraConfig(**SIZES)),
        ElectraForMaskedLM(ElectraConfig(**{**SIZES, **half, **generator_changes})),
    )
    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                if "LayerNorm" in name or name.endswith("bias"):
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return tuple(model.eval() for model in models)


@pytest.fixture(scope="module")
def native():
    torch.manual_seed(0)
    return native_pair()


@pytest.mark.parametrize("padded", [True, False])
@torch.no_grad()
def test_parity(native, padded, tmp_path):
    discriminator, generator = native
    model = electra_from_native(discriminator, generator)
    batch = batch_of(padded=padded)
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    valid = batch["attention_mask"].bool()
    expected = discriminator(**arguments, output_hidden_states=True)
    found = model(**arguments, output_hidden_states=True)
    assert expected.logits.abs().mean() > 0.1
    assert_close(found.logits[valid], expected.logits[valid])
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert_close(ours[valid], theirs[valid])
    model.save_pretrained(tmp_path)
    assert_close(
        AutoModel.from_pretrained(tmp_path)(**arguments).last_hidden_state[valid],
        discriminator.electra(**arguments).last_hidden_state[valid],
    )
    expected = generator(**arguments, labels=batch["labels"])
    found = AutoModelForMaskedLM.from_pretrained(tmp_path)(**arguments, labels=batch["labels"])
    assert expected.logits.abs().mean() > 0.1
    assert_close(found.logits[valid], expected.logits[valid])
    assert_close(found.loss, expected.loss)


@torch.no_grad()
def test_parity_with_shared_embeddings(native):
    discriminator, generator = native
    batch = batch_of()
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    valid = batch["attention_mask"].bool()
    # Different embeddings: the discriminator's serve both, and it does not change.
    model = electra_from_native(discriminator, generator, sharing="embeddings")
    assert_close(model(**arguments).logits[valid], discriminator(**arguments).logits[valid])
    # The same embeddings: both are as they were.
    other = native_pair()[1]
    other.electra.embeddings.load_state_dict(discriminator.electra.embeddings.state_dict())
    model = electra_from_native(discriminator, other, sharing="embeddings")
    outputs = model(**batch)
    assert_close(outputs.mlm_logits, other(**arguments).logits[batch["labels"] != -100])
    assert_close(model(**arguments).logits[valid], discriminator(**arguments).logits[valid])


@pytest.mark.parametrize(
    ("changes", "sharing", "message"),
    [
        ({"vocab_size": 98}, "none", "vocab_size is 99 in the discriminator and 98 in the generator"),
        ({"num_hidden_layers": 2}, "none", "num_hidden_layers is 3 .* and 2"),
        ({"hidden_act": "relu"}, "none", "hidden_act is gelu .* and relu"),
        (
            {"num_attention_heads": 4},
            "none",
            r"\(16, 4, 32\) in the generator: at 0.5 times the discriminator, \(16, 2, 32\)",
        ),
        ({}, "all", 'cannot share "all"'),
    ],
)
def test_native_models_that_do_not_fit(native, changes, sharing, message):
    generator = native_pair(**changes)[1]
    with pytest.raises(InputError, match=message):
        electra_from_native(native[0], generator, sharing)


@torch.no_grad()
def test_joint_loss_is_the_composition_of_the_native_ones(native):
    discriminator, generator = native
    model = electra_from_native(discriminator, generator)
    batch = batch_of()
    arguments = {name: batch[name] for name in ("attention_mask", "token_type_ids")}
    masked = batch["labels"] != -100
    outputs, tokens = run_and_look(model, batch)

    mlm_logits = generator(batch["input_ids"], **arguments).logits[masked]
    cumulative = mlm_logits.double().softmax(-1).cumsum(-1).numpy()
    noise = batch["sampling_noise"][masked].numpy()
    sampled = torch.tensor([np.searchsorted(row, u, side="right") for row, u in zip(cumulative, noise, strict=True)])
    original = originals(batch)
    corrupted = original.clone()
    corrupted[masked] = sampled
    assert torch.equal(tokens, corrupted)
    replaced = corrupted != original
    assert replaced.sum() >= 5
    mlm_loss = F.cross_entropy(mlm_logits, original[masked])
    rtd = discriminator(corrupted, **arguments, labels=replaced.long())  # its loss leaves out the padding
    assert_close(outputs.mlm_loss, mlm_loss)
    assert_close(outputs.rtd_loss, rtd.loss)
    assert_close(outputs.loss, mlm_loss + 50 * rtd.loss)
    assert torch.equal(outputs.replaced, replaced)


# What the discriminator sees, and what it is asked


@every_mode
def test_discriminator_sees_the_sampled_tokens(mode):
    batch = batch_of()
    outputs, tokens = run_and_look(build(mode), batch)
    masked = batch["labels"] != -100
    assert torch.equal(tokens[~masked], batch["input_ids"][~masked])
    noise = batch["sampling_noise"][masked]
    assert torch.equal(tokens[masked], sample_inverse_cdf(outputs.mlm_logits, noise))
    assert not tokens[masked].eq(MASK).all()
    assert torch.equal(outputs.replaced, tokens != originals(batch))
    assert torch.equal(outputs.mlm_labels, batch["labels"][masked])


def test_labels_are_against_the_originals():
    """Also at a [MASK]: against the masked input, every sampled token would count as replaced."""
    model, batch = build(), batch_of()
    _, tokens = run_and_look(model, batch)
    batch["labels"] = torch.where(batch["labels"] == -100, -100, tokens)  # the text had been what is sampled
    outputs, again = run_and_look(model, batch)
    assert torch.equal(again, tokens)
    assert outputs.replaced.sum() == 0


@every_mode
def test_an_oracle_generator_gives_no_positives(mode):
    model, batch = build(mode), batch_of()
    mlm_labels = batch["labels"][batch["labels"] != -100]
    oracle = 1000.0 * F.one_hot(mlm_labels, 99)
    model.generator_lm_head.register_forward_hook(lambda *_: oracle)
    for noise in (0.0, 0.5, 1 - 2**-24, 1.0):
        outputs, tokens = run_and_look(model, {**batch, "sampling_noise": torch.full(batch["labels"].shape, noise)})
        assert torch.equal(tokens, originals(batch))
        assert outputs.replaced.sum() == 0
        assert outputs.mlm_loss == 0
        expected = F.softplus(outputs.logits[batch["attention_mask"].bool()]).mean()  # all are "original"
        assert_close(outputs.rtd_loss, expected)


def test_an_always_wrong_generator_gives_a_positive_per_masked_token():
    model, batch = build(), batch_of()
    wrong = 1000.0 * F.one_hot(batch["labels"][batch["labels"] != -100] - 1, 99)
    model.generator_lm_head.register_forward_hook(lambda *_: wrong)
    assert torch.equal(model(**batch).replaced, batch["labels"] != -100)


def test_sampling_not_argmax():
    model, batch = build(), batch_of()
    masked = batch["labels"] != -100
    drawn = []
    for _ in range(20):
        outputs, tokens = run_and_look(model, {**batch, "sampling_noise": torch.rand(batch["labels"].shape)})
        drawn.append(tokens[masked])
    drawn = torch.stack(drawn)
    assert drawn.unique().numel() > 20
    assert drawn.eq(outputs.mlm_logits.argmax(-1)).float().mean() < 0.5
    del batch["sampling_noise"]  # drawn inside the model, anew each time
    first, second = (run_and_look(model, batch)[1] for _ in range(2))
    assert not torch.equal(first, second)


def test_rtd_counts_every_token_but_padding():
    model, batch = build(), batch_of()
    outputs = model(**batch)
    losses = F.binary_cross_entropy_with_logits(outputs.logits, outputs.replaced.float(), reduction="none")
    valid = batch["attention_mask"].bool()
    assert_close(outputs.rtd_loss, losses[valid].mean())
    (gradient,) = torch.autograd.grad(outputs.rtd_loss, outputs.logits)
    assert gradient[~valid].abs().max() == 0
    assert (gradient[valid] != 0).all()  # [CLS] and [SEP] too
    assert set(batch["input_ids"][valid].tolist()) >= {CLS, SEP}
    without = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    outputs = model(**without)
    losses = F.binary_cross_entropy_with_logits(outputs.logits, outputs.replaced.float(), reduction="none")
    assert_close(outputs.rtd_loss, losses.mean())


def test_a_batch_with_nothing_masked_has_a_finite_loss():
    model, batch = build(), batch_of()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for count in (None, torch.tensor(7), torch.tensor([0, 40])):
        outputs = model(**batch, num_items_in_batch=count)
        assert outputs.mlm_loss == 0
        assert torch.isfinite(outputs.loss)
        assert outputs.replaced.sum() == 0


# Sampling


@pytest.mark.parametrize(("classes", "block"), [(10, 4), (12, 4), (3, 256), (300, 256), (60, 7)])
def test_sampling_frequencies(classes, block):
    draws = 40_000
    logits = torch.randn(classes)
    found = sample_inverse_cdf(logits.expand(draws, -1), torch.rand(draws), block)
    counts = torch.bincount(found, minlength=classes).double()
    assert counts.shape == (classes,)
    expected = draws * logits.double().softmax(-1)
    assert expected.min() > 1
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    freedom = classes - 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("scale", [0.1, 1, 10, 100])
@pytest.mark.parametrize(("classes", "block"), [(10, 4), (256, 256), (300, 256), (1000, 256)])
def test_sampling_agrees_with_one_long_sum(classes, block, scale):
    logits, noise = scale * torch.randn(2000, classes), torch.rand(2000)
    found = sample_inverse_cdf(logits, noise, block)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulative, noise[:, None].double(), right=True)[:, 0].clamp(max=classes - 1)
    assert found.eq(expected).float().mean() > 0.998
    # Where rounding gave a neighbour, the noise lies on the border between the two, to single precision.
    low = F.pad(cumulative, (1, 0)).gather(1, found[:, None])[:, 0]
    high = cumulative.gather(1, found[:, None])[:, 0]
    assert ((noise > low - 1e-5) & (noise < high + 1e-5)).all()


@pytest.mark.parametrize("noise", [0.0, 2**-30, 0.5, 1 - 2**-24, 1.0])
@pytest.mark.parametrize(("classes", "block"), [(10, 4), (256, 256), (257, 256), (1000, 256)])
def test_sampling_stays_where_there_is_mass(classes, block, noise):
    for scale in (1, 50, 300):  # far apart: most classes have a probability of exactly 0
        logits = scale * torch.randn(500, classes)
        found = sample_inverse_cdf(logits, torch.full((500,), noise), block)
        assert found.min() >= 0
        assert found.max() < classes
        assert logits.softmax(-1).gather(1, found[:, None]).min() > 0
    for forced in (0, 3, classes - 1):
        logits = torch.full((2, classes), -1e4).index_fill(1, torch.tensor([forced]), 0.0)
        assert sample_inverse_cdf(logits, torch.full((2,), noise), block).tolist() == [forced] * 2


def test_sampling_in_low_precision_and_of_nothing():
    logits = torch.randn(50, 300).bfloat16()
    noise = torch.rand(50)
    assert torch.equal(sample_inverse_cdf(logits, noise), sample_inverse_cdf(logits.float(), noise))
    assert sample_inverse_cdf(torch.empty(0, 300), torch.empty(0)).shape == (0,)


# Gradients


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_no_gradient_from_one_loss_into_the_other_model():
    model, batch = build("none"), batch_of()
    generator = ("generator.", "generator_head.", "generator_lm_head.")
    found = gradients(model, model(**batch).rtd_loss)
    assert found
    assert not any(name.startswith(generator) for name in found)
    assert all(gradient.abs().max() > 0 for gradient in found.values())
    found = gradients(model, model(**batch).mlm_loss)
    assert found
    assert all(name.startswith(generator) for name in found)
    assert all(gradient.abs().max() > 0 for gradient in found.values())


def test_with_shared_embeddings_only_they_get_both_gradients():
    model, batch = build("embeddings"), batch_of()
    from_rtd, from_mlm = (gradients(model, getattr(model(**batch), name)) for name in ("rtd_loss", "mlm_loss"))
    assert {n for n in from_rtd if n in from_mlm} == {n for n, _ in model.named_parameters() if "embeddings" in n}


def test_an_infinite_weight_that_is_not_used_changes_nothing():
    """Where every parameter gets a gradient of 0, for processes that wait for it, whatever its value is."""
    model, batch = build().train(), batch_of()
    model.objective = OBJECTIVES["mlm"]
    expected, wanted = model(**batch).loss, gradients(model, model(**batch).loss)
    with torch.no_grad():
        model.discriminator_head[0].weight[0, 0] = torch.inf
        model.discriminator_head[2].bias[0] = torch.nan
    loss = model(**batch).loss
    assert torch.equal(loss, expected)
    found = gradients(model, loss)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name in found:
        assert torch.equal(found[name], wanted[name]), name
    assert all(found[name].eq(0).all() for name in found if name.startswith("discriminator_head"))


@every_mode
@pytest.mark.parametrize(
    "rest", [{}, {"position_embedding_type": "rotary", "norm_first": True}], ids=["paper", "rotary"]
)
def test_one_step_changes_every_parameter(mode, rest):
    model, batch = build(mode, **rest).train(), batch_of()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**batch).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), f"{name} did not move"
    assert any(name.endswith("norm.bias") for name in before)


@every_mode
def test_a_few_steps_lower_both_losses(mode):
    model, batch = build(mode, initializer_range=0.02).train(), batch_of(rows=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = model(**batch)
    for _ in range(60):
        optimizer.zero_grad()
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
    assert outputs.mlm_loss < 0.7 * first.mlm_loss
    assert outputs.rtd_loss < 0.5 * first.rtd_loss


@every_mode
@pytest.mark.parametrize(("size", "excess", "unsure"), [("tiny", 1.3, 0.3), ("small", 0.1, 0.05)])
def test_losses_at_step_0(mode, size, excess, unsure):
    """ln V and ln 2. The larger initialisation of tiny begins with logits of order 1, so only roughly."""
    sizes = {**PRESETS[HfTinyElectraConfig][size], "vocab_size": 1000, "num_hidden_layers": 4}
    model = HfTinyElectraForPreTraining(HfTinyElectraConfig(**{**sizes, **MODES[mode]})).train()
    outputs = model(**batch_of(rows=16, vocab_size=1000))
    assert math.log(1000) - 0.1 < outputs.mlm_loss.item() < math.log(1000) + excess
    assert outputs.rtd_loss.item() == pytest.approx(math.log(2), abs=unsure)
    assert outputs.loss.item() == pytest.approx(
        outputs.mlm_loss.item() + model.config.discriminator_weight * outputs.rtd_loss.item(), rel=1e-6
    )


# The loss of a part is its share of the loss of the whole


@every_mode
@pytest.mark.parametrize(("padded", "split"), [(True, (1, 3)), (False, (2, 2))])
def test_parts_add_up_to_the_whole(mode, padded, split):
    model = build(mode, discriminator_weight=5.0).double()
    batch = batch_of(padded=padded)
    counts = torch.stack([batch["labels"].ne(-100).sum(), batch["attention_mask"].sum()])
    whole = model(**batch)
    expected = gradients(model, whole.loss)
    model.zero_grad()
    parts = zip(*(tensor.split(split) for tensor in batch.values()), strict=True)
    total = 0
    for part in parts:
        loss = model(**dict(zip(batch, part, strict=True)), num_items_in_batch=counts).loss
        loss.backward()  # accumulates
        total += loss.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], 1e-6)


def test_a_single_count_is_of_the_masked_tokens():
    """As transformers' Trainer gives it; the tokens follow in proportion."""
    model, batch = build(), batch_of()
    outputs = model(**batch)
    masked = int(batch["labels"].ne(-100).sum())
    for count in (2 * masked, torch.tensor(2 * masked)):
        half = model(**batch, num_items_in_batch=count)
        assert_close(half.mlm_loss, outputs.mlm_loss / 2, 1e-6)
        assert_close(half.rtd_loss, outputs.rtd_loss / 2, 1e-6)


# Sharing


@every_mode
def test_a_joint_checkpoint_loads_into_every_class(mode, tmp_path):
    model, batch = build(mode), batch_of()
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    block, embeddings = 12, 5  # tensors in a block, in the embeddings
    encoder = 2 + 3 * block  # with the projection
    encoders, tables = {"embeddings": (2, 1), "all": (1, 1)}.get(mode, (2, 2))
    heads = 4 + 1 + 4  # generator head, the bias of its tied output layer, discriminator head
    assert len(saved) == encoders * encoder + tables * embeddings + heads

    loaded = {}
    for auto_class in (AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining):
        loaded[auto_class], info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"], info
        assert not info["unexpected_keys"], info
    with torch.no_grad():
        expected = model.electra(**arguments).last_hidden_state
        assert_close(loaded[AutoModel](**arguments).last_hidden_state, expected, 1e-6)
        outputs = model(**batch)
        again = loaded[AutoModelForPreTraining](**batch)
        for name in ("loss", "mlm_loss", "rtd_loss", "logits", "mlm_logits"):
            assert_close(again[name], outputs[name], 1e-6)
        masked_lm = loaded[AutoModelForMaskedLM](**arguments, labels=batch["labels"])
        assert_close(masked_lm.logits[batch["labels"] != -100], outputs.mlm_logits, 1e-6)
        assert_close(masked_lm.loss, outputs.mlm_loss, 1e-6)

    for auto_class, joint in ((AutoModelForMaskedLM, False), (AutoModelForPreTraining, True)):
        found = loaded[auto_class]
        assert found.generator_lm_head.weight is found.generator_embeddings.word_embeddings.weight
        if joint:
            assert (found.generator_embeddings is found.electra.embeddings) == (mode in ("embeddings", "all"))
            assert (found.generator_encoder is found.electra.encoder) == (mode == "all")
        # Saved alone and loaded again, the generator is still whole.
        found.save_pretrained(tmp_path / auto_class.__name__)
        reloaded, info = auto_class.from_pretrained(tmp_path / auto_class.__name__, output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            assert_close(reloaded(**arguments).logits, found(**arguments).logits, 1e-6)


@every_mode
def test_the_base_model_can_be_saved(mode, tmp_path):
    """Of the generator alone it is the model itself."""
    for joint in (build(mode), HfTinyElectraForMaskedLM(build(mode).config)):
        joint.base_model.save_pretrained(tmp_path / type(joint).__name__)
        loaded = type(joint.base_model).from_pretrained(tmp_path / type(joint).__name__)
        expected = joint.base_model.state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def test_one_count_for_two_losses_is_warned_of(caplog):
    """As Trainer gives it: exact for one batch, in proportion for several."""
    logging.Logger.warning_once.cache_clear()
    model, batch = build("embeddings"), batch_of()
    masked = int(batch["labels"].ne(-100).sum())
    model(**batch, num_items_in_batch=torch.tensor(masked))
    assert not caplog.records
    model(**batch, num_items_in_batch=torch.tensor(2 * masked))
    assert "gradients are off by a few percent" in caplog.text


@every_mode
def test_sizes_of_the_generator(mode):
    model = build(mode)
    width, heads, feed_forward = {"all": (32, 4, 64)}.get(mode, (16, 2, 32))
    layer = model.generator_encoder.layers[0]
    assert len(model.generator_encoder.layers) == 3
    assert layer.attention.out.weight.shape == (width, width)
    assert layer.attention.num_heads == heads
    assert layer.feed_forward.up.weight.shape == (feed_forward, width)
    assert model.generator_lm_head.weight.shape == (99, 24)
    assert model.electra.encoder.layers[0].feed_forward.up.weight.shape == (64, 32)


@pytest.mark.parametrize("new_size", [120])  # a smaller one is in test_models.py
@every_mode
def test_resizing_reaches_generator_and_discriminator(mode, new_size):
    model, batch = build(mode), batch_of(vocab_size=80)
    before = model(**batch)
    model.resize_token_embeddings(new_size)
    assert model.electra.embeddings.word_embeddings.num_embeddings == new_size
    assert model.generator_embeddings.word_embeddings.num_embeddings == new_size
    assert model.generator_lm_head.weight is model.generator_embeddings.word_embeddings.weight
    assert model.generator_lm_head.bias.shape == (new_size,)
    assert model.generator_lm_head.out_features == model.config.vocab_size == new_size
    after = model(**batch)
    assert_close(after.mlm_logits[:, :80], before.mlm_logits[:, :80], 1e-6)
    assert after.mlm_logits.shape[1] == new_size
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    assert torch.isfinite(model(**arguments).logits).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sharing": "all", "generator_size": 0.25},
            r'generator_size=0.25: a generator that shares "all" .* give 1, or share "embeddings"',
        ),
        ({"sharing": "some"}, "'some': choose one of none, embeddings, all"),
        ({"position_embedding_type": "sinus"}, "'sinus': choose one of .*absolute.*rotary"),
        (
            {"generator_size": 0.3},
            r"width of 77 does not divide into 1 heads of an even size: change hidden_size \(256 x 0.3\)",
        ),
        ({"hidden_size": 100, "num_attention_heads": 3}, "width of 100 does not divide into 3 heads"),
    ],
)
def test_sizes_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        HfTinyElectraConfig(**changes)


# Positions


@pytest.mark.parametrize("norm_first", [True, False])
@torch.no_grad()
def test_rotary_positions_are_relative(norm_first):
    model = build(position_embedding_type="rotary", norm_first=norm_first).electra
    model.set_attn_implementation("eager")
    batch = batch_of()
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask")}
    places = torch.arange(12)[None]
    plain = model(**arguments, output_attentions=True)
    moved = model(**arguments, position_ids=places + 1000, output_attentions=True)
    for ours, theirs in zip(moved.attentions, plain.attentions, strict=True):
        assert_close(ours, theirs, 1e-4)  # angles of 1,000 radians in single precision
    assert_close(moved.last_hidden_state, plain.last_hidden_state, 1e-3)
    assert (model(**arguments, position_ids=2 * places).last_hidden_state - plain.last_hidden_state).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["absolute", "rotary"])
@torch.no_grad()
def test_position_ids(kind):
    model, batch = build(position_embedding_type=kind), batch_of(padded=False)
    ids, types = batch["input_ids"], batch["token_type_ids"]
    places = torch.arange(12)[None]
    expected = model(ids, token_type_ids=types).logits
    assert_close(model(ids, token_type_ids=types, position_ids=places.expand(4, -1)).logits, expected, 1e-6)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    shuffled = model(ids[:, order], token_type_ids=types[:, order], position_ids=places[:, order]).logits
    assert_close(shuffled, expected[:, order])  # only the positions know the order
    assert (model(ids[:, order], token_type_ids=types[:, order]).logits - expected[:, order]).abs().max() > 0.01
    names = [name for name, _ in model.named_parameters() if "position" in name]
    assert len(names) == {"absolute": 1, "rotary": 0}[kind]


def test_rotation_keeps_lengths_and_depends_on_the_distance():
    x, y = torch.randn(2, 1, 1, 1, 8, dtype=torch.double)

    def turned(vector: Tensor, place: int) -> Tensor:
        return rotate(vector, *rotary_angles(torch.tensor([[place]]), 8, torch.double))

    assert_close(turned(x, 5).norm(), x.norm(), 1e-6)
    assert torch.equal(turned(x, 0), x)
    products = [(turned(x, place) * turned(y, place + 3)).sum() for place in (0, 1, 7, 50)]
    for product in products:
        assert_close(product, products[0], 1e-5)
    assert abs((turned(x, 0) * turned(y, 4)).sum() - products[0]) > 1e-3


# Masking


def test_what_can_be_masked(tokenizer):
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    row = np.array([special[0], tokenizer.unk_token_id, tokenizer.unk_token_id, special[1], special[2], special[2]])
    rows = {"input_ids": np.tile(row, (200, 1)), "segment_start": np.full(200, 6)}
    batch = MaskTokens(tokenizer, 1 / 6, seed=0)(rows, first=0)
    masked = batch["labels"] != -100
    assert masked.sum(1).tolist() == [1] * 200
    assert batch["labels"][masked].unique().tolist() == [tokenizer.unk_token_id]
    assert 60 < masked[:, 1].sum() < 140


def test_a_narrower_generator_may_have_fewer_layers(tmp_path):
    """One as wide as the discriminator, which may start from it or share all with it, has as many."""
    for mode in ("none", "embeddings", "disentangled"):
        model, batch = build(mode, generator_layers=1), batch_of()
        assert len(model.generator_encoder.layers) == 1 and len(model.electra.encoder.layers) == 3
        model.save_pretrained(tmp_path / mode)
        again = HfTinyElectraForPreTraining.from_pretrained(tmp_path / mode)
        assert_close(again(**batch).loss, model(**batch).loss)
        generator = HfTinyElectraForMaskedLM.from_pretrained(tmp_path / mode)
        masked = batch["labels"] != -100
        arguments = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
        assert_close(generator(**arguments).logits[masked], model(**batch).mlm_logits)
        assert len(build(mode).generator_encoder.layers) == 3
    for mode in ("none", "all"):
        assert len(build(mode, generator_size=1, generator_layers=1).generator_encoder.layers) == 3
