"""Trackers, through accelerate: beside metrics.jsonl they get the figures of a run, and at its end what it leaves."""

import dataclasses
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from huggingface_hub import get_token
from PIL import Image

from .config import TrainConfig
from .data.predictions import BINARY
from .errors import InputError, require
from .hub import NOT_LOGGED_IN, PREDICTIONS

TRACKIO = "trackio"
TAKES_IMAGES = {"tensorboard": {"dataformats": "NHWC"}, "wandb": {}}  # options of accelerate's `log_images`
SAMPLES, MOST_CHARACTERS = 20, 4000  # of predictions that are shown
AT_THE_END = ("test_", "baseline_", "forgetting_")  # figures that no line of metrics.jsonl has


def check_trackers(config: TrainConfig) -> None:
    """accelerate says nothing of a tracker that is not installed."""
    names, available = config.report_to or [], [str(tracker) for tracker in get_available_trackers()]
    if TRACKIO in names:
        require(TRACKIO, TRACKIO)
    for name in names:
        if name not in available:
            raise InputError(
                f"--report_to {name}: not installed, or no tracker of accelerate. Installed: {', '.join(available) or 'none'}."
            )
    if config.trackio_space_id and TRACKIO not in names:
        raise InputError("--trackio_space_id: a Space is for --report_to trackio, which is not given.")
    if config.trackio_space_id and get_token() is None:
        raise InputError(f"--trackio_space_id {config.trackio_space_id}: {NOT_LOGGED_IN}.")


def start_trackers(accelerator: Accelerator, config: TrainConfig) -> None:
    """In the main process only: accelerate would start trackio in every one. A run that goes on is the same run to trackio."""
    flags = dataclasses.asdict(config).items()
    kept = {name: value if isinstance(value, int | float | str) else str(value) for name, value in flags}
    folder = Path(config.output_dir).resolve()
    trackio = {
        "name": f"{folder.parent.name}-{folder.name}" if folder.name.startswith("seed-") else folder.name,
        "space_id": config.trackio_space_id,
        "private": config.hub_private_repo or None,
        "resume": "allow" if config.resume_from_checkpoint else "never",
    }
    accelerator.init_trackers("hf_tiny", config=kept, init_kwargs={TRACKIO: trackio})


def log_what_is_left(accelerator: Accelerator, config: TrainConfig, results: dict, step: int) -> None:
    """Figures of the end, images, and the first predictions: these hold rows of the data, and leave the machine only with
    --push_predictions."""
    folder, figures = Path(config.output_dir), {n: value for n, value in results.items() if n.startswith(AT_THE_END)}
    texts = {path.stem: sample(path) for path in folder.glob(PREDICTIONS) if path.suffix not in BINARY}
    images = {path.stem: path for path in sorted(folder.glob("*.png"))}
    for tracker in accelerator.trackers:
        if tracker.name == TRACKIO:
            trackio = require(TRACKIO, TRACKIO)
            shown = {name: trackio.Image(path) for name, path in images.items()}
            samples = {name: trackio.Markdown(text) for name, text in texts.items()}
            stays = trackio.context_vars.current_server.get() is None  # a variable of trackio's own may name one, too
        else:
            shown, samples, stays = {}, texts, tracker.name == "tensorboard"
        tracker.log({**figures, **shown, **(samples if stays or config.push_predictions else {})}, step=step)
        if tracker.name in TAKES_IMAGES:
            arrays = {name: np.asarray(Image.open(path).convert("RGB"))[None] for name, path in images.items()}
            tracker.log_images(arrays, step=step, **TAKES_IMAGES[tracker.name])


def sample(path: Path) -> str:
    """The first lines of a text file, for Markdown: indented, they are code whatever they hold."""
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [line.rstrip("\n") for line, _ in zip(file, range(SAMPLES), strict=False)]
    return "".join(f"    {line}\n" for line in "\n".join(lines)[:MOST_CHARACTERS].split("\n"))
