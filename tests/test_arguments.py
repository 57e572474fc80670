"""Flags and recipe files: every trap of HfArgumentParser ends in a value of the right type or a message for people."""

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar, get_args, get_type_hints

import pytest
from fixtures import tiny_run

from hf_tiny import HfTinyElectraConfig, HfTinyReformerConfig, HfTinyViTConfig, InputError, arguments
from hf_tiny.arguments import Arguments, flag
from hf_tiny.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    GROUP: ClassVar[str] = "data"

    train_file: list[str] | None = flag(None, "Files.")
    weights: list[float] | None = flag(None, "Their shares.", above=0)
    lowercase: bool = flag(False, "Lower-case the text.")
    share: float = flag(0.5, "A share.", low=0, high=1)
    rate: float = flag(0.5, "A rate.", above=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Recipe(DataArguments, TrainConfig):
    """A recipe for tests."""

    DEFAULTS: ClassVar[dict] = {"output_dir": "runs/electra", "weight_decay": 0.3, "save_total_limit": None}
    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"learning_rate": 1e-3, "max_steps": 4300},
        "small": {"learning_rate": 5e-4, "max_steps": 1_000_000, "weight_decay": 0.7},
    }
    CONFIG: ClassVar[type] = HfTinyElectraConfig
    MODEL_SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"hidden_size": 128, "num_attention_heads": 2, "embedding_size": 128, "classifier_dropout": 0.2},
        "small": {"hidden_size": 256},
    }

    size: str = flag("tiny", "How large.")
    vocab_size: int = flag(4096, "Of the tokenizer.", low=10)
    model_name_or_path: str | None = flag(None, "What to start from.", group="model")


