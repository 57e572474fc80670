"""L2-SP, adapters and averages: by themselves and in the loop."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from fixtures import tiny_run
from fixtures.encoders import CONFIGS, Texts, batch_of, changed, classifier, copies, steps
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, optim, report
from hf_tiny.callbacks import EMA, AverageCheckpoints, FollowGenerator, TrainState
from hf_tiny.start import prepare
from hf_tiny.tasks import FinetuneConfig
from hf_tiny.train import run, train


def test_strong_l2_sp_keeps_the_body_and_leaves_the_head():
    ends = {}
    for strength in (0.0, 1e6):
        torch.manual_seed(0)
        model = classifier()
        recipe = FinetuneConfig(learning_rate=1e-2, l2_sp=strength, model_name_or_path="some")
        groups, callbacks = prepare(model, recipe)
        before = copies(model)
        list(steps(model, recipe, 5, groups, callbacks))
        ends[strength] = {optim.depths(model)[name] for name in changed(before, model)}
    assert ends == {0.0: {None, 0, 1, 2, 3}, 1e6: {None}}


def test_l2_sp_pulls_by_rate_times_strength():
    model = classifier()
    recipe = FinetuneConfig(
        model_name_or_path="some",
        learning_rate=1e-2,
        l2_sp=20.0,
        warmup_steps=1,
        lr_scheduler_type="constant",
        weight_decay=0.5,
    )
    groups, (pull,) = prepare(model, recipe)
    assert {group["weight_decay"] for group in groups if group["depth"] is not None} == {0.0}
    assert groups[0]["weight_decay"] == 0.5  # the head's
    weight = model.electra.embeddings.word_embeddings.weight
    start = weight.detach().clone()
    with torch.no_grad():
        weight += 1
    pull.on_step_end(SimpleNamespace(step=1, max_steps=10), model)
    torch.testing.assert_close(weight, start + 0.8)


def test_disentangled_embeddings_are_the_generators_and_a_learned_difference():
    """Against He et al. (2021) by their word: a table that is never stored, the generator's without its gradient plus a
    difference from 0."""
    batch = {name: value for name, value in tiny_run.batches(tiny_run.ToyRecipe())[0].items() if "num" not in name}
    settings = {**tiny_run.model().config.to_diff_dict(), "sharing": "disentangled", "type_vocab_size": 2}
    ours, theirs = (HfTinyElectraForPreTraining(HfTinyElectraConfig(**settings)) for _ in range(2))
    ours.electra.embeddings.load_state_dict(ours.generator.embeddings.state_dict())
    theirs.load_state_dict(ours.state_dict())
    tables = [f"embeddings.{name}_embeddings.weight" for name in ("word", "token_type", "position")]
    differences = {name: theirs.electra.get_parameter(name) for name in tables}
    for difference in differences.values():
        nn.init.zeros_(difference)
    follow = FollowGenerator(ours)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, weight_decay=0.0) for one in (ours, theirs)]
    start = ours.electra.embeddings.word_embeddings.weight.detach().clone()
    for _ in range(4):
        whole = {
            f"electra.{name}": theirs.generator.get_parameter(name).detach() + differences[name] for name in tables
        }
        losses = ours(**batch).loss, torch.func.functional_call(theirs, whole, kwargs=batch).loss
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        follow.on_step_end(TrainState(), ours)
    for name in tables:
        one, generators = ours.electra.get_parameter(name), theirs.generator.get_parameter(name)
        torch.testing.assert_close(one, generators + differences[name], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.generator.get_parameter(name), generators, atol=1e-4, rtol=1e-4)
    assert (ours.electra.embeddings.word_embeddings.weight - start).abs().max() > 0.02
    assert differences[tables[0]].abs().max() > 0.01


@pytest.mark.parametrize("name", CONFIGS)
def test_lora_trains_adapters_and_the_head_and_merges_into_a_plain_model(name, tmp_path):
    model = classifier(name).eval()
    plain, places, before = copies(model), optim.depths(model), copies(model)
    trained_whole = {key for key in plain if places.get(key, 0) is None}
    recipe = FinetuneConfig(learning_rate=1e-2, lora_rank=2, model_name_or_path="some")
    groups, callbacks = prepare(model, recipe)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    trained = {names[id(parameter)] for group in groups for parameter in group["params"]}
    assert trained_whole <= trained and all("lora_" in key for key in trained - trained_whole)
    adapters = {key.split(".lora_")[0] for key in trained - trained_whole}
    linear = {k for k, m in classifier(name).named_modules() if isinstance(m, nn.Linear) and places[f"{k}.weight"]}
    assert adapters == linear
    list(steps(model, recipe, 3, groups))
    expected = model(**batch_of()).logits
    for callback in callbacks:
        callback.on_train_end(SimpleNamespace(step=3, max_steps=20), model)
    assert list(model.state_dict()) == list(plain)
    torch.testing.assert_close(model(**batch_of()).logits, expected, rtol=0, atol=1e-5)
    moved = changed(before, model)
    assert moved == {f"{key}.weight" for key in adapters} | trained_whole
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**batch_of()).logits, expected, rtol=0, atol=1e-5)


def test_a_moving_average_by_hand(caplog):
    """Young in the first steps: (1 + step) / (10 + step) until that is more than the decay."""
    model = nn.Linear(1, 1, bias=False)
    average, expected = EMA(0.3), None
    for step, weight in enumerate((1.0, 2.0, 4.0, 8.0), start=1):
        nn.init.constant_(model.weight, weight)
        average.on_step_end(TrainState(step=step), model)
        decay = min(0.3, (1 + step) / (10 + step))
        expected = weight if expected is None else decay * expected + (1 - decay) * weight
    with caplog.at_level("INFO", logger="hf_tiny"):
        average.on_train_end(TrainState(step=4), model)
    assert model.weight.item() == pytest.approx(expected)
    assert "The finished model is a moving average of the weights (--ema 0.3): these are its scores." in caplog.text


def test_the_mean_of_the_last_checkpoints_there_are(tmp_path):
    """A run that is resumed at its end, in another folder, has none: the model stays as it is."""
    model = classifier()
    before = copies(model)
    assert AverageCheckpoints(str(tmp_path), 3).on_train_end(TrainState(), model) == {"averaged_checkpoints": 0}
    assert not changed(before, model)


# In the loop


def train_it(recipe: FinetuneConfig) -> dict[str, float]:
    torch.manual_seed(0)
    model = classifier()
    groups, callbacks = prepare(model, recipe)
    return train(model, Texts(), recipe, groups=groups, callbacks=callbacks)


def train_here(folder: Path, **settings) -> dict[str, float]:
    AcceleratorState._reset_state(True)
    recipe = FinetuneConfig(
        output_dir=str(folder), model_name_or_path="some", save_total_limit=None, learning_rate=1e-2, **settings
    )
    with mock.patch.object(report, "draw_curves", tiny_run.without_curves):
        return train_it(recipe)


@pytest.mark.parametrize(
    "settings",
    [{"lora_rank": 2}, {"l2_sp": 5.0, "layer_decay": 0.5}, {"slow_start_steps": 2, "unfreeze_steps": 1}],
)
def test_a_resumed_run_ends_with_the_same_weights(settings, tmp_path):
    train_here(tmp_path / "whole", max_steps=8, save_steps=4, **settings)
    train_here(
        tmp_path / "parts",
        max_steps=8,
        save_steps=4,
        resume_from_checkpoint=str(tmp_path / "whole/checkpoint-4"),
        **settings,
    )
    tiny_run.assert_same_training(tmp_path / "whole/checkpoint-8", tmp_path / "parts/checkpoint-8")
    assert tiny_run.largest_difference(tmp_path / "whole", tmp_path / "parts") == 0
    names = load_file(tmp_path / "whole/model.safetensors").keys()
    assert names == classifier().state_dict().keys()


def train_in_a_process(*flags) -> None:
    report.draw_curves = tiny_run.without_curves
    sys.argv = ["toy.py", *flags]
    run(train_it, FinetuneConfig)


def test_two_processes_unfreeze_and_adapt_like_one(tmp_path):
    settings = {"max_steps": 6, "slow_start_steps": 2, "unfreeze_steps": 1, "lora_rank": 2}
    flags = {"learning_rate": 1e-2, "model_name_or_path": "some", **settings}
    two = tiny_run.start_group(tmp_path / "two", 2, train_in_a_process, **flags)
    train_here(tmp_path / "one", gradient_accumulation_steps=2, **settings)
    for started in two:
        assert (ended := started.wait()).code == 0, ended.err
    assert tiny_run.largest_difference(tmp_path / "one", tmp_path / "two") < 1e-5
