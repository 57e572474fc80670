"""Layer-wise rates, freezing, L2-SP, LoRA, forgetting, and what may be started from."""

import json
import logging
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_run
import torch
from accelerate.state import AcceleratorState
from conftest import TEXTS
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BartConfig,
    BertConfig,
    BertModel,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    GPT2Config,
    ModernBertConfig,
    RobertaConfig,
    ViTConfig,
)

import hf_tiny.train
from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyTokenLinkingConfig,
    HfTinyTokenLinkingModel,
    InputError,
    hub,
    optim,
    transfer,
)
from hf_tiny.data.collate import Source
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer
from hf_tiny.train import TrainConfig, train

LAYERS = 3
WIDTHS = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
OURS = HfTinyElectraConfig(**WIDTHS, embedding_size=8, intermediate_size=32, max_position_embeddings=64, norm_first=True,
                           generator_size=0.5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                           initializer_range=0.2)  # fmt: skip
CONFIGS = {
    "hf_tiny": OURS,
    "bert": BertConfig(**WIDTHS, intermediate_size=32),
    "electra": ElectraConfig(**WIDTHS, embedding_size=8, intermediate_size=32),
    "roberta": RobertaConfig(**WIDTHS, intermediate_size=32, pad_token_id=0),
    "distilbert": DistilBertConfig(vocab_size=99, dim=16, n_layers=LAYERS, n_heads=2, hidden_dim=32),
    "deberta-v2": DebertaV2Config(**WIDTHS, intermediate_size=32, relative_attention=True, norm_rel_ebd="layer_norm",
                                  pos_att_type=["c2p", "p2c"], position_buckets=4, share_att_key=True),
    "modernbert": ModernBertConfig(**WIDTHS, intermediate_size=32, pad_token_id=0),
}  # fmt: skip
every_encoder = pytest.mark.parametrize("name", CONFIGS)


@dataclass(frozen=True, kw_only=True)
class Recipe(transfer.TransferArguments, TokenizerArguments, TrainConfig):
    """What a recipe for fine-tuning has."""


def classifier(name: str = "hf_tiny") -> nn.Module:
    return AutoModelForSequenceClassification.from_config(CONFIGS[name])


def linker(name: str = "hf_tiny") -> nn.Module:
    return HfTinyTokenLinkingModel(HfTinyTokenLinkingConfig(encoder=CONFIGS[name], arc_size=8, label_size=8))


class Linking:
    """What stands for an Auto class."""

    from_pretrained = HfTinyTokenLinkingModel.from_encoder

    @staticmethod
    def from_config(config, **changes):
        return HfTinyTokenLinkingModel(HfTinyTokenLinkingConfig(encoder=config, **changes))


def batch_of(rows: int = 8) -> dict:
    ids = torch.randint(5, 99, (rows, 10), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids[:, 1] % 2}


def steps(model: nn.Module, recipe: Recipe, count: int, groups=None, callbacks=(), max_steps: int = 20):
    """What the loop does, without the rest of it; yields after each step."""
    optimizer = optim.build_optimizer(model, recipe, groups)
    for step in range(count):
        optim.set_learning_rate(optimizer, recipe, step, max_steps)
        model(**batch_of()).loss.backward()
        optim.drop_frozen_gradients(optimizer, step)
        optimizer.step()
        for callback in callbacks:
            callback.on_step_end(SimpleNamespace(step=step + 1, max_steps=max_steps), model)
        yield optimizer
        optimizer.zero_grad()


