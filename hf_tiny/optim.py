"""Parameter groups and learning-rate schedules."""

import math
import re

import torch
from torch import nn
from transformers import PreTrainedModel

SCHEDULES = {
    # Each is a factor of the peak rate, by the step, the number of steps and the number of steps of the warm-up.
    "linear": lambda step, steps, warmup: 1 - step / steps,
    "cosine": lambda step, steps, warmup: 0.5 * (1 + math.cos(math.pi * step / steps)),
    "constant": lambda step, steps, warmup: 1.0,
    # Attention Is All You Need, equation 3, with its peak at 1
    "inverse_sqrt": lambda step, steps, warmup: math.sqrt(warmup / max(step + 1, warmup)),
    "warmup_stable_decay": lambda step, steps, warmup: min(1.0, (1 - step / steps) / 0.2),
}
# A layer's number in the names of its parameters: `layer.3.`, `layers.3.`, `h.3.`, `block.3.`, `albert_layer_groups.0.`
LAYER = re.compile(r"(?<![^._])(?:layers?|layer_groups|h|blocks?)\.(\d+)\.")


def warmup_length(warmup_steps: float, max_steps: int) -> int:
    """A share of the run when below 1, else steps; never more than a tenth of a short run."""
    steps = warmup_steps * max_steps if warmup_steps < 1 else min(warmup_steps, max_steps / 10)
    return max(1, round(steps))


def learning_rate_factor(name: str, step: int, max_steps: int, warmup_steps: float) -> float:
    """Warm-up times decay, multiplied as in the original ELECTRA; a pure function, so that a resume needs no state."""
    warmup = warmup_length(warmup_steps, max_steps)
    return min(1.0, (step + 1) / warmup) * SCHEDULES[name](step, max_steps, warmup)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; biases and norms (one dimension) do not. Every trainable parameter is in exactly one group."""
    return _matrices_and_vectors([p for p in model.parameters() if p.requires_grad], weight_decay)


def _matrices_and_vectors(parameters: list[nn.Parameter], weight_decay: float, **settings) -> list[dict]:
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay, **settings},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, **settings},
    ]


def depths(model: PreTrainedModel) -> dict[str, int | None]:
    """How deep each parameter of a model with a head lies: None in the head, 0 in the embeddings, N + 1 in layer N. A norm
    after the layers is as deep as the last one; a pooler, which many checkpoints lack, belongs to the head."""
    body = "" if model.base_model is model else f"{model.base_model_prefix}."
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    names = [name for name, _ in model.named_parameters()]  # a tied parameter comes once
    layers = {name: LAYER.search(name, len(body)) for name in names if name.startswith(body)}
    top = max((int(layer[1]) + 1 for layer in layers.values() if layer), default=0)
    found: dict[str, int | None] = {}
    in_layers = False
    for name in names:  # in the order in which the model made them
        layer = layers.get(name)
        in_layers = in_layers or layer is not None
        if name not in layers or ".pooler." in name:
            found[name] = None
        elif layer:
            found[name] = int(layer[1]) + 1
        else:
            found[name] = top if in_layers and name not in embeddings else 0
    return found


def layer_groups(
    model: PreTrainedModel,
    weight_decay: float,
    *,
    layer_decay: float = 1.0,
    head_lr_factor: float = 1.0,
    slow_start_steps: int = 0,
    unfreeze_steps: int = 0,
) -> list[dict]:
    """Two groups (matrices, vectors) for each depth that has something to train, from the head down to the embeddings.

    layer_decay: each layer learns at this fraction of the rate of the one above.
    slow_start_steps: the head learns alone for so long.
    unfreeze_steps: then the last layer joins, and so many steps later the one below, and so on.
    """
    found = depths(model)
    top = max((depth for depth in found.values() if depth is not None), default=0)
    parameters = dict(model.named_parameters())
    groups = []
    for depth in (None, *range(top, -1, -1)):
        own = [parameters[name] for name in found if found[name] == depth and parameters[name].requires_grad]
        if depth is None:
            settings = {"factor": head_lr_factor, "start": 0}
        else:
            start = slow_start_steps + (top - depth) * unfreeze_steps
            settings = {"factor": layer_decay ** (top - depth), "start": start}
        groups += _matrices_and_vectors(own, weight_decay, **settings, depth=depth)
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config, groups: list[dict] | None = None) -> torch.optim.Optimizer:
    """`groups`: what learns alike: "params", "weight_decay", and maybe "factor" (of the learning rate), "start" (the step
    before which nothing of it moves) and "stop" (the step from which on nothing does)."""
    groups = parameter_groups(model, config.weight_decay) if groups is None else groups
    groups = [{"factor": 1.0, "start": 0, "stop": math.inf, **group} for group in groups]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, fused=True)


def learning_rate(config, group: dict, step: int, max_steps: int) -> float:
    """Of a group in a step: what starts late warms up when it starts, and ends with the others or at its own stop."""
    start, stop = group["start"], min(max_steps, group.get("stop", max_steps))
    if not start <= step < stop:
        return 0.0
    schedule = learning_rate_factor(config.lr_scheduler_type, step - start, stop - start, config.warmup_steps)
    return config.learning_rate * group["factor"] * schedule


def set_learning_rate(optimizer: torch.optim.Optimizer, config, step: int, max_steps: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, group, step, max_steps)


def drop_frozen_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    """What starts later or has stopped has no gradient: it does not move or decay, has no part in the norm that is
    clipped, and Adam learns nothing of it. (With several processes, `requires_grad` must stay as it is for the whole run.)"""
    for group in optimizer.param_groups:
        if not group["start"] <= step < group["stop"]:
            for parameter in group["params"]:
                parameter.grad = None
