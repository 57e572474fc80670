"""Checkpoints that earlier code has saved, in frozen/: today's code must give the outputs that were recorded with them.

PYTHONPATH=tests python tests/models/test_frozen.py  # makes those of new models
"""

from pathlib import Path

import pytest
import torch
from fixtures.tiny_models import ROWS, inputs, tiny_config, valid_output
from safetensors.torch import load_file, save_file

from hf_tiny import HfTinySeq2SeqConfig

FROZEN = Path(__file__).parent / "frozen"
LARGEST = 200_000  # bytes
SMALLER = {HfTinySeq2SeqConfig: {"decoder_layers": 2}}  # than the tiny ones of other tests
CASES = [pytest.param(auto_class, model_class, id=model_class.__name__) for _, auto_class, model_class in ROWS]


def make() -> None:
    """A tiny model of each class that has none yet, with outputs of order 1. Its code is left out: today's is tested."""
    for config_class, _, model_class in ROWS:
        folder = FROZEN / model_class.__name__
        if not folder.exists():
            torch.manual_seed(0)
            wide = {"initializer_range": 0.2}
            changes = {**wide, **SMALLER.get(config_class, {})}
            config = tiny_config(config_class, encoder=wide, **changes)
            model, batch = model_class(config).eval(), inputs(model_class, config)
            model.save_pretrained(folder)
            for path in folder.glob("*.py"):
                path.unlink()
            with torch.no_grad():
                save_file({**batch, "expected": valid_output(model(**batch), batch)}, folder / "recorded.safetensors")


@pytest.mark.parametrize(("auto_class", "model_class"), CASES)
@torch.no_grad()
def test_a_frozen_checkpoint_gives_what_it_gave(auto_class, model_class):
    folder = FROZEN / model_class.__name__
    assert folder.exists(), f"Freeze {model_class.__name__} by: python {Path(__file__).name}"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LARGEST
    batch = load_file(folder / "recorded.safetensors")
    expected = batch.pop("expected")
    assert expected.abs().mean() > 0.01
    for loader in (auto_class, model_class):
        model, info = loader.from_pretrained(folder, output_loading_info=True)
        assert type(model) is model_class and not any(info.values()), info
        torch.testing.assert_close(valid_output(model.eval()(**batch), batch), expected, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    make()
