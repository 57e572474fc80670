"""`hf-tiny VERB ...` runs the recipe of that name. Nothing is imported before it is needed: torch alone takes seconds.

hf-tiny pretrain-electra --train_file my_texts/ --output_dir runs/mine
hf-tiny --num_processes 2 pretrain-electra  # options of `accelerate launch` stand before the verb
hf-tiny push runs/mine --hub_model_id you/name
"""

import ast
import importlib
import logging
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import InputError, exit_codes
from .flags import RECIPES, check, hint, recipe_names

COMMANDS = {  # verbs that are no recipes: module, first argument, what they do
    "predict": ("hf_tiny.predict", ["predict"], "Use a trained model: labels, tags, trees or texts for new data."),
    "evaluate": ("hf_tiny.predict", ["evaluate"], "Measure a trained model on new data, beside its baseline."),
    "demo": ("hf_tiny.demo", [], "Look at trained models in a browser: a page to try them on."),
    "runs": ("hf_tiny.runs", [], "Compare runs: a table of figures and settings, and their curves on one image."),
    "push": ("hf_tiny.hub", ["push"], "Push a finished model to the Hub."),
    "convert": ("hf_tiny.convert", [], "Turn a checkpoint into a native one of transformers, or back."),
    "export": ("hf_tiny.export", [], "Write a model as ONNX files, which a browser can run."),
}
LONGEST_SAVE = 3600  # seconds that a process may take to save its checkpoint after a signal; torch's default is 30


def recipes() -> dict[str, Path]:
    return {name.replace("_", "-"): RECIPES / f"{name}.py" for name in recipe_names()}


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    verbs = [*recipes(), *COMMANDS]
    place = next((place for place, word in enumerate(argv) if word in verbs), len(argv))
    options, verb, flags = argv[:place], argv[place : place + 1], argv[place + 1 :]
    with exit_codes():
        if not argv or {"--help", "-h"} & set(options):
            return print_help()
        if not verb:
            words = [word for word in argv if not word.startswith("-")]
            hints = [hint(word, verbs) for word in words]
            close = next((found for found in hints if len(found) > 1), ".")
            if several := [verb for verb in verbs if verb.startswith(tuple(f"{word}-" for word in words))]:
                close = f". Which one: {', '.join(several)}?"
            raise InputError(f"no verb in `{' '.join(argv)}`{close} `hf-tiny --help` lists the verbs.")
        if verb[0] in COMMANDS:
            sys.exit(run_command(verb[0], flags))
        check(verb[0].replace("-", "_"), flags)
        sys.exit(run_recipe(recipes()[verb[0]], options, flags))


def print_help() -> None:
    print("usage: hf-tiny [options of accelerate launch] VERB [flags of the verb]\n")
    lines = {verb: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for verb, path in recipes().items()}
    for verb, text in {**lines, **{verb: text for verb, (_, _, text) in COMMANDS.items()}}.items():
        print(f"  {verb:22s} {text.partition(chr(10))[0]}")
    print("\n`hf-tiny VERB --help` shows the flags of a verb.")


def run_command(verb: str, flags: Sequence[str]) -> int:
    module, first, _ = COMMANDS[verb]
    sys.argv = [f"hf-tiny {verb}", *first, *flags]
    try:
        importlib.import_module(module).main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 2
        raise
    return 0


def run_recipe(script: Path, options: Sequence[str], flags: Sequence[str]) -> int:
    """A single process is this one; several, or one with other options, are started by accelerate."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    several = torch.accelerator.is_available() and torch.accelerator.device_count() > 1
    if options not in ([], ["--num_processes", "1"]) or several or Path(default_config_file).is_file():
        return launch(script, options, flags)
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")
    return 0


def launch(script: Path, options: Sequence[str], flags: Sequence[str]) -> int:
    """What `accelerate launch` does, with the exit code of the recipe, and signals passed on to its processes."""
    import psutil
    import torch
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from . import loopback

    given = launch_command_parser().parse_args([*options, str(script), *flags])
    given.shutdown_timeout = LONGEST_SAVE
    given.quiet = False  # the exit code of a single process is in the exception that it would hide
    logging.disable(logging.ERROR)  # of the launcher: lines of defaults, and how the recipe ended, which that has said
    if (given.num_processes or 1) > 1 and given.config_file is None and not torch.accelerator.is_available():
        given.config_file = str(RECIPES / "accelerate" / "cpu_2proc.yaml")  # without it there would be one process

    loopback.use(given)

    def pass_on(number, frame) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)  # torch's launcher of several processes has its own handlers
    try:
        launch_command(given)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except SignalException as error:
        code = 128 + error.sigval
    else:
        code = 0
    return code if code >= 0 else 128 - code  # -15: killed by SIGTERM


if __name__ == "__main__":
    main()
