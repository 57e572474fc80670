"""Tiny runs for the tests, in this process or in processes that can be killed.

Importing torch and transformers takes seconds, so the processes are forked from a server that has done it once.
"""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers.utils import logging

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, checkpoint, hub, tokenizer
from hf_tiny.data.collate import Batches, MaskTokens
from hf_tiny.metrics import Evaluation, collect_electra, compute_electra
from hf_tiny.train import Callback, TrainConfig, run, train

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "pretrain_electra.py"
LENGTH, VOCABULARY = 16, 64
SPECIAL = SimpleNamespace(pad_token_id=0, cls_token_id=2, sep_token_id=3, mask_token_id=4)


def _setting(default):
    return field(default=default, metadata={"help": "For tests."})


@dataclass(frozen=True, kw_only=True)
class ToyRecipe(TrainConfig):
    """A toy ELECTRA on sequences that count upwards."""

    max_steps: int = _setting(12)
    per_device_train_batch_size: int = _setting(8)
    per_device_eval_batch_size: int = _setting(8)
    learning_rate: float = _setting(2e-3)
    logging_steps: int = _setting(1)
    save_steps: int = _setting(4)
    eval_steps: int = _setting(0)
    save_total_limit: int | None = _setting(None)
    dropout: float = _setting(0.1)
    rows: int = _setting(100)
    held_out_rows: int = _setting(20)
    layers: int = _setting(1)
    pause: float = _setting(0.0)
    nan_at: int = _setting(0)
    kill_in: str | None = _setting(None)
    full_disk_at: int = _setting(0)


def rows(count: int, seed: int = 0) -> datasets.Dataset:
    """[CLS] n n+1 n+2 ... [SEP] n' n'+1 ... [SEP]: easy to learn."""
    random_numbers = np.random.default_rng(seed)
    ids = np.full((count, LENGTH), SPECIAL.sep_token_id, dtype=np.int32)
    ids[:, 0] = SPECIAL.cls_token_id
    half = LENGTH // 2
    for first, last in ((1, half), (half + 1, LENGTH - 1)):
        start = 7 * random_numbers.integers(0, 8, (count, 1))
        ids[:, first:last] = 5 + (start + np.arange(last - first)) % (VOCABULARY - 5)
    return datasets.Dataset.from_dict({"input_ids": ids, "segment_start": np.full(count, half + 1, dtype=np.int32)})


