"""hf_tiny: raw text or images in, a pretrained and fine-tuned model on the Hub out."""

from .errors import InputError
from .models import (
    AUTO_CLASSES,
    HfTinyElectraConfig,
    HfTinyElectraForMaskedLM,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
    HfTinyElectraModel,
    HfTinyReformerConfig,
    HfTinyReformerForCausalLM,
    HfTinyReformerForMaskedLM,
    HfTinyReformerForSequenceClassification,
    HfTinyReformerForTokenClassification,
    HfTinyReformerModel,
    HfTinySeq2SeqConfig,
    HfTinySeq2SeqForConditionalGeneration,
    HfTinySeq2SeqModel,
    HfTinyTokenLinkingConfig,
    HfTinyTokenLinkingModel,
)
from .pipelines import DependencyParsingPipeline

__version__ = "0.1.0"
__all__ = [
    "AUTO_CLASSES",
    "DependencyParsingPipeline",
    "HfTinyElectraConfig",
    "HfTinyElectraForMaskedLM",
    "HfTinyElectraForPreTraining",
    "HfTinyElectraForSequenceClassification",
    "HfTinyElectraForTokenClassification",
    "HfTinyElectraModel",
    "HfTinyReformerConfig",
    "HfTinyReformerForCausalLM",
    "HfTinyReformerForMaskedLM",
    "HfTinyReformerForSequenceClassification",
    "HfTinyReformerForTokenClassification",
    "HfTinyReformerModel",
    "HfTinySeq2SeqConfig",
    "HfTinySeq2SeqForConditionalGeneration",
    "HfTinySeq2SeqModel",
    "HfTinyTokenLinkingConfig",
    "HfTinyTokenLinkingModel",
    "InputError",
]
