"""The encoder-decoder against transformers' Marian, its generation, and everything that other code got wrong."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from fixtures.tiny_models import assert_close
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel
from transformers.modeling_outputs import BaseModelOutput

from hf_tiny import HfTinySeq2SeqConfig, HfTinySeq2SeqForConditionalGeneration, InputError
from hf_tiny.convert import seq2seq_from_native, seq2seq_to_native
from hf_tiny.models.layers import cross_entropy, linear_cross_entropy, sinusoids
from hf_tiny.models.seq2seq import top_k

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "initializer_range": 0.2,
}
VARIANTS = {
    "paper": {},
    "learned": {"position_embedding_type": "learned", "max_position_embeddings": 64, "scale_embedding": False},
    "rotary": {"position_embedding_type": "rotary"},
    "norm_first": {"norm_first": True, "hidden_act": "gelu"},
    "key_sizes": {"qk_head_dim": 4, "v_head_dim": 12},
    "untied": {"tie_word_embeddings": False},
    "copying": {"copy_attention": True},
}
LIVELY = {"no_repeat_ngram_size": 1}  # weights that were not trained repeat themselves
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str = "paper", **changes) -> HfTinySeq2SeqForConditionalGeneration:
    """Weights are large, also those of norms and biases: outputs of order 1."""
    torch.manual_seed(0)
    model = HfTinySeq2SeqForConditionalGeneration(HfTinySeq2SeqConfig(**{**SIZES, **VARIANTS[variant], **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            if "cross_attention.out" in name or "copy_attention.query" in name:
                parameter.mul_(3)  # else all that is generated is much the same, whatever the source
    return model.eval()


def source(rows: int = 3, length: int = 9, pad: int = PAD) -> dict[str, Tensor]:
    """Row 1 is shorter when there is one."""
    ids = torch.randint(5, 60, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:2, 6:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}


def target(rows: int = 3, length: int = 7) -> Tensor:
    """Labels: row 2 is shorter when there is one."""
    labels = torch.randint(5, 60, (rows, length), generator=torch.Generator().manual_seed(2))
    labels[:, -1] = EOS
    labels[2:3, 3], labels[2:3, 4:] = EOS, -100
    return labels


def rows_of(sequences: Tensor) -> list[list[int]]:
    """Up to the end: after it transformers' beam search fills with EOS, not with padding, when the padding is token 0."""
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in sequences.tolist()]


# Parity with transformers


def native_model(**changes) -> MarianMTModel:
    """transformers' Marian with random weights everywhere, also in norms and biases."""
    torch.manual_seed(3)
    heads, feed_forward = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}, {"encoder_ffn_dim": 48}
    config = {
        **{"vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "decoder_ffn_dim": 48},
        **{"pad_token_id": 60, "decoder_start_token_id": 60, "eos_token_id": 3, "forced_eos_token_id": 3},
        **{"scale_embedding": True, "activation_function": "swish", "init_std": 0.2, "max_position_embeddings": 64},
    }
    model = MarianMTModel(MarianConfig(**{**heads, **feed_forward, **config, **changes}))
    with torch.no_grad():
        model.final_logits_bias.normal_()
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            if "encoder_attn.out" in name:
                parameter.mul_(3)
    return model.eval()


@pytest.fixture(scope="module")
def native() -> MarianMTModel:
    return native_model()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_parity(native, implementation, tmp_path):
    converted = seq2seq_from_native(native)
    converted.save_pretrained(tmp_path)
    batch, valid = source(pad=60), source()["attention_mask"].bool()
    decoder_input_ids = native.prepare_decoder_input_ids_from_labels(target())
    expected = native(**batch, decoder_input_ids=decoder_input_ids)
    assert expected.logits.abs().mean() > 1
    for model in (converted, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
        model.set_attn_implementation(implementation)
        found = model(**batch, decoder_input_ids=decoder_input_ids)
        assert_close(found.encoder_last_hidden_state[valid], expected.encoder_last_hidden_state[valid])
        assert_close(found.logits, expected.logits)
        assert torch.equal(model.prepare_decoder_input_ids_from_labels(target()), decoder_input_ids)
    states = AutoModel.from_pretrained(tmp_path)(**batch, decoder_input_ids=decoder_input_ids)
    expected = native.model(**batch, decoder_input_ids=decoder_input_ids)
    assert_close(states.last_hidden_state, expected.last_hidden_state)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 4},
        {"num_beams": 4, "early_stopping": True, "length_penalty": 0.6, "num_return_sequences": 3},
        {"num_beams": 4, "no_repeat_ngram_size": 0},
        {"use_cache": False, "num_beams": 4},
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 3},
    ],
    ids=["greedy", "beams", "early", "dull", "no cache", "samples", "sampled beams"],
)
def test_the_same_output_as_transformers(native, how):
    model, found = seq2seq_from_native(native), []
    for each in (native, model):
        torch.manual_seed(5)
        found.append(each.generate(**source(pad=60), max_length=16, **{**LIVELY, **how}))
    assert torch.equal(*found)
    assert how.get("no_repeat_ngram_size") == 0 or len({tuple(row) for row in found[0].tolist()}) == len(found[0])


