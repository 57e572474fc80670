"""What of its pretraining an encoder forgets while it learns a task."""

import pytest
import torch
from conftest import TEXTS
from fixtures.encoders import CONFIGS, save_joint
from fixtures.labelled import write_table
from fixtures.tiny_run import finish, results_of
from transformers import AutoModel, AutoModelForSequenceClassification

from hf_tiny import InputError
from hf_tiny.callbacks import TrainState
from hf_tiny.tasks.pretrain import FORGETTING_BLOCKS, FORGETTING_FIGURES, Forgetting, raw_blocks


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, tokenizer) -> str:
    return save_joint(tmp_path_factory.mktemp("pretrained"), tokenizer)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "raw.txt"
    path.write_text("\n".join(TEXTS * 30))
    return str(path)


def test_forgetting_is_zero_without_training_and_grows_with_the_damage(pretrained, text):
    model = AutoModelForSequenceClassification.from_pretrained(pretrained)
    state = torch.get_rng_state()
    forgetting = Forgetting(pretrained, [text])
    assert torch.equal(torch.get_rng_state(), state)
    figures = forgetting.on_train_end(TrainState(), model)
    names = {f"forgetting_{name}_{when}" for name in FORGETTING_FIGURES for when in ("before", "after")}
    assert figures.keys() == names
    for name in FORGETTING_FIGURES:
        assert figures[f"forgetting_{name}_after"] == figures[f"forgetting_{name}_before"]
    changes = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.electra.parameters():
                parameter += 0.5 * torch.randn_like(parameter)
        figures = forgetting.on_train_end(TrainState(), model)
        changes.append(figures["forgetting_mlm_loss_after"] - figures["forgetting_mlm_loss_before"])
        assert figures["forgetting_rtd_loss_after"] != figures["forgetting_rtd_loss_before"]
    assert 0 < changes[0] < changes[1]


def test_forgetting_needs_generator_and_discriminator_and_text(pretrained, tokenizer, text, tmp_path):
    CONFIGS["bert"].save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="was not pretrained by hf_tiny"):
        Forgetting(str(tmp_path / "bert"), [text])
    AutoModel.from_pretrained(pretrained).save_pretrained(tmp_path / "encoder")
    with pytest.raises(InputError, match="has no generator or no discriminator"):
        Forgetting(str(tmp_path / "encoder"), [text])
    short = tmp_path / "short.txt"
    short.write_text("the fox")
    with pytest.raises(InputError, match="too short"):
        Forgetting(pretrained, [str(short)])


def test_every_file_has_its_share_of_the_blocks(tokenizer, tmp_path):
    for name, words in (("one", TEXTS[0]), ("two", TEXTS[1])):
        (tmp_path / f"{name}.txt").write_text("\n".join([words] * 2000))
    blocks = raw_blocks([str(tmp_path / "one.txt"), str(tmp_path / "two.txt")], tokenizer, 64)
    assert len(blocks) == FORGETTING_BLOCKS
    ids = torch.tensor(blocks["input_ids"])
    assert (ids[:, 0] == tokenizer.cls_token_id).all() and (ids[:, -1] == tokenizer.sep_token_id).all()
    assert "lazy dog" in tokenizer.decode(ids[127]) and "discriminator finds" in tokenizer.decode(ids[128])


def test_a_run_says_what_it_forgot_with_its_adapters(pretrained, text, tmp_path):
    train = write_table(tmp_path / "train.tsv", [(words, "ab"[number % 2]) for number, words in enumerate(TEXTS * 4)])
    settings = {"lora_rank": 2, "learning_rate": 5e-2, "max_steps": 5, "measure_forgetting": text}
    folder = finish(
        tmp_path / "run", "finetune_classifier", model_name_or_path=pretrained, train_file=train, **settings
    )
    results = results_of(folder)
    assert results["forgetting_rtd_loss_after"] != results["forgetting_rtd_loss_before"]
    figures = Forgetting(pretrained, [text]).on_train_end(TrainState(), AutoModel.from_pretrained(folder))
    assert figures == pytest.approx({name: results[name] for name in figures}, abs=1e-5)
