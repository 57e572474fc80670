# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny[tag]>=0.1"]
# ///
"""Fine-tune an encoder to tag each word: names, parts of speech, Korean morphemes.

hf-tiny finetune-tagger  # a built-in set, from scratch, under 2 minutes on 2 cores
hf-tiny finetune-tagger --model_name_or_path runs/mine --train_file train.conllu --tag_field upos
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.tasks import FinetuneConfig, fine_tune
from hf_tiny.tasks.tag import TagArguments, TagTask
from hf_tiny.train import run


@dataclass(frozen=True, kw_only=True)
class Recipe(TagArguments, FinetuneConfig):
    """Fine-tune an encoder to tag each word: names, parts of speech, Korean morphemes."""

    DEFAULTS: ClassVar[dict] = {"num_train_epochs": 20.0}
    PRETRAINED: ClassVar[dict] = {
        "tagger_lstm_size": 128,
        "tagger_ngram_buckets": 32_768,
        "classifier_dropout": 0.33,
        "hidden_dropout_prob": 0.3,
    }
    # Without pretraining, two layers, an LSTM and pairs of neighbours do better than four layers.
    MODEL_SIZES: ClassVar[dict[str, dict]] = {
        **FinetuneConfig.MODEL_SIZES,
        "tiny": {
            **FinetuneConfig.MODEL_SIZES["tiny"],
            **PRETRAINED,
            "num_hidden_layers": 2,
            "hidden_dropout_prob": 0.0,
        },
    }

    output_dir: str = flag("runs/tagger", "Where the run leaves everything.")


def main(recipe: Recipe) -> dict[str, float]:
    return fine_tune(recipe, TagTask)


if __name__ == "__main__":
    run(main, Recipe)
