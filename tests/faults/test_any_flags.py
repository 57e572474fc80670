"""Whatever is given to a flag: it is accepted, or refused with an InputError; never another exception."""

import importlib
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_tiny import InputError, arguments, flags

RECIPES = [name for name in flags.recipe_names() if name.startswith(("pretrain_", "finetune_"))]
VALUES = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "",
            "-1",
            "0",
            "1e999",
            "nan",
            "True",
            "none",
            "[1",
            "{",
            "auto",
            "한국어",
            "\0",
            "--",
            "-",
            "../x",
            "a" * 5000,
        ]
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_any_value_is_accepted_or_refused(name, capsys):
    recipe = importlib.import_module(f"hf_tiny.recipes.{name}").Recipe
    known = sorted(set(arguments.known(recipe)) - {"help"})

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.sampled_from(known), st.lists(VALUES, max_size=2)), min_size=1, max_size=3))
    def any_flags(words):
        argv = [word for flag, values in words for word in (f"--{flag}", *values)]
        parse_or_refuse(recipe, argv)

    any_flags()


YAML = st.text("[]{}:&*-?!|>'\"\n #%@,.ab19", max_size=60)
LINES = st.lists(st.tuples(st.sampled_from(["max_steps", "seed", "train_file", "size", "x"]), YAML), max_size=3)


@pytest.mark.slow
def test_any_recipe_file_is_read_or_refused(tmp_path, capsys):
    recipe, path = importlib.import_module("hf_tiny.recipes.pretrain_electra").Recipe, tmp_path / "recipe.yaml"

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.one_of(st.binary(max_size=60), YAML, LINES.map(lambda lines: "\n".join(f"{a}: {b}" for a, b in lines))))
    def any_file(content):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        parse_or_refuse(recipe, [str(path)])

    any_file()


def parse_or_refuse(recipe, argv) -> None:
    with suppress(InputError):
        try:
            arguments.parse(recipe, argv)
        except SystemExit as end:  # argparse has said what it does not understand
            assert end.code == 2
