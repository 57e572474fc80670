"""What to start from, and which of its weights may move."""

import ast
import json
import logging
import sys
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import TEXTS
from fixtures.encoders import CONFIGS, LAYERS, OURS, changed, classifier, copies, linker, save_joint
from fixtures.tiny_run import ROOT, flags
from safetensors.torch import load_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BartConfig,
    BertConfig,
    BertModel,
    GPT2Config,
    MarianConfig,
    MarianMTModel,
    ViTConfig,
)

from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyTokenLinkingConfig,
    InputError,
    checkpoint,
    convert,
    optim,
    predict,
    start,
)
from hf_tiny.arguments import parse
from hf_tiny.data import statistics
from hf_tiny.tasks import FinetuneConfig
from hf_tiny.tasks.parse import LinkingOn
from hf_tiny.tokenizer import TokenizerArguments, load_existing, train_tokenizer


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, tokenizer) -> str:
    return save_joint(tmp_path_factory.mktemp("pretrained"), tokenizer)


# What moves


@pytest.mark.parametrize("name", ["hf_tiny", "bert", "deberta-v2"])
def test_only_the_last_layers_are_drawn_anew(name, tmp_path):
    classifier(name).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    places, before = optim.depths(model), copies(model)
    matrices = {key for key, p in model.named_parameters() if p.ndim >= 2 and places[key] in (LAYERS - 1, LAYERS)}
    start.prepare(model, FinetuneConfig(reinit_layers=2, model_name_or_path="some"))
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
    groups, _ = start.prepare(model, FinetuneConfig(trainable_layers=layers, model_name_or_path="some"))
    assert {group["depth"] for group in groups} == expected
    places = optim.depths(model)
    assert {places[name] for name, p in model.named_parameters() if p.requires_grad} == expected


def test_lora_in_the_last_layer_only():
    model = classifier()
    groups, _ = start.prepare(model, FinetuneConfig(lora_rank=2, trainable_layers=1, model_name_or_path="some"))
    assert {group["depth"] for group in groups} == {None, LAYERS}


