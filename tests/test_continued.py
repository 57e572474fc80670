"""Going on with pretraining: from hf_tiny's and from native checkpoints, with the old vocabulary or a larger one."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_run
import torch
from tiny_run import weights, write_text
from transformers import AutoTokenizer, BertTokenizerFast

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, InputError, convert
from hf_tiny.continued import ContinueArguments, extend, go_on, load_electra
from hf_tiny.tokenizer import TokenizerArguments, extend_tokenizer, train_tokenizer

SIZES = {"embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 64, "max_position_embeddings": 64, "generator_size": 0.5}  # fmt: skip
NEW = ["the parliament amends the commercial statute", "a statute of the parliament"] * 50
RECIPE = SimpleNamespace(**vars(ContinueArguments()), tokenizer_name=None, max_seq_length=64)


def given(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(RECIPE), **changes})


@pytest.fixture(params=["none", "embeddings"])
def start(request, tokenizer, tmp_path):
    """A folder as pretrain_electra.py leaves it."""
    config = HfTinyElectraConfig(**SIZES, sharing=request.param, vocab_size=len(tokenizer))
    HfTinyElectraForPreTraining(config).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def test_both_kinds_of_checkpoints_are_taken_whole(start, tmp_path):
    ours = HfTinyElectraForPreTraining.from_pretrained(start)
    convert.convert(str(start), tmp_path / "native")
    for name, place in ((start, start), *((tmp_path / n, tmp_path / "native/discriminator") for n in
                                          ("native", "native/discriminator"))):  # fmt: skip
        model, found = load_electra(str(name))
        assert found == str(place)
        assert model.config.sharing == ours.config.sharing  # seen in the weights of the native ones
        state = model.state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in ours.state_dict().items())


def test_new_pieces_are_appended_and_used(tokenizer, tmp_path):
    bert = BertTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="[UNK]")
    for kind in (tokenizer, bert):
        kind.save_pretrained(tmp_path / "old")
        old, extended, again = (AutoTokenizer.from_pretrained(tmp_path / "old") for _ in range(3))
        pieces = extend_tokenizer(extended, NEW, 4)
        assert len(pieces) == 4 and pieces == extend_tokenizer(again, NEW, 4)
        known, grown = old.get_vocab(), extended.get_vocab()
        assert {token: grown[token] for token in known} == known
        assert [grown[piece] for piece in pieces] == list(range(len(known), len(known) + 4))
        assert len(old.tokenize(NEW[0])) > 2 * len(extended.tokenize(NEW[0]))
        whole = [piece for piece in pieces if not piece.startswith("##") and len(piece) > 1]
        assert "parliament" in whole and "statute" in whole
        for piece in whole:
            assert pieces[piece] == old.convert_tokens_to_ids(old.tokenize(piece))
        extended.save_pretrained(tmp_path / "extended")
        assert AutoTokenizer.from_pretrained(tmp_path / "extended").tokenize(NEW[0]) == extended.tokenize(NEW[0])


def test_new_pieces_start_from_the_mean_of_their_old_ones(start):
    model, tokenizer = load_electra(str(start))[0], AutoTokenizer.from_pretrained(start)
    torch.nn.init.normal_(model.generator_lm_head.bias)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    pieces = extend_tokenizer(tokenizer, NEW, 4)
    extend(model, tokenizer, pieces)
    first = len(tokenizer) - 4
    tables = [key for key in before if len(before[key]) == first]
    assert len(tables) == 3 + (model.config.sharing == "none") and model.config.vocab_size == len(tokenizer)
    for key in tables:
        after = model.state_dict()[key]
        assert torch.equal(after[:first], before[key])
        for number, old in enumerate(pieces.values()):
            assert torch.equal(after[first + number], before[key][old].mean(0))
    assert model.generator_lm_head.weight is model.generator_embeddings.word_embeddings.weight


def test_a_run_goes_on_in_a_new_field_and_says_what_it_forgets(start, tmp_path):
    new, old = write_text(tmp_path / "new.txt"), write_text(tmp_path / "old.txt", seed=1)
    flags = {"model_name_or_path": start, "train_file": new, "extend_vocab": 20, "measure_forgetting": old,
             "max_steps": 4, "save_steps": 2, "max_seq_length": 16, "learning_rate": 1e-2}  # fmt: skip
    ended = tiny_run.recipe(tmp_path, *tiny_run.flags(output_dir=tmp_path / "run", **flags))
    assert ended.code == 0, ended.err
    results = json.loads((tmp_path / "run/all_results.json").read_text())
    assert results["forgetting_mlm_loss_after"] != results["forgetting_mlm_loss_before"]
    model = HfTinyElectraForPreTraining.from_pretrained(tmp_path / "run")
    before = HfTinyElectraForPreTraining.from_pretrained(start)
    assert model.config.vocab_size == before.config.vocab_size + 20
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run")) == model.config.vocab_size
    _, _, (losses,) = go_on(given(model_name_or_path=str(start), measure_forgetting=[str(old)]), lambda: [])
    kept = go_on(given(model_name_or_path=str(start), measure_forgetting=[str(old)], extend_vocab=20), lambda: NEW)
    assert losses.before.keys() == kept[2][0].before.keys()
    assert losses.batches[0]["labels"].equal(kept[2][0].batches[0]["labels"])  # the same tokens, whatever was added
    flags = {**flags, "resume_from_checkpoint": tmp_path / "run/checkpoint-2"}
    again = tiny_run.recipe(tmp_path, *tiny_run.flags(output_dir=tmp_path / "again", **flags))
    assert again.code == 0, again.err
    tiny_run.assert_same_training(tmp_path / "run/checkpoint-4", tmp_path / "again/checkpoint-4")
    resumed = json.loads((tmp_path / "again/all_results.json").read_text())
    assert {k: v for k, v in resumed.items() if "forgetting" in k} == {k: v for k, v in results.items() if "forg" in k}
    assert weights(tmp_path / "run").keys() == weights(start).keys()


def test_refusals(start, tokenizer, tmp_path):
    for changes, message in (
        ({"tokenizer_name": "x"}, "keeps its vocabulary"),
        ({"max_seq_length": 65}, "has 64 positions"),
        ({"model_name_or_path": str(tmp_path / "nowhere")}, "cannot be loaded"),
    ):
        with pytest.raises(InputError, match=message):
            go_on(given(**{"model_name_or_path": str(start), **changes}), lambda: NEW)
    convert.convert(str(start), tmp_path / "native")
    (tmp_path / "native/discriminator").rename(tmp_path / "alone")
    with pytest.raises(InputError, match="the generator must be beside it"):
        load_electra(str(tmp_path / "alone"))
    bpe = train_tokenizer(NEW, TokenizerArguments(vocab_size=320, tokenizer_model="bpe"))
    with pytest.raises(InputError, match="only WordPiece"):
        extend_tokenizer(bpe, NEW, 5)
    module = tiny_run.recipe_module()
    with pytest.raises(InputError, match="need --model_name_or_path"):
        module.start(replace(module.Recipe(), extend_vocab=5))
