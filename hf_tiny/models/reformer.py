"""Reformer (Kitaev et al., 2020): hashing attention, chunked feed-forward and reversible layers for long inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, MaskedLMOutput
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .chunks import (
    Visibility,
    chunked_attention,
    dense_attention,
    full_attention,
    normal_numbers,
    padded,
    sort_tokens,
)
from .heads import Count, EncoderConfig, EncoderHead, SequenceClassification, TokenClassification, predict_tokens
from .layers import Dropout, FeedForward, embed, layer_norm, rotary_angles, rotate

__all__ = [
    "HfTinyReformerConfig",
    "HfTinyReformerForCausalLM",
    "HfTinyReformerForMaskedLM",
    "HfTinyReformerForSequenceClassification",
    "HfTinyReformerForTokenClassification",
    "HfTinyReformerModel",
]

logger = logging.get_logger(__name__)
LAYERS = ("lsh", "local")
FACTOR = 6  # a hash of more than 2 ** 6 buckets is made of several
PRIOR = 4  # tokens at 0 before each text: without them, the first one would be its own mean


@strict
class HfTinyReformerConfig(EncoderConfig):
    """Half of `hidden_size` goes to each of the two streams of the reversible layers.

    attn_layers: the kind of attention of each layer: "lsh" or "local".
    attention_head_size: half of `hidden_size` / heads when None.
    position_embedding_type: "axial" (learned, for lengths up to the product of `axial_pos_shape`) or "rotary".
    num_hashes: rounds of hashing in an LSH layer; `forward` takes another number, too.
    num_buckets: even, or a list of even factors; by the length of each text when None.
    hash_centred_keys: hash a key without the mean of the keys so far (with `is_decoder`; else of the text). What all keys have
        in common would put most of them into a few buckets, too large to be searched.
    attend_across_buckets: in a causal LSH layer, a token sees all that is before it in its chunk and in the chunk before, as
        in transformers; otherwise only `lsh_attn_chunk_length` tokens of its own bucket before it. Chunks shift with every
        token, also with those to come: a model that looks across buckets sees a little of the future.
    chunk_size_feed_forward: how many tokens the feed-forward layer takes at a time; all when 0.
    is_decoder: a token sees those before it only. None lets the head decide.
    """

    model_type = "hf_tiny_reformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    choices = {"position_embedding_type": ("axial", "rotary")}

    vocab_size: int = 320
    hidden_size: int = 512
    attn_layers: list[str] | tuple[str, ...] = ("local", "lsh", "local", "lsh", "local", "lsh")
    num_attention_heads: int = 4
    attention_head_size: int | None = None
    intermediate_size: int = 1024
    hidden_dropout_prob: float | int = 0.05
    position_embedding_type: str = "axial"
    axial_pos_shape: list[int] | tuple[int, ...] = (64, 64)
    lsh_attn_chunk_length: int = 64
    local_attn_chunk_length: int = 64
    num_hashes: int = 1
    num_buckets: int | list[int] | tuple[int, ...] | None = None
    hash_centred_keys: bool = False
    attend_across_buckets: bool = False
    chunk_size_feed_forward: int = 512
    is_decoder: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs):
        kwargs.pop("num_hidden_layers", None)
        self.attn_layers, self.axial_pos_shape = list(self.attn_layers), list(self.axial_pos_shape)
        super().__post_init__(**kwargs)
        known_layers = self.attn_layers and set(self.attn_layers) <= set(LAYERS)
        self.require("attn_layers", known_layers, f"list one of {', '.join(LAYERS)} for each layer.")
        for name in ("lsh_attn_chunk_length", "local_attn_chunk_length", "num_hashes"):
            self.require(name, getattr(self, name) >= 1, "give 1 or more.")
        self.require(
            "hidden_size", self.hidden_size % 2 == 0, "it must be even: half of it goes to each of the two streams."
        )
        width, fields = self.head_size * self.num_attention_heads, "attention_head_size"
        if self.attention_head_size is None:
            width, fields = self.hidden_size // 2, "hidden_size (a stream has half of it) or num_attention_heads"
        self.require_heads(width, self.num_attention_heads, fields, self.position_embedding_type == "rotary")
        two = len(self.axial_pos_shape) == 2 and min(self.axial_pos_shape) >= 1
        self.require("axial_pos_shape", two, "give two numbers of 1 or more.")
        even = all(factor >= 2 and factor % 2 == 0 for factor in self.bucket_factors or [])
        self.require("num_buckets", even, "give an even number, or a list of them.")

    @property
    def num_hidden_layers(self) -> int:
        return len(self.attn_layers)

    @property
    def head_size(self) -> int:
        return self.attention_head_size or self.hidden_size // 2 // self.num_attention_heads

    @property
    def bucket_factors(self) -> list[int] | tuple[int, ...] | None:
        return [self.num_buckets] if isinstance(self.num_buckets, int) else self.num_buckets


@dataclass
class SharedInputs:
    """What the layers of one forward pass have in common.

    real (batch, past + length): which tokens are not padding.
    angles: of rotary positions.
    dense: attend over every pair of tokens, those out of reach masked, and give the weights.
    padded: whether some tokens may be padding.
    seed: of rotations and dropout; None outside of training.
    buckets: of each LSH layer, once it has run: what is computed backwards differs in its last digits, and must not fall into
        other buckets than in the forward pass.
    """

    real: Tensor
    angles: tuple[Tensor, Tensor] | None
    num_hashes: int
    dense: bool
    padded: bool = True
    past_key_values: Cache | None = None
    seed: int | None = None
    buckets: dict[int, Tensor] = field(default_factory=dict)


# Attention


class ReformerAttention(nn.Module):
    """What both kinds have in common. Tensors are (batch, heads, length, size) in between."""

    kind: str  # one of LAYERS
    parts: int  # of the projection: (query and key in one, value) or (query, key, value)
    alone: bool  # a token sees itself only where it sees nothing else

    def __init__(self, config: HfTinyReformerConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.head_size = config.num_attention_heads, config.head_size
        self.chunk = {"lsh": config.lsh_attn_chunk_length, "local": config.local_attn_chunk_length}[self.kind]
        width = self.num_heads * self.head_size
        self.qkv = nn.Linear(config.hidden_size // 2, self.parts * width)
        self.out = nn.Linear(width, config.hidden_size // 2)
        self.dropout = Dropout(config.attention_probs_dropout_prob)

    def keys_of(self, key: Tensor) -> Tensor:
        return key * self.head_size**-0.5

    def forward(self, x: Tensor, shared: SharedInputs) -> tuple[Tensor, Tensor | None]:
        projected = self.qkv(x).unflatten(-1, (self.parts, self.num_heads, self.head_size)).unbind(2)
        query, key, value = projected[0], projected[-2], projected[-1]  # (batch, length, heads, size)
        if shared.angles is not None:
            query, key = rotate(query, *shared.angles), rotate(key, *shared.angles)
        query, key, value = (part.transpose(1, 2).to(value.dtype) for part in (query, self.keys_of(key), value))
        del projected
        if shared.past_key_values is not None:
            key, value = shared.past_key_values.update(key, value, self.layer_idx)
        lengths, rate, weights = (query.shape[2], key.shape[2]), self.dropout.p if self.training else 0.0, None
        if shared.dense or lengths[0] < lengths[1]:
            seen = self.visibility(key, shared).dense(*lengths)
            y, weights = dense_attention(query, key, value, seen, self.alone, self.dropout)
        elif not torch.compiler.is_exporting() and lengths[1] <= self.chunk:
            y = full_attention(query, key, value, shared.real, bool(self.config.is_decoder), self.alone, rate)
        else:
            y = chunked_attention(query, key, value, self.visibility(key, shared), self.alone, rate)
        return self.out(y.transpose(1, 2).flatten(2)), weights


class LocalAttention(ReformerAttention):
    """A token sees its chunk of the text and the one before, and without `is_decoder` also the one behind."""

    kind = "local"
    parts = 3
    alone = False

    def visibility(self, key: Tensor, shared: SharedInputs) -> Visibility:
        chunk, real = self.chunk, shared.real if shared.padded else shared.real[:1]
        order, ranks = sort_tokens(torch.zeros_like(real, dtype=torch.long)[None, :, None], real, chunk)
        first = (ranks // chunk - 1) * chunk
        if self.config.is_decoder:
            return Visibility(order, ranks, first, ranks)
        order = padded(order, (0, 0, 0, 1), ranks.shape[-1] - 1)
        return Visibility(order, ranks, first, first + 3 * chunk - 1, width=3)


class LSHAttention(ReformerAttention):
    """Query and key are one, so that tokens with similar ones fall into the same bucket of a random hash. Sorted by bucket,
    a token sees what is near: see `attend_across_buckets` of the config."""

    kind = "lsh"
    parts = 2
    alone = True

    def keys_of(self, key: Tensor) -> Tensor:
        """Of length 1, as they are compared with queries of any length."""
        return key * (torch.rsqrt(key.float().square().mean(-1, keepdim=True) + 1e-6) * self.head_size**-0.5)

    @property
    def across(self) -> bool:
        return self.config.attend_across_buckets or not self.config.is_decoder

    @torch.no_grad()
    def visibility(self, key: Tensor, shared: SharedInputs) -> Visibility:
        chunk = self.chunk
        chunks = (shared.real.sum(1)[:, None, None] + chunk - 1).div(chunk, rounding_mode="floor").clamp(min=1)
        if self.layer_idx not in shared.buckets:
            centred = self.centred(key.float(), shared.real) if self.config.hash_centred_keys else key
            shared.buckets[self.layer_idx] = self.buckets(centred, chunks, shared).int()
        buckets = shared.buckets[self.layer_idx].long()
        order, ranks = sort_tokens(buckets, shared.real, chunk)
        if not self.across:  # another bucket is further away than a chunk; two chunks are one bucket
            buckets = F.pad(buckets, (0, ranks.shape[-1] - buckets.shape[-1])).int()
            at = ranks + buckets * chunk * (ranks >= 0)
            first = at - torch.where(chunks > 2, chunk, 2 * chunk).int()
            return Visibility(order, at, first, at - 1)
        last = chunks[..., None].expand(*order.shape[:3], 1, chunk)  # a text's last chunk is before its first one
        order[..., :1, :] = order.gather(-2, last).masked_fill(chunks[..., None] == 1, ranks.shape[-1] - 1)
        first = (ranks // chunk - 1) * chunk
        wrap = torch.where(ranks // chunk == 0, (chunks - 1) * chunk, 2**30).int()
        return Visibility(order, ranks, first, first + 2 * chunk - 1, wrap, causal=bool(self.config.is_decoder))

    def centred(self, key: Tensor, real: Tensor) -> Tensor:
        """Keys without their mean, in a causal layer without that of those up to each: it must not see later ones."""
        counted = real[:, None, :, None].to(key.dtype)
        total, count = ((x.cumsum(2) if self.config.is_decoder else x.sum(2, True)) for x in (key * counted, counted))
        return key - total / (count + PRIOR)

    def buckets(self, x: Tensor, chunks: Tensor, shared: SharedInputs) -> Tensor:
        """The bucket of each token of x in each round: (rounds, batch, heads, length). chunks (batch, 1, 1): of each text."""
        length, chunk = x.shape[2], self.chunk
        any_length = torch.compiler.is_exporting()  # buckets for up to 2 ** 12 chunks, of which short texts use some
        rounds = shared.num_hashes if any_length or length > 2 * chunk else 1  # in two chunks, all is in reach
        if self.config.bucket_factors is None:  # the power of two at or below the number of chunks, or twice that
            less = 0 if self.across else 1
            most = 2 * FACTOR if any_length else (-(-length // chunk)).bit_length()
            powers = 2 ** torch.arange(most, device=x.device)
            bits, most = (chunks[..., None] >= powers).sum(-1) - less, most - less
            factors = [(2 ** (bits - done).clamp(0, FACTOR), 2**FACTOR) for done in range(0, most, FACTOR)]
        else:
            factors = [(torch.full_like(chunks, factor), factor) for factor in self.config.bucket_factors]
        result, scale = torch.zeros(rounds, *x.shape[:3], dtype=torch.long, device=x.device), 1
        for index, (factor, largest) in enumerate(factors):
            rotations = self.rotations(rounds, largest // 2, index, shared.seed or 0, x.device)
            unused = torch.arange(largest // 2, device=x.device) >= factor[..., None] // 2
            turned = torch.einsum("bhls,rchs->rbhlc", x.float(), rotations).masked_fill(unused, 0.0)
            best = turned.abs().argmax(-1)
            negative = turned.gather(-1, best[..., None]).squeeze(-1) < 0
            result = result + scale * (best + negative * (factor // 2))
            scale = scale * factor
        return result if self.across else result * (chunks > 2)

    def rotations(self, rounds: int, count: int, index: int, seed: int, device: torch.device) -> Tensor:
        """(rounds, count, heads, size), for the factor `index` of the number of buckets."""
        seed = (seed * 1009 + self.layer_idx) * 1009 + index
        return normal_numbers((rounds, count, self.num_heads, self.head_size), seed, device)


ATTENTION = {one.kind: one for one in (LSHAttention, LocalAttention)}


# Reversible layers


@contextmanager
def random_numbers(shared: SharedInputs, place: int, device: torch.device) -> Iterator[None]:
    """In training, those of a place in the model inside, and the user's own ones untouched outside."""
    if shared.seed is None:
        yield
        return
    other = device.type != "cpu"
    with torch.random.fork_rng([device] if other else [], device_type=device.type if other else "cuda"):
        torch.default_generator.manual_seed(shared.seed + place)
        if other:
            torch.get_device_module(device).manual_seed(shared.seed + place)
        yield