def test_its_loss_is_transformers_unsmoothed(native):
    model = seq2seq_from_native(native)
    assert_close(model(**source(pad=60), labels=target()).nll, native(**source(pad=60), labels=target()).loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
            "share_encoder_decoder_embeddings is False: .* one table",
        ),
        ({"decoder_ffn_dim": 64}, "ffn_dim is 48 in the encoder and 64 in the decoder"),
        ({"decoder_attention_heads": 2}, "attention_heads is 4 in the encoder and 2 in the decoder"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False: .* output layer, only has True"),
    ],
)
def test_marians_that_do_not_fit(changes, message):
    with pytest.raises(InputError, match=message):
        seq2seq_from_native(native_model(**changes))


def test_a_model_that_copies_has_no_native_twin():
    message = "copy_attention is True: the native model .* only has False. A model trained with --copy_attention False"
    with pytest.raises(InputError, match=message):
        seq2seq_to_native(build("copying"))


# Generation


def decode_step_by_step(model: HfTinySeq2SeqForConditionalGeneration, ids: Tensor, batch: dict) -> Tensor:
    cache, logits = None, []
    for step in range(ids.shape[1]):
        outputs = model(**batch, decoder_input_ids=ids[:, step : step + 1], past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1)


@every_variant
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_cached_is_uncached(variant, implementation):
    model, batch = build(variant), source()
    model.set_attn_implementation(implementation)
    ids = model.prepare_decoder_input_ids_from_labels(target())
    expected = model(**batch, decoder_input_ids=ids)
    assert expected.past_key_values is None
    assert expected.logits.abs().mean() > 0.5
    assert_close(decode_step_by_step(model, ids, batch), expected.logits)
    start = model(**batch, decoder_input_ids=ids[:, :4], use_cache=True)  # a prompt, then several tokens at once
    encoded = (start.encoder_last_hidden_state,)
    rest = model(**batch, encoder_outputs=encoded, decoder_input_ids=ids[:, 4:], past_key_values=start.past_key_values)
    assert_close(rest.logits, expected.logits[:, 4:])


@every_variant
@torch.no_grad()
def test_cached_is_uncached_in_training(variant):
    """Where attention with dropout runs by another function on a CPU; this much of it drops nothing."""
    model, batch = build(variant, attention_probs_dropout_prob=1e-9), source()
    ids = model.prepare_decoder_input_ids_from_labels(target())
    expected = model(**batch, decoder_input_ids=ids).logits
    assert_close(model.train()(**batch, decoder_input_ids=ids).logits, expected)
    assert_close(decode_step_by_step(model, ids, batch), expected)


@torch.no_grad()
def test_keys_and_values_of_the_source_are_computed_once():
    model, batch, calls = build(), source(), []
    for layer in model.model.decoder.layers:
        layer.cross_attention.key_value.register_forward_hook(lambda *_: calls.append(1))
    model.generate(**batch, num_beams=4, max_length=12, min_length=12)
    assert len(calls) == 3  # once in each layer


@pytest.mark.parametrize("how", [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}])
def test_beams_share_what_the_encoder_said(how):
    """No copies for beams: of 2 texts, 2 rows of keys, also after beams changed places."""
    model, seen = build(), []
    attention = model.model.decoder.layers[0].cross_attention
    plain = attention.attend
    attention.attend = lambda query, key, *rest, **kwargs: (
        seen.append((tuple(query.shape), tuple(key.shape))) or plain(query, key, *rest, **kwargs)
    )
    model.generate(**source(2), max_length=8, min_length=8, **how)
    assert seen == [((2, 4, 4, 8), (2, 4, 9, 8))] * 7


@every_variant
@torch.no_grad()
def test_several_targets_of_one_source(variant):
    """As beams are: they need no copies of what the encoder said."""
    model, batch = build(variant), source(2)
    model.set_attn_implementation("eager")
    ids = torch.randint(5, 60, (6, 5))
    encoded = model.get_encoder()(**batch).last_hidden_state
    how = {"decoder_input_ids": ids, "output_attentions": True}
    found = model(encoder_outputs=(encoded,), **batch, **how)
    copied = {name: tensor.repeat_interleave(3, 0) for name, tensor in batch.items()}
    expected = model(encoder_outputs=(encoded.repeat_interleave(3, 0),), **copied, **how)
    assert_close(found.logits, expected.logits)
    for ours, theirs in zip(found.cross_attentions, expected.cross_attentions, strict=True):
        assert_close(ours, theirs)


