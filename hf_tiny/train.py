"""The only training loop: `train(model, batches, config, evaluate=..., callbacks=...)`."""

import dataclasses
import inspect
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, gather_object, send_to_device, set_seed
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers.utils.logging import disable_progress_bar

from . import arguments, checkpoint, hub
from .arguments import flag
from .data.collate import Source
from .errors import InputError
from .optim import build_optimizer, drop_frozen_gradients, learning_rate_factor, set_learning_rate, warmup_length

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The flags that every recipe has, named as in transformers.TrainingArguments."""

    SIZES: ClassVar[dict[str, dict]] = {}  # a recipe's presets: --size name -> flags that it sets

    output_dir: str = flag("runs/out", "Where the run leaves everything.")
    max_steps: int = flag(-1, "Optimiser steps; above 0 it wins over --num_train_epochs.")
    num_train_epochs: float = flag(3.0, "Passes over the training data.")
    per_device_train_batch_size: int = flag(32, "Samples in a micro-batch.")
    per_device_eval_batch_size: int = flag(32, "Samples in an evaluation batch.")
    gradient_accumulation_steps: int = flag(1, "Micro-batches per process and step.")
    learning_rate: float = flag(5e-4, "Peak learning rate.")
    lr_scheduler_type: str = flag("linear", "linear, cosine, constant, inverse_sqrt or warmup_stable_decay.")
    warmup_steps: float = flag(0.1, "Steps, or a share of the run when below 1; at most a tenth of a short run.")
    weight_decay: float = flag(0.01, "AdamW's decay of matrices; biases and norms do not decay.")
    adam_beta1: float = flag(0.9, "AdamW's beta 1.")
    adam_beta2: float = flag(0.999, "AdamW's beta 2.")
    adam_epsilon: float = flag(1e-6, "AdamW's epsilon.")
    max_grad_norm: float = flag(1.0, "Clip the gradient's norm; 0 does not clip.")
    seed: int = flag(42, "Of the weights, the data order, the masks and dropout.")
    seeds: int = flag(1, "Run this many seeds, each in its own folder, and report the mean and the deviation.")
    bf16: bool = flag(False, "bfloat16 autocast.")
    fp16: bool = flag(False, "float16 autocast (GPUs only).")
    gradient_checkpointing: bool = flag(False, "Less memory, more time.")
    torch_compile: bool = flag(False, "torch.compile the model.")
    logging_steps: int = flag(50, "Steps between lines of metrics.jsonl.")
    eval_steps: int = flag(500, "Steps between evaluations; 0 evaluates at the end only.")
    save_steps: int = flag(500, "Steps between checkpoints; 0 saves at the end only.")
    save_total_limit: int | None = flag(2, "Keep this many checkpoints.")
    load_best_model_at_end: bool = flag(False, "End with the best evaluated weights instead of the last.")
    metric_for_best_model: str = flag("eval_loss", "What best means.")
    greater_is_better: bool = flag(False, "Whether a higher metric_for_best_model is better.")
    early_stopping_patience: int | None = flag(None, "Stop after this many evaluations without a better one.")
    resume_from_checkpoint: str | None = flag(None, "`latest`, or the path of a checkpoint.")
    report_to: list[str] | None = flag(None, "Trackers: tensorboard, trackio, wandb.")
    push_to_hub: bool = flag(False, "Push the finished model.")
    hub_model_id: str | None = flag(None, "user/name on the Hub; by default the folder's name under your own.")
    hub_private_repo: bool = flag(False, "Make the repository private.")
    hub_strategy: str = flag("end", "end pushes the finished model, every_save also each checkpoint, while training.")
    hub_revision: str | None = flag(None, "The branch to push to; it is made when it does not exist.")
    hub_license: str | None = flag(None, "The licence that the card names, such as apache-2.0.")
    hub_language: list[str] | None = flag(None, "The languages that the card names, such as en ko.")


# What must not change when a run goes on: all else may (how often to log, where to push, how long to train).
IDENTITY = ("per_device_train_batch_size", "seed", "bf16", "fp16")
POSITIVE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "logging_steps",
    "num_train_epochs",
    "seeds",
)
PASSED_ON = 5.0  # seconds in which a launcher passes on a signal that SLURM, for one, has sent to all processes as well


@dataclass
class TrainState:
    """What changes as the run goes on, and is saved with it."""

    step: int = 0
    max_steps: int = 0
    warmup_steps: int = 0
    micro_batches_per_step: int = 1
    tokens: int = 0
    seconds: float = 0.0
    best_metric: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0


class Callback:
    """Averaging, unfreezing, warnings: what some runs need and others do not."""

    replaces_weights = False  # whether the model is another one after `on_train_end`, and is evaluated again
    needs_whole_weights = True  # whether it cannot work on a model in shards, of which each process has a part (FSDP)

    def on_step_end(self, state: TrainState, model: nn.Module) -> None: ...

    def on_evaluate(self, state: TrainState, metrics: dict[str, float]) -> None: ...

    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        """Before the finished model is saved; what it returns joins the results."""
        return {}

    def on_save(self, folder: Path) -> None:
        """Into a checkpoint goes what must be there when the run goes on."""

    def on_load(self, folder: Path) -> None:
        """The run goes on from this checkpoint."""


class Timers:
    """Seconds by what they were spent on."""

    def __init__(self):
        self.spent = dict.fromkeys(("start", "data", "model", "optimizer", "loop", "evaluate", "save"), 0.0)
        self._mark = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last lap was spent on `name`."""
        now = time.perf_counter()
        self.spent[name] += now - self._mark
        self._mark = now

    def in_steps(self) -> float:
        return max(1e-9, sum(self.spent[name] for name in ("data", "model", "optimizer", "loop")))

    def shares(self) -> dict[str, float]:
        """Of the time in steps, how much went into waiting for data and how much outside model and optimiser."""
        outside = self.spent["data"] + self.spent["loop"]
        return {
            "data_wait_share": self.spent["data"] / self.in_steps(),
            "outside_model_share": outside / self.in_steps(),
        }


