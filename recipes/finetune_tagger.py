"""Fine-tune an encoder to tag each word: names, parts of speech, Korean morphemes.

accelerate launch recipes/finetune_tagger.py  # a built-in set, from scratch, under 2 minutes on 2 cores
accelerate launch recipes/finetune_tagger.py --model_name_or_path runs/mine --train_file train.conllu --tag_field upos
"""

from dataclasses import dataclass
from itertools import chain

from transformers import AutoModelForTokenClassification

from hf_tiny.arguments import flag
from hf_tiny.data.tagged import WordArguments, find_labels, read_sentences
from hf_tiny.data.windows import CollateTags, tag_features
from hf_tiny.finetune import FinetuneConfig, fine_tune, label_names, report_tags
from hf_tiny.metrics import collect_tags, compute_tags
from hf_tiny.train import run
from hf_tiny.transfer import start_model, start_tokenizer


@dataclass(frozen=True, kw_only=True)
class Recipe(WordArguments, FinetuneConfig):
    """Fine-tune an encoder to tag each word: names, parts of speech, Korean morphemes."""

    output_dir: str = flag("runs/tagger", "Where the run leaves everything.")


def main(recipe: Recipe) -> dict[str, float]:
    sentences = read_sentences(recipe)
    others = chain.from_iterable(part for split, part in sentences.items() if split != "train")
    labels = find_labels(sentences["train"], others, recipe.open_ended)
    tokenizer = start_tokenizer(recipe, [" ".join(sentence.words) for sentence in sentences["train"]])
    model = start_model(recipe, AutoModelForTokenClassification, tokenizer, **label_names(labels))
    features = {split: tag_features(part, tokenizer, labels, recipe) for split, part in sentences.items()}
    card = {
        "pipeline_tag": "token-classification",
        "data": recipe.data_name,
        "filled": {
            "task": "A tagger of words",
            "pipeline": "token-classification",
            "example": " ".join(sentences["validation"][0].words)[:100],
            "labels": labels,
            "scoring": "Each word is tagged by its first token and scored once. Where the tags are B-, I- and O, F1 is of "
            'whole entities (seqeval, mode="strict", scheme IOB2); else it is the mean over tags.',
        },
    }
    return fine_tune(
        recipe,
        model,
        tokenizer,
        features,
        CollateTags(tokenizer.pad_token_id),
        lambda split: (
            collect_tags,
            compute_tags(labels),
            report_tags(split, sentences[split], labels, recipe.tag_field),
        ),
        card,
    )


if __name__ == "__main__":
    run(main, Recipe)
