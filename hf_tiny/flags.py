"""What can be said of a command before torch is imported, which takes seconds.

python -m hf_tiny.flags  # writes the table of flags again; a test tells when it is out of date
"""

import difflib
import importlib
import os
import re
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from .errors import InputError, exit_codes
from .signals import end_with_launcher

PACKAGE = Path(__file__).parent
RECIPES = PACKAGE / "recipes"  # in a checkout a link
TABLE = PACKAGE / "flags.tsv"  # a flag, and the recipes that have it
RENAMED = {  # an old flag, or one of transformers' -> what it is called here
    "dropout": "hidden_dropout_prob",
    "warmup_ratio": "warmup_steps",
    "label_smoothing_factor": "label_smoothing",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "generation_max_length": "max_target_length",
    "generation_num_beams": "num_beams",
}
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN."
FOREIGN = {  # flags of transformers and its example scripts -> what to do here
    "do_train": "a recipe trains, and evaluates as well.",
    "do_eval": "a recipe evaluates anyway, on --validation_file or what it holds out, at its end on --test_file; later, on "
    "any data, `hf-tiny evaluate MODEL FILE` does.",
    "do_predict": "the predictions for the held-out data are always written; for new data use `hf-tiny predict MODEL FILE`.",
    "overwrite_output_dir": "a run never writes over another one. Choose another --output_dir, or delete the folder.",
    "eval_strategy": "--eval_steps says how often; 0: at the end only.",
    "evaluation_strategy": "--eval_steps says how often; 0: at the end only.",
    "save_strategy": "--save_steps says how often; 0: at the end only.",
    "logging_strategy": "--logging_steps says how often.",
    "optim": "the optimiser is AdamW, in all recipes.",
    "use_cpu": "hide the GPUs: `CUDA_VISIBLE_DEVICES= hf-tiny ...`.",
    "no_cuda": "hide the GPUs: `CUDA_VISIBLE_DEVICES= hf-tiny ...`.",
    "cache_dir": "set HF_HOME, before the command.",
    **dict.fromkeys(("token", "hub_token", "use_auth_token"), LOG_IN),
}


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.py"))


def begin(name: str, script: str) -> None:
    """What a recipe does before its imports: refuse a flag that it does not have, and say that it has begun.

    name: `__name__` of the recipe; one that is imported has not begun.
    """
    if name == "__main__":
        with exit_codes():
            end_with_launcher()
            check(Path(script).stem, sys.argv[1:])
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # which would show in which import it was
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not {"-h", "--help"} & set(sys.argv) and os.environ.get("RANK", "0") == "0":  # of the launcher
            print(f"hf_tiny: {Path(script).stem}", file=sys.stderr, flush=True)


def check(recipe: str, argv: Sequence[str]) -> None:
    """Refuse a flag that the recipe does not have."""
    known = [flag for flag, recipes in read_table().items() if recipe in recipes]
    for word in argv if known else ():
        flag = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and flag not in ("", "help", *known) and not is_new(flag):
            raise InputError(unknown(word, known))


def unknown(word: str, known: Collection[str]) -> str:
    flag = word.partition("=")[0]
    return f"Unknown flag {flag}{hint(flag.lstrip('-'), known, '--')} `--help all` lists every flag."


def hint(name: str, known: Collection[str], prefix: str = "") -> str:
    """What an unknown flag is called now, or which one it resembles."""
    name = name.replace("-", "_")
    if RENAMED.get(name) in known:
        return f": it is now {prefix}{RENAMED[name]}."
    if name in FOREIGN:
        return f": {FOREIGN[name]}"
    if name.startswith("no_") and name[3:] in known:
        return f": it is now {prefix}{name[3:]} False."
    short = [flag for flag in known if "".join(word[0] for word in flag.split("_") if word) == name]  # lr
    longer = [flag for flag in known if f"_{name}" in f"_{flag}"]
    longer.sort(key=lambda flag: (not flag.startswith(name), "eval" in flag, len(flag)))
    close = short or longer or difflib.get_close_matches(name, known, n=1)
    return f". Did you mean {prefix}{close[0]}?" if close else "."


# The table


def read_table() -> dict[str, list[str]]:
    lines = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines())
    return {flag: recipes.split() for flag, recipes in lines}


def is_new(flag: str) -> bool:
    """Whether a field of that name has come into the source since the table was written: then the recipe itself judges."""
    pattern = re.compile(rf"^    {re.escape(flag)}: ", re.MULTILINE)
    sources = (*PACKAGE.rglob("*.py"), *RECIPES.glob("*.py"))
    return flag not in read_table() and any(pattern.search(path.read_text(encoding="utf-8")) for path in sources)


def new_table() -> str:
    """The table as it should be. It imports every recipe."""
    known = importlib.import_module("hf_tiny.arguments").known
    recipes = {name: known(importlib.import_module(f"hf_tiny.recipes.{name}").Recipe) for name in recipe_names()}
    flags = sorted({flag for flags in recipes.values() for flag in flags})
    return "".join(f"{flag}\t{' '.join(name for name in recipes if flag in recipes[name])}\n" for flag in flags)


if __name__ == "__main__":
    TABLE.write_text(new_table(), encoding="utf-8")
