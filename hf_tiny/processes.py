"""The processes of a run: how they start, agree and stop."""

import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from transformers.utils.logging import disable_progress_bar

from .callbacks import Callback
from .errors import InputError
from .flags import RECIPES
from .signals import StopHandler, end_with_launcher

LAUNCH = "--config_file recipes/accelerate/cpu_2proc.yaml"


def start_processes() -> None:
    """Before anything else: the right number of processes, all cores. Reads the launcher's variables."""
    end_with_launcher()
    launched, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if launched == here > 1 and sys.platform == "linux":  # on one machine they need not be heard by others
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A long timeout: packing and pushing take their time.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=1))
    if launched != state.num_processes:
        raise InputError(
            f"The launcher started {launched} processes, but accelerate sees {state.num_processes}: each would train alone "
            f"and write to the same folder. Launch with `{LAUNCH}` (or multi_gpu.yaml)."
        )
    # `accelerate launch` sets MASTER_ADDR for several processes; for CPUs it then starts one, without WORLD_SIZE.
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        raise InputError(
            f"accelerate was asked for several processes and started only one. On CPUs launch with `{LAUNCH}`, or with "
            "`--num_processes 1`."
        )
    # The launcher sets OMP_NUM_THREADS=1, which would leave all but one core idle.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_tiny").setLevel(logging.INFO if state.is_main_process else logging.ERROR)
    disable_progress_bar()  # the loop shows its own


def on_main(ask: Callable):
    """The main process's answer, or its refusal, for all of them: other machines may not see its files."""
    answer: list = [None, None]
    if PartialState().is_main_process:
        try:
            answer[0] = ask()
        except InputError as error:
            answer[1] = str(error)
    result, refusal = broadcast_object_list(answer)
    if refusal is not None:
        raise InputError(refusal)
    return result


def all_see(path: Path) -> None:
    """Every process must see the file that the main process sees, not an older one of the same name on its own disk."""
    text = on_main(path.read_text)
    seen = gather_object([path.is_file() and path.read_text() == text])
    if not all(seen):
        raise InputError(
            f"Process {seen.index(False)} does not see the {path} of process 0. Resuming, FSDP, --load_best_model_at_end and "
            "averaged weights need an --output_dir on a disk that all machines share, given by its absolute path."
        )


def all_have(identity: dict) -> None:
    """Machines that prepare the data each by itself must come to the same."""
    first, *others = gather_object([identity])
    for rank, other in enumerate(others, start=1):
        for name in first:
            if other[name] != first[name]:
                raise InputError(
                    f"Process {rank} has {name} = {other[name]}, process 0 has {first[name]}. Give every machine the "
                    "same flags and files (and for the built-in data the same packages)."
                )


def refuse_to_shard(accelerator: Accelerator, callbacks: Sequence[Callback], tied: bool) -> None:
    """What FSDP would do wrongly, mostly without a word."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    whole = [type(callback).__name__ for callback in callbacks if callback.needs_whole_weights]
    if not accelerator.is_fsdp2:
        raise InputError("FSDP 1 is not supported: set `fsdp_version: 2`, as in recipes/accelerate/fsdp.yaml.")
    if whole or not tied:
        problem = f"{', '.join(whole)} needs whole weights" if whole else "it would untie weights that are one"
        raise InputError(f"FSDP: {problem}. Launch with recipes/accelerate/multi_gpu.yaml or multi_node.yaml.")


def resume_command() -> str:
    """The command that goes on with this run when it is pasted."""
    script, processes = Path(sys.argv[0]), PartialState().num_processes
    if script.resolve().parent == RECIPES.resolve():
        options = ["--num_processes", str(processes)] if processes > 1 else []
        words = ["hf-tiny", *options, script.stem.replace("_", "-")]
    else:
        words = ["accelerate", "launch", "--quiet", "--num_processes", str(processes), sys.argv[0]]
    return shlex.join([*words, *_without_resume(sys.argv[1:]), "--resume_from_checkpoint", "latest"])


def _without_resume(flags: Sequence[str]) -> list[str]:
    """The flags without --resume_from_checkpoint. A run that goes on from a checkpoint does so in its folder, unless it is
    given another."""
    name = "--resume_from_checkpoint"
    flags = [word for flag in flags for word in (flag.split("=", 1) if flag.startswith(f"{name}=") else [flag])]
    if name not in flags:
        return flags
    place = flags.index(name)
    rest, resumed_from = flags[:place] + flags[place + 2 :], flags[place + 1]
    elsewhere = any(flag.startswith(("--output_dir", "--output-dir")) for flag in rest) or not flags[0].startswith("-")
    return rest if resumed_from == "latest" or elsewhere else [*rest, "--output_dir", str(Path(resumed_from).parent)]


class StopSignal(StopHandler):
    """Ctrl-C and SIGTERM stop the run after the step in which they come: `received` is what this process was sent,
    `agreed` what all processes have agreed on."""

    def __init__(self):
        super().__init__()
        self.alone = PartialState().num_processes == 1
        self.received = self.agreed = 0

    def stop(self, number: int) -> None:
        self.received = number
        if self.alone:
            self.agreed = number
