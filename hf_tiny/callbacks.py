"""What some runs need and others do not: averaging, L2-SP, stages, warnings."""

import json
import logging
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from . import checkpoint
from .errors import InputError
from .models.electra import OBJECTIVES, HfTinyElectraForPreTraining
from .models.joint import JointPreTraining
from .optim import learning_rate

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """What changes as the run goes on, and is saved with it."""

    step: int = 0
    max_steps: int = 0
    warmup_steps: int = 0
    micro_batches_per_step: int = 1
    tokens: int = 0
    seconds: float = 0.0
    best_metric: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    commands: list[str] = field(default_factory=list)  # that started the run and went on with it


class Callback:
    """Averaging, unfreezing, warnings: what some runs need and others do not."""

    replaces_weights = False  # whether the model is another one after `on_train_end`, and is evaluated again
    needs_whole_weights = True  # whether it cannot work on a model in shards, of which each process has a part (FSDP)

    def on_step_end(self, state: TrainState, model: nn.Module) -> None: ...

    def on_evaluate(self, state: TrainState, metrics: dict[str, float]) -> None: ...

    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        """Before the finished model is saved; what it returns joins the results."""
        return {}

    def on_save(self, folder: Path) -> None:
        """Into a checkpoint goes what must be there when the run goes on."""

    def on_load(self, folder: Path) -> None:
        """The run goes on from this checkpoint."""


class EMA(Callback):
    """The finished model has an exponential moving average of the weights; the average is young in a run's first steps."""

    replaces_weights = True
    FILE = "ema.safetensors"

    def __init__(self, decay: float):
        self.decay, self.weights = decay, {}

    @torch.no_grad()
    def on_step_end(self, state: TrainState, model: nn.Module) -> None:
        moving = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
        if not self.weights:
            self.weights = {name: weight.clone() for name, weight in moving.items()}
        self.weights = {name: weight.to(moving[name].device) for name, weight in self.weights.items()}  # moves once
        decay = min(self.decay, (1 + state.step) / (10 + state.step))
        torch._foreach_lerp_(list(self.weights.values()), [moving[name] for name in self.weights], 1 - decay)

    def on_save(self, folder: Path) -> None:
        save_file(self.weights, folder / self.FILE)

    def on_load(self, folder: Path) -> None:
        if not (folder / self.FILE).exists():
            raise InputError(f"{folder} was made without --ema. Resume with the same settings.")
        self.weights = load_file(folder / self.FILE)

    @torch.no_grad()
    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        for name, weight in self.weights.items():
            model.get_parameter(name).copy_(weight)
        logger.info(
            f"The finished model is a moving average of the weights (--ema {self.decay:g}): these are its scores."
        )
        return {"ema_decay": self.decay}


class AverageCheckpoints(Callback):
    """The finished model is the mean of the last `count` checkpoints, as in Attention Is All You Need."""

    replaces_weights = True

    def __init__(self, output_dir: str, count: int):
        self.output_dir, self.count = Path(output_dir), count

    @torch.no_grad()
    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        folders = checkpoint.checkpoints(self.output_dir)[-self.count :]
        if not folders:  # resumed at its end, from another folder
            return {"averaged_checkpoints": 0}
        sums: dict[str, torch.Tensor] = {}
        for folder in folders:
            for name, weight in load_file(folder / "model.safetensors").items():  # a tied weight is saved once
                sums[name] = sums.get(name, 0) + weight.double()
        weights = model.state_dict()  # also what is saved and not trained: BART and Marian have a buffer
        for name, total in sums.items():
            weights[name].copy_(total / len(folders))
        logger.info(f"The finished model is the mean of {', '.join(folder.name for folder in folders)}.")
        return {"averaged_checkpoints": len(folders)}


class L2SP(Callback):
    """Pulls weights towards where they started (Li et al., 2018), apart from the gradient, as AdamW does its decay."""

    def __init__(self, groups: list[dict], config):
        self.groups, self.config = groups, config
        self.starts = [[parameter.detach().clone() for parameter in group["params"]] for group in groups]

    @torch.no_grad()
    def on_step_end(self, state: TrainState, model: nn.Module) -> None:
        for group, starts in zip(self.groups, self.starts, strict=True):
            rate = learning_rate(self.config, group, state.step - 1, state.max_steps)  # of the step that was taken
            starts[:] = [start.to(p.device) for start, p in zip(starts, group["params"], strict=True)]  # moves once
            torch._foreach_lerp_(group["params"], starts, min(1.0, rate * self.config.l2_sp))