@every_variant
def test_cache_and_beams_give_the_same_output(variant):
    model, batch = build(variant), source()
    for how in (LIVELY, {**LIVELY, "num_beams": 4}):
        expected = model.generate(**batch, max_length=14, use_cache=False, **how)
        assert torch.equal(model.generate(**batch, max_length=14, **how), expected)
        static = model.generate(**batch, max_length=14, cache_implementation="static", **how)
        assert torch.equal(static, expected)


@every_variant
def test_one_beam_is_greedy(variant):
    model, batch = build(variant), source()
    greedy = model.generate(**batch, max_length=14, **LIVELY)
    ids = greedy[:, :1]
    for _ in range(greedy.shape[1] - 1):  # by hand
        with torch.no_grad():
            best = model(**batch, decoder_input_ids=ids).logits[:, -1].scatter(1, ids, -1e9).argmax(-1)
        ended = ids.eq(EOS).any(1)
        ids = torch.cat((ids, best.masked_fill(ended, PAD)[:, None]), dim=1)
    assert torch.equal(greedy, ids)
    assert torch.equal(model.generate(**batch, max_length=14, num_beams=1, **LIVELY), greedy)


@pytest.mark.parametrize("how", [LIVELY, {**LIVELY, "num_beams": 4}], ids=["greedy", "beams"])
@every_variant
def test_output_does_not_depend_on_padding(variant, how):
    model, batch = build(variant), source()
    expected = rows_of(model.generate(**batch, max_length=14, **how))
    for row in range(3):
        length = int(batch["attention_mask"][row].sum())
        alone = {name: tensor[row : row + 1, :length] for name, tensor in batch.items()}
        assert rows_of(model.generate(**alone, max_length=14, **how)) == expected[row : row + 1]
    longer = {
        "input_ids": F.pad(batch["input_ids"], (0, 5), value=7),
        "attention_mask": F.pad(batch["attention_mask"], (0, 5)),
    }
    assert rows_of(model.generate(**longer, max_length=14, **how)) == expected


@pytest.mark.parametrize("how", [{}, {"num_beams": 4}, {"do_sample": True}], ids=["greedy", "beams", "samples"])
def test_generation_stops_at_the_end(how):
    model = build()
    with torch.no_grad():
        model.lm_head.bias[EOS] = 100
    found = model.generate(**source(), max_length=14, **how)
    assert found.tolist() == [[BOS, EOS]] * 3


