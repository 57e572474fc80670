"""The only training loop: `train(model, batches, config, evaluate=..., callbacks=...)`."""

import dataclasses
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from . import arguments, checkpoint, hub, processes, progress, report, tracking
from .arguments import Arguments
from .callbacks import Callback, SlowdownWarning, TrainState
from .config import TrainConfig
from .data.batches import Batch, Prefetcher, Source, num_items
from .errors import InputError, exit_codes
from .evaluation import BAR_INTERVAL, Evaluation, call, divides_by_count, flops_per_token
from .machine import best_products, float32_by, settle
from .optim import build_optimizer, drop_frozen_gradients, set_learning_rate
from .processes import on_main
from .signals import Stopped

logger = logging.getLogger(__name__)


# What must not change when a run goes on: all else may (how often to log, where to push, how long to train).
IDENTITY = ("per_device_train_batch_size", "seed", "bf16", "fp16")
MODEL_FLAGS = ("model_name_or_path", "config_name", "tokenizer_name", "discriminator_name", "generator_name")
NOT_IDENTITY = ("transformers_version", "auto_map", "architectures", "dtype")  # of the model's configuration


# Starting


def run(
    main: Callable, recipe_class: type[Arguments], argv: Sequence[str] | None = None, *, repeat: bool = True
) -> None:
    """Parse the flags, start the processes rightly, call `main(recipe)`; people see errors without a traceback.

    repeat: call it for each of `--seeds`; else that is up to `main`.
    """
    with exit_codes():
        execute(main, arguments.parse(recipe_class, argv), repeat=repeat)


def execute(main: Callable, recipe: Arguments, *, repeat: bool = True) -> dict[str, float]:
    """The same with flags that are parsed; errors are raised. Returns what `main` does."""
    seeds = recipe.seeds if repeat and isinstance(recipe, TrainConfig) else 1
    start(recipe) if isinstance(recipe, TrainConfig) else processes.start_processes()
    models = {name: vars(recipe)[name] for name in MODEL_FLAGS if vars(recipe).get(name)}
    recipe = dataclasses.replace(recipe, **on_main(lambda: {n: checkpoint.usable(m) for n, m in models.items()}))
    results = run_seeds(main, recipe) if seeds > 1 else main(recipe)
    PartialState().destroy_process_group()
    return results


def run_seeds(main: Callable, recipe) -> dict[str, float]:
    """The same run with several seeds; all_results.json then holds the mean and the deviation of every figure."""
    results = []
    written, again = Path(recipe.output_dir) / "recipe.yaml", dataclasses.replace(recipe, resume_from_checkpoint=None)
    if PartialState().is_main_process and not written.exists():
        arguments.write(again, written, [hub.command()])
    for seed in range(recipe.seed, recipe.seed + recipe.seeds):
        set_seed(seed)
        folder = Path(recipe.output_dir) / f"seed-{seed}"
        results.append(main(dataclasses.replace(recipe, seed=seed, seeds=1, output_dir=str(folder))))
    summary: dict = {"seeds": recipe.seeds}
    for name in results[0]:
        values = [result[name] for result in results]
        if isinstance(values[0], str):  # the name of a baseline
            summary[name] = values[0]
            continue
        summary |= {name: float(np.mean(values)), f"{name}_std": float(np.std(values, ddof=min(1, recipe.seeds - 1)))}
    if PartialState().is_main_process:
        arguments.write(again, written, [hub.command()])
        (Path(recipe.output_dir) / "all_results.json").write_text(json.dumps(summary, indent=2))
        report.print_seeds(summary)
    return summary


def start(config: TrainConfig) -> None:
    """The processes, the seed, and refusals that should not wait until hours of preparing the data are over."""
    processes.start_processes()
    if config.push_to_hub and config.seeds > 1:
        raise InputError(
            "--push_to_hub with several --seeds: each would replace the one before. Leave it out, and push the one you choose: "
            + report.push_command(Path(config.output_dir, f"seed-{config.seed}"), "you/name")
        )
    if config.push_to_hub:
        on_main(lambda: hub.check_push(config, Path(config.output_dir)))
    if config.fp16 and not torch.accelerator.is_available():
        raise InputError("--fp16 needs a GPU: on a CPU train in float32, or with --bf16.")
    if not config.eval_steps and (config.load_best_model_at_end or config.early_stopping_patience):
        raise InputError(
            "--load_best_model_at_end and --early_stopping_patience compare the evaluations of a run, and this one "
            "evaluates at its end only: add --eval_steps."
        )
    set_seed(config.seed)
    on_main(lambda: checkpoint.check_folder(Path(config.output_dir), config.resume_from_checkpoint is not None))
    on_main(lambda: checkpoint.check_resume(config))