class FollowGenerator(Callback):
    """Sharing "disentangled": the discriminator's embeddings move as the generator's do, and by their own gradient."""

    def __init__(self, model: JointPreTraining):
        tables = model.discriminator_embeddings, model.generator_embeddings
        self.own, self.generators = (
            [module.weight for module in table.children() if isinstance(module, nn.Embedding)] for table in tables
        )
        self.on_load(Path())

    def on_load(self, folder: Path) -> None:
        self.before = [weight.detach().clone() for weight in self.generators]

    @torch.no_grad()
    def on_step_end(self, state: TrainState, model: nn.Module) -> None:
        for own, weight, before in zip(self.own, self.generators, self.before, strict=True):
            own += weight - before.to(own.device)
        self.on_load(Path())


class MergeLora(Callback):
    """Adds the adapters to the weights they belong to: what is saved in the end is a model like any other."""

    @torch.no_grad()
    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        from peft.tuners.lora import LoraLayer

        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge()
                model.set_submodule(name, module.get_base_layer())
        del model.peft_config
        return {}


class CollapseWarning(Callback):
    """Says in words when the discriminator does no better than the majority class, which its falling loss hides."""

    needs_whole_weights = False

    def on_evaluate(self, state: TrainState, metrics: dict[str, float]) -> None:
        if state.step < state.warmup_steps:
            return
        loss, entropy = metrics["eval_rtd_loss"], metrics["eval_rtd_majority_entropy"]
        if loss >= entropy or metrics["eval_rtd_recall"] == 0:
            logger.warning(
                f"step {state.step}: the discriminator has collapsed to the majority class or has not left it yet (RTD loss "
                f"{loss:.3f}, majority entropy {entropy:.3f}, recall {metrics['eval_rtd_recall']:.3f}). If this lasts: "
                "rotary positions, a smaller generator, a lower learning rate, or more steps."
            )


class SlowdownWarning(Callback):
    """Says when a run has become several times slower than it was: other programs are using its cores."""

    needs_whole_weights = False
    STEPS, SLOWER = 20, 3.0

    def __init__(self):
        self.rates, self.best, self.last, self.said = deque(maxlen=self.STEPS), 0.0, (0, 0.0), False

    def on_step_end(self, state: TrainState, model: nn.Module) -> None:
        tokens, seconds = self.last
        self.last = state.tokens, state.seconds
        if seconds and state.seconds > seconds:
            self.rates.append((state.tokens - tokens) / (state.seconds - seconds))
        if len(self.rates) < self.STEPS:
            return
        rate = median(self.rates)  # a step may have an evaluation before it
        self.best = max(self.best, rate)
        if not self.said and rate < self.best / self.SLOWER:
            self.said = True
            logger.warning(
                f"step {state.step}: training has slowed from {self.best:,.0f} to {rate:,.0f} tokens a second. Is another "
                "program using the cores? Stop it, or go on with fewer: --resume_from_checkpoint latest --num_threads 1."
            )


class Stages(Callback):
    """Changes ELECTRA's objective after `switch` steps, also of a run that is resumed, which must have the same one."""

    FILE = "objective.json"
    NAMES: ClassVar[dict[str, tuple[str, str]]] = {"two_stage": ("mlm", "rtd"), "adversarial": ("joint", "adversarial")}

    def __init__(self, model: HfTinyElectraForPreTraining, name: str, switch: int):
        self.model, self.about, self.switch = model, {"objective": name, "first_stage_steps": switch}, switch
        self.stages = self.NAMES.get(name, (name,))
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
        (folder / self.FILE).write_text(json.dumps(self.about))

    def on_load(self, folder: Path) -> None:
        kept = folder / self.FILE
        saved = json.loads(kept.read_text()) if kept.exists() else {"objective": "joint", "first_stage_steps": 0}
        if saved != self.about:
            raise InputError(f"{folder} was made with {saved}, this run has {self.about}: resume with the same.")
        self.enter(json.loads((folder / "trainer_state.json").read_text())["state"]["step"])