@pytest.mark.parametrize("length", [10, 128, 300, 12_800, 32_001])
def test_top_k(length):
    x = torch.stack([torch.randperm(length) for _ in range(5)]).float()  # no two are equal
    x[0, :3] = -1e9
    for k in (1, 8):
        for found, expected in zip(top_k(x, k), x.topk(k), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("variant", ["paper", "copying"])
def test_sampling(variant):
    model, batch = build(variant), source(1)
    logits = model(**batch, decoder_input_ids=torch.tensor([[BOS]])).logits[0, 0].double().softmax(-1)
    samples = model.generate(**batch, do_sample=True, top_k=0, num_return_sequences=3000, max_new_tokens=1)
    share = torch.bincount(samples[:, 1], minlength=60) / 3000
    assert (share - logits).abs().max() < 0.04
    assert logits.max() > 0.1


def test_beams_are_at_least_as_likely_as_greedy():
    model, batch = build(), source()

    def likelihood(sequences: Tensor) -> Tensor:
        with torch.no_grad():
            logits = model(**batch, decoder_input_ids=sequences[:, :-1]).logits.log_softmax(-1)
        chosen = logits.gather(2, sequences[:, 1:, None])[..., 0]
        return chosen.masked_fill(sequences[:, 1:] == PAD, 0).sum(1)

    how = {**batch, "max_length": 10, "min_length": 10}
    beams = model.generate(**how, num_beams=60, length_penalty=0.0)
    assert (likelihood(beams) >= likelihood(model.generate(**how)) - 1e-4).all()


def test_decoder_prompt():
    model, batch = build(), source()
    prompt = torch.tensor([[BOS, 9, 8]]).repeat(3, 1)
    how = {**batch, **LIVELY, "decoder_input_ids": prompt, "max_length": 12, "num_beams": 4}
    found = model.generate(**how)
    assert torch.equal(found[:, :3], prompt)
    assert torch.equal(model.generate(**how, use_cache=False), found)


@torch.no_grad()
def test_only_the_logits_that_are_asked_for():
    model, batch, seen = build(), source(), []
    ids = model.prepare_decoder_input_ids_from_labels(target())
    whole = model(**batch, decoder_input_ids=ids).logits
    assert_close(model(**batch, decoder_input_ids=ids, logits_to_keep=2).logits, whole[:, -2:])
    places = torch.tensor([1, 4])
    assert_close(model(**batch, decoder_input_ids=ids, logits_to_keep=places).logits, whole[:, places])
    model.lm_head.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    model.generate(**batch, decoder_input_ids=ids, max_length=10)
    assert set(seen) == {1}


# Masks


@every_variant
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_no_look_ahead(variant, dropout):
    """Also in training, where attention with dropout runs by another function on a CPU."""
    model = build(variant, attention_probs_dropout_prob=dropout).train(dropout > 0)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        ids = model.prepare_decoder_input_ids_from_labels(target())
        changed = ids.clone()
        changed[:, 4] = 11
        found = []
        for x in (ids, changed):
            torch.manual_seed(0)
            with torch.no_grad():
                found.append(model(**source(), decoder_input_ids=x).logits)
        before, after = found
        assert_close(before[:, :4], after[:, :4], 1e-6)
        assert (before[:, 4:] - after[:, 4:]).abs().amax(dim=(0, 2)).min() > 1e-3  # and all later ones see it


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_padding_and_look_ahead_together(implementation):
    """The decoder's own padding on the left, as one mask: finite, and nobody sees it."""
    model, batch = build("rotary"), source()
    model.set_attn_implementation(implementation)
    ids = model.prepare_decoder_input_ids_from_labels(target())
    expected = model(**batch, decoder_input_ids=ids).logits
    padded = F.pad(ids, (3, 0), value=9)
    mask = F.pad(torch.ones_like(ids), (3, 0))
    found = model(**batch, decoder_input_ids=padded, decoder_attention_mask=mask).logits
    assert torch.isfinite(found).all()
    assert_close(found[:, 3:], expected, 1e-4)  # rotary: only distances count


@torch.no_grad()
def test_cross_attention_weights():
    model, batch = build(), source()
    model.set_attn_implementation("eager")
    outputs = model(**batch, labels=target(), output_attentions=True, output_hidden_states=True)
    assert [len(outputs[f"{side}_attentions"]) for side in ("encoder", "decoder")] == [2, 3]
    assert [len(outputs[f"{side}_hidden_states"]) for side in ("encoder", "decoder")] == [3, 4]
    assert len(outputs.cross_attentions) == 3
    for weights in outputs.cross_attentions:
        assert weights.shape == (3, 4, 7, 9)
        assert_close(weights.sum(-1), torch.ones(3, 4, 7))
        assert weights[1, :, :, 6:].max() == 0
        assert weights[1, :, :, :6].min() > 0
    for weights in outputs.decoder_attentions:
        assert weights.shape == (3, 4, 7, 7)
        assert weights.triu(1).max() == 0
    found = model.generate(
        **batch, num_beams=2, max_length=6, min_length=6, output_attentions=True, return_dict_in_generate=True
    )
    assert [tuple(step[0].shape) for step in found.cross_attentions] == [(6, 4, 1, 9)] * 5
    forced = found.sequences[:, :-1]
    outputs = model(**batch, decoder_input_ids=forced, output_attentions=True)
    first = [step[-1][::2, :, 0] for step in found.cross_attentions]  # all beams begin alike
    assert_close(first[0], outputs.cross_attentions[-1][:, :, 0])
    beam = [found.beam_indices[:, step] for step in range(5)]
    for step in range(1, 5):  # of the beam that won
        assert_close(
            found.cross_attentions[step][-1][beam[step].long(), :, 0], outputs.cross_attentions[-1][:, :, step]
        )


# Teacher forcing and the loss


@pytest.mark.parametrize("start", [PAD, BOS])
@torch.no_grad()
def test_labels_are_shifted_right(start):
    model, labels = build(decoder_start_token_id=start), target()
    ids = model.prepare_decoder_input_ids_from_labels(labels)
    assert ids[2].tolist() == [start, *labels[2, :4].tolist(), PAD, PAD]
    assert torch.equal(ids[:2, 1:], labels[:2, :-1])
    assert labels[2, 4] == -100  # they are not changed themselves
    shifted, given = model(**source(), labels=labels), model(**source(), labels=labels, decoder_input_ids=ids)
    assert_close(shifted.loss, given.loss, 1e-6)
    # The start token is seen although it looks like padding: what stands first changes everything after it.
    with torch.no_grad():
        model.model.encoder.word_embeddings.weight[start] += 1
    assert (model(**source(), labels=labels).logits - shifted.logits).abs().amax(dim=(0, 2)).min() > 1e-3


def test_loss_by_hand():
    model, labels = build(label_smoothing=0.2), target()
    outputs = model(**source(), labels=labels)
    loss, nll, count = 0.0, 0.0, 0
    for row, place in labels.ne(-100).nonzero().tolist():
        log_probs = outputs.logits[row, place].double().log_softmax(-1)
        loss -= 0.8 * log_probs[labels[row, place]] + 0.2 * log_probs.mean()
        nll -= log_probs[labels[row, place]]
        count += 1
    assert count == 18
    assert outputs.loss.item() == pytest.approx(loss.item() / count, rel=1e-5)
    assert outputs.nll.item() == pytest.approx(nll.item() / count, rel=1e-5)
    assert not outputs.nll.requires_grad
    trained = model.train()(**source(), labels=labels)
    assert trained.logits is None
    assert_close(trained.loss, outputs.loss, 1e-6)
    assert_close(trained.nll, outputs.nll, 1e-6)
    model.config.label_smoothing = 0.0
    plain = model(**source(), labels=labels)
    assert_close(plain.loss, outputs.nll, 1e-6)
    assert_close(plain.loss, plain.nll, 1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_and_its_gradient(smoothing):
    logits = torch.randn(11, 17, dtype=torch.double, requires_grad=True)
    labels = torch.randint(17, (11,)).index_fill(0, torch.tensor([2, 7]), -100)
    target = F.one_hot(labels.clamp(min=0), 17) * (1 - smoothing) + smoothing / 17
    expected = -(target * logits.log_softmax(-1)).sum(-1)[labels != -100].sum() / 5
    (wanted,) = torch.autograd.grad(expected, logits)
    found = cross_entropy(logits, labels, 5, smoothing)
    (gradient,) = torch.autograd.grad(found, logits)
    assert_close(found, expected.to(found.dtype))
    assert_close(gradient, wanted)
    assert gradient[[2, 7]].abs().max() == 0


@pytest.mark.parametrize("rows", [1, 5, 200])  # in chunks of 64
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_a_layer_and_its_gradient(rows, smoothing):
    layer, x = nn.Linear(24, 20_000), torch.randn(rows, 24, requires_grad=True)
    labels = torch.randint(20_000, (rows,))
    logits = layer(x)
    expected = cross_entropy(logits, labels, 7, smoothing)
    wanted = torch.autograd.grad(3 * expected, (x, *layer.parameters()))
    found, nll = linear_cross_entropy(x, layer, labels, 7, smoothing)
    gradients = torch.autograd.grad(3 * found, (x, *layer.parameters()))
    assert_close(found, expected)
    assert_close(nll, cross_entropy(logits, labels, 7))
    assert not nll.requires_grad
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_loss_in_low_precision(how):
    model, batch = build(), {**source(), "labels": target()}
    gradients, losses = [], []
    for training in (False, True):  # as separate layer and loss, and as one
        low = copy.deepcopy(model).train(training).to(torch.bfloat16 if how == "bfloat16" else torch.float)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            outputs = low(**batch)
        outputs.loss.backward()
        assert outputs.loss.dtype == outputs.nll.dtype == torch.float
        losses.append(outputs.loss.detach())
        gradients.append(torch.cat([parameter.grad.float().flatten() for parameter in low.parameters()]))
    assert_close(*losses, 0.01)
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[0].norm()


def test_a_wrapped_output_layer_runs_as_it_is():
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model, batch = build().train(), {**source(), "labels": target()}
    plain = model(**batch).nll
    model.lm_head.__class__ = Doubled
    expected = F.cross_entropy(model.eval()(**batch).logits.flatten(0, 1), target().flatten())
    assert_close(model.train()(**batch).nll, expected)
    assert abs(expected - plain) > 0.1


@every_variant
@pytest.mark.parametrize("split", [(2, 1), (1, 1, 1)])
def test_parts_add_up_to_the_whole(variant, split):
    model = build(variant).double().train()
    batch = {**source(), "labels": target()}
    whole = model(**batch)
    whole.loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    total = nll = 0
    for part in zip(*(tensor.split(split) for tensor in batch.values()), strict=True):
        outputs = model(**dict(zip(batch, part, strict=True)), num_items_in_batch=torch.tensor([18, 99]))
        outputs.loss.backward()  # accumulates
        total, nll = total + outputs.loss.item(), nll + outputs.nll.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-6)
    assert nll == pytest.approx(whole.nll.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], 1e-5)


