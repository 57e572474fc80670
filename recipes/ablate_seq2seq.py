"""Train rows of Table 3 of "Attention Is All You Need" at small scale, and lay the table beside the paper's.

accelerate launch recipes/ablate_seq2seq.py --seeds 2  # the built-in pairs
accelerate launch recipes/ablate_seq2seq.py --train_file train.en train.de --source_lang en --target_lang de --rows base dropout_0
"""

from dataclasses import dataclass
from pathlib import Path

import finetune_seq2seq

from hf_tiny import InputError
from hf_tiny.ablate import Figure, Row, compare, run_rows
from hf_tiny.arguments import flag
from hf_tiny.pairs import MODELS
from hf_tiny.train import run

FIGURES = {"PPL": Figure("eval_ppl", False), "BLEU": Figure("eval_bleu", True)}


def table_3(size: str) -> dict[str, Row]:
    """The rows that a small model can show, in the paper's proportions to its base."""
    base = MODELS[size]
    key_size = base["hidden_size"] // base["num_attention_heads"]
    rows = {  # name: what is changed, the paper's perplexity and BLEU (base: 6 layers, 8 heads of 64, 2048)
        "base": ({}, 4.92, 25.8),
        "1_head": ({"num_attention_heads": 1}, 5.29, 24.9),
        "small_keys": ({"qk_head_dim": key_size // 4}, 5.16, 25.1),
        "2_layers": ({"encoder_layers": 2}, 6.11, 23.7),
        "half_ffn": ({"intermediate_size": base["intermediate_size"] // 2}, 5.12, 25.4),
        "dropout_0": ({"hidden_dropout_prob": 0.0}, 5.77, 24.6),
        "smoothing_0": ({"label_smoothing": 0.0}, 4.67, 25.3),
        "learned_positions": ({"position_embedding_type": "learned"}, 4.92, 25.7),
    }
    return {name: Row(settings, {"PPL": ppl, "BLEU": bleu}) for name, (settings, ppl, bleu) in rows.items()}


@dataclass(frozen=True, kw_only=True)
class Recipe(finetune_seq2seq.Recipe):
    """Train rows of the paper's Table 3 at small scale, and lay the table beside the paper's."""

    output_dir: str = flag("runs/table_3", "A folder for each row, and the table: table.md, table.png.")
    rows: list[str] | None = flag(None, "Only these rows; those that are finished are not run again.")
    save_steps: int = flag(0, "Steps between checkpoints; 0 saves at the end only.")
    average_checkpoints: int = flag(1, "The finished model is the mean of so many last checkpoints; 1 is the last.")


def main(recipe: Recipe) -> dict[str, float]:
    if recipe.model_name_or_path or recipe.resume_from_checkpoint:
        raise InputError(
            "An ablation trains from scratch: leave out --model_name_or_path and --resume_from_checkpoint."
        )
    rows = table_3(recipe.size)
    run_rows(finetune_seq2seq.main, recipe, rows, recipe.rows)
    return compare(Path(recipe.output_dir), rows, FIGURES)


if __name__ == "__main__":
    run(main, Recipe, repeat=False)