def test_lora_without_peft_says_how_to_get_it():
    with mock.patch.dict(sys.modules, {"peft": None}), pytest.raises(InputError, match=r"pip install .hf_tiny\[lora\]"):
        start.prepare(classifier(), FinetuneConfig(lora_rank=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_decay": 0}, "--layer_decay 0: it must be above 0 and at most 1"),
        ({"layer_decay": 1.5}, "--layer_decay 1.5"),
        ({"head_lr_factor": 0}, "--head_lr_factor 0"),
        ({"slow_start_steps": -1}, "--slow_start_steps -1"),
        ({"trainable_layers": -2}, "--trainable_layers -2"),
    ],
)
def test_values_that_are_not_possible_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        parse(FinetuneConfig, flags(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 4, "reinit_layers": 1}, "--lora_rank leaves"),
        ({"reinit_layers": 2, "trainable_layers": 1}, "must be trained"),
        ({"config_name": "other"}, "not both"),
        ({"lora_rank": 4, "model_name_or_path": None}, "--lora_rank needs a pretrained encoder"),
        ({"trainable_layers": 0, "model_name_or_path": None}, "--trainable_layers needs a pretrained encoder"),
        ({"measure_forgetting": ["x"], "model_name_or_path": None}, "--measure_forgetting needs a pretrained encoder"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        start.check(FinetuneConfig(**{"model_name_or_path": "some", **settings}))


@pytest.mark.parametrize("name", ["trainable_layers", "reinit_layers"])
def test_more_layers_than_there_are_is_refused(name):
    with pytest.raises(InputError, match=f"--{name} 4: .*has 3 layers"):
        start.prepare(classifier(), FinetuneConfig(**{name: 4}))


def test_what_would_never_learn_is_refused():
    recipe = FinetuneConfig(slow_start_steps=5, unfreeze_steps=5, max_steps=20)
    with pytest.raises(InputError, match="begin to learn at step 20, but the run has 20 steps"):
        start.prepare(classifier(), recipe)


# What to start from


def test_a_checkpoint_is_taken_and_the_head_is_new(pretrained, tokenizer, caplog):
    recipe = FinetuneConfig(model_name_or_path=pretrained)
    caplog.set_level(logging.INFO, logger="hf_tiny")
    found = start.start_tokenizer(recipe, lambda: TEXTS)
    model = start.start_model(recipe, AutoModelForSequenceClassification, found, num_labels=5)
    assert found.get_vocab() == tokenizer.get_vocab() and model.config.num_labels == 5
    weights = load_file(f"{pretrained}/model.safetensors")
    for name, value in model.electra.state_dict().items():
        assert torch.equal(value, weights[f"electra.{name}"])
    body = len(list(model.electra.parameters()))
    assert f"{body} weights taken, 4 new: classifier.dense, classifier.out." in caplog.text
    assert "LOAD REPORT" not in caplog.text


def test_a_head_for_other_labels_is_replaced(pretrained, tokenizer, tmp_path):
    recipe = FinetuneConfig(model_name_or_path=pretrained)
    first = start.start_model(recipe, AutoModelForTokenClassification, tokenizer, num_labels=5)
    first.save_pretrained(tmp_path)
    again = replace(recipe, model_name_or_path=str(tmp_path))
    same = start.start_model(again, AutoModelForTokenClassification, tokenizer, num_labels=5)
    assert torch.equal(same.classifier.weight, first.classifier.weight)
    other = start.start_model(again, AutoModelForTokenClassification, tokenizer, num_labels=3)
    assert other.classifier.weight.shape == (3, 16) and other.classifier.weight.std() > 0
    assert torch.equal(other.electra.encoder.norm.weight, first.electra.encoder.norm.weight)


def test_a_half_precision_checkpoint_is_trained_in_float32(tokenizer, tmp_path):
    BertModel(deepcopy(CONFIGS["bert"])).half().save_pretrained(tmp_path)
    recipe = FinetuneConfig(model_name_or_path=str(tmp_path))
    with pytest.raises(InputError, match="knows 99 tokens, but the tokenizer has 120"):
        start.start_model(recipe, AutoModelForTokenClassification, tokenizer)
    small = train_tokenizer(TEXTS, TokenizerArguments(vocab_size=90))
    model = start.start_model(recipe, AutoModelForTokenClassification, small, num_labels=3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_what_is_not_saved_is_not_learned(tmp_path):
    """Marian computes its positions. As transformers loads them, they would be trained, and lost."""
    sizes = {f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = MarianConfig(vocab_size=20, d_model=8, max_position_embeddings=16, pad_token_id=0, eos_token_id=1, **sizes)
    MarianMTModel(config).save_pretrained(tmp_path)
    model = start.pretrained(str(tmp_path), AutoModelForSeq2SeqLM, {})
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert fixed == {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}


def test_any_object_can_take_the_place_of_an_auto_class(pretrained, tokenizer):
    for recipe in (
        FinetuneConfig(model_name_or_path=pretrained),
        FinetuneConfig(config_name=pretrained),
        FinetuneConfig(),
    ):
        model = start.start_model(recipe, LinkingOn, tokenizer, num_labels=4, tree=False)
        assert not model.config.tree and model.config.num_labels == 4
        assert model.encoder.config.vocab_size == len(tokenizer)


def test_from_scratch_with_a_configuration_or_without(pretrained, tokenizer):
    recipe = FinetuneConfig(config_name=pretrained)
    found = start.start_tokenizer(recipe, lambda: TEXTS)
    model = start.start_model(recipe, AutoModelForSequenceClassification, found, num_labels=7)
    assert model.config.hidden_size == 16 and model.config.num_labels == 7
    weights = load_file(f"{pretrained}/model.safetensors")
    assert not torch.equal(
        model.electra.encoder.layers[0].attention.out.weight, weights["electra.encoder.layers.0.attention.out.weight"]
    )
    tiny = start.start_model(FinetuneConfig(), AutoModelForSequenceClassification, tokenizer, num_labels=2)
    config = tiny.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (128, 4, len(tokenizer))
    assert config.position_embedding_type == "rotary" and config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (GPT2Config(), "gpt2 is a decoder"),
        (ViTConfig(), "vit is a model that classifies images"),
        (BartConfig(), "bart is an encoder-decoder"),
        (BertConfig(is_decoder=True), "bert is a decoder"),
        (HfTinyTokenLinkingConfig(), "hf_tiny_token_linking is another kind of model"),
    ],
)
@pytest.mark.parametrize("option", ["model_name_or_path", "config_name"])
def test_what_is_no_encoder_is_refused(config, kind, option, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=rf"--{option} .*: {kind}.* this needs an encoder. Give one"):
        start.check(FinetuneConfig(**{option: str(tmp_path)}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/mien", "--model_name_or_path runs/mien: there is no such folder. Did you mean runs/mine?"),
        ("./runs/mien", "there is no such folder. Did you mean ./runs/mine?"),
        ("{folder}/runs/mime", "there is no such folder. Did you mean {folder}/runs/mine?"),
        ("runs/mine/checkpoint-3", "runs/mine/checkpoint-3: there is no such folder."),
        ("nowhere/at/all", "nowhere/at/all: there is no such folder."),
    ],
)
def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path, monkeypatch, name, message):
    """The Hub, which may take a minute to fail, is not asked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with (
        mock.patch.object(start.AutoConfig, "from_pretrained", side_effect=AssertionError),
        pytest.raises(InputError) as end,
    ):
        start.check(FinetuneConfig(model_name_or_path=name.format(folder=tmp_path)))
    assert message.format(folder=tmp_path) in str(end.value)


def test_what_may_be_a_repository_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "electro").mkdir()
    for name in ("you/model", "electra"):
        asked = mock.patch.object(start.AutoConfig, "from_pretrained", side_effect=OSError("not on the Hub"))
        with asked, pytest.raises(InputError) as refusal:
            start.check(FinetuneConfig(model_name_or_path=name))
        assert f"--model_name_or_path {name}: no model could be found there: not on the Hub" in str(refusal.value)
    assert str(refusal.value).endswith("Did you mean electro?")
    with pytest.raises(InputError) as refusal:
        start.check(FinetuneConfig(model_name_or_path="electro"))
    assert "Did you mean" not in str(refusal.value)


def test_code_of_others_runs_on_request_only(tmp_path, monkeypatch):
    """Nothing is asked on standard input, where a pipe may answer "y"."""
    (tmp_path / "config.json").write_text('{"model_type": "strange", "auto_map": {"AutoConfig": "code.Strange"}}')
    (tmp_path / "code.py").write_text("raise RuntimeError('code of others has run')\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))
    with pytest.raises(InputError, match=r"code of its own.*Read that, then give --trust_remote_code to run it"):
        start.check(FinetuneConfig(model_name_or_path=str(tmp_path)))
    with pytest.raises(RuntimeError, match="code of others has run"):
        start.check(FinetuneConfig(model_name_or_path=str(tmp_path), trust_remote_code=True))


@pytest.mark.parametrize(
    "load",
    [
        lambda name: start.load_config("--config_name", name),
        lambda name: start.pretrained(name, AutoModelForSequenceClassification, {}),
        lambda name: load_existing("--tokenizer_name", name, ()),
        lambda name: convert.load(start.AutoConfig, name),
        lambda name: predict.load(name),
    ],
    ids=["config", "model", "tokenizer", "convert", "predict"],
)
def test_nothing_that_is_read_asks_for_code_of_others(tmp_path, monkeypatch, load):
    mapped = {"AutoConfig": "code.Strange", "AutoModelForSequenceClassification": "code.Strange"}
    mapped["AutoTokenizer"] = ["code.Strange", None]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange", "auto_map": mapped}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Strange", "auto_map": mapped}))
    (tmp_path / "code.py").write_text("raise SystemExit('code of others has run')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(InputError):
        load(str(tmp_path))


def test_whatever_loads_a_model_says_whether_its_code_may_run():
    """transformers asks on standard input where nothing is said. Classes of transformers and of this package have theirs."""
    for path in (ROOT / "hf_tiny").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr == "from_pretrained"
            ):
                of = ast.unparse(call.func.value)
                said = any(keyword.arg in ("trust_remote_code", None) for keyword in call.keywords)  # None: **changes
                assert said or of.startswith("HfTiny") or of == "model_class", f"{path}:{call.lineno}"


REMOTE = """
from transformers import BertConfig, BertForSequenceClassification

