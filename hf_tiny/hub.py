"""What people look at: the curves, the model card, the summary, the push."""

import json
import logging
import platform
import shlex
import sys
from importlib import resources
from pathlib import Path

import matplotlib
import numpy as np
import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HTTPError
from transformers import PreTrainedModel

matplotlib.use("Agg")
from matplotlib import font_manager
from matplotlib import pyplot as plt

logger = logging.getLogger(__name__)

SHOWN = (
    "loss",
    "accuracy",
    "auc",
    "recall",
    "precision",
    "entropy",
    "f1",
    "uas",
    "las",
    "pearson",
    "bits_per_byte",
)  # what a curve is drawn of
MEASURED = ("eval_", "test_", "forgetting_")
NOT_PUSHED = ["checkpoint-*", "abandoned-*", ".draft-*", ".lock", "hf_tiny/*"]  # the last: what tensorboard reads
MOST_CLASSES, MOST_COUNTS = 50, 20  # what is readable in a confusion matrix: classes, and classes with their counts


def draw_curves(output_dir: Path) -> None:
    """curves.png: a panel for each figure, training and held-out together."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    names = [
        name
        for name in dict.fromkeys(key.removeprefix("eval_") for line in lines for key in line)
        if name.endswith(SHOWN) or name in ("learning_rate", "tokens_per_second")
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


def write_card(output_dir: Path, model: PreTrainedModel, results: dict[str, float], about: dict) -> None:
    """README.md from the template of the model's family, or the one that `about` names; only what was measured goes in."""
    family = model.config.model_type.removeprefix("hf_tiny_")
    figures = {name: value for name, value in results.items() if name.startswith(MEASURED)}
    data = ModelCardData(
        library_name="transformers",
        tags=["hf_tiny", family],
        pipeline_tag=about.get("pipeline_tag"),
        language=about.get("language"),
        datasets=about.get("datasets"),
    )
    template = f"{about.get('template', family)}.md"
    card = ModelCard.from_template(
        data,
        template_str=(resources.files("hf_tiny.model_cards") / template).read_text(encoding="utf-8"),
        name=output_dir.resolve().name,
        figures=figures,
        results=results,
        config=model.config.to_dict(),
        command=command(),
        hardware=f"{results['num_processes']} process(es) with {results['num_threads']} thread(s) each, {hardware()}",
        data=about.get("data", "not stated"),
        pictures=sorted(path.name for path in output_dir.glob("*.png")),
        **about.get("filled", {}),
    )
    card.save(output_dir / "README.md")


def hardware() -> str:
    if torch.accelerator.is_available():
        return (
            torch.cuda.get_device_name() if torch.cuda.is_available() else torch.accelerator.current_accelerator().type
        )
    return f"{platform.machine()} CPU"


def print_summary(output_dir: Path, results: dict[str, float], about: dict) -> None:
    """A table of the figures, and the commands to run next."""
    print(f"\n{'=' * 72}")
    for name, value in results.items():
        print(f"  {name:34s} {value:>20,.4f}" if isinstance(value, float) else f"  {name:34s} {value:>20,}")
    use = f"import hf_tiny; from transformers import AutoModel; AutoModel.from_pretrained({str(output_dir)!r})"
    if task := about.get("filled", {}).get("pipeline"):
        use = f"import hf_tiny; from transformers import pipeline; pipeline({task!r}, model={str(output_dir)!r})"
    print(
        f"{'=' * 72}\n"
        f"  curves:  {output_dir / 'curves.png'}\n"
        f"  card:    {output_dir / 'README.md'}\n"
        f"  use it:  {use}\n"
        f"  push it: python -m hf_tiny.hub {output_dir} --hub_model_id you/{output_dir.resolve().name}"
    )


def push(output_dir: Path, hub_model_id: str | None, private: bool) -> bool:
    """Push the finished model as one commit. A failure costs the push, never the run."""
    try:
        api = HfApi()
        name = hub_model_id or f"{api.whoami()['name']}/{output_dir.resolve().name}"
        repo_id = api.create_repo(name, private=private, exist_ok=True).repo_id
        api.upload_folder(
            repo_id=repo_id, folder_path=output_dir, ignore_patterns=NOT_PUSHED, commit_message="Add the model"
        )
    except (HTTPError, OSError, ValueError) as error:
        logger.warning(
            f"The push failed ({error}). The model is safe in {output_dir}; push it later with: "
            f"python -m hf_tiny.hub {output_dir} --hub_model_id {hub_model_id or 'you/name'}"
        )
        return False
    print(f"  pushed:  https://huggingface.co/{repo_id}")
    return True


def main() -> None:
    """python -m hf_tiny.hub DIR --hub_model_id you/name [--private]"""
    import argparse

    parser = argparse.ArgumentParser(description="Push a finished model to the Hub.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hub_model_id")
    parser.add_argument("--private", action="store_true")
    given = parser.parse_args()
    sys.exit(0 if push(given.folder, given.hub_model_id, given.private) else 1)


if __name__ == "__main__":
    main()
