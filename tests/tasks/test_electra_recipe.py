"""Going on with pretraining: from hf_tiny's and from native checkpoints, with the old vocabulary or a larger one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fixtures import tiny_run
from fixtures.tiny_run import finish, results_of, weights, write_text
from transformers import AutoTokenizer, BertTokenizerFast

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, InputError, convert
from hf_tiny.tasks.pretrain import ElectraArguments, continue_electra, extend, load_electra, start_electra
from hf_tiny.tokenizer import TokenizerArguments, extend_tokenizer, train_tokenizer

SIZES = {"embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 64, "max_position_embeddings": 64, "generator_size": 0.5}  # fmt: skip
NEW = ["the parliament amends the commercial statute", "a statute of the parliament"] * 50
CORPUS = SimpleNamespace(documents=lambda: NEW)


def given(**changes) -> SimpleNamespace:
    """The flags of a run that goes on."""
    return SimpleNamespace(
        **{**vars(ElectraArguments()), "tokenizer_name": None, "max_seq_length": 64, "encoding": "utf-8", **changes}
    )


def save(folder: Path, tokenizer, sharing: str) -> Path:
    """A folder as pretrain_electra.py leaves it."""
    HfTinyElectraForPreTraining(
        HfTinyElectraConfig(**SIZES, sharing=sharing, vocab_size=len(tokenizer))
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=["none", "embeddings"])
def either_start(request, tokenizer, tmp_path) -> Path:
    return save(tmp_path / "start", tokenizer, request.param)


@pytest.fixture
def start(tokenizer, tmp_path) -> Path:
    return save(tmp_path / "start", tokenizer, "embeddings")


def test_both_kinds_of_checkpoints_are_taken_whole(either_start, tmp_path):
    ours, native = HfTinyElectraForPreTraining.from_pretrained(either_start), tmp_path / "native"
    convert.convert(str(either_start), native)
    places = {either_start: either_start, native: native / "discriminator"}
    for name, place in (*places.items(), (native / "discriminator", native / "discriminator")):
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


def test_new_pieces_start_from_the_mean_of_their_old_ones(either_start):
    model, tokenizer = load_electra(str(either_start))[0], AutoTokenizer.from_pretrained(either_start)
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
    run = finish(tmp_path / "run", "pretrain_electra", **flags)
    results = results_of(run)
    assert results["forgetting_mlm_loss_after"] != results["forgetting_mlm_loss_before"]
    model, before = (HfTinyElectraForPreTraining.from_pretrained(folder) for folder in (run, start))
    assert model.config.vocab_size == before.config.vocab_size + 20
    assert len(AutoTokenizer.from_pretrained(run)) == model.config.vocab_size
    assert weights(run).keys() == weights(start).keys()
    again = finish(tmp_path / "again", "pretrain_electra", resume_from_checkpoint=run / "checkpoint-2", **flags)
    tiny_run.assert_same_training(run / "checkpoint-4", again / "checkpoint-4")
    forgotten = [{k: v for k, v in figures.items() if "forgetting" in k} for figures in (results, results_of(again))]
    assert forgotten[0] == forgotten[1]


def test_what_is_forgotten_is_measured_on_the_same_tokens_whatever_is_added(start, tmp_path):
    old = write_text(tmp_path / "old.txt", seed=1)
    (plain,), (extended,) = (
        continue_electra(given(model_name_or_path=str(start), measure_forgetting=[str(old)], extend_vocab=new), CORPUS)[
            2
        ]
        for new in (0, 20)
    )
    assert plain.before.keys() == extended.before.keys()
    assert plain.evaluation.batches[0]["labels"].equal(extended.evaluation.batches[0]["labels"])


def test_refusals(start, tmp_path):
    for changes, message in (
        ({"tokenizer_name": "x"}, "keeps its vocabulary"),
        ({"max_seq_length": 65}, "has 64 positions"),
        ({"model_name_or_path": str(tmp_path / "nowhere")}, "nowhere: there is no such folder"),
    ):
        with pytest.raises(InputError, match=message):
            continue_electra(given(**{"model_name_or_path": str(start), **changes}), CORPUS)
    convert.convert(str(start), tmp_path / "native")
    (tmp_path / "native/discriminator").rename(tmp_path / "alone")
    with pytest.raises(InputError, match="the generator must be beside it"):
        load_electra(str(tmp_path / "alone"))
    bpe = train_tokenizer(NEW, TokenizerArguments(vocab_size=320, tokenizer_model="bpe"))
    with pytest.raises(InputError, match="only WordPiece"):
        extend_tokenizer(bpe, NEW, 5)
    for changes in ({"extend_vocab": 5}, {"measure_forgetting": ["x"]}):
        with pytest.raises(InputError, match="need --model_name_or_path"):
            start_electra(given(**changes), CORPUS, pytest.fail)
