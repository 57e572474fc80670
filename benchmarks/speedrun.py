"""The ledger of pretraining on two cores: what a recipe teaches, in how many minutes.

python benchmarks/speedrun.py benchmarks/speedrun/01_tiny DATA  # run a record: hours on one core
python benchmarks/speedrun.py benchmarks/speedrun/01_tiny DATA --seeds 1 --max_steps 20  # only try it

A record is a folder with a recipe.yaml, flags of `hf-tiny pretrain-electra` with files as DATA has them. It is pretrained once, its
corpus statistics included, and fine-tuned with five seeds on a trio that all records share, on one thread each: sentiment of 1,000
Korean reviews, similarity of Korean sentences, dependencies of a Korean treebank. The run adds log.jsonl and figures.json to the
folder. Its score is the mean of the three; it is a new record if that beats the best of the folders before it with p < 0.01
(Welch's t-test over the seeds). What is finished is not run again. The last line is JSON.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from finetune_table import SETS, Dataset
from scipy.stats import ttest_ind

TRIO = ("nsmc", "korsts", "gsd_las")
SIGNIFICANT = 0.01
FIGURES = "figures.json"


def pretraining(record: Path, run: Path, extra: list[str]) -> list[str]:
    recipe = str(record.resolve() / "recipe.yaml")
    return ["pretrain-electra", recipe, "--num_threads", "1", "--output_dir", str(run), *extra]


def fine_tuning(one: Dataset, encoder: Path, run: Path, seeds: int, extra: list[str]) -> list[str]:
    files = ["--train_file", one.train, "--validation_file", one.validation, *one.flags.split()]
    about = ["--num_threads", "1", "--seeds", str(seeds), "--output_dir", str(run)]
    return [f"finetune-{one.recipe}", "--model_name_or_path", str(encoder), *files, *about, *extra]


def finish(words: list[str], run: Path, data: Path) -> dict:
    """The results of a run of `hf-tiny`, which is not repeated if it has ended."""
    results = run / "all_results.json"
    if not results.exists():
        shutil.rmtree(run, ignore_errors=True)
        print("hf-tiny", *words, file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "hf_tiny.cli", *words], cwd=data, check=True)
    return json.loads(results.read_text(encoding="utf-8"))


def scores(run: Path, figure: str) -> list[float]:
    """Of each seed."""
    folders = sorted(run.glob("seed-*")) or [run]
    return [json.loads((folder / "all_results.json").read_text(encoding="utf-8"))[figure] for folder in folders]


def best_before(record: Path) -> tuple[str, list[float]] | None:
    """Name and scores of the best of the records that come before this one."""
    found = {}
    for file in sorted(record.resolve().parent.glob(f"*/{FIGURES}")):
        if file.parent.name < record.resolve().name:
            found[file.parent.name] = json.loads(file.read_text(encoding="utf-8"))["scores"]
    return max(found.items(), key=lambda item: statistics.mean(item[1]), default=None)


def p_value(ours: list[float], best: list[float]) -> float:
    """How likely so large a lead would be if both were equally good."""
    return float(ttest_ind(ours, best, equal_var=False, alternative="greater").pvalue)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/speedrun"), help="where the runs go")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--max_steps", type=int, help="of every run: a check, not a record; nothing is written")
    given = parser.parse_args()
    short = given.max_steps is not None
    name = given.record.resolve().name + (
        f"-{given.max_steps}-steps" if short else ""
    )  # a check is no part of a record
    folder = (given.runs / name).resolve()
    extra = ["--max_steps", str(given.max_steps)] if short else []
    pretrained = finish(pretraining(given.record, folder / "pretrained", extra), folder / "pretrained", given.data)
    minutes, by_set = {"pretraining": round(pretrained["train_runtime"] / 60, 1)}, {}
    for name in TRIO:
        run = folder / name
        words = fine_tuning(SETS[name], folder / "pretrained", run, given.seeds, extra)
        minutes[name] = round(finish(words, run, given.data)["train_runtime"] / 60, 1)
        by_set[name] = [round(score, 4) for score in scores(run, SETS[name].figure)]
    seeds = [round(statistics.mean(each), 4) for each in zip(*by_set.values(), strict=True)]
    figures = {"score": round(statistics.mean(seeds), 4), "scores": seeds, "sets": by_set, "minutes": minutes}
    figures |= {name: round(value, 3) for name, value in pretrained.items() if name.startswith("eval_")}
    if (best := best_before(given.record)) and len(seeds) > 1:
        p = p_value(seeds, best[1])
        figures |= {"best_before": best[0], "p": float(f"{p:.2g}"), "is_a_record": p < SIGNIFICANT}
    if not short:
        shutil.copy(folder / "pretrained" / "metrics.jsonl", given.record / "log.jsonl")
        (given.record / FIGURES).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
