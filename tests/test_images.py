"""Pictures: read, decoded, changed by chance, learned; and each mistake of a person."""

import csv
import gzip
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import tiny_run
import torch
from PIL import Image
from test_bad_input import assert_refused
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    pipeline,
)

import hf_tiny  # noqa: F401
from hf_tiny.data.images import ImageArguments, read_pictures
from hf_tiny.data.pixels import ClassifyPictures, PictureBatches, Pixels
from hf_tiny.errors import InputError
from hf_tiny.models.image_processing import HfTinyGreyImageProcessor
from hf_tiny.pictures import spread_out

CLASSES = ("bars", "rows")


def stripes(label: str, number: int, colour: bool = False, size: int = 8) -> Image.Image:
    """Vertical or horizontal stripes with some noise."""
    noise = np.random.default_rng((number, CLASSES.index(label))).integers(0, 60, (size, size))
    grid = np.indices((size, size))[1 if label == "bars" else 0] // 2 % 2 * 180 + noise
    grey = Image.fromarray(grid.astype(np.uint8))
    return grey.convert("RGB") if colour else grey


def write_classes(folder: Path, count: int, first: int = 0, colour: bool = False, suffix: str = "png") -> Path:
    for label in CLASSES:
        (folder / label).mkdir(parents=True)
        for number in range(first, first + count):
            stripes(label, number, colour).save(folder / label / f"{number:03}.{suffix}")
    return folder


def write_idx(path: Path, array: np.ndarray) -> Path:
    raw = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("images")
    write_classes(home / "train", 20)
    write_classes(home / "dev", 5, first=100)
    write_classes(home / "colour", 6, colour=True, suffix="jpg")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **small)).save_pretrained(home / "native")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(home / "native")
    return home


def pixels_of(
    arguments: ImageArguments, labels=CLASSES, size=(8, 8), channels=1, some=slice(None), **settings
) -> Pixels:
    return Pixels(read_pictures(arguments, labelled=True)["train"][some], size, channels, labels, **settings)


# Reading


def test_folders_idx_files_and_parquet_give_the_same_pixels(home, tmp_path):
    folders = read_pictures(ImageArguments(train_file=[str(home / "train")]), labelled=True)
    assert {split: len(part) for split, part in folders.items()} == {"train": 36, "validation": 4}
    both = ImageArguments(train_file=[str(home / "train")], validation_file=[str(home / "dev")])
    whole = pixels_of(both)
    assert whole.labels.tolist() == [0] * 20 + [1] * 20
    array = np.stack([np.asarray(picture.load()) for picture in whole.pictures])
    assert (whole.array[:, 0] == array).all()

    images = write_idx(tmp_path / "train-images-idx3-ubyte.gz", array)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", whole.labels.astype(np.uint8))
    idx = pixels_of(ImageArguments(train_file=[str(images)], validation_file=[str(images)]), labels=("0", "1"))
    assert (idx.array == whole.array).all()
    assert (idx.labels == whole.labels).all()

    rows = [{"image": Image.fromarray(a), "label": n} for a, n in zip(array, whole.labels.tolist(), strict=True)]
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list(CLASSES)))
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "hub" / "train.parquet")
    table = [str(tmp_path / "hub" / "train.parquet")]
    for arguments in (
        ImageArguments(train_file=table, validation_file=table),
        ImageArguments(dataset_name=str(tmp_path / "hub"), validation_file=table),
    ):
        read = pixels_of(arguments)
        assert (read.array == whole.array).all()
        assert (read.labels == whole.labels).all()
        assert read.fingerprint == whole.fingerprint


