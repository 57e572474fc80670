"""Runs side by side: what they measured, what they cost, which of their settings differ, and their curves on one image.

hf-tiny runs runs/small runs/large
hf-tiny runs runs --output_file curves.png
"""

import argparse
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from . import checkpoint, report
from .errors import InputError

LOG, SETTINGS = "metrics.jsonl", "recipe.yaml"
NO_FIGURES = ("majority", "entropy", "samples")  # how they end
NO_SETTINGS = ("output_dir", "max_minutes", "num_threads")  # differ without a choice


@dataclass(frozen=True)
class RunLog:
    """A run, finished or not; of one that is not, the figures of its last evaluation."""

    name: str
    lines: list[dict]
    results: dict | None
    settings: dict

    @property
    def figures(self) -> dict[str, float]:
        found = self.results or next((line for line in reversed(self.lines) if "eval_loss" in line), {})
        return {n: v for n, v in found.items() if n.startswith(("eval_", "test_")) and not n.endswith(NO_FIGURES)}

    @property
    def cost(self) -> str:
        if self.results is None:
            return f"at step {self.lines[-1]['step']:,}" if self.lines else "not begun"
        return f"{self.results['train_runtime'] / 60:.1f}"

    def cell(self, figure: str) -> str:
        """A figure, and behind it that of the baseline."""
        value = self.figures.get(figure)
        baseline = (self.results or {}).get(f"baseline_{figure.removeprefix('eval_')}")
        beside = "" if baseline is None else f" ({report.number(baseline)})"
        return "" if value is None else report.number(value) + beside


def find(folders: Sequence[str]) -> list[Path]:
    """The folders of runs in these folders, at any depth."""
    found: dict[Path, None] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise InputError(f"{folder}: there is no such folder.")
        runs = sorted(path.parent for path in folder.rglob(LOG) if path.with_name(SETTINGS).is_file())
        if not runs:
            raise InputError(f"{folder}: there is no run in it. A run leaves {LOG} and {SETTINGS} in its folder.")
        found |= dict.fromkeys(runs)
    return list(found)


def read(folder: Path) -> RunLog:
    try:
        settings = dict(yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise InputError(f"{folder / SETTINGS} cannot be read: {error}") from error
    return RunLog(str(folder), checkpoint.read_log(folder / LOG), checkpoint.results(folder), settings)


def table(runs: Sequence[RunLog]) -> list[list[str]]:
    """A line for each run. Only settings that all of them have are compared."""
    figures = dict.fromkeys(name for run in runs for name in run.figures)
    shared = [name for name in runs[0].settings if all(name in run.settings for run in runs)]
    varied = [n for n in shared if len({str(run.settings[n]) for run in runs}) > 1 and n not in NO_SETTINGS]
    lines = [["run", *figures, "minutes", *varied]]
    for run in runs:
        settings = (run.settings[name] for name in varied)
        cells = (report.number(each) if isinstance(each, float) else str(each) for each in settings)
        lines.append([run.name, *map(run.cell, figures), run.cost, *cells])
    return lines


def columns(lines: list[list[str]]) -> str:
    """Aligned, Korean too, which takes two places for a letter."""
    sizes = [[sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in cell) for cell in line] for line in lines]
    widths = [max(column) for column in zip(*sizes, strict=True)]
    rows = (
        "  ".join(cell + " " * (width - size) for cell, size, width in zip(line, sized, widths, strict=True))
        for line, sized in zip(lines, sizes, strict=True)
    )
    return "\n".join(row.rstrip() for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hf-tiny runs", description="Compare runs: a table, and their curves.")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="of runs, or folders that hold some")
    parser.add_argument("--output_file", type=Path, default=Path("runs.png"), help="for the curves; default: runs.png")
    given = parser.parse_args(argv)
    if not given.output_file.absolute().parent.is_dir() or given.output_file.is_dir():
        raise InputError(f"--output_file {given.output_file}: give the name of a file, in a folder that exists.")
    runs = [read(folder) for folder in find(given.folders)]
    print(columns(table(runs)))
    if any("(" in cell for line in table(runs) for cell in line):
        print("In brackets: the baseline.")
    if logs := {run.name: run.lines for run in runs if run.lines}:
        report.draw_logs(given.output_file, logs)
        print(f"curves: {given.output_file}")
