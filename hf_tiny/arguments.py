"""From the command line, or one YAML or JSON file of flags, to a recipe's frozen dataclass."""

import dataclasses
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from transformers import HfArgumentParser

from .errors import InputError

RecipeType = TypeVar("RecipeType")


def flag(default, text: str):
    """A field of a recipe's dataclass, with what `--help` says of it."""
    return dataclasses.field(default=default, metadata={"help": text})


class _Parser(HfArgumentParser):
    def error(self, message: str):
        raise InputError(f"{message}. `--help` lists every flag.")


def parse(recipe_class: type[RecipeType], argv: Sequence[str] | None = None) -> RecipeType:
    """Parse `[FILE.yaml|FILE.json] [--flag value ...]`: a flag on the command line wins over the file, and both win
    over what `--size` sets."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(recipe_class, description=recipe_class.__doc__, allow_abbrev=False)
    names = [field.name for field in dataclasses.fields(recipe_class)]
    if argv and not argv[0].startswith("-"):
        settings = _read(Path(argv.pop(0)))
        for name in settings:
            if name not in names:
                raise InputError(f"Unknown setting {name!r} in the recipe file.{_nearest(name, names)}")
        parser.set_defaults(**{name: None for name, value in settings.items() if value is None})
        argv = _as_flags(settings) + argv
    namespace, rest = parser.parse_known_args(argv)
    if recipe_class.SIZES:
        if namespace.size not in recipe_class.SIZES:
            raise InputError(f"--size {namespace.size}: choose one of {', '.join(recipe_class.SIZES)}.")
        parser.set_defaults(**recipe_class.SIZES[namespace.size])
        namespace, rest = parser.parse_known_args(argv)
    if rest:
        flag = rest[0].split("=")[0]
        hint = _nearest(flag.lstrip("-"), names, "--") if flag.startswith("-") else " Values follow their flag."
        raise InputError(f"Unknown flag {flag}.{hint} `--help` lists every flag.")
    return recipe_class(**{name: vars(namespace)[name] for name in names})


def write(recipe, path: Path) -> None:
    """The file that reproduces this run."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True), encoding="utf-8")


def _read(path: Path) -> dict:
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise InputError(f"{path}: the first argument is a recipe file, .yaml or .json. Flags begin with --.")
    if not path.is_file():
        raise InputError(f"There is no recipe file {path}.")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (yaml.YAMLError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not readable as YAML or JSON: {error}") from error
    if not isinstance(settings, dict):
        raise InputError(f"{path} must map flags to values, one per line, such as `learning_rate: 1e-3`.")
    return settings


def _as_flags(settings: dict) -> list[str]:
    """argparse then converts and checks the values of a file just as it does on the command line (YAML reads 1e-4
    as a string)."""
    flags = []
    for name, value in settings.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name}", *map(str, values)]
    return flags


def _nearest(name: str, names: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{close[0]}?" if close else ""
