"""Splits: given, from the Hub or held out, the same for every seed, and with every label to learn from."""

from collections import Counter
from dataclasses import dataclass
from functools import partial

import datasets
import pytest
from fixtures import files

from hf_tiny import InputError
from hf_tiny.arguments import Arguments, parse
from hf_tiny.data import sources
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.splits import TextSplitArguments, find_labels, hub_rows, read_splits


@dataclass(frozen=True)
class Item:
    text: str
    place: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Flags(TextSplitArguments, Arguments):
    """Only what splits are made of."""


@pytest.fixture
def write(tmp_path):
    return partial(files.write, tmp_path)


def read(arguments: TextSplitArguments, **settings) -> dict[str, list[Item]]:
    """Lines of a label and a text."""

    def from_files(patterns: list[str], option: str, decoding: Decoding):
        for path in sources.expand(patterns, option, (".txt",)):
            for number, line in sources.numbered_lines(path, decoding):
                label, _, text = line.partition(" ")
                yield Item(text, f"{path}:{number}", (label,))

    def from_row(kind: str, place: str, row: dict) -> Item:
        return Item(row["text"], place, (row["label"],))

    settings = {"labels": lambda items: True, **settings}
    return read_splits(arguments, lambda: pytest.fail("not built in"), from_files, from_row, "items", **settings)


def labelled(*labels: str) -> list[Item]:
    return [Item("", "here", (label,)) for label in labels]


def test_what_is_held_out_is_the_same_every_time_and_has_no_label_of_its_own(write):
    path = write("a.txt", "".join(f"{'rare' if n == 7 else n % 3} text {n}\n" for n in range(100)))
    splits = [read(Flags(train_file=[path], validation_split_percentage=p)) for p in (20, 20, 80)]
    assert splits[0] == splits[1]
    for split, share in zip(splits, (80, 80, 20), strict=True):
        assert len(split["train"]) in (share, share + 1)
        assert len({item.text for part in split.values() for item in part}) == 100
        assert ("rare",) in [item.labels for item in split["train"]]
        assert find_labels(split) == ["0", "1", "2", "rare"]
    words = r"--validation_split_percentage 0\.1: of 100 examples this holds out 0.*Use a higher number"
    with pytest.raises(InputError, match=words):
        read(Flags(train_file=[path], validation_split_percentage=0.1))


def test_where_labels_are_open_everything_may_be_held_out(write):
    path = write("a.txt", "".join(f"{n} text\n" for n in range(50)))
    splits = read(Flags(train_file=[path], max_train_samples=30), labels=lambda items: False)
    assert len(splits["validation"]) == 5 and len(splits["train"]) == 30
    with pytest.raises(InputError, match="of 50 examples this holds out 0"):
        read(Flags(train_file=[path]))


def test_what_is_trained_on_and_evaluated_on_is_said(write, caplog):
    one, two = (write(name, "".join(f"{n % 2} {name}\n" for n in range(6))) for name in ("a.txt", "b.txt"))
    read(Flags(train_file=[one], validation_file=[two]))
    assert "trained on" not in caplog.text
    read(Flags(train_file=[one, two], validation_file=[two], test_file=[one]))
    assert f"validation: 6 of 6 items, such as {two}:1, are also trained on" in caplog.text
    assert f"test: 6 of 6 items, such as {one}:1, are also trained on" in caplog.text


def test_what_belongs_together_is_held_out_together(write):
    path = write("a.txt", "".join(f"{n % 2} text {n // 5}\n" for n in range(100)))
    splits = read(Flags(train_file=[path], validation_split_percentage=30), together=lambda item: item.text)
    assert {split: len(items) for split, items in splits.items()} == {"train": 70, "validation": 30}
    assert {item.text for item in splits["train"]}.isdisjoint(item.text for item in splits["validation"])


def test_a_sample_has_every_label_and_keeps_the_order(write):
    path = write("a.txt", "".join(f"{'rare' if n == 7 else n % 3} {n}\n" for n in range(100)))
    given = {"train_file": [path], "validation_file": [path], "test_file": [path]}
    splits = read(Flags(**given, max_train_samples=10, max_eval_samples=5))
    assert {split: len(items) for split, items in splits.items()} == {"train": 10, "validation": 5, "test": 5}
    numbers = [int(item.text) for item in splits["train"]]
    assert numbers == sorted(numbers) and numbers != list(range(10))
    assert find_labels(splits) == ["0", "1", "2", "rare"]


