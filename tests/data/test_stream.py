"""Streams: every block once in an epoch, whoever reads; a run that was killed goes on with the very next one."""

import dataclasses
import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import psutil
import pytest
from fixtures import tiny_run
from fixtures.streamed import SHARD, run_streamed, seen
from fixtures.tiny_run import ROOT, assert_same_training, largest_difference

from hf_tiny import InputError, checkpoint, train
from hf_tiny.data import corpus, packing
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.data.packing import Packing
from hf_tiny.data.stream import Mixture, Position, StreamedBatches, dealt, first_blocks, lane_blocks
from hf_tiny.tokenizer import TokenizerArguments, load_tokenizer, train_tokenizer

LENGTH = 32


@pytest.fixture(autouse=True)
def small_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(corpus, "SHARD_BYTES", SHARD)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return tiny_run.write_text(tmp_path_factory.mktemp("text") / "text.txt", 400)


@pytest.fixture(scope="module")
def tokenizer(text):
    return train_tokenizer(text.read_text().splitlines(), TokenizerArguments(vocab_size=300))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(TokenizerArguments, CorpusArguments, train.TrainConfig):
    max_steps: int = 10
    max_eval_samples: int = 10
    streaming: bool = True
    max_seq_length: int = LENGTH
    preprocessing_num_workers: int | None = 1


def settings_of(*files, **settings) -> Settings:
    return Settings(train_file=list(map(str, files)), seed=7, **settings)


def mixture(tokenizer, *files, split: str = "train", lanes: int = 1, buffer_size: int = 20, **settings) -> Mixture:
    recipe = settings_of(*files, shuffle_buffer_size=buffer_size, **settings)
    return Corpus(recipe, 7).mixed(tokenizer, lanes)[split]


def stream(mixed: Mixture, **settings) -> StreamedBatches:
    """Its batches are pairs: the rows, and the place of the first one."""
    return StreamedBatches(mixed, lambda *pair: pair, 5, **settings)


def prepared(tokenizer, *files, split: str = "train") -> list[tuple]:
    arguments = CorpusArguments(train_file=list(map(str, files)), max_seq_length=LENGTH, preprocessing_num_workers=1)
    return as_tuples(Corpus(arguments, 7).blocks(tokenizer)[split]["input_ids"][:])


def as_tuples(rows) -> list[tuple]:
    return list(map(tuple, np.asarray(rows).tolist()))


