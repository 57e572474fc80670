"""Reformer (Kitaev et al., 2020): hashing attention, chunked feed-forward and reversible layers for long inputs."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, MaskedLMOutput
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple

from .heads import POOLING, SequenceClassification, TokenClassification, count_items
from .layers import (
    Dropout,
    FeedForward,
    HfTinyConfig,
    cross_entropy,
    linear_cross_entropy,
    rotary_angles,
    rotate,
)

LAYERS = ("lsh", "local")
POSITIONS = ("axial", "rotary")
THETA = 10_000.0  # of rotary positions
ALONE = -1e5  # a token's score for itself: counts only where nothing else is in reach
FAR = 1e9  # times at least 1/4: what a pair that is out of reach loses of its score
LEAST = -50.0  # the logarithm of the least weight: smaller ones are lost in the sum, and slow to compute with
FACTOR = 6  # a hash of more than 2 ** 6 buckets is made of several


@strict
class HfTinyReformerConfig(HfTinyConfig):
    """Half of `hidden_size` goes to each of the two streams of the reversible layers.

    attn_layers: the kind of attention of each layer: "lsh" or "local".
    attention_head_size: half of `hidden_size` / heads when None.
    position_embedding_type: "axial" (learned, for lengths up to the product of `axial_pos_shape`) or "rotary".
    num_hashes: rounds of hashing in an LSH layer; `forward` takes another number, too.
    num_buckets: even, or a list of even factors; by the length of each text when None.
    attend_across_buckets: in a causal LSH layer, a token sees all that is before it in its chunk and in the chunk before, as
        in transformers; otherwise only `lsh_attn_chunk_length` tokens of its own bucket before it. Chunks shift with every
        token, also with those to come: a model that looks across buckets sees a little of the future.
    chunk_size_feed_forward: how many tokens the feed-forward layer takes at a time; all when 0.
    is_decoder: a token sees those before it only. None lets the head decide.
    classifier_pooling, classifier_dropout: as in ELECTRA.
    """

    model_type = "hf_tiny_reformer"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 320
    hidden_size: int = 512
    attn_layers: list[str] | tuple[str, ...] = ("local", "lsh", "local", "lsh", "local", "lsh")
    num_attention_heads: int = 4
    attention_head_size: int | None = None
    intermediate_size: int = 1024
    hidden_act: str = "relu"
    hidden_dropout_prob: float | int = 0.05
    attention_probs_dropout_prob: float | int = 0.0
    position_embedding_type: str = "axial"
    axial_pos_shape: list[int] | tuple[int, ...] = (64, 64)
    lsh_attn_chunk_length: int = 64
    local_attn_chunk_length: int = 64
    num_hashes: int = 1
    num_buckets: int | list[int] | tuple[int, ...] | None = None
    attend_across_buckets: bool = False
    chunk_size_feed_forward: int = 512
    is_decoder: bool | None = None
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    classifier_pooling: str = "mean"
    classifier_dropout: float | int | None = None

    def __post_init__(self, **kwargs):
        kwargs.pop("num_hidden_layers", None)
        self.attn_layers, self.axial_pos_shape = list(self.attn_layers), list(self.axial_pos_shape)
        super().__post_init__(**kwargs)
        if not self.attn_layers or not set(self.attn_layers) <= set(LAYERS):
            raise ValueError(f"attn_layers={self.attn_layers}: list one of {LAYERS} for each layer.")
        if self.position_embedding_type not in POSITIONS:
            raise ValueError(f"position_embedding_type={self.position_embedding_type!r}: choose one of {POSITIONS}.")
        if self.classifier_pooling not in POOLING:
            raise ValueError(f"classifier_pooling={self.classifier_pooling!r}: choose one of {POOLING}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is not known: choose relu, gelu or another of ACT2FN.")
        if self.hidden_size % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be even: half of it goes to each of the two streams."
            )
        if self.attention_head_size is None and self.hidden_size // 2 % self.num_attention_heads:
            raise ValueError(
                f"A stream of {self.hidden_size // 2} (half of hidden_size) does not divide into {self.num_attention_heads} "
                "heads: change hidden_size or num_attention_heads, or give attention_head_size."
            )
        if self.position_embedding_type == "rotary" and self.head_size % 2:
            raise ValueError(f"Rotary positions need heads of an even size, not {self.head_size}.")
        if len(self.axial_pos_shape) != 2 or min(self.axial_pos_shape) < 1:
            raise ValueError(f"axial_pos_shape={self.axial_pos_shape}: give two numbers of 1 or more.")
        for name in ("lsh_attn_chunk_length", "local_attn_chunk_length", "num_hashes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give 1 or more.")
        if any(factor < 2 or factor % 2 for factor in self.bucket_factors or []):
            raise ValueError(f"num_buckets={self.num_buckets}: give an even number, or a list of them.")

    @property
    def num_hidden_layers(self) -> int:
        return len(self.attn_layers)

    @property
    def head_size(self) -> int:
        return self.attention_head_size or self.hidden_size // 2 // self.num_attention_heads

    @property
    def bucket_factors(self) -> list[int] | None:
        return [self.num_buckets] if isinstance(self.num_buckets, int) else self.num_buckets


@dataclass
class Given:
    """What the layers of one forward pass have in common.

    lengths (batch,): real tokens; padding comes after them.
    places (batch, length): where each token stood before padding was moved to the end, when it was.
    angles: of rotary positions.
    known (batch, past + length): which tokens are real, and `past_key_values`, when decoding with a cache.
    dense: every pair of tokens, with attention weights.
    """

    lengths: Tensor
    places: Tensor | None
    angles: tuple[Tensor, Tensor] | None
    num_hashes: int
    seed: int
    training: bool
    dense: bool
    known: Tensor | None = None
    past_key_values: Cache | None = None


def normal_numbers(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Standard normal numbers that depend on the seed alone: on every device the same, and no random stream moves. More
    rows (in the first dimension) leave those before them as they are."""
    bits = torch.arange(torch.Size(shape).numel(), device=device) + (seed * 0x9E3779B1 & 0xFFFFFFFF)
    for factor in (0x7FEB352D, 0x46A7F1B5, 0x5BD1E995):  # a hash of 32 bits
        bits = (bits ^ (bits >> 16)) * factor & 0xFFFFFFFF
    uniform = ((bits ^ (bits >> 15)).double() + 0.5) / 2**32
    return torch.special.ndtri(uniform).float().view(shape)


