# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny>=0.1"]
# ///
"""Fine-tune an encoder to give a text, or a pair of texts, labels or a number.

hf-tiny finetune-classifier  # a built-in set, from scratch, under 2 minutes on 2 cores
hf-tiny finetune-classifier --model_name_or_path runs/mine --train_file reviews.tsv --seeds 3
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.tasks import FinetuneConfig, fine_tune
from hf_tiny.tasks.classify import ClassifyArguments, TextTask
from hf_tiny.train import run


@dataclass(frozen=True, kw_only=True)
class Recipe(ClassifyArguments, FinetuneConfig):
    """Fine-tune an encoder to give a text, or a pair of texts, labels or a number."""

    # Few labels are soon known by heart.
    DEFAULTS: ClassVar[dict] = {"num_train_epochs": 10.0, "words_lr_factor": 0.1}
    RAW_VOCAB_SIZE: ClassVar[int] = 16_384  # words say more than their pieces
    PRETRAINED: ClassVar[dict] = {
        "hidden_dropout_prob": 0.3,
        "classifier_pooling": "words",
        "classifier_buckets": 32_768,
    }
    MODEL_SIZES: ClassVar[dict[str, dict]] = {
        **FinetuneConfig.MODEL_SIZES,
        "tiny": {**FinetuneConfig.MODEL_SIZES["tiny"], **PRETRAINED},
    }

    output_dir: str = flag("runs/classifier", "Where the run leaves everything.")


def main(recipe: Recipe) -> dict[str, float]:
    return fine_tune(recipe, TextTask)


if __name__ == "__main__":
    run(main, Recipe)
