"""hf_tiny: raw text or images in, a pretrained and fine-tuned model on the Hub out."""

from .errors import InputError
from .models import (
    AUTO_CLASSES,
    HfTinyElectraConfig,
    HfTinyElectraForMaskedLM,
    HfTinyElectraForPreTraining,
    HfTinyElectraModel,
)

__version__ = "0.1.0"
__all__ = [
    "AUTO_CLASSES",
    "HfTinyElectraConfig",
    "HfTinyElectraForMaskedLM",
    "HfTinyElectraForPreTraining",
    "HfTinyElectraModel",
    "InputError",
]
