"""python benchmarks/vit.py [--quick]

One training step (forward, backward, AdamW) on the same images, from the same weights, taking turns in one process, at three
sizes of image and model:

- classification: hf_tiny's HfTinyViTForImageClassification, transformers' ViTForImageClassification (sdpa) and, where it is
  installed, timm's VisionTransformer;
- masked autoencoding of the same three quarters of the patches: hf_tiny's HfTinyViTForMaskedImageModeling and transformers'
  ViTMAEForPreTraining (sdpa).

There is no dropout. hf_tiny's steps multiply float32 by the library that its loop takes on this processor, the others' by
torch's choice; with --bf16 all are in bfloat16 autocast. Ratios are the peer's time divided by ours: above 1, hf_tiny is
faster. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from render import keep, middle_and_range
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification, ViTMAEConfig, ViTMAEForPreTraining
from transformers.utils import logging

import hf_tiny  # noqa: F401  before torch computes: it sets how threads wait
from hf_tiny.convert import vit_from_native
from hf_tiny.machine import best_products, float32_by
from hf_tiny.models.vit import HfTinyViTForImageClassification

OURS, HF, TIMM = "hf_tiny", "transformers", "timm"
CLASSIFY, AUTOENCODE = "classification", "masked autoencoding"
RATIOS = {(CLASSIFY, HF): "vit_ratio_hf", (CLASSIFY, TIMM): "vit_ratio_timm", (AUTOENCODE, HF): "mae_ratio"}
LABELS, MASK_RATIO = 10, 0.75
FIELDS = ("image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads")
SIZES = {  # name: what FIELDS are, then width, layers and heads of the decoder, then the batch size
    "28x28x1": ((28, 4, 1, 96, 6, 3), (64, 2, 2), 64),
    "32x32x3": ((32, 4, 3, 192, 9, 3), (96, 3, 3), 32),
    "224x224x3": ((224, 16, 3, 192, 12, 3), (128, 4, 4), 8),
}
# A step's loss, given images, labels and noise: the patches with the least noise stay visible.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def shape(size: str) -> dict[str, int]:
    values = dict(zip(FIELDS, SIZES[size][0], strict=True))
    return {**values, "intermediate_size": 4 * values["hidden_size"], "layer_norm_eps": 1e-6}


def classifiers(size: str) -> dict[str, tuple[nn.Module, Loss]]:
    torch.manual_seed(0)
    config = ViTConfig(**shape(size), num_labels=LABELS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    native = ViTForImageClassification._from_config(config, attn_implementation="sdpa")
    ours = vit_from_native(native)
    sides = {
        OURS: (ours, lambda images, labels, _: ours(images, labels=labels).loss),
        HF: (native, lambda images, labels, _: native(images, labels=labels).loss),
    }
    if find_spec("timm"):
        timm = timm_from_ours(ours)
        sides[TIMM] = (timm, lambda images, labels, _: F.cross_entropy(timm(images), labels))
    return sides


def autoencoders(size: str) -> dict[str, tuple[nn.Module, Loss]]:
    torch.manual_seed(0)
    width, layers, heads = SIZES[size][1]
    config = ViTMAEConfig(
        **shape(size), mask_ratio=MASK_RATIO, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        decoder_hidden_size=width, decoder_num_hidden_layers=layers, decoder_num_attention_heads=heads,
        decoder_intermediate_size=4 * width,
    )  # fmt: skip
    native = ViTMAEForPreTraining._from_config(config, attn_implementation="sdpa")
    ours = vit_from_native(native)
    for part in (ours.vit.embeddings, ours.decoder):
        part.positions.requires_grad_(False)  # as in the native model

    def our_loss(images: Tensor, _: Tensor, noise: Tensor) -> Tensor:
        return ours(images, noise.argsort(1)[:, : int(noise.shape[1] * (1 - MASK_RATIO))]).loss

    return {OURS: (ours, our_loss), HF: (native, lambda images, _, noise: native(images, noise=noise).loss)}


def timm_from_ours(model: HfTinyViTForImageClassification) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    config, names = model.config, {
        "vit.layers": "blocks", "attention_norm": "norm1", "attention.qkv": "attn.qkv", "attention.out": "attn.proj",
        "feed_forward_norm": "norm2", "feed_forward.up": "mlp.fc1", "feed_forward.down": "mlp.fc2", "vit.norm": "norm",
        "classifier": "head", "vit.embeddings.projection": "patch_embed.proj", "vit.embeddings.prefix.weight": "cls_token",
        "vit.embeddings.positions.table.weight": "pos_embed",
    }  # fmt: skip
    timm = VisionTransformer(
        config.image_size, config.patch_size, config.num_channels, LABELS, embed_dim=config.hidden_size,
        depth=config.num_hidden_layers, num_heads=config.num_attention_heads,
    )  # fmt: skip
    state = model.state_dict()
    state["vit.embeddings.positions.table.weight"] = F.pad(state["vit.embeddings.positions.table.weight"], (0, 0, 1, 0))
    renamed = {}
    for name, tensor in state.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        renamed[name] = tensor.reshape(timm.get_parameter(name).shape)
    timm.load_state_dict(renamed)
    return timm


def make_batch(size: str, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    side, patch, channels = SIZES[size][0][:3]
    images = torch.randn(rows, channels, side, side, generator=chance)
    labels = torch.randint(LABELS, (rows,), generator=chance)
    return images, labels, torch.rand(rows, (side // patch) ** 2, generator=chance)


def measure(
    sides: dict[str, tuple[nn.Module, Loss]], size: str, rows: int, repetitions: int, bf16: bool
) -> dict[str, list[float]]:
    """Seconds a step."""
    batch = make_batch(size, rows, 0)
    with torch.no_grad():
        losses = {side: loss(*batch).item() for side, (model, loss) in sides.items() if model.train()}
    for side, loss in losses.items():
        if abs(loss - losses[OURS]) > 1e-4:
            raise SystemExit(
                f"Not the same model at {size}: the loss of {side} is {loss:.5f}, ours {losses[OURS]:.5f}."
            )
    optimizers = {side: torch.optim.AdamW(model.parameters(), fused=True) for side, (model, _) in sides.items()}
    products = {side: best_products(model) for side, (model, _) in sides.items()}
    times, names = {side: [] for side in sides}, list(sides)
    for repetition in range(-2, repetitions):  # the first two warm up
        batch = make_batch(size, rows, repetition + 2)
        shift = repetition % len(names)  # so that nobody is always first
        for side in names[shift:] + names[:shift]:
            start = time.perf_counter()
            with float32_by(products[side]):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = sides[side][1](*batch)
                loss.backward()
            optimizers[side].step()
            optimizers[side].zero_grad()
            times[side].append(time.perf_counter() - start)
    return {side: values[2:] for side, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of each batch, 5 repetitions: only a check")
    parser.add_argument("--repetitions", type=int, default=None, help="default: 15; 5 when quick")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--bf16", action="store_true", help="both sides in bfloat16")
    parser.add_argument("--results", help="the file of benchmarks/results, without .json, that keeps the figures")
    arguments = parser.parse_args()
    repetitions = arguments.repetitions or (5 if arguments.quick else 15)
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()

    print(f"{arguments.threads} threads, {repetitions} repetitions, torch {torch.__version__}")
    print(f"{'':52} batch   images/s   peer / ours (range)")
    ratios = {name: {} for name in RATIOS.values()}  # name: size: median
    compared, precision = {}, "bfloat16" if arguments.bf16 else "float32"
    for task, build in ((CLASSIFY, classifiers), (AUTOENCODE, autoencoders)):
        for size in SIZES:
            rows = SIZES[size][2] // 8 if arguments.quick else SIZES[size][2]
            times = measure(build(size), size, rows, repetitions, arguments.bf16)
            for side, values in times.items():
                line = f"{task:20} {size:15} {side:15} {rows:5}   {rows / statistics.median(values):8.1f}"
                if side != OURS:
                    pairs = sorted(theirs / ours for theirs, ours in zip(values, times[OURS], strict=True))
                    ratios[RATIOS[task, side]][size] = round(statistics.median(pairs), 3)
                    compared[f"{side}, {task}, {size}, {precision}"] = middle_and_range(pairs)
                    line += f"   {statistics.median(pairs):.2f} ({pairs[0]:.2f} to {pairs[-1]:.2f})"
                print(line, flush=True)
    result = {
        **{name: round(statistics.median(values.values()), 3) if values else None for name, values in ratios.items()},
        "per_size": {size: {name: values.get(size) for name, values in ratios.items()} for size in SIZES},
        "batch_sizes": {size: SIZES[size][2] // 8 if arguments.quick else SIZES[size][2] for size in SIZES},
        "mask_ratio": MASK_RATIO, "precision": precision,
        "repetitions": repetitions, "threads": arguments.threads, "quick": arguments.quick,
    }  # fmt: skip
    keep(arguments.results, compared, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
