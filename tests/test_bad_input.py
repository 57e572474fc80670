"""Bad input: a message that says what to do, an exit code that is not 0, no traceback, nothing lost."""

from types import SimpleNamespace

import pytest
import torch
from fixtures import tiny_models, tiny_run
from fixtures.tiny_run import assert_refused, toy, write_text
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from hf_tiny import (
    HfTinyElectraForPreTraining,
    HfTinySeq2SeqForConditionalGeneration,
    HfTinyViTForMaskedImageModeling,
    InputError,
    checkpoint,
    convert,
)
from hf_tiny.start import pretrained
from hf_tiny.tasks.images import start_masked
from hf_tiny.tasks.pretrain import load_electra
from hf_tiny.tasks.translate import start_encoder_decoder
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

TINY = tiny_run.flags(
    max_steps=2, max_seq_length=32, per_device_train_batch_size=4, vocab_size=300, num_hidden_layers=1
)


def pretrain(folder, *flags) -> tiny_run.Ended:
    arguments = ["--output_dir", folder / "run", *TINY, *flags]
    return tiny_run.start(folder, tiny_run.run_plain, "pretrain_electra", *map(str, arguments)).wait()


def no_file(folder):
    return ["--train_file", folder / "nothing.txt"], [folder / "nothing.txt", "no such file or folder"]


def empty_file(folder):
    (folder / "empty.txt").write_text("")
    return ["--train_file", folder / "empty.txt"], ["no text", "--train_file"]


def blank_file(folder):
    (folder / "blank.txt").write_text("\n \n\n")
    return ["--train_file", folder / "blank.txt"], ["no text", "--train_file"]


def short_file(folder):
    write_text(folder / "short.txt", lines=1)
    return ["--train_file", folder / "short.txt"], ["shorter than one block", "--max_seq_length 32"]


def broken_json(folder):
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": \n')
    return ["--train_file", folder / "a.jsonl"], [f"{folder / 'a.jsonl'}:3", "not JSON"]


def no_column(folder):
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    return ["--train_file", folder / "a.jsonl"], [f"{folder / 'a.jsonl'}:2", "'text'", "'body'", "--text_column"]


def not_utf8(folder):
    (folder / "latin.txt").write_bytes("good line\ncaf\u00e9\n".encode("latin-1"))
    words = [f"{folder / 'latin.txt'}:2", "offset 13", "not UTF-8", "--encoding cp1252, in which it begins 'café'"]
    return ["--train_file", folder / "latin.txt"], words


def misspelt_flag(folder):
    return ["--train_fil", "x"], ["Unknown flag --train_fil", "Did you mean --train_file?"]


def wrong_size(folder):
    return ["--size", "huge"], ["--size huge", "tiny, mini, small, base, large"]


def unshareable_sizes(folder):
    text = write_text(folder / "text.txt")
    flags = ["--train_file", text, "--sharing", "all", "--generator_size", "0.5"]
    return flags, ["--generator_size 0.5", "give 1", "embeddings"]


def no_mask_token(folder):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder / "words")
    flags = ["--train_file", write_text(folder / "text.txt"), "--tokenizer_name", folder / "words"]
    return flags, ["words: it has no pad_token, cls_token, sep_token, mask_token", "masked language"]


def no_tokenizer(folder):
    flags = ["--train_file", write_text(folder / "text.txt"), "--tokenizer_name", folder / "nowhere"]
    return flags, ["--tokenizer_name", "nowhere: there is no such folder"]


def small_vocabulary(folder):
    return ["--train_file", write_text(folder / "text.txt"), "--vocab_size", "20"], ["--vocab_size 20 is too small"]


def unknown_schedule(folder):
    return ["--lr_scheduler_type", "polynomial"], ["--lr_scheduler_type polynomial", "linear, cosine"]


@pytest.mark.parametrize(
    "mistake",
    [
        no_file,
        empty_file,
        blank_file,
        short_file,
        broken_json,
        no_column,
        not_utf8,
        misspelt_flag,
        wrong_size,
        unshareable_sizes,
        no_mask_token,
        no_tokenizer,
        small_vocabulary,
        unknown_schedule,
    ],
)
def test_a_mistake_gets_a_message(tmp_path, mistake):
    flags, words = mistake(tmp_path)
    assert_refused(pretrain(tmp_path, *flags), *words)
    assert not list(tmp_path.glob("run/checkpoint-*"))


def test_bytes_that_are_not_utf8_can_be_allowed_and_are_counted(tmp_path):
    text = write_text(tmp_path / "text.txt", lines=300)
    with open(text, "ab") as file:
        file.write(b"caf\xe9 na\xefve\n" * 150)
    ended = pretrain(tmp_path, "--train_file", text, "--encoding_errors", "replace")
    assert ended.code == 0, ended.err
    assert "train: 300 characters replaced" in ended.err
    assert (tmp_path / "run" / "all_results.json").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    ended = pretrain(folder, "--train_file", write_text(folder / "text.txt"))
    assert ended.code == 0, ended.err
    return folder


def contents(folder) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != checkpoint.LOCK)
    return {str(path): path.read_bytes() for path in files}


