"""ELECTRA (Clark et al., 2020): a small generator proposes tokens, a discriminator finds the replaced ones."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .heads import POOLING, SequenceClassification, TokenClassification
from .layers import (
    Dropout,
    EncoderBlock,
    HfTinyConfig,
    SelfAttention,
    binary_cross_entropy,
    cross_entropy,
    rotary_angles,
    sample_inverse_cdf,
)

SHARING = ("none", "embeddings", "all")
POSITIONS = ("absolute", "rotary")


@strict
class HfTinyElectraConfig(HfTinyConfig):
    """Sizes of the discriminator; the generator is `generator_size` times as wide and has the same depth.

    sharing: what generator and discriminator have in common: "none", "embeddings" (word, position and type
        embeddings with their norm; the paper's choice) or "all" (needs `generator_size` 1).
    position_embedding_type: "absolute" (learned, as in the paper) or "rotary".
    norm_first: LayerNorm before each layer instead of after the residual sum.
    discriminator_weight: λ of the paper's equation 3.
    classifier_pooling: what a text is classified by: the "mean" of its tokens' states, or the first one ("cls", as in the paper).
    classifier_dropout: in front of a task's output layer; `hidden_dropout_prob` when None.
    """

    model_type = "hf_tiny_electra"

    vocab_size: int = 30522
    embedding_size: int = 128
    hidden_size: int = 256
    num_hidden_layers: int = 12
    num_attention_heads: int = 4
    intermediate_size: int = 1024
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    position_embedding_type: str = "absolute"
    rope_theta: float | int = 10_000.0
    type_vocab_size: int = 2
    norm_first: bool = False
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    sharing: str = "embeddings"
    generator_size: float | int = 0.25
    discriminator_weight: float | int = 50.0
    classifier_pooling: str = "mean"
    classifier_dropout: float | int | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = True  # always; PEFT notes False when it merges into a model with sharing "none"
        if self.sharing not in SHARING:
            raise ValueError(f"sharing={self.sharing!r}: choose one of {', '.join(SHARING)}.")
        if self.position_embedding_type not in POSITIONS:
            raise ValueError(f"position_embedding_type={self.position_embedding_type!r}: choose one of {POSITIONS}.")
        if self.classifier_pooling not in POOLING:
            raise ValueError(f"classifier_pooling={self.classifier_pooling!r}: choose one of {POOLING}.")
        if self.sharing == "all" and self.generator_size != 1:
            raise ValueError(
                f'sharing="all" needs a generator of the discriminator\'s size, but generator_size={self.generator_size}: '
                'set generator_size=1, or share "embeddings" only.'
            )
        for scale in (1, self.generator_size):
            hidden_size, num_heads, _ = self.sizes(scale)
            if hidden_size % num_heads or hidden_size // num_heads % 2:
                raise ValueError(
                    f"A width of {hidden_size} (hidden_size {self.hidden_size} x {scale}) does not divide into {num_heads} "
                    "heads of even size: change hidden_size, num_attention_heads or generator_size."
                )

    def sizes(self, scale: float) -> tuple[int, int, int]:
        """(hidden size, heads, feed-forward size) of an encoder that is `scale` times as wide."""
        sizes = (self.hidden_size, self.num_attention_heads, self.intermediate_size)
        return tuple(max(1, round(size * scale)) for size in sizes)


@dataclass
class HfTinyElectraForPreTrainingOutput(ModelOutput):
    """
    loss: mlm_loss + discriminator_weight * rtd_loss.
    logits (batch, length): above 0 where the discriminator takes a token for a replaced one.
    replaced (batch, length): True where the generator's token differs from the original.
    mlm_logits (masked, vocabulary) and mlm_labels (masked,): at the masked positions only.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    rtd_loss: Tensor | None = None
    replaced: Tensor | None = None
    mlm_logits: Tensor | None = None
    mlm_labels: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ElectraEmbeddings(nn.Module):
    def __init__(self, config: HfTinyElectraConfig):
        super().__init__()
        size = config.embedding_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.learned_positions = config.position_embedding_type == "absolute"
        if self.learned_positions:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if self.learned_positions:
            x = x + self.position_embeddings(position_ids)
        x = x + self.token_type_embeddings(position_ids.new_zeros(1) if token_type_ids is None else token_type_ids)
        return self.dropout(self.norm(x))


class ElectraEncoder(nn.Module):
    """From embeddings to hidden states; `scale` makes it narrower, for the generator."""

    def __init__(self, config: HfTinyElectraConfig, scale: float = 1):
        super().__init__()
        self.config = config
        hidden_size, num_heads, intermediate_size = config.sizes(scale)
        self.head_size = hidden_size // num_heads
        narrow = config.embedding_size != hidden_size
        self.project = nn.Linear(config.embedding_size, hidden_size) if narrow else nn.Identity()
        self.layers = nn.ModuleList(
            EncoderBlock(config, hidden_size, num_heads, intermediate_size) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps) if config.norm_first else nn.Identity()

    def forward(self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor, **kwargs) -> Tensor:
        x = self.project(x)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask)
        angles = None
        if self.config.position_embedding_type == "rotary":
            angles = rotary_angles(position_ids, self.head_size, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, mask, angles, **kwargs)
        return self.norm(x)


