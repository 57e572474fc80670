"""Recipes as functions, for Python and notebooks. The flags of a recipe are keyword arguments.

from hf_tiny import finetune_classifier

run = finetune_classifier(train_file="reviews.tsv", text_column="document", output_dir="runs/reviews")
print(run.results["eval_accuracy"], run.output_dir)
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from accelerate.state import AcceleratorState
from datasets import Dataset, DatasetDict

from . import arguments
from .errors import InputError
from .flags import RECIPES
from .train import execute


@dataclass(frozen=True)
class FinishedRun:
    """What a run has left."""

    results: dict[str, float]  # all_results.json
    output_dir: Path


@cache
def recipe_function(name: str) -> Callable[..., FinishedRun]:
    """The recipe of that name as a function. It raises InputError where the command would end with 2."""
    module = importlib.import_module(f"hf_tiny.recipes.{name}")

    def function(**flags) -> FinishedRun:
        settings = {flag: list(value) if isinstance(value, tuple) else value for flag, value in flags.items()}
        for flag, value in settings.items():
            if isinstance(value, Dataset | DatasetDict):
                raise InputError(f'{flag} takes files. Write the dataset to one: .to_parquet("{flag}.parquet")')
        recipe = arguments.parse(module.Recipe, settings=settings)
        AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
        with as_command(name, settings):
            return FinishedRun(execute(module.main, recipe), Path(recipe.output_dir))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = (
        f"{module.Recipe.__doc__}\n\nThe arguments are the flags of `hf-tiny {name.replace('_', '-')}`:\n"
        + ("\n".join(f"  {line}" for line in arguments.described(module.Recipe)))
    )
    names = arguments.known(module.Recipe)
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=...) for flag in sorted(names)],
        return_annotation=FinishedRun,
    )
    return function


@contextmanager
def as_command(name: str, settings: dict) -> Iterator[None]:
    """Cards and hints show the command that does the same."""
    before = sys.argv
    sys.argv = [str(RECIPES / f"{name}.py"), *arguments.as_flags(settings)]
    try:
        yield
    finally:
        sys.argv = before