def test_what_is_left_out_or_replaced_is_counted(write, caplog):
    def keep(item: Item, counts: Counter) -> bool:
        counts["short items are left out"] += len(item.text) < 2
        return len(item.text) > 1

    path = write("a.txt", b"x ab\nx \xffb\ny c\n")
    arguments = Flags(train_file=[path], validation_file=[path], encoding_errors="replace")
    assert [item.text for item in read(arguments, keep=keep)["train"]] == ["ab", "\ufffdb"]
    assert "2 short items are left out" in caplog.text  # read for train and for validation
    assert "2 characters replaced" in caplog.text
    for split, purpose in (("train", "train"), ("validation", "evaluate")):
        given = {"train_file": [path], "validation_file": [path], f"{split}_file": [write("b.txt", "x c\n")]}
        with pytest.raises(InputError, match=rf"b\.txt: there are no items in it to {purpose} on"):
            read(Flags(**given, encoding_errors="replace"), keep=keep)


def test_a_dataset_of_the_hub_has_its_own_splits(tmp_path, caplog):
    kinds = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))
    lists = datasets.Features(text=datasets.Value("string"), label=datasets.List(datasets.ClassLabel(names=["O", "B"])))
    for folder, features, shown, hidden in (
        ("a", kinds, [0, 1], [-1, -1]),
        ("b", lists, [[0, 1], []], [[-1, -1], [-1]]),
    ):
        for split in ("train", "validation", "test", "extra"):
            rows = {"text": [f"{split} 1", f"{split} 2"], "label": hidden if split == "test" else shown}
            data = datasets.Dataset.from_dict(rows, features=features)
            data.to_parquet(str(tmp_path / folder / f"{split}.parquet"))
    name = str(tmp_path / "a")
    splits = read(Flags(dataset_name=name))
    assert list(splits) == ["train", "validation"]  # the labels of `test` are hidden
    assert splits["train"][1] == Item("train 2", f"{name}, train, row 2", ("yes",))
    assert "the labels of its test split are hidden" in caplog.text
    found = hub_rows(str(tmp_path / "b"), None)
    assert list(found) == ["train", "validation"] and found["train"][0][1]["label"] == ["O", "B"]
    own = read(Flags(dataset_name=name, validation_file=[files.write(tmp_path, "c.txt", "yes mine\n")]))
    assert [item.text for item in own["validation"]] == ["mine"]


def test_labels_are_ordered_and_checked(caplog):
    numbers = labelled("10", "9", "-1")
    assert find_labels({"train": numbers}) == ["-1", "9", "10"]
    assert find_labels({"train": labelled("10", "9", "x")}) == ["10", "9", "x"]
    with pytest.raises(InputError, match=r"here: the label '3' is not in the training data\. It has -1, 9, 10"):
        find_labels({"train": numbers, "validation": labelled("3")})
    with pytest.raises(InputError, match="1 kind of label, '9'"):
        find_labels({"train": labelled("9")})
    several = {"train": [Item("", "here", ("X=1", "X=2"))], "test": [*labelled("A=1", "X=1"), *labelled("A=1")]}
    assert find_labels(several, open_ended=True) == ["X=1", "X=2", "A=1"]
    assert "2 held-out labels, 1 different, are not in the training data" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_file": ["no/such"]}, "--train_file no/such: there is no such file"),
        ({"validation_file": ["a.txt"]}, "need --train_file or --dataset_name"),
        ({"test_file": ["a.txt"]}, "need --train_file or --dataset_name"),
        ({"train_file": ["a"], "dataset_name": "b"}, "not both"),
        ({"dataset_name": "no/such/set"}, "--dataset_name no/such/set: it could not be loaded"),
    ],
)
def test_data_that_cannot_be(settings, message):
    with pytest.raises(InputError, match=message):
        read(Flags(**settings))


def test_arguments_are_flags():
    parsed = parse(Flags, ["--train_file", "a.txt", "b", "--max_eval_samples", "7"])
    assert parsed == Flags(train_file=["a.txt", "b"], max_eval_samples=7)
    assert parsed.patterns == {"train": ["a.txt", "b"]} and not parsed.is_builtin and Flags().is_builtin
    assert parsed.data_name("dates") == "a.txt, b" and Flags().data_name("dates") == "hf_tiny's built-in dates"
    for wrong in ("--encoding_errors ignore", "--max_train_samples 0", "--validation_split_percentage 100"):
        with pytest.raises(InputError, match=f"{wrong}: "):
            parse(Flags, wrong.split())