def copies(model: nn.Module) -> dict:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def changed(before: dict, model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, tokenizer):
    """A joint checkpoint of hf_tiny's ELECTRA with its tokenizer."""
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    config = HfTinyElectraConfig(**{**OURS.to_dict(), "vocab_size": len(tokenizer)})
    HfTinyElectraForPreTraining(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# Depths and groups


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
    recipe = Recipe(learning_rate=1.0, lr_scheduler_type=schedule, warmup_steps=0.1)
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
    recipe = Recipe(learning_rate=1e-2, weight_decay=0.1)
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


# What moves


def test_strong_l2_sp_keeps_the_body_and_leaves_the_head():
    ends = {}
    for strength in (0.0, 1e6):
        torch.manual_seed(0)
        model = classifier()
        recipe = Recipe(learning_rate=1e-2, l2_sp=strength, model_name_or_path="some")
        groups, callbacks = transfer.prepare(model, recipe)
        before = copies(model)
        list(steps(model, recipe, 5, groups, callbacks))
        ends[strength] = {optim.depths(model)[name] for name in changed(before, model)}
    assert ends == {0.0: {None, 0, 1, 2, 3}, 1e6: {None}}


def test_l2_sp_pulls_by_rate_times_strength():
    model = classifier()
    recipe = Recipe(
        model_name_or_path="some",
        learning_rate=1e-2,
        l2_sp=20.0,
        warmup_steps=1,
        lr_scheduler_type="constant",
        weight_decay=0.5,
    )
    groups, (pull,) = transfer.prepare(model, recipe)
    assert {group["weight_decay"] for group in groups if group["depth"] is not None} == {0.0}
    assert groups[0]["weight_decay"] == 0.5  # the head's
    weight = model.electra.embeddings.word_embeddings.weight
    start = weight.detach().clone()
    with torch.no_grad():
        weight += 1
    pull.on_step_end(SimpleNamespace(step=1, max_steps=10), model)
    torch.testing.assert_close(weight, start + 0.8)


@pytest.mark.parametrize("name", ["hf_tiny", "bert", "deberta-v2"])
def test_only_the_last_layers_are_drawn_anew(name, tmp_path):
    classifier(name).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    places, before = optim.depths(model), copies(model)
    matrices = {key for key, p in model.named_parameters() if p.ndim >= 2 and places[key] in (LAYERS - 1, LAYERS)}
    transfer.prepare(model, Recipe(reinit_layers=2, model_name_or_path="some"))
    found = changed(before, model)
    assert {places[key] for key in found} == {LAYERS - 1, LAYERS} and matrices <= found
    for key in matrices:
        spread = (before[key].std() / model.get_parameter(key).std()).item()
        assert 0.7 < spread < 1.4, key  # as the model itself draws them


@pytest.mark.parametrize(
    ("layers", "expected"), [(-1, {None, 0, 1, 2, 3}), (0, {None}), (2, {None, 2, 3}), (3, {None, 1, 2, 3})]
)
@pytest.mark.parametrize("build", [classifier, linker])
def test_only_the_last_layers_are_trained(build, layers, expected):
    model = build()
    groups, _ = transfer.prepare(model, Recipe(trainable_layers=layers, model_name_or_path="some"))
    assert {group["depth"] for group in groups} == expected
    places = optim.depths(model)
    assert {places[name] for name, p in model.named_parameters() if p.requires_grad} == expected


@every_encoder
def test_lora_trains_adapters_and_the_head_and_merges_into_a_plain_model(name, tmp_path):
    model = classifier(name).eval()
    plain, places, before = copies(model), optim.depths(model), copies(model)
    trained_whole = {key for key in plain if places.get(key, 0) is None}
    recipe = Recipe(learning_rate=1e-2, lora_rank=2, model_name_or_path="some")
    groups, callbacks = transfer.prepare(model, recipe)
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


def test_lora_in_the_last_layer_only():
    model = classifier()
    groups, _ = transfer.prepare(model, Recipe(lora_rank=2, trainable_layers=1, model_name_or_path="some"))
    assert {group["depth"] for group in groups} == {None, LAYERS}


def test_lora_without_peft_says_how_to_get_it():
    with mock.patch.dict(sys.modules, {"peft": None}), pytest.raises(InputError, match=r"pip install .hf_tiny\[lora\]"):
        transfer.prepare(classifier(), Recipe(lora_rank=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_decay": 0.0}, "--layer_decay 0: it must be above 0"),
        ({"layer_decay": 1.5}, "--layer_decay 1.5"),
        ({"head_lr_factor": 0.0}, "--head_lr_factor 0"),
        ({"slow_start_steps": -1}, "--slow_start_steps -1"),
        ({"trainable_layers": -2}, "--trainable_layers -2"),
        ({"lora_rank": 4, "reinit_layers": 1}, "--lora_rank leaves"),
        ({"reinit_layers": 2, "trainable_layers": 1}, "must be trained"),
        ({"config_name": "other"}, "not both"),
        ({"lora_rank": 4, "model_name_or_path": None}, "--lora_rank needs a pretrained encoder"),
        ({"trainable_layers": 0, "model_name_or_path": None}, "--trainable_layers needs a pretrained encoder"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        transfer.start_tokenizer(Recipe(**{"model_name_or_path": "some", **settings}), TEXTS)


@pytest.mark.parametrize("name", ["trainable_layers", "reinit_layers"])
def test_more_layers_than_there_are_is_refused(name):
    with pytest.raises(InputError, match=f"--{name} 4: .*has 3 layers"):
        transfer.prepare(classifier(), Recipe(**{name: 4}))


def test_what_would_never_learn_is_refused():
    recipe = Recipe(slow_start_steps=5, unfreeze_steps=5, max_steps=20)
    with pytest.raises(InputError, match="begin to learn at step 20, but the run has 20 steps"):
        transfer.prepare(classifier(), recipe)


# What to start from


def test_a_checkpoint_is_taken_and_the_head_is_new(pretrained, tokenizer, caplog):
    recipe = Recipe(model_name_or_path=pretrained)
    caplog.set_level(logging.INFO, logger="hf_tiny")
    found = transfer.start_tokenizer(recipe, TEXTS)
    model = transfer.start_model(recipe, AutoModelForSequenceClassification, found, num_labels=5)
    assert found.get_vocab() == tokenizer.get_vocab() and model.config.num_labels == 5
    weights = load_file(f"{pretrained}/model.safetensors")
    for name, value in model.electra.state_dict().items():
        assert torch.equal(value, weights[f"electra.{name}"])
    body = len(list(model.electra.parameters()))
    assert f"{body} weights taken, 4 new: classifier.dense, classifier.out." in caplog.text
    assert "LOAD REPORT" not in caplog.text


def test_a_head_for_other_labels_is_replaced(pretrained, tokenizer, tmp_path):
    recipe = Recipe(model_name_or_path=pretrained)
    first = transfer.start_model(recipe, AutoModelForTokenClassification, tokenizer, num_labels=5)
    first.save_pretrained(tmp_path)
    again = replace(recipe, model_name_or_path=str(tmp_path))
    same = transfer.start_model(again, AutoModelForTokenClassification, tokenizer, num_labels=5)
    assert torch.equal(same.classifier.weight, first.classifier.weight)
    other = transfer.start_model(again, AutoModelForTokenClassification, tokenizer, num_labels=3)
    assert other.classifier.weight.shape == (3, 16) and other.classifier.weight.std() > 0
    assert torch.equal(other.electra.encoder.norm.weight, first.electra.encoder.norm.weight)


def test_a_half_precision_checkpoint_is_trained_in_float32(tokenizer, tmp_path):
    BertModel(CONFIGS["bert"]).half().save_pretrained(tmp_path)
    recipe = Recipe(model_name_or_path=str(tmp_path))
    with pytest.raises(InputError, match=r"knows 99 tokens, the tokenizer has 120"):
        transfer.start_model(recipe, AutoModelForTokenClassification, tokenizer)
    small = train_tokenizer(TEXTS, TokenizerArguments(vocab_size=90))
    model = transfer.start_model(recipe, AutoModelForTokenClassification, small, num_labels=3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_any_object_can_take_the_place_of_an_auto_class(pretrained, tokenizer):
    for recipe in (Recipe(model_name_or_path=pretrained), Recipe(config_name=pretrained), Recipe()):
        model = transfer.start_model(recipe, Linking, tokenizer, num_labels=4, tree=False)
        assert not model.config.tree and model.config.num_labels == 4
        assert model.encoder.config.vocab_size == len(tokenizer)


def test_from_scratch_with_a_configuration_or_without(pretrained, tokenizer):
    recipe = Recipe(config_name=pretrained)
    found = transfer.start_tokenizer(recipe, TEXTS)
    model = transfer.start_model(recipe, AutoModelForSequenceClassification, found, num_labels=7)
    assert model.config.hidden_size == 16 and model.config.num_labels == 7
    weights = load_file(f"{pretrained}/model.safetensors")
    assert not torch.equal(
        model.electra.encoder.layers[0].attention.out.weight, weights["electra.encoder.layers.0.attention.out.weight"]
    )
    tiny = transfer.start_model(Recipe(), AutoModelForSequenceClassification, tokenizer, num_labels=2)
    config = tiny.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (128, 4, len(tokenizer))
    assert config.position_embedding_type == "rotary" and config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (GPT2Config(), "gpt2 is a decoder"),
        (ViTConfig(), "vit is a model of images"),
        (BartConfig(), "bart is an encoder-decoder"),
        (BertConfig(is_decoder=True), "bert is a decoder"),
        (HfTinyTokenLinkingConfig(), "hf_tiny_token_linking is not a language model"),
    ],
)
@pytest.mark.parametrize("option", ["model_name_or_path", "config_name"])
def test_what_is_no_encoder_is_refused(config, kind, option, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=rf"--{option} .*: {kind}.* Give an encoder"):
        transfer.start_tokenizer(Recipe(**{option: str(tmp_path)}), TEXTS)


def test_what_is_no_checkpoint_is_refused(pretrained, tokenizer, tmp_path):
    def start(folder):
        recipe = Recipe(model_name_or_path=str(folder))
        transfer.start_tokenizer(recipe, TEXTS)
        transfer.start_model(recipe, AutoModelForSequenceClassification, tokenizer)

    for name in ("empty", "other", "weightless", "torn", "generator"):
        (tmp_path / name).mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"learning_rate": 1}))
    for name in ("weightless", "torn"):
        OURS.save_pretrained(tmp_path / name)
    (tmp_path / "torn/model.safetensors").write_bytes(b"torn")
    for name in ("nowhere", "empty", "other"):
        with pytest.raises(InputError, match=r"--model_name_or_path .*: no model could be found"):
            start(tmp_path / name)
    with pytest.raises(InputError, match=r"--model_name_or_path .*weightless: no tokenizer could be loaded"):
        start(tmp_path / "weightless")
    for name in ("weightless", "torn"):
        tokenizer.save_pretrained(tmp_path / name)
        with pytest.raises(InputError, match=r"its weights could not be loaded"):
            start(tmp_path / name)
    model = HfTinyElectraForPreTraining.from_pretrained(pretrained)
    state = {name: value for name, value in model.state_dict().items() if "encoder.layers" not in name}
    model.save_pretrained(tmp_path / "generator", state_dict=state)
    tokenizer.save_pretrained(tmp_path / "generator")
    with pytest.raises(InputError, match=r"it lacks \d+ weights of the encoder, such as electra.encoder.layers.0"):
        start(tmp_path / "generator")