def parse(*argv, file: str | None = None, folder=None, suffix: str = "yaml", recipe_class=Recipe):
    if file is None:
        return arguments.parse(recipe_class, list(argv))
    path = folder / f"flags.{suffix}"
    path.write_text(file, encoding="utf-8")
    return arguments.parse(recipe_class, [str(path), *argv])


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
    both = parse("--size", "small", file="size: tiny\nmax_steps: 3\n", folder=tmp_path)
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
        ([], "train_file: &a [x, y]\nweights: *a\n", ["refers to other values", "write each value out"]),
        (["--learning_rat", "1"], None, ["Unknown flag --learning_rat", "--learning_rate?", "--help"]),
        (["--learning_rat=1"], None, ["Unknown flag --learning_rat.", "--learning_rate?"]),
        (["--seed", "1", "stray"], None, ["stray", "Values follow their flag"]),
        (["--resume_from_checkpoint"], None, ["--resume_from_checkpoint", "expected one argument", "--help"]),
        (["--seed", "many"], None, ["--seed", "many", "--help"]),
        (["--bf16", "perhaps"], None, ["--bf16: perhaps is neither True nor False. `--help all`"]),
        (["--size", "huge"], None, ["--size huge: choose one of tiny, small."]),
        (["--hidden_siz", "1"], None, ["Unknown flag --hidden_siz. Did you mean --hidden_size?"]),
        (["--hidden_size", "wide"], None, ["--hidden_size: 'wide' is no whole number. `"]),
        (["--dropout", "0.1"], None, ["Unknown flag --dropout: it is now --hidden_dropout_prob."]),
        ([], "dropout: 0.1\n", ["Unknown setting 'dropout' in the recipe file: it is now hidden_dropout_prob."]),
        (["--no_lowercase"], None, ["Unknown flag --no_lowercase: it is now --lowercase False."]),
        (["--pad_token_id", "3"], None, ["Unknown flag --pad_token_id."]),
        (
            ["--sharing", "some"],
            None,
            ["--sharing some: sharing='some': choose one of none, embeddings, all, disentangled."],
        ),
        (["--sharing", "all", "--hidden_size", "64"], None, ["--sharing all", "generator_size"]),
        (["--logging_steps", "0"], None, ["--logging_steps 0: it must be above 0."]),
        (["--warmup_steps", "-3"], None, ["--warmup_steps -3: it must be 0 or above."]),
        (["--learning_rate", "nan"], None, ["--learning_rate nan: it must be a number."]),
        (["--output_dir", ""], None, ["--output_dir '': it is empty."]),
        (["--max_steps", "0"], None, ["--max_steps 0: it must be other than 0."]),
        (["--seed", "4294967296"], None, ["--seed 4294967296: it must be 0 or above and at most 4294967295."]),
        (["--generator_size", "3"], None, ["--generator_size 3: it must be above 0 and at most 1."]),
        (["--hidden_size", "-128"], None, ["--hidden_size -128: it must be above 0."]),
        (
            ["--classifier_buckets", "1"],
            None,
            ["--classifier_buckets 1: it must be 0 or above and other than 1."],
        ),
        (["--hidden_dropout_prob", "nan"], None, ["--hidden_dropout_prob nan: it must be a number."]),
        (["--adam_beta1", "1"], None, ["--adam_beta1 1: it must be 0 or above and below 1."]),
        (["--share", "1.5"], None, ["--share 1.5: it must be 0 or above and at most 1."]),
        (["--rate", "0"], None, ["--rate 0: it must be above 0 and below 1."]),
        (["--weights", "0.5", "0"], None, ["--weights 0: it must be above 0."]),
        ([], "vocab_size: 3\n", ["--vocab_size 3: it must be 10 or above."]),
        (
            ["--lr_scheduler_type", "polynomial"],
            None,
            ["polynomial: choose one of linear, cosine, constant, inverse_sqrt"],
        ),
        (["--hub_strategy", "often"], None, ["--hub_strategy often: choose one of end, every_save."]),
        (["missing.yaml"], None, ["no recipe file missing.yaml"]),
        (["text.txt"], None, ["text.txt", ".yaml or .json"]),
        ([], "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n", ["refers to other values", "write each value out"]),
        ([], "1: 2\n", ["must map flags to values"]),
        ([], "[" * 5000, ["is not readable as YAML"]),
        ([], "max_steps: " + "9" * 5000, ["is not readable as YAML"]),
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
        ["--size", "small", "--lowercase", "--train_file", "a b.txt", "하나.txt", "--save_total_limit", "5"],
        ["--learning_rate", "1e-7", "--report_to", "tensorboard", "--hub_model_id", "-me/it", "--warmup_steps", "100"],
        ["--hidden_size", "192", "--norm_first", "--sharing", "all", "--generator_size", "1"],
    ],
)
def test_the_written_recipe_gives_the_same_recipe(tmp_path, argv):
    argv = [f"--hub_model_id={word}" if word == "-me/it" else word for word in argv if word != "--hub_model_id"]
    recipe = parse(*argv)
    arguments.write(recipe, tmp_path / "recipe.yaml")
    assert arguments.parse(Recipe, [str(tmp_path / "recipe.yaml")]) == recipe
    assert len(dataclasses.fields(recipe)) > 40


# Defaults, and fields of the model's configuration


def test_other_defaults_of_inherited_flags_hold_everywhere():
    assert (parse().weight_decay, Recipe().weight_decay, TrainConfig().weight_decay) == (0.3, 0.3, 0.01)
    assert (parse("--size", "small").weight_decay, parse("--weight_decay", "0.1").weight_decay) == (0.7, 0.1)
    assert Recipe().save_total_limit is None and parse().output_dir == "runs/electra"

    @dataclass(frozen=True, kw_only=True)
    class Child(Recipe):
        DEFAULTS: ClassVar[dict] = {"seed": 7}

    assert (Child().seed, Child().weight_decay, Recipe().seed) == (7, 0.3, 42)
    with pytest.raises(KeyError, match="weight_dekay"):
        type("Wrong", (Recipe,), {"DEFAULTS": {"weight_dekay": 1}, "__annotations__": {}})


