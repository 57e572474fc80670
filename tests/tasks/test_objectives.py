"""ELECTRA's objectives: their gradients, their stages, and that processes and resumes change nothing of them."""

import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from fixtures import tiny_run
from fixtures.tiny_run import ToyRecipe, assert_same_training, largest_difference, weights

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, InputError, arguments, report
from hf_tiny.models.electra import ENTROPY_WEIGHT, OBJECTIVES
from hf_tiny.tasks.pretrain import OBJECTIVE_NAMES, ElectraArguments, start_objective
from hf_tiny.train import run, train

EQUAL = {"sharing": "none", "generator_size": 1}


@dataclass(frozen=True, kw_only=True)
class Recipe(ElectraArguments, ToyRecipe):
    """The toy with an objective."""


def model(**changes) -> HfTinyElectraForPreTraining:
    settings = tiny_run.model().config.to_diff_dict()
    torch.manual_seed(0)
    return HfTinyElectraForPreTraining(HfTinyElectraConfig(**{**settings, **changes}))


def with_objective(name: str, **changes) -> HfTinyElectraForPreTraining:
    toy = model(**changes)
    toy.objective = OBJECTIVES[name]
    if toy.objective.head is not None:
        toy.objective_head = toy.objective.head(toy.config).apply(toy._init_weights)
    return toy


def main(recipe: Recipe) -> None:
    rates = {"hidden_dropout_prob": recipe.dropout, "attention_probs_dropout_prob": recipe.dropout}
    toy = model(**rates, **(EQUAL if recipe.objective == "two_stage" else {}))
    groups, stages = start_objective(toy, recipe)
    report.draw_curves = tiny_run.without_curves
    train(
        toy,
        tiny_run.batches(recipe),
        recipe,
        evaluate=tiny_run.evaluation(recipe),
        groups=groups,
        callbacks=[stages],
    )


def run_objective(*flags) -> None:
    sys.argv = ["objective.py", *flags]
    run(main, Recipe)


def here(output_dir: Path, **settings) -> Path:
    AcceleratorState._reset_state(True)
    with mock.patch.object(report, "draw_curves"):
        main(Recipe(output_dir=str(output_dir), **settings))
    return output_dir