class HfTinyElectraPreTrainedModel(PreTrainedModel):
    config: HfTinyElectraConfig
    base_model_prefix = "electra"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["ElectraEmbeddings", "EncoderBlock"]
    _can_record_outputs = {"hidden_states": EncoderBlock, "attentions": SelfAttention}
    _keys_to_ignore_on_load_unexpected = [r"^generator", r"^discriminator", r"^objective"]  # of a joint checkpoint

    @staticmethod
    def encode(
        embeddings: ElectraEmbeddings,
        encoder: ElectraEncoder,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        given = input_ids if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(given.shape[1], device=given.device)[None]
        x = embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)
        return encoder(x, attention_mask, position_ids, **kwargs)


class HfTinyElectraModel(HfTinyElectraPreTrainedModel):
    """The discriminator's encoder: what is kept after pretraining."""

    def __init__(self, config: HfTinyElectraConfig):
        super().__init__(config)
        self.embeddings = ElectraEmbeddings(config)
        self.encoder = ElectraEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        self.embeddings.word_embeddings = value

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
        x = self.encode(
            self.embeddings,
            self.encoder,
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            **kwargs,
        )
        return BaseModelOutput(last_hidden_state=x)


class GeneratorHead(nn.Module):
    """From an encoder's width to the embedding size, where the tied output layer takes over."""

    def __init__(self, config: HfTinyElectraConfig, scale: float):
        super().__init__()
        self.dense = nn.Linear(config.sizes(scale)[0], config.embedding_size)
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.activation = ACT2FN["gelu"]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


class HfTinyElectraForMaskedLM(HfTinyElectraPreTrainedModel):
    """The generator. What it shares with the discriminator stays under the name `electra`, so that a joint checkpoint
    holds every weight once and loads into each class without renaming."""

    _keys_to_ignore_on_load_unexpected = [r"^electra", r"^discriminator", r"^objective"]

    def __init__(self, config: HfTinyElectraConfig):
        super().__init__(config)
        own, shared = nn.ModuleDict(), nn.ModuleDict()
        (own if config.sharing == "none" else shared)["embeddings"] = ElectraEmbeddings(config)
        (shared if config.sharing == "all" else own)["encoder"] = ElectraEncoder(config, config.generator_size)
        self.generator = own
        self.electra = self.build_shared(shared)
        self.generator_head = GeneratorHead(config, config.generator_size)
        self.generator_lm_head = nn.Linear(config.embedding_size, config.vocab_size)
        owner = "generator" if config.sharing == "none" else "electra"
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
        return (self.generator if self.config.sharing == "none" else self.electra).embeddings

    @property
    def generator_encoder(self) -> ElectraEncoder:
        return (self.electra if self.config.sharing == "all" else self.generator).encoder

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        x = self.encode(
            self.generator_embeddings,
            self.generator_encoder,
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            **kwargs,
        )
        logits = self.generator_lm_head(self.generator_head(x))
        loss = None
        if labels is not None:
            count = labels.ne(-100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), count)
        return MaskedLMOutput(loss=loss, logits=logits)


@dataclass(frozen=True)
class Objective:
    """What a training step of generator and discriminator minimises, and which of them it trains.

    loss: of the model and of what `HfTinyElectraForPreTraining.forward` has computed, by name.
    head: makes, of the model's configuration, what only the training needs: `model.objective_head`.
    """

    loss: Callable[..., Tensor]
    generator: bool = True
    discriminator: bool = True
    head: Callable[[HfTinyElectraConfig], nn.Module] | None = None


def joint_loss(model: PreTrainedModel, mlm_loss: Tensor, rtd_loss: Tensor, **_) -> Tensor:
    """The paper's equation 3."""
    return mlm_loss + model.config.discriminator_weight * rtd_loss