def test_a_field_of_the_models_configuration_is_a_flag(tmp_path):
    flags = ["--hidden_size", "192", "--generator_size", "1", "--norm_first", "--hidden_dropout_prob", "0"]
    recipe = parse(*flags)
    given = {"hidden_size": 192, "generator_size": 1, "norm_first": True, "hidden_dropout_prob": 0}
    assert recipe.given_settings == given
    assert recipe.model_settings == {**Recipe.MODEL_SIZES["tiny"], **given}
    assert parse("--size", "small").model_settings == {"hidden_size": 256}
    config = recipe.build_config(vocab_size=50, max_position_embeddings=99, hidden_size=64)
    assert (config.hidden_size, config.embedding_size, config.vocab_size, config.num_hidden_layers) == (
        192,
        128,
        50,
        12,
    )
    assert (config.norm_first, config.max_position_embeddings) == (True, 99)
    by_file = parse(file="hidden_size: 192\nclassifier_dropout: null\n", folder=tmp_path)
    assert by_file.given_settings == {"hidden_size": 192, "classifier_dropout": None}
    assert by_file.build_config().classifier_dropout is None and recipe.build_config().classifier_dropout == 0.2
    assert parse("--vocab_size", "50").given_settings == {}  # a flag of the recipe itself


def test_the_configuration_of_a_loaded_model_is_not_judged_by_that_of_the_size():
    heads = ["--num_attention_heads", "12"]
    with pytest.raises(InputError, match=r"^--num_attention_heads 12: "):
        parse(*heads)
    recipe = parse(*heads, "--model_name_or_path", "bert-base")
    assert recipe.given_settings == {"num_attention_heads": 12}


def test_lists_of_a_configuration():
    reformer = type("Reformer", (Recipe,), {"CONFIG": HfTinyReformerConfig, "MODEL_SIZES": {}})
    recipe = parse("--attn_layers", "local", "lsh", "--num_buckets", "4", recipe_class=reformer)
    assert recipe.given_settings == {"attn_layers": ["local", "lsh"], "num_buckets": 4}
    recipe = parse("--attn_layers", "lsh", "--num_buckets", "4", "8", recipe_class=reformer)
    assert recipe.given_settings == {"attn_layers": ["lsh"], "num_buckets": [4, 8]}
    vit = type("ViT", (Recipe,), {"CONFIG": HfTinyViTConfig, "MODEL_SIZES": {}})
    recipe = parse("--image_size", "32", "--qkv_bias", "False", recipe_class=vit)
    assert recipe.given_settings == {"image_size": 32, "qkv_bias": False}