def epochs(packed: Packing, lane: int, lanes: int, count: int) -> list[list[tuple]]:
    """The blocks of the first epochs of a lane."""
    found = [[]]
    for _, block in lane_blocks(packed, lane, lanes, 7, Position()):
        if block is not None:
            found[-1].append(tuple(block["input_ids"].tolist()))
        elif len(found) == count:
            return found
        else:
            found.append([])


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_an_epoch_of_all_lanes_is_the_prepared_corpus(text, tokenizer, lanes):
    (only,) = mixture(tokenizer, text).packings
    assert len(only.shards) == 12
    expected = Counter(prepared(tokenizer, text))
    found = [epochs(only, lane, lanes, 3) for lane in range(lanes)]
    for epoch in range(3):
        assert sum((Counter(share[epoch]) for share in found), Counter()) == expected
    orders = [[block for share in found for block in share[epoch]] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    given = [sum(len(dealt(only, lane, lanes, 7, epoch)) for epoch in range(lanes)) for lane in range(lanes)]
    assert given == [12] * lanes  # though 12 shards cannot be divided by 5


@pytest.mark.parametrize("lanes", [1, 4, 40])
def test_every_document_is_read_once_in_an_epoch(text, tokenizer, monkeypatch, lanes):
    """Also where there are more lanes than shards: then a shard is shared document by document."""
    read, tokenized = [], packing._tokenized

    def recorded(texts, tokenizer):
        texts = list(texts)
        read.extend(text for _, text in texts)
        return tokenized(iter(texts), tokenizer)

    monkeypatch.setattr(packing, "_tokenized", recorded)
    (only,) = mixture(tokenizer, text).packings
    for lane in range(lanes):
        epochs(only, lane, lanes, 2)
    whole = Corpus(CorpusArguments(train_file=[str(text)]))
    train_texts, held_out = (list(whole.documents(split)) for split in ("train", "validation"))
    assert sorted(read) == sorted(2 * train_texts) and len(train_texts) > 350 and len(held_out) > 5


@pytest.mark.parametrize(
    ("lanes", "buffer_size", "workers"), [(1, 20, 0), (3, 20, 0), (2, 1, 0), (2, 5000, 0), (4, 20, 2)]
)
def test_a_state_goes_on_with_the_very_next_batch(text, tokenizer, lanes, buffer_size, workers):
    plan = mixture(tokenizer, text, lanes=lanes, buffer_size=buffer_size)
    whole = stream(plan)
    expected = [whole[index] for index in range(48)]
    for saved_at, read_ahead in ((12, 12), (24, 28), (44, 48)):  # 48 batches of 5 are more than an epoch
        first = stream(plan, workers=workers)
        for index in range(read_ahead):
            first[index]
        state = json.loads(json.dumps(first.state_dict(saved_at)))
        again = stream(plan, workers=workers)
        again.load_state_dict(state)
        for index in range(saved_at, 48):
            assert again[index][1] == expected[index][1] == 5 * index
            assert (again[index][0]["input_ids"] == expected[index][0]["input_ids"]).all()


def test_going_on_reads_only_the_shards_that_were_open(text, tokenizer, monkeypatch):
    plan = mixture(tokenizer, text)
    batches = stream(plan)
    for index in range(26):
        batches[index]
    state, packed, blocks = batches.state_dict(24), [], Packing.blocks
    monkeypatch.setattr(
        Packing, "blocks", lambda self, number, *turn: packed.append(number) or blocks(self, number, *turn)
    )
    again = stream(plan)
    again.load_state_dict(state)
    order = [number for number, _, _ in dealt(plan.packings[0], 0, 1, 7, 0)]
    resumed = again[24][0]["input_ids"]
    assert packed == order[8:10]
    assert (stream(plan)[24][0]["input_ids"] == resumed).all()  # without a state it reads all before
    assert packed == order[8:10] + order[:10]


def test_each_process_saves_its_own_lanes(text, tokenizer):
    """Though a resumed one has heard of the others'. What is saved is plain numbers."""
    plan = mixture(tokenizer, text, lanes=4)
    state = {}
    for until in (20, 40):
        ranks = [stream(plan, stride=2) for _ in range(2)]
        for rank, batches in enumerate(ranks):
            batches.load_state_dict(state)
            for index in range(until - 20 + rank, until, 2):
                batches[index]
        first, second = (batches.state_dict(until) for batches in ranks)
        assert (sorted(first), sorted(second)) == (["0", "2"], ["1", "3"])
        state = json.loads(json.dumps(first | second))
    for start, ((epoch, shard, block),) in state.values():
        assert 30 < start <= 50  # the window in which sample 50 is, of about 20
        assert epoch in (0, 1) and shard in range(3) and block in range(30)


def test_the_order_is_shuffled_within_the_buffer_and_within_an_epoch(text, tokenizer):
    plan = mixture(tokenizer, text)
    first, second = epochs(plan.packings[0], 0, 1, 2)
    batches = stream(plan)
    rows = [row for index in range(2 * len(first) // 5) for row in as_tuples(batches[index][0]["input_ids"])]
    assert Counter(rows[: len(first)]) == Counter(first)
    assert rows[:20] != first[:20] and Counter(rows[:20]) == Counter(first[:20])
    assert Counter(rows[len(first) : len(first) + 20]) == Counter(second[:20])
    assert batches.epoch(2 * len(first) // 5 - 1) == pytest.approx(2, abs=0.2)


def test_weights_are_shares_of_the_blocks(tmp_path, tokenizer):
    """Each of the corpora goes through its own epochs, and the smaller one is repeated."""
    files = [tiny_run.write_text(tmp_path / f"{seed}.txt", lines, seed) for seed, lines in ((1, 300), (2, 2000))]
    batches = stream(mixture(tokenizer, *files, lanes=2, buffer_size=50, dataset_weights=[7, 3]))
    found = Counter(row for index in range(600) for row in as_tuples(batches[index][0]["input_ids"]))
    own = [set(prepared(tokenizer, file)) for file in files]
    shares = [sum(found[row] for row in rows) / 3000 for rows in own]
    assert sum(shares) == 1 and shares[0] == pytest.approx(0.7, abs=0.025)
    times = [found[row] for row in own[0]]
    assert max(times) - min(times) <= 2 and min(times) > 10
    held_out = first_blocks(mixture(tokenizer, *files, dataset_weights=[7, 3], split="validation"), 4)
    held_out = as_tuples(held_out["input_ids"])
    assert len(held_out) == 4 and not set(held_out) & found.keys()
    assert sum(row in set(prepared(tokenizer, files[0], split="validation")) for row in held_out) == 3


BAD = [
    ({"max_steps": -1}, "--streaming needs --max_steps"),
    ({"dataset_weights": [1.0, 2.0]}, "a weight for each of the 1 entries"),
    ({"dataset_weights": [0.0]}, "--dataset_weights 0: it must be above 0"),
    ({"validation_split_percentage": 0.01}, "held-out text is shorter than one block"),
    ({"streaming": False, "dataloader_num_workers": 2}, "are for --streaming"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_settings(text, tokenizer, settings, message):
    recipe = settings_of(text, **settings)
    with pytest.raises(InputError, match=message):
        Corpus(recipe, 7).batches(recipe, tokenizer, dict)


def test_a_stream_without_a_block_says_so(tmp_path, tokenizer):
    short = tmp_path / "short.txt"
    short.write_text("the old ship\n" * 3)
    with pytest.raises(InputError, match="A stream of 1 shards, divided by 1, gives no block"):
        stream(mixture(tokenizer, short, validation_file=[str(short)]))[0]


def test_an_error_in_a_worker_arrives(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "the old ship sails under a red moon"}\n' * 300 + "{bad\n")
    batches = stream(mixture(tokenizer, path), workers=1)
    with pytest.raises(InputError, match=r"rows.jsonl:301: not JSON"):
        for index in range(200):
            batches[index]


def test_a_worker_that_was_killed_is_told(text, tokenizer):
    batches, others = stream(mixture(tokenizer, text), workers=1), set(multiprocessing.active_children())
    batches[0]
    (worker,) = set(multiprocessing.active_children()) - others
    worker.kill()
    with pytest.raises(InputError, match="A process of --dataloader_num_workers has ended"):
        for index in range(1, 1000):
            batches[index]


# The recipe


def flags(text: Path, **settings) -> dict:
    return {
        "train_file": text, "max_seq_length": LENGTH, "vocab_size": 300, "per_device_train_batch_size": 4, "max_steps": 20,
        "save_steps": 4, "eval_steps": 0, "logging_steps": 1, "max_eval_samples": 8, "shuffle_buffer_size": 20, **settings,
    }  # fmt: skip


def start(run: Path, text: Path, **settings) -> tiny_run.Started:
    return tiny_run.start(run.parent, run_streamed, *tiny_run.flags(output_dir=run, **flags(text, **settings)))


LAUNCHED = """
import sys
sys.path.insert(0, {tests!r})
import datasets
datasets.config.HF_DATASETS_CACHE = {cache!r}
from fixtures.streamed import run_streamed
run_streamed(*sys.argv[1:])
"""


def test_two_launched_processes_see_every_block_once(text, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED.format(tests=str(ROOT / "tests"), cache=str(tmp_path / "cache")))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
    launch += [str(ROOT / "recipes" / "accelerate" / "cpu_2proc.yaml"), str(script)]
    run = tmp_path / "run"
    steps = 28
    ended = subprocess.run(
        launch + tiny_run.flags(output_dir=run, **flags(text, max_steps=steps, save_steps=0, seed=7)),
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    trained = load_tokenizer(TokenizerArguments(tokenizer_name=str(run)), lambda: pytest.fail("trained"), "")
    (only,) = mixture(trained, text).packings
    expected, found = Counter(prepared(trained, text)), Counter()
    for rank in range(2):
        rows = [tuple(row) for step in range(steps) for batch in seen(run, rank)[step] for row in batch]
        (epoch,) = epochs(only, rank, 2, 1)
        assert len(rows) == 4 * steps > len(epoch) > 70
        found += Counter(rows[: len(epoch)])
    assert found == expected
    assert tiny_run.metrics(run)[-1]["epoch"] >= 1


@pytest.mark.parametrize(("workers", "moments"), [(0, (6,)), (2, (6, 14))])
def test_killed_and_resumed_loses_and_repeats_nothing(text, tmp_path, workers, moments):
    settings = {"gradient_accumulation_steps": 2, "dataloader_num_workers": workers}
    whole, run, left_behind = tmp_path / "whole", tmp_path / "run", []
    ended = start(whole, text, **settings).wait()
    assert ended.code == 0, ended.err
    for moment in moments:
        started = start(run, text, resume_from_checkpoint="latest", **settings)
        tiny_run.wait_for_step(started, run, moment)
        left_behind += psutil.Process(started.pid).children()
        started.kill()
        assert started.wait().code == -signal.SIGKILL
        assert checkpoint.step_of(checkpoint.find(run, "latest")) in range(moment - moment % 4, 20, 4)
    ended = start(run, text, resume_from_checkpoint="latest", **settings).wait()
    assert ended.code == 0, ended.err
    assert "goes on from the position of each lane, which is weaker than the seek" in ended.err
    assert seen(run, 0) == seen(whole, 0)
    assert_same_training(run / "checkpoint-20", whole / "checkpoint-20")
    assert largest_difference(run, whole) == 0
    lines = [{**line, "tokens_per_second": 0} for line in tiny_run.metrics(run)]
    assert lines == [{**line, "tokens_per_second": 0} for line in tiny_run.metrics(whole)]
    assert len(left_behind) == workers * len(moments) and not psutil.wait_procs(left_behind, timeout=20)[1]


def test_a_signal_to_all_processes_saves_and_ends(text, tmp_path):
    """As SLURM sends it: to those that read and pack, too."""
    run = tmp_path / "run"
    started = start(run, text, max_steps=100_000, save_steps=0, dataloader_num_workers=2)
    tiny_run.wait_for_step(started, run, 3)
    workers = psutil.Process(started.pid).children()
    assert len(workers) == 2
    for worker in workers:
        worker.terminate()
    tiny_run.wait_for_step(started, run, max(tiny_run.logged_steps(run)) + 12)  # more than they have made before
    started.kill(signal.SIGTERM)
    ended = started.wait()
    assert ended.code in (0, 128 + signal.SIGTERM) and "Stopped by SIGTERM; checkpoint-" in ended.err, ended.err
    assert not psutil.wait_procs(workers, timeout=10)[1]


def test_another_number_of_processes_goes_on_with_the_same_blocks(text, tmp_path):
    """A step's lanes stay the same: two processes with one each, then one process with both."""
    two, one = tmp_path / "two", tmp_path / "one"
    ended = [p.wait() for p in tiny_run.start_group(two, 2, run_streamed, **flags(text, max_steps=12))]
    assert [process.code for process in ended] == [0, 0], ended[0].err
    shutil.copytree(two, one)
    for step in (8, 12):
        shutil.rmtree(one / f"checkpoint-{step}", ignore_errors=True)
    shutil.copytree(two / "checkpoint-8", one / "checkpoint-8")
    refused = start(one, text, max_steps=12, resume_from_checkpoint="latest").wait()
    assert refused.code == 2
    assert "Numbers of processes that fit: [1, 2]; here use --gradient_accumulation_steps 2." in refused.err
    settings = {"max_steps": 12, "resume_from_checkpoint": "latest", "gradient_accumulation_steps": 2}
    resumed = start(one, text, **settings).wait()
    assert resumed.code == 0, resumed.err
    expected = [seen(two, rank) for rank in range(2)]
    assert seen(one, 0) == {step: expected[0][step] + expected[1][step] for step in range(8, 12)}
    assert largest_difference(one, two) < 1e-5
    changed = start(one, text, **settings, shuffle_buffer_size=30).wait()
    assert changed.code == 2 and "was made with data = " in changed.err


def test_the_encoder_decoder_streams_too(text, tmp_path):
    settings = tiny_run.flags(output_dir=tmp_path / "run", **flags(text, max_steps=2, vocab_size=500))
    ended = tiny_run.start(tmp_path, tiny_run.run_plain, "pretrain_seq2seq", *settings, "--streaming").wait()
    assert ended.code == 0, ended.err
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "streaming.py", "--megabytes", "2", "16", "--folder", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures["stream_growth_mb"] < 25 and figures["vocabulary_growth_mb"] < 100, figures