def test_what_does_not_fit_in_memory_is_decoded_batch_by_batch(home):
    arguments = ImageArguments(train_file=[str(home / "colour")], validation_file=[str(home / "dev")])
    eager, lazy = (pixels_of(arguments, size=(6, 10), channels=3, in_memory=limit) for limit in (2**20, 0))
    assert eager.array.shape == (12, 3, 6, 10)
    assert lazy.array is None
    assert (lazy[[3, 1, 7]]["pixels"] == eager[[3, 1, 7]]["pixels"]).all()
    assert lazy.fingerprint == eager.fingerprint
    assert lazy.mean_and_deviation() == eager.mean_and_deviation()
    mean, deviation = eager.mean_and_deviation()
    assert mean == pytest.approx(eager.array.mean((0, 2, 3)) / 255, abs=1e-4)
    assert deviation == pytest.approx(eager.array.std((0, 2, 3)) / 255, abs=1e-4)


def test_pictures_are_drawn_from_all_over_the_data(home):
    pixels = pixels_of(ImageArguments(train_file=[str(home / "train")], validation_file=[str(home / "dev")]))
    processor = HfTinyGreyImageProcessor(image_mean=[0.5], image_std=[0.5])
    rows, batch = spread_out(PictureBatches(pixels, ClassifyPictures(processor, seed=0), 4, seed=0, shuffle=False))
    assert (rows[0], rows[-1], len(rows)) == (0, len(pixels) - 1, 8)
    assert batch["labels"].tolist() == [0] * 4 + [1] * 4  # they stand in the order of their classes
    assert batch["pixel_values"].shape == (8, 1, 8, 8)


def test_pictures_without_labels_need_no_folders(home):
    nested, flat = (
        read_pictures(ImageArguments(train_file=[str(path)], max_eval_samples=1), labelled=False)
        for path in (home / "train", home / "train" / "bars")
    )
    assert (len(nested["train"]), len(flat["train"]), len(flat["validation"])) == (36, 18, 1)


def test_the_processor_gives_what_training_sees(home):
    """Resized once, divided by 255 once; and a grey model gets grey pictures of coloured ones."""
    for channels, folder in ((1, "train"), (1, "colour"), (3, "colour")):
        arguments = ImageArguments(train_file=[str(home / folder)])
        pixels = pixels_of(arguments, size=(6, 10), channels=channels)
        kind = HfTinyGreyImageProcessor if channels == 1 else ViTImageProcessorPil
        given = {"size": {"height": 6, "width": 10}, "image_mean": [0.4] * channels, "image_std": [0.3] * channels}
        reads = kind(**given)
        trained = ClassifyPictures(reads, seed=0)(pixels[[0, 1]], 0)["pixel_values"]
        images = [pixels.pictures[row].load() for row in (0, 1)]
        for form in (lambda x: x, lambda x: x.convert("RGB"), lambda x: np.asarray(x.convert("RGB"))):
            assert torch.equal(reads([form(image) for image in images], return_tensors="pt")["pixel_values"], trained)
        assert trained.abs().max() < 4


# From end to end


def flags_of(home: Path, **settings) -> dict:
    data = {"train_file": home / "train", "validation_file": home / "dev"}
    sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4, "max_steps": 3, "logging_steps": 1}
    return {**data, **sizes, **settings}


def work(name: str, output_dir: Path, run=tiny_run.run_plain, **settings) -> tiny_run.Ended:
    return tiny_run.start(output_dir.parent, run, name, *tiny_run.flags(output_dir=output_dir, **settings)).wait()


@pytest.fixture(scope="module")
def masked(home) -> Path:
    ended = work("pretrain_vit", home / "mae", tiny_run.run_named, **flags_of(home, max_steps=20))
    assert ended.code == 0, ended.err
    return home / "mae"


@pytest.fixture(scope="module")
def learned(home) -> Path:
    learns = {"max_steps": 30, "per_device_train_batch_size": 16, "ema": 0.8, "test_file": home / "colour"}
    ended = work("finetune_images", home / "scratch", tiny_run.run_named, **flags_of(home, **learns))
    assert ended.code == 0, ended.err
    return home / "scratch"