def test_without_labels_the_loss_is_0():
    model = build().train()
    loss = model(**source(), labels=torch.full((3, 7), -100)).loss
    assert loss.item() == 0
    loss.backward()


# Learning


@pytest.mark.parametrize("variant", ["paper", "norm_first"])
def test_it_learns_to_copy(variant):
    """Random rows of 2 to 6 tokens, copied: 16 of them by heart."""
    torch.manual_seed(1)
    small = {"hidden_size": 48, "decoder_layers": 2, "initializer_range": 0.05, "label_smoothing": 0.0}
    model = HfTinySeq2SeqForConditionalGeneration(HfTinySeq2SeqConfig(**{**SIZES, **VARIANTS[variant], **small}))
    ids = torch.randint(5, 25, (16, 7))
    lengths = torch.randint(2, 7, (16, 1))
    places = torch.arange(7)
    ids = ids.masked_fill(places == lengths, EOS).masked_fill(places > lengths, PAD)
    batch = {"input_ids": ids, "attention_mask": ids.ne(PAD).long(), "labels": ids.masked_fill(ids == PAD, -100)}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    model.train()
    for _ in range(150):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert loss < 0.05
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for how in ({}, {"num_beams": 4}):
        found = rows_of(model.eval().generate(**arguments, max_length=12, **how))
        assert [row[1:] for row in found] == rows_of(ids)


