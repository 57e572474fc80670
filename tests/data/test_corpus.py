"""The corpus: every format gives the same blocks, nothing is lost or leaks, messages name the place."""

import gzip
import json
import logging
import os
import random
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from fixtures import modules

from hf_tiny import InputError
from hf_tiny.data import builtin, corpus, packing, sources
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.tokenizer import TokenizerArguments, load_tokenizer, train_tokenizer

LENGTH = 32


def sentences(count: int, seed: int = 0) -> list[str]:
    """Different sentences, each with its number as a word."""
    words = ["river", "stone", "walks", "under", "the", "bridge", "and", "nobody", "sees", "water", "red", "night"]
    pick = random.Random(seed)
    return [f"{' '.join(pick.choices(words, k=pick.randint(5, 25)))} n{number}" for number in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(sentences(300), TokenizerArguments(vocab_size=300))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path):
    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return write


def arguments(*files: str, **settings) -> CorpusArguments:
    return CorpusArguments(
        **{"train_file": list(files), "max_seq_length": LENGTH, "preprocessing_num_workers": 1, **settings}
    )


def load_blocks(arguments: CorpusArguments, tokenizer, seed: int = 0) -> datasets.DatasetDict:
    return Corpus(arguments, seed).blocks(tokenizer)


def documents(arguments: CorpusArguments, split: str = "train"):
    return Corpus(arguments).documents(split)


def rows(dataset) -> tuple[list, list]:
    return dataset["input_ids"][:], dataset["segment_start"][:]


def test_text_that_is_trained_on_and_evaluated_on_is_said(write, tokenizer, caplog):
    path, other = (write(name, "\n".join(sentences(60))) for name in ("a.txt", "b.txt"))
    sizes = {"per_device_train_batch_size": 2, "max_eval_samples": 4}
    for files in ({"train_file": [path]}, {"validation_file": [path]}, {"validation_file": [path, other]}):
        given = arguments(other, **files)
        Corpus(given).batches(SimpleNamespace(**vars(given), **sizes), tokenizer, dict)
    assert caplog.text.count("is trained on and evaluated on") == 1
    assert f"{other} is trained on and evaluated on" in caplog.text


def test_what_a_corpus_has_is_said_once(write, tokenizer, caplog):
    """A new model's embeddings need the blocks before the training does."""
    caplog.set_level(logging.INFO)
    corpus = Corpus(arguments(write("a.txt", "\n".join(sentences(60)))))
    for _ in range(2):
        corpus.blocks(tokenizer)
    assert [caplog.text.count(f"{split}: ") for split in ("train", "validation")] == [1, 1]