def test_a_trained_tokenizer_belongs_to_its_texts(tmp_path):
    settings = Recipe(vocab_size=100)
    with mock.patch("hf_tiny.tokenizer.HF_DATASETS_CACHE", tmp_path):
        one, same, other = (transfer.start_tokenizer(settings, texts) for texts in (TEXTS, list(TEXTS), TEXTS[:2] * 2))
    assert one.get_vocab() == same.get_vocab() != other.get_vocab()
    assert len(list((tmp_path / "hf_tiny_tokenizers").iterdir())) == 2


def test_the_configuration_names_the_labels_or_a_number(pretrained, tokenizer, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(pretrained, num_labels=3).save_pretrained(tmp_path)
    names = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
    number = {"num_labels": 1, "problem_type": "regression"}
    for recipe in (Recipe(model_name_or_path=str(tmp_path)), Recipe(config_name=str(tmp_path)), Recipe()):
        for auto_class in (AutoModelForSequenceClassification, Linking):
            config = transfer.start_model(recipe, auto_class, tokenizer, **names).config
            assert (config.num_labels, config.id2label, config.label2id) == (2, names["id2label"], names["label2id"])
        config = transfer.start_model(recipe, AutoModelForSequenceClassification, tokenizer, **number).config
        assert (config.num_labels, config.problem_type, len(config.id2label)) == (1, "regression", 1)


# Forgetting


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "raw.txt"
    path.write_text("\n".join(TEXTS * 30))
    return str(path)


def test_forgetting_is_zero_without_training_and_grows_with_the_damage(pretrained, tokenizer, text):
    recipe = Recipe(model_name_or_path=pretrained, measure_forgetting=[text])
    model = transfer.start_model(recipe, AutoModelForSequenceClassification, tokenizer)
    state = torch.get_rng_state()
    _, (_, forgetting) = transfer.prepare(model, recipe)  # the first pulls towards the start: L2-SP
    assert torch.equal(torch.get_rng_state(), state)
    figures = forgetting.on_train_end(SimpleNamespace(step=1, max_steps=1), model)
    names = {f"forgetting_{name}_{when}" for name in transfer.FORGETTING_FIGURES for when in ("before", "after")}
    assert figures.keys() == names
    for name in transfer.FORGETTING_FIGURES:
        assert figures[f"forgetting_{name}_after"] == figures[f"forgetting_{name}_before"]
    changes = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.electra.parameters():
                parameter += 0.5 * torch.randn_like(parameter)
        figures = forgetting.on_train_end(SimpleNamespace(step=1, max_steps=1), model)
        changes.append(figures["forgetting_mlm_loss_after"] - figures["forgetting_mlm_loss_before"])
        assert figures["forgetting_rtd_loss_after"] != figures["forgetting_rtd_loss_before"]
    assert 0 < changes[0] < changes[1]


def test_forgetting_needs_generator_and_discriminator_and_text(pretrained, tokenizer, text, tmp_path):
    CONFIGS["bert"].save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="was not pretrained by hf_tiny"):
        transfer.Forgetting(str(tmp_path / "bert"), [text])
    AutoModel.from_pretrained(pretrained).save_pretrained(tmp_path / "encoder")
    with pytest.raises(InputError, match="has no generator or no discriminator"):
        transfer.Forgetting(str(tmp_path / "encoder"), [text])
    short = tmp_path / "short.txt"
    short.write_text("the fox")
    with pytest.raises(InputError, match="too short"):
        transfer.Forgetting(pretrained, [str(short)])


