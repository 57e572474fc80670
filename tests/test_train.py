"""The schedules, the parameter groups and the loop."""

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from conftest import CORES
from fixtures import tiny_run
from fixtures.tiny_run import ROOT, largest_difference, metrics, train_here

from hf_tiny import InputError, checkpoint, optim
from hf_tiny.callbacks import Callback
from hf_tiny.data.batches import Prefetcher
from hf_tiny.evaluation import flops_per_token
from hf_tiny.progress import is_better
from hf_tiny.start import StartArguments
from hf_tiny.train import TrainConfig, execute, run, start

# Schedules and groups


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Steps 0, 4, 9 (the end of the warm-up), 50, 90, 99 of 100, with 10 steps of warm-up.
        ("linear", [0.1, 0.48, 0.91, 0.5, 0.1, 0.01]),
        ("cosine", [0.1, 0.5 * 0.9961, 0.9801, 0.5, 0.02447, 0.0002467]),
        ("constant", [0.1, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ("inverse_sqrt", [0.1, 0.5, 1.0, math.sqrt(10 / 51), math.sqrt(10 / 91), math.sqrt(0.1)]),
        ("warmup_stable_decay", [0.1, 0.5, 1.0, 1.0, 0.5, 0.05]),
    ],
)
def test_schedules_at_key_points(name, expected):
    steps = (0, 4, 9, 50, 90, 99)
    factors = [optim.learning_rate_factor(name, step, 100, 10) for step in steps]
    assert factors == pytest.approx(expected, rel=1e-3)
    assert all(0 < optim.learning_rate_factor(name, step, 100, 10) <= 1 for step in range(100))


@pytest.mark.parametrize(
    ("warmup_steps", "max_steps", "expected"),
    [
        (0.1, 1000, 100),
        (0.05, 1000, 50),
        (10_000, 1_000_000, 10_000),
        (10_000, 500, 50),
        (10, 5, 1),
        (0, 100, 1),
        (1, 100, 1),
    ],
)
def test_warm_up_is_shortened_for_short_runs(warmup_steps, max_steps, expected):
    assert optim.warmup_length(warmup_steps, max_steps) == expected


