# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny>=0.1"]
# ///
"""Pretrain ELECTRA from raw text.

hf-tiny pretrain-electra  # the built-in corpus, under 10 minutes on 2 cores
hf-tiny pretrain-electra --train_file my_texts/ --size small --output_dir runs/mine
hf-tiny pretrain-electra runs/mine/recipe.yaml --resume_from_checkpoint latest
hf-tiny pretrain-electra --model_name_or_path runs/mine --train_file law --extend_vocab 500
hf-tiny pretrain-electra --objective two_stage --sharing none --generator_size 1 --output_dir runs/two_stage
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.callbacks import CollapseWarning
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.data.masking import MaskTokens
from hf_tiny.hub import Card
from hf_tiny.models import SIZES, HfTinyElectraConfig
from hf_tiny.tasks.pretrain import ElectraArguments, ElectraEvaluation, pretrain, start_electra, start_objective
from hf_tiny.tokenizer import TokenizerArguments, load_tokenizer
from hf_tiny.train import TrainConfig, run

PAPER = {"warmup_steps": 10_000.0, "vocab_size": 30522}


@dataclass(frozen=True, kw_only=True)
class Recipe(ElectraArguments, TokenizerArguments, CorpusArguments, TrainConfig):
    """Pretrain ELECTRA from raw text."""

    CONFIG: ClassVar[type] = HfTinyElectraConfig
    MODEL_SIZES: ClassVar[dict[str, dict]] = SIZES[HfTinyElectraConfig]
    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"max_seq_length": 64, "per_device_train_batch_size": 16, "learning_rate": 1e-3, "adam_beta2": 0.98,
                 "max_steps": 9000, "warmup_steps": 0.05, "eval_steps": 1000, "save_steps": 1000, "vocab_size": 4096,
                 "mlm_probability": 0.25},
        "mini": {"max_seq_length": 128, "per_device_train_batch_size": 16, "learning_rate": 7e-4, "adam_beta2": 0.99,
                 "max_steps": 13_000, "warmup_steps": 0.05, "eval_steps": 1000, "save_steps": 1000, "vocab_size": 16_384,
                 "mlm_probability": 0.2},
        "small": {**PAPER, "max_seq_length": 128, "per_device_train_batch_size": 128, "learning_rate": 5e-4,
                  "max_steps": 1_000_000},
        "base": {**PAPER, "max_seq_length": 512, "per_device_train_batch_size": 256, "learning_rate": 2e-4,
                 "max_steps": 766_000},
        "large": {**PAPER, "max_seq_length": 512, "per_device_train_batch_size": 2048, "learning_rate": 2e-4,
                  "max_steps": 400_000, "mlm_probability": 0.25},
    }  # fmt: skip

    output_dir: str = flag("runs/electra", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny, mini, or the paper's small, base or large: sets all that follows.")
    max_eval_samples: int = flag(1024, "Number of held-out blocks to evaluate on.", low=1)


def main(recipe: Recipe) -> dict[str, float]:
    corpus, length = Corpus(recipe, recipe.seed), max(512, recipe.max_seq_length)
    model, tokenizer, callbacks = start_electra(
        recipe, corpus, lambda: load_tokenizer(recipe, corpus.documents, corpus.fingerprint, model_max_length=length)
    )
    groups, stages = start_objective(model, recipe)
    return pretrain(
        recipe,
        corpus,
        model,
        tokenizer,
        MaskTokens(tokenizer, recipe.mlm_probability, recipe.seed),
        lambda held_out: ElectraEvaluation(held_out, model.config.discriminator_weight),
        groups=groups,
        callbacks=[*callbacks, CollapseWarning(), stages],
        card=Card(pipeline_tag="fill-mask", data=recipe.corpus_name),
    )


if __name__ == "__main__":
    run(main, Recipe)