def model(dropout: float = 0.0, layers: int = 1, seed: int = 0) -> HfTinyElectraForPreTraining:
    torch.manual_seed(seed)
    return HfTinyElectraForPreTraining(
        HfTinyElectraConfig(
            vocab_size=VOCABULARY,
            embedding_size=32,
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            generator_size=0.5,
            discriminator_weight=10.0,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def batches(recipe: ToyRecipe) -> Batches:
    mask = MaskTokens(SPECIAL, 0.2, recipe.seed)
    return Batches(rows(recipe.rows), mask, recipe.per_device_train_batch_size, recipe.seed)


def evaluation(recipe: ToyRecipe) -> Evaluation:
    mask = MaskTokens(SPECIAL, 0.2, recipe.seed)
    held_out = Batches(
        rows(recipe.held_out_rows, 1), mask, recipe.per_device_eval_batch_size, recipe.seed, shuffle=False
    )
    return Evaluation(held_out, collect_electra, compute_electra(10.0))


class Trouble(Callback):
    """Slows the run down, or breaks it, as the recipe says."""

    needs_whole_weights = False

    def __init__(self, recipe: ToyRecipe):
        self.recipe = recipe

    def on_step_end(self, state, model) -> None:
        time.sleep(self.recipe.pause)
        if state.step == self.recipe.nan_at:
            model.discriminator_head[0].weight.data.fill_(torch.nan)
        if state.step == self.recipe.full_disk_at:
            fill_disk()


def toy_main(recipe: ToyRecipe) -> None:
    if recipe.kill_in:
        kill_in(*recipe.kill_in.split(":"))
    if recipe.full_disk_at < 0:
        fill_disk()
    hub.draw_curves = without_curves
    toy = model(recipe.dropout, recipe.layers)
    train(toy, batches(recipe), recipe, evaluate=evaluation(recipe), callbacks=[Trouble(recipe)])


def fill_disk() -> None:
    """From now on a file cannot grow beyond 20 kB: writing fails as it does on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def without_curves(*args) -> None:
    """Drawing takes longer than a toy run: test_hub.py and the runs of the recipe draw."""


def kill_in(place: str, count: str) -> None:
    """The process kills itself when `place` (a function that saving calls) is called for the count-th time."""
    module, name = {
        "torch.save": (torch, "save"),
        "digest": (checkpoint, "_digest"),
        "replace": (os, "replace"),
        "rmtree": (checkpoint.shutil, "rmtree"),
    }[place]
    original, calls = getattr(module, name), iter(range(1, 1_000_000))

    def deadly(*args, **kwargs):
        if next(calls) == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(module, name, deadly)


def train_here(output_dir: Path, callbacks=(), toy=None, evaluate=None, **settings) -> dict[str, float]:
    """A run in this process; returns its results. Without `evaluate=True` it does not evaluate."""
    AcceleratorState._reset_state(True)
    recipe = ToyRecipe(output_dir=str(output_dir), **settings)
    toy = model(recipe.dropout, recipe.layers) if toy is None else toy
    judge = evaluation(recipe) if evaluate else None
    with mock.patch.object(hub, "draw_curves", without_curves):
        return train(toy, batches(recipe), recipe, evaluate=judge, callbacks=list(callbacks))


# Processes


@dataclass
class Ended:
    code: int
    out: str
    err: str


class Started:
    def __init__(self, process, folder: Path):
        self.process, self.folder, self.pid = process, folder, process.pid

    def wait(self, seconds: float = 120) -> Ended:
        self.process.join(seconds)
        if self.process.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)
            self.process.join()
            raise AssertionError(f"The run did not end within {seconds} s.\n{(self.folder / 'err').read_text()}")
        texts = [(self.folder / name).read_text(errors="replace") for name in ("out", "err")]
        return Ended(self.process.exitcode, *texts)

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["hf_tiny.pictures", "hf_tiny.data.corpus", "hf_tiny.data.windows", "transformers.models.bert.modeling_bert"]
)


def start(folder: Path, function: Callable, *args, env: dict[str, str] | None = None) -> Started:
    """Call `function(*args)` in a new process, whose output goes into files in `folder`."""
    folder = folder / f"process-{random.getrandbits(40):x}"
    folder.mkdir(parents=True)
    process = _server.Process(target=_enter, args=(folder, env or {}, function, args))
    process.start()
    return Started(process, folder)


def _enter(folder: Path, env: dict[str, str], function: Callable, args: tuple) -> None:
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
    os.environ.update(env)
    datasets.config.HF_DATASETS_CACHE = tokenizer.HF_DATASETS_CACHE = folder.parent / "datasets_cache"
    logging.disable_progress_bar()
    try:
        function(*args)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def run_toy(*flags) -> None:
    sys.argv = ["toy.py", *flags]
    run(toy_main, ToyRecipe)


def interrupted(*flags) -> None:
    """Ctrl-C while the data is prepared."""
    sys.argv = ["toy.py", *flags]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told the tests to ignore it
    run(lambda recipe: signal.raise_signal(signal.SIGINT), ToyRecipe)


def run_recipe(*flags) -> None:
    """What `python recipes/pretrain_electra.py` does."""
    run_named("pretrain_electra", *flags)


def run_named(name: str, *flags) -> None:
    """What `python recipes/NAME.py` does."""
    path = str(ROOT / "recipes" / f"{name}.py")
    sys.argv = [path, *flags]
    sys.path.insert(0, str(ROOT / "recipes"))
    runpy.run_path(path, run_name="__main__")


def run_plain(name: str, *flags) -> None:
    """The same without pictures."""
    hub.draw_curves = hub.draw_confusion = without_curves
    run_named(name, *flags)


def run_killed(place: str, name: str, *flags) -> None:
    """The same, until `place` is reached, as `kill_in` understands it."""
    kill_in(*place.split(":"))
    run_plain(name, *flags)


def flags(**settings) -> list[str]:
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def start_toy(output_dir: Path, **settings) -> Started:
    return start(output_dir.parent, run_toy, *flags(output_dir=output_dir, **settings))


def toy(output_dir: Path, **settings) -> Ended:
    """A run of the toy in a process of its own."""
    return start_toy(output_dir, **settings).wait()


def recipe(folder: Path, *arguments) -> Ended:
    """A run of the recipe in a process of its own."""
    return start(folder, run_recipe, *map(str, arguments)).wait()


def start_group(
    output_dir: Path, processes: int, function: Callable = run_toy, env: dict[str, str] | None = None, **settings
) -> list[Started]:
    """The processes that torchrun would start."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(
            output_dir.parent,
            function,
            *flags(output_dir=output_dir, **settings),
            env={
                name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank, **(env or {})}.items()
            },
        )
        for rank in range(processes)
    ]


def group(output_dir: Path, processes: int, **settings) -> list[Ended]:
    return [started.wait() for started in start_group(output_dir, processes, **settings)]


# What a run leaves


def metrics(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def logged_steps(output_dir: Path) -> list[int]:
    """The steps of the whole training lines, also while the run goes on."""
    path = output_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line["step"] for line in found if "loss" in line]


def wait_for_step(started: Started, output_dir: Path, step: int, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while max(logged_steps(output_dir), default=0) < step:
        assert time.monotonic() < end and started.process.is_alive(), (started.folder / "err").read_text()
        time.sleep(0.005)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def largest_difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def assert_same_training(one: Path, other: Path) -> None:
    """Weights and the optimiser's state of two checkpoints, bit for bit."""
    assert largest_difference(one, other) == 0
    states = [torch.load(folder / "optimizer.pt", weights_only=True) for folder in (one, other)]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for key, state in states[0]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, states[1]["state"][key][name]), (key, name)
    assert states[0]["param_groups"] == states[1]["param_groups"]


# Text

_ENGLISH = "the old ship sails under a red moon while quiet birds carry seven letters over cold green hills"
_KOREAN = "나는 어제 바다에서 작은 배를 보았다 그리고 오늘 학교에 가서 친구와 책을 읽었다 하늘이 맑고 바람이 분다"


def write_text(path: Path, lines: int = 400, seed: int = 0) -> Path:
    """Sentences in English and Korean, the same on every machine."""
    numbers = random.Random(seed)
    words = (_ENGLISH.split(), _KOREAN.split())
    text = (" ".join(numbers.choices(words[line % 2], k=12)) + "." for line in range(lines))
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def recipe_module():
    """recipes/pretrain_electra.py as a module."""
    spec = importlib.util.spec_from_file_location("pretrain_electra", RECIPE)
    sys.modules["pretrain_electra"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
