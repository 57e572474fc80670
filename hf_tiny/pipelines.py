"""Makes pipeline("dependency-parsing") known to transformers."""

from transformers import AutoModel
from transformers.pipelines import PIPELINE_REGISTRY

from .models.parsing import TASK, DependencyParsingPipeline

PIPELINE_REGISTRY.register_pipeline(TASK, DependencyParsingPipeline, pt_model=AutoModel, type="text")
