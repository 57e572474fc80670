"""Layers and losses shared by two models or more. This file travels with every checkpoint."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

POOLING = ("cls", "mean")
CHOICES = {
    "hidden_act": ACT2FN,
    "pooling": POOLING,
    "classifier_pooling": POOLING,
}  # of fields that several models have
LONGEST_EAGER = 512  # keys: beyond, the scores of all pairs of tokens cost too much memory


class HfTinyConfig(PreTrainedConfig):
    """A config that lists every head of its family in `auto_map`, not only the class that was saved.

    choices: the values that other fields than those of CHOICES may have, by their names.
    modern: layers as in ModernBERT: without biases, the feed-forward layer with a gate.
    """

    registered_auto_map = None  # filled when the family is registered; stays None where its files run as remote code
    choices = {}

    def __post_init__(self, **kwargs):
        if self.registered_auto_map is not None:
            kwargs["auto_map"] = dict(self.registered_auto_map)
        super().__post_init__(**kwargs)
        for name, allowed in {**CHOICES, **self.choices}.items():
            if name in vars(self):
                self.require(name, vars(self)[name] in allowed, f"choose one of {', '.join(allowed)}.")

    @property
    def modern(self) -> bool:
        return False

    def require(self, name: str, fits: bool, advice: str) -> None:
        """Refuse the value of a field unless it fits."""
        if not fits:
            raise ValueError(f"{name}={getattr(self, name)!r}: {advice}")

    def require_heads(self, width: int, heads: int, fields: str, even: bool = False) -> None:
        """Refuse a width that does not divide into heads, of an even size where they are turned by angles."""
        if width % heads or (even and width // heads % 2):
            of = " of an even size" if even else ""
            raise ValueError(f"A width of {width} does not divide into {heads} heads{of}: change {fields}.")


class Recurrence(nn.Module):
    """One direction of an LSTM. `nn.LSTM` would stay out of compiled graphs."""

    def __init__(self, input_size: int, size: int):
        super().__init__()
        self.input_weight = nn.Parameter(torch.empty(4 * size, input_size))
        self.state_weight = nn.Parameter(torch.empty(4 * size, size))
        self.bias = nn.Parameter(torch.empty(4 * size))

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, length, input size) to states (batch, length, size)."""
        begin = x.new_zeros(1, x.shape[0], self.state_weight.shape[1])
        weights = [self.input_weight, self.state_weight, self.bias, torch.zeros_like(self.bias)]
        return torch.lstm(x, [begin, begin], weights, True, 1, 0.0, self.training, False, True)[0]


class HfTinyTextConfig(HfTinyConfig):
    """Of a model that reads tokens."""

    hidden_act: str = "relu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.0
    initializer_range: float = 0.02
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    use_cache: bool | None = None  # ELECTRA, like native encoders, has none


class HfTinyPreTrainedModel(PreTrainedModel):
    """What all models can do whose attention is that of this file."""

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, Recurrence):  # as transformers does it for nn.LSTM
            init.xavier_uniform_(module.input_weight)
            init.xavier_uniform_(module.state_weight)
            init.zeros_(module.bias)


def embed(words: nn.Embedding, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Word embeddings (batch, length, size), unless they are given."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of input_ids and inputs_embeds.")
    return words(input_ids) if inputs_embeds is None else inputs_embeds


