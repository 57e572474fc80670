"""Write the tables of README.md and recipes/README.md from benchmarks/results/*.json; or first add a run to these.

python benchmarks/render.py
python benchmarks/render.py pretrain.books_en runs/books "99 English books"

A table stands between `<!-- results:NAME -->` and `<!-- /results -->`; NAME is the part of a result's file name before
its first dot: `pretrain.books_en.json` is a row of the table `pretrain`. Rows follow the order of the file names.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = {
    "pretrain": {
        "corpus": "what",
        "steps": "figures.train_steps",
        "tokens": "figures.train_tokens",
        "minutes": "figures.train_minutes",
        "cores": "figures.num_threads",
        "MLM accuracy": "figures.eval_mlm_accuracy",
        "RTD AUC": "figures.eval_rtd_auc",
        "recall": "figures.eval_rtd_recall",
        "precision": "figures.eval_rtd_precision",
        "RTD loss": "figures.eval_rtd_loss",
        "majority entropy": "figures.eval_rtd_majority_entropy",
    },
    "tried": {
        "tried": "what",
        "tokens": "figures.train_tokens",
        "minutes": "figures.train_minutes",
        "MLM accuracy": "figures.eval_mlm_accuracy",
        "RTD AUC": "figures.eval_rtd_auc",
        "recall": "figures.eval_rtd_recall",
    },
    "bench": {"compared with": "what", "ratio": "figures.ratio", "spread": "figures.spread"},
}


def add(name: str, run: Path, what: str) -> None:
    """Keep what a finished run measured, with the flags that give the same run again."""
    figures = json.loads((run / "all_results.json").read_text(encoding="utf-8"))
    figures["train_minutes"] = round(figures["train_runtime"] / 60, 1)
    (command,) = re.findall(r"^- Command: `(.*)`$", (run / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    seed = int(re.search(r"^seed: (\d+)$", (run / "recipe.yaml").read_text(encoding="utf-8"), re.MULTILINE)[1])
    row = {"what": what, "command": command, "seeds": [seed], "figures": figures}
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.write_text(json.dumps(row, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def rows(table: str) -> list[dict]:
    """A result file holds one row, or a list of them."""
    found = []
    for path in sorted((ROOT / "benchmarks" / "results").glob(f"{table}.*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found += content if isinstance(content, list) else [content]
    return found


def cell(row: dict, place: str) -> str:
    for key in place.split("."):
        row = row.get(key, "")
        if row == "":
            return ""
    if isinstance(row, float):
        return f"{row:.3f}" if abs(row) < 10 else f"{row:,.1f}"
    return f"{row:,}" if isinstance(row, int) else str(row)


def markdown(table: str) -> str:
    columns = COLUMNS[table]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row, place) for place in columns.values()) + " |" for row in rows(table)]
    return "\n".join(lines)


def render(text: str) -> str:
    pattern = r"(<!-- results:(\w+) -->\n).*?(<!-- /results -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{markdown(m[2])}\n{m[3]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        add(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    for path in (ROOT / "README.md", ROOT / "recipes" / "README.md"):
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
