"""Recipes as functions."""

import inspect
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fixtures import tiny_run

import hf_tiny
from hf_tiny import models

REVIEWS = "".join(f"{'good' if i % 2 else 'bad'}\t{'정말 좋다' if i % 2 else 'so dull'} {i}\n" for i in range(24))
SHORT = {"max_steps": 3, "vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


def reviews(folder: Path) -> str:
    path = folder / "reviews.tsv"
    path.write_text("label\ttext\n" + REVIEWS, encoding="utf-8")
    return str(path)


def in_process(folder: Path, function, *args) -> str:
    ended = tiny_run.start(folder, function, *map(str, args)).wait()
    assert ended.code == 0, ended.err
    return ended.out.strip()  # the training of a tokenizer prints empty lines


# Importing


def test_importing_is_light():
    """Less than any import of torch; the models are known all the same."""
    snippet = """
import sys, hf_tiny
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
from transformers import AutoConfig, AutoModel
assert "hf_tiny.models" not in sys.modules
model = AutoModel.from_config(AutoConfig.for_model("hf_tiny_reformer", vocab_size=50, hidden_size=64))
print(type(model).__name__, type(model.config).__module__)
"""
    ended = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True)
    assert ended.stdout == "HfTinyReformerModel hf_tiny.models.reformer\n", ended.stderr


def test_what_was_imported_first_does_not_matter():
    """The configuration and the pipeline are registered when transformers has been imported before, and later."""
    for first in ("import hf_tiny", "from transformers import AutoConfig, pipeline"):
        snippet = f"""
{first}
import hf_tiny
from transformers import AutoConfig, pipeline
from transformers.pipelines import PIPELINE_REGISTRY
assert "dependency-parsing" in PIPELINE_REGISTRY.get_supported_tasks()
print(AutoConfig.for_model("hf_tiny_vit").model_type)
"""
        ended = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True)
        assert ended.stdout == "hf_tiny_vit\n", ended.stderr


def test_every_configuration_is_registered():
    assert {config.model_type: config.__name__ for config in models.AUTO_CLASSES | models.WRAPPERS} == hf_tiny.CONFIGS


def test_public_names():
    assert {"pretrain_electra", "finetune_classifier", "InputError", "HfTinyViTModel"} <= set(hf_tiny.__all__)
    assert all(inspect.isclass(vars(models)[name]) for name in hf_tiny.__all__ if name.startswith("HfTiny"))
    with pytest.raises(AttributeError, match="HfTinyNothing"):
        hf_tiny.HfTinyNothing  # noqa: B018
    with pytest.raises(ImportError):
        exec("from hf_tiny import nothing")


# Running


def train_twice(folder: str, file: str) -> None:
    before = list(sys.argv)
    for number, bf16 in enumerate((False, True)):  # accelerate keeps a precision for the process
        run = hf_tiny.finetune_classifier(
            train_file=(file,), output_dir=Path(folder, f"run-{number}"), bf16=bf16, save_total_limit=None, **SHORT
        )
        print(json.dumps([run.results, str(run.output_dir)]))
    assert sys.argv == before


@pytest.mark.slow
def test_a_function_does_what_the_command_does(tmp_path):
    file = reviews(tmp_path)
    printed = in_process(tmp_path, train_twice, tmp_path, file).splitlines()  # the summaries, too
    for number, line in enumerate(line for line in printed if line.startswith("[{")):
        results, folder = json.loads(line)
        assert folder == str(tmp_path / f"run-{number}")
        assert results == tiny_run.results_of(Path(folder)) and results["train_steps"] == 3
    recipe = yaml.safe_load((tmp_path / "run-1" / "recipe.yaml").read_text())
    assert recipe["bf16"] is True and recipe["save_total_limit"] is None and recipe["train_file"] == [file]
    assert "hf-tiny finetune-classifier --train_file" in (tmp_path / "run-0" / "README.md").read_text()
    command = ["finetune_classifier", "--train_file", file, "--output_dir", tmp_path / "same", *tiny_run.flags(**SHORT)]
    ended = tiny_run.start(tmp_path, tiny_run.run_plain, *map(str, command)).wait()
    assert ended.code == 0, ended.err
    assert tiny_run.largest_difference(tmp_path / "run-0", tmp_path / "same") == 0


def pretrain_with_preset(folder: str, file: str) -> None:
    sizes = {**SHORT, "max_steps": 1, "max_seq_length": 16}
    hf_tiny.pretrain_electra(size="tiny", train_file=file, output_dir=f"{folder}/run", **sizes, generator_size=0.5)


@pytest.mark.slow
def test_a_preset_holds(tmp_path):
    in_process(tmp_path, pretrain_with_preset, tmp_path, tiny_run.write_text(tmp_path / "text.txt", lines=60))
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert (recipe["learning_rate"], recipe["mlm_probability"], recipe["max_steps"]) == (1e-3, 0.25, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_step": 3}, "Unknown setting 'max_step'. Did you mean max_steps?"),
        ({"learning_rate": "fast"}, "--learning_rate: 'fast' is no number"),
        ({"logging_steps": 0}, "--logging_steps 0: it must be above 0"),
        ({"train_file": "nothing.tsv"}, "nothing.tsv"),
    ],
)
def test_mistakes_are_exceptions(tmp_path, settings, message):
    with pytest.raises(hf_tiny.InputError) as refusal:
        hf_tiny.finetune_classifier(output_dir=str(tmp_path / "run"), **settings)
    assert message in str(refusal.value)


def interrupt(folder: str, file: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module = sys.modules[hf_tiny.finetune_classifier.__module__]
    original = module.execute

    def execute(main, recipe):
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        return original(main, recipe)

    signal.signal(signal.SIGALRM, lambda *_: (signal.setitimer(signal.ITIMER_REAL, 0.2), ask(folder)))
    module.execute = execute
    try:
        hf_tiny.finetune_classifier(
            train_file=file, output_dir=f"{folder}/run", logging_steps=1, **{**SHORT, "max_steps": 5000}
        )
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("stopped")


def ask(folder: str) -> None:
    """Ctrl-C once the run has begun to train."""
    if tiny_run.logged_steps(Path(folder, "run")):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_saves_and_raises(tmp_path):
    assert in_process(tmp_path, interrupt, tmp_path, reviews(tmp_path)) == "stopped"
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1


def test_help_lists_the_flags():
    function = hf_tiny.finetune_tagger
    assert {"train_file", "hidden_size", "learning_rate"} <= set(inspect.signature(function).parameters)
    assert "  hub_license: Licence that the card names" in function.__doc__ and function.__name__ == "finetune_tagger"


NOTEBOOK = """
from accelerate import notebook_launcher

def train():
    from hf_tiny import finetune_classifier
    finetune_classifier(train_file={file!r}, output_dir={folder!r}, **{flags!r})

notebook_launcher(train, num_processes={processes})
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_notebook_launcher(tmp_path, processes):
    values = {"file": reviews(tmp_path), "folder": str(tmp_path / "run"), "flags": SHORT, "processes": processes}
    ended = subprocess.run([sys.executable, "-c", NOTEBOOK.format(**values)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert tiny_run.results_of(tmp_path / "run")["num_processes"] == processes