def test_a_folder_that_holds_a_run_is_not_written_over(finished):
    before = contents(finished / "run")
    ended = pretrain(finished, "--train_file", finished / "text.txt")
    assert_refused(ended, f"--output_dir {finished / 'run'} holds another run", "--resume_from_checkpoint latest")
    assert contents(finished / "run") == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokenizer_name", "{folder}/other"], ["model.vocab_size = ", "this run has "]),
        (["--train_file", "{folder}/more.txt"], ["data = "]),
        (["--max_seq_length", "16"], ["data = "]),
        (["--sharing", "none"], ["model.sharing = disentangled, this run has none"]),
        (["--per_device_train_batch_size", "2"], ["per_device_train_batch_size = 4, this run has 2"]),
        (["--resume_from_checkpoint", "{folder}/run/checkpoint-99"], ["checkpoint-99: no such folder", "`latest`"]),
    ],
)
def test_a_resume_that_does_not_fit_names_what_differs(finished, flags, words):
    if not (finished / "other").exists():
        texts = ["a few other words", "and some more of them"] * 20
        train_tokenizer(texts, TokenizerArguments(vocab_size=60)).save_pretrained(finished / "other")
        write_text(finished / "more.txt", seed=1)
    before = contents(finished / "run")
    flags = [flag.format(folder=finished) for flag in flags]
    ended = pretrain(finished, "--train_file", finished / "text.txt", "--resume_from_checkpoint", "latest", *flags)
    assert_refused(ended, *words)
    assert contents(finished / "run") == before


def test_a_full_disk_while_saving_keeps_the_checkpoint_before(tmp_path):
    run = tmp_path / "run"
    ended = toy(run, full_disk_at=6)
    assert_refused(
        ended, f"{run / 'checkpoint-8'} could not be saved", "Free some space", f"{run / 'checkpoint-4'} is intact"
    )
    assert [path.name for path in checkpoint.checkpoints(run)] == ["checkpoint-4"]
    assert checkpoint.damage(run / "checkpoint-4") is None
    assert not list(run.glob(".draft*"))
    assert toy(run, resume_from_checkpoint="latest").code == 0
    assert toy(tmp_path / "whole").code == 0
    tiny_run.assert_same_training(run / "checkpoint-12", tmp_path / "whole" / "checkpoint-12")


def test_a_full_disk_at_the_end_loses_nothing(tmp_path):
    run = tmp_path / "run"
    assert toy(run, max_steps=4).code == 0
    (run / "model.safetensors").unlink()
    ended = toy(run, max_steps=4, resume_from_checkpoint="latest", full_disk_at=-1)
    assert_refused(ended, "finished model could not be written", "Free some space", "--resume_from_checkpoint latest")
    assert checkpoint.damage(run / "checkpoint-4") is None
    assert toy(run, max_steps=4, resume_from_checkpoint="latest").code == 0
    assert tiny_run.largest_difference(run, run / "checkpoint-4") == 0


def test_ctrl_c_before_the_first_step_leaves_no_traceback(tmp_path):
    ended = tiny_run.start(tmp_path, tiny_run.interrupted, *tiny_run.flags(output_dir=tmp_path / "run")).wait()
    assert ended.code == 130
    assert "nothing to save" in ended.err
    assert "Traceback" not in ended.err


# Weights, wherever a recipe or a command takes a model


class Intruder:
    def __reduce__(self):
        return pytest.fail, ("code of a pickle file has run",)


def cut(weights, folder):
    weights.write_bytes(weights.read_bytes()[:-100])
    return "its weights are damaged or were cut short"


def gone(weights, folder):
    weights.unlink()
    return "no file named model.safetensors"


def pickled(weights, folder):
    weights.unlink()
    torch.save({"weight": Intruder()}, folder / "pytorch_model.bin")
    return "a pickle file that is damaged or would run code"


def renamed(weights, folder):
    torch.save({"weight": torch.zeros(2)}, weights)
    return "its weights are damaged"


def masked_images(name: str):
    return start_masked(SimpleNamespace(model_name_or_path=name), AutoConfig.from_pretrained(name))


def encoder_decoder(name: str):
    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    recipe = SimpleNamespace(
        model_name_or_path=name, init=None, given_settings={}, trust_remote_code=False, copy_attention=None
    )
    return start_encoder_decoder(recipe, tokenizer, 0.0)


# What a recipe or a command starts from, and what loads it.
LOADERS = {
    "pretrain_electra": (HfTinyElectraForPreTraining, load_electra),
    "finetune": (HfTinyElectraForPreTraining, lambda name: pretrained(name, AutoModelForSequenceClassification, {})),
    "finetune_seq2seq": (HfTinySeq2SeqForConditionalGeneration, encoder_decoder),
    "pretrain_vit": (HfTinyViTForMaskedImageModeling, masked_images),
    "convert": (HfTinyElectraForPreTraining, lambda name: convert.load_model(HfTinyElectraForPreTraining, name)),
}


@pytest.mark.parametrize("spoil", [cut, gone, pickled, renamed])
@pytest.mark.parametrize("loader", LOADERS)
def test_weights_that_cannot_be_loaded_are_explained(loader, spoil, tmp_path):
    model_class, load = LOADERS[loader]
    model_class(tiny_models.tiny_config(model_class.config_class)).save_pretrained(tmp_path)
    message = spoil(tmp_path / "model.safetensors", tmp_path)
    with pytest.raises(InputError, match=message) as refusal:
        load(str(tmp_path))
    assert str(tmp_path) in str(refusal.value)