def results_of(run: Path) -> dict[str, float]:
    return json.loads((run / "all_results.json").read_text())


def test_pretraining_leaves_a_model_and_a_picture(masked):
    losses = [line["loss"] for line in tiny_run.metrics(masked) if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    with Image.open(masked / "reconstructions.png") as picture:
        assert picture.width > 300
    card = (masked / "README.md").read_text()
    assert "![reconstructions.png]" in card and "[8, 8] pixels, in patches of 2" in card
    reads, model = AutoImageProcessor.from_pretrained(masked), AutoModel.from_pretrained(masked)
    inputs = reads(stripes("bars", 3, colour=True), return_tensors="pt")
    assert model(**inputs).last_hidden_state.shape == (1, 17, model.config.hidden_size)


def test_a_classifier_learns_and_works_in_a_pipeline(home, learned):
    results = results_of(learned)
    assert results["eval_accuracy"] > 0.9
    for name in ("validation_confusion.png", "validation_attention.png", "test_confusion.png", "curves.png"):
        assert (learned / name).stat().st_size > 0
    solve = pipeline("image-classification", model=str(learned))
    for split in ("validation", "test"):
        with open(learned / f"{split}_predictions.csv") as file:
            rows = list(csv.DictReader(file))
        assert {row["label"] for row in rows} == set(CLASSES)
        assert [row["prediction"] for row in rows] == [solve(row["image"])[0]["label"] for row in rows]
        right = np.mean([row["prediction"] == row["label"] for row in rows])
        assert right == pytest.approx(results["eval_accuracy" if split == "validation" else "test_accuracy"])


def test_the_processor_travels_with_the_model(learned, tmp_path):
    """In a process that cannot import hf_tiny."""
    stripes("rows", 1).save(tmp_path / "rows.png")
    script = (
        "import sys; sys.modules['hf_tiny'] = None\n"
        "from transformers import pipeline\n"
        f"solve = pipeline('image-classification', model={str(learned)!r}, trust_remote_code=True)\n"
        f"print(solve({str(tmp_path / 'rows.png')!r})[0]['label'])"
    )
    home = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=home)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith("rows")


@pytest.mark.parametrize("start", ["mae", "native"])
@pytest.mark.parametrize("mode", ["all", "probe", "last"])
def test_what_of_a_pretrained_model_moves(home, masked, tmp_path, start, mode):
    more = {"all": {"layer_decay": 0.5}, "probe": {"trainable_layers": 0}, "last": {"trainable_layers": 1}}[mode]
    more |= {"mixup": 0.8, "pooling": "mean", "drop_path_rate": 0.1, "image_size": 12} if start == "mae" else {}
    run = tmp_path / "run"
    ended = work("finetune_images", run, **flags_of(home, model_name_or_path=home / start, **more))
    assert ended.code == 0, ended.err
    if start == "native":
        assert ended.err.count("The model reads colours, and 100% of these pictures are grey") == 1
    before = AutoModel.from_pretrained(home / start)
    after = AutoModelForImageClassification.from_pretrained(run)
    own = dict(after.base_model.named_parameters())
    moved = {name for name, weight in before.named_parameters() if name in own and not torch.equal(weight, own[name])}
    layers = {int(found[1]) for name in moved if (found := re.search(r"layers?\.(\d+)\.", name))}
    last = before.config.num_hidden_layers - 1
    assert layers == {"all": set(range(last + 1)), "probe": set(), "last": {last}}[mode]
    assert any("embeddings" in name for name in moved) == (mode == "all")
    if start == "mae":
        assert after.config.image_size == [12, 12] and after.config.position_grid == [4, 4]
        assert AutoImageProcessor.from_pretrained(run).size["height"] == 12


