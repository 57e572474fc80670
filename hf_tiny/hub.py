"""What people look at: the curves, the model card, the summary; and the way to the Hub.

python -m hf_tiny.hub push runs/mine --hub_model_id you/name
"""

import argparse
import json
import logging
import math
import os
import platform
import re
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
import torch
from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import filter_repo_objects, parse_ratelimit_headers
from transformers import PreTrainedModel

from . import checkpoint
from .errors import InputError

matplotlib.use("Agg")
from matplotlib import font_manager
from matplotlib import pyplot as plt

logger = logging.getLogger(__name__)

# What a curve is drawn of.
SHOWN = ("loss", "accuracy", "auc", "recall", "precision", "entropy", "f1", "uas", "las", "pearson", "bits_per_byte")
MEASURED = ("eval_", "test_", "forgetting_")
BASELINES = ("copy_", "majority")  # figures of somebody who has learned nothing: in the card, not in its index
SPLITS = {"eval": "validation", "test": "test"}
NOT_PUSHED = [
    *("checkpoint-*", "abandoned-*", ".draft-*", ".lock", "hf_tiny/*"),  # the last: what tensorboard reads
    *("trainer_state.json", "ema.safetensors", checkpoint.MANIFEST, *(f"*{suffix}" for suffix in checkpoint.PICKLED)),
    f"{checkpoint.SHARDED_OPTIMIZER}/*",
]
WAITS = (1.0, 5.0, 25.0)  # seconds before another try
LONGEST_WAIT = 600.0  # when the Hub asks for more, the push fails
ADVICE = {
    401: "the Hub does not know the token: log in again with `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there: use one with the role `write`, or a --hub_model_id of your own",
    404: "there is no such repository or revision",
}
MOST_CLASSES, MOST_COUNTS = 50, 20  # what is readable in a confusion matrix: classes, and classes with their counts


def draw_curves(output_dir: Path) -> None:
    """curves.png: a panel for each figure, training and held-out together."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    names = [
        name
        for name in dict.fromkeys(key.removeprefix("eval_") for line in lines for key in line)
        if name.endswith(SHOWN) or name in ("bleu", "chrf", "learning_rate", "tokens_per_second")
    ]
    columns = 3
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 2.6 * rows), squeeze=False, layout="constrained")
    for axis, name in zip(axes.flat, names, strict=False):
        for key, label in ((name, "training"), (f"eval_{name}", "held out")):
            points = [(line["step"], line[key]) for line in lines if key in line]
            if points:
                axis.plot(*zip(*points, strict=True), marker="." if label == "held out" else None, label=label)
        axis.set_title(name.replace("_", " "))
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    axes.flat[0].legend()
    figure.savefig(output_dir / "curves.png", dpi=100)
    plt.close(figure)


def draw_confusion(path: Path, labels: list[str], matrix: np.ndarray) -> None:
    """A picture of how often each gold label (row) was answered with each label (column), coloured by the row's shares.

    At most MOST_CLASSES are drawn, the most frequent ones. Where no installed font has the letters of the labels, they
    become numbers, and a .txt file beside the picture says what the numbers mean.
    """
    kept = np.sort(np.argsort(-matrix.sum(1), kind="stable")[:MOST_CLASSES])
    counts, names = matrix[np.ix_(kept, kept)], [labels[index] for index in kept]
    shares = counts / np.maximum(matrix.sum(1)[kept], 1)[:, None]
    note = f"the {len(kept)} most frequent of {len(labels)}" if len(kept) < len(labels) else ""
    fonts = fonts_for("".join(names))
    if fonts is None:
        key = path.with_suffix(".txt")
        key.write_text("".join(f"{number}: {name}\n" for number, name in enumerate(names, 1)), encoding="utf-8")
        note = ", ".join(filter(None, [note, f"numbers: see {key.name}"]))
        fonts, names = fonts_for(""), [str(number) for number in range(1, len(names) + 1)]
    ticks = [name if len(name) <= 24 else f"{name[:23]}…" for name in names]
    counted = len(kept) <= MOST_COUNTS
    cell = max(3.0 / len(kept), 0.5 if counted else 0.22)  # inches
    side = 2.0 + cell * len(kept)
    figure, axis = plt.subplots(figsize=(side + 1, side), layout="constrained")
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    style = {"family": fonts, "parse_math": False, "fontsize": 9 if counted else 7}
    axis.set_xticks(range(len(kept)), ticks, rotation=0 if 0.12 * max(map(len, ticks)) < cell else 90, **style)
    axis.set_yticks(range(len(kept)), ticks, **style)
    axis.set_xlabel("predicted")
    axis.set_ylabel("gold")
    axis.set_title(note, fontsize=9)
    if counted:
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            text = f"{counts[row, column]:,}"
            size = 9 if 0.11 * len(text) < cell else 7
            axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=size)
    figure.colorbar(image, label="share of the gold label", shrink=0.8)
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def draw_pictures(path: Path, rows: dict[str, np.ndarray], titles: Sequence[str] = ()) -> None:
    """Rows of pictures under each other; of each row what it shows, and (count, height, width, channels) in 0 ... 1."""
    count = len(next(iter(rows.values())))
    figure, axes = plt.subplots(
        len(rows), count, figsize=(1.4 * count + 1, 1.5 * len(rows)), squeeze=False, layout="constrained"
    )
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        for axis, picture in zip(line, pictures, strict=True):
            grey = picture.shape[-1] == 1
            axis.imshow(picture[..., 0] if grey else picture.clip(0, 1), cmap="gray" if grey else None, vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(name)
    for axis, title in zip(axes[0], titles, strict=False):
        axis.set_title(title[:16], fontsize=8, family=fonts_for(title[:16]) or fonts_for(""), parse_math=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def fonts_for(text: str) -> list[str] | None:
    """matplotlib's own font, and where that lacks some letters an installed one that has them; None: there is none."""
    own = font_manager.findfont("DejaVu Sans")
    lacking = {ord(letter) for letter in text} - font_manager.get_font(own).get_charmap().keys()
    if not lacking:
        return ["DejaVu Sans"]
    for font in font_manager.fontManager.ttflist:
        # The last resort draws a box for every letter; matplotlib's list may name fonts that are gone.
        usable = not font.name.startswith("Last Resort") and Path(font.fname).exists()
        if usable and lacking <= font_manager.get_font(font.fname).get_charmap().keys():
            return ["DejaVu Sans", font.name]
    return None