class ReformerBlock(nn.Module):
    """Attention for one stream, feed-forward for the other: y1 = x1 + attend(x2), y2 = x2 + feed(y1)."""

    def __init__(self, config: HfTinyReformerConfig, layer_idx: int):
        super().__init__()
        size = config.hidden_size // 2
        self.layer_idx = layer_idx
        self.chunk_size = config.chunk_size_feed_forward
        self.attention_norm = layer_norm(config, size)
        self.attention = ATTENTION[config.attn_layers[layer_idx]](config, layer_idx)
        self.feed_forward_norm = layer_norm(config, size)
        self.feed_forward = FeedForward(config, size, config.intermediate_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def attend(self, x: Tensor, shared: SharedInputs) -> tuple[Tensor, Tensor | None]:
        with random_numbers(shared, 2 * self.layer_idx, x.device):
            y, weights = self.attention(self.attention_norm(x.to(self.attention_norm.weight.dtype)), shared)
            return self.dropout(y), weights

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tokens of x (batch, length, size) in pieces for `feed`."""
        flat = x.flatten(0, 1)
        return (flat,) if torch.compiler.is_exporting() else flat.split(self.chunk_size or len(flat))

    def feed(self, x: Tensor) -> Tensor:
        return self.dropout(self.feed_forward(self.feed_forward_norm(x.to(self.feed_forward_norm.weight.dtype))))

    def forward(self, x1: Tensor, x2: Tensor, shared: SharedInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        y, weights = self.attend(x2, shared)
        y1 = x1 + y
        with random_numbers(shared, 2 * self.layer_idx + 1, y1.device):
            fed = torch.cat([self.feed(piece) for piece in self.pieces(y1)])
        return y1, x2 + fed.view_as(x2), weights


class Reversible(torch.autograd.Function):
    """All blocks; only their output is kept, and `SharedInputs.buckets`. Backward computes each block's input from its
    output, once more with a graph.

    The parameters are inputs, so that they get their gradients like those of any other function.
    """

    @staticmethod
    def forward(ctx, x: Tensor, blocks: nn.ModuleList, shared: SharedInputs, *parameters: Tensor) -> Tensor:
        device = x.device.type
        ctx.blocks, ctx.shared, ctx.parameters = blocks, shared, parameters
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), False)
        y1, y2 = x.chunk(2, dim=-1)
        with torch.autocast(*ctx.autocast):
            for block in blocks:
                y1, y2, _ = block(y1, y2, shared)
        y = torch.cat((y1, y2), dim=-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        y1, y2 = ctx.saved_tensors[0].chunk(2, dim=-1)
        grad1, grad2 = grad.chunk(2, dim=-1)
        # Allocated at once: between the activations of all layers they would scatter the free memory.
        grads = {parameter: torch.zeros_like(parameter) for parameter in ctx.parameters if parameter.requires_grad}

        def differentiate(y: Tensor, x: Tensor, grad: Tensor, parameters: list[Tensor]) -> Tensor:
            """The gradient of x; those of the parameters are added to what is known."""
            x_grad, *found = torch.autograd.grad(y, [x, *parameters], grad.to(y.dtype), allow_unused=True)
            for parameter, new in zip(parameters, found, strict=True):
                if new is not None:
                    grads[parameter] += new
            return x_grad

        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            for block in reversed(ctx.blocks):
                parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
                fed, fed_grads = [], []
                with random_numbers(ctx.shared, 2 * block.layer_idx + 1, y1.device):
                    for piece, piece_grad in zip(block.pieces(y1), block.pieces(grad2), strict=True):
                        piece = piece.detach().requires_grad_()
                        new = block.feed(piece)
                        fed_grads.append(differentiate(new, piece, piece_grad, parameters))
                        fed.append(new.detach())
                y2 = y2 - torch.cat(fed).view_as(y2)
                grad1 = grad1 + torch.cat(fed_grads).view_as(grad1)
                x2 = y2.detach().requires_grad_()
                attended, _ = block.attend(x2, ctx.shared)
                grad2 = grad2 + differentiate(attended, x2, grad1, parameters)
                y1 = y1 - attended.detach()
        return torch.cat((grad1, grad2), dim=-1), None, None, *(grads.get(p) for p in ctx.parameters)


def refuse_what_cannot_work(blocks: nn.ModuleList) -> None:
    """Each of these would train with wrong gradients, or fail far from the cause."""
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is not None and wrapper.static_graph:
        raise ValueError(
            "DistributedDataParallel(static_graph=True) does not count the gradients that reversible layers give to their "
            "parameters all at once: leave static_graph out."
        )
    if any(not isinstance(b, ReformerBlock) or any(isinstance(p, DTensor) for p in b.parameters()) for b in blocks):
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
        """x (batch, length, hidden): word embeddings; longest: more than any position."""
        if self.axial:
            rows, columns = self.row_embeddings.num_embeddings, self.column_embeddings.num_embeddings
            if longest > rows * columns:
                raise ValueError(
                    f"{longest} tokens, but axial_pos_shape [{rows}, {columns}] has {rows * columns} places: "
                    f"[{-(-longest // columns)}, {columns}] would do."
                )
            x = x + self.row_embeddings(position_ids // columns) + self.column_embeddings(position_ids % columns)
        return self.dropout(x)


class HfTinyReformerPreTrainedModel(PreTrainedModel):
    """eager: attention over all pairs of tokens, those out of reach masked; sdpa: chunk by chunk, the same result."""

    config: HfTinyReformerConfig
    base_model_prefix = "reformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["HfTinyReformerModel"]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True


class HfTinyReformerModel(HfTinyReformerPreTrainedModel):
    gradient_checkpointing = False
    _keys_to_ignore_on_load_unexpected = [r"^lm_head"]

    def __init__(self, config: HfTinyReformerConfig):
        super().__init__(config)
        self.embeddings = ReformerEmbeddings(config)
        self.layers = nn.ModuleList(ReformerBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = layer_norm(config, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.post_init()

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
        config = self.config
        with_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        with_weights = config.output_attentions if output_attentions is None else output_attentions
        use_cache = config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and config.is_decoder and not torch.compiler.is_exporting():
            past_key_values = DynamicCache(config=config)
        x = embed(self.embeddings.word_embeddings, input_ids, inputs_embeds)
        batch, length, _ = x.shape
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        everything = torch.ones(batch, past + length, device=x.device)
        real = (everything if attention_mask is None else attention_mask).bool()
        if position_ids is None:
            position_ids = (real.cumsum(1) - 1).clamp(min=0)[:, past:]
        x = self.embeddings(x, position_ids, past + length)
        angles = None
        if config.position_embedding_type == "rotary":
            angles = rotary_angles(position_ids, config.head_size, x.dtype)
        dense = with_weights or config._attn_implementation == "eager"
        masked = attention_mask is not None
        shared = SharedInputs(real, angles, num_hashes or config.num_hashes, dense, masked, past_key_values)
        learning = (self.training or torch.is_grad_enabled()) and not torch.compiler.is_exporting()
        run = self.run_layers_uncompiled if learning else self.run_layers
        # What is computed backwards must not lose digits.
        states, attentions = run(x.float(), shared, with_states, with_weights)
        x = self.dropout(self.norm(states[-1].to(x.dtype)))
        states = (*states[:-1], x) if with_states else None
        return BaseModelOutputWithPast(x, past_key_values, states, tuple(attentions) if with_weights else None)

    def run_layers(
        self, x: Tensor, shared: SharedInputs, with_states: bool, with_weights: bool
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The states (batch, length, hidden) before and after each layer, the last of them at least, and the weights of its
        attention."""
        plain = with_states or with_weights or shared.past_key_values is not None or torch.compiler.is_exporting()
        if self.training:
            shared.seed = int(torch.randint(2**31, ()))
        if self.gradient_checkpointing:
            logger.warning_once(
                "Gradient checkpointing has no effect on a Reformer: its reversible layers keep less than checkpoints would."
            )
        if torch.is_grad_enabled() and not plain:
            refuse_what_cannot_work(self.layers)
            return [Reversible.apply(x, self.layers, shared, *self.layers.parameters())], []
        states, attentions = [x], []
        x1, x2 = x.chunk(2, dim=-1)
        for block in self.layers:
            x1, x2, weights = block(x1, x2, shared)
            attentions.append(weights)
            if with_states or block is self.layers[-1]:
                states.append(torch.cat((x1, x2), dim=-1))
        return states, attentions

    # Reversible layers start the random numbers of each layer anew, and inductor's gradients of attention in chunks are wrong.
    run_layers_uncompiled = torch.compiler.disable(run_layers)


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

    def predict(self, x, inputs, labels, num_items_in_batch):
        """Without logits when there are labels in training."""
        loss, _, logits = predict_tokens(self.lm_head, x, labels, num_items_in_batch)
        return loss, logits


class HfTinyReformerForCausalLM(ReformerLM, GenerationMixin):
    causal = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Count = None,
        num_hashes: int | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """
        labels (batch, length): the input; each token is predicted from those before it. -100 where there is nothing to learn.
        kwargs: as in `HfTinyReformerModel`. With past_key_values the logits are those without while the number of buckets
            stays: from the third chunk on always with `num_buckets` in the config, otherwise until the number of chunks has
            doubled.
        """
        outputs = self.reformer(input_ids, attention_mask, num_hashes=num_hashes, return_dict=True, **kwargs)
        x = outputs.last_hidden_state
        if labels is None:
            x = slice_logits_to_keep(x, logits_to_keep)
        else:
            labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        loss, logits = self.predict(x, None, labels, num_items_in_batch)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states, outputs.attentions)


class HfTinyReformerForMaskedLM(EncoderHead, ReformerLM):
    causal = False
    output_class = MaskedLMOutput


class HfTinyReformerForSequenceClassification(SequenceClassification, HfTinyReformerPreTrainedModel):
    encoder_class = HfTinyReformerModel


class HfTinyReformerForTokenClassification(TokenClassification, HfTinyReformerPreTrainedModel):
    encoder_class = HfTinyReformerModel