def test_blocks_are_full_and_nothing_is_lost(write, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    texts = sentences(400)
    blocks = load_blocks(arguments(write("a.txt", "\n".join(texts))), tokenizer)
    for split in ("train", "validation"):
        ids, starts = (np.array(column) for column in rows(blocks[split]))
        assert ids.shape == (len(blocks[split]), LENGTH) and blocks[split].features["input_ids"].length == LENGTH
        assert (ids[:, 0] == tokenizer.cls_token_id).all() and (ids[:, -1] == tokenizer.sep_token_id).all()
        single = starts == LENGTH
        separators = (ids == tokenizer.sep_token_id).sum(1)
        assert (separators == np.where(single, 1, 2)).all()
        assert (ids[np.arange(len(ids)), np.where(single, LENGTH, starts) - 1] == tokenizer.sep_token_id).all()
        assert ((starts > LENGTH // 5) & (starts < LENGTH * 4 // 5) | single).all()
        stream = [token for row in ids for token in row if token not in (2, 3)]
        expected = [
            token
            for text in documents(arguments(write("a.txt", "\n".join(texts))), split)
            for token in tokenizer(text, add_special_tokens=False)["input_ids"]
        ]
        assert stream == expected[: len(stream)]
        assert f"{len(expected):,} tokens, {len(expected) - len(stream):,} tokens left over" in caplog.text
    assert 0.05 < np.mean(np.array(blocks["train"]["segment_start"][:]) == LENGTH) < 0.16


def test_segments_meet_between_documents_or_words(write, tokenizer):
    blocks = load_blocks(arguments(write("a.txt", "\n".join(sentences(400)))), tokenizer)["train"]
    second = [row["input_ids"][row["segment_start"]] for row in blocks if row["segment_start"] < LENGTH]
    tokens = tokenizer.convert_ids_to_tokens(second)
    assert np.mean([token.startswith("##") for token in tokens]) < 0.05
    ends = [row["input_ids"][: row["segment_start"] - 1] for row in blocks if row["segment_start"] < LENGTH]
    at_document = [" n" in tokenizer.decode(tokens[-5:]) for tokens in ends]
    assert np.mean(at_document) > 0.5


def test_hold_out_is_by_document_and_disjoint(write):
    texts = sentences(2000)
    path = write("a.txt", "\n".join(texts))
    train, held_out = (list(documents(arguments(path), split)) for split in ("train", "validation"))
    assert sorted(train + held_out) == sorted(texts) and not set(train) & set(held_out)
    assert 60 < len(held_out) < 140


def test_hold_out_of_few_documents_is_the_end(write, tokenizer):
    text = " ".join(sentences(500))
    path = write("a.txt", text)
    train, held_out = (" ".join(documents(arguments(path), split)) for split in ("train", "validation"))
    assert train.strip() + " " + held_out == text and 0.04 < len(held_out) / len(text) < 0.06
    assert len(load_blocks(arguments(path), tokenizer)["validation"]) > 1


def test_dataset_name_takes_its_own_validation_split(write, tokenizer, tmp_path):
    texts = sentences(300)
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    datasets.Dataset.from_dict({"body": texts}).to_parquet(folder / "train-0.parquet")
    settings = {"train_file": None, "dataset_name": str(tmp_path / "set"), "text_column": "body"}
    assert len(list(documents(arguments(**settings)))) < 300
    datasets.Dataset.from_dict({"body": texts[:50]}).to_parquet(folder / "validation-0.parquet")
    assert list(documents(arguments(**settings))) == texts
    assert list(documents(arguments(**settings), "validation")) == texts[:50]
    with pytest.raises(InputError, match="no column 'text', only 'body'"):
        load_blocks(arguments(train_file=None, dataset_name=str(tmp_path / "set")), tokenizer)
    with pytest.raises(InputError, match="could not be loaded"):
        load_blocks(arguments(train_file=None, dataset_name=str(tmp_path / "nowhere")), tokenizer)


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("line", ["one", "two", "three", "four"]),
        ("paragraph", ["one\ntwo", "three\nfour"]),
        ("document", ["one\ntwo\nthree\nfour"]),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_sample_by(write, sample_by, expected, end, name):
    path = write(name, "\ufeff" + end.join(["one", "two", "", " ", "three", "four"]))
    held_out = write("b.txt", "held out")
    assert list(documents(arguments(path, validation_file=[held_out], sample_by=sample_by))) == expected


def test_folders_globs_and_doubles(write, tmp_path):
    paths = [write("f/a.txt", "a"), write("f/g/b.txt.gz", "b"), write("f/c.jsonl", '{"text": "c"}')]
    write("f/README.md", "not text")
    settings = {"validation_file": [write("v.txt", "v")]}
    assert sorted(documents(arguments(str(tmp_path / "f"), **settings))) == ["a", "b", "c"]
    assert next(documents(arguments(paths[2], str(tmp_path / "f"), paths[0], **settings))) == "c"
    assert len(list(documents(arguments(str(tmp_path / "f"), paths[0], **settings)))) == 3
    assert list(documents(arguments(str(tmp_path / "**" / "*.txt.gz"), **settings))) == ["b"]


def test_many_small_files_share_blocks(write, tokenizer, tmp_path):
    for number, text in enumerate(sentences(150)):
        write(f"f/{number:03d}.txt", text)
    blocks = load_blocks(arguments(str(tmp_path / "f"), sample_by="document"), tokenizer)
    assert len(blocks["train"]) > 50 and len(blocks["validation"]) > 1


@pytest.mark.parametrize("sample_by", ["line", "paragraph", "document"])
@pytest.mark.parametrize("separator", ["\n\n", " "])
def test_shards_lose_nothing(write, monkeypatch, sample_by, separator):
    monkeypatch.setattr(corpus, "SHARD_BYTES", 3000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 500)
    text = separator.join(f"{sentence} 한국어" for sentence in sentences(300))
    plan = arguments(write("a.txt", text), validation_file=[write("b.txt", "b")], sample_by=sample_by)
    assert len(Corpus(plan).plan["train"][0]) > 5
    assert " ".join(documents(plan)).split() == text.split()
    without_words = "한국어" * 3000
    plan = arguments(write("c.txt", without_words), validation_file=[write("b.txt", "b")], sample_by=sample_by)
    assert "".join("".join(documents(plan)).split()) == without_words


def test_number_of_processes_does_not_matter(write, tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "SHARD_BYTES", 8000)
    path = write("a.txt", "\n".join(sentences(900)))
    one = load_blocks(arguments(path), tokenizer)
    two = load_blocks(arguments(path, preprocessing_num_workers=2, overwrite_cache=True), tokenizer)
    assert rows(one["train"]) == rows(two["train"]) and rows(one["validation"]) == rows(two["validation"])


def test_cache_is_reused_and_made_anew(write, tokenizer, monkeypatch):
    texts = sentences(300)
    path = write("a.txt", "\n".join(texts))
    first = load_blocks(arguments(path), tokenizer)
    assert first["train"].cache_files
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_pack", lambda *_: pytest.fail("packed again"))
        again = load_blocks(arguments(path), tokenizer)
    assert rows(again["train"]) == rows(first["train"]) and again["train"]._fingerprint == first["train"]._fingerprint
    changes = [
        lambda: load_blocks(arguments(path, max_seq_length=16), tokenizer),
        lambda: load_blocks(arguments(path), tokenizer, seed=1),
        lambda: load_blocks(arguments(path), train_tokenizer(texts, TokenizerArguments(vocab_size=200))),
        lambda: load_blocks(arguments(write("a.txt", "\n".join(texts[::-1]))), tokenizer),
    ]
    for change in changes:
        assert rows(change()["train"]) != rows(first["train"])


def files_of(cache) -> dict[str, bytes]:
    """Without the folder that is named after the fingerprint: it is in the path, so it is compared too."""
    return {str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("*")) if path.is_file()}


def test_parts_prepared_by_other_machines_are_the_whole(write, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "SHARD_BYTES", 8000)
    monkeypatch.setattr(corpus, "MOST_FILES", 5)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = sentences(900)
    for number in range(3):
        write(f"here/{number}.txt", "\n".join(texts[number::3]))
    settings = {"tokenizer_name": str(tmp_path / "tokenizer"), "max_seq_length": LENGTH, "preprocessing_num_workers": 1}
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "one")
    recipe = modules.load("recipes/prepare_corpus.py")
    recipe.main(recipe.Recipe(train_file=[str(tmp_path / "here")], **settings))
    whole = files_of(tmp_path / "one" / "hf_tiny_blocks")
    assert len(whole) == 2 * 4 * 5 and sum(map(len, whole.values())) > 50_000

    shutil.copytree(tmp_path / "here", tmp_path / "there")  # another machine: another folder, the same times
    for number, (part, folder) in enumerate([("3/4", "there"), ("1/4", "here"), ("4/4", "here"), ("2/4", "there")]):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / f"machine-{number}")
        recipe.main(recipe.Recipe(part=part, train_file=[str(tmp_path / folder)], **settings))
        made = files_of(tmp_path / f"machine-{number}" / "hf_tiny_blocks")
        assert made.items() < whole.items()
        assert f"train: part {part} is in" in capsys.readouterr().out
        shutil.copytree(tmp_path / f"machine-{number}", tmp_path / "shared", dirs_exist_ok=True)
    assert files_of(tmp_path / "shared" / "hf_tiny_blocks") == whole

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "shared")
    monkeypatch.setattr(packing, "_pack", lambda *_: pytest.fail("packed again"))
    loaded = load_tokenizer(recipe.Recipe(**settings), list, "")
    blocks = load_blocks(arguments(str(tmp_path / "here")), loaded, seed=42)
    assert len(blocks["train"]) > 200 and len(blocks["validation"]) > 5
    for part in ("0/4", "5/4", "2", "a/b", "-1/4"):
        with pytest.raises(InputError, match="the parts of 16 are 1/16, 2/16 and so on"):
            recipe.main(recipe.Recipe(part=part))
    with pytest.raises(InputError, match="there is nothing to prepare"):
        recipe.main(recipe.Recipe(streaming=True))
    assert "max_steps" not in vars(recipe.Recipe())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # it is imported already