class StrangeConfig(BertConfig):
    model_type = "strange"

class Strange(BertForSequenceClassification):
    config_class = StrangeConfig
"""


def test_a_model_with_code_of_its_own_can_be_fine_tuned(tmp_path, tokenizer):
    (tmp_path / "code_of_mine.py").write_text(REMOTE)
    model = BertModel(CONFIGS["bert"])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"AutoConfig": "StrangeConfig", "AutoModelForSequenceClassification": "Strange"}
    config |= {"model_type": "strange", "auto_map": {auto: f"code_of_mine.{name}" for auto, name in names.items()}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    recipe = FinetuneConfig(model_name_or_path=str(tmp_path), trust_remote_code=True)
    start.check(recipe)
    found = start.start_tokenizer(recipe, lambda: TEXTS)
    assert len(found) == len(tokenizer)
    started = start.pretrained(str(tmp_path), AutoModelForSequenceClassification, {"trust_remote_code": True})
    assert type(started).__name__ == "Strange"
    assert torch.equal(started.bert.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight)


def test_what_is_no_checkpoint_is_refused(pretrained, tokenizer, tmp_path):
    def start_from(folder):
        recipe = FinetuneConfig(model_name_or_path=str(folder))
        start.check(recipe)
        start.start_tokenizer(recipe, lambda: TEXTS)
        start.start_model(recipe, AutoModelForSequenceClassification, tokenizer)

    for name in ("empty", "other", "weightless", "torn", "generator"):
        (tmp_path / name).mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"learning_rate": 1}))
    for name in ("weightless", "torn"):
        OURS.save_pretrained(tmp_path / name)
    (tmp_path / "torn/model.safetensors").write_bytes(b"torn")
    for name in ("nowhere", "empty", "other"):
        with pytest.raises(
            InputError, match=r"--model_name_or_path .*: (no model could be found|there is no such folder)"
        ):
            start_from(tmp_path / name)
    with pytest.raises(InputError, match=r"--model_name_or_path .*weightless: no tokenizer could be loaded"):
        start_from(tmp_path / "weightless")
    for name in ("weightless", "torn"):
        tokenizer.save_pretrained(tmp_path / name)
        with pytest.raises(InputError, match=r"its weights could not be loaded"):
            start_from(tmp_path / name)
    model = HfTinyElectraForPreTraining.from_pretrained(pretrained)
    state = {name: value for name, value in model.state_dict().items() if "encoder.layers" not in name}
    model.save_pretrained(tmp_path / "generator", state_dict=state)
    tokenizer.save_pretrained(tmp_path / "generator")
    with pytest.raises(InputError, match=r"it lacks \d+ weights of the encoder, such as electra.encoder.layers.0"):
        start_from(tmp_path / "generator")


def test_a_trained_tokenizer_belongs_to_its_texts(tmp_path):
    settings = FinetuneConfig(vocab_size=100)
    with mock.patch("datasets.config.HF_DATASETS_CACHE", tmp_path):
        one, same, other = (
            start.start_tokenizer(settings, lambda texts=texts: texts) for texts in (TEXTS, list(TEXTS), TEXTS[:2] * 2)
        )
    assert one.get_vocab() == same.get_vocab() != other.get_vocab()
    assert len(list((tmp_path / "hf_tiny_tokenizers").iterdir())) == 2


def test_the_texts_say_how_large_a_vocabulary_is_and_whether_case_counts(tmp_path):
    """A small vocabulary unless there is much raw text; capitals are kept where the training texts have some."""
    raw = tmp_path / "raw.txt"
    raw.write_text("\n".join(TEXTS))
    for texts, characters, expected in ((["no capital", "소문자"], 1, (99, True)), (["One"], 10**6, (50, False))):
        with (
            mock.patch.multiple(FinetuneConfig, VOCAB_SIZE=50, RAW_VOCAB_SIZE=99),
            mock.patch.object(start, "CHARACTERS", characters),
            mock.patch.object(start, "load_tokenizer") as load,
        ):
            start.start_tokenizer(FinetuneConfig(raw_file=[str(raw)]), lambda texts=texts: texts)
            used = load.call_args.args[0]
            assert (used.vocab_size, used.lowercase) == expected
            start.start_tokenizer(FinetuneConfig(vocab_size=7, lowercase=False), lambda texts=texts: texts)
            used = load.call_args.args[0]
            assert (used.vocab_size, used.lowercase) == (7, False)


def test_the_configuration_names_the_labels_or_a_number(pretrained, tokenizer, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(pretrained, num_labels=3).save_pretrained(tmp_path)
    names = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
    number = {"num_labels": 1, "problem_type": "regression"}
    for recipe in (
        FinetuneConfig(model_name_or_path=str(tmp_path)),
        FinetuneConfig(config_name=str(tmp_path)),
        FinetuneConfig(),
    ):
        for auto_class in (AutoModelForSequenceClassification, LinkingOn):
            config = start.start_model(recipe, auto_class, tokenizer, **names).config
            assert (config.num_labels, config.id2label, config.label2id) == (2, names["id2label"], names["label2id"])
        config = start.start_model(recipe, AutoModelForSequenceClassification, tokenizer, **number).config
        assert (config.num_labels, config.problem_type, len(config.id2label)) == (1, "regression", 1)


# Corpus statistics


def electra(vocabulary: int = 40, **settings) -> HfTinyElectraForPreTraining:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    config = HfTinyElectraConfig(vocab_size=vocabulary, embedding_size=16, generator_size=0.5, **sizes, **settings)
    return HfTinyElectraForPreTraining(config)


def counted(tokens: int = 2000, vocabulary: int = 40):
    numbers = np.random.default_rng(0)
    return statistics.text_counts(
        [numbers.integers(5, vocabulary, 20).tolist() for _ in range(tokens // 20)], vocabulary
    )


@pytest.mark.parametrize("sharing", ["none", "embeddings"])
def test_embeddings_start_from_statistics(sharing):
    recipe, fresh, model = SimpleNamespace(init=None), electra(sharing=sharing), electra(sharing=sharing)
    assert start.start_words(recipe, model, counted)
    tables, usual = (
        (one.get_input_embeddings().weight, one.generator_embeddings.word_embeddings.weight) for one in (model, fresh)
    )
    vectors = torch.from_numpy(statistics.token_vectors(counted(), 16))[5:]
    for table, before in zip(tables, usual, strict=True):
        assert torch.nn.functional.cosine_similarity(table[5:], vectors).min() > 0.9999
        assert table[5:].norm(dim=1).mean().item() == pytest.approx(before.norm(dim=1).mean().item(), rel=1e-4)
    assert torch.equal(tables[0][:5], usual[0][:5])  # special tokens, which do not occur
    others = {name for name, one in model.state_dict().items() if not torch.equal(one, fresh.state_dict()[name])}
    assert all(name.endswith(("word_embeddings.weight", "generator_lm_head.weight")) for name in others)


def test_dimensions_beyond_the_rank_stay_as_they_were():
    table = torch.randn(4, 6)
    before, vectors = table.clone(), np.array([[1, 0], [0, 2], [0, 0], [3, 0]], dtype=np.float32)
    start.set_words([table], vectors)
    assert torch.equal(table[:, 2:], before[:, 2:]) and torch.equal(table[2], before[2])
    assert table[3, 0] / table[0, 0] == pytest.approx(3)


def test_too_little_text_or_a_wish_leaves_them_at_random(caplog):
    model, fresh = electra(), electra()
    assert not start.start_words(SimpleNamespace(init=None), model, lambda: counted(100))
    assert "say too little of the 40 in the vocabulary: the embeddings start at random" in caplog.text
    assert not start.start_words(SimpleNamespace(init="random"), model, counted)
    assert all(torch.equal(one, fresh.state_dict()[name]) for name, one in model.state_dict().items())


def test_a_run_that_goes_on_only_marks_them(tmp_path, caplog, monkeypatch):
    """Its weights are those of the checkpoint; one that is damaged is not gone on from."""
    with checkpoint.complete_or_absent(tmp_path / "checkpoint-2") as draft:
        (draft / "config.json").write_text("{}")
    recipe = SimpleNamespace(init=None, resume_from_checkpoint="latest", output_dir=str(tmp_path))
    model, fresh = electra(), electra()
    with monkeypatch.context() as patch, caplog.at_level("INFO", logger="hf_tiny"):
        patch.setattr(statistics, "token_vectors", lambda *_: pytest.fail("they are computed"))
        assert start.start_words(recipe, model, counted) and not start.start_words(recipe, model, lambda: counted(100))
    assert not caplog.text and all(
        torch.equal(one, fresh.state_dict()[name]) for name, one in model.state_dict().items()
    )
    assert model.get_input_embeddings().weight._from_statistics
    (tmp_path / "checkpoint-2" / "config.json").write_text("{ }")
    with caplog.at_level("INFO", logger="hf_tiny"):
        assert start.start_words(recipe, model, counted)
    assert "start from corpus statistics" in caplog.text


@pytest.mark.parametrize("flags", [{"init": "statistics"}, {"raw_file": ["text.txt"]}])
def test_statistics_are_for_models_from_scratch(flags):
    recipe = SimpleNamespace(**{"init": None, "raw_file": None, "model_name_or_path": "runs/mine", **flags})
    with pytest.raises(InputError, match=f"--{next(iter(flags))} is for a model from scratch"):
        start.check_init(recipe)


def test_words_from_statistics_learn_more_slowly():
    model, recipe = electra(), SimpleNamespace(init=None)
    groups = optim.layer_groups(model, 0.01)
    assert [len(group["params"]) for group in start.slow_words(groups, 0.1)] == [
        len(group["params"]) for group in groups
    ]
    start.start_words(recipe, model, counted)
    groups = optim.layer_groups(model, 0.01, layer_decay=0.5)
    count, own = sum(len(group["params"]) for group in groups), next(g["factor"] for g in groups if g["depth"] == 0)
    *others, slow = start.slow_words(groups, 0.1)
    assert slow["params"] == [model.get_input_embeddings().weight] and slow["factor"] == pytest.approx(0.1 * own)
    assert sum(len(group["params"]) for group in others) == count - 1


def test_words_that_were_pretrained_here_learn_more_slowly_too():
    """Those of a native encoder do not: nothing says where they come from."""
    ours = HfTinyElectraForSequenceClassification(electra().config)
    recipe = FinetuneConfig(model_name_or_path="some", words_lr_factor=0.1)
    words = ours.get_input_embeddings().weight
    factors = {
        id(parameter): group["factor"] for group in start.prepare(ours, recipe)[0] for parameter in group["params"]
    }
    assert factors.pop(id(words)) == pytest.approx(0.1) and set(factors.values()) == {1.0}
    assert {group["factor"] for group in start.prepare(classifier("bert"), recipe)[0]} == {1.0}
