"""The one table of models. A new model is one file in this folder and its rows here."""

from collections.abc import Iterator

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .electra import (
    HfTinyElectraConfig,
    HfTinyElectraForMaskedLM,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
    HfTinyElectraModel,
)
from .image_processing import HfTinyGreyImageProcessor
from .linking import HfTinyTokenLinkingConfig, HfTinyTokenLinkingModel
from .reformer import (
    HfTinyReformerConfig,
    HfTinyReformerForCausalLM,
    HfTinyReformerForMaskedLM,
    HfTinyReformerForSequenceClassification,
    HfTinyReformerForTokenClassification,
    HfTinyReformerModel,
)
from .seq2seq import HfTinySeq2SeqConfig, HfTinySeq2SeqForConditionalGeneration, HfTinySeq2SeqModel
from .vit import (
    HfTinyViTConfig,
    HfTinyViTForImageClassification,
    HfTinyViTForMaskedImageModeling,
    HfTinyViTModel,
)

AUTO_CLASSES = {
    HfTinyElectraConfig: {
        AutoModel: HfTinyElectraModel,
        AutoModelForPreTraining: HfTinyElectraForPreTraining,
        AutoModelForMaskedLM: HfTinyElectraForMaskedLM,
        AutoModelForSequenceClassification: HfTinyElectraForSequenceClassification,
        AutoModelForTokenClassification: HfTinyElectraForTokenClassification,
    },
    HfTinySeq2SeqConfig: {
        AutoModel: HfTinySeq2SeqModel,
        AutoModelForSeq2SeqLM: HfTinySeq2SeqForConditionalGeneration,
    },
    HfTinyReformerConfig: {
        AutoModel: HfTinyReformerModel,
        AutoModelForCausalLM: HfTinyReformerForCausalLM,
        AutoModelForMaskedLM: HfTinyReformerForMaskedLM,
        AutoModelForSequenceClassification: HfTinyReformerForSequenceClassification,
        AutoModelForTokenClassification: HfTinyReformerForTokenClassification,
    },
    HfTinyTokenLinkingConfig: {AutoModel: HfTinyTokenLinkingModel},
    HfTinyViTConfig: {
        AutoModel: HfTinyViTModel,
        AutoModelForPreTraining: HfTinyViTForMaskedImageModeling,
        AutoModelForMaskedImageModeling: HfTinyViTForMaskedImageModeling,
        AutoModelForImageClassification: HfTinyViTForImageClassification,
    },
}


def model_classes() -> Iterator[tuple[type, type, type]]:
    """(config class, Auto class, model class) of every row."""
    for config_class, heads in AUTO_CLASSES.items():
        for auto_class, model_class in heads.items():
            yield config_class, auto_class, model_class


def register() -> None:
    """Make every model known to the Auto classes, here and in the checkpoints that it saves."""
    for config_class, heads in AUTO_CLASSES.items():
        file = config_class.__module__.rpartition(".")[2]
        names = {AutoConfig: config_class, **heads}
        config_class.registered_auto_map = {auto.__name__: f"{file}.{cls.__name__}" for auto, cls in names.items()}
        config_class.register_for_auto_class()
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for config_class, auto_class, model_class in model_classes():
        model_class.register_for_auto_class(auto_class.__name__)
        auto_class.register(config_class, model_class, exist_ok=True)
    HfTinyGreyImageProcessor.register_for_auto_class()
    AutoImageProcessor.register(
        HfTinyViTConfig, image_processor_classes={"pil": HfTinyGreyImageProcessor}, exist_ok=True
    )


register()
