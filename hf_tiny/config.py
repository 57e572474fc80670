"""The flags that every training recipe has."""

from dataclasses import dataclass
from typing import ClassVar

from . import hub
from .arguments import HIGHEST_SEED, Arguments, flag
from .optim import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class TrainConfig(hub.HubArguments, Arguments):
    """The flags that every training recipe has, named as in transformers.TrainingArguments."""

    GROUP: ClassVar[str] = "training"

    output_dir: str = flag("runs/out", "Folder for everything that the run leaves.", group="run")
    resume_from_checkpoint: str | None = flag(None, "`latest`, or the path of a checkpoint.", group="run")
    seed: int = flag(
        42, "Seed of the weights, the data order, the masks and dropout.", low=0, high=HIGHEST_SEED, group="run"
    )
    seeds: int = flag(1, "Number of seeds to train with, each in a folder of its own.", above=0, group="run")
    logging_steps: int | None = flag(
        None, "Steps between lines of metrics.jsonl; by default 1 to 2% of the run, at most 50.", above=0, group="run"
    )
    report_to: list[str] | None = flag(None, "Trackers: tensorboard, trackio, wandb.", group="run")
    trackio_space_id: str | None = flag(None, "Space of trackio's dashboard; by default it is local.", group="run")
    num_threads: int | str | None = flag(
        None,
        "Threads of a process: its share of the cores by default; auto measures whether one is faster.",
        above=0,
        group="run",
    )
    max_steps: int = flag(-1, "Optimiser steps, instead of --num_train_epochs; -1: by the epochs.", other_than=0)
    max_minutes: float | None = flag(
        None, "Train for about so long: steps are timed at the start, and --max_steps follows.", above=0
    )
    num_train_epochs: float = flag(3.0, "Passes over the training data.", above=0)
    per_device_train_batch_size: int = flag(32, "Samples in a micro-batch.", above=0)
    gradient_accumulation_steps: int = flag(1, "Micro-batches per process and step.", above=0)
    learning_rate: float = flag(5e-4, "Peak learning rate.", above=0)
    lr_scheduler_type: str = flag("linear", "How the learning rate decays.", choices=SCHEDULES)
    warmup_steps: float = flag(0.1, "Steps, or a share of the run when below 1; at most a tenth of a short run.", low=0)
    weight_decay: float = flag(0.01, "Weight decay of AdamW, of matrices only: not of biases and norms.", low=0)
    bf16: bool | str = flag("auto", "bfloat16 autocast; auto takes it where it is right and much faster.")
    fp16: bool = flag(False, "float16 autocast (GPUs only).")
    gradient_checkpointing: bool = flag(False, "Less memory, more time.")
    max_grad_norm: float = flag(1.0, "Norm to which the gradient is clipped; 0 or below does not clip.")
    adam_beta1: float = flag(0.9, "Beta 1 of AdamW.", low=0, below=1)
    adam_beta2: float = flag(0.999, "Beta 2 of AdamW.", low=0, below=1)
    adam_epsilon: float = flag(1e-6, "Epsilon of AdamW.", above=0)
    torch_compile: bool = flag(False, "Compile the model with torch.compile.")
    eval_steps: int = flag(500, "Steps between evaluations; 0 evaluates at the end only.", low=0, group="saving")
    per_device_eval_batch_size: int = flag(32, "Samples in an evaluation batch.", above=0, group="saving")
    save_steps: int = flag(500, "Steps between checkpoints; 0 saves at the end only.", low=0, group="saving")
    save_total_limit: int | None = flag(2, "Number of checkpoints that are kept; 0 or below: all.", group="saving")
    load_best_model_at_end: bool = flag(False, "End with the best weights instead of the last.", group="saving")
    metric_for_best_model: str = flag("loss", "Figure by which a model is the best.", group="saving")
    greater_is_better: bool | None = flag(
        None, "Whether a higher metric_for_best_model is better; by default its name says so.", group="saving"
    )
    early_stopping_patience: int | None = flag(None, "Stop after so many worse evaluations.", low=1, group="saving")
