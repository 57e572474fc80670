"""Replaced-token detection with native models: a generator and a discriminator of transformers, trained together."""

from collections.abc import Callable
from dataclasses import dataclass

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    DebertaV2ForMaskedLM,
    DebertaV2Model,
    DebertaV2PreTrainedModel,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput

from .joint import JointPreTraining
from .layers import HfTinyConfig, HfTinyPreTrainedModel

__all__ = ["HfTinyPairConfig", "HfTinyPairForPreTraining"]


class DetectionHead(nn.Module):
    """DeBERTa-v3's: a token is judged with the first one in view. Its layers have the names of the published weights."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.classifier = nn.Linear(config.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.activation(self.dense(self.LayerNorm(x + x[:, :1])))).squeeze(-1)


class DebertaV2Discriminator(DebertaV2PreTrainedModel):
    """What ElectraForPreTraining is for ELECTRA; transformers has none for DeBERTa, which ignores the head in a checkpoint."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.deberta = DebertaV2Model(config)
        self.mask_predictions = DetectionHead(config)
        self.post_init()


def deberta_guess(model: PreTrainedModel, x: Tensor) -> Tensor:
    return model.cls(x) if model.legacy else model.lm_predictions(x, model.get_input_embeddings())


@dataclass(frozen=True)
class NativeKind:
    """The native classes of an encoder, and their heads on its states.

    judge: the logits (batch, length) of states (batch, length, hidden); guess: (n, vocabulary) of (n, hidden).
    """

    discriminator: type[PreTrainedModel]
    generator: type[PreTrainedModel]
    judge: Callable[[PreTrainedModel, Tensor], Tensor]
    guess: Callable[[PreTrainedModel, Tensor], Tensor]


NATIVE_KINDS = {
    "electra": NativeKind(
        ElectraForPreTraining,
        ElectraForMaskedLM,
        judge=lambda model, x: model.discriminator_predictions(x),
        guess=lambda model, x: model.generator_lm_head(model.generator_predictions(x)),
    ),
    "deberta-v2": NativeKind(
        DebertaV2Discriminator,
        DebertaV2ForMaskedLM,
        judge=lambda model, x: model.mask_predictions(x),
        guess=deberta_guess,
    ),
}


@strict
class HfTinyPairConfig(HfTinyConfig):
    """Two native configurations, each of a kind in NATIVE_KINDS.

    sharing, discriminator_weight: as in `HfTinyElectraConfig`; two native models cannot share "all".
    """

    model_type = "hf_tiny_pair"
    sub_configs = {"discriminator": AutoConfig, "generator": AutoConfig}
    choices = {"sharing": ("none", "embeddings", "disentangled")}

    discriminator: PreTrainedConfig | dict | None = None
    generator: PreTrainedConfig | dict | None = None
    sharing: str = "embeddings"
    discriminator_weight: float | int = 50.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        for side in self.sub_configs:
            given = vars(self)[side]
            if given is None or isinstance(given, dict):
                setattr(self, side, ElectraConfig() if given is None else AutoConfig.for_model(**given))
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        return self.discriminator  # type: ignore[return-value]  # never None or a dict


def shared_parameters(discriminator: PreTrainedModel, generator: PreTrainedModel) -> list[str]:
    """The names, in both models' embeddings, of the parameters that are of one size and can be the same."""
    one, other = (dict(model.base_model.embeddings.named_parameters()) for model in (discriminator, generator))
    return [name for name, weight in one.items() if name in other and other[name].shape == weight.shape]


class HfTinyPairForPreTraining(JointPreTraining, HfTinyPreTrainedModel):
    config: HfTinyPairConfig
    base_model_prefix = "discriminator"

    def __init__(self, config: HfTinyPairConfig):
        super().__init__(config)
        natives: list[PreTrainedConfig] = [vars(config)[side] for side in config.sub_configs]
        self.kinds = [NATIVE_KINDS[native.model_type] for native in natives]
        self.discriminator = self.kinds[0].discriminator._from_config(natives[0])
        self.generator = self.kinds[1].generator._from_config(natives[1])
        if config.sharing == "embeddings":
            owner = f"discriminator.{self.discriminator.base_model_prefix}.embeddings"
            other = f"generator.{self.generator.base_model_prefix}.embeddings"
            names = shared_parameters(self.discriminator, self.generator)
            self._tied_weights_keys = {f"{other}.{name}": f"{owner}.{name}" for name in names}
        self.post_init()

    @classmethod
    def from_natives(
        cls, discriminator: PreTrainedModel, generator: PreTrainedModel, **config
    ) -> "HfTinyPairForPreTraining":
        """Where embeddings are shared, they are the discriminator's."""
        model = cls(HfTinyPairConfig(discriminator=discriminator.config, generator=generator.config, **config))
        model.discriminator, model.generator = discriminator, generator
        model.tie_weights()
        return model

    @property
    def discriminator_embeddings(self) -> nn.Module:
        return self.discriminator.base_model.embeddings

    @property
    def generator_embeddings(self) -> nn.Module:
        return self.generator.base_model.embeddings

    def run_generator(self, input_ids: Tensor, **kwargs) -> Tensor:
        return self.generator.base_model(input_ids, return_dict=True, **kwargs).last_hidden_state

    def guess(self, states: Tensor) -> Tensor:
        return self.kinds[1].guess(self.generator, states)

    def discriminate(self, input_ids: Tensor | None, **kwargs) -> tuple[BaseModelOutput, Tensor]:
        outputs = self.discriminator.base_model(input_ids, return_dict=True, **kwargs)
        return outputs, self.kinds[0].judge(self.discriminator, outputs.last_hidden_state)
