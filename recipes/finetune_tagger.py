"""Fine-tune an encoder to tag each word: names, parts of speech, Korean morphemes.

hf-tiny finetune-tagger  # a built-in set, from scratch, under 2 minutes on 2 cores
hf-tiny finetune-tagger --model_name_or_path runs/mine --train_file train.conllu --tag_field upos
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass
from typing import ClassVar

from transformers import AutoModelForTokenClassification

from hf_tiny.arguments import flag
from hf_tiny.data.splits import find_labels
from hf_tiny.data.windows import CollateWindows
from hf_tiny.start import check, start_model, start_tokenizer
from hf_tiny.tasks import FinetuneConfig, fine_tune, label_names
from hf_tiny.tasks.tag import (
    ABOUT,
    TagArguments,
    TagEvaluation,
    note_unit,
    read_sentences,
    tag_baseline,
    tag_card,
    tag_features,
    tag_tokenizer,
)
from hf_tiny.train import run


@dataclass(frozen=True, kw_only=True)
class Recipe(TagArguments, FinetuneConfig):
    """Fine-tune an encoder to tag each word: names, parts of speech, Korean morphemes."""

    DEFAULTS: ClassVar[dict] = {"num_train_epochs": 20.0}
    # Without pretraining, two layers, an LSTM and pairs of neighbours do better than four layers.
    MODEL_SIZES: ClassVar[dict[str, dict]] = {
        **FinetuneConfig.MODEL_SIZES,
        "tiny": {
            **FinetuneConfig.MODEL_SIZES["tiny"],
            "num_hidden_layers": 2,
            "tagger_lstm_size": 128,
            "tagger_ngram_buckets": 32_768,
            "classifier_dropout": 0.33,
        },
    }

    output_dir: str = flag("runs/tagger", "Where the run leaves everything.")


def main(recipe: Recipe) -> dict[str, float]:
    check(recipe)
    sentences = read_sentences(recipe)
    labels = find_labels(sentences, recipe.open_ended)

    def training_texts() -> list[str]:
        return [sentence.tokenized_text for sentence in sentences["train"]]

    tokenizer = start_tokenizer(recipe, training_texts)
    tokenizer = tag_tokenizer(tokenizer, sentences["train"], recipe)
    names = label_names(labels)
    model = start_model(recipe, AutoModelForTokenClassification, tokenizer, texts=training_texts, **names)
    note_unit(model, sentences["train"])
    return fine_tune(
        recipe,
        model,
        tokenizer,
        {split: tag_features(part, tokenizer, labels, recipe) for split, part in sentences.items()},
        CollateWindows(tokenizer.pad_token_id, ABOUT),
        lambda split, batches: TagEvaluation(batches, sentences[split], labels, split, recipe.field),
        tag_card(recipe, sentences, labels),
        lambda: tag_baseline(sentences, labels),
    )


if __name__ == "__main__":
    run(main, Recipe)
