"""The encoder-decoder Transformer (Vaswani et al., 2017): one sequence in, another out."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .heads import Count, predict_tokens
from .layers import (
    BlockSizes,
    Copies,
    CrossAttention,
    Dropout,
    EncoderBlock,
    HfTinyPreTrainedModel,
    HfTinyTextConfig,
    SelfAttention,
    embed,
    layer_norm,
    rotary_angles,
    sinusoids,
    widen,
)

__all__ = ["HfTinySeq2SeqConfig", "HfTinySeq2SeqForConditionalGeneration", "HfTinySeq2SeqModel"]


@strict
class HfTinySeq2SeqConfig(HfTinyTextConfig):
    """The paper's base model. Where two sizes are usually the same, None takes the other one's.

    decoder_layers: `encoder_layers` when None.
    qk_head_dim, v_head_dim: the size of keys and of values in one head (d_k and d_v); `hidden_size` / heads when None.
    position_embedding_type: "sinusoidal", "learned" (up to `max_position_embeddings`) or "rotary".
    norm_first: LayerNorm before each layer instead of after the residual sum.
    scale_embedding: multiply embeddings by the square root of `hidden_size`.
    label_smoothing: the share of each target's probability that the loss spreads over the vocabulary.
    copy_attention: whether a token may also be copied from the source: see `Pointer`.
    use_cache: whether keys and values are kept for the next token. When None, `generate` does so, and `forward` when asked to.
    """

    model_type = "hf_tiny_seq2seq"
    attribute_map = {"num_hidden_layers": "encoder_layers"}
    keys_to_ignore_at_inference = ["past_key_values", "nll", "copy_attentions"]
    choices = {"position_embedding_type": ("sinusoidal", "learned", "rotary")}

    vocab_size: int = 37000
    hidden_size: int = 512
    encoder_layers: int = 6
    decoder_layers: int | None = None
    num_attention_heads: int = 8
    qk_head_dim: int | None = None
    v_head_dim: int | None = None
    intermediate_size: int = 2048
    max_position_embeddings: int = 1024
    position_embedding_type: str = "sinusoidal"
    norm_first: bool = False
    scale_embedding: bool = True
    label_smoothing: float | int = 0.1
    copy_attention: bool = False
    layer_norm_eps: float = 1e-5
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3
    decoder_start_token_id: int | None = 2
    is_encoder_decoder: bool = True

    def __post_init__(self, **kwargs):
        if self.decoder_layers is None:
            self.decoder_layers = self.encoder_layers
        super().__post_init__(**kwargs)
        self.require("label_smoothing", 0 <= self.label_smoothing < 1, "choose a share from 0 to below 1.")
        if None in (self.qk_head_dim, self.v_head_dim):
            fields = "hidden_size or num_attention_heads, or give qk_head_dim and v_head_dim"
            self.require_heads(self.hidden_size, self.num_attention_heads, fields)
        turned = {"sinusoidal": self.hidden_size, "rotary": self.head_sizes[0]}.get(self.position_embedding_type, 0)
        if turned % 2:
            raise ValueError(f"{self.position_embedding_type} positions need an even size, not {turned}.")

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Of keys and of values, in one head."""
        size = self.hidden_size // self.num_attention_heads
        return self.qk_head_dim or size, self.v_head_dim or size

    @property
    def block_sizes(self) -> BlockSizes:
        return BlockSizes(self.hidden_size, self.num_attention_heads, self.intermediate_size, self.head_sizes)


@dataclass
class HfTinySeq2SeqLMOutput(Seq2SeqLMOutput):
    """
    loss: with label smoothing; nll: without it, and without a gradient. Both are divided by the count of labels.
    logits (batch, length, vocabulary): not in training, when there are labels.
    copy_attentions (batch, length, source): the probability with which each token of the source is copied, when attentions
        are asked for. What is missing to a sum of 1 is the vocabulary's share.
    """

    nll: Tensor | None = None
    copy_attentions: Tensor | None = None