# Training


def train(
    model: nn.Module,
    batches: Source,
    config: TrainConfig,
    *,
    evaluate: Evaluation | None = None,
    test: Evaluation | None = None,
    groups: list[dict] | None = None,
    callbacks: Sequence[Callback] = (),
    processor=None,
    card: hub.Card | None = None,
) -> dict[str, float]:
    """Train `model` on `batches[0], batches[1], ...` and leave in `config.output_dir` all that a run leaves.

    evaluate, test: an Evaluation for every `eval_steps`, and one for the end only.
    groups: the optimiser's, where some parameters have another rate or start later (see optim.py).
    processor: the tokenizer or image processor that is saved beside the model.
    card: what the model card should say of the data and the task.
    """
    arguments.check(config)
    if config.report_to or config.trackio_space_id:
        tracking.check_trackers(config)
    with checkpoint.locked(Path(config.output_dir)) if PartialState().is_main_process else nullcontext():
        config = settle(config, model, batches)
        run = Run(model, batches, config, evaluate, test, groups, callbacks, processor)
        run.agree()
        run.check_metric()
        run.fit_to_time()
        run.resume()
        if (results := run.finished()) is not None:
            return results
        run.write_down()
        metrics = run.loop()
        return run.finish(metrics, card or hub.Card())


