"""Train each kind of tokenizer on a corpus, and compare how they cut text that was held out.

python recipes/compare_tokenizers.py --train_file my_texts/ --vocab_size 8192  # or nothing, for the built-in corpus
"""

from dataclasses import dataclass, replace

from hf_tiny.arguments import flag
from hf_tiny.data.corpus import CorpusArguments, documents, fingerprint
from hf_tiny.tokenizer import MODELS, TokenizerArguments, fertility, load_tokenizer
from hf_tiny.train import TrainConfig, run


@dataclass(frozen=True, kw_only=True)
class Recipe(TokenizerArguments, CorpusArguments, TrainConfig):
    """Train each kind of tokenizer on a corpus, and compare how they cut text that was held out."""

    max_eval_samples: int = flag(10_000, "Held-out documents to compare them on.")


def main(recipe: Recipe) -> None:
    corpus, held_out = fingerprint(recipe), list(documents(recipe, "validation"))[: recipe.max_eval_samples]
    for model in MODELS:
        own = replace(recipe, tokenizer_model=model)
        found = fertility(load_tokenizer(own, lambda: documents(recipe), corpus), held_out)
        print(f"{model:10s}" + "".join(f"  {name} {value:.4f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    run(main, Recipe, repeat=False)