@dataclass
class HfTinySeq2SeqEncoderOutput(BaseModelOutput):
    """source_ids (batch, source): what can be copied; None where nothing is."""

    source_ids: Tensor | None = None


def top_k(x: Tensor, k: int, block: int = 128) -> tuple[Tensor, Tensor]:
    """`x.topk(k)` of long rows (n, length), on a CPU 5 times as fast: it looks only into the blocks with the largest maxima,
    and at the end of the row that fills no block."""
    whole = x.shape[1] // block * block
    best = x[:, :whole].unflatten(1, (-1, block)).amax(-1)  # (n, blocks)
    best = best.topk(min(k, best.shape[1])).indices
    inside = torch.arange(block, device=x.device)
    rest = torch.arange(whole, x.shape[1], device=x.device).expand(len(x), -1)
    places = torch.cat(((best[:, :, None] * block + inside).flatten(1), rest), dim=1)
    values, chosen = x.gather(1, places).topk(k)
    return values, places.gather(1, chosen)


class DecoderBlock(EncoderBlock):
    """An `EncoderBlock` that also attends to what the encoder says. A class of its own: sharding wraps blocks by class."""


def copied_so_far(source_ids: Tensor, read: Tensor, cache: EncoderDecoderCache | None) -> Tensor:
    """How many of the first tokens of the source (batch, source) stand, in their order, in what the decoder has read up to each
    token (batch * copies, length): where to go on, also after words that were added. The cache keeps it."""
    past = 0 if cache is None else cache.get_seq_length() - read.shape[1]
    source = F.pad(source_ids, (0, 1), value=-1).repeat_interleave(len(read) // len(source_ids), dim=0)
    known = read.new_zeros(len(read), 1) if past == 0 else vars(cache)["copied"][:, :past]
    counts = [known[:, -1:]]
    for place in range(1 if past == 0 else 0, read.shape[1]):  # the first token only starts the text
        found = source.gather(1, counts[-1]) == read[:, place : place + 1]
        counts.append(counts[-1] + found)
    known = torch.cat((known[:, :-1], *counts), dim=1)
    if cache is not None:
        vars(cache)["copied"] = known
    return known[:, -read.shape[1] :]


class Pointer(nn.Module):
    """A pointer to the source beside the output layer, and a gate between the two: the pointer-generator network of See
    et al. (2017). Scores are a bilinear form of the decoder's states and the encoder's, so there are no keys to cache. Before
    anything is learned, the gate and `follow` make the model repeat its source."""

    START = (4.0, 4.0, 4.0, -1.0)  # of `follow`, and of the gate's bias

    def __init__(self, size: int):
        super().__init__()
        self.query = nn.Linear(size, size)
        self.gate = nn.Linear(2 * size, 1)
        self.follow = nn.Parameter(torch.tensor(self.START[:3]))

    def places(self, source_ids: Tensor, read: Tensor, copied: Tensor) -> Tensor:
        """(batch * copies, length, source): what speaks for a place of the source, whatever it means: that it comes after the
        token that was `read` last, is near to as many tokens as were `copied`, and not before them; both are (batch * copies,
        length)."""
        before = F.pad(source_ids[:, :-1], (1, 0), value=-1)
        after_read = read.view(len(source_ids), -1, 1) == before[:, None]  # (batch, target, source)
        back = copied[..., None] - torch.arange(before.shape[1], device=read.device)  # (batch * copies, length, source)
        far = back.abs().to(self.follow.dtype).log1p()
        return after_read.view(far.shape) * self.follow[0] - far * self.follow[1] - (back > 0) * self.follow[2]

    def forward(
        self, x: Tensor, memory: Tensor, source_ids: Tensor, mask: Tensor | None, places: Tensor
    ) -> tuple[Copies, Tensor]:
        """x (batch * copies, length, hidden), memory (batch, source, hidden), mask (batch, source), places: as above; also
        the probability of each place of the source."""
        states = x.reshape(memory.shape[0], -1, x.shape[-1])  # the beams of a text share its source
        scores = widen(self.query(states) @ memory.mT) * x.shape[-1] ** -0.5  # (batch, target, source)
        scores = scores + places.reshape(scores.shape)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None].bool(), torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        gate = widen(self.gate(torch.cat((states, weights.to(memory.dtype) @ memory), dim=-1)))
        same = source_ids[:, :, None] == source_ids[:, None]  # (batch, source, source)
        with torch.autocast(x.device.type, enabled=False):
            copied = weights @ same.to(weights.dtype)  # c of the token at each place
        again = same.tril(-1).any(-1)[:, None]  # not the first place of its token
        odds = (copied.clamp(min=torch.finfo(copied.dtype).tiny).log() - gate).masked_fill(again, -torch.inf)
        ids = source_ids[:, None].expand_as(odds)
        shape = (*x.shape[:2], -1)
        parts = (part.reshape(shape) for part in (F.logsigmoid(gate), odds, ids))
        return Copies(*parts), (weights * (-gate).sigmoid()).reshape(shape)