def test_the_old_command_names_the_new_one(capsys):
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hf_tiny.data.corpus", run_name="__main__")
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "python recipes/prepare_corpus.py --part 3/16" in told and told.count("\n") == 1


def test_a_file_that_was_begun_is_made_again(write, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(corpus, "SHARD_BYTES", 8000)
    path = write("a.txt", "\n".join(sentences(900)))
    pack, left = packing._pack, iter([True, True, False])

    def dying(*parts):
        if not next(left):
            raise KeyboardInterrupt
        return pack(*parts)

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_pack", dying)
        with pytest.raises(KeyboardInterrupt):
            load_blocks(arguments(path), tokenizer)
    made = files_of(tmp_path / "cache")
    assert sum(name.endswith(".arrow") for name in made) == 2
    blocks = load_blocks(arguments(path), tokenizer)
    assert files_of(tmp_path / "cache").items() > made.items()
    expected = load_blocks(arguments(path, overwrite_cache=True), tokenizer)
    assert rows(blocks["train"]) == rows(expected["train"])


def zeros(path: Path) -> None:
    """In the middle, of the same size."""
    content = path.read_bytes()
    path.write_bytes(content[:2000] + bytes(1000) + content[3000:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def other_counts(path: Path) -> None:
    path = path.with_suffix(".json")
    path.write_text(path.read_text().replace('"blocks": ', '"blocks": 9'))


def half_counts(path: Path) -> None:
    path.with_suffix(".json").write_text("{")


def no_checksum(path: Path) -> None:
    path.with_name(f"{path.name}.sha256").unlink()


@pytest.mark.parametrize("spoil", [zeros, cut, other_counts, half_counts, no_checksum])
def test_damaged_blocks_are_said_and_made_again(write, tokenizer, tmp_path, caplog, spoil):
    """They were trained on without a word."""
    path = write("a.txt", "\n".join(sentences(400)))
    expected = rows(load_blocks(arguments(path), tokenizer)["train"])
    whole = files_of(tmp_path / "cache")
    (file,) = (tmp_path / "cache").rglob("train*.arrow")
    spoil(file)
    assert rows(load_blocks(arguments(path), tokenizer)["train"]) == expected
    assert files_of(tmp_path / "cache") == whole
    assert caplog.text.count("is damaged (") == 1 and str(file.with_suffix("")) in caplog.text


def test_the_order_of_held_out_blocks_is_in_no_file(write, tokenizer, tmp_path):
    path = write("a.txt", "\n".join(sentences(400)))
    given = arguments(path)
    sizes = {"per_device_train_batch_size": 2, "max_eval_samples": 4}
    Corpus(given).batches(SimpleNamespace(**vars(given), **sizes), tokenizer, dict)
    assert {file.suffix for file in (tmp_path / "cache").rglob("*") if file.is_file()} == {".arrow", ".json", ".sha256"}
    assert not list((tmp_path / "cache").rglob("cache-*"))


def test_special_tokens_in_the_text_are_text(write, tokenizer):
    path = write("a.txt", "\n".join(f"the [SEP] river [MASK] {text}" for text in sentences(200)))
    ids = np.array(rows(load_blocks(arguments(path), tokenizer)["train"])[0])
    assert (ids != tokenizer.mask_token_id).all() and (ids == tokenizer.sep_token_id).sum() <= 2 * len(ids)


def test_builtin_corpus_is_the_default(write, tokenizer, monkeypatch):
    files = [write(f"{name}.jsonl", "".join(f'{{"text": "{text}"}}\n' for text in sentences(99))) for name in "ab"]
    monkeypatch.setattr(builtin, "corpus_files", lambda: ([files[0]], [files[1]]))
    blocks = load_blocks(CorpusArguments(max_seq_length=LENGTH), tokenizer)
    assert len(blocks["train"]) and len(blocks["validation"])


MANY = "\n".join(sentences(200))
ROWS = "".join(f'{{"text": "{text}"}}\n' for text in sentences(200))
BAD = {
    "no text": ({"a.txt": "\n \n"}, {}, "shorter than one block: it has 0 tokens"),
    "short": ({"a.txt": "the old bridge"}, {}, "it has . tokens, and a block of --max_seq_length 32 needs 30"),
    "short held out": ({"a.txt": MANY}, {"validation_split_percentage": 0.01}, "Hold out more"),
    "held out 0": ({"a.txt": MANY}, {"validation_split_percentage": 0.0}, "it must be above 0 and below 100"),
    "two sources": ({"a.txt": MANY}, {"dataset_name": "x"}, "not both"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, write, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files, settings, message = BAD[case]
    paths = [write(name, content) for name, content in files.items()]
    with pytest.raises(InputError, match=message):
        load_blocks(arguments(*paths, **settings), tokenizer)


def test_errors_in_other_processes_arrive(write, tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "SHARD_BYTES", 4000)
    path = write("a.jsonl", ROWS * 3 + "{bad\n" + ROWS)
    with pytest.raises(InputError, match=r"a.jsonl:601: not JSON") as caught:
        load_blocks(arguments(path, preprocessing_num_workers=2), tokenizer)
    assert "Traceback" not in str(caught.value)


def test_replaced_and_skipped_are_counted(write, tokenizer, caplog):
    text = b"".join(b"%s \xff\xfe\n" % sentence.encode() for sentence in sentences(200))
    blocks = load_blocks(arguments(write("a.txt", text), encoding_errors="replace"), tokenizer)
    assert len(blocks["train"]) and "400 characters replaced" in caplog.text
    table = "id,text\n" + "".join(f"{number},{text}\n{number},\n" for number, text in enumerate(sentences(200)))
    load_blocks(arguments(write("a.csv", table)), tokenizer)
    assert "200 rows without text" in caplog.text


MEASURE = """
import resource, sys
import datasets
from transformers import AutoTokenizer
from hf_tiny.data.corpus import Corpus, CorpusArguments
datasets.config.HF_DATASETS_CACHE = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
for path in sys.argv[3:]:
    settings = CorpusArguments(train_file=[path], sample_by="document", preprocessing_num_workers=1)
    Corpus(settings).blocks(tokenizer)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_the_corpus(write, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = "\n".join(sentences(6000))
    paths = [write(f"{times}.txt", (text + "\n") * times) for times in (1, 10)]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "cache", tmp_path / "tokenizer", *paths],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )
    small, large = map(int, run.stdout.split())
    assert large - small < 25, f"{small} MB and {large} MB"


def test_long_rows_stay_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SHARD_BYTES", 1000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 50)
    texts = [f"row {number} " + "many words " * 60 for number in range(120)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    whole = Corpus(CorpusArguments(train_file=[str(path)]))
    found = [text for split in ("train", "validation") for text in whole.documents(split)]
    assert sorted(found) == sorted(texts)