def command() -> str:
    """The command of this run, as it can be typed again."""
    script = Path(sys.argv[0])
    return shlex.join(["accelerate", "launch", f"{script.parent.name}/{script.name}", *sys.argv[1:]])


def write_card(output_dir: Path, model: PreTrainedModel, results: dict[str, float], about: dict, flags: dict) -> None:
    """README.md from the template of the model's family, or the one that `about` names; only what was measured goes in.
    The run's flags name the base model and the data set, if these are on the Hub, the licence and the languages."""
    name, family = output_dir.resolve().name, model.config.model_type.removeprefix("hf_tiny_")
    figures = {name: value for name, value in results.items() if name.startswith(MEASURED)}
    named = map(flags.get, ("model_name_or_path", "dataset_name"))
    base, data_set = (None if value is None or Path(value).exists() else value for value in named)
    languages = [
        code for code in map(flags.get, ("source_lang", "target_lang")) if re.fullmatch("[a-z]{2}", code or "")
    ]
    task, trained_on = about.get("pipeline_tag"), about.get("data", "not stated")
    measured = [
        EvalResult(task or "other", data_set or "other", trained_on, metric, value, dataset_split=SPLITS[split])
        for (split, _, metric), value in ((figure.partition("_"), value) for figure, value in figures.items())
        if split in SPLITS and math.isfinite(value) and not metric.startswith(BASELINES)
    ]
    data = ModelCardData(
        library_name="transformers",
        tags=["hf_tiny", family],
        pipeline_tag=task,
        language=flags.get("hub_language") or languages or None,
        license=flags.get("hub_license"),
        datasets=data_set and [data_set],
        base_model=base,
        model_name=name,
        eval_results=measured or None,
    )
    fields = {
        "name": name,
        "figures": figures,
        "results": results,
        "config": model.config.to_dict(),
        "data": trained_on,
    }
    threads = f"{results['num_processes']} process(es) with {results['num_threads']} thread(s) each, {hardware()}"
    fields |= {"hardware": threads, "command": command(), **about.get("filled", {})}
    fields["pictures"] = sorted(path.name for path in output_dir.glob("*.png"))
    path = resources.files("hf_tiny.model_cards") / f"{about.get('template', family)}.md"
    try:
        template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(path.read_text(encoding="utf-8"))
        text = template.render(card_data=data.to_yaml(), **fields)
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: an unknown field in a format
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        logger.warning(f"{path}:{(lines or ['?'])[-1]}: {error}. README.md has its header only: correct it there.")
        text = f"---\n{data.to_yaml()}\n---\n\n# {name}\n"
    ModelCard(text).save(output_dir / "README.md")


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return f"{platform.machine()} CPU" if gpu is None else gpu.type


def print_summary(output_dir: Path, results: dict[str, float], about: dict) -> None:
    """A table of the figures, and the commands to run next."""
    print(f"\n{'=' * 72}")
    for name, value in results.items():
        print(f"  {name:34s} {value:>20,.4f}" if isinstance(value, float) else f"  {name:34s} {value:>20,}")
    use = f"import hf_tiny; from transformers import AutoModel; AutoModel.from_pretrained({str(output_dir)!r})"
    if task := about.get("filled", {}).get("pipeline"):
        use = f"import hf_tiny; from transformers import pipeline; pipeline({task!r}, model={str(output_dir)!r})"
    print(
        f"{'=' * 72}\n  curves:  {output_dir / 'curves.png'}\n  card:    {output_dir / 'README.md'}\n  use it:  {use}"
    )
    print(f"  push it: python -m hf_tiny.hub push {output_dir} --hub_model_id you/{output_dir.resolve().name}")


