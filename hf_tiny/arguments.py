"""From the command line, or one YAML or JSON file of flags, to a recipe's frozen dataclass."""

import argparse
import dataclasses
import glob
import hashlib
import logging
import math
import operator
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser, PreTrainedConfig

from .errors import InputError
from .flags import hint, recipe_names, unknown

logger = logging.getLogger(__name__)

GROUPS = ("run", "data", "tokenizer", "model", "training", "saving", "Hub")  # the order of `--help`
BOUNDS = {
    "low": (operator.ge, "{} or above"),
    "above": (operator.gt, "above {}"),
    "high": (operator.le, "at most {}"),
    "below": (operator.lt, "below {}"),
    "other_than": (operator.ne, "other than {}"),
}
SHARE = {"low": 0, "below": 1}
CONFIG_BOUNDS = {  # of the fields of a model's configuration; all other numbers must be above 0
    "hidden_dropout_prob": SHARE,
    "attention_probs_dropout_prob": SHARE,
    "classifier_dropout": SHARE,
    "drop_path_rate": SHARE,
    "label_smoothing": SHARE,
    "generator_size": {"above": 0, "high": 1},
    "discriminator_weight": {"low": 0},
    "num_register_tokens": {"low": 0},
    "tagger_lstm_size": {"low": 0},
    "tagger_ngram_buckets": {"low": 0, "other_than": 1},
    "classifier_buckets": {"low": 0, "other_than": 1},
}
NUMBERS = {"int": "whole number", "float": "number"}
HIGHEST_SEED = 2**32 - 1  # numpy takes no higher one
HELP_LINES = 100  # `--help` shows as many flags of each group as fit; `--help all` shows all
CHECKSUM = "# sha256 of the lines below: "
LOADED = {
    "model_name_or_path",
    "config_name",
    "discriminator_name",
}  # flags that name a model, whose own configuration then holds
PATHS = {*LOADED, "generator_name", "tokenizer_name", "dataset_name", "raw_file", "measure_forgetting"}
PATHS |= {"train_file", "validation_file", "test_file"}  # flags whose values may be paths


def flag(default, help: str, *, choices=None, group: str | None = None, **bounds: float):
    """A field of a recipe's dataclass: what `--help` says of it, and which values it may have.

    choices: the texts that it may be.
    group: where `--help` shows it; by default in the GROUP of the class that defines it.
    bounds: by the names of BOUNDS: `low` and `high`, its least and its greatest value; `above` and `below`, which it must
        not reach; `other_than`, which it must not be. None is always allowed.
    """
    metadata = {"help": help, "bounds": bounds, "choices": choices and tuple(choices), "group": group}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The base of every recipe's dataclass. A class that brings flags along names their GROUP, unless it is "run"."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}  # other defaults of inherited flags
    SIZES: ClassVar[dict[str, dict]] = {}  # presets: --size name -> flags that it sets
    CONFIG: ClassVar[Any] = None  # the class of the model's configuration: each of its fields is a flag, too
    MODEL_SIZES: ClassVar[dict[str, dict]] = {}  # --size name -> fields of CONFIG that it sets
    # What a run that goes on does not take from its recipe.yaml: the folder may have been moved, the machine have fewer cores.
    NOT_RESTORED: ClassVar[tuple[str, ...]] = ("output_dir", "resume_from_checkpoint", "num_threads", "overwrite_cache")

    given_settings: dict = dataclasses.field(default_factory=dict)  # the fields of CONFIG that were given as flags

    def __init_subclass__(cls, **kwargs):
        """DEFAULTS become the defaults of the dataclass, as if each flag had been written again."""
        super().__init_subclass__(**kwargs)
        inherited = {name: field for base in reversed(cls.__mro__[1:]) for name, field in _own_fields(base).items()}
        for name, default in vars(cls).get("DEFAULTS", {}).items():
            cls.__annotations__[name] = inherited[name].type
            setattr(cls, name, dataclasses.field(default=default, metadata=inherited[name].metadata))

    @property
    def model_settings(self) -> dict[str, Any]:
        """Fields of the model's configuration: those of --size, and over them those that were given."""
        return {**_preset(self.MODEL_SIZES, vars(self).get("size")), **self.given_settings}

    def build_config(self, **changes) -> PreTrainedConfig:
        """The configuration of a new model: that of its --size, with these changes; a flag that was given wins."""
        try:
            return self.CONFIG(**{**self.model_settings, **changes, **self.given_settings})
        except (ValueError, StrictDataclassError) as error:
            reason = str(error).splitlines()[-1].strip()
            given = {name: value for name, value in self.given_settings.items() if name in reason}
            flags = " ".join(f"--{name} {_shown(value)}" for name, value in (given or self.given_settings).items())
            raise InputError(f"{flags}: {reason}" if flags else reason) from error


