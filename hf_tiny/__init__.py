"""hf_tiny: raw text or images in, a pretrained and fine-tuned model on the Hub out.

Importing it makes its models known to transformers' Auto classes, and dependency parsing to `pipeline`. Neither torch nor
transformers is imported before it is used: they take seconds.
"""

import importlib
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .errors import InputError as InputError

__version__ = "0.1.0"

# Before torch is loaded. A thread that waits for the others spins; beside other busy programs that costs most of the
# speed unless it soon gives way (benchmarks/contention.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Every recipe that trains is a function, too.
RECIPES = sorted(
    path.stem
    for path in Path(__file__).with_name("recipes").glob("*.py")
    if path.stem.startswith(("pretrain_", "finetune_"))
)
CONFIGS = {
    "hf_tiny_electra": "HfTinyElectraConfig",
    "hf_tiny_pair": "HfTinyPairConfig",
    "hf_tiny_reformer": "HfTinyReformerConfig",
    "hf_tiny_seq2seq": "HfTinySeq2SeqConfig",
    "hf_tiny_token_linking": "HfTinyTokenLinkingConfig",
    "hf_tiny_vit": "HfTinyViTConfig",
}


def __getattr__(name: str):
    """The public names: recipes, models, the pipeline."""
    if name in RECIPES:
        return importlib.import_module(".api", __name__).recipe_function(name)
    if name == "__all__":
        return [
            "DependencyParsingPipeline",
            "InputError",
            *RECIPES,
            *importlib.import_module(".models", __name__).__all__,
        ]
    if name == "DependencyParsingPipeline":
        return importlib.import_module(".pipelines", __name__).DependencyParsingPipeline
    if name.startswith("HfTiny") or name in ("AUTO_CLASSES", "SIZES", "model_classes"):
        models = vars(importlib.import_module(".models", __name__))
        if name in models:
            return models[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


# Becoming known to transformers


class LazyConfig(type):
    """What the class of a configuration is until it is used: then all models are imported, and registered themselves."""

    def __call__(cls, *args, **kwargs):
        return __getattr__(cls.__name__)(*args, **kwargs)

    def __getattr__(cls, name: str):
        return getattr(__getattr__(cls.__name__), name)


def register_configs() -> None:
    from transformers import AutoConfig

    for model_type, name in CONFIGS.items():
        AutoConfig.register(model_type, LazyConfig(name, (), {}), exist_ok=True)


class AfterImport(MetaPathFinder):
    """Calls a function when a module has been imported."""

    def __init__(self, module: str, call):
        self.module, self.call = module, call
        call() if module in sys.modules else sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec: Any = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_call(module) -> None:
            execute(module)
            self.call()

        spec.loader.exec_module = execute_and_call
        return spec


AfterImport("transformers.models.auto.configuration_auto", register_configs)
AfterImport("transformers.pipelines", lambda: importlib.import_module(".pipelines", __name__))
