"""Go on with pretraining in a new field: from which generator and discriminator, with which words, and what is forgotten."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, ElectraForMaskedLM, ElectraForPreTraining, PreTrainedTokenizerBase

from . import convert
from .arguments import flag
from .errors import InputError
from .models.electra import HfTinyElectraForPreTraining
from .tokenizer import NEEDED_TOKENS, extend_tokenizer, load_existing
from .train import Callback
from .transfer import PretrainingLosses, load_pretraining

DISCRIMINATOR, GENERATOR = convert.PAIR


@dataclass(frozen=True, kw_only=True)
class ContinueArguments:
    """What to go on from."""

    model_name_or_path: str | None = flag(
        None, "Go on from here: a folder of this recipe, or a native ELECTRA (…discriminator, beside it …generator)."
    )
    extend_vocab: int = flag(0, "Add so many word pieces of the new text to its vocabulary.")
    measure_forgetting: list[str] | None = flag(None, "Raw text of the old field: the losses on it before and after.")


def go_on(
    recipe, texts: Callable[[], Iterable[str]]
) -> tuple[HfTinyElectraForPreTraining, PreTrainedTokenizerBase, list[Callback]]:
    """The model and its tokenizer, extended as the recipe says, and the callbacks for `train`."""
    if recipe.tokenizer_name:
        raise InputError("--model_name_or_path keeps its vocabulary: leave out --tokenizer_name (see --extend_vocab).")
    model, place = load_electra(recipe.model_name_or_path)
    tokenizer = load_existing("--model_name_or_path", place, NEEDED_TOKENS)
    longest = model.config.max_position_embeddings
    if recipe.max_seq_length > longest:
        raise InputError(f"--max_seq_length {recipe.max_seq_length}: {place} has {longest} positions.")
    old = deepcopy(tokenizer)  # the losses before and after are over the same tokens
    if recipe.extend_vocab:
        extend(model, tokenizer, extend_tokenizer(tokenizer, texts(), recipe.extend_vocab))
    files = recipe.measure_forgetting
    return model, tokenizer, [PretrainingLosses(model, old, files)] if files else []


def load_electra(name: str) -> tuple[HfTinyElectraForPreTraining, str]:
    """The joint model, and where its tokenizer is."""
    place = str(Path(name, DISCRIMINATOR)) if Path(name, DISCRIMINATOR).is_dir() else name
    if convert.load(AutoConfig, place).model_type != "electra":
        return load_pretraining("--model_name_or_path", place).float(), place
    if DISCRIMINATOR not in place:
        raise InputError(f"--model_name_or_path {name}: name the {DISCRIMINATOR}; the {GENERATOR} must be beside it.")
    discriminator = convert.load_model(ElectraForPreTraining, place)
    generator = convert.load_model(ElectraForMaskedLM, GENERATOR.join(place.rsplit(DISCRIMINATOR, 1)))
    tables = [pair.electra.embeddings.state_dict() for pair in (discriminator, generator)]
    same = all(torch.equal(tensor, tables[1][key]) for key, tensor in tables[0].items())
    return convert.electra_from_native(discriminator, generator, "embeddings" if same else "none").float(), place


@torch.no_grad()
def extend(
    model: HfTinyElectraForPreTraining, tokenizer: PreTrainedTokenizerBase, pieces: dict[str, list[int]]
) -> None:
    """New pieces start from the mean of the old ones that they consisted of."""
    size = max(tokenizer.get_vocab().values()) + 1
    model.resize_token_embeddings(size, mean_resizing=False)
    tables = {
        id(t): t for t in (model.get_input_embeddings().weight, model.generator_embeddings.word_embeddings.weight)
    }
    for table in (*tables.values(), model.generator_lm_head.bias):
        for number, old in enumerate(pieces.values(), start=size - len(pieces)):
            table[number] = table[old].mean(0)
