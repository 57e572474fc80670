"""Pretrain an encoder-decoder Transformer from raw text: it learns to repair what was damaged.

accelerate launch recipes/pretrain_seq2seq.py  # the built-in corpus
accelerate launch recipes/pretrain_seq2seq.py --train_file my_texts/ --objective spans --extra_ids 32
"""

from dataclasses import dataclass
from typing import ClassVar

from hf_tiny import InputError
from hf_tiny.arguments import flag
from hf_tiny.data.collate import Batches, SpanCorruption, TextInfilling
from hf_tiny.data.corpus import CorpusArguments, documents, fingerprint
from hf_tiny.data.stream import text_batches
from hf_tiny.metrics import Evaluation, collect_pairs, compute_pairs
from hf_tiny.pairs import start_model, start_tokenizer
from hf_tiny.tokenizer import TokenizerArguments
from hf_tiny.train import TrainConfig, run, train

OBJECTIVES = {"infilling": TextInfilling, "spans": SpanCorruption}  # BART's and T5's
PAPER = {"per_device_train_batch_size": 128, "max_seq_length": 512, "vocab_size": 37_000, "warmup_steps": 10_000.0}


@dataclass(frozen=True, kw_only=True)
class Recipe(TokenizerArguments, CorpusArguments, TrainConfig):
    """Pretrain an encoder-decoder Transformer from raw text: it learns to repair what was damaged."""

    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"per_device_train_batch_size": 16, "max_seq_length": 64, "vocab_size": 4096, "learning_rate": 2e-3,
                 "max_steps": 3000, "warmup_steps": 0.1},
        "base": {**PAPER, "learning_rate": 6e-4, "max_steps": 500_000},
        "big": {**PAPER, "learning_rate": 4e-4, "max_steps": 500_000},
    }  # fmt: skip

    output_dir: str = flag("runs/denoised", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny, or the paper's base or big: sets all that follows.")
    model_name_or_path: str | None = flag(None, "Go on from this encoder-decoder, with its tokenizer.")
    objective: str = flag(
        "infilling", "infilling (BART: whole text from a damaged one) or spans (T5: what is missing)."
    )
    tokenizer_model: str = flag("bpe", "What to train: bpe or unigram.")
    extra_ids: int = flag(32, "Sentinels <extra_id_0>, ... of the vocabulary, for spans.")
    dropout: float = flag(0.0, "Of the model, from scratch or pretrained.")
    adam_beta2: float = flag(0.98, "AdamW's beta 2.")
    max_eval_samples: int = flag(1024, "Held-out blocks to evaluate on.")


def main(recipe: Recipe) -> dict[str, float]:
    if recipe.objective not in OBJECTIVES:
        raise InputError(f"--objective {recipe.objective}: choose one of {', '.join(OBJECTIVES)}.")
    tokenizer = start_tokenizer(recipe, lambda: documents(recipe), fingerprint(recipe))
    damage = OBJECTIVES[recipe.objective](tokenizer, recipe.seed)
    batches, held_out = text_batches(recipe, tokenizer, damage)
    held_out_batches = Batches(held_out, damage, recipe.per_device_eval_batch_size, recipe.seed, shuffle=False)
    model = start_model(recipe, tokenizer, label_smoothing=0.0)
    evaluate = Evaluation(held_out_batches, collect_pairs, compute_pairs())
    gap = tokenizer.mask_token if recipe.objective == "infilling" else "<extra_id_0>"
    filled = {"example": f'"Return the {gap} of the list."', "num_beams": 4}
    about = {"template": "seq2seq", "data": recipe.corpus_name, "filled": filled}
    return train(model, batches, recipe, evaluate=evaluate, processor=tokenizer, card=about)


if __name__ == "__main__":
    run(main, Recipe)