class HfTinySeq2SeqPreTrainedModel(HfTinyPreTrainedModel):
    config: HfTinySeq2SeqConfig
    base_model_prefix = "model"
    # transformers cuts the queries that flash attention gets by the mask of the keys: wrong when the two are of different
    # lengths and the source is padded.
    _supports_flash_attn = False
    _can_compile_fullgraph = True
    _no_split_modules = ["EncoderBlock", "DecoderBlock"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, Pointer):
            *follow, gate = module.START
            init.copy_(module.follow, torch.tensor(follow))
            init.constant_(module.gate.bias, gate)


class Positions(nn.Module):
    """Word embeddings to the first layer's input: scaled, with the positions that are added to them, and dropout."""

    def __init__(self, config: HfTinySeq2SeqConfig):
        super().__init__()
        self.kind = config.position_embedding_type
        self.scale = config.hidden_size**0.5 if config.scale_embedding else 1.0
        self.key_size = config.head_sizes[0]
        if self.kind == "learned":
            self.embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, past: int | Tensor = 0) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """x (batch, length, hidden), of which `past` places came before; also the angles, for rotary positions."""
        position_ids = torch.arange(x.shape[1], device=x.device)[None] + past
        if self.kind == "rotary":
            return self.dropout(x * self.scale), rotary_angles(position_ids, self.key_size, x.dtype)
        if self.kind == "sinusoidal":
            places = sinusoids(position_ids, x.shape[-1], x.dtype)
        else:
            known = self.embeddings.num_embeddings
            if not torch.compiler.is_compiling() and x.shape[1] + int(past) > known:
                raise ValueError(f"{x.shape[1] + past} tokens, but max_position_embeddings is {known}.")
            places = self.embeddings(position_ids)
        return self.dropout(torch.add(places, x, alpha=self.scale)), None


class HfTinySeq2SeqEncoder(HfTinySeq2SeqPreTrainedModel):
    """It also owns the word embeddings, which the decoder and the output layer share."""

    _input_embed_layer = "word_embeddings"
    _can_record_outputs = {"hidden_states": EncoderBlock, "attentions": SelfAttention}

    def __init__(self, config: HfTinySeq2SeqConfig):
        super().__init__(config)
        size = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.positions = Positions(config)
        self.layers = nn.ModuleList(EncoderBlock(config, config.block_sizes) for _ in range(config.encoder_layers))
        self.norm = layer_norm(config, size) if config.norm_first else nn.Identity()
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs,
    ) -> HfTinySeq2SeqEncoderOutput:
        x, angles = self.positions(embed(self.word_embeddings, input_ids, inputs_embeds))
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask)
        for layer in self.layers:
            x = layer(x, mask, angles, **kwargs)
        source_ids = input_ids if self.config.copy_attention else None  # `generate` only keeps what the encoder gives
        return HfTinySeq2SeqEncoderOutput(last_hidden_state=self.norm(x), source_ids=source_ids)


