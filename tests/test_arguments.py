"""Flags and recipe files: every trap of HfArgumentParser ends in a value of the right type or a message for people."""

import dataclasses

import pytest
import tiny_run

from hf_tiny import InputError, arguments

Recipe = tiny_run.recipe_module().Recipe


def parse(*argv, file: str | None = None, folder=None, suffix: str = "yaml"):
    if file is None:
        return arguments.parse(Recipe, list(argv))
    path = folder / f"flags.{suffix}"
    path.write_text(file, encoding="utf-8")
    return arguments.parse(Recipe, [str(path), *argv])


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "'1e-4'"])
def test_a_rate_in_yaml_is_a_float(tmp_path, text):
    recipe = parse(file=f"learning_rate: {text}\n", folder=tmp_path)
    assert type(recipe.learning_rate) is float
    assert recipe.learning_rate == 1e-4


def test_json_is_read_too(tmp_path):
    recipe = parse(file='{"learning_rate": 1e-4, "train_file": ["a.txt", "b.txt"]}', folder=tmp_path, suffix="json")
    assert recipe.learning_rate == 1e-4
    assert recipe.train_file == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("argv", "file", "expected"),
    [
        (["--train_file", "a.txt", "b.txt"], None, ["a.txt", "b.txt"]),
        (["--train_file", "a.txt"], None, ["a.txt"]),
        (["--train-file", "a.txt"], None, ["a.txt"]),
        ([], "train_file: a.txt\n", ["a.txt"]),
        ([], "train_file: [a.txt, b.txt]\n", ["a.txt", "b.txt"]),
        ([], "train_file: null\n", None),
        ([], None, None),
    ],
)
def test_list_flags(tmp_path, argv, file, expected):
    assert parse(*argv, file=file, folder=tmp_path).train_file == expected


def test_a_flag_wins_over_the_file(tmp_path):
    recipe = parse("--seed", "7", file="seed: 5\nweight_decay: 0.5\n", folder=tmp_path)
    assert (recipe.seed, recipe.weight_decay) == (7, 0.5)


def test_size_sets_defaults_and_explicit_flags_win(tmp_path):
    tiny, small = Recipe.SIZES["tiny"], Recipe.SIZES["small"]
    assert parse().learning_rate == parse("--size", "tiny").learning_rate == tiny["learning_rate"]
    assert parse("--size", "small").learning_rate == small["learning_rate"]
    by_flag = parse("--size", "small", "--learning_rate", "0.5")
    assert (by_flag.learning_rate, by_flag.max_steps) == (0.5, small["max_steps"])
    by_file = parse(file="size: small\nlearning_rate: 0.25\n", folder=tmp_path)
    assert (by_file.learning_rate, by_file.max_steps) == (0.25, small["max_steps"])
    both = parse("--size", "small", file="size: base\nmax_steps: 3\n", folder=tmp_path)
    assert (both.size, both.max_steps, both.learning_rate) == ("small", 3, small["learning_rate"])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], False),
        (["--lowercase"], True),
        (["--lowercase", "True"], True),
        (["--lowercase", "False"], False),
        (["--lowercase", "no"], False),
    ],
)
def test_booleans(argv, expected):
    assert parse(*argv).lowercase is expected


@pytest.mark.parametrize("text", ["false", "'False'", "no"])
def test_booleans_in_a_file(tmp_path, text):
    assert parse(file=f"lowercase: {text}\n", folder=tmp_path).lowercase is False


@pytest.mark.parametrize(
    ("argv", "file", "words"),
    [
        ([], "learning_rat: 1\n", ["learning_rat'", "Did you mean learning_rate?"]),
        ([], "learning_rate: fast\n", ["learning_rate", "fast"]),
        ([], "- a\n- b\n", ["must map flags to values"]),
        ([], "a: [\n", ["not readable as YAML"]),
        (["--learning_rat", "1"], None, ["Unknown flag --learning_rat", "--learning_rate?", "--help"]),
        (["--learning_rat=1"], None, ["Unknown flag --learning_rat.", "--learning_rate?"]),
        (["--seed", "1", "stray"], None, ["stray", "Values follow their flag"]),
        (["--resume_from_checkpoint"], None, ["--resume_from_checkpoint", "expected one argument", "--help"]),
        (["--seed", "many"], None, ["--seed", "many", "--help"]),
        (["--size", "huge"], None, ["--size huge", "tiny, small, base, large"]),
        (["missing.yaml"], None, ["no recipe file missing.yaml"]),
        (["text.txt"], None, ["text.txt", ".yaml or .json"]),
    ],
)
def test_mistakes_get_a_message(tmp_path, argv, file, words):
    with pytest.raises(InputError) as caught:
        parse(*argv, file=file, folder=tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_abbreviations_are_refused():
    with pytest.raises(InputError, match="Unknown flag --learn"):
        parse("--learn", "1")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--size", "large", "--lowercase", "--train_file", "a b.txt", "하나.txt", "--save_total_limit", "5"],
        ["--learning_rate", "1e-7", "--report_to", "tensorboard", "--hub_model_id", "me/it", "--warmup_steps", "100"],
    ],
)
def test_the_written_recipe_gives_the_same_recipe(tmp_path, argv):
    recipe = parse(*argv)
    arguments.write(recipe, tmp_path / "recipe.yaml")
    assert arguments.parse(Recipe, [str(tmp_path / "recipe.yaml")]) == recipe
    assert len(dataclasses.fields(recipe)) > 40


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    missing = [field.name for field in dataclasses.fields(Recipe) if f"--{field.name}" not in text]
    assert missing == []
