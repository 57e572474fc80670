"""The Reformer: what transformers' own gets wrong, and what the paper promises."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from fixtures import tiny_run
from fixtures.tiny_models import assert_close
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from hf_tiny import HfTinyReformerConfig, HfTinyReformerForCausalLM, HfTinyReformerForMaskedLM, HfTinyReformerModel
from hf_tiny.models.chunks import (
    ChunkedAttention,
    Visibility,
    attend,
    attend_backward,
    dense_attention,
    normal_numbers,
)
from hf_tiny.models.reformer import LSHAttention, Reversible, SharedInputs
from hf_tiny.optim import depths

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "attn_layers": ["lsh", "local", "lsh"],
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "axial_pos_shape": [8, 16],
    "lsh_attn_chunk_length": 4,
    "local_attn_chunk_length": 4,
    "num_hashes": 2,
    "hash_centred_keys": True,
    "hidden_dropout_prob": 0.0,
    "initializer_range": 0.3,
    "chunk_size_feed_forward": 16,
}
LENGTH = 37
both_kinds = pytest.mark.parametrize("model_class", [HfTinyReformerForCausalLM, HfTinyReformerForMaskedLM])


def build(model_class: type = HfTinyReformerForCausalLM, **changes):
    torch.manual_seed(0)
    return model_class(HfTinyReformerConfig(**{**SIZES, **changes})).eval()


def tokens(rows: int = 2, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(5, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, seed: int = 3, **changes) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(tokens(), labels=tokens(), **changes).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


# The reversible layers


@both_kinds
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("low", [False, True])
def test_gradients_are_those_of_autograd(model_class, dropout, low):
    """With hidden states wanted, the layers run as ordinary ones, with the same random numbers. Without autocast's cache:
    with it, ordinary layers add up the gradients of the pieces of a weight in bf16."""
    model = build(model_class, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout).train()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low, cache_enabled=False):
        found, expected = gradients(model), gradients(model, output_hidden_states=True)
    assert len(found) == len(list(model.parameters()))
    assert max(grad.abs().max().item() for grad in expected.values()) > 0.1
    assert largest(found, expected) < 1e-5


def test_backward_inside_autocast_reaches_every_parameter():
    model = build().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def saved_bytes(layers: int) -> int:
    """Of all that autograd keeps from forward to backward, without the parameters."""
    model = build(attn_layers=["lsh", "local"] * (layers // 2), hidden_dropout_prob=0.1).train()
    storages, known = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return sum(storages.values())


def test_what_is_saved_does_not_grow_with_depth():
    assert saved_bytes(2) == saved_bytes(12) > 0


def test_frozen_embeddings():
    model = build(tie_word_embeddings=False).train()
    expected = gradients(model)
    model.reformer.embeddings.requires_grad_(False)
    found = gradients(model)
    assert largest(found, {name: expected[name] for name in expected if ".embeddings." not in name}) < 1e-6


def test_frozen_layers_and_autograd_grad():
    model = build().train()
    expected = gradients(model)
    model.reformer.layers[1].requires_grad_(False)
    found = gradients(model)
    assert all(not name.startswith("reformer.layers.1.") for name in found)
    assert largest(found, {name: expected[name] for name in found}) < 1e-6
    parameters = list(model.reformer.layers[0].parameters())
    torch.manual_seed(3)
    for parameter, grad in zip(
        parameters, torch.autograd.grad(model(tokens(), labels=tokens()).loss, parameters), strict=True
    ):
        name = next(n for n, p in model.named_parameters() if p is parameter)
        assert_close(grad, expected[name])


def test_a_second_backward_gives_the_same():
    model = build().train()
    loss = model(tokens(), labels=tokens()).loss
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    assert largest({name: p.grad for name, p in model.named_parameters()}, first) < 1e-7


def test_lora():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build().train(), LoraConfig(target_modules=["qkv", "up"], init_lora_weights=False))
    found, expected = gradients(model), gradients(model, output_hidden_states=True)
    assert len(found) == 2 * 2 * 3
    assert largest(found, expected) < 1e-5


def test_gradient_checkpointing_is_accepted():
    model = build().train()
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert largest(gradients(model), expected) == 0


# Random numbers


def test_the_same_seed_gives_the_same_loss():
    model = build(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2).train()
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        loss = model(tokens(), labels=tokens()).loss
        after_forward = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), after_forward)  # backward draws nothing
        runs.append((loss.item(), torch.rand(3).tolist()))
    assert runs[0] == runs[1]
    assert model(tokens(), labels=tokens()).loss.item() != runs[0][0]


def test_evaluation_repeats_and_leaves_the_random_stream_alone():
    model = build()
    before = torch.get_rng_state()
    assert torch.equal(model(tokens()).logits, model(tokens()).logits)
    assert torch.equal(torch.get_rng_state(), before)


def test_rotations_are_new_in_each_training_step():
    model = build().train()
    losses = {model(tokens(), labels=tokens()).loss.item() for _ in range(4)}
    assert len(losses) > 1  # there is no dropout


def test_backward_uses_the_buckets_of_the_forward_pass(monkeypatch):
    """Its inputs are computed back from the outputs: a last digit must not move a token to another bucket."""
    hashed_layers, buckets = [], LSHAttention.buckets

    def count(layer, *inputs):
        hashed_layers.append(layer.layer_idx)
        return buckets(layer, *inputs)

    monkeypatch.setattr(LSHAttention, "buckets", count)
    build().train()(tokens(), labels=tokens()).loss.backward()
    assert hashed_layers == [0, 2]


def test_normal_numbers():
    many = normal_numbers((1000, 50), 7, torch.device("cpu"))
    assert abs(many.mean()) < 0.01
    assert abs(many.std() - 1) < 0.01
    assert abs((many[:, 1:] * many[:, :-1]).mean()) < 0.01
    assert torch.equal(normal_numbers((10, 50), 7, many.device), many[:10])
    assert abs((normal_numbers((1000, 50), 8, many.device) * many).mean()) < 0.02


# Hashing attention


def attention_inputs(length: int, causal: bool, rounds: int, *, chunk: int = 8, across: bool = True, **changes):
    """An LSH layer, its query, key and value (batch, heads, length, size), and what it is given."""
    settings = {"num_hashes": rounds, "is_decoder": causal, "lsh_attn_chunk_length": chunk, "hidden_size": 64}
    config = HfTinyReformerConfig(**{**SIZES, **settings, "attend_across_buckets": across, **changes})
    layer = LSHAttention(config, 0)
    query = torch.randn(1, 2, length, 16, generator=torch.Generator().manual_seed(2)) * 2
    value = torch.randn(1, 2, length, 16, generator=torch.Generator().manual_seed(3))
    given = SharedInputs(torch.ones(1, length, dtype=torch.bool), None, rounds, seed=None, dense=False)
    return layer, query, layer.keys_of(query), value, given


def hashed(query: Tensor, key: Tensor, value: Tensor, seen: Visibility) -> Tensor:
    inputs = (x.transpose(1, 2) for x in (query, key, value))
    return ChunkedAttention.apply(*inputs, seen, True, 0.0).transpose(1, 2)


def full(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool)
    return dense_attention(query, key, value, seen.tril() if causal else seen, True, nn.Dropout(0))[0]


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_lsh_is_full_attention_when_all_is_in_reach(rounds, causal):
    """Two chunks of which each sees the other, in every round of the hash."""
    layer, query, key, value, given = attention_inputs(16, causal, rounds)
    expected = full(query, key, value, causal)
    assert_close(hashed(query, key, value, layer.visibility(key, given)), expected)
    # 17 places are three chunks, and one of them is padding: the rounds differ.
    query, key, value = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (query, key, value))
    given.real = torch.arange(17)[None] < 16
    for across in (True, False) if causal else (True,):
        layer.config.attend_across_buckets = across
        given.buckets.clear()
        seen = layer.visibility(key, given)
        assert len(seen.order) == rounds
        assert_close(hashed(query, key, value, seen)[:, :, :16], expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("rounds", [1, 3])
def test_chunks_are_attention_over_the_union_of_all_rounds(causal, across, rounds):
    """And so are their gradients. A pair that meets in several rounds counts once."""
    layer, query, key, value, given = attention_inputs(50, causal, rounds, across=across)
    seen = layer.visibility(key, given)
    pairs = seen.dense(50, 50)
    assert 0.1 < pairs.float().mean() < 0.9
    results = []
    for way in (
        lambda q, k, v: hashed(q, k, v, seen),
        lambda q, k, v: dense_attention(q, k, v, pairs, True, nn.Dropout(0))[0],
    ):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        y = way(*inputs)
        y.square().sum().backward()
        results.append((y, *(x.grad for x in inputs)))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, 1e-4)


def test_gradients_that_are_one_number():
    layer, query, key, value, given = attention_inputs(50, True, 2)
    results = []
    for ones in (lambda y: y.sum(), lambda y: (y * torch.ones_like(y)).sum()):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        ones(hashed(*inputs, layer.visibility(key, given))).backward()
        results.append([x.grad for x in inputs])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("dropped", [False, True])
def test_parts_of_attention_add_up(dropped):
    """Gradients of two parts of the keys, each by itself with the result of the whole, are those that autograd gives."""
    numbers = torch.Generator().manual_seed(1)
    query, key, value, asked = (torch.randn(2, 3, n, 8, generator=numbers) for n in (5, 12, 12, 5))
    bias = torch.where(torch.rand(2, 3, 5, 12, generator=numbers) < 0.3, -1e9, 0.0)
    factor = torch.rand(2, 3, 5, 12, generator=numbers).lt(0.8) / 0.8 if dropped else torch.ones(2, 3, 5, 12)
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    scores = inputs[0] @ inputs[1].mT + bias
    y = (scores.softmax(-1) * factor) @ inputs[2]
    y.backward(asked)
    total = scores.detach().logsumexp(-1)
    for factors in (factor,) if dropped else (factor, None):  # None is the fused way
        found, found_total = attend(query, key, value, bias, factors)
        assert_close(found, y.detach())
        assert_close(found_total, total)
        grads = []
        for part in (slice(0, 7), slice(7, 12)):
            rest = (bias[..., part], None if factors is None else factors[..., part], y.detach(), total)
            grads.append(attend_backward(asked, query, key[:, :, part], value[:, :, part], *rest))
        assert_close(grads[0][0] + grads[1][0], inputs[0].grad)
        for place in (1, 2):
            assert_close(torch.cat([part[place] for part in grads], dim=2), inputs[place].grad)


def test_identical_rounds_are_one_round(monkeypatch):
    rotations = LSHAttention.rotations
    monkeypatch.setattr(
        LSHAttention,
        "rotations",
        lambda self, rounds, *rest: rotations(self, 1, *rest).expand(rounds, -1, -1, -1),
    )
    with torch.no_grad():
        for model_class in (HfTinyReformerForCausalLM, HfTinyReformerForMaskedLM):
            model = build(model_class)
            assert_close(model(tokens(), num_hashes=4).logits, model(tokens(), num_hashes=1).logits)


@pytest.mark.parametrize("causal", [True, False])
def test_more_hashes_find_more_of_the_largest_scores(causal):
    recall = []
    for rounds in (1, 2, 4, 8):
        layer, query, key, _, given = attention_inputs(256, causal, rounds, across=not causal)
        scores = query @ key.mT
        hidden = torch.ones(256, 256, dtype=torch.bool).triu(0) if causal else torch.eye(256, dtype=torch.bool)
        best = scores.masked_fill(hidden, -1e9).topk(4).indices[:, :, 8:]
        recall.append(layer.visibility(key, given).dense(256, 256)[:, :, 8:].gather(-1, best).float().mean().item())
    assert recall == sorted(recall)
    assert recall[-1] > recall[0] + 0.2
    chance = layer.visibility(key, given).dense(256, 256).float().mean().item() * (2 if causal else 1)
    assert recall[-1] > 1.2 * chance


@pytest.mark.parametrize("causal", [True, False])
def test_what_keys_have_in_common_does_not_fill_a_bucket(causal):
    """Pairs of equal keys, 128 tokens apart, and a part of every key that is the same: it leaves half of the pairs in buckets
    so large that they are out of reach."""
    seen, largest = {}, {}
    for centred in (False, True):
        layer, query, _, _, given = attention_inputs(
            256, causal, 1, chunk=32, across=False, num_buckets=8, hash_centred_keys=centred
        )
        query[:, :, 128:] = query[:, :, :128]
        key = layer.keys_of(query + 4 * torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(1)))
        places = torch.arange(128, 256)
        seen[centred] = layer.visibility(key, given).dense(256, 256)[..., places, places - 128].float().mean().item()
        largest[centred] = nn.functional.one_hot(given.buckets[0].long()).sum(-2).max().item()
    assert seen[True] > seen[False] + 0.2, seen
    assert largest[True] < largest[False] / 2, largest


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_later_tokens_change_no_earlier_bit(attention, rounds):
    """Although they move the bounds of chunks. To look across buckets, as transformers does, is to see the future."""
    changed = tokens(2, 100)
    for across in (False, True):
        model = build(num_hashes=rounds, attend_across_buckets=across)
        model.set_attn_implementation(attention)
        expected = model(tokens(2, 100)).logits
        for place in (1, 13, 50, 99):
            changed[:, place:] = tokens(2, 100 - place, seed=place)
            found = model(changed).logits
            assert torch.equal(found[:, :place], expected[:, :place]) or across
            assert (found[:, place] - expected[:, place]).abs().max() > 0.1
            changed[:, place:] = tokens(2, 100)[:, place:]
            if across and place == 50:
                assert (found[:, :place] - expected[:, :place]).abs().max() > 0.1


@both_kinds
@torch.no_grad()
def test_padding_changes_no_token(model_class):
    """At the end, at the beginning, in the middle, and none, in both ways to compute attention."""
    model, ids = build(model_class), tokens(1, 20)
    expected = model(ids).logits
    for where in (slice(0, 20), slice(17, 37), [*range(5), *range(11, 26)]):
        padded, mask = torch.full((2, 37), 9), torch.ones(2, 37, dtype=torch.long)
        padded[0, where], padded[1], mask[0] = ids[0], tokens(1)[0], 0
        mask[0, where] = 1
        for attention in ("sdpa", "eager"):
            model.set_attn_implementation(attention)
            found = model(padded, attention_mask=mask).logits
            assert_close(found[:1, where], expected)
            assert_close(found[1:], model(tokens(1)).logits)
        model.set_attn_implementation("sdpa")
        states = model(padded, attention_mask=mask, output_hidden_states=True)
        for one, other in zip(states.hidden_states, model(ids, output_hidden_states=True).hidden_states, strict=True):
            assert_close(one[:1, where], other)


@both_kinds
def test_any_length(model_class):
    model = build(model_class).train()
    for length in (1, 2, 3, 4, 5, 8, 9, 13, 31, 128):
        ids = tokens(1, length)
        logits = model(ids).logits
        assert logits.shape == (1, length, 50)
        assert torch.isfinite(logits).all()
        logits.sum().backward()
    with pytest.raises(
        ValueError, match=r"129 tokens, but axial_pos_shape \[8, 16\] has 128 places: \[9, 16\] would do"
    ):
        model(tokens(1, 129))
    rotary = build(model_class, position_embedding_type="rotary")
    assert rotary(tokens(1, 200)).logits.shape == (1, 200, 50)


@torch.no_grad()
@both_kinds
def test_one_long_chunk_goes_through_sdpa(model_class, monkeypatch):
    """As --full_attention has it: no matrix of all pairs in each head, and the logits of the one that has it."""
    model = build(model_class, lsh_attn_chunk_length=64, local_attn_chunk_length=64)
    expected = model(tokens(), output_attentions=True).logits  # over all pairs
    calls, sdpa = [], nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or sdpa(*a, **k))
    assert_close(model(tokens()).logits, expected)
    assert len(calls) == model.config.num_hidden_layers


def test_feed_forward_pieces_are_exact():
    expected = build(chunk_size_feed_forward=0)(tokens()).logits
    for size in (1, 7, 74, 1000):
        assert_close(build(chunk_size_feed_forward=size)(tokens()).logits, expected)


def test_hashes_and_lengths_may_change_in_training():
    """The number of buckets is that of each batch, whatever came before."""
    model = build()
    expected = model(tokens()).logits
    model.train()
    for rounds, length in ((1, 37), (4, 37), (2, 100), (3, 20)):
        model(tokens(1, length), labels=tokens(1, length), num_hashes=rounds).loss.backward()
    assert model.config.num_buckets is None
    assert torch.equal(model.eval()(tokens()).logits, expected)


# Several processes


def distributed_gradients(*flags: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(num_hashes=1).train()
    with pytest.raises(ValueError, match="leave static_graph out"):
        DistributedDataParallel(copy.deepcopy(model), static_graph=True)(tokens(), labels=tokens())
    patient = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        parts = tokens(4, LENGTH, seed=step).split(1)
        torch.manual_seed(step)
        with wrapped.no_sync():
            wrapped(parts[rank], labels=parts[rank]).loss.backward()
        torch.manual_seed(step)
        wrapped(parts[2 + rank], labels=parts[2 + rank]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        patient(parts[rank], labels=parts[rank]).loss.backward()
    if rank == 0:
        torch.save(model.state_dict(), f"{flags[1]}.pt")
    # The wrappers go first: the last owner of the group waits for its threads, and a wrapper holds the lock they wait for.
    del wrapped, patient
    dist.destroy_process_group()


def test_two_processes_train_like_one(tmp_path):
    """With accumulation. The same seed before each batch gives the same rotations on both sides."""
    ended = [process.wait(400) for process in tiny_run.start_group(tmp_path / "model", 2, distributed_gradients)]
    assert [process.code for process in ended] == [0, 0], ended[0].err
    model = build(num_hashes=1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        for part in tokens(4, LENGTH, seed=step).split(1):
            torch.manual_seed(step)
            (model(part, labels=part).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = torch.load(tmp_path / "model.pt")
    assert max((found[name] - tensor).abs().max().item() for name, tensor in model.state_dict().items()) < 1e-6


def sharded_gradients(*flags: str) -> None:
    dist.init_process_group("gloo")
    mesh, model = init_device_mesh("cpu", (2,)), build(num_hashes=1).train()
    root = fully_shard(copy.deepcopy(model), mesh=mesh)
    torch.manual_seed(3)
    root(tokens(), labels=tokens()).loss.backward()
    found = {name: parameter.grad.full_tensor() for name, parameter in root.named_parameters()}
    assert largest(found, gradients(copy.deepcopy(model))) < 1e-6
    for layer in model.reformer.layers:
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match="shard the whole model at its root only"):
        fully_shard(model, mesh=mesh)(tokens(), labels=tokens())
    del root, model, layer, found, mesh
    dist.destroy_process_group()


def test_the_root_can_be_sharded_and_its_layers_cannot(tmp_path):
    ended = [process.wait(400) for process in tiny_run.start_group(tmp_path / "model", 2, sharded_gradients)]
    assert [process.code for process in ended] == [0, 0], ended[0].err


def test_layers_that_are_wrapped_one_by_one_are_refused():
    model = build().train()
    model.reformer.layers[1] = nn.Sequential(model.reformer.layers[1])
    with pytest.raises(ValueError, match="shard the whole model at its root only"):
        model(tokens(), labels=tokens())


# Language models


@torch.no_grad()
@pytest.mark.parametrize("position_embedding_type", ["axial", "rotary"])
def test_cached_logits(position_embedding_type):
    """One text has padding in front. From 9 chunks on, the number of buckets stays."""
    model = build(position_embedding_type=position_embedding_type, num_hashes=2)
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :10] = 0
    expected = model(ids, attention_mask=mask).logits
    outputs = model(ids[:, :50], attention_mask=mask[:, :50], use_cache=True)
    found = [outputs.logits]
    for start, end in ((50, 51), (51, 52), (52, 56), (56, 60)):
        outputs = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=outputs.past_key_values)
        found.append(outputs.logits)
    found = torch.cat(found, 1)
    assert_close(found[mask.bool()], expected[mask.bool()])


@torch.no_grad()
def test_generate():
    model = build(num_buckets=4, eos_token_id=None)
    ids = tokens(2, 12)
    settings = {"max_new_tokens": 20, "do_sample": False}
    found = model.generate(ids, **settings)
    assert found.shape == (2, 32)
    assert torch.equal(found, model.generate(ids, use_cache=False, **settings))
    best = model(found).logits[:, 11:-1].argmax(-1)
    assert torch.equal(best, found[:, 12:])
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), dim=1)
    mask = padded.ne(0).long()
    assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[:, 3:], found)
    assert model.generate(ids, num_beams=2, **settings).shape == (2, 32)


@torch.no_grad()
def test_generate_with_more_hashes():
    """All are in reach of 8 rounds of this text, and not of one."""
    model, prompt = build(num_hashes=1), tokens(1, 24)
    found = [model.generate(prompt, max_new_tokens=12, num_hashes=count, use_cache=False) for count in (1, 8)]
    assert torch.equal(found[0], model.generate(prompt, max_new_tokens=12, use_cache=False))
    model.config.num_hashes = 8
    assert torch.equal(found[1], model.generate(prompt, max_new_tokens=12, use_cache=False))
    assert not torch.equal(*found)


def test_gradient_checkpointing_says_that_it_has_no_effect(caplog):
    logging.Logger.warning_once.cache_clear()
    model = build().train()
    expected = gradients(model)
    assert not caplog.records
    model.gradient_checkpointing_enable()
    assert largest(gradients(model), expected) == 0
    assert "Gradient checkpointing has no effect on a Reformer" in caplog.text


@both_kinds
def test_the_loss_in_training_is_that_of_the_logits(model_class):
    model, labels = build(model_class, num_hashes=1, attn_layers=["local"]), tokens()
    labels[:, 20:25] = -100
    expected = model(tokens(), labels=labels)
    assert expected.logits.shape == (2, LENGTH, 50)
    found = model.train()(tokens(), labels=labels)
    assert found.logits is None
    assert_close(found.loss, expected.loss)
    if model.causal:
        by_hand = nn.functional.cross_entropy(expected.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        assert_close(expected.loss, by_hand)
    assert_close(model(tokens(), labels=labels, num_items_in_batch=7).loss * 7, found.loss * labels_of(model, labels))


def labels_of(model, labels: Tensor) -> int:
    return int((labels[:, 1:] if model.causal else labels).ne(-100).sum())


def test_a_head_that_does_not_fit_is_refused(tmp_path):
    build().save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is HfTinyReformerForCausalLM
    assert HfTinyReformerModel.from_pretrained(tmp_path).config.is_decoder
    with pytest.raises(ValueError, match="this model is for HfTinyReformerForCausalLM"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_depths():
    found = depths(build())
    assert found["reformer.embeddings.row_embeddings.weight"] == 0
    assert found["reformer.layers.2.attention.qkv.weight"] == 3
    assert found["lm_head.bias"] is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": 33}, "half of it goes to each of the two streams"),
        ({"hidden_size": 34}, "width of 17 does not divide into 2 heads: change hidden_size"),
        ({"attn_layers": ["lsh", "full"]}, "list one of"),
        ({"num_buckets": 5}, "even number"),
        ({"lsh_attn_chunk_length": 0}, "give 1 or more"),
        ({"axial_pos_shape": [4]}, "two numbers"),
        ({"position_embedding_type": "learned"}, "choose one of"),
        ({"position_embedding_type": "rotary", "attention_head_size": 3}, "even size: change attention_head_size"),
    ],
)
def test_a_config_that_cannot_work(changes, message):
    with pytest.raises(ValueError, match=message):
        HfTinyReformerConfig(**{**SIZES, **changes})


@torch.no_grad()
def test_many_chunks():
    model = build(position_embedding_type="rotary", lsh_attn_chunk_length=1, attn_layers=["lsh"])
    assert torch.isfinite(model(tokens(1, 2049)).logits).all()


def test_the_function_is_used():
    """What is tested above is not the ordinary way."""
    seen = []
    model = build().train()
    model.reformer.norm.register_forward_pre_hook(lambda _, args: seen.append(type(args[0].grad_fn).__name__))
    model(tokens(), labels=tokens())
    assert seen == [f"{Reversible.__name__}Backward"]
