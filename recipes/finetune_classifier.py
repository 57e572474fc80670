"""Fine-tune an encoder to give a text, or a pair of texts, labels or a number.

hf-tiny finetune-classifier  # a built-in set, from scratch, under 2 minutes on 2 cores
hf-tiny finetune-classifier --model_name_or_path runs/mine --train_file reviews.tsv --seeds 3
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass
from typing import ClassVar

from transformers import AutoModelForSequenceClassification

from hf_tiny.arguments import flag
from hf_tiny.data.splits import find_labels
from hf_tiny.data.windows import CollateWindows
from hf_tiny.start import check, start_model, start_tokenizer
from hf_tiny.tasks import FinetuneConfig, fine_tune, label_names
from hf_tiny.tasks.classify import (
    ClassifyArguments,
    balanced_weights,
    is_regression,
    read_texts,
    text_baseline,
    text_card,
    text_evaluation,
    text_features,
)
from hf_tiny.train import run


@dataclass(frozen=True, kw_only=True)
class Recipe(ClassifyArguments, FinetuneConfig):
    """Fine-tune an encoder to give a text, or a pair of texts, labels or a number."""

    # Few labels are soon known by heart.
    DEFAULTS: ClassVar[dict] = {"num_train_epochs": 10.0, "words_lr_factor": 0.1}
    RAW_VOCAB_SIZE: ClassVar[int] = 16_384  # words say more than their pieces
    MODEL_SIZES: ClassVar[dict[str, dict]] = {
        **FinetuneConfig.MODEL_SIZES,
        "tiny": {**FinetuneConfig.MODEL_SIZES["tiny"], "hidden_dropout_prob": 0.3},
    }

    output_dir: str = flag("runs/classifier", "Where the run leaves everything.")


def main(recipe: Recipe) -> dict[str, float]:
    check(recipe)
    texts = read_texts(recipe)
    labels = None if is_regression(texts, recipe) else find_labels(texts)

    def training_texts() -> list[str]:
        return [part for text in texts["train"] for part in text.texts]

    tokenizer = start_tokenizer(recipe, training_texts)
    names = label_names(labels, several=texts["train"][0].several is not None)
    model = start_model(recipe, AutoModelForSequenceClassification, tokenizer, texts=training_texts, **names)
    weights = balanced_weights(texts["train"], labels, model, recipe)
    return fine_tune(
        recipe,
        model,
        tokenizer,
        {
            split: text_features(part, tokenizer, labels, recipe, weights if split == "train" else None)
            for split, part in texts.items()
        },
        CollateWindows(tokenizer.pad_token_id),
        lambda split, batches: text_evaluation(batches, texts[split], labels, split, recipe),
        text_card(recipe, texts, labels),
        lambda: text_baseline(texts, labels),
    )


if __name__ == "__main__":
    run(main, Recipe)