# Attention in chunks


@dataclass
class Reach:
    """Which tokens see which. Rows are (text, head); places are 0 ... N, a whole number of chunks; place N is nowhere.

    order (rounds, rows, N): the places in the order of the chunks.
    windows (rounds, rows, (chunks + before + after) * chunk): those of the keys, with the chunks that look beyond the ends.
    near: for each round, features (rows, N + 1, k) of queries and of keys: a pair is near where |query @ key| <= half.
    narrow: of the window of a chunk, only what is near counts.
    hidden: features, again: a pair is out of sight where query @ key > 0.
    alone: a token sees itself only when there is nothing else.
    """

    chunk: int
    before: int
    after: int
    order: Tensor
    windows: Tensor
    near: list[tuple[Tensor, Tensor]]
    half: float
    narrow: bool
    hidden: tuple[Tensor, Tensor] | None
    alone: bool

    def dense(self) -> Tensor:
        """(rows, N, N): the pairs that meet in some round."""
        rows, places = self.order.shape[1:]
        met = torch.ones(rows, places, places, dtype=torch.bool, device=self.order.device)
        if self.near:
            met = torch.stack([(query[:, :-1] @ key[:, :-1].mT).abs() <= self.half for query, key in self.near]).any(0)
        if self.hidden is not None:
            query, key = self.hidden
            met &= query[:, :-1] @ key[:, :-1].mT <= 0
        return met


def features(*columns: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*columns), dim=-1).float()


def windows_of(order: Tensor, chunk: int, first: Tensor | None, after: int) -> Tensor:
    """`order` with the chunk `first` (nowhere when None) before it, and `after` chunks of nowhere behind it."""
    nowhere = order.new_full((*order.shape[:-1], chunk), order.shape[-1])
    return torch.cat((nowhere if first is None else first, order, *[nowhere] * after), dim=-1)