def test_every_trainable_parameter_is_in_one_group_and_biases_and_norms_do_not_decay():
    toy = tiny_run.model(layers=2)
    frozen = toy.electra.embeddings.token_type_embeddings.weight
    frozen.requires_grad_(False)
    decayed, plain = optim.parameter_groups(toy, 0.3)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    names = {parameter: name for name, parameter in toy.named_parameters()}
    grouped = [names[parameter] for parameter in decayed["params"] + plain["params"]]
    assert sorted(grouped) == sorted(name for parameter, name in names.items() if parameter is not frozen)
    for group, expected in ((decayed, False), (plain, True)):
        for parameter in group["params"]:
            assert ("norm" in names[parameter] or names[parameter].endswith("bias")) is expected, names[parameter]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16": True}, "--fp16 needs a GPU.*--bf16"),
        ({"push_to_hub": True, "seeds": 2}, "each would replace the one before.*hf-tiny push .*/seed-42"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_run(settings, message):
    AcceleratorState._reset_state(True)
    with pytest.raises(InputError, match=message):
        start(TrainConfig(**settings))


# The loop


def test_a_folder_that_cannot_be_written_to_is_found_before_the_data_is_prepared(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        run(
            lambda recipe: pytest.fail("it prepares its data"), tiny_run.ToyRecipe, ["--output_dir", f"{tmp_path}/file"]
        )
    assert end.value.code == 2 and "cannot be written to" in capsys.readouterr().err


def test_a_command_in_a_refusal_can_be_pasted(tmp_path):
    config = TrainConfig(output_dir=str(tmp_path / "my run"), push_to_hub=True, seeds=2)
    with pytest.raises(InputError) as refusal:
        start(config)
    words = shlex.split(str(refusal.value).partition("choose: ")[2])
    assert words == ["hf-tiny", "push", str(tmp_path / "my run" / "seed-42"), "--hub_model_id", "you/name"]


def test_the_loss_goes_down_on_a_toy_that_can_be_learned(tmp_path):
    settings = {"max_steps": 100, "learning_rate": 1e-2, "dropout": 0.0, "save_steps": 0, "logging_steps": 20}
    train_here(tmp_path / "run", max_grad_norm=5.0, per_device_train_batch_size=16, **settings)
    lines = metrics(tmp_path / "run")
    assert lines[0]["mlm_loss"] == pytest.approx(math.log(tiny_run.VOCABULARY), rel=0.05)
    assert lines[-1]["mlm_loss"] < 0.6 * lines[0]["mlm_loss"]
    assert lines[-1]["rtd_loss"] < 0.8 * lines[0]["rtd_loss"]


def test_two_by_four_micro_batches_give_the_weights_of_one_big_batch(tmp_path):
    settings = {"max_steps": 5, "dropout": 0.0, "save_steps": 0}
    train_here(tmp_path / "big", per_device_train_batch_size=8, **settings)
    train_here(tmp_path / "small", per_device_train_batch_size=2, gradient_accumulation_steps=4, **settings)
    assert largest_difference(tmp_path / "big", tmp_path / "small") < 1e-6
    for big, small in zip(metrics(tmp_path / "big"), metrics(tmp_path / "small"), strict=True):
        assert small["loss"] == pytest.approx(big["loss"], rel=1e-5)
        assert small["grad_norm"] == pytest.approx(big["grad_norm"], rel=1e-4)


class Gradients(Callback):
    """AdamW's first moment after one step is 0.1 times the gradient that it was given."""

    def __init__(self):
        self.steps, self.evaluations = [], []

    def on_step_end(self, state, model):
        self.steps.append(state.step)

    def on_evaluate(self, state, metrics):
        self.evaluations.append((state.step, metrics["eval_loss"]))


@pytest.mark.parametrize(("limit", "clipped"), [(0.01, True), (0, False), (1e9, False)])
def test_the_norm_of_the_gradient_is_clipped(tmp_path, limit, clipped):
    train_here(tmp_path / "run", max_steps=1, max_grad_norm=limit)
    state = torch.load(tmp_path / "run" / "checkpoint-1" / "optimizer.pt", weights_only=True)["state"]
    given = math.sqrt(sum(float((10 * value["exp_avg"]).square().sum()) for value in state.values()))
    norm = metrics(tmp_path / "run")[0]["grad_norm"]  # before clipping
    assert norm > 0.1
    assert given == pytest.approx(0.01 if clipped else norm, rel=1e-3)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run with evaluations, its callback and its results."""
    folder, watcher = tmp_path_factory.mktemp("evaluated") / "run", Gradients()
    results = train_here(folder, [watcher], evaluate=True, max_steps=12, eval_steps=5, logging_steps=4, save_steps=6)
    return folder, watcher, results


def test_what_a_run_leaves(evaluated):
    folder, _, results = evaluated
    figures = {"loss", "mlm_loss", "mlm_accuracy", "rtd_loss", "rtd_accuracy", "rtd_precision", "rtd_recall", "rtd_auc"}
    lines = metrics(folder)
    assert [line["step"] for line in lines if "loss" in line] == [1, 4, 8, 12]
    assert [line["step"] for line in lines if "eval_loss" in line] == [5, 10, 12]
    rest = {"step", "epoch", "learning_rate", "grad_norm", "tokens_per_second", "rtd_majority_entropy"}
    for line in lines:
        if "loss" in line:
            assert figures | rest == line.keys()
        else:
            assert {f"eval_{name}" for name in figures | {"rtd_majority_entropy"}} | {"step", "epoch"} == line.keys()
    written = json.loads((folder / "all_results.json").read_text())
    assert written == results
    assert {f"eval_{name}" for name in figures} < written.keys()
    assert written["eval_loss"] == lines[-1]["eval_loss"]
    assert (written["train_steps"], written["train_tokens"]) == (12, 12 * 8 * tiny_run.LENGTH)
    assert (written["num_processes"], written["num_threads"]) == (1, torch.get_num_threads())
    assert written["train_tokens_per_second"] == pytest.approx(
        written["train_tokens"] / written["train_runtime"], rel=0.05
    )
    assert lines[-1]["epoch"] == pytest.approx(12 / 13, abs=1e-3)
    for name in ("recipe.yaml", "README.md", "config.json", "model.safetensors", "checkpoint-6", "checkpoint-12"):
        assert (folder / name).exists(), name
    assert not list(folder.glob(".draft*"))


def test_callbacks_are_called(evaluated):
    _, watcher, results = evaluated
    assert watcher.steps == list(range(1, 13))
    assert [step for step, _ in watcher.evaluations] == [5, 10, 12]
    assert watcher.evaluations[-1][1] == results["eval_loss"]


def test_timers_and_flops_are_sane(evaluated):
    _, _, results = evaluated
    assert 0 <= results["data_wait_share"] <= results["outside_model_share"] < 1
    # About 2 operations per weight and token forward, 3 times that with the backward pass.
    recipe = tiny_run.ToyRecipe()
    flops = flops_per_token(tiny_run.model(), tiny_run.batches(recipe)[0])
    assert 4e3 < flops < 2 * 15_745 * 2
    assert 0 < results["model_flops_per_second"] < 1e12


def test_counting_flops_leaves_random_numbers_and_gradients_alone():
    toy, batch = tiny_run.model(dropout=0.5), tiny_run.batches(tiny_run.ToyRecipe())[0]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert flops_per_token(toy.train(), batch) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in toy.parameters())


def test_batches_are_prepared_on_one_core_and_the_model_keeps_all():
    class Batches:
        def __getitem__(self, index):
            return {"index": index, "threads": torch.get_num_threads()}

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with Prefetcher(
            Batches(), SimpleNamespace(num_processes=2, process_index=1, device=torch.device("cpu")), 5, 2
        ) as ahead:
            assert next(ahead) == [{"index": 21, "threads": 1}, {"index": 23, "threads": 1}]
            assert next(ahead) == [{"index": 25, "threads": 1}, {"index": 27, "threads": 1}]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_the_signal_handlers_come_back(tmp_path):
    import signal

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    train_here(tmp_path / "run", max_steps=1)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_epochs_become_steps(tmp_path):
    results = train_here(tmp_path / "run", max_steps=-1, num_train_epochs=1.5, rows=40, gradient_accumulation_steps=2)
    assert results["train_steps"] == math.ceil(1.5 * 5 / 2)


def test_the_loop_reads_one_number_a_step(tmp_path, monkeypatch):
    """The norm, and on a GPU not even that: the host would wait for the device. What is logged and shown is more."""
    read, numbers = [], torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: read.append(tensor) or numbers(tensor))
    train_here(tmp_path / "short", max_steps=4, logging_steps=100)
    short = len(read)
    train_here(tmp_path / "long", max_steps=14, logging_steps=100)
    assert len(read) - 2 * short < 15  # ten steps more; the bar, where it is drawn


# Best model and early stopping: the "loss" of these evaluations is a script.


class Scripted:
    """Its figures are given; 0 is the loss where another one is."""

    def __init__(self, figures, name):
        self.figures, self.name, self.calls = figures, name, 0

    def __call__(self, model, accelerator):
        self.calls += 1
        return {"loss": 0.0, self.name: self.figures[min(self.calls, len(self.figures)) - 1]}

    def names(self, model, accelerator):
        return list(dict.fromkeys(["loss", self.name]))

    def training_figures(self, outputs, batch):
        return {}

    def report(self, folder):
        assert folder.is_dir()


@pytest.fixture
def scripted(monkeypatch):
    def use(figures, name="loss"):
        monkeypatch.setattr(tiny_run, "evaluation", lambda recipe: Scripted(figures, name))

    return use


def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path, scripted):
    scripted([3.0, 1.0, 2.0, 2.5])
    settings = {"max_steps": 8, "eval_steps": 2, "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True}
    train_here(tmp_path / "run", evaluate=True, **settings)
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-8"]
    assert largest_difference(tmp_path / "run", tmp_path / "run" / "checkpoint-4") == 0
    assert largest_difference(tmp_path / "run", tmp_path / "run" / "checkpoint-8") > 0
    train_here(tmp_path / "last", evaluate=True, **{**settings, "load_best_model_at_end": False})
    assert largest_difference(tmp_path / "last", tmp_path / "run" / "checkpoint-8") == 0


def test_greater_can_be_better(tmp_path, scripted):
    scripted([3.0, 1.0])
    settings = {"max_steps": 4, "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    train_here(tmp_path / "run", evaluate=True, **settings)
    assert largest_difference(tmp_path / "run", tmp_path / "run" / "checkpoint-2") == 0


def test_early_stopping(tmp_path, scripted):
    scripted([3.0, 2.0, 2.1, 2.2, 1.0])
    results = train_here(tmp_path / "run", evaluate=True, max_steps=20, eval_steps=2, early_stopping_patience=2)
    assert results["train_steps"] == 8
    assert [line["eval_loss"] for line in metrics(tmp_path / "run") if "eval_loss" in line] == [3.0, 2.0, 2.1, 2.2]


def test_an_unknown_metric_for_the_best_model_is_refused(tmp_path, scripted):
    scripted([1.0])
    with pytest.raises(InputError, match=r"--metric_for_best_model eval_f1: this task measures loss\."):
        train_here(tmp_path / "run", evaluate=True, max_steps=1, metric_for_best_model="eval_f1")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # refused before the first step


@pytest.mark.parametrize("name", ["eval_accuracy", "accuracy"])
def test_the_name_of_a_metric_says_whether_a_higher_one_is_better(tmp_path, scripted, name):
    scripted([0.5, 0.9, 0.7], "accuracy")
    settings = {"max_steps": 6, "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": name}
    train_here(tmp_path / "run", evaluate=True, **settings)
    assert largest_difference(tmp_path / "run", tmp_path / "run" / "checkpoint-4") == 0
    scripted([0.5, 0.9, 0.7, 0.8, 0.8], "accuracy")
    settings |= {"early_stopping_patience": 2, "max_steps": 10, "load_best_model_at_end": False}
    assert train_here(tmp_path / "stopped", evaluate=True, **settings)["train_steps"] == 8


@pytest.mark.parametrize("name", ["loss", "eval_mlm_loss", "ppl", "perplexity", "bits_per_byte", "mse"])
def test_losses_and_errors_should_fall(name):
    config = TrainConfig(metric_for_best_model=name)
    assert is_better(1.0, 2.0, config) and not is_better(2.0, 1.0, config) and is_better(1.0, None, config)
    assert is_better(2.0, 1.0, dataclasses.replace(config, greater_is_better=True))


def test_nan_is_never_the_best(tmp_path, scripted):
    scripted([math.nan, 3.0, math.nan])
    settings = {"max_steps": 6, "eval_steps": 2, "load_best_model_at_end": True}
    train_here(tmp_path / "run", evaluate=True, **settings)
    assert largest_difference(tmp_path / "run", tmp_path / "run" / "checkpoint-4") == 0


def test_choosing_among_evaluations_needs_some(tmp_path):
    for choice in ({"load_best_model_at_end": True}, {"early_stopping_patience": 1}):
        with pytest.raises(InputError, match="evaluates at its end only: add --eval_steps"):
            start(TrainConfig(output_dir=str(tmp_path / "run"), eval_steps=0, **choice))


# Ways to run


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartedRecipe(StartArguments, tiny_run.ToyRecipe):
    """A recipe that starts from a model."""


def test_every_recipe_can_use_a_run_that_was_stopped(tmp_path):
    with checkpoint.complete_or_absent(tmp_path / "stopped" / "checkpoint-3") as draft:
        (draft / "config.json").write_text("{}")
    recipe = StartedRecipe(output_dir=str(tmp_path / "run"), model_name_or_path=str(tmp_path / "stopped"))
    assert execute(lambda recipe: recipe.model_name_or_path, recipe) == str(tmp_path / "stopped" / "checkpoint-3")


def test_gradient_checkpointing_gives_the_same_weights(tmp_path):
    settings = {"max_steps": 3, "layers": 2, "dropout": 0.1}
    train_here(tmp_path / "plain", **settings)
    train_here(tmp_path / "checkpointed", gradient_checkpointing=True, **settings)
    assert largest_difference(tmp_path / "plain", tmp_path / "checkpointed") < 1e-6


def test_bf16_trains_float32_weights(tmp_path):
    train_here(tmp_path / "plain", max_steps=3)
    train_here(tmp_path / "bf16", max_steps=3, bf16=True)
    AcceleratorState._reset_state(True)
    assert {value.dtype for value in tiny_run.weights(tmp_path / "bf16").values()} == {torch.float32}
    assert 0 < largest_difference(tmp_path / "plain", tmp_path / "bf16") < 0.05
    one, other = metrics(tmp_path / "plain")[-1]["loss"], metrics(tmp_path / "bf16")[-1]["loss"]
    assert other == pytest.approx(one, rel=0.02)


def test_tensorboard_gets_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_here(tmp_path / "run", max_steps=3, report_to=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "run" / "hf_tiny")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(line["step"], pytest.approx(line["loss"])) for line in metrics(tmp_path / "run")]
    assert len(shown) == 3


def test_a_tracker_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"--report_to tensorbord: not installed.*tensorboard"):
        train_here(tmp_path / "run", max_steps=1, report_to=["tensorbord"])


@pytest.mark.slow
def test_the_written_recipe_reproduces_the_run(tmp_path):
    assert tiny_run.toy(tmp_path / "first", max_steps=6, seed=7, learning_rate=3e-3).code == 0
    recipe = yaml.safe_load((tmp_path / "first" / "recipe.yaml").read_text())
    assert (recipe["seed"], recipe["learning_rate"], recipe["resume_from_checkpoint"]) == (7, 3e-3, None)
    assert recipe.keys() | {"given_settings"} == {field.name for field in dataclasses.fields(tiny_run.ToyRecipe)}
    again = [str(tmp_path / "first" / "recipe.yaml"), "--output_dir", str(tmp_path / "again")]
    assert tiny_run.start(tmp_path, tiny_run.run_toy, *again).wait().code == 0
    tiny_run.assert_same_training(tmp_path / "first" / "checkpoint-6", tmp_path / "again" / "checkpoint-6")


@pytest.mark.slow
def test_a_launched_recipe_uses_all_cores_and_its_model_loads(tmp_path):
    """`accelerate launch` sets OMP_NUM_THREADS=1; the run must undo that."""
    text, run = tiny_run.write_text(tmp_path / "text.txt"), tmp_path / "run"
    flags = ["--train_file", text, "--output_dir", run, "--max_steps", 4, "--max_seq_length", 32, "--vocab_size", 300]
    more = ["--per_device_train_batch_size", 4, "--logging_steps", 2]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", 1, tiny_run.RECIPE]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [str(part) for part in [*launch, *flags, *more]]
    ended = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, CORES),
    )
    assert ended.returncode == 0, ended.stderr
    results = json.loads((run / "all_results.json").read_text())
    assert results["num_threads"] == len(CORES)
    assert f"minutes, {results['train_steps']} steps" in ended.stdout
    assert "push it: hf-tiny push" in ended.stdout

    from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run)
    inputs = tokenizer("the old ship 나는 어제", return_tensors="pt")
    assert tokenizer.unk_token_id not in inputs["input_ids"]
    assert AutoModel.from_pretrained(run)(**inputs).last_hidden_state.shape == (*inputs["input_ids"].shape, 128)
    whole = AutoModelForPreTraining.from_pretrained(run)
    assert whole.config.vocab_size == len(tokenizer)
    saved = tiny_run.weights(run)
    state = whole.state_dict()
    assert all(torch.equal(state[name], value) for name, value in saved.items())
