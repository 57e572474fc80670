"""Write the tables of README.md and docs/*.md from benchmarks/results/*.json; or first add a run to these.

python benchmarks/render.py
python benchmarks/render.py pretrain.books_en runs/books "99 English books"
python benchmarks/render.py finetune.sst2 runs/sst2-scratch runs/sst2 eval_accuracy "film reviews, English"

The last form keeps two runs with several seeds (`--seeds 3`): from scratch, and from a pretrained model.

A table stands between `<!-- results:NAME -->` and `<!-- /results -->`; NAME is the part of a result's file name before
its first dot: `pretrain.books_en.json` is a row of the table `pretrain`. Rows follow the order of the file names. Each
table stands once.
"""

import json
import re
import shlex
import statistics
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
    "electra_tried": {
        "settings": "what",
        "tokens": "figures.train_tokens",
        "minutes": "figures.train_minutes",
        "MLM accuracy": "figures.eval_mlm_accuracy",
        "RTD AUC": "figures.eval_rtd_auc",
        "recall": "figures.eval_rtd_recall",
    },
    "finetune": {
        "dataset": "what",
        "metric": "figures.figure",
        "baseline": "figures.baseline",
        "from scratch, random": "figures.scratch",
        "from statistics": "figures.statistics",
        "pretrained": "figures.pretrained",
        "minutes per run": "figures.minutes",
    },
    "precision": {  # add_pair: float32 in the place of "from scratch"
        "ELECTRA": "what",
        "metric": "figures.figure",
        "float32": "figures.scratch",
        "bfloat16": "figures.pretrained",
    },
    "similarity": {
        "model": "what",
        "metric": "figures.figure",
        "from scratch": "figures.scratch",
        "pretrained for 3,000 steps": "figures.pretrained",
        "minutes per run": "figures.minutes",
    },
    "streaming": {
        "text": "what",
        "tokens per epoch": "figures.tokens",
        "tokens per second": "figures.tokens_per_second",
        "peak MB, training the tokenizer": "figures.vocabulary_mb",
        "peak MB, streaming": "figures.stream_mb",
        "peak MB, counting pairs": "figures.count_mb",
        "MB of the counts": "figures.table_mb",
    },
    "forgetting": {
        "flags": "what",
        "English reviews: accuracy": "figures.english",
        "MLM loss after (before)": "figures.english_mlm",
        "RTD loss after (before)": "figures.english_rtd",
        "Korean reviews: accuracy": "figures.korean",
        "MLM loss": "figures.korean_mlm",
        "RTD loss": "figures.korean_rtd",
    },
    "faults": {
        "what was done": "what",
        "tried": "figures.tried",
        "survived bit-equal": "figures.survived",
        "said in words": "figures.said",
        "failed": "figures.failed",
    },
    "pairs": {
        "dataset": "what",
        "minutes": "figures.train_minutes",
        "cores": "figures.num_threads",
        "BLEU": "figures.eval_bleu",
        "BLEU, lower case": "figures.eval_bleu_tok",
        "chrF++": "figures.eval_chrf",
        "chrF++ of copying the source": "figures.eval_copy_chrf",
        "chrF++ of the most frequent target": "figures.eval_majority_chrf",
        "exact match": "figures.eval_exact_match",
        "numbers of the source kept": "figures.eval_numbers_kept",
        "perplexity": "figures.eval_ppl",
    },
    "contention": {
        "compared": "what",
        "ratio": "figures.ratio",
        "spread": "figures.spread",
    },
    "padding": {
        "batches": "what",
        "real tokens": "figures.real_tokens",
        "samples": "figures.samples",
        "most samples": "figures.most_samples",
        "most tokens": "figures.most_tokens",
    },
    "denoise": {
        "dataset": "what",
        "metric": "figures.figure",
        "from scratch": "figures.scratch",
        "after denoising": "figures.pretrained",
        "gain": "figures.gain",
        "minutes per run": "figures.minutes",
    },
    "images": {
        "dataset": "what",
        "metric": "figures.figure",
        "from scratch": "figures.scratch",
        "after masked pretraining": "figures.pretrained",
        "gain (points)": "figures.gain",
        "minutes per run": "figures.minutes",
    },
    "image_classification": {
        "dataset": "what",
        "accuracy": "figures.eval_accuracy",
        "most frequent label": "figures.eval_majority",
        "seeds": "figures.seeds",
        "minutes per run": "figures.train_minutes",
        "cores": "figures.num_threads",
    },
    "seq2seq_ablation": {
        "row": "what",
        "perplexity": "figures.PPL",
        "perplexity, paper": "figures.PPL, paper",
        "BLEU": "figures.BLEU",
        "BLEU, paper": "figures.BLEU, paper",
        "perplexity: as in the paper?": "figures.PPL: as there?",
        "BLEU: as in the paper?": "figures.BLEU: as there?",
        "minutes per run": "figures.minutes a run",
    },
    "electra_ablation": {
        "row": "what",
        "score": "figures.score",
        "score, paper": "figures.score, paper",
        "reviews": "figures.nsmc",
        "parts of speech": "figures.gsd",
        "MLM accuracy": "figures.MLM accuracy",
        "RTD AUC": "figures.RTD AUC",
        "steps": "figures.steps",
        "TFLOP": "figures.TFLOP",
        "as in the paper?": "figures.score: as there?",
        "minutes": "figures.minutes a run",
    },
    "reformer_lengths": {
        "tokens": "what",
        "hf_tiny's Reformer": "figures.ours",
        "full attention (SDPA)": "figures.sdpa",
        "SDPA with gradient checkpointing": "figures.checkpointed",
        "transformers' Reformer": "figures.peer",
    },
    "reformer_hashes": {
        "hashes": "what",
        "without dropout": "figures.no_dropout",
        "dropout 0.05, the default of both": "figures.dropout",
    },
    "reformer_copy": {"hashes": "what", "accuracy, %": "figures.here", "paper, %": "figures.paper"},
    "long_text": {
        "model": "what",
        "tokens": "figures.train_tokens",
        "minutes": "figures.train_minutes",
        "cores": "figures.num_threads",
        "bits per byte": "figures.eval_bits_per_byte",
        "perplexity per token": "figures.eval_ppl",
    },
    "listops": {
        "model": "what",
        "accuracy": "figures.test_accuracy",
        "most frequent label": "figures.test_majority",
        "minutes": "figures.train_minutes",
        "cores": "figures.num_threads",
    },
    "tokenizers": {
        "tokenizer": "what",
        "tokens per word": "figures.fertility",
        "share of [UNK]": "figures.unknown",
        "share of single bytes": "figures.bytes",
        "reviews": "figures.reviews",
        "parts of speech": "figures.tags",
    },
    "projection": {"ELECTRA-base": "what", "value": "figures.value", "source": "figures.how"},
    "bench_finetune": {
        "compared with": "what",
        "ratio": "figures.ratio",
        "spread": "figures.spread",
        "our accuracy": "figures.ours",
        "its accuracy": "figures.peer",
    },
    "bench_predict": {
        "compared with": "what",
        "ratio": "figures.ratio",
        "spread": "figures.spread",
        "share of the same answers": "figures.same",
    },
    **{
        name: {"compared with": "what", "ratio": "figures.ratio", "spread": "figures.spread"}
        for name in ("bench_electra", "bench_seq2seq", "bench_vit")
    },
}
METRICS = {"f1": "F1", "las": "LAS", "spearmanr": "Spearman", "chrf": "chrF++", "ppl": "perplexity"}


