"""Reversible layers (Gomez et al., 2017): their inputs are computed from their outputs, and not kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@contextmanager
def random_numbers(seed: int | None, place: int, device: torch.device) -> Iterator[None]:
    """Those of a place in the model inside, and the user's own ones untouched outside; without a seed, the user's."""
    if seed is None:
        yield
        return
    other = device.type != "cpu"
    with torch.random.fork_rng([device] if other else [], device_type=device.type if other else "cuda"):
        torch.default_generator.manual_seed(seed + place)
        if other:
            torch.get_device_module(device).manual_seed(seed + place)
        yield


class Reversible(torch.autograd.Function):
    """All blocks; only their output is kept, and what `shared` keeps. Backward computes each block's input from its
    output, once more with a graph.

    The parameters are inputs, so that they get their gradients like those of any other function.
    """

    @staticmethod
    def forward(ctx, x: Tensor, blocks: nn.ModuleList, shared: Any, *parameters: Tensor) -> Tensor:
        device = x.device.type
        ctx.blocks, ctx.shared, ctx.parameters = blocks, shared, parameters
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), False)
        y1, y2 = x.chunk(2, dim=-1)
        with torch.autocast(*ctx.autocast):
            for block in blocks:
                y1, y2, _ = block(y1, y2, shared)
        y = torch.cat((y1, y2), dim=-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        y1, y2 = ctx.saved_tensors[0].chunk(2, dim=-1)
        grad1, grad2 = grad.chunk(2, dim=-1)
        # Allocated at once: between the activations of all layers they would scatter the free memory.
        grads = {parameter: torch.zeros_like(parameter) for parameter in ctx.parameters if parameter.requires_grad}

        def differentiate(y: Tensor, x: Tensor, grad: Tensor, parameters: list[Tensor]) -> Tensor:
            """The gradient of x; those of the parameters are added to what is known."""
            x_grad, *found = torch.autograd.grad(y, [x, *parameters], grad.to(y.dtype), allow_unused=True)
            for parameter, new in zip(parameters, found, strict=True):
                if new is not None:
                    grads[parameter] += new
            return x_grad

        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            for block in reversed(ctx.blocks):
                parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
                fed, fed_grads = [], []
                with random_numbers(ctx.shared.seed, 2 * block.layer_idx + 1, y1.device):
                    for piece, piece_grad in zip(block.pieces(y1), block.pieces(grad2), strict=True):
                        piece = piece.detach().requires_grad_()
                        new = block.feed(piece)
                        fed_grads.append(differentiate(new, piece, piece_grad, parameters))
                        fed.append(new.detach())
                y2 = y2 - torch.cat(fed).view_as(y2)
                grad1 = grad1 + torch.cat(fed_grads).view_as(grad1)
                x2 = y2.detach().requires_grad_()
                attended, _ = block.attend(x2, ctx.shared)
                grad2 = grad2 + differentiate(attended, x2, grad1, parameters)
                y1 = y1 - attended.detach()
        return torch.cat((grad1, grad2), dim=-1), None, None, *(grads.get(p) for p in ctx.parameters)
