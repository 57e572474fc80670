"""Going on with replaced-token detection from two native models: --discriminator_name and --generator_name."""

import logging
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_tiny import checkpoint
from hf_tiny.callbacks import Callback, FollowGenerator, TrainState
from hf_tiny.errors import InputError
from hf_tiny.models.pair import NATIVE_KINDS, HfTinyPairConfig, HfTinyPairForPreTraining, shared_parameters
from hf_tiny.processes import on_main
from hf_tiny.start import load_config, quiet
from hf_tiny.tokenizer import NEEDED_TOKENS, load_existing

logger = logging.getLogger(__name__)

DISCRIMINATOR, GENERATOR = "--discriminator_name", "--generator_name"
SETTINGS = ("sharing", "discriminator_weight")  # fields of the model that are not the natives' own


def check_pair(recipe) -> None:
    """Refuse what has no meaning beside two native models."""
    if not (recipe.discriminator_name and recipe.generator_name):
        given, lacking = (DISCRIMINATOR, GENERATOR) if recipe.discriminator_name else (GENERATOR, DISCRIMINATOR)
        raise InputError(f"{given} needs {lacking}: both models of a pair are trained together. Give both, or none.")
    values = {name: vars(recipe)[name] for name in ("model_name_or_path", "tokenizer_name", "extend_vocab")}
    values |= {"measure_forgetting": recipe.measure_forgetting, "init": recipe.init == "statistics"}
    values |= {name: True for name in recipe.given_settings if name not in SETTINGS}
    if unfit := [f"--{name}" for name, value in values.items() if value]:
        raise InputError(
            f"{DISCRIMINATOR} and {GENERATOR} bring their weights, sizes and vocabulary: leave out {', '.join(unfit)}."
        )
    if recipe.objective != "joint":
        raise InputError(f"--objective {recipe.objective}: two native models are trained by the objective joint only.")


def load_native(option: str, name: str, side: str) -> PreTrainedModel:
    """A native model in float32; what its checkpoint lacks of a head is new, and the log says so."""
    kind = load_config(option, name).model_type
    if kind not in NATIVE_KINDS:
        raise InputError(f"{option} {name}: {kind} cannot be one of a pair. These can: {', '.join(NATIVE_KINDS)}.")
    native_class = vars(NATIVE_KINDS[kind])[side]
    with checkpoint.loaded(f"{option} {name} cannot be loaded"), quiet():
        load = partial(native_class.from_pretrained, name, output_loading_info=True, dtype=torch.float32)
        model, info = load()
        # The head of published DeBERTa-v3 generators, about which their configuration is silent.
        if any(key.startswith("lm_predictions.") for key in info["unexpected_keys"]):
            model, info = load(legacy=False)
    missing = sorted(info["missing_keys"])
    if encoder := [key for key in missing if key.startswith(model.base_model_prefix + ".")]:
        raise InputError(f"{option} {name}: the encoder lacks {len(encoder)} weights, such as {encoder[0]}.")
    if missing:
        heads = ", ".join(sorted({key.split(".")[0] for key in missing}))
        logger.info(f"{option} {name} has no {heads} (or only a part): the {side}'s head begins anew.")
    return model


def choose_sharing(discriminator: PreTrainedModel, generator: PreTrainedModel, wanted: str | None) -> str:
    """What was asked for, if that can be; else what the weights say: equal embeddings are shared, others of the same size
    are disentangled, as in DeBERTa-v3."""
    if wanted not in (None, *HfTinyPairConfig.choices["sharing"]):
        known = ", ".join(HfTinyPairConfig.choices["sharing"])
        raise InputError(f"--sharing {wanted}: two native models cannot share that. Choose one of {known}.")
    tables, names = [model.base_model.embeddings.state_dict() for model in (discriminator, generator)], set()
    for table in tables:
        names |= {name for name in table if name.endswith("_embeddings.weight")}
    sizes = {name: [tuple(table[name].shape) if name in table else None for table in tables] for name in sorted(names)}
    unlike = [name for name, (one, other) in sizes.items() if one != other]
    if unlike and wanted in ("embeddings", "disentangled"):
        one, other = sizes[unlike[0]]
        raise InputError(
            f"--sharing {wanted}: {unlike[0]} is {one} in the discriminator and {other} in the generator, and only embeddings "
            "of one size can be shared. Give --sharing none."
        )
    equal = not unlike and all(
        torch.equal(tables[0][name], tables[1][name]) for name in shared_parameters(discriminator, generator)
    )
    if wanted == "embeddings" and not equal:
        logger.info(
            "--sharing embeddings: the two models differ in theirs, and the discriminator's are taken for both."
        )
    return wanted or ("embeddings" if equal else "none" if unlike else "disentangled")


def start_pair(recipe) -> tuple[HfTinyPairForPreTraining, PreTrainedTokenizerBase, list[Callback]]:
    """The joint model of two native ones, their tokenizer, and the callbacks for `train`."""
    check_pair(recipe)
    names = recipe.discriminator_name, recipe.generator_name
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)  # of heads that begin anew
        discriminator = load_native(DISCRIMINATOR, names[0], "discriminator")
        generator = load_native(GENERATOR, names[1], "generator")
    sizes = [model.config.vocab_size for model in (discriminator, generator)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"{DISCRIMINATOR} {names[0]} has a vocabulary of {sizes[0]:,} tokens, {GENERATOR} {names[1]} one of {sizes[1]:,}: "
            "they were not trained together. Give the two models of one pair."
        )
    tokenizer = load_existing(DISCRIMINATOR, names[0], NEEDED_TOKENS)
    if len(tokenizer) > sizes[0]:
        raise InputError(f"{DISCRIMINATOR} {names[0]}: its tokenizer has {len(tokenizer):,} tokens, it {sizes[0]:,}.")
    longest = min(model.config.max_position_embeddings for model in (discriminator, generator))
    if recipe.max_seq_length > longest:
        raise InputError(f"--max_seq_length {recipe.max_seq_length}: the models have {longest} positions.")
    settings = dict(recipe.given_settings)
    settings["sharing"] = choose_sharing(discriminator, generator, settings.get("sharing"))
    logger.info(f"Sharing: {settings['sharing']}.")
    model = HfTinyPairForPreTraining.from_natives(discriminator, generator, **settings)
    follow = [FollowGenerator(model)] if settings["sharing"] == "disentangled" else []
    return model, tokenizer, [*follow, SaveNatives(Path(recipe.output_dir), tokenizer)]


class SaveNatives(Callback):
    """Both models as transformers knows them, in folders of the finished run."""

    def __init__(self, output_dir: Path, tokenizer: PreTrainedTokenizerBase):
        self.output_dir, self.tokenizer = output_dir, tokenizer

    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        on_main(lambda: self.save(model))
        return {}

    def save(self, model: nn.Module) -> None:
        for side in ("discriminator", "generator"):
            with checkpoint.written(f"The native {side}"):
                model.get_submodule(side).save_pretrained(self.output_dir / side)
                self.tokenizer.save_pretrained(self.output_dir / side)