def add(name: str, run: Path, what: str) -> None:
    """Keep what a finished run measured, with the flags that give the same run again."""
    figures = json.loads((run / "all_results.json").read_text(encoding="utf-8"))
    figures["train_minutes"] = round(figures["train_runtime"] / 60, 1)
    seed = int(re.search(r"^seed: (\d+)$", (run / "recipe.yaml").read_text(encoding="utf-8"), re.MULTILINE)[1])
    write(name, {"what": what, "command": command(run), "seeds": [seed], "figures": figures})


def add_pair(name: str, scratch: Path, pretrained: Path, figure: str, what: str) -> None:
    """Keep what the same fine-tuning gave from scratch and from a pretrained model, each the mean of several seeds."""
    points = 1 if figure.endswith(("bleu", "bleu_tok", "chrf", "ppl")) else 100
    results = [json.loads((run / "all_results.json").read_text(encoding="utf-8")) for run in (scratch, pretrained)]
    folders = [sorted(run.glob("seed-*")) for run in (scratch, pretrained)]
    minutes = max(
        json.loads((folder / "all_results.json").read_text())["train_runtime"] for part in folders for folder in part
    )
    row = {
        "what": what,
        "commands": [command(part[0]) for part in folders],
        "seeds": [int(folder.name.removeprefix("seed-")) for folder in folders[0]],
        "figures": {
            "figure": figure.removeprefix("eval_").replace("_", " "),
            "scratch": spread(results[0], figure),
            "pretrained": spread(results[1], figure),
            "gain": f"{points * (results[1][figure] - results[0][figure]):+.1f}",
            "minutes": f"{minutes / 60:.1f}",
            "all": {"scratch": results[0], "pretrained": results[1]},
        },
    }
    write(name, row)