def masked_rtd_loss(
    model: PreTrainedModel, mlm_loss: Tensor, logits: Tensor, replaced: Tensor, masked: Tensor, counts: Tensor, **_
) -> Tensor:
    """ELECTRA 15%: only what was masked is judged."""
    return joint_loss(model, mlm_loss, binary_cross_entropy(logits, replaced, masked, counts[0]))


def replace_mlm_loss(
    model: PreTrainedModel, mlm_loss: Tensor, states: Tensor, masked: Tensor, mlm_labels: Tensor, counts: Tensor, **_
) -> Tensor:
    """BERT that sees the generator's tokens in the place of [MASK]."""
    guesses = model.generator_lm_head(model.objective_head(states[masked]))
    return mlm_loss + cross_entropy(guesses, mlm_labels, counts[0])


def all_tokens_mlm_loss(
    model: PreTrainedModel, mlm_loss: Tensor, states: Tensor, logits: Tensor, replaced: Tensor, original: Tensor,
    valid: Tensor | None, counts: Tensor, **_,
) -> Tensor:  # fmt: skip
    """The same, of every token: it is copied with the probability that it is original, else taken from the softmax."""
    guesses = model.generator_lm_head(model.objective_head(states)).float()
    written = F.logsigmoid(logits.float()) + guesses.log_softmax(-1).gather(-1, original[..., None])[..., 0]
    copied = F.logsigmoid(-logits.float()).masked_fill(replaced, -torch.inf)
    losses = -torch.logaddexp(copied, written)  # (batch, length)
    return mlm_loss + (losses if valid is None else losses * valid).sum() / counts[1]


def adversarial_loss(
    model: PreTrainedModel, mlm_logits: Tensor, mlm_states: Tensor, sampled: Tensor, logits: Tensor, replaced: Tensor,
    masked: Tensor, rtd_loss: Tensor, counts: Tensor, **_,
) -> Tensor:  # fmt: skip
    """Appendix F: the generator raises the discriminator's loss at what it sampled (REINFORCE), less a learned baseline
    for each position; the more even its distribution, the better. It never sees which tokens were right."""
    reward = F.binary_cross_entropy_with_logits(
        logits[masked].detach().float(), replaced[masked].float(), reduction="none"
    )
    guess = model.objective_head(mlm_states.detach()).float().squeeze(-1)  # the baseline is -log sigmoid(guess)
    log_probs = mlm_logits.float().log_softmax(-1)  # (masked, vocabulary)
    chosen = log_probs.gather(-1, sampled[:, None])[:, 0]
    gain = (reward - F.softplus(-guess)).detach() * chosen - ENTROPY_WEIGHT * (log_probs.exp() * log_probs).sum(-1)
    baseline_loss = F.binary_cross_entropy_with_logits(guess, (-reward).exp(), reduction="sum")
    return (baseline_loss - gain.sum()) / counts[0] + model.config.discriminator_weight * rtd_loss


ENTROPY_WEIGHT = 0.01
OBJECTIVES = {
    "joint": Objective(joint_loss),
    "mlm": Objective(lambda model, mlm_loss, **_: mlm_loss, discriminator=False),  # BERT, when all is shared
    "rtd": Objective(lambda model, rtd_loss, **_: model.config.discriminator_weight * rtd_loss, generator=False),
    "adversarial": Objective(adversarial_loss, head=lambda c: nn.Linear(c.sizes(c.generator_size)[0], 1)),
    "masked_rtd": Objective(masked_rtd_loss),
    "replace_mlm": Objective(replace_mlm_loss, head=lambda config: GeneratorHead(config, 1)),
    "all_tokens_mlm": Objective(all_tokens_mlm_loss, head=lambda config: GeneratorHead(config, 1)),
}


