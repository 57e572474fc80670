"""A model for use without PyTorch: ONNX files. What has a native twin also runs in a browser, by `@huggingface/transformers`.

hf-tiny export runs/mine --to onnx --output_dir mine-onnx
"""

import argparse
import inspect
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from . import convert, predict
from .errors import InputError, require
from .models import HfTinyReformerConfig
from .start import quiet

LARGEST_DIFFERENCE = 1e-4  # between PyTorch and ONNX, of outputs of order 1
IMPOSSIBLE = 1e30  # the score of what cannot be, such as a word that depends on itself
LEAST_AGREEMENT = 0.8  # share of answers that the small model must give as the large one does
ROWS, TOKENS, WORDS = 4, 16, 3  # of the input that a model is traced with
CHECKED = 16  # rows of the input that it is compared on
MOVED = 4  # of these, in how many rounding may put tokens into other buckets
BROWSER_TASKS = {  # what `pipeline` of @huggingface/transformers calls it
    "classify": "text-classification",
    "tag": "token-classification",
    "images": "image-classification",
    "fill_mask": "fill-mask",
    "electra": "fill-mask",
    "embed": "feature-extraction",
}


def random_inputs(model: PreTrainedModel, rows: int, tokens: int) -> dict[str, Tensor]:
    """What the model reads, at random; the last text is shorter than the others."""
    names, config = inspect.signature(model.forward).parameters, model.config
    draw = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
        batch = {"pixel_values": torch.randn(rows, config.num_channels, *size, generator=draw)}
        if "ids_keep" in names:
            count = int(np.prod(config.grid_size(size)))
            batch["ids_keep"] = torch.rand(rows, count, generator=draw).argsort(1)[:, : max(1, count // 4)].sort(1)[0]
        return batch
    ids = torch.randint(config.get_text_config().vocab_size, (rows, tokens), generator=draw)
    mask = torch.ones_like(ids)
    mask[-1, tokens // 2 :] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in names and config.get_text_config().to_dict().get("type_vocab_size", 0):
        batch["token_type_ids"] = torch.zeros_like(ids)
    if "decoder_input_ids" in names:
        batch["decoder_input_ids"] = ids[:, : tokens // 2]
    if "word_spans" in names:  # (rows, words, 2): the first token of a word, and one past its last
        starts = torch.arange(1, 2 * WORDS, 2)
        batch["word_spans"] = torch.stack([starts, starts + 2], 1).expand(rows, -1, -1).clone()
    return batch


def free_sizes(batch: dict[str, Tensor]) -> dict[str, dict[int, str]]:
    """Which dimensions of the inputs may have any size."""
    second = {"input_ids": "tokens", "attention_mask": "tokens", "token_type_ids": "tokens", "word_spans": "words"}
    second["decoder_input_ids"] = "written"
    return {name: {0: "rows", 1: second[name]} if name in second else {0: "rows"} for name in batch}


@contextmanager
def silent() -> Iterator[None]:
    """torch and onnxruntime say much that is no matter of the person who exports."""
    with warnings.catch_warnings(action="ignore"), quiet():
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@torch.no_grad()
def write_onnx(model: PreTrainedModel, folder: Path) -> tuple[float, float | None]:
    """model.onnx and model_quantized.onnx; returns the largest difference of the first, and how often the second gives the
    same answer (None for outputs that are no choice). Both are compared on inputs of another size than they were made
    with."""
    require("onnxscript", "onnx")
    require("onnxruntime.quantization", "onnx")
    config = model.config.get_text_config()
    traced, compared = lengths(config)
    batch = random_inputs(model, ROWS, traced)
    extra = {"use_cache": False} if "decoder_input_ids" in batch else {}
    names = [name for name, value in model(**batch, **extra).items() if torch.is_tensor(value)]
    chosen = next(name for name in names if name != "loss")
    path, small = folder / "model.onnx", folder / "model_quantized.onnx"
    with silent():
        torch.onnx.export(
            WithoutCache(model) if extra else model,
            (),
            path,
            kwargs=batch,
            dynamic_shapes=free_sizes(batch),
            output_names=names,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        quantize(path, small)
    other = random_inputs(model, CHECKED, compared)
    expected = model(**other, **extra)[chosen].numpy()
    found, quantized = (session_outputs(one, other)[names.index(chosen)] for one in (path, small))
    possible = np.abs(expected) < IMPOSSIBLE
    differences = np.where(possible, np.abs(found - expected), 0).reshape(CHECKED, -1).max(1)
    differences /= max(1.0, np.abs(expected[possible]).max())
    close = differences <= LARGEST_DIFFERENCE
    hashed = isinstance(config, HfTinyReformerConfig) and "lsh" in config.attn_layers
    if (~close).sum() > (MOVED if hashed else 0):
        raise InputError(
            f"The ONNX model differs from PyTorch's by {differences.max():.2g} of its largest output, and at most "
            f"{LARGEST_DIFFERENCE:g} is rounding. Nothing was written; please report the model."
        )
    if not close.all():
        moved = f"In {(~close).sum()} of {CHECKED} random texts, rounding has moved a token into another bucket"
        print(f"{moved}: these differ by {differences.max():.1g}.")
    difference = float(differences[close].max())
    if expected.shape[-1] == 1 or chosen != "logits":
        return difference, None
    return difference, float((quantized.argmax(-1) == expected.argmax(-1)).mean())


def lengths(config: PreTrainedConfig) -> tuple[int, int]:
    """Of the texts that a model is traced with, and of those that it is compared on. A Reformer's have several chunks, if it
    has as many places: what is traced with one has one for ever."""
    if not isinstance(config, HfTinyReformerConfig):
        return TOKENS, TOKENS + 7
    tokens = 3 * max(config.lsh_attn_chunk_length, config.local_attn_chunk_length) + 7
    if config.position_embedding_type == "axial":
        tokens = min(tokens, int(np.prod(config.axial_pos_shape)))
    return tokens, 2 * tokens // 3 + 1


def quantize(path: Path, small: Path) -> None:
    """Weights of 8 bits. The shapes that the exporter has noted are those of weights before they are transposed."""
    onnx, quantization = require("onnx", "onnx"), require("onnxruntime.quantization", "onnx")
    graph = onnx.load(path)
    del graph.graph.value_info[:]
    quantization.quantize_dynamic(graph, small, weight_type=quantization.QuantType.QInt8)


class WithoutCache(torch.nn.Module):
    """An encoder-decoder that is asked for the scores only, and not for what makes the next token cheaper."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor):
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids, use_cache=False
        )


def session_outputs(path: Path, batch: dict[str, Tensor]) -> list[np.ndarray]:
    session = require("onnxruntime", "onnx").InferenceSession(path, providers=["CPUExecutionProvider"])
    known = {one.name for one in session.get_inputs()}
    return session.run(None, {name: tensor.numpy() for name, tensor in batch.items() if name in known})


# What the folder holds


def exported_models(trained: predict.TrainedModel) -> tuple[dict[str, PreTrainedModel], str]:
    """The models to export, by their folders, and why a browser cannot load them, if so: it needs a native twin."""
    model = trained.model.cpu()
    if trained.task not in BROWSER_TASKS:
        return {"": model}, f"@huggingface/transformers is not served with a model for the task {trained.task}."
    bare = model.encoder if trained.task == predict.EMBED else model
    if not type(bare).__module__.startswith("hf_tiny."):
        return {"": bare}, ""
    try:
        return convert.converted(bare), ""
    except InputError as error:
        return {"": model}, str(error)


def save_processor(processor, folder: Path, images: bool) -> None:
    """As it is; an image processor also in the words of @huggingface/transformers."""
    processor.save_pretrained(folder)
    if images:
        settings = processor.to_dict()
        grey = len(settings["image_mean"]) == 1
        words = {"image_processor_type": "ViTImageProcessor", "do_convert_rgb": not grey, "do_convert_grayscale": grey}
        text = json.dumps({**settings, **words}, indent=2, default=dict)
        (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")


def write_card(folder: Path, trained: predict.TrainedModel, model: PreTrainedModel, obstacle: str) -> None:
    task, name = BROWSER_TASKS.get(trained.task), Path(trained.name).name
    data = ModelCardData(
        library_name="onnx" if obstacle else "transformers.js", tags=["hf_tiny", "onnx"], pipeline_tag=task
    )
    pooled = ", { pooling: 'mean', normalize: true }" if trained.task == predict.EMBED else ""
    example = "'digit.png'" if trained.task == "images" else f"'{'…' if task != 'fill-mask' else '… [MASK] …'}'"
    use = (
        f"It is for ONNX Runtime. {obstacle}\n"
        if obstacle
        else f"In a browser or under Node:\n\n```js\nimport {{ pipeline }} from '@huggingface/transformers';\n\n"
        f"const pipe = await pipeline('{task}', 'PATH_OR_ID'); // {{ dtype: 'q8' }}: the int8 one\n"
        f"console.log(await pipe({example}{pooled}));\n```\n"
    )
    text = f"---\n{data.to_yaml()}\n---\n\n# {name}, in ONNX\n\n`{type(model).__name__}`: `onnx/model.onnx`, and with weights"
    ModelCard(f"{text} of 8 bits `onnx/model_quantized.onnx`.\n\n{use}").save(folder / "README.md")


def export(name: str, target: Path) -> None:
    """All or nothing of it is at `target`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"--output_dir {target} is not empty: choose another folder.")
    trained = predict.load(name)
    models, obstacle = exported_models(trained)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".draft-", dir=target.parent) as draft:
        for part, model in models.items():
            folder = Path(draft, target.name, part)
            (folder / "onnx").mkdir(parents=True)
            difference, agreement = write_onnx(model.eval(), folder / "onnx")
            model.config.save_pretrained(folder)
            save_processor(trained.processor, folder, trained.task in predict.OF_IMAGES)
            write_card(folder, trained, model, obstacle)
            say(target / part, folder / "onnx", difference, agreement)
        if target.exists():
            target.rmdir()
        Path(draft, target.name).chmod(0o755)
        Path(draft, target.name).rename(target)
    print(f"Not for a browser: {obstacle}" if obstacle else "@huggingface/transformers loads it: see its README.md.")


def say(target: Path, folder: Path, difference: float, agreement: float | None) -> None:
    large, small = ((folder / name).stat().st_size / 1e6 for name in ("model.onnx", "model_quantized.onnx"))
    print(f"{target / 'onnx' / 'model.onnx'}: {large:.1f} MB, differs from PyTorch by {difference:.1g} at most")
    same = "" if agreement is None else f", gives the same answer for {agreement:.0%} of random inputs"
    print(f"{target / 'onnx' / 'model_quantized.onnx'}: {small:.1f} MB{same}")
    if agreement is not None and agreement < LEAST_AGREEMENT:
        print("  The small one often answers otherwise: measure it on your own data before you use it.")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hf-tiny export", description="Write a model as ONNX files.")
    parser.add_argument("model", help="the folder of a run, or a Hub id")
    parser.add_argument("--to", choices=["onnx"], default="onnx", help="the format")
    parser.add_argument("--output_dir", type=Path, help="a new folder; by default the model's name with -onnx")
    given = parser.parse_args(argv)
    export(given.model, given.output_dir or Path(f"{Path(given.model).name}-onnx"))


if __name__ == "__main__":
    main()