class Run:
    """A training run; `train` calls its parts in order."""

    def __init__(self, model, batches: Source, config: TrainConfig, evaluate, test, groups, callbacks, processor):
        self.batches, self.config, self.output_dir = batches, config, Path(config.output_dir)
        self.evaluate, self.test, self.processor = evaluate, test, processor
        self.callbacks = [*callbacks, SlowdownWarning()]
        self.accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),
            mixed_precision="bf16" if config.bf16 else "fp16" if config.fp16 else "no",
            log_with=config.report_to,
            project_dir=config.output_dir,
        )
        self.main, self.world = self.accelerator.is_main_process, self.accelerator.num_processes
        if config.push_native:
            hub.require_native(model)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        if config.torch_compile:
            model.compile()
        self.divides = divides_by_count(model)
        self.products = best_products(model)
        self.model_class, weights = type(model), len(list(model.parameters()))
        self.model, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, config, groups))
        self.sharded = self.accelerator.is_fsdp2
        processes.refuse_to_shard(self.accelerator, callbacks, tied=len(list(model.parameters())) == weights)
        self.state = progress.new_state(config, batches, self.world)
        self.saved: Path | None = None  # the checkpoint of this very step, if there is one
        self.timers, self.stop = progress.Timers(), processes.StopSignal()
        self.sums: dict[str, Tensor] = {}
        self.norm = torch.zeros(())  # of the last gradient
        self.shown: dict[str, str] = {}  # in the bar, beside the loss
        self.pusher = hub.Pusher(self.output_dir, config) if self.main and config.push_to_hub else None

    @property
    def bare_model(self):
        return self.accelerator.unwrap_model(self.model)

    # --- starting and resuming

    def identity(self) -> dict:
        """What a checkpoint belongs to. A resume with another model or other data is refused, field by field."""
        model = self.bare_model.config.to_dict()
        groups = [[len(group["params"]), group["factor"], group["start"]] for group in self.optimizer.param_groups]
        return {
            **{f"model.{name}": value for name, value in model.items() if name not in NOT_IDENTITY},
            **{name: vars(self.config)[name] for name in IDENTITY},
            "data": self.batches.fingerprint,
            "parameters, rate factors and starts": groups,
        }

    def agree(self) -> None:
        """All processes must have the same data and settings, and see the files that they will read."""
        processes.all_have(self.identity())
        replaced = any(callback.replaces_weights for callback in self.callbacks)
        if self.sharded or self.config.load_best_model_at_end or replaced:
            processes.all_see(self.output_dir / checkpoint.LOCK)

    def check_metric(self) -> None:
        """An unknown --metric_for_best_model is refused before hours of training, not after."""
        wanted = self.config.metric_for_best_model
        if self.evaluate and (name := wanted.removeprefix("eval_")) != "loss":
            names = self.evaluate.names(self.bare_model, self.accelerator)
            if name not in names:
                raise InputError(f"--metric_for_best_model {wanted}: this task measures {', '.join(names)}.")

    def fit_to_time(self) -> None:
        """--max_minutes becomes --max_steps: that of the earlier run where one is resumed, else what a step takes now."""
        config, began = self.config, time.perf_counter()
        if config.max_minutes is None:
            return
        steps = on_main(lambda: progress.earlier_length(self.output_dir, config.resume_from_checkpoint))
        if steps is None:
            costs = progress.time_steps(self, config.max_minutes), progress.time_evaluation(self)
            left = 60 * config.max_minutes - (time.perf_counter() - began)
            steps = on_main(lambda: progress.steps_within(left, *costs, config.eval_steps))
            logger.info(f"--max_minutes {config.max_minutes:g}: {steps:,} steps of {costs[0]:.3g} s.")
        else:
            logger.info(f"--max_minutes: a run that goes on keeps its length, {steps:,} steps; --max_steps changes it.")
        self.config = dataclasses.replace(config, max_steps=steps, max_minutes=None)
        self.state = progress.new_state(self.config, self.batches, self.world)

    def resume(self) -> None:
        """Go on from the checkpoint that the flags mean, if they do."""
        # Dropout differs between processes, weights do not.
        torch.manual_seed(self.config.seed + self.accelerator.process_index)
        path = on_main(lambda: checkpoint.to_resume(self.output_dir, self.config.resume_from_checkpoint))
        if path is None:
            return
        processes.all_see(path / checkpoint.MANIFEST)
        with checkpoint.restored(path):
            self.restore(path)
        logger.info(f"Resumed from {path} at step {self.state.step}.")

    def restore(self, path: Path) -> None:
        saved = json.loads((path / "trainer_state.json").read_text())
        now = json.loads(json.dumps(self.identity()))
        was = saved["identity"]  # what an older version did not know yet cannot differ
        name, *others = [name for name in was if now.get(name) != was[name]] or [None]
        if name is not None:
            more = f", and {', '.join(others)} differ too" if others else ""
            raise InputError(
                f"{path} was made with {name} = {was[name]}, this run has {now.get(name)}{more}. "
                "Resume with the same settings and data, or start a new --output_dir."
            )
        self.resume_state(path, TrainState(**saved["state"]))
        self.batches.load_state_dict(saved.get("data", {}))
        checkpoint.load_weights(self.bare_model, path / "model.safetensors")
        checkpoint.load_optimizer(path, self.bare_model, self.optimizer)
        checkpoint.load_random_state(path, self.accelerator, self.config.seed + 1_000_003 * self.state.step)
        for callback in self.callbacks:
            callback.on_load(path)

    def resume_state(self, path: Path, state: TrainState) -> None:
        """The step and what was counted; the length of the run is that of this one's flags."""
        per_step, now = state.micro_batches_per_step, self.state.micro_batches_per_step
        if per_step != now:
            fits = [n for n in range(1, per_step + 1) if per_step % n == 0]
            if per_step % self.world:
                advice = (
                    f", which {self.world} processes cannot share: use --num_processes {' or '.join(map(str, fits))}."
                )
            else:
                accumulation = self.config.gradient_accumulation_steps
                advice = (
                    f"; {self.world} processes x --gradient_accumulation_steps {accumulation} is {now}. Numbers of "
                    f"processes that fit: {fits}; here use --gradient_accumulation_steps {per_step // self.world}."
                )
            raise InputError(f"{path} took {per_step} micro-batches per step{advice}")
        state.max_steps, state.warmup_steps = self.state.max_steps, self.state.warmup_steps
        best = self.output_dir / f"checkpoint-{state.best_step}"
        if self.config.load_best_model_at_end and state.best_step is not None and not best.is_dir():
            state.best_metric, state.best_step, state.evaluations_since_best = None, None, 0
        self.state, self.saved = state, path.resolve()

    def finished(self) -> dict[str, float] | None:
        """The results of a run that has nothing left to do."""
        state, patience = self.state, self.config.early_stopping_patience
        stopped = bool(patience) and state.evaluations_since_best >= (patience or 0)
        if not (state.step >= state.max_steps or stopped):
            return None
        results = on_main(lambda: checkpoint.results(self.output_dir))
        if results is None:
            return None
        logger.info(
            f"The run in {self.output_dir} has finished, with {state.step:,} steps: nothing is left to do. A higher "
            "--max_steps (or --num_train_epochs) goes on with it."
        )
        return results

    def write_down(self) -> None:
        """What this run is; what later steps of an earlier one have left is set aside."""
        self.state.commands.append(hub.command())
        again = dataclasses.replace(self.config, resume_from_checkpoint=None)
        if self.main:
            with checkpoint.written("recipe.yaml"):
                checkpoint.sweep(self.output_dir)
                checkpoint.abandon_after(self.output_dir, self.state.step)
                arguments.write(again, self.output_dir / "recipe.yaml", self.state.commands)
            if self.config.report_to:
                tracking.start_trackers(self.accelerator, self.config)

    # --- the loop

    def loop(self) -> dict[str, float]:
        """The steps that are left; returns the last evaluation."""
        state, config = self.state, self.config
        self.began = self.logged = dataclasses.replace(state)  # the state at the start, and at the last log line
        self.model.train()
        length = {"total": state.max_steps, "initial": state.step}
        bar = tqdm(desc="train", **length, disable=not self.main, mininterval=BAR_INTERVAL)
        start = time.perf_counter() - state.seconds
        metrics: dict[str, float] = {}
        ahead = Prefetcher(self.batches, self.accelerator, state.step, config.gradient_accumulation_steps)
        forecast = progress.Forecast(state)
        logging_steps = config.logging_steps or max(1, min(50, state.max_steps // 64))
        with self.stop, logging_redirect_tqdm(), bar, ahead:
            self.timers.lap("start")
            while state.step < state.max_steps and not self.stop.agreed:
                before = self.sums.get("loss", 0)
                outputs, batch = self.step(next(ahead))
                state.seconds = time.perf_counter() - start
                last = state.step == state.max_steps
                if bar.update() or last:  # what is not shown is not read: the host would wait for the device
                    loss = self.world * float(self.sums["loss"] - before)
                    bar.set_postfix(loss=f"{loss:.3f}", **self.shown)
                if self.main and (text := forecast.said(state)):
                    bar.write(text, file=sys.stderr)
                if last or state.step % logging_steps == 0 or state.step == self.began.step + 1:
                    self.log(outputs, batch)
                for callback in self.callbacks:
                    callback.on_step_end(state, self.bare_model)
                self.timers.lap("loop")
                if self.evaluate and (last or (config.eval_steps and state.step % config.eval_steps == 0)):
                    metrics = self.evaluate_and_judge(bar)
                if last or (config.save_steps and state.step % config.save_steps == 0):
                    self.save()
                if config.early_stopping_patience and state.evaluations_since_best >= config.early_stopping_patience:
                    logger.info(
                        f"No better {config.metric_for_best_model} for {state.evaluations_since_best} evaluations."
                    )
                    break
            if self.stop.agreed:
                bar.close()
                self.save_and_exit()
        return metrics

    def step(self, group: list[Batch]):
        """One optimiser step: every micro-batch's loss is its sum divided by the step's total count, so the gradients
        are those of one big batch, whatever the accumulation and the number of processes."""
        state, config = self.state, self.config
        self.timers.lap("data")
        counts = self.sum_over_processes(torch.stack([batch["num_items_in_batch"] for batch in group]).sum(0))
        set_learning_rate(self.optimizer, config, state.step, state.max_steps)
        self.timers.lap("loop")
        with float32_by(self.products):
            for batch in group[:-1]:
                with self.accelerator.no_sync(self.model):
                    self.forward_backward(batch, counts)
            outputs = self.forward_backward(group[-1], counts)
        drop_frozen_gradients(self.optimizer, state.step)
        longest = config.max_grad_norm if config.max_grad_norm > 0 else math.inf
        self.norm = self.accelerator.clip_grad_norm_(self.model.parameters(), longest)
        if self.accelerator.device.type == "cpu":  # else when something is logged or saved: the host does not wait
            self.check_gradient(state.step + 1)
        self.timers.lap("model")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.timers.lap("optimizer")
        _, tokens = counts
        state.step += 1
        state.tokens += int(tokens)
        return outputs, group[-1]

    def check_gradient(self, step: int) -> float:
        """The norm of the last gradient. One that is not finite has made all weights so: nothing of them is saved."""
        norm = float(self.norm)
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            saved = checkpoint.checkpoints(self.output_dir)
            raise InputError(
                f"The gradient is {norm} at step {step}: the loss has become NaN or infinite. The last good "
                f"checkpoint is {saved[-1] if saved else 'none yet'}. Try a lower --learning_rate or a longer warm-up."
            )
        return norm

    def forward_backward(self, batch: Batch, counts: Tensor):
        with self.accelerator.autocast():
            outputs = call(self.model, batch, counts if self.divides else None)
        if not self.divides:
            items, _ = counts
            outputs.loss = outputs.loss * (num_items(batch) / items)
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
        message = torch.cat([counts, counts.new_tensor([self.stop.received])]).double()
        *sums, stop = self.accelerator.reduce(message.to(self.accelerator.device), "sum")
        if stop:
            self.stop.agreed = self.stop.received or signal.SIGTERM
        return torch.stack(sums).to(counts.dtype)

    # --- reporting

    def log(self, outputs, batch: Batch) -> None:
        """One line of metrics.jsonl: the means of the losses over the steps since the last one, and figures of this
        step's last micro-batch, if the task has some."""
        state, since = self.state, self.logged
        sums = {name: self.accelerator.reduce(value, "sum") for name, value in self.sums.items()}
        self.sums, self.logged, norm = {}, dataclasses.replace(state), self.check_gradient(state.step)
        if not self.main:
            return
        line = {
            **(self.evaluate.training_figures(outputs, batch) if self.evaluate else {}),
            **{name: float(value) / (state.step - since.step) for name, value in sums.items()},
            "learning_rate": max(group["lr"] for group in self.optimizer.param_groups),  # of those that learn now
            "grad_norm": norm,
            f"{self.batches.unit}_per_second": (state.tokens - since.tokens) / (state.seconds - since.seconds),
        }
        self.write(line)
        speed = line[f"{self.batches.unit}_per_second"]
        self.shown = {"lr": f"{line['learning_rate']:.1e}", f"{self.batches.unit}/s": f"{speed:,.0f}"}

    def write(self, line: dict[str, float]) -> None:
        state = self.state
        epoch = self.batches.epoch(state.step * state.micro_batches_per_step)
        line = {"epoch": round(epoch, 4), **line}
        with checkpoint.written("metrics.jsonl"), open(self.output_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": state.step, **line}) + "\n")
        if self.config.report_to:
            self.accelerator.log(line, step=state.step)

    def scores(self, evaluation: Evaluation | None, prefix: str) -> dict[str, float]:
        figures = evaluation(self.bare_model, self.accelerator) if evaluation else {}
        return {f"{prefix}_{name}": value for name, value in figures.items()}

    def evaluate_and_judge(self, bar: tqdm) -> dict[str, float]:
        """Evaluate, remember the best, tell the callbacks."""
        state, config = self.state, self.config
        metrics = self.scores(self.evaluate, "eval")
        value = metrics[f"eval_{config.metric_for_best_model.removeprefix('eval_')}"]  # as in Trainer
        if progress.is_better(value, state.best_metric, config):
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
        plain = object.__new__(self.model_class)
        vars(plain).update(vars(self.bare_model))
        plain.save_pretrained(folder, state_dict=weights)
        checkpoint.open_weights(folder)
        if self.processor is not None:
            self.processor.save_pretrained(folder)

    def save(self) -> None:
        state, target = self.state, self.output_dir / f"checkpoint-{self.state.step}"
        if self.saved == target.resolve():
            return
        self.check_gradient(state.step)
        data = self.batches.state_dict(state.step * state.micro_batches_per_step)
        gathered = gather_object([(checkpoint.random_state(self.accelerator.device), data)])
        weights = self.whole_weights()
        with checkpoint.complete_or_absent(target, self.main) as draft:
            if self.sharded:
                self.accelerator.wait_for_everyone()  # until there is a draft
            if self.sharded or self.main:
                checkpoint.save_optimizer(draft, self.bare_model, self.optimizer, self.sharded)
            if self.main:
                self.save_model(draft, weights)
                for rank, (random_state, _) in enumerate(gathered):
                    torch.save(random_state, draft / checkpoint.RANDOM_STATE.format(rank, self.world))
                for callback in self.callbacks:
                    callback.on_save(draft)
                data = {name: value for _, part in gathered for name, value in part.items()}
                saved = {"identity": self.identity(), "data": data, "num_threads": self.config.num_threads}
                saved["state"] = dataclasses.asdict(state)
                (draft / "trainer_state.json").write_text(json.dumps(saved, indent=1))
        if self.main:
            if self.pusher and self.config.hub_strategy == "every_save":
                self.pusher.save(target)
            spare = state.best_step if self.config.load_best_model_at_end else None
            checkpoint.rotate(self.output_dir, self.config.save_total_limit, spare)
        self.saved = target.resolve()
        self.accelerator.wait_for_everyone()
        self.timers.lap("save")

    def save_and_exit(self) -> None:
        """A command then ends with the exit code that the signal would have given: 130 or 143."""
        self.save()
        if self.main:
            print(
                f"\nStopped by {signal.Signals(self.stop.agreed).name}; checkpoint-{self.state.step} is saved. Go on with:\n"
                f"{processes.resume_command()}",
                file=sys.stderr,
            )
        raise Stopped(self.stop.agreed, saved=True)

    def finish(self, metrics: dict[str, float], card: hub.Card) -> dict[str, float]:
        """The finished model at the top of output_dir, its figures, curves and card."""
        state, config, model = self.state, self.config, self.bare_model
        costs = self.costs()  # of the model as it was trained
        if config.load_best_model_at_end and state.best_step is not None:
            checkpoint.load_weights(model, self.output_dir / f"checkpoint-{state.best_step}" / "model.safetensors")
            metrics = {}
        figures = {}
        for callback in self.callbacks:
            figures |= callback.on_train_end(state, model)
        if not metrics or any(callback.replaces_weights for callback in self.callbacks):
            metrics = self.scores(self.evaluate, "eval")
        results = {**metrics, **self.scores(self.test, "test"), **figures, **costs}
        weights = self.whole_weights()
        if self.main:
            with checkpoint.written("The finished model"):
                self.save_model(self.output_dir, weights)
                (self.output_dir / "all_results.json").write_text(json.dumps(results, indent=2))
                report.draw_curves(self.output_dir)
                for evaluation in filter(None, (self.evaluate, self.test)):
                    evaluation.report(self.output_dir)
                hub.write_card(self.output_dir, model, results, card, dataclasses.asdict(config), state.commands)
            if config.report_to:
                tracking.log_what_is_left(self.accelerator, config, results, state.step)
            report.print_summary(self.output_dir, results)
            if self.pusher:
                self.pusher.finish()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.wait_for_everyone()
        return results

    def costs(self) -> dict[str, float]:
        """What the run cost, by its own timers (of this process, since it was started or resumed)."""
        state, seconds = self.state, max(self.state.seconds, 1e-9)
        samples = state.step * state.micro_batches_per_step * self.batches.batch_size
        # Backward costs twice the forward pass.
        flops = 3 * flops_per_token(self.bare_model, self.batches[self.accelerator.process_index])
        return {
            "train_steps": state.step,
            "train_runtime": round(state.seconds, 2),
            f"train_{self.batches.unit}": state.tokens,
            f"train_{self.batches.unit}_per_second": round(state.tokens / seconds, 1),
            "train_samples_per_second": round(samples / seconds, 2),
            "num_parameters": self.bare_model.num_parameters(),
            "num_processes": self.world,
            "num_threads": torch.get_num_threads(),
            **self.timers.shares(),
            "model_flops_per_second": flops * (state.tokens - self.began.tokens) / self.timers.in_steps(),
        }
