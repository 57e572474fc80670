"""ELECTRA (Clark et al., 2020): a small generator proposes tokens, a discriminator finds the replaced ones."""

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils.output_capturing import capture_outputs

from .heads import EncoderConfig, EncoderHead, SequenceClassification, TokenClassification, token_loss
from .joint import JOINT, JointPreTraining, JointStep, Objective, rtd_loss
from .layers import (
    BlockSizes,
    Dropout,
    EncoderBlock,
    HfTinyPreTrainedModel,
    SelfAttention,
    binary_cross_entropy,
    cross_entropy,
    embed,
    layer_norm,
    rotary_angles,
)

__all__ = [
    "HfTinyElectraConfig",
    "HfTinyElectraForMaskedLM",
    "HfTinyElectraForPreTraining",
    "HfTinyElectraForSequenceClassification",
    "HfTinyElectraForTokenClassification",
    "HfTinyElectraModel",
]


@strict
class HfTinyElectraConfig(EncoderConfig):
    """Sizes of the discriminator; the generator is `generator_size` times as wide.

    generator_layers: of a generator that is narrower; as many as the discriminator has when None.
    sharing: what generator and discriminator have in common: "none", "embeddings" (word, position and type
        embeddings with their norm; the paper's choice), "all" (needs `generator_size` 1), or "disentangled" (He et al., 2021):
        the discriminator's embeddings are the generator's plus a difference that it learns, and its loss does not move the
        generator's. The model has both tables, as with "none"; what trains it adds the generator's steps to the other.
    position_embedding_type: "absolute" (learned, as in the paper) or "rotary".
    norm_first: LayerNorm before each layer instead of after the residual sum.
    discriminator_weight: λ of the paper's equation 3.
    architecture: "electra", or "modern", whose encoder is a native ModernBERT with global attention: norms first, rotary
        positions, gates, no biases, no token types, and embeddings as wide as the encoder, whatever else is given for these.
    """

    model_type = "hf_tiny_electra"
    choices = {
        "sharing": ("none", "embeddings", "all", "disentangled"),
        "position_embedding_type": ("absolute", "rotary"),
        "architecture": ("electra", "modern"),
    }

    vocab_size: int = 30522
    embedding_size: int = 128
    hidden_size: int = 256
    num_hidden_layers: int = 12
    num_attention_heads: int = 4
    intermediate_size: int = 1024
    hidden_act: str = "gelu"
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    position_embedding_type: str = "absolute"
    rope_theta: float | int = 10_000.0
    type_vocab_size: int = 2
    norm_first: bool = False
    sharing: str = "embeddings"
    generator_size: float | int = 0.25
    generator_layers: int | None = None
    discriminator_weight: float | int = 50.0
    architecture: str = "electra"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.modern:
            self.norm_first, self.position_embedding_type = True, "rotary"
            self.type_vocab_size, self.embedding_size = 0, self.hidden_size
        self.tie_word_embeddings = True  # always; PEFT notes False when it merges into a model with sharing "none"
        if self.sharing == "all":
            advice = 'a generator that shares "all" has the discriminator\'s size: give 1, or share "embeddings" only.'
            self.require("generator_size", self.generator_size == 1, advice)
        for scale in (1, self.generator_size):
            fields = f"hidden_size ({self.hidden_size} x {scale}), num_attention_heads or generator_size"
            self.require_heads(*self.sizes(scale)[:2], fields, even=True)

    @property
    def modern(self) -> bool:
        return self.architecture == "modern"

    @property
    def two_tables(self) -> bool:
        """Whether the generator has embeddings of its own."""
        return self.sharing in ("none", "disentangled")

    @property
    def generator_depth(self) -> int:
        return self.num_hidden_layers if self.generator_size == 1 else self.generator_layers or self.num_hidden_layers

    def sizes(self, scale: float) -> BlockSizes:
        """Of an encoder that is `scale` times as wide."""
        sizes = (self.hidden_size, self.num_attention_heads, self.intermediate_size)
        hidden, heads, inner = (max(1, round(size * scale)) for size in sizes)
        return BlockSizes(hidden, heads, inner)