@pytest.mark.parametrize("recipe", ["pretrain_vit", "finetune_images"])
def test_a_resume_is_bit_equal(home, tmp_path, recipe):
    settings = flags_of(home, max_steps=6, random_shift=0.2, random_flip=True, randaugment=1)
    settings |= {"mixup": 0.8, "cutmix": 1.0, "ema": 0.9, "drop_path_rate": 0.2} if recipe == "finetune_images" else {}
    assert work(recipe, tmp_path / "whole", save_steps=0, **settings).code == 0
    assert work(recipe, tmp_path / "parts", save_steps=4, **settings).code == 0
    shutil.rmtree(tmp_path / "parts" / "checkpoint-6")
    ended = work(recipe, tmp_path / "parts", save_steps=4, resume_from_checkpoint="latest", **settings)
    assert ended.code == 0, ended.err
    assert "at step 4" in ended.err
    tiny_run.assert_same_training(tmp_path / "whole" / "checkpoint-6", tmp_path / "parts" / "checkpoint-6")
    assert tiny_run.largest_difference(tmp_path / "whole", tmp_path / "parts") == 0
    if recipe == "finetune_images":
        assert tiny_run.largest_difference(tmp_path / "whole", tmp_path / "whole" / "checkpoint-6") > 0  # the average


def run_pretrain(*flags) -> None:
    tiny_run.run_plain("pretrain_vit", *flags)


def run_finetune(*flags) -> None:
    tiny_run.run_plain("finetune_images", *flags)


@pytest.mark.parametrize("recipe", [run_pretrain, run_finetune])
def test_two_processes_train_like_one(home, tmp_path, recipe):
    settings = flags_of(home, max_steps=5, random_shift=0.2, randaugment=1)
    settings |= {"mixup": 0.8, "ema": 0.9} if recipe is run_finetune else {}
    for name, processes in (("one", 1), ("two", 2)):
        settings["per_device_train_batch_size"] = 16 // processes
        started = tiny_run.start_group(tmp_path / name, processes, recipe, **settings)
        ended = [process.wait() for process in started]
        assert [process.code for process in ended] == [0] * processes, ended[0].err
    assert tiny_run.largest_difference(tmp_path / "one", tmp_path / "two") < 1e-5
    one, two = (results_of(tmp_path / name) for name in ("one", "two"))
    assert two["num_processes"] == 2
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-4)


# Bad input