def spread(results: dict, figure: str) -> str:
    digits = 3 if abs(results[figure]) < 1 else 2
    if f"{figure}_std" not in results:
        return f"{results[figure]:.{digits}f} (one seed)"
    return f"{results[figure]:.{digits}f} ± {results[f'{figure}_std']:.{digits}f}"


def command(run: Path) -> str:
    (found,) = re.findall(r"^- Command: `(.*)`$", (run / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return found


def keep(name: str | None, found: dict[str, dict], output: dict) -> None:
    """A benchmark's rows, each {"ratio": ..., "spread": ...} by what it compares, and its last line; None: they are not kept."""
    if name is None:
        return
    said = shlex.join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])
    kept = [
        {"what": what, "command": said, "seeds": output["repetitions"], "figures": one} for what, one in found.items()
    ]
    write(name, [{**kept[0], "output": output}, *kept[1:]])


def middle_and_range(values: list[float]) -> dict:
    return {"ratio": round(statistics.median(values), 3), "spread": f"{min(values):.2f} to {max(values):.2f}"}


def write(name: str, row: dict | list[dict]) -> None:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.write_text(json.dumps(row, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def rows(table: str) -> list[dict]:
    """A result file holds one row, or a list of them."""
    found = []
    for path in sorted((ROOT / "benchmarks" / "results").glob(f"{table}.*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found += content if isinstance(content, list) else [content]
    return found


def number(value: float) -> str:
    """For people: 6.5, 39.6, 4,300; a score below 1 has three digits (0.682), and a tiny one its first (0.0002)."""
    if value == 0:
        return "0"
    if value < 1:
        return f"{value:.3f}" if value >= 0.001 else f"{value:.1g}"
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    return trimmed(f"{value:,.{digits}f}")


def trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def cell(row: dict, place: str) -> str:
    value = row
    for key in place.split("."):
        value = value.get(key, "")
        if value == "":
            return ""
    if isinstance(value, int):
        return f"{value:,}"
    text = str(value)
    if re.fullmatch(r"\d*\.\d+", text):
        minutes = "minutes" in place.rpartition(".")[2]
        return trimmed(f"{float(text):.1f}") if minutes else number(float(text))
    text = re.sub(r"\d+\.\d{3,}", lambda found: number(float(found[0])), text)
    return METRICS.get(text, text)


def markdown(table: str) -> str:
    columns = COLUMNS[table]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row, place) for place in columns.values()) + " |" for row in rows(table)]
    return "\n".join(lines)


def render(text: str) -> str:
    pattern = r"(<!-- results:(\w+) -->\n).*?(<!-- /results -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{markdown(m[2])}\n{m[3]}", text, flags=re.DOTALL)


def documents() -> list[Path]:
    """The files that hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


if __name__ == "__main__":
    if len(sys.argv) == 4:
        add(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    if len(sys.argv) == 6:
        add_pair(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
    for path in documents():
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
