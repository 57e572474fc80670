"""Going on with native generators and discriminators: learning, resuming, two processes, what is saved, and mistakes."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fixtures import tiny_run
from fixtures.tiny_run import assert_refused, finish, finish_together, metrics, results_of, run_to, write_text
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoTokenizer,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2Model,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    PreTrainedModel,
)

from hf_tiny import HfTinyPairForPreTraining, InputError
from hf_tiny.models.pair import DebertaV2Discriminator
from hf_tiny.tasks.pairs import load_native, start_pair
from hf_tiny.tasks.pretrain import ElectraArguments

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
         "max_position_embeddings": 32, "initializer_range": 0.1}  # fmt: skip
ELECTRA = {**SIZES, "embedding_size": 16}
DEBERTA = {**SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8,
           "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0}  # fmt: skip
NARROW = {"hidden_size": 16, "intermediate_size": 32}
RUN = {"max_seq_length": 16, "per_device_train_batch_size": 8, "logging_steps": 1, "eval_steps": 0, "learning_rate": 5e-3,
       "warmup_steps": 0.1}  # fmt: skip
KINDS = ["electra", "deberta-v2"]


def natives(kind: str, vocab_size: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Random ones; ELECTRA's share their embeddings, as the published ones do."""
    torch.manual_seed(0)
    if kind == "electra":
        discriminator = ElectraForPreTraining(ElectraConfig(vocab_size=vocab_size, **ELECTRA))
        generator = ElectraForMaskedLM(ElectraConfig(vocab_size=vocab_size, **{**ELECTRA, **NARROW}))
        generator.electra.embeddings.load_state_dict(discriminator.electra.embeddings.state_dict())
        return discriminator, generator
    config = DebertaV2Config(vocab_size=vocab_size, **DEBERTA)
    return DebertaV2Model(config), DebertaV2ForMaskedLM(DebertaV2Config(vocab_size=vocab_size, legacy=False, **DEBERTA))


def save(folder: Path, kind: str, tokenizer, vocab_size: int | None = None) -> dict[str, str]:
    """A pair in a folder, and the flags that name it."""
    flags = {}
    for side, model in zip(("discriminator", "generator"), natives(kind, vocab_size or len(tokenizer)), strict=True):
        place = folder / kind / side
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
        flags[f"{side}_name"] = str(place)
    return flags


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, tokenizer) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("pairs")
    return {kind: save(folder, kind, tokenizer) for kind in KINDS}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 400)


def given(**changes) -> SimpleNamespace:
    flags = {"tokenizer_name": None, "max_seq_length": 16, "seed": 0, "output_dir": "run", "given_settings": {}}
    return SimpleNamespace(**{**vars(ElectraArguments()), **flags, **changes})


def inputs(vocab_size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, vocab_size, (3, 12))
    labels = torch.where(torch.rand(ids.shape) < 0.3, ids, -100)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels[mask == 0] = -100
    noise = torch.rand(ids.shape)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "sampling_noise": noise}


