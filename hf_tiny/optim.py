"""Parameter groups and learning-rate schedules."""

import math

import torch
from torch import nn

from .errors import InputError

SCHEDULES = {
    # Each is a factor of the peak rate, by the share of the run that is done (0 to 1).
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "constant": lambda done: 1.0,
    "warmup_stable_decay": lambda done: min(1.0, (1 - done) / 0.2),
}


def warmup_length(warmup_steps: float, max_steps: int) -> int:
    """A share of the run when below 1, else steps; never more than a tenth of a short run."""
    steps = warmup_steps * max_steps if warmup_steps < 1 else min(warmup_steps, max_steps / 10)
    return max(1, round(steps))


def learning_rate_factor(name: str, step: int, max_steps: int, warmup_steps: float) -> float:
    """Warm-up times decay, multiplied as in the original ELECTRA; a pure function, so that a resume needs no state."""
    warmup = warmup_length(warmup_steps, max_steps)
    ramp = min(1.0, (step + 1) / warmup)
    if name == "inverse_sqrt":  # Attention Is All You Need, equation 3, with its peak at 1
        return ramp * math.sqrt(warmup / max(step + 1, warmup))
    if name not in SCHEDULES:
        raise InputError(f"--lr_scheduler_type {name}: choose one of {', '.join([*SCHEDULES, 'inverse_sqrt'])}.")
    return ramp * SCHEDULES[name](step / max_steps)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; biases and norms (one dimension) do not. Every trainable parameter is in exactly one group."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config) -> torch.optim.Optimizer:
    groups = parameter_groups(model, config.weight_decay)
    for group in groups:
        group["peak_lr"] = config.learning_rate
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
