"""Attention in chunks: tokens are sorted, and look at their own chunk and its neighbours. The numbers of hashes to sort by."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layers import Dropout, dropout_factor

ALONE = -1e5  # added to a token's score for itself: counts only where nothing else is in reach
UNSEEN = -1e9  # added to the score of a pair that is out of reach, times how far it is
AT_ONCE = 2**19  # scores of the heads that a CPU computes at a time: more would only need more memory
PRIOR = 4  # tokens at 0 before each text: without them, the first one would be its own mean
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Bits = TypeVar("Bits", Tensor, int)


@contextmanager
def small_products() -> Iterator[None]:
    """The fused kernel multiplies chunk by chunk. oneDNN, if the run uses it for float32, is slow at such small products.
    A compiler does not follow it there."""
    if torch.compiler.is_compiling():
        yield
        return
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@dataclass
class Visibility:
    """Which tokens see which, in each round. Places are padded to whole chunks; one more place is nowhere.

    order (rounds, batch or 1, heads or 1, chunks, chunk): the places, sorted, with a chunk before them that the first one
        sees, and one behind them if chunks see the next.
    at (rounds, batch or 1, heads or 1, places + 1): the rank of each place as a key.
    first, last, wrap (like `at`): a query sees keys with first <= at <= last or at >= wrap,
    causal: and of those only the ones before it in the text.
    width: how many chunks a chunk looks at: the one before and itself, or with 3 also the one behind.
    """

    order: Tensor
    at: Tensor
    first: Tensor
    last: Tensor
    wrap: Tensor | None = None
    causal: bool = False
    width: int = 2

    def far(self, index: int, query: Tensor, key: Tensor) -> Tensor:
        """(..., query, key): how far keys are out of reach of a query in a round, 1 or more; within reach it is 0 or less.
        Both are places (batch, heads or 1, ..., count). Arithmetic is several times as fast as comparing on a CPU."""

        def of(mark: Tensor, places: Tensor) -> Tensor:
            return mark[index].gather(-1, places.flatten(2)).view(places.shape).float()

        at, query = of(self.at, key)[..., None, :], query[..., None]
        first, last = of(self.first, query), of(self.last, query)
        far = (at - (first + last) / 2).abs_().sub_((last - first) / 2)
        if self.wrap is not None:
            far = torch.minimum(far, of(self.wrap, query) - at)
        return torch.maximum(far, (key[..., None, :] - query).float()) if self.causal else far

    def dense(self, queries: int, keys: int) -> Tensor:
        """(batch or 1, heads or 1, queries, keys): what the last queries see in some round."""
        places = torch.arange(keys, device=self.at.device).expand(*self.at.shape[1:3], -1)
        rounds = [self.far(index, places[..., keys - queries :], places) <= 0 for index in range(len(self.order))]
        return torch.stack(rounds).any(0)

    def chunks(self, index: int) -> Tensor:
        """The order of a round without what is before and behind it."""
        return self.order[index][:, :, 1 : self.order.shape[3] + 2 - self.width]

    def of_heads(self, some: slice) -> "Visibility":
        """What these heads see."""
        if self.order.shape[2] == 1:
            return self
        marks = {name: getattr(self, name) for name in ("order", "at", "first", "last", "wrap")}
        return replace(self, **{name: mark[:, :, some] for name, mark in marks.items() if mark is not None})

    def bias(self, index: int, alone: float | None, heads: tuple[int, int]) -> Tensor:
        """(batch * heads or 1, chunks, chunk, keys): what to add to scores, so that a pair counts in the first round in which
        it is within reach. alone: for a token itself."""
        own, chunk = self.chunks(index), self.order.shape[4]
        keys = neighbours(self.order[index].flatten(2), chunk, self.width)
        bias = self.far(index, own, keys).clamp_(min=0).mul_(UNSEEN)
        for earlier in range(index):
            bias.add_(self.far(earlier, own, keys).neg_().add_(0.5).clamp_(min=0), alpha=UNSEEN)
        if alone is not None:
            bias.view(*bias.shape[:3], -1)[..., chunk :: keys.shape[-1] + 1] = alone  # diagonal(), in what ONNX has
        return bias[0] if bias.shape[:2] == (1, 1) else bias.expand(*heads, -1, -1, -1).flatten(0, 1)

    def put_back(self, grad: Tensor, index: int, inverse: Tensor) -> Tensor:
        """The sum (batch, length, heads, size) of what each place was given in its windows (batch * heads, chunks, keys,
        size): in its own chunk, and as a neighbour of others. `grad` is written to."""
        before, own, *behind = grad.unflatten(0, inverse.shape[:2]).chunk(self.width, dim=3)
        own[:, :, :-1] += before[:, :, 1:]
        if behind:
            own[:, :, 1:] += behind[0][:, :, :-1]
        result = unsort(own, inverse)
        if self.wrap is not None:
            places = self.order[index][:, :, 0, :, None]  # (batch, heads or 1, chunk, 1)
            first = before[:, :, 0].masked_fill(places >= result.shape[1], 0.0).transpose(1, 2)
            places = places.clamp(max=result.shape[1] - 1).transpose(1, 2).expand_as(first)
            result.scatter_add_(1, places, first)
        return result


def sort_tokens(buckets: Tensor, real: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """`order` and ranks (like `at`) of a `Visibility`: tokens (rounds, batch, heads or 1, length) by bucket, then by place."""
    length, size = real.shape[-1], (real.shape[-1] + chunk - 1) // chunk * chunk
    real = F.pad(real, (0, size - length))[:, None]  # (batch, 1, places)
    places = torch.arange(size, device=real.device)
    buckets = F.pad(buckets, (0, size - length)).masked_fill(~real, 2**31)
    order = (buckets * size + places).argsort(-1)
    ranks = torch.empty_like(order).scatter_(-1, order, places.expand_as(order))
    ranks = torch.where(real, ranks, ranks - 4 * size)[..., :length]  # padding is far from all tokens
    ranks = padded(ranks, (0, size + 1 - length), -8 * size)
    return padded(order, (chunk, 0), size).unflatten(-1, (-1, chunk)), ranks.int()


def padded(x: Tensor, around: tuple[int, ...], size: int) -> Tensor:
    """With a size of other tensors: as the value of F.pad, an ONNX file would fix it."""
    return F.pad(x - size, around) + size


def neighbours(x: Tensor, chunk: int, width: int) -> Tensor:
    """Each `width` chunks of x (batch, heads, places, ...) together: (batch, heads, chunks + 1 - width, keys, ...)."""
    if torch.compiler.is_exporting():  # ONNX has no such views
        chunks = x.unflatten(2, (-1, chunk))
        return torch.cat([chunks.narrow(2, i, chunks.shape[2] + 1 - width) for i in range(width)], dim=3)
    return x.unfold(2, width * chunk, chunk).movedim(-1, 3)


def rows_at(x: Tensor, *places: Tensor) -> Tensor:
    """x[places], with places in all dimensions but the last: without a copy of x, whatever the order of its dimensions."""
    size = x.shape[-1]
    if torch.compiler.is_exporting():
        return x[places]
    if x.stride(-1) != 1 or any(stride % size for stride in x.stride()[:-1]):  # as of a gradient that is one number
        x = x.contiguous()
    steps = [stride // size for stride in x.stride()[:-1]]
    count = 1 + sum(step * (length - 1) for step, length in zip(steps, x.shape[:-1], strict=True))
    index = sum(place * step for place, step, length in zip(places, steps, x.shape, strict=False) if length > 1)
    return F.embedding(index, x.as_strided((count, size), (size, 1)))


def windows(x: Tensor, order: Tensor, width: int = 1) -> Tensor:
    """Rows of x (batch, places, heads, size) in the order (batch or 1, heads or 1, chunks, chunk), and a view of them: each
    `width` chunks together, (batch * heads, chunks + 1 - width, keys, size)."""
    batch, heads = (torch.arange(count, device=x.device) for count in (x.shape[0], x.shape[2]))
    chunk, places = order.shape[3], order.flatten(2).clamp(max=x.shape[1] - 1)  # those outside of x are masked
    rows = rows_at(x, batch[:, None, None], places, heads[:, None])
    return neighbours(rows, chunk, width).flatten(0, 1)


def unsort(x: Tensor, inverse: Tensor) -> Tensor:
    """From sorted rows (batch, heads, chunks, chunk, size) to those at the places (batch, length, heads, size)."""
    batch, heads = (torch.arange(count, device=x.device) for count in x.shape[:2])
    rank, chunk = inverse.transpose(1, 2), x.shape[3]
    return rows_at(x, batch[:, None, None], heads, rank // chunk, rank % chunk)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of (batch, heads, length, size), and the logarithm of the sum of its weights (batch, heads, length).

    factor: of dropout, for each weight.
    """
    if query.device.type == "cpu" and factor is None and not torch.compiler.is_exporting():
        with small_products():
            return FUSED(query, key, value, attn_mask=bias, scale=1.0)
    scores = (query @ key.mT).float() + bias
    total = scores.logsumexp(-1)
    weights = (scores - total[..., None]).exp()
    return (weights if factor is None else weights * factor).to(value.dtype) @ value, total


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    factor: Tensor | None,
    y: Tensor,
    total: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. y and total may be those over these keys and others: the gradients are then what
    these contribute to those of the whole."""
    if query.device.type == "cpu" and factor is None:
        with small_products():
            return FUSED_BACKWARD(grad, query, key, value, y, total, 0.0, False, attn_mask=bias, scale=1.0)
    weights = ((query @ key.mT).float() + bias - total[..., None]).exp()
    value_grad = (weights if factor is None else weights * factor).to(grad.dtype).mT @ grad
    weights_grad = (grad @ value.mT).float() * (1.0 if factor is None else factor)
    scores_grad = (weights * (weights_grad - (grad * y).float().sum(-1, keepdim=True))).to(grad.dtype)
    return scores_grad @ key, scores_grad.mT @ query, value_grad


def log_of_sum(a: Tensor, b: Tensor) -> Tensor:
    """Of exp(a) and exp(b). ONNX computes them as they stand, which gives 0 for a token that sees itself alone."""
    return torch.stack((a, b)).logsumexp(0) if torch.compiler.is_exporting() else torch.logaddexp(a, b)


class ChunkedAttention(torch.autograd.Function):
    """Softmax over all keys that a token sees in some round. A pair that meets in several rounds counts in the first, which
    is what the paper's division by the number of its meetings comes to. Tensors are (batch, length, heads, size)."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, seen: Visibility, alone: bool, rate: float) -> Tensor:
        heads, width = (query.shape[0], query.shape[2]), seen.width
        ctx.seen, ctx.rounds = seen, []
        for index, order in enumerate(seen.order):
            own, factor = seen.chunks(index), None
            itself = None if not alone else UNSEEN if index else ALONE
            if rate:
                chunks, chunk = own.shape[2:]
                factor = dropout_factor(query.new_empty(heads[0] * heads[1], chunks, chunk, width * chunk), rate)
            found = (windows(query, own), windows(key, order, width), windows(value, order, width))
            new, new_total = attend(*found, seen.bias(index, itself, heads), factor)
            del found
            inverse = own.flatten(2).argsort(-1)[..., : query.shape[1]].expand(*heads, -1)
            new, new_total = (unsort(x.unflatten(0, heads), inverse).float() for x in (new, new_total[..., None]))
            if not index:
                y, total = new, new_total
            else:  # one softmax over the keys of all rounds
                both = log_of_sum(total, new_total)
                y.mul_((total - both).exp_()).addcmul_(new, (new_total - both).exp_())
                total = both
            ctx.rounds.append((itself, factor, inverse))
        y = y.to(value.dtype)
        ctx.save_for_backward(query, key, value, y, total)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, y, total = ctx.saved_tensors
        seen, width, grads = ctx.seen, ctx.seen.width, []
        for index, (order, (itself, factor, inverse)) in enumerate(zip(seen.order, ctx.rounds, strict=True)):
            heads, own = inverse.shape[:2], seen.chunks(index)
            found = (windows(query, own), windows(key, order, width), windows(value, order, width))
            whole = (windows(y, own), windows(total, own).squeeze(-1))
            bias = seen.bias(index, itself, heads)
            own_grad, *others = attend_backward(windows(grad, own), *found, bias, factor, *whole)
            del found, whole, bias
            own_grad = unsort(own_grad.unflatten(0, heads), inverse)
            new = [own_grad, *(seen.put_back(part, index, inverse) for part in others)]
            grads = [one.add_(other) for one, other in zip(grads, new, strict=True)] if index else new
        return *grads, None, None, None