def run(main: Callable, recipe_class: type, argv: Sequence[str] | None = None, *, repeat: bool = True) -> None:
    """Parse the flags, start the processes rightly, call `main(recipe)`; people see errors without a traceback.

    repeat: call it for each of `--seeds`; else that is up to `main`.
    """
    try:
        recipe = arguments.parse(recipe_class, argv)
        start(recipe)
        run_seeds(main, recipe) if repeat and recipe.seeds > 1 else main(recipe)
        PartialState().destroy_process_group()
    except InputError as error:
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nStopped outside the training loop: there was nothing to save.", file=sys.stderr, flush=True)
        sys.exit(130)


def run_seeds(main: Callable, recipe: TrainConfig) -> dict[str, float]:
    """The same run with several seeds; all_results.json then holds the mean and the deviation of every figure."""
    results = []
    for seed in range(recipe.seed, recipe.seed + recipe.seeds):
        set_seed(seed)
        folder = Path(recipe.output_dir) / f"seed-{seed}"
        results.append(main(dataclasses.replace(recipe, seed=seed, seeds=1, output_dir=str(folder))))
    summary: dict[str, float] = {"seeds": recipe.seeds}
    for name in results[0]:
        values = [result[name] for result in results]
        summary |= {name: float(np.mean(values)), f"{name}_std": float(np.std(values, ddof=min(1, recipe.seeds - 1)))}
    if PartialState().is_main_process:
        (Path(recipe.output_dir) / "all_results.json").write_text(json.dumps(summary, indent=2))
        print(f"\n{recipe.seeds} seeds, mean and deviation:")
        for name in summary:
            if name.startswith(("eval_", "test_", "train_runtime")) and not name.endswith("_std"):
                print(f"  {name:34s} {summary[name]:>12.4f} ± {summary[f'{name}_std']:.4f}")
    return summary


