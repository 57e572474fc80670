"""Layer-wise rates: the depths of parameters, their groups, and when each begins to learn."""

import pytest
import torch
from fixtures.encoders import CONFIGS, LAYERS, OURS, WIDTHS, changed, classifier, copies, linker, steps
from torch import nn
from transformers import AlbertConfig, AutoModel, AutoModelForSequenceClassification

from hf_tiny import HfTinyElectraForPreTraining, optim
from hf_tiny.train import TrainConfig

every_encoder = pytest.mark.parametrize("name", CONFIGS)


@every_encoder
@pytest.mark.parametrize("build", [classifier, linker])
def test_depths_are_those_of_the_names(name, build):
    model = build(name)
    found = optim.depths(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    prefix = f"{model.base_model_prefix}."
    for parameter, depth in found.items():
        if not parameter.startswith(prefix) or "pooler" in parameter:
            assert depth is None, parameter
            continue
        number = [part for part in parameter.split(".") if part.isdigit()][:1]
        if number:
            assert depth == int(number[0]) + 1, parameter
        elif "embed" in parameter or "project" in parameter:
            assert depth == 0, parameter
        else:
            assert depth == LAYERS, parameter  # a last norm
    assert set(found.values()) == {None, *range(LAYERS + 1)}


def test_shared_layers_are_one_layer():
    config = AlbertConfig(**WIDTHS, intermediate_size=32, embedding_size=8)
    found = optim.depths(AutoModelForSequenceClassification.from_config(config))
    assert {depth for name, depth in found.items() if "albert_layer_groups" in name} == {1}
    assert set(found.values()) == {None, 0, 1}


def test_an_encoder_without_a_head_is_all_body():
    assert set(optim.depths(AutoModel.from_config(OURS)).values()) == set(range(LAYERS + 1))


@every_encoder
def test_every_trainable_parameter_is_in_exactly_one_group(name):
    model = classifier(name)
    model.base_model.get_input_embeddings().weight.requires_grad_(False)
    groups = optim.layer_groups(model, 0.3, layer_decay=0.5, head_lr_factor=3.0)
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for group in groups:
        assert {parameter.ndim >= 2 for parameter in group["params"]} == {group["weight_decay"] > 0}


def test_tied_parameters_are_in_one_group():
    model = HfTinyElectraForPreTraining(OURS)
    members = [id(p) for group in optim.layer_groups(model, 0.1) for p in group["params"]]
    assert len(members) == len(set(members)) == len(list(model.parameters()))


def test_factors_and_starts_by_depth():
    settings = {"layer_decay": 0.5, "head_lr_factor": 3.0, "slow_start_steps": 10, "unfreeze_steps": 4}
    groups = optim.layer_groups(classifier(), 0.1, **settings)
    found = {group["depth"]: (group["factor"], group["start"]) for group in groups}
    assert found == {None: (3.0, 0), 3: (1.0, 10), 2: (0.5, 14), 1: (0.25, 18), 0: (0.125, 22)}
    assert groups[0]["depth"] is None  # the rate that is logged is the first group's


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "inverse_sqrt", "warmup_stable_decay"])
def test_rates_at_chosen_steps(schedule):
    recipe = TrainConfig(learning_rate=1.0, lr_scheduler_type=schedule, warmup_steps=0.1)
    weights = [nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    groups = [
        {"params": weights[:1], "weight_decay": 0.0},
        {"params": weights[1:], "weight_decay": 0.0, "factor": 0.5, "start": 60},
    ]
    optimizer = optim.build_optimizer(nn.ParameterList(weights), recipe, groups)
    for step in (0, 5, 59, 60, 61, 99):
        optim.set_learning_rate(optimizer, recipe, step, 100)
        early, late = (group["lr"] for group in optimizer.param_groups)
        assert early == optim.learning_rate_factor(schedule, step, 100, 0.1)
        assert late == (0.5 * optim.learning_rate_factor(schedule, step - 60, 40, 0.1) if step >= 60 else 0)


def test_a_late_group_stays_until_its_start_and_then_moves():
    model = classifier()
    recipe = TrainConfig(learning_rate=1e-2, weight_decay=0.1)
    groups = optim.layer_groups(model, 0.1, slow_start_steps=2, unfreeze_steps=1)
    places, before = optim.depths(model), copies(model)
    moving = {1: {None}, 2: {None}, 3: {None, 3}, 4: {None, 3, 2}, 5: {None, 3, 2, 1}, 6: {None, 3, 2, 1, 0}}
    for done, optimizer in enumerate(steps(model, recipe, 6, groups), start=1):
        assert {places[name] for name in changed(before, model)} == moving[done]
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        expected = [p.grad for name, p in model.named_parameters() if places[name] in moving[done]]
        assert torch.equal(norm, nn.utils.get_total_norm(expected))
        known = {id(parameter) for parameter in optimizer.state}
        assert {places[name] for name, p in model.named_parameters() if id(p) in known} == moving[done]
