# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny>=0.1"]
# ///
"""Pack a part of a corpus into the cache, where a run with the same text, tokenizer, length and seed finds it.

hf-tiny prepare-corpus --part 3/16 --train_file my_texts/ --tokenizer_name runs/mine --max_seq_length 128

Each machine can do some of the parts 1/16 to 16/16, in any order; together the files are those that one machine makes.
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

from dataclasses import dataclass

from hf_tiny import InputError
from hf_tiny.arguments import HIGHEST_SEED, Arguments, flag
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.tokenizer import TokenizerArguments, load_tokenizer
from hf_tiny.train import run


@dataclass(frozen=True, kw_only=True)
class Recipe(TokenizerArguments, CorpusArguments, Arguments):
    """Pack a part of a corpus into the cache, where a run with the same text, tokenizer, length and seed finds it."""

    part: str = flag("1/1", "3/16 is the third of 16 parts, which are 1/16 to 16/16. The order does not matter.")
    seed: int = flag(42, "The --seed of the run.", low=0, high=HIGHEST_SEED)


def main(recipe: Recipe) -> None:
    number, slash, parts = recipe.part.partition("/")
    if not (slash and number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise InputError(f"--part {recipe.part}: the parts of 16 are 1/16, 2/16 and so on to 16/16.")
    if recipe.streaming:
        raise InputError("--streaming keeps nothing on the disk: there is nothing to prepare.")
    corpus, length = Corpus(recipe, recipe.seed), max(512, recipe.max_seq_length)
    tokenizer = load_tokenizer(recipe, corpus.documents, corpus.fingerprint, model_max_length=length)
    for split, (folder, files, missing) in corpus.prepare(tokenizer, int(number), int(parts)).items():
        state = f"{missing} of the {files} files are still to come" if missing else "all files are there"
        print(f"{split}: part {recipe.part} is in {folder}; {state}.")


if __name__ == "__main__":
    run(main, Recipe)