class ElectraEmbeddings(nn.Module):
    def __init__(self, config: HfTinyElectraConfig):
        super().__init__()
        size = config.embedding_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.types = config.type_vocab_size > 0
        if self.types:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.learned_positions = config.position_embedding_type == "absolute"
        if self.learned_positions:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.norm = layer_norm(config, size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Also the positions, counted from 0 unless they are given."""
        x = embed(self.word_embeddings, input_ids, inputs_embeds)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        if self.learned_positions:
            x = x + self.position_embeddings(position_ids)
        if self.types:
            x = x + self.token_type_embeddings(position_ids.new_zeros(1) if token_type_ids is None else token_type_ids)
        return self.dropout(self.norm(x)), position_ids


class ElectraEncoder(nn.Module):
    """From embeddings to hidden states; `scale` makes it narrower, for the generator."""

    def __init__(self, config: HfTinyElectraConfig, scale: float = 1, depth: int | None = None):
        super().__init__()
        self.config = config
        sizes = config.sizes(scale)
        self.head_size = sizes.hidden_size // sizes.num_heads
        narrow = config.embedding_size != sizes.hidden_size
        self.project = nn.Linear(config.embedding_size, sizes.hidden_size) if narrow else nn.Identity()
        self.layers = nn.ModuleList(EncoderBlock(config, sizes) for _ in range(depth or config.num_hidden_layers))
        if config.modern and not narrow:
            self.layers[0].attention_norm = nn.Identity()  # the embeddings end in one
        self.norm = layer_norm(config, sizes.hidden_size) if config.norm_first else nn.Identity()

    def forward(self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor, **kwargs) -> Tensor:
        x = self.project(x)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask)
        angles = None
        if self.config.position_embedding_type == "rotary":
            angles = rotary_angles(position_ids, self.head_size, x.dtype, self.config.rope_theta)
        for layer in self.layers:
            x = layer(x, mask, angles, **kwargs)
        return self.norm(x)


class HfTinyElectraPreTrainedModel(HfTinyPreTrainedModel):
    config: HfTinyElectraConfig
    base_model_prefix = "electra"
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["ElectraEmbeddings", "EncoderBlock"]
    _can_record_outputs = {"hidden_states": EncoderBlock, "attentions": SelfAttention}
    _keys_to_ignore_on_load_unexpected = [r"^generator", r"^discriminator", r"^objective"]  # of a joint checkpoint


class HfTinyElectraModel(HfTinyElectraPreTrainedModel):
    """The discriminator's encoder: what is kept after pretraining."""

    def __init__(self, config: HfTinyElectraConfig):
        super().__init__(config)
        self.embeddings = ElectraEmbeddings(config)
        self.encoder = ElectraEncoder(config)
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        x, position_ids = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)
        return BaseModelOutput(self.encoder(x, attention_mask, position_ids, **kwargs))


class GeneratorHead(nn.Module):
    """From an encoder's width to the embedding size, where the tied output layer takes over."""

    def __init__(self, config: HfTinyElectraConfig, scale: float):
        super().__init__()
        self.dense = nn.Linear(config.sizes(scale).hidden_size, config.embedding_size, bias=not config.modern)
        self.norm = layer_norm(config, config.embedding_size)
        self.activation = ACT2FN["gelu"]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


class HfTinyElectraForMaskedLM(EncoderHead, HfTinyElectraPreTrainedModel):
    """The generator. What it shares with the discriminator stays under the name `electra`, so that a joint checkpoint
    holds every weight once and loads into each class without renaming."""

    output_class = MaskedLMOutput
    base_model_prefix = ""  # it is its own: no part of it is a model
    _keys_to_ignore_on_load_unexpected = [r"^electra", r"^discriminator", r"^objective"]

    def __init__(self, config: HfTinyElectraConfig):
        super().__init__(config)
        own, shared = nn.ModuleDict(), nn.ModuleDict()
        (own if config.two_tables else shared)["embeddings"] = ElectraEmbeddings(config)
        encoder = ElectraEncoder(config, config.generator_size, config.generator_depth)
        (shared if config.sharing == "all" else own)["encoder"] = encoder
        self.generator = own
        self.electra = self.build_shared(shared)
        self.generator_head = GeneratorHead(config, config.generator_size)
        self.generator_lm_head = nn.Linear(config.embedding_size, config.vocab_size)
        owner = "generator" if config.two_tables else "electra"
        self._tied_weights_keys = {"generator_lm_head.weight": f"{owner}.embeddings.word_embeddings.weight"}
        self.post_init()

    def build_shared(self, shared: nn.ModuleDict) -> nn.Module:
        return shared

    def get_input_embeddings(self) -> nn.Embedding:
        return self.generator_embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        self.generator_embeddings.word_embeddings = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.generator_lm_head

    def set_output_embeddings(self, value: nn.Linear):
        self.generator_lm_head = value

    @property
    def generator_embeddings(self) -> ElectraEmbeddings:
        return (self.generator if self.config.two_tables else self.electra).embeddings

    @property
    def generator_encoder(self) -> ElectraEncoder:
        return (self.electra if self.config.sharing == "all" else self.generator).encoder

    @capture_outputs
    def encode(self, *inputs: Tensor | None, **kwargs) -> BaseModelOutput:
        return BaseModelOutput(self.run_generator(*inputs, **kwargs))

    def run_generator(
        self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None, inputs_embeds=None, **kwargs
    ) -> Tensor:
        x, position_ids = self.generator_embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)
        return self.generator_encoder(x, attention_mask, position_ids, **kwargs)

    def guess(self, states: Tensor) -> Tensor:
        return self.generator_lm_head(self.generator_head(states))

    def predict(self, x, inputs, labels, num_items_in_batch):
        logits = self.guess(x)
        return None if labels is None else token_loss(logits, labels, num_items_in_batch), logits


def mlm_loss(model: PreTrainedModel, step: JointStep) -> Tensor:
    """BERT, when all is shared."""
    return step.mlm_loss


