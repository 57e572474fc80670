# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny>=0.1"]
# ///
"""Train each kind of tokenizer on a corpus, and compare how they cut text that was held out.

hf-tiny compare-tokenizers --train_file my_texts/ --vocab_size 8192  # or nothing, for the built-in corpus
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass, replace
from itertools import islice

from hf_tiny.arguments import Arguments, flag
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.tokenizer import MODELS, TokenizerArguments, fertility, load_tokenizer
from hf_tiny.train import run


@dataclass(frozen=True, kw_only=True)
class Recipe(TokenizerArguments, CorpusArguments, Arguments):
    """Train each kind of tokenizer on a corpus, and compare how they cut text that was held out."""

    max_eval_samples: int = flag(10_000, "Number of held-out documents to compare them on.", low=1)


def main(recipe: Recipe) -> None:
    corpus = Corpus(recipe)
    held_out = list(islice(corpus.documents("validation"), recipe.max_eval_samples))
    for model in MODELS:
        own = replace(recipe, tokenizer_model=model)
        found = fertility(load_tokenizer(own, corpus.documents, corpus.fingerprint), held_out)
        print(f"{model:10s}" + "".join(f"  {name} {value:.4f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    run(main, Recipe)
