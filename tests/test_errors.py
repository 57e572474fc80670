"""How a command ends after a mistake."""

import pytest
import torch

from hf_tiny.errors import exit_codes


def too_much_for_torch() -> None:
    torch.empty(2**60)


def too_much_for_python() -> None:
    bytearray(2**60)


def too_much_for_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.mark.parametrize("allocate", [too_much_for_torch, too_much_for_python, too_much_for_a_gpu])
def test_too_little_memory_gets_advice(allocate, capsys):
    with pytest.raises(SystemExit) as end, exit_codes():
        allocate()
    assert end.value.code == 2
    said = capsys.readouterr().err
    for flag in (
        "--per_device_train_batch_size",
        "--gradient_accumulation_steps",
        "--gradient_checkpointing",
        "--size",
    ):
        assert flag in said
    assert "shorter texts" in said and "Traceback" not in said


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="a mistake in the program"), exit_codes():
        raise RuntimeError("a mistake in the program")