def test_every_file_has_its_share_of_the_blocks(tokenizer, tmp_path):
    for name, words in (("one", TEXTS[0]), ("two", TEXTS[1])):
        (tmp_path / f"{name}.txt").write_text("\n".join([words] * 2000))
    blocks = transfer.raw_blocks([str(tmp_path / "one.txt"), str(tmp_path / "two.txt")], tokenizer, 64)
    assert len(blocks) == transfer.FORGETTING_BLOCKS
    ids = torch.tensor(blocks["input_ids"])
    assert (ids[:, 0] == tokenizer.cls_token_id).all() and (ids[:, -1] == tokenizer.sep_token_id).all()
    assert "lazy dog" in tokenizer.decode(ids[127]) and "discriminator finds" in tokenizer.decode(ids[128])


# In the loop


class Labelled(Source):
    """Micro-batches whose label can be read off the first word."""

    batch_size, fingerprint = 8, "toy"

    def __len__(self):
        return 10

    def __getitem__(self, index):
        ids = torch.randint(5, 99, (8, 10), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids[:, 1] % 2, "num_items_in_batch": torch.tensor([8, 80])}


def train_it(recipe: Recipe, model: nn.Module | None = None) -> dict[str, float]:
    if model is None:
        torch.manual_seed(0)
        model = classifier()
    groups, callbacks = transfer.prepare(model, recipe)
    return train(model, Labelled(), recipe, groups=groups, callbacks=callbacks)


