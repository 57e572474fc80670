"""Train rows of Table 3 of "Attention Is All You Need" at small scale, and lay the table beside the paper's.

accelerate launch benchmarks/ablate_seq2seq.py --seeds 2  # the built-in pairs
accelerate launch benchmarks/ablate_seq2seq.py --train_file train.en train.de --source_lang en --target_lang de --rows base
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ablate import Figure, Row, change, compare, load_recipe, run_rows

from hf_tiny.arguments import flag
from hf_tiny.train import run

finetune_seq2seq = load_recipe("finetune_seq2seq")
FIGURES = {"PPL": Figure("eval_ppl", False), "BLEU": Figure("eval_bleu", True)}


def table_3(base: dict) -> dict[str, Row]:
    """The rows that a small model can show, in the paper's proportions to its base. base: the model's settings."""
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

    DEFAULTS: ClassVar[dict] = {"save_steps": 0, "average_checkpoints": 1}

    output_dir: str = flag("runs/table_3", "A folder for each row, and one for the table.")
    rows: list[str] | None = flag(None, "Only these rows; those that are finished are not run again.")


def main(recipe: Recipe) -> dict[str, float]:
    rows = table_3(recipe.model_settings)
    run_rows(lambda one, settings: finetune_seq2seq.main(change(one, settings)), recipe, rows, recipe.rows)
    return compare(Path(recipe.output_dir), rows, FIGURES)


if __name__ == "__main__":
    run(main, Recipe, repeat=False)