RecipeType = TypeVar("RecipeType", bound=Arguments)


def parse(
    recipe_class: type[RecipeType], argv: Sequence[str] | None = None, settings: dict[str, Any] | None = None
) -> RecipeType:
    """Parse `[FILE.yaml|FILE.json] [--flag value ...]`: a flag on the command line wins over the file, both win over the
    flags of a run that is resumed, these over what `--size` sets, and that over the defaults.

    settings: flags and their values, in place of a command line.
    """
    if settings is not None:
        argv, where = [], ""
    else:
        argv, where = list(sys.argv[1:] if argv is None else argv), " in the recipe file"
        settings = _read(Path(argv.pop(0))) if argv and not argv[0].startswith("-") else {}
    for name in settings:
        if name not in (names := known(recipe_class)):
            raise InputError(f"Unknown setting {name!r}{where}{hint(name, names)}")
    given = {name: None for name, value in settings.items() if value is None}
    given |= _parse_flags(recipe_class, [*as_flags(settings), *argv])
    asked = given.pop("help", None)
    if given.get("resume_from_checkpoint") and not asked:
        given = {**_resumed(recipe_class, given), **given}
    size = given.get("size", _size(recipe_class))
    if recipe_class.SIZES and size not in recipe_class.SIZES:
        raise InputError(f"--size {size}: choose one of {', '.join(recipe_class.SIZES)}.")
    if asked:
        _print_help(recipe_class, size, everything=asked == "all")
        sys.exit(0)
    values = {**_preset(recipe_class.SIZES, size), **given}
    own = {name: value for name, value in values.items() if name in _flags(recipe_class)}
    recipe = recipe_class(**own, given_settings={name: value for name, value in given.items() if name not in own})
    check(recipe)
    if recipe.given_settings and not any(given.get(name) for name in LOADED):
        recipe.build_config()  # refused now, not after the data is prepared
    return recipe


def recipe_of_run(output_dir: str, resumed_from: str) -> Path:
    """The recipe.yaml of the run that is resumed."""
    return (Path(output_dir) if resumed_from == "latest" else Path(resumed_from).parent) / "recipe.yaml"


def _resumed(recipe_class: type[Arguments], given: dict[str, Any]) -> dict[str, Any]:
    """The flags of the run that is resumed, so that they need not be given again. Without a folder of its own, a run goes
    on in that of its checkpoint."""
    output_dir = given.get("output_dir", _flags(recipe_class)["output_dir"].default)
    path = recipe_of_run(output_dir, given["resume_from_checkpoint"])
    if not path.is_file():
        return {}
    _refuse_other_recipe(path)
    try:
        flags = flags_of_run(recipe_class, path)
    except (InputError, OSError):  # which `check_resume` will say
        flags = {}
    if "num_train_epochs" in given:  # the new length, which --max_steps would win over
        flags.pop("max_steps", None)
    return {"output_dir": str(path.parent), **flags}