def chunked_attention(query: Tensor, key: Tensor, value: Tensor, seen: Visibility, alone: bool, rate: float) -> Tensor:
    """`ChunkedAttention` of (batch, heads, length, size).

    alone: a token sees itself only where it sees nothing else.
    rate: of dropout.
    """
    step = heads = query.shape[1]
    if query.device.type == "cpu" and not torch.compiler.is_exporting():
        step = max(1, AT_ONCE // (query.shape[0] * query.shape[2] * seen.width * seen.order.shape[4]))
    parts = zip(*(x.transpose(1, 2).split(step, dim=2) for x in (query, key, value)), strict=True)
    seen_parts = (seen.of_heads(slice(start, start + step)) for start in range(0, heads, step))
    y = [ChunkedAttention.apply(*part, one, alone, rate) for part, one in zip(parts, seen_parts, strict=True)]
    return torch.cat(y, dim=2).transpose(1, 2)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, alone: bool, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """Softmax over what is `seen` (..., query, key), with the weights. The last query is the last key's token."""
    scores = (query @ key.mT).float().masked_fill(~seen, UNSEEN)
    if alone:
        itself = torch.ones(scores.shape[2:], dtype=torch.bool, device=seen.device)
        itself = itself.tril(key.shape[2] - query.shape[2]).triu(key.shape[2] - query.shape[2])
        scores = scores.masked_fill(itself, ALONE)
    weights = dropout(scores.softmax(-1).to(value.dtype))
    return weights @ value, weights


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, real: Tensor, causal: bool, alone: bool, rate: float
) -> Tensor:
    """Where all tokens are in one chunk, everything is in reach. The last query is the last key's token."""
    seen, least, past = real[:, None, None], torch.finfo(query.dtype).min, key.shape[2] - query.shape[2]
    if causal:
        seen = seen & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=real.device).tril(past)
    bias = torch.where(seen, query.new_zeros(()), least).expand(-1, -1, query.shape[2], -1)
    if alone:
        bias = bias.clone()
        bias.diagonal(past, dim1=-2, dim2=-1).fill_(least / 2)  # more than what is unseen, less than anything else
    return F.scaled_dot_product_attention(query, key, value, bias, rate, scale=1.0)


