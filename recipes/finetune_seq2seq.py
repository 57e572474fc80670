"""Train an encoder-decoder Transformer on pairs of texts: translation, dialogue, restoration.

accelerate launch recipes/finetune_seq2seq.py  # built-in pairs: dates in English to Korean, under 3 minutes on 2 cores
accelerate launch recipes/finetune_seq2seq.py --train_file train.en train.de --source_lang en --target_lang de
accelerate launch recipes/finetune_seq2seq.py --model_name_or_path runs/denoised --train_file pairs.tsv
"""

import json
from dataclasses import dataclass
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.data.bpe_dropout import BpeDropout
from hf_tiny.data.collate import BucketedBatches
from hf_tiny.data.parallel import SIDES, CollatePairs, ParallelArguments, pair_features, read_pairs
from hf_tiny.pairs import AverageCheckpoints, check, judge_pairs, start_model, start_tokenizer
from hf_tiny.tokenizer import TokenizerArguments
from hf_tiny.train import TrainConfig, run, train

PAPER = {"warmup_steps": 4000.0, "max_tokens": 25_000, "vocab_size": 37_000, "max_steps": 100_000}


@dataclass(frozen=True, kw_only=True)
class Recipe(ParallelArguments, TokenizerArguments, TrainConfig):
    """Train an encoder-decoder Transformer on pairs of texts: translation, dialogue, restoration."""

    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"learning_rate": 2e-3, "warmup_steps": 0.1, "vocab_size": 512, "max_tokens": 4096,
                 "num_train_epochs": 10.0, "dropout": 0.1},
        "base": {**PAPER, "learning_rate": 7e-4, "dropout": 0.1},
        "big": {**PAPER, "learning_rate": 5e-4, "dropout": 0.3, "max_steps": 300_000},
    }  # fmt: skip

    output_dir: str = flag("runs/seq2seq", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny, or the paper's base or big: sets all that follows.")
    model_name_or_path: str | None = flag(None, "The encoder-decoder to start from: a folder or a Hub id.")
    tokenizer_model: str = flag("bpe", "What to train: bpe or unigram, on both sides together.")
    dropout: float = flag(0.1, "Of the model, from scratch or pretrained.")
    label_smoothing: float = flag(0.1, "Of an hf_tiny model; those of transformers have none.")
    max_tokens: int = flag(4096, "Tokens of both sides in a micro-batch, with their padding.")
    per_device_train_batch_size: int = flag(1024, "Pairs in a micro-batch, at most.")
    lr_scheduler_type: str = flag("inverse_sqrt", "linear, cosine, constant, inverse_sqrt or warmup_stable_decay.")
    weight_decay: float = flag(0.0, "AdamW's decay of matrices; biases and norms do not decay.")
    adam_beta2: float = flag(0.98, "AdamW's beta 2.")
    eval_steps: int = flag(0, "Steps between evaluations; 0 evaluates at the end only.")
    save_total_limit: int | None = flag(5, "Keep this many checkpoints.")
    average_checkpoints: int = flag(5, "The finished model is the mean of so many last checkpoints; 1 is the last.")
    num_beams: int = flag(4, "Of the beam search that is evaluated; 1 is greedy.")
    length_penalty: float = flag(1.0, "Above 0 prefers longer texts: a hypothesis scores sum / length ** penalty.")


def main(recipe: Recipe, **settings) -> dict[str, float]:
    """settings: of the model, over those of its --size."""
    check(recipe)
    pairs = read_pairs(recipe)
    tokenizer = start_tokenizer(
        recipe, lambda: [text for pair in pairs["train"] for text in (pair.source, pair.target)]
    )
    model = start_model(recipe, tokenizer, **{"label_smoothing": recipe.label_smoothing, **settings})
    features = {split: pair_features(part, tokenizer, recipe) for split, part in pairs.items()}
    collate = CollatePairs(tokenizer.pad_token_id)
    dropout = BpeDropout(pairs["train"], tokenizer, recipe) if recipe.bpe_dropout else None

    def batches(split: str, size: int, shuffle: bool, vary=None) -> BucketedBatches:
        return BucketedBatches(features[split], collate, size, recipe.max_tokens, recipe.seed, shuffle, SIDES, vary)

    judges = judge_pairs(recipe, pairs, batches, model, tokenizer)
    count = recipe.average_checkpoints
    example = json.dumps(pairs["validation"][0].source, ensure_ascii=False)
    averaging = [AverageCheckpoints(recipe.output_dir, count)] if count > 1 else []
    return train(
        model,
        batches("train", recipe.per_device_train_batch_size, True, dropout),
        recipe,
        evaluate=judges["validation"],
        test=judges.get("test"),
        callbacks=averaging,
        processor=tokenizer,
        card={
            "template": "seq2seq",
            "data": recipe.data_name,
            "filled": {"example": example, "num_beams": recipe.num_beams},
        },
    )


if __name__ == "__main__":
    run(main, Recipe)