# The joint model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharing", ["none", "embeddings", "disentangled"])
@torch.no_grad()
def test_the_joint_model_is_saved_and_loaded_whole(kind, sharing, pairs, tokenizer, tmp_path):
    model, _, _ = start_pair(given(**pairs[kind], given_settings={"sharing": sharing}))
    tables = [part.get_input_embeddings().weight for part in (model.discriminator, model.generator)]
    assert (tables[0] is tables[1]) == (sharing == "embeddings")
    batch, expected = inputs(len(tokenizer)), None
    expected = model.eval()(**batch)
    model.save_pretrained(tmp_path)
    for loader in (HfTinyPairForPreTraining, AutoModelForPreTraining):
        found, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(found) is HfTinyPairForPreTraining and not any(info.values()), info
        assert found.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
        for name in ("loss", "logits", "mlm_logits"):
            torch.testing.assert_close(found(**batch)[name], expected[name], rtol=0, atol=0)
        again = [part.get_input_embeddings().weight for part in (found.discriminator, found.generator)]
        assert (again[0] is again[1]) == (sharing == "embeddings")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_joint_model_says_what_its_natives_say(kind, pairs, tokenizer):
    model, _, _ = start_pair(given(**pairs[kind]))
    assert model.config.sharing == {"electra": "embeddings", "deberta-v2": "disentangled"}[kind]
    batch = inputs(len(tokenizer))
    outputs, ids, mask = model.eval()(**batch), batch["input_ids"], batch["attention_mask"]
    generator = AutoModelForMaskedLM.from_pretrained(pairs[kind]["generator_name"]).eval()
    masked = batch["labels"] != -100
    torch.testing.assert_close(outputs.mlm_logits, generator(ids, attention_mask=mask).logits[masked])
    torch.testing.assert_close(outputs.loss, outputs.mlm_loss + 50 * outputs.rtd_loss)
    judged = model(ids, attention_mask=mask).logits
    if kind == "electra":
        native = ElectraForPreTraining.from_pretrained(pairs[kind]["discriminator_name"]).eval()
        torch.testing.assert_close(judged, native(ids, attention_mask=mask).logits)
    else:
        encoder = AutoModel.from_pretrained(pairs[kind]["discriminator_name"]).eval()
        states = encoder(ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(judged, model.discriminator.mask_predictions(states))


def test_a_new_head_is_logged_and_a_saved_one_is_taken(pairs, tokenizer, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    model = load_native("--discriminator_name", pairs["deberta-v2"]["discriminator_name"], "discriminator")
    assert "has no mask_predictions" in caplog.text
    caplog.clear()
    model.save_pretrained(tmp_path)
    again = load_native("--discriminator_name", str(tmp_path), "discriminator")
    assert not caplog.text and isinstance(again, DebertaV2Discriminator)
    state = again.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    legacy = DebertaV2ForMaskedLM(DebertaV2Config(vocab_size=len(tokenizer), **DEBERTA))
    legacy.save_pretrained(tmp_path / "legacy")
    flags = {**pairs["deberta-v2"], "generator_name": str(tmp_path / "legacy")}
    batch = inputs(len(tokenizer))
    joint = start_pair(given(**flags))[0].eval()
    with torch.no_grad():
        native = legacy.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        torch.testing.assert_close(joint(**batch).mlm_logits, native[batch["labels"] != -100])


def test_the_head_of_a_published_generator_is_found(pairs, tmp_path, caplog):
    """Its configuration is silent about it, and transformers would make another one."""
    caplog.set_level(logging.INFO)
    expected = DebertaV2ForMaskedLM.from_pretrained(pairs["deberta-v2"]["generator_name"])
    expected.config.legacy = True
    expected.save_pretrained(tmp_path)
    found = load_native("--generator_name", str(tmp_path), "generator")
    assert not caplog.text
    state = found.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in expected.state_dict().items())


ELSEWHERE = """
import sys, torch
from transformers import AutoModelForPreTraining
model = AutoModelForPreTraining.from_pretrained(sys.argv[1], trust_remote_code=True)
assert "hf_tiny" not in sys.modules and type(model).__name__ == "HfTinyPairForPreTraining"
print(model.eval()(torch.arange(5, 15)[None]).logits.sum().item())
"""


def test_it_travels_with_its_code(pairs, tmp_path):
    model, _, _ = start_pair(given(**pairs["deberta-v2"]))
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model.eval()(torch.arange(5, 15)[None]).logits.sum().item()
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", ELSEWHERE, str(tmp_path / "model")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) == pytest.approx(expected, abs=1e-4)


# Runs


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_and_leaves_native_models(kind, pairs, text, tokenizer, tmp_path):
    run = finish(
        tmp_path / "run", "pretrain_electra", train_file=text, max_steps=30, save_steps=0, **RUN, **pairs[kind]
    )
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    assert len(losses) == 30 and sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert "pretrained further" in (run / "README.md").read_text()
    joint = AutoModelForPreTraining.from_pretrained(run).eval()
    heads = {
        "electra": (ElectraForPreTraining, ElectraForMaskedLM),
        "deberta-v2": (DebertaV2Model, DebertaV2ForMaskedLM),
    }
    ids = inputs(len(tokenizer))["input_ids"]
    with torch.no_grad():
        for side, native_class in zip(("discriminator", "generator"), heads[kind], strict=True):
            native, info = native_class.from_pretrained(run / side, output_loading_info=True)
            assert not info["missing_keys"] and not info["mismatched_keys"]
            found, expected = native.eval()(ids), joint.get_submodule(side)
            if native_class is DebertaV2Model:
                expected, found = expected.deberta(ids).last_hidden_state, found.last_hidden_state
            else:
                expected, found = expected(ids).logits, found.logits
            torch.testing.assert_close(found, expected)
            assert AutoTokenizer.from_pretrained(run / side).get_vocab() == tokenizer.get_vocab()
    again = {f"{side}_name": str(run / side) for side in ("discriminator", "generator")}
    model, _, _ = start_pair(given(**again))
    state = joint.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sharing"), [("electra", "embeddings"), ("deberta-v2", "disentangled")])
def test_a_resume_is_bit_equal_and_two_processes_are_one(kind, sharing, pairs, text, tmp_path):
    flags = {**RUN, **pairs[kind], "train_file": text, "max_steps": 4, "save_steps": 2, "sharing": sharing}
    one = finish(tmp_path / "one", "pretrain_electra", **flags)
    again = finish(tmp_path / "again", "pretrain_electra", **flags, resume_from_checkpoint=one / "checkpoint-2")
    tiny_run.assert_same_training(one / "checkpoint-4", again / "checkpoint-4")
    still = {**flags, "max_steps": 3, "learning_rate": 1e-3, "save_steps": 0}
    plain = pairs_without_dropout(tmp_path, flags)
    single = finish(tmp_path / "single", "pretrain_electra", **{**still, **plain})
    halves = {**still, **plain, "per_device_train_batch_size": 4}
    double = finish_together(tmp_path / "double", "pretrain_electra", **halves)
    assert results_of(double)["num_processes"] == 2
    assert tiny_run.largest_difference(single, double) < 1e-4


def pairs_without_dropout(folder: Path, flags: dict) -> dict[str, str]:
    """The same models; random numbers of processes differ."""
    found = {}
    for side in ("discriminator", "generator"):
        model = AutoModel if side == "discriminator" and "deberta" in flags["generator_name"] else None
        name = flags[f"{side}_name"]
        auto = model or (AutoModelForPreTraining if side == "discriminator" else AutoModelForMaskedLM)
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        auto.from_pretrained(name, **still).save_pretrained(folder / side)
        AutoTokenizer.from_pretrained(name).save_pretrained(folder / side)
        found[f"{side}_name"] = str(folder / side)
    return found


# Mistakes


def test_what_cannot_be_is_refused_in_words(pairs, tokenizer, tmp_path):
    electra, deberta = pairs["electra"], pairs["deberta-v2"]
    larger = save(tmp_path / "larger", "electra", tokenizer, len(tokenizer) + 8)
    bert = tmp_path / "bert"
    AutoConfig.for_model("bert", vocab_size=len(tokenizer), **SIZES).save_pretrained(bert)
    mixed = {**electra, "generator_name": deberta["generator_name"]}
    cases = [
        (
            {**electra, "generator_name": larger["generator_name"]},
            [f"vocabulary of {len(tokenizer)} ", f"one of {len(tokenizer) + 8}:", "one pair"],
        ),
        ({**electra, "generator_name": str(bert)}, ["bert cannot be one of a pair", "electra, deberta-v2"]),
        ({"discriminator_name": electra["discriminator_name"]}, ["needs --generator_name"]),
        ({"generator_name": electra["generator_name"]}, ["needs --discriminator_name"]),
        ({**electra, "model_name_or_path": "runs/mine"}, ["leave out --model_name_or_path"]),
        ({**electra, "tokenizer_name": "other"}, ["leave out --tokenizer_name"]),
        ({**electra, "given_settings": {"hidden_size": 64}}, ["leave out --hidden_size"]),
        ({**electra, "given_settings": {"sharing": "all"}}, ["--sharing all", "disentangled"]),
        ({**mixed, "given_settings": {"sharing": "embeddings"}}, ["--sharing none", "_embeddings.weight is"]),
        ({**electra, "objective": "two_stage"}, ["--objective two_stage", "joint only"]),
        ({**electra, "max_seq_length": 64}, ["--max_seq_length 64", "32 positions"]),
        ({**electra, "generator_name": str(tmp_path / "nothing")}, ["--generator_name", "nothing"]),
    ]
    for flags, words in cases:
        with pytest.raises(InputError) as caught:
            start_pair(given(**flags))
        assert all(word in str(caught.value) for word in words), caught.value
    assert start_pair(given(**mixed))[0].config.sharing == "none"


def test_a_run_with_one_flag_only_is_refused(pairs, text, tmp_path):
    name = pairs["electra"]["discriminator_name"]
    ended = run_to(tmp_path / "run", "pretrain_electra", train_file=text, discriminator_name=name)
    assert_refused(ended, "--discriminator_name", "--generator_name")