def upload(folder: Path, repo: str, private: bool, revision: str | None, title: str) -> str:
    """The model in `folder` becomes one commit; returns the address of the repository."""
    checkpoint.check_model(folder)
    if get_token() is None:
        raise InputError("you are not logged in: use `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    url = api.create_repo(repo, private=private or None, exist_ok=True)
    if revision:
        api.create_branch(url.repo_id, branch=revision, exist_ok=True)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: folder / name for name in filter_repo_objects(names, ignore_patterns=NOT_PUSHED)}
    if "README.md" in files:
        files["README.md"] = files["README.md"].read_text(encoding="utf-8").replace("PATH_OR_ID", url.repo_id).encode()
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
    # upload_folder may make several commits.
    api.create_commit(url.repo_id, operations, commit_message=title, revision=revision)
    return str(url)


def patience(error: Exception, wait: float) -> float | None:
    """Seconds after which another try is worth it; None: it is not."""
    if isinstance(error, HfHubHTTPError):
        status, headers = error.response.status_code, error.response.headers
        asked, limit = headers.get("Retry-After", ""), parse_ratelimit_headers(headers)
        used_up = limit is not None and limit.remaining == 0
        wait = max(wait, int(asked) if asked.isdigit() else 0, limit.reset_in_seconds if used_up else 0)
        return wait if (status in (408, 429) or status >= 500) and wait <= LONGEST_WAIT else None
    return wait if isinstance(error, HTTPError) else None  # the connection failed


def explain(error: Exception) -> str:
    """What went wrong, for people, and without the token, which some errors quote."""
    text = re.sub(r"Bearer [^'\"]*", "Bearer <token>", " ".join(str(error).split()) or type(error).__name__)
    advice = ADVICE.get(error.response.status_code) if isinstance(error, HfHubHTTPError) else None
    return f"{advice}. The Hub says: {text}" if advice else text


def push(folder: Path, repo: str, private: bool = False, revision: str | None = None, title: str = "Add the model"):
    """Push a model as one commit, with patience; returns None, or why it was in vain. It raises nothing."""
    for wait in (*WAITS, math.inf):
        try:
            logger.info(f"  pushed:  {upload(folder, repo, private, revision, title)} ({title})")
            return None
        except Exception as error:  # whatever it is, it must not cost the run; the client wraps some in a RuntimeError
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            seconds = patience(cause, wait)
            if seconds is None or seconds == math.inf:
                return explain(cause)
            logger.warning(f"The push is tried again in {seconds:g} s: {explain(cause)}")
            time.sleep(seconds)


class Pusher:
    """Pushes beside the training, one model after the other, each as it was when it was handed over."""

    def __init__(self, output_dir: Path, hub_model_id: str | None, private: bool, revision: str | None):
        self.output_dir = output_dir
        self.place = (hub_model_id or output_dir.resolve().name, private, revision)
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.failed = -math.inf  # when

    def save(self, saved: Path) -> None:
        """Push a checkpoint. It may be deleted meanwhile, so its files get a second name."""
        snapshot = saved.with_name(f".draft-push-{saved.name}")
        try:
            shutil.copytree(saved, snapshot, copy_function=os.link)
        except OSError as error:  # a disk that has no second names, or no room for them
            shutil.rmtree(snapshot, ignore_errors=True)
            logger.warning(
                f"{saved.name} is not pushed: {error}. Training goes on, and the model is pushed at its end."
            )
        else:
            self.thread.submit(self._save, snapshot, saved.name, time.monotonic())

    def _save(self, snapshot: Path, name: str, since: float) -> None:
        # Those that waited behind a failure would fail too.
        reason = push(snapshot, *self.place, f"Add {name}") if since > self.failed else None
        if reason:
            self.failed = time.monotonic()
            logger.warning(f"{name} was not pushed: {reason}. Training goes on, and the model is pushed at its end.")
        shutil.rmtree(snapshot, ignore_errors=True)

    def finish(self) -> None:
        """Push the finished model, and wait for it."""
        if reason := self.thread.submit(push, self.output_dir, *self.place).result():
            name, _, revision = self.place
            again = shlex.join(["push", str(self.output_dir), "--hub_model_id", name])
            again += f" --hub_revision {shlex.quote(revision)}" if revision else ""
            safe = f"The model is safe in {self.output_dir}; push it later with: python -m hf_tiny.hub {again}"
            logger.warning(f"The push failed: {reason}. {safe}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_tiny.hub", description="Push a finished model to the Hub.")
    parser.add_argument("command", choices=["push"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hub_model_id", required=True, help="user/name on the Hub")
    parser.add_argument("--hub_private_repo", action="store_true")
    parser.add_argument("--hub_revision", help="the branch to push to; it is made when it does not exist")
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    if reason := push(given.folder, given.hub_model_id, given.hub_private_repo, given.hub_revision):
        sys.exit(f"error: {reason}")


if __name__ == "__main__":
    main()
