# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny>=0.1"]
# ///
"""Fine-tune an encoder to give sentences embeddings: texts that mean the same lie close to each other.

hf-tiny finetune-embeddings  # built-in pairs: dates in English and Korean, under 2 minutes on 2 cores
hf-tiny finetune-embeddings --model_name_or_path runs/mine --train_file sts.tsv --label_column score
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass

from hf_tiny.arguments import flag
from hf_tiny.tasks import FinetuneConfig, fine_tune
from hf_tiny.tasks.embed import EmbedArguments, EmbedTask
from hf_tiny.train import run


@dataclass(frozen=True, kw_only=True)
class Recipe(EmbedArguments, FinetuneConfig):
    """Fine-tune an encoder to give sentences embeddings: texts that mean the same lie close to each other."""

    output_dir: str = flag("runs/embeddings", "Where the run leaves everything.")


def main(recipe: Recipe) -> dict[str, float]:
    return fine_tune(recipe, EmbedTask)


if __name__ == "__main__":
    run(main, Recipe)