@every_variant
def test_one_step_changes_every_parameter(variant):
    model = build(variant, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1).train()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**source(), labels=target()).loss.backward()
    optimizer.step()
    for name, parameter in model.state_dict().items():
        assert not torch.equal(parameter, before[name]), f"{name} did not move"


def test_the_first_loss_is_that_of_guessing():
    for changes in ({}, {"norm_first": True}, {"scale_embedding": False}):
        config = HfTinySeq2SeqConfig(
            vocab_size=1000, hidden_size=128, num_attention_heads=4, intermediate_size=256, **changes
        )
        model = HfTinySeq2SeqForConditionalGeneration(config).train()
        ids = torch.randint(5, 1000, (8, 20))
        assert math.log(1000) - 0.2 < model(ids, labels=ids.roll(1, 0)).loss.item() < math.log(1000) + 0.8


# Copying


def mixed(model: HfTinySeq2SeqForConditionalGeneration, batch: dict, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distribution of See et al. (2017), equation 9, token by token; the gate and the attention to the source."""
    outputs = model.model(**batch, decoder_input_ids=ids, return_dict=True)
    x, memory, pointer = outputs.last_hidden_state, outputs.encoder_last_hidden_state, model.copy_attention
    rows, gates, maps = [], [], []
    for row in range(len(x)):
        length = int(batch["attention_mask"][row].sum())
        known = memory[row, :length]
        for place, state in enumerate(x[row]):
            tokens, copied = batch["input_ids"][row, :length].tolist(), 0
            for token in ids[row, 1 : place + 1]:  # in the order of the source
                copied += copied < len(tokens) and tokens[copied] == token
            after_read = x.new_tensor([i > 0 and tokens[i - 1] == ids[row, place] for i in range(length)])
            far = x.new_tensor([abs(i - copied) for i in range(length)])
            follow = pointer.follow[0] * after_read - pointer.follow[1] * (1 + far).log()
            follow[:copied] -= pointer.follow[2]
            attention = (known @ pointer.query(state) / x.shape[-1] ** 0.5 + follow).softmax(0)
            gate = pointer.gate(torch.cat((state, attention @ known))).sigmoid()
            copied = [
                sum((attention[i] for i in range(length) if batch["input_ids"][row, i] == token), x.new_zeros(()))
                for token in range(60)
            ]
            rows.append(gate * model.lm_head(state).softmax(0) + (1 - gate) * torch.stack(copied))
            gates.append(gate)
            maps.append(F.pad(attention, (0, memory.shape[1] - length)))
    shape = (*x.shape[:2], -1)
    return tuple(torch.stack(each).view(shape) for each in (rows, gates, maps))


def repeating_source() -> dict[str, Tensor]:
    """Tokens that stand in a text twice, and one that is also the padding's."""
    batch = source(pad=7)
    batch["input_ids"][:, 4], batch["input_ids"][0, 0] = batch["input_ids"][:, 1], 7
    return batch


def copied_target(batch: dict[str, Tensor]) -> Tensor:
    labels = target()
    labels[:, 1], labels[0, 3] = batch["input_ids"][:, 1], batch["input_ids"][0, 5]
    return labels


@torch.no_grad()
def test_the_pointer_by_hand():
    model, batch = build("copying").double(), repeating_source()
    ids = model.prepare_decoder_input_ids_from_labels(copied_target(batch))
    expected, gate, attention = mixed(model, batch, ids)
    outputs = model(**batch, decoder_input_ids=ids, output_attentions=True)
    assert_close(outputs.logits.exp(), expected, 1e-9)
    assert_close(outputs.logits.exp().sum(-1), torch.ones(3, 7).double(), 1e-9)
    assert_close(outputs.copy_attentions, (1 - gate) * attention, 1e-9)
    assert 0.05 < gate.min() < gate.max() < 0.95 and attention.max() > 0.3
    assert "copy_attentions" not in model(**batch, decoder_input_ids=ids)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("training", [False, True])  # as separate layer and loss, and as one
def test_the_loss_of_copies_and_its_gradient(smoothing, training):
    model, batch = build("copying", label_smoothing=smoothing).double(), repeating_source()
    labels = copied_target(batch)
    log_probs = mixed(model, batch, model.prepare_decoder_input_ids_from_labels(labels))[0].log()
    valid = labels != -100
    targets = F.one_hot(labels[valid], 60).double() * (1 - smoothing) + smoothing / 60
    expected = -(targets * log_probs[valid]).sum() / 5
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    outputs = model.train(training)(**batch, labels=labels, num_items_in_batch=5)
    assert_close(outputs.loss, expected, 1e-7)
    assert_close(outputs.nll, -log_probs[valid].gather(1, labels[valid][:, None]).sum() / 5, 1e-7)
    assert (outputs.logits is None) == training
    gradients = torch.autograd.grad(outputs.loss, list(model.parameters()))
    for (name, _), ours, theirs in zip(model.named_parameters(), gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-6, msg=name)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"use_cache": False}])