def _refuse_other_recipe(path: Path) -> None:
    """A recipe.yaml begins with the command of its run, as a comment."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        made_by = re.search("|".join(recipe_names()), file.readline().replace("-", "_"))
        if made_by and Path(sys.argv[0]).stem in {*recipe_names()} - {made_by[0]}:
            verb = made_by[0].replace("_", "-")
            raise InputError(
                f"{path.parent} is a run of {verb}. Go on with it by `hf-tiny {verb}`, or choose another --output_dir."
            )


def flags_of_run(recipe_class: type[Arguments], path: Path) -> dict[str, Any]:
    """The flags of a run, by its recipe.yaml."""
    found, left_out = found_again(read_unchanged(path), path.parent), recipe_class.NOT_RESTORED
    settings = {name: found[name] for name in known(recipe_class) if name in found and name not in left_out}
    unset = {name: None for name, value in settings.items() if value is None}
    return {**unset, **_parse_flags(recipe_class, as_flags(settings))}


def found_again(settings: dict, folder: Path) -> dict:
    """The flags of the run in this folder, for use from anywhere: its relative paths start where the run was started, which
    --output_dir and the place of the folder tell. A path that leads nowhere from there stays as it is."""
    folder, given = folder.resolve(), Path(settings.get("output_dir") or ".")
    started = Path(*folder.parts[: -len(given.parts) or None])
    if started / given != folder or started == Path.cwd() or given.is_absolute():
        return settings

    def found(value):
        if isinstance(value, list):
            return [found(one) for one in value]
        there = str(started / Path(str(value)).expanduser())
        return there if glob.glob(there) else value

    return {name: found(value) if name in PATHS and value else value for name, value in settings.items()}


def check(recipe: object) -> None:
    """Refuse a value that its flag does not allow."""
    rules = {name: field.metadata for name, field in _flags(type(recipe)).items()}
    settings = vars(recipe).get("given_settings", {})  # data can be read without a model
    rules |= {name: {"bounds": CONFIG_BOUNDS.get(name, {"above": 0})} for name in settings}
    for name, value in {**vars(recipe), **settings}.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and name in rules and (rule := _broken_rule(one, **rules[name])):
                raise InputError(f"--{name} {_shown(one) or repr(one)}: {rule}.")


def _broken_rule(value, *, bounds: dict | None = None, choices: tuple | None = None, **_) -> str | None:
    bounds = bounds or {}
    if choices and value not in choices:
        return f"choose one of {', '.join(choices)}"
    if value == "":
        return "it is empty"
    if isinstance(value, float) and not math.isfinite(value):
        return "it must be a number"
    if isinstance(value, str | bool) or all(BOUNDS[name][0](value, bound) for name, bound in bounds.items()):
        return None
    return f"it must be {' and '.join(BOUNDS[name][1].format(bound) for name, bound in bounds.items())}"


def write(recipe: Arguments, path: Path, commands: Sequence[str] = ()) -> None:
    """The file that reproduces this run. commands: of the run so far, as comments."""
    settings = dataclasses.asdict(recipe)
    settings |= settings.pop("given_settings")
    comments = "".join(f"# {line}\n" for command in commands for line in command.splitlines())
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".draft-{path.name}")  # half a file would be read as a run with other flags
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    draft.write_text(f"{comments}{CHECKSUM}{_digest(text)}\n{text}", encoding="utf-8")
    os.replace(draft, path)


def read_unchanged(path: Path) -> dict:
    """The flags of a recipe.yaml, as the run has written it."""
    settings = _read(path)
    _, summed, rest = path.read_text(encoding="utf-8").partition(CHECKSUM)
    digest, _, text = rest.partition("\n")
    if summed and digest != _digest(text):  # half a file is a file of other flags
        raise InputError("it is not as the run has written it. If you have changed it, give it as the first argument.")
    return settings


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# What flags there are


def _own_fields(owner: type) -> dict[str, dataclasses.Field]:
    return vars(owner).get("__dataclass_fields__", {})


def _flags(recipe_class: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(recipe_class) if field.name != "given_settings"}


def known(recipe_class: type[Arguments]) -> list[str]:
    """The names of all flags."""
    return [*_flags(recipe_class), *_config_flags(recipe_class)]


def _config_flags(recipe_class: type[Arguments]) -> dict[str, dataclasses.Field]:
    """The fields of the model's configuration that a person may set; the tokenizer sets the ids of special tokens."""
    if recipe_class.CONFIG is None:
        return {}
    others = {field.name for field in dataclasses.fields(PreTrainedConfig)} | _flags(recipe_class).keys()
    fields = [field for field in dataclasses.fields(recipe_class.CONFIG) if not field.name.endswith("_token_id")]
    return {field.name: field for field in fields if field.name not in others and _simple_type(field.type)}