# Hashing


def without_mean(key: Tensor, real: Tensor, causal: bool) -> Tensor:
    """Keys without their mean, in a causal layer without that of those up to each: it must not see later ones."""
    counted = real[:, None, :, None].to(key.dtype)
    total, count = ((x.cumsum(2) if causal else x.sum(2, True)) for x in (key * counted, counted))
    return key - total / (count + PRIOR)


def hashed(bits: Bits) -> Bits:
    """32 bits as others."""
    for factor in (0x7FEB352D, 0x46A7F1B5, 0x5BD1E995):
        bits = (bits ^ (bits >> 16)) * factor & 0xFFFFFFFF
    return bits ^ (bits >> 15)


def normal_numbers(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Standard normal numbers that depend on the seed alone: on every device the same, and no random stream moves. More
    rows (in the first dimension) leave those before them as they are."""
    count, start = torch.Size(shape).numel(), seed * 0x9E3779B1 & 0xFFFFFFFF
    if torch.onnx.is_in_onnx_export():  # it has no such function: there they are constants
        normal = [NormalDist().inv_cdf((hashed(start + i) + 0.5) / 2**32) for i in range(count)]
        return torch.tensor(normal, device=device).view(shape)
    uniform = (hashed(torch.arange(count, device=device) + start).double() + 0.5) / 2**32
    return torch.special.ndtri(uniform).float().view(shape)