def start(config: TrainConfig) -> None:
    """Before anything else: the right number of processes, all cores, the seed. Reads the launcher's variables."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpu = torch.accelerator.is_available()
    processes = PartialState(
        cpu=not gpu, timeout=timedelta(days=1)
    ).num_processes  # packing and pushing take their time
    if launched != processes:
        raise InputError(
            f"The launcher started {launched} processes, but accelerate sees {processes}: each would train alone and write "
            "to the same folder. Launch with `--config_file recipes/accelerate/cpu_2proc.yaml` (or multi_gpu.yaml)."
        )
    # `accelerate launch` sets MASTER_ADDR for several processes; for CPUs it then starts one, without WORLD_SIZE.
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        raise InputError(
            "accelerate was asked for several processes and started only one. On CPUs launch with "
            "`--config_file recipes/accelerate/cpu_2proc.yaml`, or with `--num_processes 1`."
        )
    for name in POSITIVE:
        if getattr(config, name) <= 0:
            raise InputError(f"--{name} {getattr(config, name)}: it must be above 0.")
    if config.push_to_hub and config.seeds > 1:
        raise InputError(
            "--push_to_hub with several --seeds: each would replace the one before. Leave it out, and push the one you choose: "
            f"python -m hf_tiny.hub push {config.output_dir}/seed-{config.seed} --hub_model_id you/name"
        )
    if config.hub_strategy not in ("end", "every_save"):
        raise InputError(f"--hub_strategy {config.hub_strategy}: choose end or every_save.")
    learning_rate_factor(config.lr_scheduler_type, 0, 1, 1)  # an unknown schedule is refused now, not after the packing
    if config.fp16 and not gpu:
        raise InputError("--fp16 needs a GPU: on a CPU train in float32, or with --bf16.")
    # The launcher sets OMP_NUM_THREADS=1, which would leave all but one core idle.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    set_seed(config.seed)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_tiny").setLevel(logging.INFO if PartialState().is_main_process else logging.ERROR)
    if config.resume_from_checkpoint is None:
        # Before hours of preparing the data.
        checkpoint.on_main(lambda: checkpoint.refuse_foreign_run(Path(config.output_dir)))
    disable_progress_bar()  # the loop shows its own


def train(
    model: nn.Module,
    batches: Source,
    config: TrainConfig,
    *,
    evaluate=None,
    test=None,
    groups: list[dict] | None = None,
    callbacks: Sequence[Callback] = (),
    processor=None,
    card: dict | None = None,
) -> dict[str, float]:
    """Train `model` on `batches[0], batches[1], ...` and leave in `config.output_dir` all that a run leaves.

    evaluate, test: an Evaluation for every `eval_steps`, and one for the end only.
    groups: the optimiser's, where some parameters have another rate or start later (see optim.py).
    processor: the tokenizer or image processor that is saved beside the model.
    card: what the model card should say of the data and the task.
    """
    parts = (model, batches, config, evaluate, test, groups, callbacks, processor, card)
    if not PartialState().is_main_process:
        return Run(*parts).loop()
    with checkpoint.locked(Path(config.output_dir)):
        return Run(*parts).loop()


class Run:
    def __init__(self, model, batches, config: TrainConfig, evaluate, test, groups, callbacks, processor, card):
        self.config, self.batches, self.evaluate, self.callbacks = config, batches, evaluate, callbacks
        self.test, self.processor, self.card = test, processor, card or {}
        self.output_dir = Path(config.output_dir)
        precision = "bf16" if config.bf16 else "fp16" if config.fp16 else "no"
        check_trackers(config.report_to or [])
        self.accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),
            mixed_precision=precision,
            log_with=config.report_to,
            project_dir=config.output_dir,
        )
        self.main = self.accelerator.is_main_process
        self.world = self.accelerator.num_processes
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.divides = divides_by_count(model)
        self.flops = flops_per_token(model, batches[self.accelerator.process_index], self.accelerator.device)
        if config.torch_compile:
            model.compile()
        optimizer = build_optimizer(model, config, groups)
        self.model_class, weights = type(model), len(list(model.parameters()))
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.sharded = self.accelerator.is_fsdp2
        self.refuse_to_shard(tied=len(list(model.parameters())) == weights)
        self.state = self.new_state()
        self.timers = Timers()
        self.sums: dict[str, Tensor] = {}
        self.asked_to_stop = self.stop_signal = 0  # what this process was sent, and what all processes agreed on
        self.asked_at = math.inf
        self.saved: Path | None = None  # the checkpoint of this very step, if there is one
        place = (self.output_dir, config.hub_model_id, config.hub_private_repo, config.hub_revision)
        self.pusher = hub.Pusher(*place) if self.main and config.push_to_hub else None
        self.begin()
        self.first_step, self.first_tokens = self.state.step, self.state.tokens
        self.logged = (self.state.step, self.state.seconds, self.state.tokens)

    @property
    def bare_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)

    def new_state(self) -> TrainState:
        config = self.config
        per_step = self.world * config.gradient_accumulation_steps
        steps = config.max_steps
        if steps <= 0:
            steps = math.ceil(config.num_train_epochs * len(self.batches) / per_step)
        warmup = warmup_length(config.warmup_steps, steps)
        return TrainState(max_steps=steps, warmup_steps=warmup, micro_batches_per_step=per_step)

    # --- starting and resuming

    def refuse_to_shard(self, tied: bool) -> None:
        """What FSDP would do wrongly, mostly without a word."""
        if self.accelerator.distributed_type != DistributedType.FSDP:
            return
        whole = [type(callback).__name__ for callback in self.callbacks if callback.needs_whole_weights]
        if not self.sharded:
            raise InputError("FSDP 1 is not supported: set `fsdp_version: 2`, as in recipes/accelerate/fsdp.yaml.")
        if whole or not tied:
            problem = f"{', '.join(whole)} needs whole weights" if whole else "it would untie weights that are one"
            raise InputError(f"FSDP: {problem}. Launch with recipes/accelerate/multi_gpu.yaml or multi_node.yaml.")

    def begin(self) -> None:
        """Resume or refuse; then write down what this run is. Dropout differs between processes, weights do not."""
        torch.manual_seed(self.config.seed + self.accelerator.process_index)
        self.agree()
        found = checkpoint.on_main(self.find)
        if found is not None:
            checkpoint.all_see(found / checkpoint.MANIFEST)
            self.load(found)
        if self.main:
            checkpoint.sweep(self.output_dir)
            checkpoint.abandon_after(self.output_dir, self.state.step)
            self.keep_log_until(self.state.step)
            again = dataclasses.replace(self.config, resume_from_checkpoint=None)
            arguments.write(again, self.output_dir / "recipe.yaml")
        if self.config.report_to:
            self.accelerator.init_trackers("hf_tiny", config=flat(dataclasses.asdict(self.config)))

    def agree(self) -> None:
        """Machines that prepare the data each by itself must come to the same."""
        first, *others = gather_object([self.identity()])
        for rank, other in enumerate(others, start=1):
            for name in first:
                if other[name] != first[name]:
                    raise InputError(
                        f"Process {rank} has {name} = {other[name]}, process 0 has {first[name]}. Give every machine the "
                        "same flags and files (and for the built-in data the same packages)."
                    )
        replaced = any(callback.replaces_weights for callback in self.callbacks)
        if self.sharded or self.config.load_best_model_at_end or replaced:
            checkpoint.all_see(self.output_dir / checkpoint.LOCK)

    def find(self) -> Path | None:
        """The checkpoint to go on from. A new run never writes over an old one."""
        wanted, found = self.config.resume_from_checkpoint, None
        if wanted is not None:
            found = checkpoint.find(self.output_dir, wanted)
            if found is None:
                logger.warning(f"{self.output_dir} holds no whole checkpoint yet: starting from step 0.")
        if wanted is None or (found is not None and found.resolve().parent != self.output_dir.resolve()):
            checkpoint.refuse_foreign_run(self.output_dir)
        return found

    def identity(self) -> dict:
        """What a checkpoint belongs to. A resume with another model or other data is refused, field by field."""
        model = {f"model.{key}": value for key, value in self.bare_model.config.to_dict().items()}
        drop = ("model.transformers_version", "model.auto_map", "model.architectures", "model.dtype")
        run = {name: getattr(self.config, name) for name in IDENTITY}
        groups = [[len(group["params"]), group["factor"], group["start"]] for group in self.optimizer.param_groups]
        known = {k: v for k, v in model.items() if k not in drop}
        return {**known, **run, "data": self.batches.fingerprint, "parameters, rate factors and starts": groups}

    def load(self, path: Path) -> None:
        saved = json.loads((path / "trainer_state.json").read_text())
        now = json.loads(json.dumps(self.identity()))
        for name in now:
            if now[name] != saved["identity"].get(name):
                raise InputError(
                    f"{path} was made with {name} = {saved['identity'].get(name)}, this run has {now[name]}. "
                    "Resume with the same settings and data, or start a new --output_dir."
                )
        state = TrainState(**saved["state"])
        if state.micro_batches_per_step != self.state.micro_batches_per_step:
            per_step = state.micro_batches_per_step
            fits = [n for n in range(1, per_step + 1) if per_step % n == 0]
            raise InputError(
                f"{path} took {per_step} micro-batches per step; {self.world} processes x --gradient_accumulation_steps "
                f"{self.config.gradient_accumulation_steps} is {self.state.micro_batches_per_step}. Numbers of processes "
                f"that fit: {fits}; here use --gradient_accumulation_steps {per_step / self.world:g}."
                if per_step % self.world == 0
                else f"{path} took {per_step} micro-batches per step, which {self.world} processes cannot share: "
                f"launch {' or '.join(map(str, fits))}."
            )
        state.max_steps, state.warmup_steps = self.state.max_steps, self.state.warmup_steps
        best = self.output_dir / f"checkpoint-{state.best_step}"
        if self.config.load_best_model_at_end and state.best_step is not None and not best.is_dir():
            state.best_metric, state.best_step, state.evaluations_since_best = None, None, 0
        self.state, self.saved = state, path.resolve()
        self.batches.load_state_dict(saved.get("data", {}))
        device = self.accelerator.device
        checkpoint.load_weights(self.bare_model, path / "model.safetensors")
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        checkpoint.load_optimizer(path, self.bare_model, self.optimizer)
        for group, current in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(current)  # a rate or decay that was changed for the resume holds
        rng = path / f"rng-{self.accelerator.process_index}-of-{self.world}.pt"
        if rng.exists():
            states = torch.load(rng, weights_only=True)
            torch.set_rng_state(states["cpu"])
            if "device" in states:
                torch.get_device_module(device).set_rng_state(states["device"])
        else:
            torch.manual_seed(self.config.seed + 1_000_003 * state.step + self.accelerator.process_index)
        for callback in self.callbacks:
            callback.on_load(path)
        logger.info(f"Resumed from {path} at step {state.step}.")

    def keep_log_until(self, step: int) -> None:
        """A resumed run does not log a step twice."""
        path = self.output_dir / "metrics.jsonl"
        if path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            draft = path.with_name(".draft-metrics.jsonl")
            draft.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
            os.replace(draft, path)

    def ask_to_stop(self, number, frame) -> None:
        """The first signal stops after this step, though it may come twice; a later one ends the process at once."""
        now = time.monotonic()
        if now - self.asked_at > PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked_to_stop, self.asked_at = number, min(now, self.asked_at)
        if self.world == 1:
            self.stop_signal = number

    # --- the loop

    def loop(self) -> dict[str, float]:
        handlers = {number: signal.signal(number, self.ask_to_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            metrics = self.steps()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.finish(metrics)

    def steps(self) -> dict[str, float]:
        """The steps that are left; returns the last evaluation."""
        state, config = self.state, self.config
        self.model.train()
        bar = tqdm(
            total=state.max_steps,
            initial=state.step,
            disable=not self.main,
            desc="train",
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )
        before, began = state.seconds, time.perf_counter()
        metrics: dict[str, float] = {}
        with Prefetcher(
            self.batches, self.accelerator, state.step, config.gradient_accumulation_steps
        ) as micro_batches:
            self.timers.lap("start")
            while state.step < state.max_steps and not self.stop_signal:
                outputs, batch, norm = self.step(micro_batches)
                state.seconds = before + time.perf_counter() - began
                bar.update()
                last = state.step == state.max_steps
                if state.step % config.logging_steps == 0 or last or state.step == self.first_step + 1:
                    self.log(bar, outputs, batch, norm)
                for callback in self.callbacks:
                    callback.on_step_end(state, self.bare_model)
                self.timers.lap("loop")
                if self.evaluate and (last or (config.eval_steps > 0 and state.step % config.eval_steps == 0)):
                    metrics = self.evaluate_and_judge(bar)
                if last or (config.save_steps > 0 and state.step % config.save_steps == 0):
                    self.save()
                if config.early_stopping_patience and state.evaluations_since_best >= config.early_stopping_patience:
                    logger.info(
                        f"No better {config.metric_for_best_model} for {state.evaluations_since_best} evaluations."
                    )
                    break
        bar.close()
        if self.stop_signal:
            self.save()
            if self.main:
                print(
                    f"\nStopped by {signal.Signals(self.stop_signal).name}; checkpoint-{state.step} is saved. Go on with: "
                    f"--output_dir {self.output_dir} --resume_from_checkpoint latest",
                    file=sys.stderr,
                )
            sys.exit(0)
        return metrics

    def step(self, micro_batches: "Prefetcher"):
        """One optimiser step: every micro-batch's loss is its sum divided by the step's total count, so the gradients
        are those of one big batch, whatever the accumulation and the number of processes."""
        state, config = self.state, self.config
        group = next(micro_batches)
        self.timers.lap("data")
        counts = torch.stack([batch["num_items_in_batch"] for batch in group]).sum(0)
        counts = self.sum_over_processes(counts)
        set_learning_rate(self.optimizer, config, state.step, state.max_steps)
        self.timers.lap("loop")
        for batch in group[:-1]:
            with self.accelerator.no_sync(self.model):
                self.forward_backward(batch, counts)
        outputs = self.forward_backward(group[-1], counts)
        drop_frozen_gradients(self.optimizer, state.step)
        limit = config.max_grad_norm or math.inf
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), limit))
        self.timers.lap("model")
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            saved = checkpoint.checkpoints(self.output_dir)
            raise InputError(
                f"The gradient is {norm} at step {state.step + 1}: the loss has become NaN or infinite. The last good "
                f"checkpoint is {saved[-1] if saved else 'none yet'}. Try a lower --learning_rate or a longer warm-up."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.timers.lap("optimizer")
        state.step += 1
        state.tokens += int(counts[-1])
        return outputs, group[-1], norm

    def forward_backward(self, batch: dict, counts: Tensor):
        with self.accelerator.autocast():
            outputs = call(self.model, batch, counts if self.divides else None)
        if not self.divides:
            outputs.loss = outputs.loss * (batch["num_items_in_batch"][0] / counts[0])
        # DDP averages the gradients over the processes; the loss is already a share of the whole.
        self.accelerator.backward(outputs.loss * self.world)
        for name, value in outputs.items():
            if torch.is_tensor(value) and value.ndim == 0:
                self.sums[name] = self.sums.get(name, 0) + value.detach()
        return outputs

    def sum_over_processes(self, counts: Tensor) -> Tensor:
        """Also agrees on stopping: a signal that reached one process stops them all at the same step."""
        if self.world == 1:
            return counts
        message = torch.cat([counts.double(), counts.new_tensor([self.asked_to_stop]).double()])
        message = self.accelerator.reduce(message, "sum")
        if message[-1]:
            self.stop_signal = self.asked_to_stop or signal.SIGTERM
        return message[:-1].to(counts.dtype)

    # --- reporting

    def log(self, bar: tqdm, outputs, batch: dict, norm: float) -> None:
        """One line of metrics.jsonl: means over the steps since the last one, scores of this step's last micro-batch."""
        state = self.state
        sums = {name: self.accelerator.reduce(value, "sum") for name, value in self.sums.items()}
        self.sums = {}
        if not self.main:
            return
        steps, seconds = state.step - self.logged[0], state.seconds - self.logged[1]
        scores = self.evaluate.compute(self.evaluate.collect(outputs, batch)) if self.evaluate else {}
        line = {
            **scores,
            **{name: float(value) / steps for name, value in sums.items()},
            "learning_rate": max(group["lr"] for group in self.optimizer.param_groups),  # of those that learn now
            "grad_norm": norm,
            "tokens_per_second": (state.tokens - self.logged[2]) / seconds,
        }
        self.logged = (state.step, state.seconds, state.tokens)
        self.write(line)
        rate = f"{line['tokens_per_second']:,.0f}"
        bar.set_postfix(
            {"loss": f"{line['loss']:.3f}", "lr": f"{line['learning_rate']:.1e}", "tokens/s": rate}, refresh=False
        )

    def write(self, line: dict[str, float]) -> None:
        state = self.state
        epoch = self.batches.epoch(state.step * state.micro_batches_per_step)
        line = {"step": state.step, "epoch": round(epoch, 4), **line}
        with checkpoint.written("metrics.jsonl"), open(self.output_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        if self.config.report_to:
            self.accelerator.log(line, step=state.step)

    def evaluate_and_judge(self, bar: tqdm) -> dict[str, float]:
        """Evaluate, remember the best, tell the callbacks."""
        state, config = self.state, self.config
        metrics = {f"eval_{name}": value for name, value in self.evaluate(self.bare_model, self.accelerator).items()}
        value = metrics.get(config.metric_for_best_model)
        if value is None:
            raise InputError(f"--metric_for_best_model {config.metric_for_best_model}: there are {', '.join(metrics)}.")
        sign = 1 if config.greater_is_better else -1
        if state.best_metric is None or sign * value > sign * state.best_metric:
            state.best_metric, state.best_step, state.evaluations_since_best = value, state.step, 0
        else:
            state.evaluations_since_best += 1
        if self.main:
            self.write(metrics)
            shown = "  ".join(f"{name.removeprefix('eval_')} {value:.3f}" for name, value in metrics.items())
            bar.write(f"step {state.step} held out: {shown}", file=sys.stderr)
            for callback in self.callbacks:
                callback.on_evaluate(state, metrics)
        self.timers.lap("evaluate")
        if config.load_best_model_at_end and state.best_step == state.step:
            self.save()
        return metrics

    # --- saving

    def whole_weights(self) -> dict[str, Tensor]:
        """Of a model in shards they come together in the main process, tied ones as copies: these are left out."""
        tied = self.bare_model.all_tied_weights_keys if self.sharded else {}
        weights = self.accelerator.get_state_dict(self.model)
        return {name: weight for name, weight in weights.items() if name not in tied}

    def save_model(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """As the class that it is: FSDP makes it one of torch's, whose code would be saved in place of the model's."""
        plain = self.model_class.__new__(self.model_class)
        vars(plain).update(vars(self.bare_model))
        plain.save_pretrained(folder, state_dict=weights)
        if self.processor is not None:
            self.processor.save_pretrained(folder)

    def save(self) -> None:
        state = self.state
        target = self.output_dir / f"checkpoint-{state.step}"
        if self.saved == target.resolve():
            return
        rng = {"cpu": torch.get_rng_state()}
        if self.accelerator.device.type != "cpu":
            rng["device"] = torch.get_device_module(self.accelerator.device).get_rng_state()
        data = self.batches.state_dict(state.step * state.micro_batches_per_step)
        gathered = gather_object([(rng, data)])
        weights = self.whole_weights()
        with checkpoint.complete_or_absent(target, self.main) as draft:
            if self.sharded:
                self.accelerator.wait_for_everyone()  # until there is a draft
            if self.sharded or self.main:
                checkpoint.save_optimizer(draft, self.bare_model, self.optimizer, self.sharded)
            if self.main:
                self.save_model(draft, weights)
                for rank, (states, _) in enumerate(gathered):
                    torch.save(states, draft / f"rng-{rank}-of-{self.world}.pt")
                for callback in self.callbacks:
                    callback.on_save(draft)
                data = {name: value for _, part in gathered for name, value in part.items()}
                saved = {"state": dataclasses.asdict(state), "identity": self.identity(), "data": data}
                (draft / "trainer_state.json").write_text(json.dumps(saved, indent=1))
        if self.main:
            if self.pusher and self.config.hub_strategy == "every_save":
                self.pusher.save(target)
            spare = state.best_step if self.config.load_best_model_at_end else None
            checkpoint.rotate(self.output_dir, self.config.save_total_limit, spare)
        self.saved = target.resolve()
        self.accelerator.wait_for_everyone()
        self.timers.lap("save")

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """The finished model at the top of output_dir, its figures, curves and card."""
        state, config = self.state, self.config
        if config.load_best_model_at_end and state.best_step is not None:
            best = self.output_dir / f"checkpoint-{state.best_step}"
            checkpoint.load_weights(self.bare_model, best / "model.safetensors")
            metrics = {}
        figures = {}
        for callback in self.callbacks:
            figures |= callback.on_train_end(state, self.bare_model)
        if self.evaluate and (not metrics or any(callback.replaces_weights for callback in self.callbacks)):
            scores = self.evaluate(self.bare_model, self.accelerator)
            metrics = {f"eval_{name}": value for name, value in scores.items()}
        if self.test:
            scores = self.test(self.bare_model, self.accelerator)
            metrics |= {f"test_{name}": value for name, value in scores.items()}
        metrics |= figures
        results = {**metrics, **self.accounts()}
        weights = self.whole_weights()
        if self.main:
            with checkpoint.written("The finished model"):
                self.save_model(self.output_dir, weights)
                (self.output_dir / "all_results.json").write_text(json.dumps(results, indent=2))
                hub.draw_curves(self.output_dir)
                for evaluation in filter(None, (self.evaluate, self.test)):
                    evaluation.write_report(self.output_dir)
                hub.write_card(self.output_dir, self.bare_model, results, self.card, dataclasses.asdict(config))
            hub.print_summary(self.output_dir, results, self.card)
            if self.pusher:
                self.pusher.finish()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.wait_for_everyone()
        return results

    def accounts(self) -> dict[str, float]:
        """What the run cost, by its own timers (of this process, since it was started or resumed)."""
        state = self.state
        samples = state.step * state.micro_batches_per_step * self.batches.batch_size
        seconds = max(state.seconds, 1e-9)
        return {
            "train_steps": state.step,
            "train_runtime": round(state.seconds, 2),
            "train_tokens": state.tokens,
            "train_tokens_per_second": round(state.tokens / seconds, 1),
            "train_samples_per_second": round(samples / seconds, 2),
            "num_parameters": self.bare_model.num_parameters(),
            "num_processes": self.world,
            "num_threads": torch.get_num_threads(),
            **self.timers.shares(),
            # Backward costs twice the forward pass.
            "model_flops_per_second": 3 * self.flops * (state.tokens - self.first_tokens) / self.timers.in_steps(),
        }


class Prefetcher:
    """Prepares the next step's micro-batches in a thread while the model works on this one's."""

    def __init__(self, batches, accelerator: Accelerator, first_step: int, accumulation: int):
        self.batches, self.accelerator = batches, accelerator
        self.step, self.accumulation = first_step, accumulation
        # One core: with more, the thread would get a team of its own, which waits for work by spinning on the model's cores.
        self.thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> "Prefetcher":
        self.pending = self.thread.submit(self.load, self.step)
        return self

    def __exit__(self, *exception) -> None:
        self.thread.shutdown(wait=True, cancel_futures=True)

    def __next__(self) -> list[dict]:
        ready = self.pending.result()
        self.step += 1
        self.pending = self.thread.submit(self.load, self.step)
        return ready

    def load(self, step: int) -> list[dict]:
        """Of the k = processes x accumulation micro-batches of a step, process r takes r, r + processes, ..."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        first = step * world * self.accumulation + rank
        indices = range(first, first + world * self.accumulation, world)
        return [send_to_device(self.batches[index], self.accelerator.device, non_blocking=True) for index in indices]


def divides_by_count(model: nn.Module) -> bool:
    """hf_tiny's models divide their loss by the step's count; transformers' own give the mean over the micro-batch."""
    return "num_items_in_batch" in inspect.signature(model.forward).parameters


def call(model: nn.Module, batch: dict, counts: Tensor | None):
    """The model's outputs for a batch, without what is not for the model."""
    inputs = {name: value for name, value in batch.items() if name not in ("about", "num_items_in_batch")}
    return model(**inputs) if counts is None else model(**inputs, num_items_in_batch=counts)


def flops_per_token(model: nn.Module, batch: dict, device) -> float:
    """Floating-point operations per token of a forward pass; random numbers and gradients are left alone."""
    with torch.random.fork_rng(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(model.to(device), send_to_device(batch, device), None)
    return counter.get_total_flops() / int(batch["num_items_in_batch"][-1])


def check_trackers(names: Sequence[str]) -> None:
    """accelerate says nothing of a tracker that is not installed."""
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in available:
            raise InputError(
                f"--report_to {name}: not installed, or no tracker of accelerate. Installed: {', '.join(available) or 'none'}."
            )


def flat(settings: dict) -> dict:
    return {
        name: value if isinstance(value, int | float | str | bool) else str(value) for name, value in settings.items()
    }
