# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny[translate]>=0.1"]
# ///
"""Train an encoder-decoder Transformer on pairs of texts: translation, dialogue, restoration.

hf-tiny finetune-seq2seq  # built-in pairs: dates in English to Korean, under 3 minutes on 2 cores
hf-tiny finetune-seq2seq --train_file train.en train.de --source_lang en --target_lang de
hf-tiny finetune-seq2seq --model_name_or_path runs/denoised --train_file pairs.tsv
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.baselines import BaselineArguments
from hf_tiny.errors import InputError
from hf_tiny.models import SIZES, HfTinySeq2SeqConfig
from hf_tiny.start import StartArguments
from hf_tiny.tasks import fine_tune
from hf_tiny.tasks.translate import PairArguments, PairTask
from hf_tiny.tokenizer import TokenizerArguments
from hf_tiny.train import TrainConfig, run

PAPER = {"warmup_steps": 4000.0, "max_tokens": 25_000, "vocab_size": 37_000, "max_steps": 100_000}


@dataclass(frozen=True, kw_only=True)
class Recipe(PairArguments, StartArguments, BaselineArguments, TokenizerArguments, TrainConfig):
    """Train an encoder-decoder Transformer on pairs of texts: translation, dialogue, restoration."""

    CONFIG: ClassVar[type] = HfTinySeq2SeqConfig
    MODEL_SIZES: ClassVar[dict[str, dict]] = SIZES[HfTinySeq2SeqConfig]
    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"learning_rate": 2e-3, "warmup_steps": 0.1, "max_tokens": 4096, "num_train_epochs": 10.0},
        "base": {**PAPER, "learning_rate": 7e-4},
        "big": {**PAPER, "learning_rate": 5e-4, "hidden_dropout_prob": 0.3, "max_steps": 300_000},
    }  # fmt: skip
    DEFAULTS: ClassVar[dict] = {
        "tokenizer_model": "bpe",
        "validation_split_percentage": 5.0,
        "per_device_train_batch_size": 1024,
        "lr_scheduler_type": "inverse_sqrt",
        "weight_decay": 0.0,
        "adam_beta2": 0.98,
        "eval_steps": 0,
        "save_total_limit": 5,
    }

    output_dir: str = flag("runs/seq2seq", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny, or the paper's base or big: sets all that follows.")
    vocab_size: int | None = flag(  # type: ignore[assignment]  # until the texts are there
        None,
        "Size of the vocabulary to train. By default 512 to 8192, by the amount of text and its characters.",
        low=1,
    )
    hidden_dropout_prob: float = flag(0.1, "Dropout of the model, from scratch or pretrained.", low=0, below=1)
    label_smoothing: float = flag(0.1, "For hf_tiny's models; those of transformers have none.", low=0, below=1)
    max_tokens: int = flag(4096, "Number of tokens of both sides in a micro-batch, padding included.", low=1)
    average_checkpoints: int = flag(5, "Number of last checkpoints whose mean is the finished model.", low=1)


def main(recipe: Recipe) -> dict[str, float]:
    if recipe.load_best_model_at_end and recipe.average_checkpoints > 1:
        raise InputError(
            f"--load_best_model_at_end and --average_checkpoints {recipe.average_checkpoints}: the finished model is the best or "
            "a mean. Give --average_checkpoints 1 for the best."
        )
    return fine_tune(recipe, PairTask)


if __name__ == "__main__":
    run(main, Recipe)
