"""N -> path on any encoder: each word chooses another word, or none, and a label for the link."""

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from .electra import HfTinyElectraConfig, HfTinyElectraModel
from .heads import Count, LinkingHead, count_items, token_loss
from .layers import HfTinyConfig, HfTinyPreTrainedModel
from .reformer import HfTinyReformerConfig, HfTinyReformerModel

if TYPE_CHECKING:  # the pipeline's file travels with this one, since transformers finds it named here
    from .parsing import DependencyParsingPipeline as DependencyParsingPipeline

__all__ = ["HfTinyTokenLinkingConfig", "HfTinyTokenLinkingModel"]

# Where this file runs as a checkpoint's own code, hf_tiny's encoders are known only after this, and their files travel with
# it because they are imported above.
ENCODERS = {HfTinyElectraConfig: HfTinyElectraModel, HfTinyReformerConfig: HfTinyReformerModel}
for config_class, encoder_class in ENCODERS.items():
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, encoder_class, exist_ok=True)

# What transformers looks for in the configuration of a checkpoint that brings its own pipeline.
PIPELINES = {"dependency-parsing": {"impl": "parsing.DependencyParsingPipeline", "pt": ["AutoModel"], "type": "text"}}


@strict
class HfTinyTokenLinkingConfig(HfTinyConfig):
    """An encoder of any kind, and the head on it.

    arc_size, label_size: of the layers in front of the two biaffine products.
    affix_buckets: numbers into which the beginnings and endings of words are hashed; 0: the head sees tokens only.
    lstm_size: of each direction of an LSTM over the words, between the encoder and the head; 0: there is none.
    tree: the links of a text form a tree with one root (dependencies); else each word chooses by itself.
    """

    model_type = "hf_tiny_token_linking"
    sub_configs = {"encoder": AutoConfig}

    encoder: PreTrainedConfig | dict | None = None
    arc_size: int = 256
    label_size: int = 64
    affix_buckets: int = 0
    lstm_size: int = 0
    linking_dropout: float | int = 0.33
    tree: bool = True
    initializer_range: float = 0.05

    def __post_init__(self, **kwargs):
        if self.encoder is None:
            self.encoder = HfTinyElectraConfig()
        elif isinstance(self.encoder, dict):
            self.encoder = AutoConfig.for_model(**self.encoder)
        kwargs["custom_pipelines"] = deepcopy(PIPELINES) if self.registered_auto_map is None else {}
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict:
        """With the pipeline's name. The configuration itself has it only as remote code: where hf_tiny is imported, its
        pipeline is known, and needs no trust."""
        return {**super().to_dict(), "custom_pipelines": deepcopy(PIPELINES)}

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The part with the vocabulary: it is here that transformers notes the new size of resized embeddings."""
        return self.encoder.get_text_config(decoder=decoder, encoder=encoder)  # type: ignore[union-attr]  # never None


@dataclass
class HfTinyTokenLinkingOutput(ModelOutput):
    """
    logits (batch, words, 1 + words): the score of each place that a word may choose; place 0 is the root, or none.
    label_logits (batch, words, 1 + words, labels): of each link there could be; not computed in training.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    label_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


def without_pooler(encoder: PreTrainedModel) -> PreTrainedModel:
    """Many native encoders end in a layer for the whole text, which no link needs: it would never get a gradient."""
    if "pooler" in dict(encoder.named_children()):
        encoder.pooler = None
    return encoder


class HfTinyTokenLinkingModel(HfTinyPreTrainedModel):
    config: HfTinyTokenLinkingConfig
    base_model_prefix = "encoder"

    def __init__(self, config: HfTinyTokenLinkingConfig):
        super().__init__(config)
        self.encoder = without_pooler(AutoModel.from_config(config.encoder))
        self.head = LinkingHead(config, self.encoder.config.hidden_size)
        self.post_init()

    @classmethod
    def from_encoder(cls, name_or_path: str, trust_remote_code: bool = False, **config) -> "HfTinyTokenLinkingModel":
        """A new head on a pretrained encoder. config: fields of either; those that both have are the head's."""
        own = {
            name: config.pop(name) for name in (*HfTinyTokenLinkingConfig().to_dict(), "num_labels") if name in config
        }
        encoder = AutoModel.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **config)
        model = cls(HfTinyTokenLinkingConfig(encoder=encoder.config, **own))
        model.encoder = without_pooler(encoder)
        return model.to(encoder.dtype).eval()  # like any pretrained model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        word_spans: Tensor | None = None,
        affixes: Tensor | None = None,
        heads: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Count = None,
        **kwargs,
    ) -> HfTinyTokenLinkingOutput:
        """
        word_spans (batch, words, 2): the first token of each word and the one after its last; (0, 0) is no word. Without
            them every token is a word.
        affixes (batch, words, any number): the affixes of each word, as `words.affixes` numbers them; 0 is none.
        heads (batch, words): the place that each word links to: 0, or 1 + the index of a word; -100 where it is not known.
        labels (batch, words): the label of that link.
        """
        outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **kwargs)
        x = outputs.last_hidden_state
        if word_spans is None:
            first = torch.arange(x.shape[1], device=x.device)
            word_spans = torch.stack((first, first + 1), dim=-1).expand(x.shape[0], -1, -1)
            if attention_mask is not None:
                word_spans = word_spans * attention_mask[:, :, None].to(word_spans.dtype)
        logits, words, places = self.head(x, word_spans, affixes)
        loss = None
        if heads is not None and labels is not None:
            unknown = heads.eq(-100)  # (batch, words)
            chosen = places.take_along_dim(heads.masked_fill(unknown, 0)[:, :, None], dim=1)
            label_logits = self.head.labels_of(words, chosen)  # (batch, words, labels)
            count = count_items(heads, num_items_in_batch)
            loss = token_loss(logits, heads, count) + token_loss(label_logits, labels.masked_fill(unknown, -100), count)
        return HfTinyTokenLinkingOutput(
            loss=loss,
            logits=logits,
            label_logits=None if self.training else self.head.all_labels(words, places),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
