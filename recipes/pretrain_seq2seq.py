# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny>=0.1"]
# ///
"""Pretrain an encoder-decoder Transformer from raw text: it learns to repair what was damaged.

hf-tiny pretrain-seq2seq  # the built-in corpus, a few minutes on 2 cores
hf-tiny pretrain-seq2seq --train_file my_texts/ --objective spans --output_dir runs/denoised
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.data.masking import SpanCorruption, TextInfilling
from hf_tiny.models import SIZES, HfTinySeq2SeqConfig
from hf_tiny.start import ENCODER_DECODER, StartArguments, check, start_tokenizer
from hf_tiny.tasks.pretrain import pretrain, start_from_corpus
from hf_tiny.tasks.translate import DenoisingEvaluation, pair_card, start_encoder_decoder
from hf_tiny.tokenizer import TokenizerArguments
from hf_tiny.train import TrainConfig, run

OBJECTIVES = {"infilling": TextInfilling, "spans": SpanCorruption}  # BART's and T5's
PAPER = {"per_device_train_batch_size": 128, "max_seq_length": 512, "vocab_size": 37_000, "warmup_steps": 10_000.0}


@dataclass(frozen=True, kw_only=True)
class Recipe(StartArguments, TokenizerArguments, CorpusArguments, TrainConfig):
    """Pretrain an encoder-decoder Transformer from raw text: it learns to repair what was damaged."""

    CONFIG: ClassVar[type] = HfTinySeq2SeqConfig
    MODEL_SIZES: ClassVar[dict[str, dict]] = SIZES[HfTinySeq2SeqConfig]
    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"per_device_train_batch_size": 16, "max_seq_length": 64, "vocab_size": 4096, "learning_rate": 2e-3,
                 "max_steps": 3000, "warmup_steps": 0.1},
        "base": {**PAPER, "learning_rate": 6e-4, "max_steps": 500_000},
        "big": {**PAPER, "learning_rate": 4e-4, "max_steps": 500_000},
    }  # fmt: skip
    DEFAULTS: ClassVar[dict] = {"tokenizer_model": "bpe", "extra_ids": 32, "adam_beta2": 0.98}

    output_dir: str = flag("runs/denoised", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny, or the paper's base or big: sets all that follows.")
    objective: str = flag(
        "infilling",
        "infilling (BART: the whole text from a damaged one) or spans (T5: what is missing).",
        choices=tuple(OBJECTIVES),
    )
    hidden_dropout_prob: float = flag(0.0, "Dropout of the model, from scratch or pretrained.", low=0, below=1)
    copy_attention: bool | None = flag(None, "Let the model copy from the damaged text; by default for infilling.")
    max_eval_samples: int = flag(1024, "Number of held-out blocks to evaluate on.", low=1)


def main(recipe: Recipe) -> dict[str, float]:
    check(recipe, ENCODER_DECODER)
    corpus = Corpus(recipe, recipe.seed)
    tokenizer = start_tokenizer(recipe, corpus.documents, corpus.fingerprint, kind=ENCODER_DECODER)
    damage = OBJECTIVES[recipe.objective](tokenizer, recipe.seed)
    dropout = recipe.hidden_dropout_prob
    copied = 1 - damage.noise_density if recipe.objective == "infilling" else 0.0  # spans are what is not there
    model = start_encoder_decoder(recipe, tokenizer, copied, hidden_dropout_prob=dropout, label_smoothing=0.0)
    start_from_corpus(recipe, model, tokenizer, corpus)
    gap = tokenizer.mask_token if recipe.objective == "infilling" else "<extra_id_0>"
    card = pair_card(recipe, f"Return the {gap} of the list.", recipe.corpus_name)
    return pretrain(recipe, corpus, model, tokenizer, damage, DenoisingEvaluation, card=card)


if __name__ == "__main__":
    run(main, Recipe)