def test_a_recipe_that_does_not_train_has_its_own_flags_only(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Plain(DataArguments, Arguments):
        """Compares."""

    assert parse("--share", "0.1", recipe_class=Plain).share == 0.1
    assert parse(recipe_class=Plain).model_settings == {}
    with pytest.raises(InputError, match="Unknown flag --seed"):
        parse("--seed", "1", recipe_class=Plain)


# --help


def help_of(capsys, *argv, recipe_class=Recipe) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(*argv, recipe_class=recipe_class)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_flag_once_in_its_group(capsys):
    text = help_of(capsys, "--help", "all")
    flags = re.findall(r"^  --(\w+)", text, re.MULTILINE)
    own = [field.name for field in dataclasses.fields(Recipe) if field.name != "given_settings"]
    config = [field.name for field in dataclasses.fields(HfTinyElectraConfig)]
    assert set(own) <= set(flags) <= {*own, *config} and len(flags) == len(set(flags))
    assert "pad_token_id" not in flags and {"hidden_size", "sharing", "generator_size"} <= set(flags)
    groups = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert groups == ["run", "data", "model", "training", "saving", "Hub"]
    parts = dict(zip(groups, re.split(r"^\w+:$", text, flags=re.MULTILINE)[1:], strict=True))
    assert parts["run"].split()[0] == "--size"  # the recipe's own flags come first
    assert "--share" in parts["data"] and "--sharing" in parts["model"] and "--output_dir" in parts["run"]
    assert "--max_steps" in parts["training"] and "--eval_steps" in parts["saving"] and "--hub_" in parts["Hub"]
    assert "--model_name_or_path" in parts["model"]
    assert "generator and discriminator have in common" in " ".join(text.split())  # from the configuration's docstring
    assert "One of linear, cosine, constant" in " ".join(text.split())


@pytest.mark.parametrize("columns", ["70", "120", "200"])
def test_help_fits_on_a_few_screens_and_shows_what_holds(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    text = help_of(capsys, "-h")
    assert len(text.splitlines()) <= 100
    assert ("more: --help all" in text) == (columns == "70") and "A recipe for tests." in text
    for words in (
        "--max_steps 4300",
        "--learning_rate 0.001",
        "--hidden_size 128",
        "--weight_decay 0.3",
        "--size tiny",
    ):
        assert words in text
    text = help_of(capsys, "--size", "small", "--help")
    for words in ("--max_steps 1000000", "--learning_rate 0.0005", "--hidden_size 256", "--weight_decay 0.7"):
        assert words in text
    assert "The defaults are those of --size small." in text


# All recipes

ANY_NUMBER = {  # numbers without bounds, and why they need none
    "max_grad_norm": "0 or below does not clip, as in Trainer",
    "save_total_limit": "0 or below keeps all checkpoints, as in Trainer",
    "length_penalty": "below 0 short texts are favoured, as in transformers' generate",
}
NEGATIVE = {  # numbers that may be below 0, and what that means
    "max_steps": "by --num_train_epochs, as in Trainer",
    "first_stage_steps": "half of --max_steps",
    "trainable_layers": "all layers",
}
RECIPES = sorted(path.stem for path in (tiny_run.ROOT / "recipes").glob("*.py"))


def is_number(kind) -> bool:
    """int, float, and lists of them, also where None is allowed."""
    parts = {part for one in (kind, *get_args(kind)) for part in (one, *get_args(one))}
    return bool(parts & {int, float}) and bool not in parts and str not in parts


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_has_bounds(name):
    recipe_class = tiny_run.recipe_module(name).Recipe
    recipe, kinds = recipe_class(), get_type_hints(recipe_class)
    arguments.check(recipe)  # the defaults are allowed
    flags = {name: field for name, field in arguments._flags(recipe_class).items() if is_number(kinds[name])}
    assert not [name for name in flags if not flags[name].metadata["bounds"] and name not in ANY_NUMBER]
    assert all(set(field.metadata["bounds"]) <= set(arguments.BOUNDS) for field in flags.values())
    if "learning_rate" in flags:
        with pytest.raises(InputError, match="--learning_rate 0: it must be above 0"):
            arguments.check(dataclasses.replace(recipe, learning_rate=0.0))
    for name in flags.keys() - ANY_NUMBER.keys() - NEGATIVE.keys():
        with pytest.raises(InputError, match=f"^--{name} -7: it must be"):
            arguments.check(dataclasses.replace(recipe, **{name: -7}))
    for name, field in arguments._config_flags(recipe_class).items():
        if is_number(field.type):
            with pytest.raises(InputError, match=f"^--{name} -7: it must be"):
                arguments.check(dataclasses.replace(recipe, given_settings={name: -7}))


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_size_sets_is_allowed(name):
    recipe_class = tiny_run.recipe_module(name).Recipe
    for size in recipe_class.SIZES:
        recipe = parse("--size", size, recipe_class=recipe_class)
        arguments.check(dataclasses.replace(recipe, given_settings=recipe.model_settings))


@pytest.mark.parametrize("part", ["tagger_lstm_size", "tagger_ngram_buckets", "classifier_buckets"])
def test_a_part_of_a_head_can_be_left_out(part):
    """As a native twin needs it."""
    assert vars(parse(f"--{part}", "0").build_config())[part] == 0
