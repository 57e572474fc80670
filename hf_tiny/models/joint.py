"""Replaced-token detection: a generator proposes tokens for masked ones, a discriminator finds those that are not the
original. One training step for any two encoders."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from .heads import Count, read_counts
from .layers import binary_cross_entropy, cross_entropy, sample_inverse_cdf


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


@dataclass
class JointStep:
    """What a step of generator and discriminator has computed.

    masked, original, replaced, valid (batch, length): which tokens are masked, what they were, which ones the generator
        replaced by others, and which are not padding (all when None).
    mlm_...: of the generator, at the masked positions only; sampled (masked,): what it put there.
    states (batch, length, hidden), logits (batch, length): of the discriminator.
    counts: of the masked positions and of the tokens that losses are divided by.
    places (masked,): the masked positions among all of the batch.
    """

    masked: Tensor
    original: Tensor
    valid: Tensor | None
    counts: Tensor
    places: Tensor
    mlm_labels: Tensor
    mlm_states: Tensor = field(init=False)
    mlm_logits: Tensor = field(init=False)
    mlm_loss: Tensor = field(init=False)
    sampled: Tensor = field(init=False)
    replaced: Tensor = field(init=False)
    states: Tensor = field(init=False)
    logits: Tensor = field(init=False)
    rtd_loss: Tensor = field(init=False)


@dataclass(frozen=True)
class Objective:
    """What a training step of generator and discriminator minimises, and which of them it trains.

    loss: of the model and of what its forward pass has computed.
    head: makes, of the model's configuration, what only the training needs: `model.objective_head`.
    """

    loss: Callable[[PreTrainedModel, JointStep], Tensor]
    generator: bool = True
    discriminator: bool = True
    head: Callable[[PreTrainedConfig], nn.Module] | None = None


def joint_loss(model: PreTrainedModel, step: JointStep) -> Tensor:
    """The paper's equation 3."""
    return step.mlm_loss + rtd_loss(model, step)


def rtd_loss(model: PreTrainedModel, step: JointStep) -> Tensor:
    return model.config.discriminator_weight * step.rtd_loss


JOINT = Objective(joint_loss)


class JointPreTraining(PreTrainedModel):
    """Generator and discriminator in one model. Without `labels` it is the discriminator alone.

    A subclass has `run_generator(input_ids, **kwargs)`, the generator's states; `guess(states)`, its logits; and
    `discriminate(input_ids, **kwargs)`, the outputs of the discriminator's encoder, and its logits (batch, length).

    objective: what is minimised in training; evaluation always gives the losses of joint training.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.objective, self.objective_head = JOINT, None

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        sampling_noise: Tensor | None = None,
        num_items_in_batch: Count = None,
        **kwargs,
    ) -> HfTinyElectraForPreTrainingOutput:
        """
        labels (batch, length): the original token at the masked positions, -100 elsewhere.
        sampling_noise (batch, length): uniform numbers in [0, 1) that decide what the generator samples; drawn when None.
        num_items_in_batch: how many masked positions and how many tokens the whole optimiser step has, as one tensor
            of two; counted in this batch when None.
        """
        rest = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, **kwargs}
        if labels is None:
            outputs, logits = self.discriminate(input_ids, **rest)
            recorded = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
            return HfTinyElectraForPreTrainingOutput(logits=logits, **recorded)

        objective = self.objective if self.training else JOINT
        masked, tokens = labels.ne(-100), torch.ones_like(labels) if attention_mask is None else attention_mask
        counts = read_counts(num_items_in_batch, masked.sum(), tokens.sum())
        original, places = torch.where(masked, labels, input_ids), masked.flatten().nonzero().squeeze(1)
        step = JointStep(masked, original, attention_mask, counts, places, labels.flatten()[places])
        with torch.set_grad_enabled(torch.is_grad_enabled() and objective.generator):
            self.predict_masked(step, input_ids, **rest)
        corrupted = self.corrupt(step, sampling_noise)
        if objective.discriminator:
            outputs, step.logits = self.discriminate(corrupted, **rest)
            step.states = outputs.last_hidden_state
        else:  # it has no opinion yet
            outputs, step.logits = BaseModelOutput(), torch.zeros_like(corrupted, dtype=step.mlm_states.dtype)
        step.rtd_loss = binary_cross_entropy(step.logits, step.replaced, attention_mask, counts[1])
        loss = objective.loss(self, step)
        if objective is not JOINT or self.objective_head is not None:
            # Processes wait for every gradient: this one is 0, whatever the weights are.
            loss = loss + sum(parameter[:0].sum() for parameter in self.parameters())
        names = ("logits", "mlm_loss", "rtd_loss", "replaced", "mlm_logits", "mlm_labels")
        recorded = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return HfTinyElectraForPreTrainingOutput(loss=loss, **{name: vars(step)[name] for name in names}, **recorded)

    def predict_masked(self, step: JointStep, input_ids: Tensor, **kwargs) -> None:
        """What the generator says about the masked positions."""
        step.mlm_states = self.run_generator(input_ids, **kwargs).flatten(0, 1)[step.places]  # (masked, its width)
        step.mlm_logits = self.guess(step.mlm_states)  # (masked, vocabulary)
        step.mlm_loss = cross_entropy(step.mlm_logits, step.mlm_labels, step.counts[0])

    @torch.no_grad()
    def corrupt(self, step: JointStep, noise: Tensor | None) -> Tensor:
        """The text with tokens of the generator at the masked positions."""
        noise = torch.rand_like(step.mlm_labels, dtype=torch.float) if noise is None else noise.flatten()[step.places]
        step.sampled = sample_inverse_cdf(step.mlm_logits, noise)
        corrupted = step.original.masked_scatter(step.masked, step.sampled)
        step.replaced = corrupted.ne(step.original)
        return corrupted
