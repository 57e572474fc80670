"""What people look at when a run is over: images and tables. matplotlib and scikit-learn are loaded by what needs them."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from unicodedata import east_asian_width

import numpy as np
from transformers import PreTrainedModel

from . import checkpoint
from .progress import LOWER_IS_BETTER

# Of these figures a curve is drawn.
SHOWN = ("loss", "accuracy", "auc", "recall", "precision", "entropy", "f1", "uas", "las", "pearson", "bits_per_byte")
MOST_CLASSES, MOST_COUNTS = 50, 20  # what is readable in a confusion matrix: classes, and classes with their counts


def number(value: float) -> str:
    """Four digits are enough for people: 6.5, 0.9877, 123,457."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def draw_curves(output_dir: Path) -> None:
    """curves.png: a panel for each figure, training and held-out together."""
    draw_logs(output_dir / "curves.png", {"": checkpoint.read_log(output_dir / "metrics.jsonl")})


def draw_logs(path: Path, logs: dict[str, list[dict]]) -> None:
    """A panel for each figure of the logs of runs. Of a single one, training and held-out have a colour each; of several, each
    run has one, and training is pale."""
    lines, several = [line for log in logs.values() for line in log], len(logs) > 1
    counts = Counter(key for line in lines for key in line)
    names = [
        name
        for name in dict.fromkeys(key.removeprefix("eval_") for key in counts)
        if (name.endswith(SHOWN) or name in ("bleu", "chrf", "learning_rate", "tokens_per_second", "images_per_second"))
        and (counts[name] or counts[f"eval_{name}"] > 1)  # a single point is no curve
    ]
    columns = 3
    rows = -(-len(names) // columns)
    figure = _figure(4 * columns, 2.6 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    curves = {}
    for axis, name in zip(axes.flat, names, strict=False):
        for place, (run, log) in enumerate(logs.items()):
            for held_out, key in enumerate((name, f"eval_{name}")):
                points = [(line["step"], line[key]) for line in log if key in line]
                if points:
                    few = held_out or len(points) < 30  # a single point has no line
                    style = {
                        "color": f"C{place if several else held_out}",
                        "alpha": 0.4 if several and not held_out else 1,
                    }
                    (curve,) = axis.plot(*zip(*points, strict=True), marker="." if few else None, **style)
                    curves[run if several else ("training", "held out")[held_out]] = curve
        axis.set_title(name.replace("_", " "))
        axis.set_xlabel("step")
        axis.set_xlim(0, 1.03 * max(line["step"] for line in lines))
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    fonts = {"family": fonts_for("".join(curves)) or fonts_for(""), "size": 7 if several else None}
    legend = axes.flat[0].legend(curves.values(), curves.keys(), prop=fonts)
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.savefig(path, format="png")


def draw_confusion(path: Path, labels: Sequence[str], gold: np.ndarray, found: np.ndarray) -> None:
    """How often each gold label (row) was answered with each label (column), coloured by the row's shares.

    At most MOST_CLASSES are drawn, the most frequent ones. Where no installed font has the letters of the labels, they
    become numbers, and a .txt file beside the image says what the numbers mean.
    """
    from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix

    matrix = confusion_matrix(gold, found, labels=range(len(labels)))
    kept = np.sort(np.argsort(-matrix.sum(1), kind="stable")[:MOST_CLASSES])
    counts, names = matrix[np.ix_(kept, kept)], [labels[index] for index in kept]
    shares = counts / np.maximum(matrix.sum(1)[kept], 1)[:, None]
    notes = [f"the {len(kept)} most frequent of {len(labels)}"] if len(kept) < len(labels) else []
    names, note = drawable(names, path)
    notes += [note] if note else []
    counted = len(kept) <= MOST_COUNTS
    cell = max(3.0 / len(kept), 0.5 if counted else 0.22)  # inches
    side = 2.0 + cell * len(kept)
    figure = _figure(side + 1, side)
    axis = figure.subplots()
    sizes = {"fontsize": 9 if 0.11 * len(f"{counts.max():,}") < cell else 7}
    shown = ConfusionMatrixDisplay(shares)
    shown.plot(
        ax=axis, cmap="Blues", include_values=counted, colorbar=False, im_kw={"vmin": 0, "vmax": 1}, text_kw=sizes
    )
    for text, count, share in zip(shown.text_.flat, counts.flat, shares.flat, strict=True) if counted else ():
        text.set(text=f"{count:,}" if count else "", color="white" if share > 0.5 else "black")
    _name_ticks(axis, names, names, 9 if counted else 7, cell)
    axis.set(xlabel="predicted", ylabel="gold")
    axis.set_title(", ".join(notes), fontsize=9)
    figure.colorbar(shown.im_, label="share of the gold label", shrink=0.8)
    figure.savefig(path, bbox_inches="tight")


def draw_attention(
    path: Path, weights: np.ndarray, rows: Sequence[str], columns: Sequence[str], ylabel="target", xlabel="source"
) -> None:
    """A heat map: how much each row (a token of the target, say) attends to each column; weights: (rows, columns)."""
    figure = _figure(3 + 0.3 * len(columns), 1.5 + 0.3 * len(rows))
    axis = figure.subplots()
    image = axis.imshow(weights, cmap="Blues", vmin=0)
    _name_ticks(axis, rows, columns, 10, cell=0.3)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    figure.colorbar(image, label="attention", shrink=0.8)
    figure.savefig(path)


@contextmanager
def recorded_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model as it must be to give its attention weights: evaluating, without a fused kernel."""
    used = model.config._attn_implementation
    model.eval().set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(used)


def draw_images(
    path: Path, rows: dict[str, np.ndarray], titles: Sequence[str] = (), scale: str = "", note: str = ""
) -> None:
    """Rows of images under each other; of each row what it shows, and (count, height, width, channels) in 0 ... 1.

    scale: what the numbers of the last row are, which then has a colour bar. note: stands above the titles.
    """
    count = len(next(iter(rows.values())))
    figure = _figure(1.4 * count + 1, 1.5 * len(rows))
    axes = figure.subplots(len(rows), count, squeeze=False)
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(line, images, strict=True):
            grey = image.shape[-1] == 1
            last = axis.imshow(
                image[..., 0] if grey else image.clip(0, 1), cmap="gray" if grey else None, vmin=0, vmax=1
            )
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(name)
    if scale:
        figure.colorbar(last, ax=axes, label=scale, shrink=0.8)
    for axis, title in zip(axes[0], titles, strict=False):
        axis.set_title(title[:16], fontsize=8, family=fonts_for(title[:16]) or fonts_for(""), parse_math=False)
    if note:
        figure.suptitle(note, fontsize=9)
    figure.savefig(path)


def draw_arcs(words: Sequence[str], heads: Sequence[int | None], relations: Sequence[str]) -> str:
    """SVG: an arc from the head of each word to the word. heads count words from 1; 0 is the root, None is not drawn."""
    widths = [11 * sum(1 + (east_asian_width(one) in "WF") * 0.6 for one in word) + 36 for word in words]
    places = [sum(widths[:index]) + width / 2 for index, width in enumerate(widths)]
    levels: dict[tuple[int, int], int] = {}
    for place, head in sorted(enumerate(heads, 1), key=lambda link: abs((link[1] or link[0]) - link[0])):
        span = (min(place, head or place), max(place, head or place))
        inner = (level for (start, end), level in levels.items() if span[0] <= start and end <= span[1])
        levels[span] = 1 + max(inner, default=0) if head else 0
    bottom, parts = 34 * max(levels.values(), default=0) + 44, []
    for place, (word, head, relation) in enumerate(zip(words, heads, relations, strict=True), 1):
        x, name = places[place - 1], escape(relation or "")
        parts.append(f'<text x="{x:.0f}" y="{bottom + 22}">{escape(word)}</text>')
        if head is not None:
            top = bottom - 34 * levels[min(place, head), max(place, head)] if head else 14
            start = places[head - 1] + (8 if place > head else -8) if head else x
            curve = f"C {start:.0f} {top} {x:.0f} {top} {x:.0f} {bottom}" if head else f"L {x:.0f} {bottom}"
            parts.append(f'<path d="M {start:.0f} {bottom if head else top} {curve}" marker-end="url(#tip)"/>')
            middle = (start + x) / 2 if head else x + 18
            parts.append(
                f'<text class="relation" x="{middle:.0f}" y="{top + (bottom - top) / 4 - 4:.0f}">{name}</text>'
            )
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    style = (
        ".arcs text{text-anchor:middle;fill:currentColor;font-size:18px}.arcs .relation{font-size:12px;fill:#2563eb}"
    )
    style += ".arcs path{fill:none;stroke:#64748b;stroke-width:1.3}.arcs marker path{fill:#64748b;stroke:none}"
    return (
        f'<div style="overflow-x:auto"><svg class="arcs" width="{sum(widths):.0f}" height="{bottom + 36}" role="img">'
        f"<style>{style}</style><defs>{tip}<path d='M 0 0 L 8 4 L 0 8 z'/></marker></defs>{''.join(parts)}</svg></div>"
    )


def draw_table(weights: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> str:
    """HTML: the same as `draw_attention`, in the fonts of whoever reads it."""
    head = "".join(f'<th style="writing-mode:vertical-rl;padding:2px 4px">{escape(name)}</th>' for name in columns)
    lines = [
        f'<th style="text-align:right;padding:2px 6px">{escape(name)}</th>'
        + "".join(f'<td title="{w:.3f}" style="min-width:22px;background:rgba(37,99,235,{w:.2f})"></td>' for w in line)
        for name, line in zip(rows, weights.tolist(), strict=True)
    ]
    body = "".join(f"<tr>{line}</tr>" for line in ["<th></th>" + head, *lines])
    return f'<div style="overflow-x:auto"><table style="border-collapse:collapse;width:auto">{body}</table></div>'


def _figure(width: float, height: float):
    """Not of pyplot: it needs no display, and nothing has to be closed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def _name_ticks(axis, rows: Sequence[str], columns: Sequence[str], fontsize: int, cell: float) -> None:
    """Names beside the rows and below the columns of a matrix; numbers where no font has their letters. cell: in inches."""
    fonts = fonts_for("".join([*rows, *columns]))
    if fonts is None:
        fonts = fonts_for("")
        rows, columns = ([str(place) for place in range(1, len(side) + 1)] for side in (rows, columns))
    rows, columns = ([name if len(name) <= 24 else f"{name[:23]}…" for name in side] for side in (rows, columns))
    style = {"family": fonts, "parse_math": False, "fontsize": fontsize}
    axis.set_xticks(range(len(columns)), columns, rotation=0 if 0.12 * max(map(len, columns)) < cell else 90, **style)
    axis.set_yticks(range(len(rows)), rows, **style)


def drawable(names: Sequence[str], path: Path) -> tuple[list[str], str]:
    """The names for an image; where no font has their letters numbers, which a .txt file beside it explains, and a note that says
    so."""
    if fonts_for("".join(names)) is not None:
        return list(names), ""
    key = path.with_suffix(".txt")
    key.write_text("".join(f"{number}: {name}\n" for number, name in enumerate(names, 1)), encoding="utf-8")
    return [str(number) for number in range(1, len(names) + 1)], f"numbers: see {key.name}"


def fonts_for(text: str) -> list[str] | None:
    """matplotlib's own font, and where that lacks some letters an installed one that has them; None: there is none."""
    from matplotlib import font_manager

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


def compare(results: dict) -> str:
    """In words, how a model stands beside its baseline; nothing where there is none."""
    name, worse, level, better = results.get("baseline_name"), [], [], []
    if name is None:
        return ""
    for key, other in results.items():
        figure = key.removeprefix("baseline_")
        own = results.get(figure if figure.startswith("test_") else f"eval_{figure}")
        if figure != key and own is not None:
            sign = -1 if figure.endswith(LOWER_IS_BETTER) else 1
            if number(own) == number(other) != "nan":  # as far as people are shown
                level.append(f"{figure} {number(own)}")
            else:
                fate = better if sign * own > sign * other else worse
                fate.append(f"{figure} {number(own)} against {number(other)}")
    if worse:
        same = f" It is level in {', '.join(level)}." if level else ""
        return f"The model does not beat its baseline ({name}): {', '.join(worse)}.{same}"
    if level:
        ahead = f" It is ahead in {', '.join(better)}." if better else ""
        return f"The model is level with its baseline ({name}): {', '.join(level)}.{ahead}"
    return f"The model beats its baseline ({name}) in every figure."


def print_summary(output_dir: Path, results: dict[str, float]) -> None:
    """A table of the figures, and what to do next: the model is used as its card says."""
    line = "=" * 72
    print(f"\n{line}")
    print_figures(results)
    counted = ("train_steps", "train_tokens", "train_images", "num_parameters")
    costs = [f"{number(results[key])} {key.partition('_')[2]}" for key in counted if key in results]
    print(f"  {results['train_runtime'] / 60:.1f} minutes, {', '.join(costs)}")
    if comparison := compare(results):
        print(f"{line}\n  {comparison}")
    print(f"{line}\n  curves:  {output_dir / 'curves.png'}\n  card:    {output_dir / 'README.md'}")
    use = re.search(
        r"^```python\n(.*?)^```$", (output_dir / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    if use:
        code = use[1].replace("PATH_OR_ID", str(output_dir)).splitlines()
        print("  use it:  " + "\n           ".join(part for part in code if part))
    # A name that the Hub takes.
    name = re.sub(r"[^\w.-]+", "-", output_dir.resolve().name, flags=re.ASCII).strip("-.") or "model"
    print(f"  push it: {push_command(output_dir, f'you/{name}')}")


def push_command(folder: Path, repo: str, *options: str) -> str:
    return shlex.join(["hf-tiny", "push", str(folder), "--hub_model_id", repo, *options])


def print_figures(results: dict) -> None:
    """What was measured, beside the baseline."""
    shown = [
        name
        for name in results
        if not name.startswith(("baseline_", "train_", "num_", "model_")) and name[-6:] != "_share"
    ]
    for name in sorted(shown, key=lambda name: (not name.startswith(("eval_", "test_")), name.endswith("loss"))):
        baseline = results.get(f"baseline_{name.removeprefix('eval_')}")
        beside = "" if baseline is None else f"   baseline {number(baseline)}"
        print(f"  {name:34s} {number(results[name]):>12}{beside}")


def print_seeds(summary: dict[str, float]) -> None:
    print(f"\n{summary['seeds']} seeds, mean and deviation:")
    for name, value in summary.items():
        if name.startswith(("eval_", "test_", "baseline_", "train_runtime")) and f"{name}_std" in summary:
            print(f"  {name:34s} {number(value):>12} ± {number(summary[f'{name}_std'])}")