def train_here(folder, **settings) -> dict[str, float]:
    AcceleratorState._reset_state(True)
    recipe = Recipe(
        output_dir=str(folder), model_name_or_path="some", save_total_limit=None, learning_rate=1e-2, **settings
    )
    with mock.patch.object(hub, "draw_curves", tiny_run.without_curves):
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


def test_a_run_leaves_a_plain_model_and_says_what_it_forgot(pretrained, tokenizer, text, tmp_path):
    AcceleratorState._reset_state(True)
    settings = {"lora_rank": 2, "learning_rate": 5e-2, "max_steps": 5, "measure_forgetting": [text]}
    recipe = Recipe(output_dir=str(tmp_path / "run"), model_name_or_path=pretrained, **settings)
    model = transfer.start_model(recipe, AutoModelForSequenceClassification, tokenizer)
    with mock.patch.object(hub, "draw_curves", tiny_run.without_curves):
        results = train_it(recipe, model)
    assert json.loads((tmp_path / "run/all_results.json").read_text()) == results
    assert results["forgetting_rtd_loss_after"] != results["forgetting_rtd_loss_before"]
    again = transfer.Forgetting(pretrained, [text])
    figures = again.on_train_end(SimpleNamespace(), AutoModel.from_pretrained(tmp_path / "run"))
    assert figures == pytest.approx({name: results[name] for name in figures}, abs=1e-5)


def train_in_a_process(*flags) -> None:
    hub.draw_curves = tiny_run.without_curves
    sys.argv = ["toy.py", *flags]
    hf_tiny.train.run(train_it, Recipe)


def test_two_processes_unfreeze_and_adapt_like_one(tmp_path):
    settings = {"max_steps": 6, "slow_start_steps": 2, "unfreeze_steps": 1, "lora_rank": 2}
    flags = {"learning_rate": 1e-2, "model_name_or_path": "some", **settings}
    two = tiny_run.start_group(tmp_path / "two", 2, train_in_a_process, **flags)
    train_here(tmp_path / "one", gradient_accumulation_steps=2, **settings)
    for started in two:
        assert (ended := started.wait()).code == 0, ended.err
    assert tiny_run.largest_difference(tmp_path / "one", tmp_path / "two") < 1e-5
