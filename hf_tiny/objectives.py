"""ELECTRA's objectives by name: which losses in which stages, and what of the model each stage moves."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .arguments import flag
from .errors import InputError
from .models.electra import OBJECTIVES, HfTinyElectraConfig, HfTinyElectraForPreTraining
from .optim import parameter_groups
from .train import Callback, TrainState

logger = logging.getLogger(__name__)

STAGES = {  # a name that is not here has one stage, of its own name
    "two_stage": ("mlm", "rtd"),
    "adversarial": ("joint", "adversarial"),
}
NAMES = ("joint", *STAGES, "masked_rtd", "replace_mlm", "all_tokens_mlm", "mlm")
KEPT = "objective.json"


@dataclass(frozen=True, kw_only=True)
class ObjectiveArguments:
    """What ELECTRA minimises."""

    objective: str = flag("joint", f"What to minimise: {', '.join(NAMES)}.")
    first_stage_steps: int = flag(
        -1,
        "Steps of MLM alone in two_stage (half of --max_steps by default), of joint training before adversarial (0).",
    )


def start_objective(model: HfTinyElectraForPreTraining, recipe) -> tuple[list[dict], "Stages"]:
    """Set up the model as the recipe says; returns the optimiser's groups and the callback for `train`."""
    name, sharing, size = recipe.objective, model.config.sharing, model.config.generator_size
    if name not in NAMES:
        raise InputError(f"--objective {name}: choose one of {', '.join(NAMES)}.")
    if name == "mlm" and sharing != "all":
        raise InputError(
            "--objective mlm trains the generator only: the encoder that is kept learns with --sharing all "
            "--generator_size 1."
        )
    if name == "two_stage" and sharing != "none":
        raise InputError(
            "--objective two_stage freezes the generator in its second stage, so that nothing can be shared: add "
            "--sharing none, and --generator_size 1 for a discriminator that starts from the generator's weights."
        )
    switch = recipe.first_stage_steps
    if switch < 0:
        switch = recipe.max_steps // 2 if name == "two_stage" else 0
    if name == "two_stage" and not 0 < switch < recipe.max_steps:
        raise InputError(
            f"--objective two_stage: the first stage of {switch} steps must leave some of --max_steps {recipe.max_steps}."
        )
    head = OBJECTIVES[STAGES.get(name, (name,))[-1]].head
    if head is not None:
        model.objective_head = head(model.config).apply(model._init_weights)
    if name != "two_stage":
        return parameter_groups(model, recipe.weight_decay), Stages(model, name, switch)
    if size != 1:
        logger.info(f"The generator is {size:g} times as wide: the discriminator will start from its embeddings only.")
    first = nn.ModuleList([model.generator, model.generator_head, model.generator_lm_head])
    second = nn.ModuleList([model.electra, model.discriminator_head])
    groups = [{**group, "stop": switch} for group in parameter_groups(first, recipe.weight_decay)]
    groups += [{**group, "start": switch} for group in parameter_groups(second, recipe.weight_decay)]
    return groups, Stages(model, name, switch)


def flops_per_token(config: HfTinyElectraConfig, recipe) -> float:
    """Of a training step, forward and backward. The stages of two_stage count as equally long, of others the last."""
    with torch.random.fork_rng():
        model = HfTinyElectraForPreTraining(config)
    ids = torch.arange(recipe.max_seq_length)[None] % config.vocab_size
    labels = torch.where(ids < recipe.mlm_probability * ids.numel(), ids, -100)
    stages = start_objective(model, recipe)[1].stages
    found = []
    for stage in stages if recipe.objective == "two_stage" else stages[-1:]:
        model.objective = OBJECTIVES[stage]
        with FlopCounterMode(display=False) as counter:
            model(ids, labels=labels, sampling_noise=torch.full(ids.shape, 0.5)).loss.backward()
        found.append(counter.get_total_flops() / ids.numel())
    return sum(found) / len(found)


class Stages(Callback):
    """Changes the objective after `switch` steps; also of a run that is resumed, which must have the same one."""

    def __init__(self, model: HfTinyElectraForPreTraining, name: str, switch: int):
        self.model, self.about, self.switch = model, {"objective": name, "first_stage_steps": switch}, switch
        self.stages = STAGES.get(name, (name,))
        self.needs_whole_weights = name == "two_stage"  # the second stage begins with a copy
        self.enter(0)

    def enter(self, step: int) -> None:
        self.model.objective = OBJECTIVES[self.stages[0 if step < self.switch else -1]]

    @torch.no_grad()
    def on_step_end(self, state: TrainState, model: HfTinyElectraForPreTraining) -> None:
        if state.step == self.switch:
            self.enter(state.step)
            if self.about["objective"] == "two_stage":  # the discriminator starts from what the generator has learned
                model.electra.embeddings.load_state_dict(model.generator.embeddings.state_dict())
                if model.config.generator_size == 1:
                    model.electra.encoder.load_state_dict(model.generator.encoder.state_dict())

    def on_train_end(self, state: TrainState, model: HfTinyElectraForPreTraining) -> dict[str, float]:
        model.objective, model.objective_head = OBJECTIVES["joint"], None  # what is saved is a model like any other
        return {}

    def on_save(self, folder: Path) -> None:
        (folder / KEPT).write_text(json.dumps(self.about))

    def on_load(self, folder: Path) -> None:
        kept = folder / KEPT
        saved = json.loads(kept.read_text()) if kept.exists() else {"objective": "joint", "first_stage_steps": 0}
        if saved != self.about:
            raise InputError(f"{folder} was made with {saved}, this run has {self.about}: resume with the same.")
        self.enter(json.loads((folder / "trainer_state.json").read_text())["state"]["step"])
