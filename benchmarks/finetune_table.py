"""Fill the table of fine-tuning in README.md: for each dataset the baseline, random embeddings, corpus statistics, a pretrained
model.

python benchmarks/finetune_table.py DATA  # all datasets that DATA holds, random and statistics; hours on one core
python benchmarks/finetune_table.py DATA --sets nsmc gsd_las --columns statistics --seeds 3
python benchmarks/finetune_table.py DATA --columns pretrained --korean runs/korean --english runs/books

DATA is a folder with nsmc_ko/, sst2_en/ and so on. A run that has ended is not repeated. The rows
are written to benchmarks/results, the tables by `make results`.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import render

COLUMNS = ("random", "statistics", "pretrained")
CELLS = {"random": "scratch", "statistics": "statistics", "pretrained": "pretrained"}  # as result files call them
RUNS = Path("runs/table")


@dataclass(frozen=True)
class Dataset:
    """number: its row. raw: the raw text whose words it is about. flags: of the run, beside its data."""

    number: int
    recipe: str
    figure: str
    train: str
    validation: str
    raw: str
    flags: str = ""

    @property
    def language(self) -> str:
        return "english" if "books_en" in self.raw else "korean"


REVIEWS = "nsmc_ko/raw_reviews_unlabeled.txt"
BILLS = "bills_ko/bills_raw_train.txt"
GSD = ("ud_korean_gsd/ko_gsd-ud-train.conllu", "ud_korean_gsd/ko_gsd-ud-dev.conllu", f"{REVIEWS} {BILLS}")
FEW = "--max_train_samples 1000"
PAIR = "--text_column sentence1 --text_pair_column sentence2 --label_column score"
SETS = {
    "sst2": Dataset(1, "classifier", "eval_accuracy", "sst2_en/stsa.binary.train", "sst2_en/stsa.binary.dev", "books_en"),
    "nsmc": Dataset(2, "classifier", "eval_accuracy", "nsmc_ko/ratings_train.tsv", "nsmc_ko/ratings_dev.tsv", REVIEWS,
                    f"--text_column document {FEW}"),
    "bills": Dataset(3, "classifier", "eval_accuracy", "bills_ko/committee_train.tsv.gz",
                     "bills_ko/committee_dev.tsv.gz", BILLS, FEW),
    "korsts": Dataset(4, "classifier", "eval_spearmanr", "korsts_ko/sts-train.tsv", "korsts_ko/sts-dev.tsv",
                      f"{REVIEWS} {BILLS}", PAIR),
    "wnut17": Dataset(5, "tagger", "eval_f1", "wnut17_en/wnut17train.conll", "wnut17_en/emerging.dev.conll", "books_en"),
    "ewt": Dataset(6, "parser", "eval_las", "ud_english_ewt/en_ewt-ud-train.conllu",
                   "ud_english_ewt/en_ewt-ud-dev.conllu", "books_en"),
    "gsd_morphemes": Dataset(7, "tagger", "eval_f1", *GSD, "--tag_field morphemes"),
    "gsd_las": Dataset(8, "parser", "eval_las", *GSD),
    "gsd_subjects": Dataset(9, "parser", "eval_subject_accuracy", *GSD, "--task subject"),
}  # fmt: skip


def command(name: str, column: str, data: Path, pretrained: dict[str, str], seeds: int) -> list[str]:
    one, folder = SETS[name], RUNS / f"{name}-{column}"
    flags = ["--train_file", str(data / one.train), "--validation_file", str(data / one.validation), *one.flags.split()]
    if column == "pretrained":
        flags += ["--model_name_or_path", pretrained[one.language]]
    else:
        flags += ["--raw_file", *(str(data / file) for file in one.raw.split()), "--init", column]
    flags += ["--num_threads", "1"]  # so that two runs may go side by side
    script = f"recipes/finetune_{one.recipe}.py"
    return ["accelerate", "launch", "--quiet", script, *flags, "--seeds", str(seeds), "--output_dir", str(folder)]


def keep(name: str, column: str, words: list[str], data: Path) -> None:
    """Into the row of the dataset. Its files are named as DATA has them."""
    one, run = SETS[name], RUNS / f"{name}-{column}"
    results = json.loads((run / "all_results.json").read_text(encoding="utf-8"))
    path = render.ROOT / "benchmarks" / "results" / f"finetune.{one.number}_{name}.json"
    row = json.loads(path.read_text(encoding="utf-8"))
    row["figures"][CELLS[column]] = render.spread(results, one.figure)
    row["figures"]["all"][CELLS[column]] = results
    if column == "statistics":
        row["figures"]["minutes"] = f"{results['train_runtime'] / 60:.1f}"
    row["figures"]["baseline"] = results[one.figure.replace("eval_", "baseline_")]
    row["figures"]["baseline_name"] = results["baseline_name"]
    row.setdefault("table", {})[column] = " ".join(words).replace(f"{data}/", "")
    render.write(path.stem, row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS[:2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--korean", default="runs/korean", help="the pretrained model for Korean")
    parser.add_argument("--english", default="runs/books", help="the pretrained model for English")
    given = parser.parse_args()
    for name in given.sets:
        for column in given.columns:
            words = command(name, column, given.data, {"korean": given.korean, "english": given.english}, given.seeds)
            if not (RUNS / f"{name}-{column}" / "all_results.json").exists():
                print(" ".join(words), file=sys.stderr)
                subprocess.run(words, check=True)
            keep(name, column, words, given.data)