def _simple_type(annotation):
    """What argparse takes for a field of a configuration: a float for `float | int`, a list for `int | list[int]`; None
    where there is nothing simple."""
    union = get_origin(annotation) is UnionType
    parts = [part for part in (get_args(annotation) if union else (annotation,)) if part is not NoneType]
    lists = [part for part in parts if get_origin(part) is list]
    simple = [*lists, *(kind for kind in (float, int, bool, str) if kind in parts)]
    return simple[0] if simple else None


def _size(recipe_class: type[Arguments]) -> Any:
    size = _flags(recipe_class).get("size")
    return None if size is None else size.default


def _preset(sizes: dict[str, dict], size: str | None) -> dict:
    """A recipe without --size has at most one preset."""
    return next(iter(sizes.values()), {}) if size is None else sizes.get(size, {})


# From texts to values


class _Parser(HfArgumentParser):
    def error(self, message: str):
        message = re.sub(r"^argument (--\S+?)(/--\S+)?:", r"\1:", message)  # `--a_b/--a-b`
        message = re.sub(r"invalid (int|float) value: (.*)", lambda m: f"{m[2]} is no {NUMBERS[m[1]]}", message)
        message = re.sub(
            r"Truthy value expected: got (.*) but expected one of .*", r"\1 is neither True nor False", message
        )
        raise InputError(f"{message}. `--help all` lists every flag.")


def _parse_flags(recipe_class: type[Arguments], argv: Sequence[str]) -> dict[str, Any]:
    """Only what was given, so that defaults can be laid below it."""
    types, config = get_type_hints(recipe_class), _config_flags(recipe_class)
    types |= {name: _simple_type(field.type) for name, field in config.items()}
    auto = {name for name, kind in types.items() if str in get_args(kind) and _simple_type(kind) in (bool, int)}
    types |= {name: _simple_type(types[name]) for name in auto}
    fields = [
        (name, types[name], dataclasses.field(default=argparse.SUPPRESS)) for name in (*_flags(recipe_class), *config)
    ]
    parser = _Parser(dataclasses.make_dataclass("Flags", fields), allow_abbrev=False, add_help=False)
    for action in parser._actions:
        if action.dest in auto:
            action.type = partial(_unless_auto, action.type)
    parser.add_argument("-h", "--help", nargs="?", const="short", default=argparse.SUPPRESS)
    namespace, rest = parser.parse_known_args(argv)
    if rest:
        if not rest[0].startswith("-"):
            raise InputError(f"{rest[0]} is no flag. Values follow their flag. `--help all` lists every flag.")
        raise InputError(unknown(rest[0], types))
    given = {name: value for name, value in vars(namespace).items() if value is not None}  # lists that were not given
    for name in config.keys() & given.keys():
        if isinstance(given[name], list) and len(given[name]) == 1 and int in get_args(config[name].type):
            (given[name],) = given[name]  # an `int | list[int]`
    return given


def _unless_auto(convert: Callable[[str], Any], text: str):
    """What a flag of another type than text may be, too: the run then finds the value out."""
    return text if text == "auto" else convert(text)


def as_flags(settings: dict) -> list[str]:
    """argparse then converts and checks the values of a file just as it does on the command line (YAML reads 1e-4
    as a string)."""
    flags = []
    for name, value in settings.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags


def _read(path: Path) -> dict:
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise InputError(f"{path}: the first argument is a recipe file, .yaml or .json. Flags begin with --.")
    if not path.is_file():
        raise InputError(f"There is no recipe file {path}.")
    try:
        text = path.read_text(encoding="utf-8")
        refers = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
        settings = {} if refers else yaml.safe_load(text)  # JSON is YAML
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the last two: a number or a nest without an end
        raise InputError(f"{path} is not readable as YAML or JSON: {error}") from error
    if refers:  # a few lines of them can mean gigabytes
        raise InputError(f"{path} refers to other values (`*name`): write each value out.")
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise InputError(f"{path} must map flags to values, one per line, such as `learning_rate: 1e-3`.")
    return settings


# --help


def _print_help(recipe_class: type[Arguments], size: str | None, everything: bool) -> None:
    """The flags by group, with the defaults that hold for this --size."""
    groups = _help_rows(recipe_class, size)
    if not everything:  # of each flag what is said first
        groups = {
            group: [(flag, re.split(r"(?<=[.;]) ", text)[0].rstrip(";")) for flag, text in rows]
            for group, rows in groups.items()
        }
    longest = max(map(len, groups.values()))
    for most in range(longest, 0, -1):
        lines = [line for group, rows in groups.items() for line in _help_lines(group, rows, most)]
        if everything or len(lines) + 5 <= HELP_LINES:
            break
    print(f"usage: {Path(sys.argv[0]).name} [FILE.yaml] [--flag value ...]\n\n{recipe_class.__doc__}")
    print(*lines, "" if size is None else f"\nThe defaults are those of --size {size}.", sep="\n")


def _help_rows(recipe_class: type[Arguments], size: str | None) -> dict[str, list[tuple[str, str]]]:
    """For each group the flags with their defaults, and what is said of them."""
    groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
    preset = {"size": size, **_preset(recipe_class.SIZES, size)}
    flags, classes = _flags(recipe_class), recipe_class.__mro__
    owners = {name: owner for owner in classes for name in _own_fields(owner)}  # the class that defines it first
    for name in sorted(flags, key=lambda name: classes.index(owners[name])):  # the recipe's own flags first
        field, owner = flags[name], owners[name]
        group = _own_fields(owner)[name].metadata["group"] or vars(owner).get("GROUP", "run")
        choices = field.metadata["choices"]
        text = field.metadata["help"] + (f" One of {', '.join(choices)}." if choices else "")
        groups[group].append((f"--{name} {_shown(preset.get(name, field.default))}", text))
    described = (recipe_class.CONFIG.__doc__ or "") if recipe_class.CONFIG else ""
    texts = {
        name: " ".join(text.split())
        for names, text in re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n        .*)*)", described, re.MULTILINE)
        for name in names.split(", ")
    }
    sizes, fields = _preset(recipe_class.MODEL_SIZES, size), _config_flags(recipe_class)
    for name in sorted(fields, key=lambda name: name not in sizes):  # what the size decides comes first
        default = sizes.get(name, fields[name].default)
        groups["model"].append((f"--{name} {_shown(default)}", texts.get(name, "")))
    return {group: rows for group, rows in groups.items() if rows}


def described(recipe_class: type[Arguments]) -> list[str]:
    """All flags with their defaults, and what is said of them."""
    groups = _help_rows(recipe_class, _size(recipe_class))
    return [f"{flag.removeprefix('--').strip()}: {text}" for rows in groups.values() for flag, text in rows]


def _help_lines(group: str, rows: list[tuple[str, str]], most: int) -> list[str]:
    width = max(80, min(120, shutil.get_terminal_size((120, 24)).columns))
    lines = ["", f"{group}:"]
    for flag, text in rows[:most]:
        wrapped = textwrap.wrap(text, width, initial_indent=f"  {flag:40s}  ", subsequent_indent=" " * 44)
        lines += wrapped or [f"  {flag}"]
    return lines if len(rows) <= most else [*lines, f"  ... and {len(rows) - most} more: --help all"]


def _shown(value) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