def test_before_it_learns_it_repeats_its_source(how):
    """Texts of 12 different tokens, which stand in them several times, and were never seen. What it is made to write first is
    an addition: it goes on with the source after it."""
    torch.manual_seed(0)
    config = HfTinySeq2SeqConfig(**{**SIZES, "initializer_range": 0.02, "copy_attention": True})
    model = HfTinySeq2SeqForConditionalGeneration(config).eval()
    ids = F.pad(torch.randint(5, 17, (6, 30)), (0, 1), value=EOS)
    ids[0, 20], ids[0, 21:] = EOS, PAD
    found = model.generate(ids, attention_mask=ids.ne(PAD).long(), max_new_tokens=40, **how)
    assert [row[1:] for row in rows_of(found)] == rows_of(ids)
    begun = torch.cat((torch.full((6, 1), BOS), ids[:, :9], torch.tensor([[40, 41, 42]] * 6)), dim=1)
    found = model.generate(ids, attention_mask=ids.ne(PAD).long(), decoder_input_ids=begun, max_new_tokens=40, **how)
    assert [row[1:10] + row[13:] for row in rows_of(found)] == rows_of(ids)


@pytest.mark.parametrize("use_cache", [True, False])
def test_beams_with_copies_find_the_best_of_all(use_cache):
    model = build("copying", vocab_size=7)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    batch = {"input_ids": torch.tensor([[5, 6, 5, 4], [6, 4, 4, 0]]), "attention_mask": mask}
    best = [(-math.inf, None)] * 2
    for tokens in itertools.product(range(7), repeat=3):
        ids = torch.tensor([[BOS, *tokens]] * 2)
        with torch.no_grad():
            chosen = model(**batch, decoder_input_ids=ids[:, :-1]).logits.gather(2, ids[:, 1:, None])[..., 0]
        length = tokens.index(EOS) + 1 if EOS in tokens else 3
        for row, score in enumerate(chosen[:, :length].sum(1).tolist()):
            best[row] = max(best[row], (score, [BOS, *tokens[:length]]))
    how = {"max_new_tokens": 3, "num_beams": 49, "length_penalty": 0.0, "early_stopping": "never"}
    found = model.generate(**batch, **how, use_cache=use_cache)
    assert rows_of(found) == [sequence for _, sequence in best]


@pytest.mark.slow
def test_tokens_that_were_never_seen_are_copied():
    """The first half of the vocabulary is for training; the second half only ever stands in sources."""
    found = {}
    for copying in (False, True):
        torch.manual_seed(0)
        changes = {"copy_attention": copying, "norm_first": True, "encoder_layers": 1, "decoder_layers": 1}
        model = HfTinySeq2SeqForConditionalGeneration(
            HfTinySeq2SeqConfig(**{**SIZES, **changes, "label_smoothing": 0.0, "initializer_range": 0.1})
        )
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(400):
            ids = F.pad(torch.randint(5, 33, (32, 5)), (0, 1), value=EOS)
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ids = F.pad(torch.randint(33, 60, (64, 5)), (0, 1), value=EOS)
        written = model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6)
        found[copying] = (written[:, 1:6] == ids[:, :5]).float().mean().item()
    assert found[False] < 0.1 and found[True] > 0.5, found


# Inputs


@every_variant
@torch.no_grad()
def test_other_ways_to_give_the_same(variant):
    model, batch, labels = build(variant), source(), target()
    expected = model(**batch, labels=labels)
    ids = model.prepare_decoder_input_ids_from_labels(labels)
    words = model.get_input_embeddings()
    mask = {"attention_mask": batch["attention_mask"]}
    encoded = model.get_encoder()(**batch)
    assert isinstance(encoded, BaseModelOutput)
    without_ids = (
        {**mask, "inputs_embeds": words(batch["input_ids"]), "decoder_input_ids": ids},
        {**mask, "encoder_outputs": (encoded.last_hidden_state,), "decoder_input_ids": ids},
        {**batch, "decoder_inputs_embeds": words(ids)},
    )
    for given in (
        {**batch, "decoder_input_ids": ids},
        {**batch, "encoder_outputs": (encoded.last_hidden_state,), "decoder_input_ids": ids},
        {**mask, "encoder_outputs": encoded, "decoder_input_ids": ids},
        *(() if variant == "copying" else without_ids),
    ):
        assert_close(model(**given).logits, expected.logits, 1e-6)
    how = {**LIVELY, "max_length": 9, "num_beams": 3}
    found = model.generate(**batch, **how)
    assert torch.equal(model.generate(**mask, encoder_outputs=encoded, **how), found)
    if variant == "copying":
        for given in without_ids:
            with pytest.raises(ValueError, match="which tokens to copy: give input_ids"):
                model(**given)
    else:
        assert torch.equal(model.generate(**mask, inputs_embeds=words(batch["input_ids"]), **how), found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Give labels, or exactly one of decoder_input_ids and decoder_inputs_embeds"),
        (
            {"decoder_input_ids": target(), "decoder_inputs_embeds": torch.zeros(3, 7, 32)},
            "exactly one of decoder_input_ids",
        ),
    ],
)
def test_no_target(given, message):
    with pytest.raises(ValueError, match=message):
        build()(**source(), **given)


