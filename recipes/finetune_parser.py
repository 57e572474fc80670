"""Fine-tune an encoder to link words: the head of each word, or the subject of each predicate.

accelerate launch recipes/finetune_parser.py  # a built-in set, from scratch, under 2 minutes on 2 cores
accelerate launch recipes/finetune_parser.py --model_name_or_path runs/mine --train_file train.conllu --task subject
"""

from dataclasses import dataclass
from itertools import chain

from hf_tiny.arguments import flag
from hf_tiny.data.tagged import LinkArguments, find_labels, read_trees
from hf_tiny.data.windows import CollateLinks, link_features
from hf_tiny.finetune import FinetuneConfig, LinkingOn, fine_tune, label_names, report_links
from hf_tiny.metrics import collect_links, compute_links
from hf_tiny.train import run
from hf_tiny.transfer import start_model, start_tokenizer


@dataclass(frozen=True, kw_only=True)
class Recipe(LinkArguments, FinetuneConfig):
    """Fine-tune an encoder to link words: the head of each word, or the subject of each predicate."""

    output_dir: str = flag("runs/parser", "Where the run leaves everything.")
    max_seq_length: int = flag(256, "Tokens in a window, special tokens included.")


def main(recipe: Recipe) -> dict[str, float]:
    trees = read_trees(recipe)
    others = chain.from_iterable(part for split, part in trees.items() if split != "train")
    labels = find_labels(trees["train"], others, recipe.open_ended)
    tokenizer = start_tokenizer(recipe, [" ".join(tree.words) for tree in trees["train"]])
    model = start_model(recipe, LinkingOn, tokenizer, tree=recipe.task == "parse", **label_names(labels))
    features = {split: link_features(part, tokenizer, labels, recipe) for split, part in trees.items()}
    card = {
        "data": recipe.data_name,
        "filled": {
            "task": "A dependency parser" if recipe.task == "parse" else "A finder of subjects",
            "pipeline": "dependency-parsing",
            "example": " ".join(trees["validation"][0].words)[:100],
            "labels": labels,
            "scoring": "By the rules of CoNLL 2018 on given words: all words count, punctuation too; `las` ignores the "
            "subtypes of relations, `las_full` does not."
            if recipe.task == "parse"
            else "Over the predicates (VERB and ADJ): the right subject, or rightly that there is none. `majority` is the "
            "share of predicates without one.",
        },
    }
    return fine_tune(
        recipe,
        model,
        tokenizer,
        features,
        CollateLinks(tokenizer.pad_token_id),
        lambda split: (
            collect_links,
            compute_links(labels, recipe.task),
            report_links(split, trees[split], labels, recipe.task),
        ),
        card,
    )


if __name__ == "__main__":
    run(main, Recipe)
