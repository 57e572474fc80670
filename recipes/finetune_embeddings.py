"""Fine-tune an encoder to give sentences embeddings: texts that mean the same lie close to each other.

hf-tiny finetune-embeddings  # built-in pairs: dates in English and Korean, under 2 minutes on 2 cores
hf-tiny finetune-embeddings --model_name_or_path runs/mine --train_file sts.tsv --label_column score
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass

from hf_tiny.arguments import flag
from hf_tiny.start import check, start_model, start_tokenizer
from hf_tiny.tasks import FinetuneConfig, fine_tune
from hf_tiny.tasks.embed import (
    SIDES,
    CollateTextPairs,
    EmbedArguments,
    EmbeddingOn,
    EmbedEvaluation,
    embed_baseline,
    embed_card,
    embed_features,
    read_text_pairs,
    score_range,
)
from hf_tiny.train import run


@dataclass(frozen=True, kw_only=True)
class Recipe(EmbedArguments, FinetuneConfig):
    """Fine-tune an encoder to give sentences embeddings: texts that mean the same lie close to each other."""

    output_dir: str = flag("runs/embeddings", "Where the run leaves everything.")


def main(recipe: Recipe) -> dict[str, float]:
    check(recipe)
    pairs = read_text_pairs(recipe)
    scores = score_range(pairs["train"])

    def training_texts() -> list[str]:
        return [text for pair in pairs["train"] for text in pair.texts]

    tokenizer = start_tokenizer(recipe, training_texts)
    model = start_model(
        recipe, EmbeddingOn(recipe.temperature if scores is None else None), tokenizer, texts=training_texts
    )
    return fine_tune(
        recipe,
        model,
        tokenizer,
        {split: embed_features(part, tokenizer, scores, recipe) for split, part in pairs.items()},
        CollateTextPairs(tokenizer.pad_token_id),
        lambda split, batches: EmbedEvaluation(batches, pairs[split], split),
        embed_card(recipe, pairs),
        lambda: embed_baseline(pairs),
        SIDES,
    )


if __name__ == "__main__":
    run(main, Recipe)