def test_more_tokens_than_learned_positions():
    model = build("learned", max_position_embeddings=8)
    with pytest.raises(ValueError, match="9 tokens, but max_position_embeddings is 8"):
        model(**source(), labels=target())
    short = {name: tensor[:, :8] for name, tensor in source().items()}
    assert torch.isfinite(model(**short, labels=target()).loss)
    with pytest.raises(ValueError, match="9 tokens, but max_position_embeddings is 8"):
        model.generate(**short, min_length=12, max_length=12)


def test_shifting_needs_a_start_token():
    model = build()
    model.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="needs decoder_start_token_id and pad_token_id"):
        model(**source(), labels=target())


# Positions and sizes


@torch.no_grad()
def test_sinusoids_are_those_of_the_paper():
    found = sinusoids(torch.arange(50)[None], 16, torch.float)[0]
    for place in (0, 1, 17, 49):
        for index in range(8):
            angle = place / 10_000 ** (2 * index / 16)
            assert found[place, index].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert found[place, 8 + index].item() == pytest.approx(math.cos(angle), abs=1e-5)


@pytest.mark.parametrize("variant", ["paper", "rotary"])
def test_positions_need_no_table(variant):
    model = build(variant, max_position_embeddings=8)
    assert not list(model.buffers())
    assert not any("position" in name for name in model.state_dict())
    outputs = model(torch.randint(5, 60, (1, 300)), decoder_input_ids=torch.randint(5, 60, (1, 300)))
    assert torch.isfinite(outputs.logits).all()


@every_variant
@torch.no_grad()
def test_the_order_of_tokens_matters(variant):
    model, batch, labels = build(variant), source(1), target(1)
    expected = model(**batch, labels=labels).logits
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert (model(batch["input_ids"][:, order], labels=labels).logits - expected).abs().max() > 0.01
    ids = model.prepare_decoder_input_ids_from_labels(labels)
    order = torch.tensor([0, 2, 1, 3, 4, 5, 6])
    assert (model(**batch, decoder_input_ids=ids[:, order]).logits - expected)[:, 3:].abs().max() > 1e-3


def parameters(**changes) -> int:
    with torch.device("meta"):
        model = HfTinySeq2SeqForConditionalGeneration(HfTinySeq2SeqConfig(**changes))
    return sum(parameter.numel() for parameter in model.parameters())


def test_sizes_of_the_paper():
    """Table 3 counts 65 million in the base model (the vocabulary is about 37,000), 36 with 2 layers, 58 with d_k 16, and
    213 in the big one."""
    assert parameters() / 1e6 == pytest.approx(63.1, abs=0.2)
    assert (parameters() - parameters(encoder_layers=2)) / 1e6 == pytest.approx(65 - 36, abs=1)
    assert (parameters() - parameters(qk_head_dim=16)) / 1e6 == pytest.approx(65 - 58, abs=0.2)
    assert (parameters() - parameters(num_attention_heads=1, qk_head_dim=512, v_head_dim=512)) == 0
    big = parameters(hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    assert big / 1e6 == pytest.approx(213, rel=0.02)


def test_encoder_and_decoder_of_different_depth():
    model = build(encoder_layers=1, decoder_layers=4)
    assert (len(model.model.encoder.layers), len(model.model.decoder.layers)) == (1, 4)
    model.generate(**source(), num_beams=2, max_length=6)
    assert build(decoder_layers=None).config.decoder_layers == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "absolute"}, "'absolute': choose one of .*sinusoidal.*learned.*rotary"),
        ({"hidden_size": 100}, "width of 100 does not divide into 8 heads: change hidden_size"),
        ({"hidden_size": 99, "num_attention_heads": 3}, "sinusoidal positions need an even size, not 99"),
        ({"qk_head_dim": 5, "position_embedding_type": "rotary"}, "rotary positions need an even size, not 5"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"hidden_act": "rellu"}, "'rellu': choose one of .*gelu"),
    ],
)
def test_settings_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        HfTinySeq2SeqConfig(**changes)
