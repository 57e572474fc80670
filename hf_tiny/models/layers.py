"""Layers and losses shared by two models or more. This file travels with every checkpoint."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class HfTinyConfig(PreTrainedConfig):
    """A config that lists every head of its family in `auto_map`, not only the class that was saved."""

    registered_auto_map = None  # filled when the family is registered; stays None where its files run as remote code

    def __post_init__(self, **kwargs):
        if self.registered_auto_map is not None:
            kwargs["auto_map"] = dict(self.registered_auto_map)
        super().__post_init__(**kwargs)


def cross_entropy(logits: Tensor, labels: Tensor, num_items: Tensor | int) -> Tensor:
    """Sum over the labels that are not -100, divided by `num_items`: their count over the whole optimiser step."""
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100) / num_items


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

    One 64-bit random number serves four elements (16 bits give `p` to 1e-5): on a CPU this is 5 times as fast as
    `bernoulli_`, which `F.dropout` uses.
    """
    kept = round((1 - p) * 2**16)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    numbers = bits.view(torch.int16)[: x.numel()].view(x.shape)  # -2**15 ... 2**15 - 1
    return (numbers < kept - 2**15).to(x.dtype).mul_(2**16 / kept)


class Dropout(nn.Dropout):
    """`nn.Dropout`, faster on a CPU; with a `residual` it gives residual + dropout(x) in one pass over memory."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.training and 0 < self.p < 1 and x.device.type == "cpu":
            factor = dropout_factor(x, self.p)
            return x * factor if residual is None else torch.addcmul(residual, x, factor)
        x = super().forward(x)
        return x if residual is None else residual + x


def rotary_angles(position_ids: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (batch or 1, length, 1, head_size / 2), computed on the fly: no buffer to save or to lose."""
    exponents = torch.arange(0, head_size, 2, device=position_ids.device).float() / head_size
    angles = position_ids[:, :, None, None].float() * theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) of x (..., length, heads, head_size) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    scores = query * scaling @ key.mT  # (batch, heads, query, key)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = module.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype))
    return (weights @ value).transpose(1, 2), weights


class SelfAttention(nn.Module):
    """Multi-head self-attention with one projection for query, key and value, through transformers' interface."""

    is_causal = False

    def __init__(self, config: PreTrainedConfig, hidden_size: int, num_heads: int):
        super().__init__()
        self.config = config
        self.head_size = hidden_size // num_heads
        self.scaling = self.head_size**-0.5
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.dropout = Dropout(config.attention_probs_dropout_prob)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, angles: tuple[Tensor, Tensor] | None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_size))  # (batch, length, 3, heads, head_size)
        query, key, value = qkv.unbind(2)
        if angles is not None:
            query, key = rotate(query, *angles), rotate(key, *angles)
        dropout = self.dropout.p if self.training else 0.0
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if dropout and x.device.type == "cpu" and self.config._attn_implementation == "sdpa":
            attend = eager_attention  # on a CPU, sdpa has no fused kernel with dropout, and its fallback is slower
        y, weights = attend(
            self,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attention_mask,
            scaling=self.scaling,
            dropout=dropout,
            **kwargs,
        )
        return self.out(y.flatten(2)), weights


class FeedForward(nn.Module):
    def __init__(self, config: PreTrainedConfig, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.down = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class EncoderBlock(GradientCheckpointingLayer):
    """Attention, then feed-forward, each with a residual; the norm after the sum (as in BERT) or before the layer."""

    def __init__(self, config: PreTrainedConfig, hidden_size: int, num_heads: int, intermediate_size: int):
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = SelfAttention(config, hidden_size, num_heads)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config, hidden_size, intermediate_size)
        self.feed_forward_norm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, angles: tuple[Tensor, Tensor] | None, **kwargs
    ) -> Tensor:
        if self.norm_first:
            x = self.dropout(self.attention(self.attention_norm(x), attention_mask, angles, **kwargs)[0], residual=x)
            return self.dropout(self.feed_forward(self.feed_forward_norm(x)), residual=x)
        x = self.attention_norm(self.dropout(self.attention(x, attention_mask, angles, **kwargs)[0], residual=x))
        return self.feed_forward_norm(self.dropout(self.feed_forward(x), residual=x))