def widen(x: Tensor) -> Tensor:
    """In float32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float))


def cross_entropy(logits: Tensor, labels: Tensor, num_items: Tensor | int, smoothing: float = 0.0) -> Tensor:
    """Sum over the labels that are not -100, divided by `num_items`: their count over the whole optimiser step.

    smoothing: the share of the target's probability that is spread evenly over all classes.
    """
    losses = F.cross_entropy(widen(logits), labels, reduction="sum", ignore_index=-100, label_smoothing=smoothing)
    return losses / num_items


class Copies(NamedTuple):
    """What the tokens of the source add to the probabilities of a vocabulary, which keep the share g (See et al., 2017):
    P(w) = g p(w) + (1 - g) c(w), with the attention c(w) to all places of the source where w stands. So log P(w) is
    log g + log p(w), and for each w of the source log(1 + exp(odds - log p(w))) more.

    log_gate (..., 1): log g. odds (..., source): log (1 - g) c / g, of a token at its first place; -inf at its others.
    ids (..., source): the tokens.
    """

    log_gate: Tensor
    odds: Tensor
    ids: Tensor

    def mix(self, logits: Tensor) -> Tensor:
        """log P (..., vocabulary)."""
        log_probs = widen(logits).log_softmax(-1)
        gain = F.softplus(self.odds - log_probs.gather(-1, self.ids))
        return (log_probs + self.log_gate).scatter_add(-1, self.ids, gain)


class LinearCrossEntropy(torch.autograd.Function):
    """Sums over the rows of x (n, size) of the smoothed and of the plain cross entropy of `weight @ x + bias` and labels.

    Rows go through in chunks that stay in a CPU's cache, and each leaves its gradient at once: the logits of all rows
    never exist, and what remains of the time is that of the three products. PyTorch's own `F.linear_cross_entropy` has no
    chunks with label smoothing.

    odds, ids (n, source): of `Copies`, whose log_gate is not in the sums; without copies the source is empty.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor, odds: Tensor, ids: Tensor, labels: Tensor,
        smoothing: float, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        classes, even = len(weight), smoothing / len(weight)
        wide = torch.promote_types(x.dtype, torch.float)
        rows = max(64, (2**20 if x.device.type == "cpu" else 2**26) // classes)
        low_x, low_weight, low_bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
        x_grad, weight_grad, bias_grad = (torch.zeros_like(tensor, dtype=wide) for tensor in (x, weight, bias))
        odds_grad = torch.empty_like(odds)
        loss, nll = x_grad.new_zeros(2)
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            label = labels[part, None]
            log_probs = torch.addmm(low_bias, low_x[part], low_weight.mT).to(wide).log_softmax(-1)  # (rows, classes)
            plain = -log_probs.gather(1, label).sum()
            nll += plain
            loss += (1 - smoothing) * plain - even * log_probs.sum()
            if odds.numel():
                above = odds[part] - log_probs.gather(1, ids[part])  # (rows, source)
                right = (ids[part] == label).to(wide)
                target, gain = right * (1 - smoothing) + even, F.softplus(above)
                nll -= (right * gain).sum()
                loss -= (target * gain).sum()
                odds_grad[part] = -target * above.sigmoid()  # what a label owes to the source, not to the vocabulary
            grad = log_probs.exp_()
            if odds.numel():
                grad *= 1 + odds_grad[part].sum(1, keepdim=True)
                grad.scatter_add_(1, ids[part], -odds_grad[part])
            grad.sub_(even)  # probabilities minus smoothed targets
            grad.scatter_add_(1, label, grad.new_full(label.shape, smoothing - 1))
            bias_grad += grad.sum(0)
            grad = grad.to(dtype)
            x_grad[part] = grad @ low_weight
            weight_grad += grad.mT @ low_x[part]
        ctx.save_for_backward(x_grad.to(x.dtype), weight_grad.to(weight.dtype), bias_grad.to(bias.dtype), odds_grad)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *(grad * loss_grad for grad in ctx.saved_tensors), None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    layer: nn.Linear,
    labels: Tensor,
    num_items: Tensor | int,
    smoothing: float,
    copies: Copies | None = None,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy` of the output of `layer` for x (n, size), with smoothing and, without a gradient, without it."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    none = (len(x), 0)
    _, odds, ids = copies or (None, x.new_empty(none), labels.new_empty(none))
    with torch.autocast(device, enabled=False):
        loss, nll = LinearCrossEntropy.apply(x, layer.weight, layer.bias, odds, ids, labels, smoothing, dtype)
    if copies is not None:
        loss, nll = loss - copies.log_gate.sum(), nll - copies.log_gate.detach().sum()
    return loss / num_items, nll / num_items


def binary_cross_entropy(logits: Tensor, labels: Tensor, valid: Tensor | None, num_items: Tensor | int) -> Tensor:
    """Like `cross_entropy`, for a yes or no at every position that `valid` (all, when None) marks."""
    losses = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
    return (losses if valid is None else losses * valid).sum() / num_items


def sample_inverse_cdf(logits: Tensor, noise: Tensor, block: int = 256) -> Tensor:
    """Draw one class per row of `logits` (n, classes) with one uniform number per row of `noise` (n,).

    The cumulative sum runs over blocks of classes first and then inside the block that was hit, which gives the
    same draw as one long cumulative sum at a fraction of its cost.
    """
    probabilities = logits.float().softmax(-1)
    classes = logits.shape[-1]
    whole = classes // block * block
    rest = probabilities[:, whole:].sum(-1, keepdim=True)
    blocks = torch.cat((probabilities[:, :whole].unflatten(-1, (classes // block, block)).sum(-1), rest), dim=1)
    mass = blocks.cumsum(-1)
    target = noise.to(mass.dtype)[:, None] * mass[:, -1:]
    hit = _first_above(mass, target)  # (n, 1)
    target = (target - mass.gather(1, hit) + blocks.gather(1, hit)).clamp(min=0)
    members = hit * block + torch.arange(block, device=hit.device)  # (n, block)
    inside = probabilities.gather(1, members.clamp(max=classes - 1)).masked_fill(members >= classes, 0).cumsum(-1)
    return (hit * block + _first_above(inside, target))[:, 0]


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first place of each row that exceeds the target. Rounding may put the target past the last one that adds any
    mass: such a draw belongs to that one."""
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return (cumulative <= target).sum(-1, keepdim=True).minimum(last)


def dropout_factor(x: Tensor, p: float) -> Tensor:
    """What to multiply `x` with: 0 with probability `p`, else 1 / (1 - p).

    One 64-bit random number serves four elements (15 bits of it give `p` to 2e-5), and their signs become the factor:
    torch has vector instructions for that, not for comparisons. On a CPU it is 8 times as fast as `bernoulli_`, which
    `F.dropout` uses.
    """
    kept = round((1 - p) * 2**15)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    numbers = bits.view(torch.int16)[: x.numel()].view(x.shape)
    numbers >>= 1  # -2**14 ... 2**14 - 1: the difference stays within 16 bits
    numbers -= kept - 2**14  # below 0: kept
    numbers >>= 15  # -1 or 0
    return numbers.to(x.dtype).mul_(-(2**15) / kept)


class Dropout(nn.Dropout):
    """`nn.Dropout`, faster on a CPU; with a `residual` it gives residual + dropout(x) in one pass over memory."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.training and 0 < self.p < 1 and x.device.type == "cpu":
            factor = dropout_factor(x, self.p)
            return x * factor if residual is None else torch.addcmul(residual, x, factor)
        x = super().forward(x)
        return x if residual is None else residual + x


def rotary_angles(
    position_ids: Tensor, head_size: int, dtype: torch.dtype, theta: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """cos and cos, -sin and sin, each (batch or 1, length, 1, head_size), for both numbers of the pairs that `rotate` turns.
    They are computed on the fly: no buffer to save or to lose."""
    exponents = torch.arange(0, head_size, 2, device=position_ids.device).float() / head_size
    angles = position_ids[:, :, None, None].float() * theta**-exponents
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def sinusoids(position_ids: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The paper's position encodings (batch or 1, length, size), the sines before the cosines as in Marian: the paper
    interleaves them, which is the same up to the order of the dimensions."""
    cos, sin = (both[..., size // 2 :] for both in rotary_angles(position_ids, size, dtype))
    return torch.cat((sin, cos), dim=-1).squeeze(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) of x (..., length, heads, head_size) by its angle, in few passes over memory."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    scores = query * scaling @ key.mT  # (batch, heads, query, key)
    if attention_mask is None and module.is_causal:  # masks made for sdpa leave look-ahead to the kernel
        lengths = scores.shape[-2:]
        attention_mask = torch.ones(lengths, dtype=torch.bool, device=query.device).tril(lengths[1] - lengths[0])
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = module.dropout(scores.softmax(-1).to(query.dtype))  # of bfloat16 it is computed in float32, too
    return (weights @ value).transpose(1, 2), weights


class BlockSizes(NamedTuple):
    """Of an `EncoderBlock`; head_sizes: of keys (and queries) and of values, in one head."""

    hidden_size: int
    num_heads: int
    intermediate_size: int
    head_sizes: tuple[int, int] | None = None


class Attention(nn.Module):
    """Multi-head scaled dot-product attention through transformers' interface. A subclass says what query, key and value
    are projections of, and has the projection `out` to the hidden size.

    layer_idx: of a decoder's layer: a cache holds its keys and values under this number.
    """

    is_causal = False

    def __init__(self, config: PreTrainedConfig, sizes: BlockSizes, layer_idx: int | None = None):
        super().__init__()
        self.config = config
        self.num_heads = sizes.num_heads
        self.layer_idx = layer_idx
        key_size, value_size = sizes.head_sizes or (sizes.hidden_size // sizes.num_heads,) * 2
        self.scaling = key_size**-0.5
        self.dropout = Dropout(config.attention_probs_dropout_prob)
        self.sizes = [self.num_heads * size for size in (key_size, key_size, value_size)]  # of query, key and value

    def heads(self, x: Tensor) -> Tensor:
        """(batch, length, heads * size) to (batch, length, heads, size)."""
        return x.unflatten(-1, (self.num_heads, -1))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """From (batch, heads, length, size) each to states (batch, query, heads * size) and, where known, the weights."""
        dropout = self.dropout.p if self.training else 0.0
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        fused = query.device.type == "cpu" and self.config._attn_implementation == "sdpa"
        if fused and self.training and (dropout or key.shape[2] <= LONGEST_EAGER):
            # On a CPU, sdpa has no kernel with dropout, and with gradients it is slower: in bfloat16 up to four times.
            attend = eager_attention
        y, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs)
        return y.flatten(2), weights


class SelfAttention(Attention):
    """One projection for query, key and value. In a decoder's layer a token sees itself and those before it."""

    def __init__(self, config: PreTrainedConfig, sizes: BlockSizes, layer_idx: int | None = None):
        super().__init__(config, sizes, layer_idx)
        self.is_causal = self.layer_idx is not None
        self.qkv = nn.Linear(sizes.hidden_size, sum(self.sizes), bias=not config.modern)
        self.out = nn.Linear(self.sizes[2], sizes.hidden_size, bias=not config.modern)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        angles: tuple[Tensor, Tensor] | None,
        past_key_values: EncoderDecoderCache | None = None,
        queries: slice | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """queries: the tokens that look around; all when None."""
        if angles is None:
            query, key, value = (self.heads(part) for part in self.qkv(x).split(self.sizes, dim=-1))
        else:  # query and key in one go
            both, value = self.qkv(x).split((sum(self.sizes[:2]), self.sizes[2]), dim=-1)
            query, key = rotate(both.unflatten(-1, (2 * self.num_heads, -1)), *angles).chunk(2, dim=-2)
            value = self.heads(value)
        if queries is not None:
            query = query[:, queries]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # (batch, heads, length, size)
        if past_key_values is not None:
            key, value = past_key_values.self_attention_cache.update(key, value, self.layer_idx)
        y, weights = self.attend(query, key, value, attention_mask, **kwargs)
        return self.out(y), weights


class CrossAttention(Attention):
    """Queries from one sequence, keys and values from another: with a cache they are computed once, for all steps.

    There may be several queries' sequences, one after the other, for each sequence of keys: its beams, or its samples.
    They share its keys and values, as if they were one longer sequence.
    """

    def __init__(self, config: PreTrainedConfig, sizes: BlockSizes, layer_idx: int | None = None):
        super().__init__(config, sizes, layer_idx)
        self.query = nn.Linear(sizes.hidden_size, self.sizes[0])
        self.key_value = nn.Linear(sizes.hidden_size, sum(self.sizes[1:]))
        self.out = nn.Linear(self.sizes[2], sizes.hidden_size)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        attention_mask: Tensor | None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """x (batch * copies, length, hidden), memory (batch, source, hidden)."""
        key, value = self.keys_and_values(memory, past_key_values)
        batch, length = key.shape[0], x.shape[1]
        query = self.heads(self.query(x).reshape(batch, -1, self.sizes[0])).transpose(1, 2)
        y, weights = self.attend(query, key, value, attention_mask, **kwargs)
        if weights is not None and x.shape[0] != batch:  # else they are what the output was made of, gradient and all
            weights = weights.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)
        return self.out(y.reshape(*x.shape[:2], -1)), weights

    def keys_and_values(self, memory: Tensor, past_key_values: EncoderDecoderCache | None) -> tuple[Tensor, Tensor]:
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            known = past_key_values.cross_attention_cache.layers[self.layer_idx]
            return known.keys, known.values
        projected = self.key_value(memory).split(self.sizes[1:], dim=-1)
        key, value = (self.heads(part).transpose(1, 2) for part in projected)
        if past_key_values is not None:
            past_key_values.is_updated[self.layer_idx] = True
            return past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
        return key, value


def layer_norm(config: PreTrainedConfig, size: int) -> nn.LayerNorm:
    return nn.LayerNorm(size, eps=config.layer_norm_eps, bias=not config.modern)


class FeedForward(nn.Module):
    def __init__(self, config: PreTrainedConfig, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gated = config.modern
        self.up = nn.Linear(hidden_size, intermediate_size * (2 if self.gated else 1), bias=not config.modern)
        self.activation = ACT2FN[config.hidden_act]
        self.down = nn.Linear(intermediate_size, hidden_size, bias=not config.modern)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not self.gated:
            return self.down(self.activation(x))
        x, gate = x.chunk(2, dim=-1)
        return self.down(self.activation(x) * gate)


class EncoderBlock(GradientCheckpointingLayer):
    """Attention, then feed-forward, each with a residual; the norm after the sum (as in BERT) or before the layer.

    layer_idx: of a decoder's block. It is causal, and between the two layers it attends to the encoder's states.
    """

    def __init__(self, config: PreTrainedConfig, sizes: BlockSizes, layer_idx: int | None = None):
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = SelfAttention(config, sizes, layer_idx)
        self.attention_norm = layer_norm(config, sizes.hidden_size)
        if layer_idx is not None:
            self.cross_attention = CrossAttention(config, sizes, layer_idx)
            self.cross_attention_norm = layer_norm(config, sizes.hidden_size)
        self.feed_forward = FeedForward(config, sizes.hidden_size, sizes.intermediate_size)
        self.feed_forward_norm = layer_norm(config, sizes.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def residual(self, norm: nn.LayerNorm, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return self.dropout(layer(norm(x)), residual=x)
        return norm(self.dropout(layer(x), residual=x))

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        angles: tuple[Tensor, Tensor] | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """memory (batch, source, hidden): the encoder's states."""
        x = self.residual(self.attention_norm, x, lambda x: self.attention(x, attention_mask, angles, **kwargs)[0])
        if memory is not None:
            norm, attend = self.cross_attention_norm, self.cross_attention
            x = self.residual(norm, x, lambda x: attend(x, memory, memory_mask, **kwargs)[0])
        return self.residual(self.feed_forward_norm, x, self.feed_forward)