class HfTinyElectraForPreTraining(HfTinyElectraForMaskedLM):
    """Generator and discriminator in one model. Without `labels` it is the discriminator alone.

    objective: what is minimised in training (one of OBJECTIVES); evaluation always gives the losses of joint training.
    """

    _keys_to_ignore_on_load_unexpected = [r"^objective"]

    def __init__(self, config: HfTinyElectraConfig):
        super().__init__(config)
        self.objective, self.objective_head = OBJECTIVES["joint"], None
        self.discriminator_head = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size),
            ACT2FN[config.hidden_act],
            nn.Linear(config.hidden_size, 1),
        )
        self.post_init()

    def build_shared(self, shared: nn.ModuleDict) -> nn.Module:
        return HfTinyElectraModel(self.config)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.electra.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding):
        self.electra.set_input_embeddings(value)

    def _resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Of both: with sharing "none" the generator has embeddings of its own."""
        if self.config.sharing == "none":
            self._get_resized_embeddings(self.generator.embeddings.word_embeddings, *args, **kwargs)  # in place
        return super()._resize_token_embeddings(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        sampling_noise: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> HfTinyElectraForPreTrainingOutput:
        """
        labels (batch, length): the original token at the masked positions, -100 elsewhere.
        sampling_noise (batch, length): uniform numbers in [0, 1) that decide what the generator samples; drawn when None.
        num_items_in_batch: how many masked positions and how many tokens the whole optimiser step has, as one tensor
            of two; counted in this batch when None.
        """
        rest = {
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            **kwargs,
        }
        if labels is None:
            outputs = self.electra(input_ids, inputs_embeds=inputs_embeds, return_dict=True, **rest)
            return HfTinyElectraForPreTrainingOutput(
                logits=self.discriminator_head(outputs.last_hidden_state).squeeze(-1),
                hidden_states=outputs.hidden_states,
                attentions=outputs.attentions,
            )

        objective = self.objective if self.training else OBJECTIVES["joint"]
        masked = labels.ne(-100)  # (batch, length)
        mlm_labels = labels[masked]
        counts = self.count_items(labels, attention_mask, num_items_in_batch)

        with torch.set_grad_enabled(torch.is_grad_enabled() and objective.generator):
            x = self.encode(self.generator_embeddings, self.generator_encoder, input_ids, **rest)
            mlm_states = x[masked]  # (masked, the generator's width)
            mlm_logits = self.generator_lm_head(self.generator_head(mlm_states))  # (masked, vocabulary)
            mlm_loss = cross_entropy(mlm_logits, mlm_labels, counts[0])

        with torch.no_grad():
            noise = torch.rand_like(mlm_labels, dtype=torch.float) if sampling_noise is None else sampling_noise[masked]
            sampled = sample_inverse_cdf(mlm_logits, noise)
            original = torch.where(masked, labels, input_ids)
            corrupted = original.masked_scatter(masked, sampled)
            replaced = corrupted.ne(original)

        if objective.discriminator:
            outputs = self.electra(corrupted, return_dict=True, **rest)
            states = outputs.last_hidden_state
            logits = self.discriminator_head(states).squeeze(-1)
        else:  # it has no opinion yet
            outputs = BaseModelOutput()
            states, logits = None, torch.zeros_like(corrupted, dtype=x.dtype)
        rtd_loss = binary_cross_entropy(logits, replaced, attention_mask, counts[1])
        loss = objective.loss(
            self, mlm_loss=mlm_loss, rtd_loss=rtd_loss, mlm_states=mlm_states, mlm_logits=mlm_logits,
            mlm_labels=mlm_labels, sampled=sampled, original=original, replaced=replaced, masked=masked, states=states,
            logits=logits, valid=attention_mask, counts=counts,
        )  # fmt: skip
        if objective is not OBJECTIVES["joint"] or self.objective_head is not None:  # processes wait for every gradient
            loss = loss + 0 * sum(parameter.sum() for parameter in self.parameters())
        return HfTinyElectraForPreTrainingOutput(
            loss=loss,
            logits=logits,
            mlm_loss=mlm_loss,
            rtd_loss=rtd_loss,
            replaced=replaced,
            mlm_logits=mlm_logits,
            mlm_labels=mlm_labels,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def count_items(labels: Tensor, attention_mask: Tensor | None, num_items_in_batch: Tensor | int | None) -> Tensor:
        """(masked positions, tokens) that the two losses are divided by."""
        tokens = torch.tensor(labels.numel(), device=labels.device) if attention_mask is None else attention_mask.sum()
        counts = torch.stack([labels.ne(-100).sum(), tokens]).float()
        if num_items_in_batch is not None:
            given = torch.as_tensor(num_items_in_batch, device=labels.device).float()
            # Trainer counts the labels only: the tokens follow in this batch's proportion.
            counts = given if given.numel() == 2 else counts * (given / counts[0].clamp(min=1))
        return counts.clamp(min=1)  # a batch with nothing masked has a loss of 0


class HfTinyElectraForSequenceClassification(SequenceClassification, HfTinyElectraPreTrainedModel):
    encoder_class = HfTinyElectraModel


class HfTinyElectraForTokenClassification(TokenClassification, HfTinyElectraPreTrainedModel):
    encoder_class = HfTinyElectraModel
