"""Fine-tune an encoder to give a text, or a pair of texts, one label or a number.

accelerate launch recipes/finetune_classifier.py  # a built-in set, from scratch, under 2 minutes on 2 cores
accelerate launch recipes/finetune_classifier.py --model_name_or_path runs/mine --train_file reviews.tsv --seeds 3
"""

from dataclasses import dataclass
from itertools import chain

from transformers import AutoModelForSequenceClassification

from hf_tiny.arguments import flag
from hf_tiny.data.tagged import TextArguments, find_labels, is_regression, read_texts
from hf_tiny.data.windows import CollateTexts, text_features
from hf_tiny.finetune import FinetuneConfig, fine_tune, label_names, report_texts
from hf_tiny.metrics import collect_texts, compute_texts
from hf_tiny.train import run
from hf_tiny.transfer import start_model, start_tokenizer


@dataclass(frozen=True, kw_only=True)
class Recipe(TextArguments, FinetuneConfig):
    """Fine-tune an encoder to give a text, or a pair of texts, one label or a number."""

    output_dir: str = flag("runs/classifier", "Where the run leaves everything.")


def main(recipe: Recipe) -> dict[str, float]:
    texts = read_texts(recipe)
    others = chain.from_iterable(part for split, part in texts.items() if split != "train")
    labels = None if is_regression(texts, recipe) else find_labels(texts["train"], others)
    parts = chain.from_iterable((text.text, text.text_pair) for text in texts["train"])
    tokenizer = start_tokenizer(recipe, [part for part in parts if part is not None])
    model = start_model(recipe, AutoModelForSequenceClassification, tokenizer, **label_names(labels))
    features = {split: text_features(part, tokenizer, labels, recipe) for split, part in texts.items()}
    card = {
        "pipeline_tag": "text-classification",
        "data": recipe.data_name,
        "filled": {
            "task": "A regressor of texts" if labels is None else "A classifier of texts",
            "pipeline": "text-classification",
            "example": texts["validation"][0].text[:100],
            "labels": labels,
            "scoring": "A long text is the mean of its windows. `majority` is the accuracy of always giving the most "
            "frequent label.",
        },
    }
    return fine_tune(
        recipe,
        model,
        tokenizer,
        features,
        CollateTexts(tokenizer.pad_token_id),
        lambda split: (collect_texts, compute_texts(labels), report_texts(split, texts[split], labels)),
        card,
    )


if __name__ == "__main__":
    run(main, Recipe)