class HfTinySeq2SeqDecoder(HfTinySeq2SeqPreTrainedModel):
    _can_record_outputs = {
        "hidden_states": DecoderBlock,
        "attentions": SelfAttention,
        "cross_attentions": CrossAttention,
    }

    def __init__(self, config: HfTinySeq2SeqConfig):
        super().__init__(config)
        self.positions = Positions(config)
        size, depth = config.hidden_size, config.decoder_layers or 0  # None has become a number
        self.layers = nn.ModuleList(DecoderBlock(config, config.block_sizes, index) for index in range(depth))
        self.norm = layer_norm(config, size) if config.norm_first else nn.Identity()
        self.post_init()

    @capture_outputs
    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """`inputs_embeds` may hold several sequences for each of `encoder_hidden_states`: see `CrossAttention`."""
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        x, angles = self.positions(inputs_embeds, past)
        own_cache = None if past_key_values is None else past_key_values.self_attention_cache
        mask = create_causal_mask(self.config, x, attention_mask, own_cache)  # padding and look-ahead in one
        memory = encoder_hidden_states
        memory_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=x.reshape(memory.shape[0], -1, x.shape[-1]),
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=memory,
        )
        for layer in self.layers:
            x = layer(x, mask, angles, memory, memory_mask, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(self.norm(x), past_key_values)


class HfTinySeq2SeqModel(HfTinySeq2SeqPreTrainedModel):
    _keys_to_ignore_on_load_unexpected = [r"^lm_head", r"^copy_attention"]

    def __init__(self, config: HfTinySeq2SeqConfig):
        super().__init__(config)
        self.encoder = HfTinySeq2SeqEncoder(config)
        self.decoder = HfTinySeq2SeqDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        self.encoder.word_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> Seq2SeqModelOutput:
        """
        decoder_attention_mask: what of the decoder's own tokens is not padding; not needed for padding at the end, which
            no earlier token sees.
        inputs_embeds, decoder_inputs_embeds: what `get_input_embeddings()` gives, not yet scaled.
        """
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            raise ValueError("Give labels, or exactly one of decoder_input_ids and decoder_inputs_embeds.")
        if encoder_outputs is None:
            encoded = self.encoder(input_ids, attention_mask, inputs_embeds, return_dict=True, **kwargs)
        else:
            encoded = BaseModelOutput(*encoder_outputs) if isinstance(encoder_outputs, tuple) else encoder_outputs
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self.encoder.word_embeddings(decoder_input_ids)
        memory = (encoded.last_hidden_state, attention_mask)
        inputs = (decoder_inputs_embeds, decoder_attention_mask, *memory, past_key_values)
        outputs = self.decoder(*inputs, return_dict=True, **kwargs)
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class HfTinySeq2SeqForConditionalGeneration(HfTinySeq2SeqPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.encoder.word_embeddings.weight"}

    def __init__(self, config: HfTinySeq2SeqConfig):
        super().__init__(config)
        self.model = HfTinySeq2SeqModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        if config.copy_attention:
            self.copy_attention = Pointer(config.hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Count = None,
        **kwargs,
    ) -> HfTinySeq2SeqLMOutput:
        """
        labels (batch, length): the target, -100 where there is none. The decoder reads them shifted right (teacher
            forcing), unless its own input is given.
        logits_to_keep: only at so many of the last places, or at these places; all when 0.
        num_items_in_batch: how many labels the whole optimiser step has; counted in this batch when None.
        kwargs: as in `HfTinySeq2SeqModel`.
        """
        if labels is not None and decoder_input_ids is None and kwargs.get("decoder_inputs_embeds") is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        inputs = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs)
        outputs = self.model(*inputs, return_dict=True, **kwargs)
        x, kept = outputs.last_hidden_state, logits_to_keep if labels is None else 0
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        copies = None
        if self.config.copy_attention:
            source_ids, read = self.source_ids(input_ids, encoder_outputs), self.known(decoder_input_ids)
            text = source_ids if attention_mask is None else source_ids.masked_fill(attention_mask == 0, -1)
            places = self.copy_attention.places(text, read, copied_so_far(text, read, outputs.past_key_values))
            given = (outputs.encoder_last_hidden_state, source_ids, attention_mask, slice_logits_to_keep(places, kept))
            copies, weights = self.copy_attention(slice_logits_to_keep(x, kept), *given)
            if kwargs.get("output_attentions"):
                rest["copy_attentions"] = weights
        smoothing = self.config.label_smoothing
        x = slice_logits_to_keep(x, kept)
        loss, nll, logits = predict_tokens(self.lm_head, x, labels, num_items_in_batch, smoothing, copies)
        return HfTinySeq2SeqLMOutput(loss=loss, logits=logits, nll=nll, **rest)

    def source_ids(self, input_ids: Tensor | None, encoder_outputs: BaseModelOutput | tuple | None) -> Tensor:
        if input_ids is None and isinstance(encoder_outputs, HfTinySeq2SeqEncoderOutput):
            input_ids = encoder_outputs.source_ids
        return self.known(input_ids)

    def known(self, ids: Tensor | None) -> Tensor:
        if ids is None:
            raise ValueError(
                "copy_attention is True, and states or embeddings do not say which tokens to copy: give input_ids, beside "
                "encoder_outputs if there are any, and decoder_input_ids."
            )
        return ids

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shifted right behind the start token; -100 becomes padding afterwards."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise ValueError("The config needs decoder_start_token_id and pad_token_id to shift labels to the right.")
        shifted = torch.cat((labels.new_full((labels.shape[0], 1), start), labels[:, :-1]), dim=1)
        return shifted.masked_fill(shifted == -100, pad)

    # Faster ways to do what GenerationMixin does. The beams (or samples) of a text share what the encoder said of it, and
    # the keys and values made from that: nothing of it is copied for beams, or moved when they change places.

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = True, input_ids: Tensor | None = None, **model_kwargs
    ) -> tuple[Tensor, dict]:
        names = ("encoder_outputs", "attention_mask")
        shared = {name: model_kwargs.pop(name) for name in names if name in model_kwargs}
        input_ids, model_kwargs = super()._expand_inputs_for_generation(expand_size, False, input_ids, **model_kwargs)
        return input_ids, {**model_kwargs, **shared}

    def _reorder_cache(self, past_key_values: EncoderDecoderCache, beam_idx: Tensor) -> EncoderDecoderCache:
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        if self.config.copy_attention:
            vars(past_key_values)["copied"] = vars(past_key_values)["copied"][beam_idx]
        return past_key_values

    def _get_top_k_continuations(self, accumulated_log_probs: Tensor, **given) -> tuple[Tensor, Tensor, Tensor]:
        """The best continuations of a text's beams: their scores, tokens so far, and the beams that they come from."""
        if given["do_sample"]:
            return super()._get_top_k_continuations(accumulated_log_probs=accumulated_log_probs, **given)
        scores, places = top_k(accumulated_log_probs, given["beams_to_keep"])  # (batch, kept)
        vocab_size = accumulated_log_probs.shape[1] // given["num_beams"]
        beams, tokens = places // vocab_size, places % vocab_size
        sequences = self._gather_beams(given["running_sequences"], beams)
        sequences[:, :, given["cur_len"]] = tokens
        origins = self._gather_beams(given["running_beam_indices"], beams)
        first_beams = torch.arange(0, given["batch_size"] * given["num_beams"], given["num_beams"], device=beams.device)
        origins[:, :, given["cur_len"] - given["decoder_prompt_len"]] = beams + first_beams[:, None]
        return scores, sequences, origins
