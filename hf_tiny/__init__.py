"""hf_tiny: raw text or images in, a pretrained and fine-tuned model on the Hub out."""

from . import models
from .errors import InputError
from .models import *  # noqa: F403
from .pipelines import DependencyParsingPipeline

__version__ = "0.1.0"
__all__ = ["DependencyParsingPipeline", "InputError"]
__all__ += models.__all__