def broken(home: Path, folder: Path, **settings) -> dict:
    """A truncated picture and one that is none."""
    write_classes(folder / "data", 6)
    whole = (folder / "data" / "bars" / "002.png").read_bytes()
    (folder / "data" / "bars" / "002.png").write_bytes(whole[: len(whole) // 2])
    (folder / "data" / "rows" / "004.png").write_text("not a picture")
    return {"train_file": folder / "data", **settings}


def truncated(home, folder):
    return broken(home, folder), [folder / "data" / "bars" / "002.png", "cannot be read", "--skip_bad_images"]


def empty_class(home, folder):
    write_classes(folder / "data", 3)
    (folder / "data" / "waves").mkdir()
    return {"train_file": folder / "data"}, ["class folder 'waves' is empty", folder / "data"]


def not_divisible(home, folder):
    return {"image_size": 30, "patch_size": 4}, ["--image_size 30 30", "4 x 4", "28 x 28", "32 x 32"]


def one_class(home, folder):
    write_classes(folder / "data" / "all", 3)
    return {"train_file": folder / "data"}, ["of one class, 'all'", "a folder for each class"]


def no_class(home, folder):
    write_classes(folder / "data", 3)
    stripes("bars", 0).save(folder / "data" / "lost.png")
    return {"train_file": folder / "data"}, [folder / "data" / "lost.png", "in no class"]


def no_labels(home, folder):
    images = write_idx(folder / "train-images-idx3-ubyte.gz", np.zeros((4, 8, 8), np.uint8))
    return {"train_file": images}, ["labels are missing", folder / "train-labels-idx1-ubyte"]


def cut_off(home, folder):
    images = write_idx(folder / "train-images-idx3-ubyte", np.zeros((4, 8, 8), np.uint8))
    images.write_bytes(images.read_bytes()[:-9])
    return {"train_file": images}, [images, "cut off or damaged"]


def no_idx(home, folder):
    (folder / "notes.txt").write_text("hello")
    return {"train_file": folder / "notes.txt"}, [folder / "notes.txt", "neither a picture"]


def unknown_class(home, folder):
    write_classes(folder / "dev", 2)
    (folder / "dev" / "rows").rename(folder / "dev" / "waves")
    return {"validation_file": folder / "dev"}, ["'waves' is not in the training data", "bars, rows"]


def mixup_of_a_native_model(home, folder):
    return {"model_name_or_path": home / "native", "mixup": 0.8}, ["--mixup", "transformers' vit", "another loss"]


def size_of_a_native_model(home, folder):
    return {"model_name_or_path": home / "native", "image_size": 16}, ["--image_size (16, 16)", "(8, 8) only"]


def wrong_average(home, folder):
    return {"ema": 1.5}, ["--ema 1.5", "between 0 and 1"]


@pytest.mark.parametrize(
    "mistake",
    [
        *(truncated, empty_class, not_divisible, one_class, no_class, no_labels, cut_off, no_idx, unknown_class),
        *(mixup_of_a_native_model, size_of_a_native_model, wrong_average),
    ],
)
def test_a_mistake_gets_a_message(home, tmp_path, mistake):
    given, words = mistake(home, tmp_path)
    settings = flags_of(home, **given)
    if "validation_file" not in given and given.get("train_file"):
        del settings["validation_file"]
    assert_refused(work("finetune_images", tmp_path / "run", **settings), *words)


def test_bad_pictures_can_be_skipped_and_are_counted(home, tmp_path):
    given = broken(home, tmp_path, skip_bad_images=True, validation_file=home / "dev")
    ended = work("finetune_images", tmp_path / "run", **flags_of(home, **given))
    assert ended.code == 0, ended.err
    assert "2 of 12 pictures cannot be read and are left out" in ended.err
    arguments = ImageArguments(train_file=[str(tmp_path / "data")], validation_file=[str(home / "dev")])
    for limit in (2**20, 0):
        assert len(pixels_of(arguments, skip_bad=True, in_memory=limit)) == 10
    lazy = pixels_of(arguments, in_memory=0, some=slice(3, 4))
    (tmp_path / "data" / "bars" / "003.png").write_text("broken since")
    with pytest.raises(InputError, match=r"003.png: this picture cannot be read"):
        lazy[[0]]


def test_pictures_of_more_than_8_bits_are_refused(home, tmp_path):
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "deep.png")
    arguments = ImageArguments(train_file=[str(tmp_path / "deep.png")], validation_file=[str(home / "dev")])
    with pytest.raises(InputError, match=r"deep.png.*more than 8 bits"):
        Pixels(read_pictures(arguments, labelled=False)["train"], (8, 8), 1)


def test_pictures_that_patches_do_not_divide_are_resized(tmp_path):
    for path in write_classes(tmp_path / "odd", 8).glob("*/*.png"):
        Image.open(path).resize((30, 17)).save(path)
    ended = work("finetune_images", tmp_path / "run", train_file=tmp_path / "odd", max_steps=2)
    assert ended.code == 0, ended.err
    assert "Pictures of 17 x 30 become 20 x 32, in patches of 4." in ended.err
    assert AutoConfig.from_pretrained(tmp_path / "run").image_size == [20, 32]


def test_coloured_pictures_in_a_grey_model(home, masked, tmp_path):
    given = {"model_name_or_path": masked, "train_file": home / "colour"}
    ended = work("finetune_images", tmp_path / "run", **flags_of(home, **given))
    assert ended.code == 0, ended.err
    assert ended.err.count("The model reads grey pictures, and 100% of these have colours") == 1