def masked_rtd_loss(model: PreTrainedModel, step: JointStep) -> Tensor:
    """ELECTRA 15%: only what was masked is judged."""
    losses = binary_cross_entropy(step.logits, step.replaced, step.masked, step.counts[0])
    return step.mlm_loss + model.config.discriminator_weight * losses


def replace_mlm_loss(model: PreTrainedModel, step: JointStep) -> Tensor:
    """BERT that sees the generator's tokens in the place of [MASK]."""
    guesses = model.generator_lm_head(model.objective_head(step.states.flatten(0, 1)[step.places]))
    return step.mlm_loss + cross_entropy(guesses, step.mlm_labels, step.counts[0])


def all_tokens_mlm_loss(model: PreTrainedModel, step: JointStep) -> Tensor:
    """The same, of every token: it is copied with the probability that it is original, else taken from the softmax."""
    guesses = model.generator_lm_head(model.objective_head(step.states)).float()
    right = guesses.log_softmax(-1).gather(-1, step.original[..., None])[..., 0]
    written = F.logsigmoid(step.logits.float()) + right
    copied = F.logsigmoid(-step.logits.float()).masked_fill(step.replaced, -torch.inf)
    losses = -torch.logaddexp(copied, written)  # (batch, length)
    return step.mlm_loss + (losses if step.valid is None else losses * step.valid).sum() / step.counts[1]


def adversarial_loss(model: PreTrainedModel, step: JointStep) -> Tensor:
    """Appendix F: the generator raises the discriminator's loss at what it sampled (REINFORCE), less a learned baseline
    for each position; the more even its distribution, the better. It never sees which tokens were right."""
    judged, wrong = (x.flatten()[step.places].float() for x in (step.logits.detach(), step.replaced))
    reward = F.binary_cross_entropy_with_logits(judged, wrong, reduction="none")
    guess = model.objective_head(step.mlm_states.detach()).float().squeeze(-1)  # the baseline is -log sigmoid(guess)
    log_probs = step.mlm_logits.float().log_softmax(-1)  # (masked, vocabulary)
    chosen = log_probs.gather(-1, step.sampled[:, None])[:, 0]
    gain = (reward - F.softplus(-guess)).detach() * chosen - ENTROPY_WEIGHT * (log_probs.exp() * log_probs).sum(-1)
    baseline_loss = F.binary_cross_entropy_with_logits(guess, (-reward).exp(), reduction="sum")
    return (baseline_loss - gain.sum()) / step.counts[0] + rtd_loss(model, step)


ENTROPY_WEIGHT = 0.01
OBJECTIVES = {
    "joint": JOINT,
    "mlm": Objective(mlm_loss, discriminator=False),
    "rtd": Objective(rtd_loss, generator=False),
    "adversarial": Objective(adversarial_loss, head=lambda c: nn.Linear(c.sizes(c.generator_size)[0], 1)),
    "masked_rtd": Objective(masked_rtd_loss),
    "replace_mlm": Objective(replace_mlm_loss, head=lambda config: GeneratorHead(config, 1)),
    "all_tokens_mlm": Objective(all_tokens_mlm_loss, head=lambda config: GeneratorHead(config, 1)),
}


class HfTinyElectraForPreTraining(JointPreTraining, HfTinyElectraForMaskedLM):
    """Generator and discriminator; `objective` is one of OBJECTIVES."""

    base_model_prefix = "electra"
    _keys_to_ignore_on_load_unexpected = [r"^objective"]

    def __init__(self, config: HfTinyElectraConfig):
        super().__init__(config)
        self.discriminator_head = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size),
            ACT2FN[config.hidden_act],
            nn.Linear(config.hidden_size, 1),
        )
        self.post_init()

    def build_shared(self, shared: nn.ModuleDict) -> nn.Module:
        return HfTinyElectraModel(self.config)

    @property
    def discriminator_embeddings(self) -> ElectraEmbeddings:
        return self.electra.embeddings

    def get_input_embeddings(self) -> nn.Embedding:
        return self.electra.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding):
        self.electra.set_input_embeddings(value)

    def _resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Of both, where the generator has embeddings of its own."""
        if self.config.two_tables:
            self._get_resized_embeddings(self.generator.embeddings.word_embeddings, *args, **kwargs)  # in place
        return super()._resize_token_embeddings(*args, **kwargs)

    def discriminate(self, input_ids: Tensor | None, **kwargs) -> tuple[BaseModelOutput, Tensor]:
        """The encoder's outputs, and the logits (batch, length)."""
        outputs = self.electra(input_ids, return_dict=True, **kwargs)
        return outputs, self.discriminator_head(outputs.last_hidden_state).squeeze(-1)


class HfTinyElectraForSequenceClassification(SequenceClassification, HfTinyElectraPreTrainedModel):
    encoder_class = HfTinyElectraModel


class HfTinyElectraForTokenClassification(TokenClassification, HfTinyElectraPreTrainedModel):
    encoder_class = HfTinyElectraModel