def test_the_generators_gradient_is_that_of_the_expected_reward():
    """Every token that could be sampled, weighted by its probability, against autograd through the sum itself."""
    toy = with_objective("adversarial", sharing="none", initializer_range=0.3, vocab_size=12)
    torch.nn.init.normal_(toy.objective_head.weight)  # a baseline that matters, were it not to cancel
    ids = torch.tensor([[2, 5, 4, 7, 3]])
    labels = torch.tensor([[-100, -100, 9, -100, -100]])
    generator = [p for name, p in toy.named_parameters() if name.startswith("generator")]
    probabilities = toy(ids, labels=labels).mlm_logits[0].softmax(-1)
    edges = probabilities.detach().double().cumsum(-1)
    rewards, found = [], [torch.zeros_like(p) for p in generator]
    for token in range(12):
        middle = (edges[token] - probabilities[token].detach().double() / 2).float()
        out = toy(ids, labels=labels, sampling_noise=middle.expand(1, 5))
        assert bool(out.replaced[0, 2]) == (token != 9)
        sign = out.logits[0, 2].detach() if token != 9 else -out.logits[0, 2].detach()
        rewards.append(-torch.nn.functional.logsigmoid(sign))  # what the discriminator loses there
        for total, gradient in zip(found, torch.autograd.grad(out.loss, generator), strict=True):
            total += probabilities[token].detach() * gradient
    entropy = -(probabilities * probabilities.log()).sum()
    wanted = torch.autograd.grad(-(probabilities @ torch.stack(rewards)) - ENTROPY_WEIGHT * entropy, generator)
    assert max(float(gradient.abs().max()) for gradient in wanted) > 1e-3
    assert max(torch.stack(rewards)) - min(torch.stack(rewards)) > 0.1
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_the_baseline_is_trained_to_the_reward():
    toy = with_objective("adversarial", sharing="none")
    batch = tiny_run.batches(ToyRecipe())[0]
    batch.pop("num_items_in_batch")
    torch.nn.init.zeros_(toy.objective_head.weight)  # one number for all positions
    optimizer = torch.optim.LBFGS([toy.objective_head.bias], max_iter=30)

    def closure() -> torch.Tensor:
        toy.zero_grad()
        loss = toy(**batch).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    out = toy(**batch)
    masked = batch["labels"].ne(-100)
    called = torch.where(out.replaced, out.logits, -out.logits)[masked].detach().sigmoid()  # what it says of the truth
    torch.testing.assert_close(toy.objective_head.bias.detach().sigmoid()[0], called.mean(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_have_the_gradients_of_the_big_batch(name):
    toy = with_objective(name)
    batches = tiny_run.batches(ToyRecipe())
    big = {key: torch.cat([batches[0][key], batches[1][key]]) for key in batches[0] if key != "num_items_in_batch"}
    counts = batches[0]["num_items_in_batch"] + batches[1]["num_items_in_batch"]
    whole = toy(**big)
    whole.loss.backward()
    wanted = {key: p.grad.clone() for key, p in toy.named_parameters()}
    toy.zero_grad()
    total = 0
    for number in (0, 1):
        part = toy(**{**batches[number], "num_items_in_batch": counts})
        part.loss.backward()
        total += part.loss.detach()
    torch.testing.assert_close(total, whole.loss.detach(), atol=1e-5, rtol=1e-5)
    for key, parameter in toy.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[key], atol=1e-5, rtol=1e-4)
    trained = {"generator": OBJECTIVES[name].generator, "discriminator_head": OBJECTIVES[name].discriminator}
    trained["discriminator_head"] &= name != "replace_mlm"
    for part, moves in trained.items():
        assert bool(sum(wanted[key].abs().sum() for key in wanted if key.startswith(part))) == moves


@torch.no_grad()
def test_the_comparison_objectives_by_hand():
    batch = tiny_run.batches(ToyRecipe())[0]
    batch.pop("num_items_in_batch")
    masked = batch["labels"].ne(-100)
    original = torch.where(masked, batch["labels"], batch["input_ids"])
    toy = with_objective("all_tokens_mlm", initializer_range=0.3)
    out = toy(**batch)
    sampled = toy_sample(out, batch)
    states = toy.electra(sampled, token_type_ids=batch["token_type_ids"]).last_hidden_state
    softmax = toy.generator_lm_head(toy.objective_head(states)).softmax(-1)
    kept = 1 - out.logits.sigmoid()
    right = kept * sampled.eq(original) + (1 - kept) * softmax.gather(-1, original[..., None])[..., 0]
    torch.testing.assert_close(out.loss, out.mlm_loss - right.log().mean(), atol=1e-5, rtol=1e-5)
    toy.objective = OBJECTIVES["replace_mlm"]
    wanted = out.mlm_loss - softmax.gather(-1, original[..., None])[masked].log().mean()
    torch.testing.assert_close(toy(**batch).loss, wanted, atol=1e-5, rtol=1e-5)
    toy.objective = OBJECTIVES["masked_rtd"]
    wrong = torch.where(out.replaced, 1 - out.logits.sigmoid(), out.logits.sigmoid())[masked]
    wanted = out.mlm_loss - 10 * (1 - wrong).log().mean()
    torch.testing.assert_close(toy(**batch).loss, wanted, atol=1e-5, rtol=1e-5)
    toy.eval()  # evaluation is that of joint training, whatever is trained
    out = toy(**batch)
    torch.testing.assert_close(out.loss, out.mlm_loss + 10 * out.rtd_loss)


def toy_sample(out, batch) -> torch.Tensor:
    """The text with what the generator samples."""
    masked = batch["labels"].ne(-100)
    edges = out.mlm_logits.softmax(-1).cumsum(-1)
    tokens = (edges <= batch["sampling_noise"][masked][:, None]).sum(-1)
    return torch.where(masked, 0, batch["input_ids"]).masked_scatter(masked, tokens)


@pytest.mark.parametrize("processes", [1, 2])
def test_two_stages(tmp_path, processes):
    """The discriminator waits, starts from the generator, and leaves it as it is; also where processes meet."""
    settings = {"objective": "two_stage", "max_steps": 8, "save_steps": 2, "dropout": 0.0, "weight_decay": 0.1}
    folder = tmp_path / "run"
    if processes == 1:
        here(folder, **settings)
    else:
        started = tiny_run.start_group(folder, processes, run_objective, **settings)
        assert [one.wait().code for one in started] == [0, 0]
    start, early, switch, late, end = (
        {key: value for key, value in state.items() if key != "generator_lm_head.weight"}
        for state in (model(**EQUAL).state_dict(), *(weights(folder / f"checkpoint-{step}") for step in (2, 4, 6, 8)))
    )
    discriminator = [key for key in start if not key.startswith("generator")]
    generator = [key for key in start if key.startswith("generator")]
    assert all(torch.equal(early[key], start[key]) for key in discriminator)
    assert not any(torch.equal(early[key], start[key]) for key in generator if "bias" not in key)
    copied = [key for key in generator if key.replace("generator.", "electra.") in start]
    assert len(copied) > 10
    assert all(torch.equal(switch[key], switch[key.replace("generator.", "electra.")]) for key in copied)
    assert all(torch.equal(end[key], switch[key]) for key in generator)
    assert not any(torch.equal(end[key], late[key]) for key in discriminator if "bias" not in key)
    rates = [line["learning_rate"] for line in tiny_run.metrics(folder) if "learning_rate" in line]
    assert len(rates) == 8 and min(rates) > 0 and rates[:4] == rates[4:]  # each stage has its own schedule
    moments = torch.load(folder / "checkpoint-8" / "optimizer.pt", weights_only=True)["state"]
    assert {float(state["step"]) for state in moments.values()} == {4.0}  # of the eight, each has taken part in four


@pytest.mark.parametrize("objective", ["two_stage", "adversarial", "all_tokens_mlm"])
def test_processes_and_accumulation_change_nothing(tmp_path, objective):
    settings = {"objective": objective, "first_stage_steps": 4, "max_steps": 10, "dropout": 0.0, "save_steps": 0}
    one = here(tmp_path / "one", per_device_train_batch_size=16, **settings)
    two = here(tmp_path / "two", gradient_accumulation_steps=2, **settings)
    started = tiny_run.start_group(tmp_path / "three", 2, run_objective, **settings)
    for ended in [process.wait() for process in started]:
        assert ended.code == 0, ended.err
    checkpoints = [folder / "checkpoint-10" for folder in (one, two, tmp_path / "three")]
    assert largest_difference(checkpoints[0], checkpoints[1]) < 1e-5
    assert largest_difference(checkpoints[0], checkpoints[2]) < 1e-5


@pytest.mark.parametrize(
    ("objective", "stops"), [("two_stage", (3, 5, 6)), ("adversarial", (3, 5, 6)), ("all_tokens_mlm", (3,))]
)
def test_a_resume_on_either_side_of_the_switch_is_the_same_run(tmp_path, objective, stops):
    settings = {"objective": objective, "first_stage_steps": 5, "max_steps": 8}
    whole = here(tmp_path / "whole", save_steps=1, **settings)
    for step in stops:
        checkpoint = str(whole / f"checkpoint-{step}")
        again = here(tmp_path / f"from-{step}", save_steps=0, resume_from_checkpoint=checkpoint, **settings)
        assert_same_training(whole / "checkpoint-8", again / "checkpoint-8")
    changed = {**settings, "first_stage_steps": 6}
    with pytest.raises(InputError, match=r"starts|first_stage_steps"):
        here(tmp_path / "other", resume_from_checkpoint=str(whole / "checkpoint-6"), **changed)


def test_what_is_saved_is_a_model_like_any_other(tmp_path):
    folder = here(tmp_path / "run", objective="adversarial", max_steps=2, save_steps=1)
    assert "objective_head.weight" in weights(folder / "checkpoint-1")
    assert weights(folder).keys() == {
        key for key in model().state_dict() if key != "generator_lm_head.weight"
    }  # that is tied
    for path in (folder, folder / "checkpoint-1"):
        loaded, info = HfTinyElectraForPreTraining.from_pretrained(path, output_loading_info=True)
        assert not any(info.values()), info
        assert loaded.objective is OBJECTIVES["joint"] and loaded.objective_head is None


def test_refusals():
    for changes, message in (
        ({"objective": "two_stage"}, "--sharing none"),
        ({"objective": "mlm"}, "--sharing all"),
    ):
        with pytest.raises(InputError, match=message):
            start_objective(model(), Recipe(**changes))
    with pytest.raises(InputError, match="must leave some of --max_steps"):
        start_objective(model(sharing="none"), Recipe(objective="two_stage", max_steps=-1))
    with pytest.raises(InputError, match="--objective three_stage: choose one of joint, two_stage"):
        arguments.parse(Recipe, ["--objective", "three_stage"])
    assert set(OBJECTIVE_NAMES) - {"two_stage"} == OBJECTIVES.keys() - {"rtd"}
