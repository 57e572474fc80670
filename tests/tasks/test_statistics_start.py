"""Runs that start from corpus statistics: what moves, exact resuming, two processes, and what is refused."""

import pytest
import torch
from fixtures import tiny_run
from fixtures.finetuning import given, make_home
from fixtures.tiny_run import assert_refused, finish, finish_together, results_of, run_to, weights, write_text

pytestmark = pytest.mark.slow
TINY = {"vocab_size": 200, "max_steps": 4, "max_seq_length": 16, "hidden_size": 32, "embedding_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "generator_size": 0.5}  # fmt: skip
WORDS = "electra.embeddings.word_embeddings.weight"


@pytest.mark.parametrize("sharing", ["embeddings", "none"])
def test_pretraining_starts_from_statistics_goes_on_exactly_and_is_the_same_in_two_processes(sharing, tmp_path):
    flags = {"train_file": write_text(tmp_path / "text.txt", 1000), "save_steps": 2, **TINY}
    flags |= {"sharing": sharing, "freeze_words": True}
    one = finish(tmp_path / "one", "pretrain_electra", per_device_train_batch_size=8, **flags)
    again = finish(tmp_path / "again", "pretrain_electra", per_device_train_batch_size=8, **flags,
                   resume_from_checkpoint=one / "checkpoint-2")  # fmt: skip
    tiny_run.assert_same_training(one / "checkpoint-4", again / "checkpoint-4")
    two = finish_together(tmp_path / "two", "pretrain_electra", per_device_train_batch_size=4, **flags)
    assert tiny_run.largest_difference(one, two) < 1e-5 and results_of(two)["num_processes"] == 2
    early, late = (weights(one / f"checkpoint-{step}") for step in (2, 4))
    assert torch.equal(early[WORDS], late[WORDS])
    own = WORDS.replace("electra", "generator")
    assert (own in early) == (sharing == "none") and not (own in early and torch.equal(early[own], late[own]))
    assert not torch.equal(early["generator_lm_head.bias"], late["generator_lm_head.bias"])
    assert weights(one)["generator_lm_head.bias"].std() > 0.5  # it began with how frequent words are
    free = finish(tmp_path / "free", "pretrain_electra", **{**flags, "freeze_words": False})
    assert not torch.equal(weights(free / "checkpoint-2")[WORDS], weights(free / "checkpoint-4")[WORDS])


def test_disentangled_embeddings_go_on_exactly_and_are_the_same_in_two_processes(tmp_path):
    """This is what the tiny preset does. Two processes get the same number of steps from --max_minutes, and the run of
    one process of so many."""
    flags = {"train_file": write_text(tmp_path / "text.txt", 1000), **TINY, "num_hidden_layers": 2, "save_steps": 2}
    timed = {**flags, "max_steps": -1, "max_minutes": 0.02}
    two = finish_together(tmp_path / "two", "pretrain_electra", per_device_train_batch_size=4, **timed)
    flags["max_steps"] = steps = results_of(two)["train_steps"]
    one = finish(tmp_path / "one", "pretrain_electra", per_device_train_batch_size=8, **flags, save_total_limit=0)
    assert steps > 4 and results_of(two)["num_processes"] == 2
    assert tiny_run.largest_difference(one, two) < 1e-4
    again = finish(tmp_path / "again", "pretrain_electra", per_device_train_batch_size=8, **flags,
                   resume_from_checkpoint=one / "checkpoint-2")  # fmt: skip
    tiny_run.assert_same_training(one / f"checkpoint-{steps}", again / f"checkpoint-{steps}")
    first, last = weights(one / "checkpoint-2"), weights(one)
    moved = {name: last[name] - first[name] for name in (WORDS, WORDS.replace("electra", "generator"))}
    assert all(change.abs().max() > 1e-3 for change in moved.values())
    assert torch.nn.functional.cosine_similarity(*moved.values()).mean() > 0.3  # one follows the other
    assert not any(name.startswith("generator.encoder.layers.1") for name in last)  # of one layer
    assert any(name.startswith("electra.encoder.layers.1") for name in last)


@pytest.mark.parametrize("name", ["pretrain_reformer", "pretrain_seq2seq"])
def test_other_models_start_from_statistics(name, tmp_path):
    flags = {
        "train_file": write_text(tmp_path / "text.txt", 2000),
        "vocab_size": 400,
        "max_steps": 2,
        "max_seq_length": 64,
    }
    ended = run_to(tmp_path / "run", name, **flags)
    assert ended.code == 0 and "Word embeddings start from corpus statistics" in ended.err
    ended = run_to(tmp_path / "stream", name, streaming=True, **flags)
    assert ended.code == 0 and "Word embeddings start from corpus statistics" in ended.err
    ended = run_to(tmp_path / "random", name, init="random", **flags)
    assert ended.code == 0 and "statistics" not in ended.err


def test_fine_tuning_takes_its_words_from_raw_text(tmp_path):
    home = make_home(tmp_path)
    raw = write_text(tmp_path / "raw.txt", 1000)
    ended = run_to(tmp_path / "raw", "finetune_classifier", raw_file=raw, **given(home, "classifier"))
    assert ended.code == 0 and "Word embeddings start from corpus statistics" in ended.err
    with open(tmp_path / "few.tsv", "w", encoding="utf-8") as file:
        file.write("text\tlabel\n" + "".join(f"{word}\t{n % 2}\n" for n, word in enumerate("가나다라마바사아자차" * 2)))
    few = {**given(home, "classifier"), "train_file": tmp_path / "few.tsv", "validation_file": tmp_path / "few.tsv"}
    ended = run_to(tmp_path / "few", "finetune_classifier", **few)
    assert ended.code == 0 and "say too little of" in ended.err
    pretrained = given(home, "classifier", model_name_or_path=home / "native")
    assert_refused(
        run_to(tmp_path / "a", "finetune_classifier", raw_file=raw, **pretrained), "--raw_file is for a model"
    )
    assert_refused(
        run_to(tmp_path / "b", "finetune_classifier", init="statistics", **pretrained), "--init is for a model"
    )
    missing = run_to(tmp_path / "c", "finetune_classifier", raw_file=tmp_path / "none.txt", **given(home, "classifier"))
    assert_refused(missing, "--raw_file", "none.txt")
