"""The same run with one thing changed at a time, beside what a paper reports of the same changes."""

import importlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType

import numpy as np
from accelerate import PartialState

from hf_tiny import InputError, hub
from hf_tiny.train import TrainConfig, run_seeds

BASE = "base"  # the row that the others are compared with
CLAIMS = {"worse": -1, "same": 0, "better": 1}
RECIPES = str(Path(__file__).resolve().parents[1] / "recipes")


@dataclass(frozen=True)
class Row:
    settings: dict  # over those of the base: flags of the recipe, and fields of the model's configuration
    paper: dict[str, float | str]  # what the paper has for it; a text begins with one of CLAIMS
    against: str = BASE  # the row that it is compared with


@dataclass(frozen=True)
class Figure:
    name: str  # in all_results.json
    higher_is_better: bool | None  # None: said, not judged


def load_recipe(name: str) -> ModuleType:
    """recipes/NAME.py as a module."""
    if RECIPES not in sys.path:
        sys.path.append(RECIPES)
    return importlib.import_module(name)


def change(recipe: TrainConfig, settings: dict) -> TrainConfig:
    """The recipe with these settings."""
    own = {field.name for field in fields(recipe)}
    flags = {name: value for name, value in settings.items() if name in own}
    model = {name: value for name, value in settings.items() if name not in own}
    return replace(recipe, **flags, given_settings={**recipe.given_settings, **model})


def run_rows(main: Callable, recipe: TrainConfig, rows: dict[str, Row], chosen: list[str] | None) -> None:
    """`main(recipe, settings)` for each row that is not finished yet, in a folder of its name."""
    if recipe.model_name_or_path or recipe.resume_from_checkpoint:
        raise InputError(
            "An ablation trains from scratch: leave out --model_name_or_path and --resume_from_checkpoint."
        )
    if recipe.push_to_hub:
        raise InputError(
            "--push_to_hub: an ablation trains many models. Leave it out, and push the folder of the one you choose: "
            "python -m hf_tiny.hub push FOLDER --hub_model_id you/name"
        )
    for name in chosen or rows:
        if name not in rows:
            raise InputError(f"--rows {name}: choose among {', '.join(rows)}.")
    for name in chosen or rows:
        folder = Path(recipe.output_dir, name)
        if (folder / "all_results.json").exists():
            print(f"{folder} is finished: delete it to run it again.")
            continue
        if PartialState().is_main_process:
            shutil.rmtree(folder, ignore_errors=True)  # a run that was stopped begins again
        PartialState().wait_for_everyone()
        print(f"\n== {name}")
        settings = rows[name].settings
        run_seeds(lambda one, settings=settings: main(one, settings), replace(recipe, output_dir=str(folder)))


def compare(folder: Path, rows: dict[str, Row], figures: dict[str, Figure]) -> dict[str, float]:
    """Write table/table.md, table.json and table.png of the rows that are finished, ours and the paper's."""
    found = {name: folder / name / "all_results.json" for name in rows}
    found = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
    if BASE not in found:
        raise InputError(f"{folder / BASE} is not finished: the other rows are compared with it.")
    claimed = {title: one for title, one in figures.items() if any(title in row.paper for row in rows.values())}
    table = []
    for name, results in found.items():
        cells = {}
        for title, figure in figures.items():
            value, spread = results[figure.name], results[f"{figure.name}_std"]
            cells[title] = (
                f"{value:,.3f}".rstrip("0").rstrip(".")
                if figure.higher_is_better is None
                else f"{value:.2f} ± {spread:.2f}"
            )
            if title in claimed:
                cells[f"{title}, paper"] = f"{rows[name].paper.get(title, '')}"
        cells |= {f"{title}: as there?": verdict(found, rows, name, title, one) for title, one in claimed.items()}
        cells["minutes a run"] = f"{results['train_runtime'] / 60:.1f}"
        table.append({"what": name, "command": hub.command(), "seeds": results["seeds"], "figures": cells})
    lines = ["| " + " | ".join(("row", *table[0]["figures"])) + " |", "|---" * (1 + len(table[0]["figures"])) + "|"]
    lines += ["| " + " | ".join((row["what"], *row["figures"].values())) + " |" for row in table]
    if PartialState().is_main_process:
        print("\n" + "\n".join(lines))
        folder = folder / "table"  # beside the rows: a run refuses a folder with files that are not its own
        folder.mkdir(exist_ok=True)
        (folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / "table.json").write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _draw(folder / "table.png", found, rows, figures)
    return {f"{name}_{one.name}": found[name][one.name] for name in found for one in figures.values()}


def verdict(found: dict[str, dict], rows: dict[str, Row], name: str, title: str, figure: Figure) -> str:
    """Whether the row is on the paper's side of the one that it is compared with; a difference within the seeds'
    deviations is too small to tell."""
    other, claim = rows[name].against, rows[name].paper.get(title)
    if name == other or claim is None or other not in found:
        return ""
    here = found[name][figure.name] - found[other][figure.name]
    sign = 1 if figure.higher_is_better else -1
    there = sign * CLAIMS[claim.split()[0]] if isinstance(claim, str) else claim - rows[other].paper[title]
    noise = math.hypot(found[name][f"{figure.name}_std"], found[other][f"{figure.name}_std"])
    said = f"{'worse' if here * sign < 0 else 'better'} by {abs(here):.2f}{'' if other == BASE else f' than {other}'}"
    if abs(here) <= noise:
        return f"too small to tell ({said})"
    if there == 0:
        return f"not seen: {said}, there the same"
    return f"{'seen' if here * there > 0 else 'not seen'}: {said}"


def _draw(path: Path, found: dict[str, dict], rows: dict[str, Row], figures: dict[str, Figure]) -> None:
    """Differences to the base as bars: ours, with the seeds' deviation, and the paper's."""
    from matplotlib.figure import Figure as Drawing

    figures = {title: one for title, one in figures.items() if one.higher_is_better is not None}
    names = [name for name in found if name != BASE]
    figure = Drawing(figsize=(4.5 * len(figures), 1.5 + 0.45 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(figures), sharey=True, squeeze=False)[0]
    places = np.arange(len(names))
    for axis, (title, one) in zip(axes, figures.items(), strict=True):
        ours = [found[name][one.name] - found[BASE][one.name] for name in names]
        spread = [math.hypot(found[name][f"{one.name}_std"], found[BASE][f"{one.name}_std"]) for name in names]
        known = {name: row.paper[title] for name, row in rows.items() if isinstance(row.paper.get(title, ""), float)}
        paper = [known.get(name, known.get(BASE, 0.0)) - known.get(BASE, 0.0) for name in names]
        axis.barh(places - 0.2, ours, 0.38, xerr=spread, label="here", color="tab:blue")
        axis.barh(places + 0.2, paper, 0.38, label="paper", color="tab:orange")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(places, names)
        axis.set_title(f"{title}, difference to the base ({'higher' if one.higher_is_better else 'lower'} is better)")
        axis.title.set_fontsize(9)
    axes[0].invert_yaxis()
    axes[-1].legend()
    figure.savefig(path, dpi=120)