class Round:
    """One round of `ChunkedAttention`: everything in the order of its chunks, and the scores, block by block."""

    def __init__(self, reach: Reach, index: int, query: Tensor, key: Tensor, value: Tensor):
        self.reach, self.first, self.buffers = reach, index == 0, {}
        rows, places, _ = query.shape
        offsets = torch.arange(rows, device=query.device)[:, None]
        order, windows = reach.order[index], reach.windows[index]
        self.order = (order + offsets * places).flatten()
        self.windows = (windows.clamp(max=places - 1) + offsets * places).flatten()
        self.query, self.key, self.value = self.sort(query), self.look(key), self.look(value)
        order, windows = (order + offsets * (places + 1)).flatten(), (windows + offsets * (places + 1)).flatten()

        def test(kind: str, query: Tensor, key: Tensor) -> tuple[str, Tensor, Tensor]:
            return kind, self.chunks(query.flatten(0, 1)[order], rows), self.chunks(key.flatten(0, 1)[windows], rows)

        self.tests = [] if reach.hidden is None else [test("hidden", *reach.hidden)]
        if reach.narrow:
            self.tests.append(test("near", *reach.near[index]))
        self.tests += [test("met", *pair) for pair in reach.near[:index]]  # counts in the round where it met first

    def chunks(self, x: Tensor, rows: int) -> Tensor:
        return x.view(rows, -1, self.reach.chunk, *x.shape[1:])

    def sort(self, x: Tensor) -> Tensor:
        """(rows, N, size) to (rows, chunks, chunk, size)."""
        return self.chunks(x.flatten(0, 1).index_select(0, self.order), len(x))

    def look(self, x: Tensor) -> Tensor:
        """(rows, N, size) to (rows, before + chunks + after, chunk, size)."""
        return self.chunks(x.flatten(0, 1).index_select(0, self.windows), len(x))

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """The same memory for every block: new memory costs more time than most of what is done in it."""
        if name not in self.buffers or self.buffers[name].shape != shape:
            self.buffers[name] = like.new_empty(shape)
        return self.buffers[name]

    def blocks(self) -> Iterator[tuple[tuple[slice, slice], Tensor, Tensor, Tensor, Tensor]]:
        """(which rows and chunks, queries, keys, values, scores): as many chunks at a time as stay in a CPU's cache. What is
        yielded lives until the next block."""
        reach = self.reach
        rows, chunks, chunk, _ = self.query.shape
        span = 1 + reach.before + reach.after
        most = max(1, (2**17 if self.query.device.type == "cpu" else 2**26) // (span * chunk**2))
        columns, heads = min(chunks, most), max(1, most // chunks)
        for block in (
            (slice(row, min(row + heads, rows)), slice(column, min(column + columns, chunks)))
            for row in range(0, rows, heads)
            for column in range(0, chunks, columns)
        ):

            def window(name: str, x: Tensor, block: tuple[slice, slice] = block) -> Tensor:
                """(block, keys, size)"""
                start, end = block[1].start, block[1].stop
                parts = [x[block[0], start + offset : end + offset] for offset in range(span)]
                shape = (*parts[0].shape[:2], span * chunk, x.shape[-1])
                return torch.cat(parts, dim=2, out=self.buffer(name, shape, x)).flatten(0, 1)

            query = self.query[block].flatten(0, 1)
            key, value = window("key", self.key), window("value", self.value)
            shape = (len(query), chunk, span * chunk)
            scores = torch.bmm(query, key.mT, out=self.buffer("scores", shape, query)).float()
            for number, (kind, left, right) in enumerate(self.tests):
                right = window(f"test {number}", right)
                loss = torch.bmm(left[block].flatten(0, 1), right.mT, out=self.buffer("loss", shape, left))
                if kind == "near":
                    loss = loss.abs_().sub_(reach.half)
                elif kind == "met":
                    loss = loss.abs_().neg_().add_(reach.half)
                scores.add_(loss.clamp_(min=0), alpha=-FAR)
            if reach.alone:
                own = scores[:, :, reach.before * chunk : (reach.before + 1) * chunk]
                own.diagonal(dim1=1, dim2=2).fill_(ALONE if self.first else -FAR)
            yield block, query, key, value, scores


class ChunkedAttention(torch.autograd.Function):
    """Softmax over all keys that are near in some round; a pair that meets in several rounds counts once, which is what the
    paper's division by the count of its meetings comes to.

    The scores of all tokens never exist: they are made again in backward, from the sums of each token over all rounds.
    Query, key and value: (rows, N, size).
    """

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, reach: Reach, dropout: float, seed: int) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            result = torch.zeros_like(value, dtype=torch.float)  # (rows, N, size)
            total = result.new_full(result.shape[:2], -2 * FAR)  # log of the sum of exponents
            noise = Noise(dropout, seed, query.device)
            for index in range(len(reach.order)):
                step = Round(reach, index, query, key, value)
                found, sums = step.query.new_empty(step.query.shape), result.new_empty(step.query.shape[:3])
                for block, _, _, values, scores in step.blocks():
                    top = scores.amax(-1, keepdim=True)
                    weights = scores.sub_(top).clamp_(min=LEAST).exp_()
                    sums[block] = weights.sum(-1).log_().add_(top.squeeze(-1)).view(sums[block].shape)
                    if dropout:
                        weights.mul_(noise.like(weights))
                    lengths = sums[block].flatten(0, 1)[:, :, None] - top  # log of the sum of the weights
                    torch.bmm(weights.to(values.dtype), values, out=found[block].flatten(0, 1)).mul_(
                        lengths.neg().exp()
                    )
                back = torch.empty_like(step.order).scatter_(
                    0, step.order, torch.arange(len(step.order)).to(step.order)
                )
                sums = sums.flatten()[back].view_as(total)
                found = found.flatten(0, 2).index_select(0, back).view_as(result)
                if index == 0:
                    result, total = found.float(), sums
                else:
                    old, total = total, torch.logaddexp(total, sums)
                    result.mul_((old - total).exp_()[..., None]).add_(found * (sums - total).exp_()[..., None])
            ctx.save_for_backward(query, key, value, result, total)
            ctx.reach, ctx.dropout, ctx.seed = reach, dropout, seed
            return result.to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, total = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grads = [torch.zeros_like(x, dtype=torch.float).flatten(0, 1) for x in (query, key, value)]
            mean = (grad * result).sum(-1, keepdim=True)  # (rows, N, 1): of the weights' gradients, by weight
            noise = Noise(ctx.dropout, ctx.seed, grad.device)
            for index in range(len(ctx.reach.order)):
                step = Round(ctx.reach, index, query, key, value)
                grad_s, mean_s, total_s = step.sort(grad), step.sort(mean), step.sort(total[..., None])
                query_grad = torch.empty_like(step.query)
                key_grad, value_grad = torch.zeros_like(step.key), torch.zeros_like(step.value)
                for block, queries, keys, values, scores in step.blocks():
                    weights = scores.sub_(total_s[block].flatten(0, 1)).clamp_(min=LEAST).exp_()
                    out = grad_s[block].flatten(0, 1)
                    slope = torch.bmm(out, values.mT, out=step.buffer("slope", scores.shape, out)).float()
                    kept = weights
                    if ctx.dropout:
                        factor = noise.like(weights)
                        kept, slope = weights * factor, slope.mul_(factor)
                    spare = step.buffer("spare", values.shape, out)
                    add_windows(value_grad, block, torch.bmm(kept.to(out.dtype).mT, out, out=spare))
                    slope = slope.sub_(mean_s[block].flatten(0, 1)).mul_(weights).to(out.dtype)
                    torch.bmm(slope, keys, out=query_grad[block].flatten(0, 1))
                    add_windows(key_grad, block, torch.bmm(slope.mT, queries, out=spare))
                places = (step.order, step.windows, step.windows)
                for known, place, new in zip(grads, places, (query_grad, key_grad, value_grad), strict=True):
                    known.index_add_(0, place, new.flatten(0, 2).float())
            return *(x.view_as(query).to(query.dtype) for x in grads), None, None, None


def add_windows(total: Tensor, block: tuple[slice, slice], parts: Tensor) -> None:
    """Add `parts` (block, keys, size) to the chunks of `total` (rows, chunks, chunk, size) that the keys came from."""
    rows, columns = block
    chunk = total.shape[2]
    for offset in range(parts.shape[1] // chunk):
        place = total[rows, columns.start + offset : columns.stop + offset]
        place += parts[:, offset * chunk : (offset + 1) * chunk].view(place.shape)


class Noise:
    """The factors of dropout, the same ones every time for a seed."""

    def __init__(self, p: float, seed: int, device: torch.device):
        self.p = p
        self.generator = torch.Generator(device).manual_seed(seed) if p else None

    def like(self, x: Tensor) -> Tensor:
        return torch.empty_like(x).bernoulli_(1 - self.p, generator=self.generator).div_(1 - self.p)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, alone: bool, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """Softmax over what is `seen` (..., query, key), with the weights. The last query is the last key's token."""
    scores = (query @ key.mT).float().masked_fill(~seen, -FAR)
    if alone:
        shift = seen.shape[-1] - seen.shape[-2]
        itself = torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).tril(shift).triu(shift)
        scores = scores.masked_fill(itself, ALONE)
    weights = dropout(scores.softmax(-1).to(value.dtype))
    return weights @ value, weights


class ReformerAttention(nn.Module):
    """What both kinds have in common. Tensors are (batch, heads, length, size) in between."""

    parts: int  # of the projection: (query and key in one, value) or (query, key, value)
    alone: bool

    def __init__(self, config: HfTinyReformerConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.head_size = config.num_attention_heads, config.head_size
        width = self.num_heads * self.head_size
        self.qkv = nn.Linear(config.hidden_size // 2, self.parts * width)
        self.out = nn.Linear(width, config.hidden_size // 2)
        self.dropout = Dropout(config.attention_probs_dropout_prob)

    def keys_of(self, key: Tensor) -> Tensor:
        raise NotImplementedError

    def reach(self, query: Tensor, given: Given) -> Reach:
        raise NotImplementedError

    def seen_by_new(self, query: Tensor, key: Tensor, given: Given) -> Tensor:
        """(batch, heads or 1, new, past + new): what new tokens see of those in the cache and of each other."""
        raise NotImplementedError

    def forward(self, x: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        projected = self.qkv(x).unflatten(-1, (self.parts, self.num_heads, self.head_size)).unbind(2)
        query, key, value = projected[0], projected[-2], projected[-1]  # (batch, length, heads, size)
        if given.angles is not None:
            query = rotate(query, *given.angles)
            key = rotate(key, *given.angles) if self.parts == 3 else query
        query, key, value = (part.transpose(1, 2) for part in (query, self.keys_of(key), value))
        query, key = query.to(value.dtype), key.to(value.dtype)
        if given.known is not None:
            y, weights = self.decode(query, key, value, given)
        elif given.dense:
            reach = self.reach(query, given)
            seen = reach.dense().view(*query.shape[:2], *reach.order.shape[-1:] * 2)
            seen = seen[..., : x.shape[1], : x.shape[1]]
            y, weights = dense_attention(query, key, value, seen, self.alone, self.dropout)
        else:
            reach, weights = self.reach(query, given), None
            more = reach.order.shape[-1] - x.shape[1]
            rows = (F.pad(part, (0, 0, 0, more)).flatten(0, 1) for part in (query, key, value))
            dropout = self.dropout.p if given.training else 0.0
            y = ChunkedAttention.apply(*rows, reach, dropout, given.seed + self.layer_idx)[:, : x.shape[1]].unflatten(
                0, query.shape[:2]
            )
        if given.past_key_values is not None and given.known is None:
            self.remember(key, value, given)
        return self.out(y.transpose(1, 2).flatten(2)), weights

    def remember(self, key: Tensor, value: Tensor, given: Given) -> None:
        """Put keys and values into the cache, in the order of the input."""
        if given.places is not None:
            places = given.places[:, None, :, None].expand_as(key)
            key, value = (torch.zeros_like(part).scatter(2, places, part) for part in (key, value))
        given.past_key_values.update(key, value, self.layer_idx)

    def decode(self, query: Tensor, key: Tensor, value: Tensor, given: Given) -> tuple[Tensor, Tensor]:
        key, value = given.past_key_values.update(key, value, self.layer_idx)
        seen = self.seen_by_new(query, key, given)
        places = torch.arange(key.shape[2], device=key.device)
        seen = seen & given.known[:, None, None] & (places <= places[-query.shape[2] :, None])
        return dense_attention(query, key, value, seen, self.alone, self.dropout)


class LocalAttention(ReformerAttention):
    """A token sees its chunk of the text and the one before, and without `is_decoder` also the one behind."""

    parts = 3
    alone = False

    def keys_of(self, key: Tensor) -> Tensor:
        return key * self.head_size**-0.5

    def reach(self, query: Tensor, given: Given) -> Reach:
        batch, heads, length, _ = query.shape
        causal, chunk = self.config.is_decoder, min(self.config.local_attn_chunk_length, length)
        chunks = -(-length // chunk)
        places = torch.arange(chunks * chunk + 1, device=query.device)
        lengths = given.lengths.repeat_interleave(heads)[:, None]
        order = places[:-1].expand(1, batch * heads, -1)
        before, after = (1, 0 if causal else 1) if chunks > 1 else (0, 0)
        last = places[None] if causal else lengths - 1
        near = (features(places // chunk, places.new_ones(())), features(places.new_ones(()), -(places // chunk)))
        return Reach(
            chunk,
            before,
            after,
            order,
            windows_of(order, chunk, None, after) if before else order,
            [tuple(x.expand(batch * heads, -1, -1) for x in near)],
            half=1.5,
            narrow=False,
            hidden=visible(last, places, batch * heads),
            alone=False,
        )

    def seen_by_new(self, query: Tensor, key: Tensor, given: Given) -> Tensor:
        chunks = (given.known.cumsum(1) - 1) // self.config.local_attn_chunk_length
        return (chunks[:, None, -query.shape[2] :, None] - chunks[:, None, None]) <= 1


def visible(last: Tensor, places: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Features for `Reach.hidden`: no key behind the place `last` (rows or 1, N + 1 or 1) of the query."""
    place = torch.where(places == len(places) - 1, 2 * len(places), places)  # nowhere is behind all
    query = features(-last.expand(rows, len(places)), places.new_ones(()))
    return query, features(places.new_ones(()), place).expand(rows, -1, -1)


class LSHAttention(ReformerAttention):
    """Query and key are one, so that tokens with similar ones fall into the same bucket of a random hash. Sorted by bucket,
    a token sees what is near: see `attend_across_buckets` of the config."""

    parts = 2
    alone = True

    def keys_of(self, key: Tensor) -> Tensor:
        """Of length 1, as they are compared with queries of any length."""
        key = key.float()
        key = key * torch.rsqrt(key.square().mean(-1, keepdim=True) + 1e-6)
        return key * self.head_size**-0.5

    @property
    def across(self) -> bool:
        return self.config.attend_across_buckets or not self.config.is_decoder

    def reach(self, query: Tensor, given: Given) -> Reach:
        batch, heads, length, _ = query.shape
        rows, causal, chunk = batch * heads, self.config.is_decoder, self.config.lsh_attn_chunk_length
        lengths = given.lengths.repeat_interleave(heads)[:, None]  # (rows, 1)
        if length <= 2 * chunk:  # all is in reach
            places = torch.arange(length + 1, device=query.device)
            order = places[:-1].expand(1, rows, -1)
            hidden = visible(places[None] if causal else lengths - 1, places, rows)
            return Reach(length, 0, 0, order, order, [], 0.0, False, hidden, True)
        chunks = -(-length // chunk)
        if chunks > 2048:  # chunk numbers are multiplied as floats
            raise ValueError(
                f"{length} tokens are {chunks} chunks of lsh_attn_chunk_length={chunk}, and at most 2048 are possible: make "
                f"them {-(-length // 2048)} or longer."
            )
        size = chunks * chunk
        places = torch.arange(size + 1, device=query.device)
        buckets = self.buckets(query, given).flatten(0, 1).movedim(-1, 0)  # (rounds, rows, length)
        padding = places[:-1] >= lengths
        buckets = F.pad(buckets, (0, size - length)).masked_fill(padding, 2**20)
        order = (buckets * size + places[:-1]).sort(-1).values % size
        ranks = torch.empty_like(order).scatter_(-1, order, places[:-1].expand_as(order))
        used = (lengths + chunk - 1).div(chunk, rounding_mode="floor").clamp(min=1)  # chunks with real tokens
        one = places.new_ones(())
        if not self.across:
            # Another bucket is further away than the chunk's length. Two chunks are one bucket, and half as long.
            where = (ranks + buckets.clamp(max=2**14) * chunk).float() / torch.where(used <= 2, 2.0, 1.0)
            where = F.pad(where, (0, 1), value=2.0**23)
            middle = (chunk + 0.5) / 2  # from 1/4 to chunk + 1/4 before the query
            near = [(features(x - middle, one), features(one, -x)) for x in where]
            windows = windows_of(order, chunk, None, 0)
            return Reach(chunk, 1, 0, order, windows, near, middle - 0.25, True, None, True)
        own = F.pad(ranks // chunk, (0, 1), value=-9)
        previous = torch.where(own == 0, used - 1, own - 1)
        near = [(features(a * b, -(a + b), one), features(one, a, a * a)) for a, b in zip(own, previous, strict=True)]
        first = (used - 1) * chunk + places[:chunk]  # the last chunk is before the first one
        first = torch.where(used == 1, size, order.gather(-1, first.expand(len(order), -1, -1)))
        hidden = visible(places[None] if causal else lengths - 1, places, rows)
        return Reach(chunk, 1, 0, order, windows_of(order, chunk, first, 0), near, 0.5, False, hidden, True)

    def buckets(self, x: Tensor, given: Given) -> Tensor:
        """The bucket of x (batch, heads, length, size) in each round: (batch, heads, length, rounds)."""
        x, rounds, chunk = x.detach().float(), given.num_hashes, self.config.lsh_attn_chunk_length
        used = (given.lengths + chunk - 1).div(chunk, rounding_mode="floor")[:, None, None, None]
        most = -(-x.shape[2] // chunk)
        if self.config.bucket_factors is None:
            wanted, most = (2 * used, 2 * most) if self.across else (used, most)
            power = torch.frexp(wanted.clamp(min=1).float()).exponent - 1  # the largest with 2 ** power <= wanted
            sizes = range(0, most.bit_length(), FACTOR)
            factors = [2 ** (power - done).clamp(0, FACTOR) for done in sizes]
            columns = [2 ** min(FACTOR, most.bit_length() - 1 - done) // 2 for done in sizes]
        else:
            factors = [torch.full_like(used, factor) for factor in self.config.bucket_factors]
            columns = [factor // 2 for factor in self.config.bucket_factors]
        result, scale = 0, torch.ones_like(used)
        for index, (factor, count) in enumerate(zip(factors, columns, strict=True)):
            if count == 0:
                continue
            rotations = self.rotations(count, rounds, index, given.seed, x.device)
            turned = (x @ rotations.permute(2, 3, 1, 0).flatten(2)).unflatten(-1, (rounds, count))
            unused = torch.arange(count, device=x.device) >= (factor // 2)[..., None]
            turned = turned.masked_fill(unused, 0.0)
            best = turned.abs().argmax(-1, keepdim=True)
            negative = turned.gather(-1, best).squeeze(-1) < 0
            result = result + scale * (best.squeeze(-1) + negative * (factor // 2)) * (factor > 1)
            scale = scale * factor
        if not self.across:
            result = result * (used > 2)
        return result

    def rotations(self, count: int, rounds: int, index: int, seed: int, device: torch.device) -> Tensor:
        """(count, rounds, heads, size)"""
        seed = (seed * 1009 + self.layer_idx) * 1009 + index
        return normal_numbers((count, rounds, self.num_heads, self.head_size), seed, device)

    def seen_by_new(self, query: Tensor, key: Tensor, given: Given) -> Tensor:
        """The same as without a cache while the number of buckets stays. Across buckets: all."""
        if self.across:
            return given.known[:, None, None]
        new, chunk = query.shape[2], self.config.lsh_attn_chunk_length
        buckets = self.buckets(key, given).movedim(-1, 2)  # (batch, heads, rounds, past + new)
        places = torch.arange(key.shape[2], device=key.device)
        same = (buckets[..., -new:, None] == buckets[..., None, :]) & given.known[:, None, None, None]
        same &= places <= places[-new:, None]
        between = same.flip(-1).cumsum(-1).flip(-1) - same.long()  # of the same bucket, with the query
        reach = torch.where(given.lengths <= 2 * chunk, 2 * chunk, chunk)[:, None, None, None, None]
        return (same & (between <= reach)).any(2)


ATTENTION = {"lsh": LSHAttention, "local": LocalAttention}


# Reversible layers


@contextmanager
def random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """The random numbers of a seed inside, and the user's own ones untouched outside."""
    other = device.type != "cpu"
    with torch.random.fork_rng([device] if other else [], device_type=device.type if other else "cuda"):
        torch.default_generator.manual_seed(seed)
        if other:
            torch.get_device_module(device).manual_seed(seed)
        yield


class ReformerBlock(nn.Module):
    """Attention for one stream, feed-forward for the other: y1 = x1 + attend(x2), y2 = x2 + feed(y1)."""

    def __init__(self, config: HfTinyReformerConfig, layer_idx: int):
        super().__init__()
        size = config.hidden_size // 2
        self.layer_idx = layer_idx
        self.chunk_size = config.chunk_size_feed_forward
        self.attention_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.attention = ATTENTION[config.attn_layers[layer_idx]](config, layer_idx)
        self.feed_forward_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config, size, config.intermediate_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def seeded(self, given: Given, x: Tensor, part: int) -> AbstractContextManager:
        return random_numbers(given.seed + 2 * self.layer_idx + part, x.device) if given.training else nullcontext()

    def attend(self, x: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        with self.seeded(given, x, 0):
            y, weights = self.attention(self.attention_norm(x.to(self.attention_norm.weight.dtype)), given)
            return self.dropout(y), weights

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tokens of x (batch, length, size) in pieces for `feed_piece`."""
        x = x.flatten(0, 1)
        return x.split(self.chunk_size or len(x))

    def feed_piece(self, x: Tensor) -> Tensor:
        return self.dropout(self.feed_forward(self.feed_forward_norm(x.to(self.feed_forward_norm.weight.dtype))))

    def feed(self, x: Tensor, given: Given) -> Tensor:
        with self.seeded(given, x, 1):
            return torch.cat([self.feed_piece(piece) for piece in self.pieces(x)]).view_as(x)

    def forward(self, x1: Tensor, x2: Tensor, given: Given) -> tuple[Tensor, Tensor, Tensor | None]:
        y, weights = self.attend(x2, given)
        y1 = x1 + y
        return y1, x2 + self.feed(y1, given), weights


class Reversible(torch.autograd.Function):
    """All blocks; only their output is kept. Backward computes each block's input from its output, once more with a graph.

    The parameters are inputs, so that they get their gradients like those of any other function.
    """

    @staticmethod
    def forward(ctx, x: Tensor, blocks: nn.ModuleList, given: Given, *parameters: Tensor) -> Tensor:
        device = x.device.type
        ctx.blocks, ctx.given, ctx.parameters = blocks, given, parameters
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), False)
        y1, y2 = x.chunk(2, dim=-1)
        with torch.autocast(*ctx.autocast):
            for block in blocks:
                y1, y2, _ = block(y1, y2, given)
        y = torch.cat((y1, y2), dim=-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        y1, y2 = y.chunk(2, dim=-1)
        grad1, grad2 = grad.chunk(2, dim=-1)
        wanted = {id(p): None for p, needed in zip(ctx.parameters, ctx.needs_input_grad[3:], strict=True) if needed}

        def differentiate(y: Tensor, x: Tensor, module_parameters: list[Tensor], grad: Tensor) -> Tensor:
            """The gradient of x; those of parameters are added to what is known."""
            inputs = [p for p in module_parameters if id(p) in wanted]
            x_grad, *found = torch.autograd.grad(y, [x, *inputs], grad.to(y.dtype), allow_unused=True)
            for parameter, new in zip(inputs, found, strict=True):
                known = wanted[id(parameter)]
                wanted[id(parameter)] = known if new is None else new if known is None else known.add_(new)
            return x_grad

        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            for block in reversed(ctx.blocks):
                parameters = list(block.parameters())
                with block.seeded(ctx.given, y1, 1):
                    fed, grads = [], []
                    for piece, piece_grad in zip(block.pieces(y1), block.pieces(grad2), strict=True):
                        piece = piece.detach().requires_grad_()
                        fed.append(block.feed_piece(piece))
                        grads.append(differentiate(fed[-1], piece, parameters, piece_grad))
                        fed[-1] = fed[-1].detach()
                y2 = y2 - torch.cat(fed).view_as(y2)
                grad1 = grad1 + torch.cat(grads).view_as(grad1)
                x2 = y2.detach().requires_grad_()
                attended, _ = block.attend(x2, ctx.given)
                grad2 = grad2 + differentiate(attended, x2, parameters, grad1)
                y1 = y1 - attended.detach()
        found = [wanted.get(id(parameter)) for parameter in ctx.parameters]
        return torch.cat((grad1, grad2), dim=-1), None, None, *found


def refuse_what_cannot_work(blocks: nn.ModuleList) -> None:
    """Each of these would train with wrong gradients, or fail far from the cause."""
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is not None and wrapper.static_graph:
        raise ValueError(
            "DistributedDataParallel(static_graph=True) does not count the gradients that reversible layers give to their "
            "parameters all at once: leave static_graph out."
        )
    parameters = list(blocks.parameters())
    if not all(isinstance(block, ReformerBlock) for block in blocks) or any(isinstance(p, DTensor) for p in parameters):
        raise ValueError(
            "The layers are wrapped or sharded one by one, but all reversible layers run backward as one function: shard "
            "the whole model at its root only."
        )


# Models


class ReformerEmbeddings(nn.Module):
    def __init__(self, config: HfTinyReformerConfig):
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.axial = config.position_embedding_type == "axial"
        if self.axial:
            self.row_embeddings, self.column_embeddings = (nn.Embedding(n, size) for n in config.axial_pos_shape)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, position_ids: Tensor, longest: int) -> Tensor:
        """x (batch, length, hidden): word embeddings; longest: one more than the last position, where it is known."""
        if self.axial:
            rows, columns = self.row_embeddings.num_embeddings, self.column_embeddings.num_embeddings
            if longest > rows * columns:
                raise ValueError(
                    f"{longest} tokens, but axial_pos_shape [{rows}, {columns}] has {rows * columns} places: "
                    f"[{-(-longest // columns)}, {columns}] would do."
                )
            x = x + self.row_embeddings(position_ids // columns) + self.column_embeddings(position_ids % columns)
        return self.dropout(x)


def ends_with_padding(attention_mask: Tensor) -> bool:
    """Whether no text has padding before or between its tokens."""
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())


class HfTinyReformerPreTrainedModel(PreTrainedModel):
    """eager: attention over all pairs of tokens, those out of reach masked; sdpa: chunk by chunk, the same result."""

    config: HfTinyReformerConfig
    base_model_prefix = "reformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["HfTinyReformerModel"]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True


class HfTinyReformerModel(HfTinyReformerPreTrainedModel):
    # Accepted and without effect: reversible layers keep less than checkpoints would.
    gradient_checkpointing = False
    _keys_to_ignore_on_load_unexpected = [r"^lm_head"]

    def __init__(self, config: HfTinyReformerConfig):
        super().__init__(config)
        self.embeddings = ReformerEmbeddings(config)
        self.layers = nn.ModuleList(ReformerBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        self.embeddings.word_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        num_hashes: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        attention_mask (batch, past + length): 0 at padding, wherever it stands.
        token_type_ids: not used; there are no embeddings for them.
        num_hashes: instead of the config's.
        output_hidden_states, output_attentions: with these, memory grows with depth, and with the square of the length.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if use_cache and past_key_values is None and self.config.is_decoder:
            past_key_values = DynamicCache(config=self.config)
        x = self.embeddings.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length, _ = x.shape
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        known = places = None
        if attention_mask is None:
            lengths = torch.full((batch,), past + length, device=x.device)
        else:
            attention_mask = attention_mask.bool()
            lengths = attention_mask.sum(1)
        if past:
            known = lengths.new_ones(batch, past + length).bool() if attention_mask is None else attention_mask
            if position_ids is None:
                position_ids = (known.cumsum(1) - 1).clamp(min=0)[:, past:]
        elif attention_mask is not None and (torch.compiler.is_compiling() or not ends_with_padding(attention_mask)):
            # Padding goes behind the tokens, and back at the end.
            places = (~attention_mask).int().argsort(dim=1, stable=True)
            x = x.gather(1, places[:, :, None].expand_as(x))
            position_ids = position_ids if position_ids is None else position_ids.expand(batch, -1).gather(1, places)
        if position_ids is None:
            position_ids = torch.arange(length, device=x.device)[None]
        x = self.embeddings(x, position_ids, past + length)
        angles = None
        if self.config.position_embedding_type == "rotary":
            angles = rotary_angles(position_ids, self.config.head_size, THETA, x.dtype)
        given = Given(
            lengths,
            places,
            angles,
            num_hashes or self.config.num_hashes,
            seed=int(torch.randint(2**31, ())) if self.training else 0,
            training=self.training,
            dense=output_attentions or self.config._attn_implementation == "eager",
            known=known,
            past_key_values=past_key_values,
        )
        x, states, attentions = self.run_layers(x, given, output_hidden_states or output_attentions)
        x = self.dropout(self.norm(x))
        if places is not None:
            x, *states = (self.put_back(state, places) for state in (x, *states))
            if output_attentions:
                attentions = [self.put_back(self.put_back(w, places, 2), places, 3) for w in attentions]
        return BaseModelOutputWithPast(
            x,
            past_key_values,
            (*states[:-1], x) if output_hidden_states else None,
            tuple(attentions) if output_attentions else None,
        )

    @staticmethod
    def put_back(x: Tensor, places: Tensor, dim: int = 1) -> Tensor:
        """Undo the move of padding to the end."""
        places = places.view(len(places), *(-1 if d == dim else 1 for d in range(1, x.dim()))).expand_as(x)
        return torch.zeros_like(x).scatter(dim, places, x)

    def run_layers(self, x: Tensor, given: Given, with_states: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The last states, and where wanted all of them and the attention weights."""
        dtype, x = x.dtype, x.float()  # what is computed backwards must not lose digits
        plain = with_states or given.past_key_values is not None or torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not plain:
            refuse_what_cannot_work(self.layers)
            return Reversible.apply(x, self.layers, given, *self.layers.parameters()).to(dtype), [], []
        x1, x2 = x.chunk(2, dim=-1)
        states, attentions = [x], []
        for block in self.layers:
            x1, x2, weights = block(x1, x2, given)
            if with_states:
                states.append(torch.cat((x1, x2), dim=-1))
                attentions.append(weights)
        return torch.cat((x1, x2), dim=-1).to(dtype), states, attentions


def lm_loss(
    model: PreTrainedModel, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None
) -> tuple[Tensor, Tensor | None]:
    """The loss for states x (batch, length, hidden), and outside of training the logits."""
    count, head = count_items(labels, num_items_in_batch), model.lm_head
    if model.training and type(head) is nn.Linear:  # one that was wrapped (LoRA ...) runs as it is
        known = labels.ne(-100)
        return linear_cross_entropy(x[known], head, labels[known], count, 0.0)[0], None
    logits = head(x)
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), count), logits


class ReformerLM(HfTinyReformerPreTrainedModel):
    """What the two language models have in common."""

    _tied_weights_keys = {"lm_head.weight": "reformer.embeddings.word_embeddings.weight"}
    causal: bool

    def __init__(self, config: HfTinyReformerConfig):
        if config.is_decoder is not None and config.is_decoder != self.causal:
            other = "HfTinyReformerForMaskedLM" if self.causal else "HfTinyReformerForCausalLM"
            raise ValueError(f"is_decoder={config.is_decoder}: this model is for {other}.")
        config.is_decoder = self.causal
        super().__init__(config)
        self.reformer = HfTinyReformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()


class HfTinyReformerForCausalLM(ReformerLM, GenerationMixin):
    causal = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """
        labels (batch, length): the input; each token is predicted from those before it. -100 where there is nothing to learn.
        past_key_values: with a cache the logits are those without one while the number of buckets stays: from the third
            chunk on always with `num_buckets` in the config, otherwise until the number of chunks has doubled. Across
            buckets, a new token sees all that is in the cache.
        """
        outputs = self.reformer(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        x, loss = outputs.last_hidden_state, None
        if labels is None:
            logits = self.lm_head(slice_logits_to_keep(x, logits_to_keep))
        else:
            following = F.pad(labels[:, 1:], (0, 1), value=-100)
            loss, logits = lm_loss(self, x, following, num_items_in_batch)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states, outputs.attentions)


class HfTinyReformerForMaskedLM(ReformerLM):
    causal = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """labels (batch, length): the original token where it is masked, -100 elsewhere."""
        outputs = self.reformer(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        if labels is None:
            loss, logits = None, self.lm_head(outputs.last_hidden_state)
        else:
            loss, logits = lm_loss(self, outputs.last_hidden_state, labels, num_items_in_batch)
        return MaskedLMOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class HfTinyReformerForSequenceClassification(SequenceClassification, HfTinyReformerPreTrainedModel):
    encoder_class = HfTinyReformerModel


class HfTinyReformerForTokenClassification(TokenClassification, HfTinyReformerPreTrainedModel):
    encoder_class = HfTinyReformerModel
