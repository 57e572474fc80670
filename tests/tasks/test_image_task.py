"""The recipes for images from end to end: what they learn, leave and refuse; what of a pretrained model moves."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fixtures import modules, tiny_run
from fixtures.files import CLASSES, stripes, write_classes
from fixtures.tiny_run import assert_refused, finish, finish_together, flags, results_of, run_to
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
)

from hf_tiny import HfTinyViTConfig, HfTinyViTForImageClassification, InputError, checkpoint
from hf_tiny.arguments import parse
from hf_tiny.data.images import ImageArguments, ImageBatches, ImageData, LabelledImage, read_images
from hf_tiny.models.image_processing import HfTinyGreyImageProcessor
from hf_tiny.models.vit import patchify
from hf_tiny.tasks.images import ClassifyImages, spread_out, start_patches


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("image_task")
    write_classes(home / "train", 20)
    write_classes(home / "dev", 5, first=100)
    write_classes(home / "colour", 6, colour=True, suffix="jpg")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **small)).save_pretrained(home / "native")
    return home


def given(home: Path, **settings) -> dict:
    data = {"train_file": home / "train", "validation_file": home / "dev"}
    sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4, "max_steps": 3, "logging_steps": 1}
    return {**data, **sizes, **settings}


@pytest.fixture(scope="module")
def masked(home) -> Path:
    return finish(home / "mae", "pretrain_vit", tiny_run.run_named, **given(home, max_steps=20))


@pytest.fixture(scope="module")
def learned(home) -> Path:
    learns = {"max_steps": 30, "per_device_train_batch_size": 16, "ema": 0.8, "test_file": home / "colour"}
    return finish(home / "scratch", "finetune_images", tiny_run.run_named, **given(home, **learns))


def test_images_are_drawn_from_all_over_the_data(home):
    images = read_images(ImageArguments(train_file=[str(home / "train")], validation_file=[str(home / "dev")]), True)
    data = ImageData(images["train"], (8, 8), 1, CLASSES)
    processor = HfTinyGreyImageProcessor(image_mean=[0.5], image_std=[0.5])
    rows, batch = spread_out(ImageBatches(data, ClassifyImages(processor, seed=0), 4, seed=0, shuffle=False))
    assert (rows[0], rows[-1], len(rows)) == (0, len(data) - 1, 8)
    assert batch["labels"].tolist() == [0] * 4 + [1] * 4  # they stand in the order of their classes
    assert batch["pixel_values"].shape == (8, 1, 8, 8) and batch["num_items_in_batch"].tolist() == [8, 8]


# What a run leaves


def test_pretraining_leaves_a_model_and_an_image(masked):
    losses = [line["loss"] for line in tiny_run.metrics(masked) if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    with Image.open(masked / "reconstructions.png") as image:
        assert image.width > 300
    card = (masked / "README.md").read_text()
    assert "![reconstructions.png]" in card and "[8, 8] pixels, in patches of 2" in card
    reads, model = AutoImageProcessor.from_pretrained(masked), AutoModel.from_pretrained(masked)
    inputs = reads(stripes("bars", 3, colour=True), return_tensors="pt")
    assert model(**inputs).last_hidden_state.shape == (1, 17, model.config.hidden_size)


def test_a_classifier_learns_and_works_in_a_pipeline(learned):
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


# What a run starts from


@pytest.mark.parametrize(("start", "mode"), [("mae", "all"), ("mae", "last"), ("native", "all"), ("native", "probe")])
def test_what_of_a_pretrained_model_moves(home, masked, tmp_path, start, mode):
    more = {"all": {"layer_decay": 0.5}, "probe": {"trainable_layers": 0}, "last": {"trainable_layers": 1}}[mode]
    more |= {"mixup": 0.8, "pooling": "mean", "drop_path_rate": 0.1, "image_size": 12} if start == "mae" else {}
    ended = run_to(tmp_path / "run", "finetune_images", **given(home, model_name_or_path=home / start, **more))
    assert ended.code == 0, ended.err
    if start == "native":
        assert ended.err.count("The model reads colours, and 100% of these images are grey") == 1
    before = AutoModel.from_pretrained(home / start)
    after = AutoModelForImageClassification.from_pretrained(tmp_path / "run")
    own = dict(after.base_model.named_parameters())
    moved = {name for name, weight in before.named_parameters() if name in own and not torch.equal(weight, own[name])}
    layers = {int(found[1]) for name in moved if (found := re.search(r"layers?\.(\d+)\.", name))}
    last = before.config.num_hidden_layers - 1
    assert layers == {"all": set(range(last + 1)), "probe": set(), "last": {last}}[mode]
    assert any("embeddings" in name for name in moved) == (mode == "all")
    if start == "mae":
        assert after.config.image_size == [12, 12] and after.config.position_grid == [4, 4]
        assert after.config.pooling == "mean" and after.config.drop_path_rate == 0.1
        assert AutoImageProcessor.from_pretrained(tmp_path / "run").size["height"] == 12


def test_images_of_many_sizes(tmp_path):
    for number, path in enumerate(sorted(write_classes(tmp_path / "mixed", 8).glob("*/*.png"))):
        Image.open(path).resize((60, 4) if number == 0 else (20 + number, 24)).save(path)
    ended = run_to(tmp_path / "run", "finetune_images", train_file=tmp_path / "mixed", max_steps=2)
    assert ended.code == 0, ended.err
    assert "The images differ in size; their median side is 24. All become 24 x 24; --image_size" in ended.err
    assert AutoConfig.from_pretrained(tmp_path / "run").image_size == [24, 24]


def test_a_native_resnet_does_not_crash(home, tmp_path):
    """Its convolutions ended the process with a segmentation fault where the channels came last in memory."""
    torch.manual_seed(0)
    small = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ResNetForImageClassification(small).save_pretrained(tmp_path / "resnet")
    more = {"model_name_or_path": tmp_path / "resnet", "train_file": home / "colour", "random_shift": 0.1}
    ended = run_to(tmp_path / "run", "finetune_images", **given(home, **more))
    assert ended.code == 0, ended.err
    assert "Images of 8 x 8 become 224 x 224." in ended.err


def test_images_that_patches_do_not_divide_are_resized(tmp_path):
    for path in write_classes(tmp_path / "odd", 8).glob("*/*.png"):
        Image.open(path).resize((30, 17)).save(path)
    ended = run_to(tmp_path / "run", "finetune_images", train_file=tmp_path / "odd", max_steps=2)
    assert ended.code == 0, ended.err
    assert "Images of 17 x 30 become 20 x 32, in patches of 4." in ended.err
    assert AutoConfig.from_pretrained(tmp_path / "run").image_size == [20, 32]


def test_coloured_images_in_a_grey_model(home, masked, tmp_path):
    settings = given(home, model_name_or_path=masked, train_file=home / "colour")
    ended = run_to(tmp_path / "run", "finetune_images", **settings)
    assert ended.code == 0, ended.err
    assert ended.err.count("The model reads grey images, and 100% of these have colours") == 1


# Exactness


@pytest.mark.parametrize("recipe", ["pretrain_vit", "finetune_images"])
def test_a_resume_is_bit_equal(home, tmp_path, recipe):
    settings = given(home, max_steps=6, random_shift=0.2, random_flip=True, randaugment=1)
    settings |= {"mixup": 0.8, "cutmix": 1.0, "ema": 0.9, "drop_path_rate": 0.2} if recipe == "finetune_images" else {}
    finish(tmp_path / "whole", recipe, save_steps=0, **settings)
    finish(tmp_path / "parts", recipe, save_steps=4, **settings)
    shutil.rmtree(tmp_path / "parts" / "checkpoint-6")
    ended = run_to(tmp_path / "parts", recipe, save_steps=4, resume_from_checkpoint="latest", **settings)
    assert ended.code == 0, ended.err
    assert "at step 4" in ended.err
    tiny_run.assert_same_training(tmp_path / "whole" / "checkpoint-6", tmp_path / "parts" / "checkpoint-6")
    assert tiny_run.largest_difference(tmp_path / "whole", tmp_path / "parts") == 0
    if recipe == "finetune_images":
        assert tiny_run.largest_difference(tmp_path / "whole", tmp_path / "whole" / "checkpoint-6") > 0  # the average


@pytest.mark.parametrize("recipe", ["pretrain_vit", "finetune_images"])
def test_two_processes_train_like_one(home, tmp_path, recipe):
    settings = given(home, random_shift=0.2, randaugment=1)
    settings |= {"mixup": 0.8, "ema": 0.9} if recipe == "finetune_images" else {}
    finish(tmp_path / "one", recipe, **settings | {"per_device_train_batch_size": 16})
    finish_together(tmp_path / "two", recipe, **settings)
    assert tiny_run.largest_difference(tmp_path / "one", tmp_path / "two") < 1e-5
    one, two = (results_of(tmp_path / name) for name in ("one", "two"))
    assert two["num_processes"] == 2
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-4)


# Bad input


def test_a_bad_image_stops_the_run_or_is_skipped(home, tmp_path):
    whole = (write_classes(tmp_path / "data", 6) / "bars" / "002.png").read_bytes()
    (tmp_path / "data" / "bars" / "002.png").write_bytes(whole[: len(whole) // 2])
    settings = given(home, train_file=tmp_path / "data")
    ended = run_to(tmp_path / "run", "finetune_images", **settings)
    assert_refused(ended, tmp_path / "data" / "bars" / "002.png", "cannot be read", "--skip_bad_images")
    ended = run_to(tmp_path / "run", "finetune_images", skip_bad_images=True, **settings)
    assert ended.code == 0, ended.err
    assert "1 of 12 images cannot be read and are left out" in ended.err


def unknown_class(home, folder):
    write_classes(folder / "dev", 2)
    (folder / "dev" / "rows").rename(folder / "dev" / "waves")
    return {"validation_file": folder / "dev"}, r"'waves' is not in the training data\. It has bars, rows"


def not_divisible(home, folder):
    return {"image_size": 30, "patch_size": 4}, r"--image_size 30 30 --patch_size 4: .*4 x 4.*28 x 28.*32 x 32"


def mixup_of_a_native_model(home, folder):
    return {"model_name_or_path": home / "native", "mixup": 0.8}, "--mixup .* transformers' vit would make another loss"


def size_of_a_native_model(home, folder):
    return {"model_name_or_path": home / "native", "image_size": 16}, r"--image_size \(16, 16\): .* \(8, 8\) only"


def smoothing_of_a_native_model(home, folder):
    settings = {"model_name_or_path": home / "native", "label_smoothing": 0.1}
    return settings, "--label_smoothing is for hf_tiny's ViT; .*native is a vit"


def patches_of_a_pretrained_model(home, folder):
    return {
        "model_name_or_path": home / "native",
        "patch_size": 2,
    }, "--patch_size 2: --model_name_or_path .* has its own"


def wrong_average(home, folder):
    return {"ema": 1.5}, "--ema 1.5: it must be 0 or above and below 1"


def wrong_mixture(home, folder):
    return {"mixup": -1}, "--mixup -1: it must be 0 or above"


MISTAKES = [
    *(unknown_class, not_divisible, mixup_of_a_native_model, size_of_a_native_model, smoothing_of_a_native_model),
    *(patches_of_a_pretrained_model, wrong_average, wrong_mixture),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_message(home, tmp_path, mistake):
    """All before the training begins: in this process."""
    settings, message = mistake(home, tmp_path)
    recipe = modules.load("recipes/finetune_images.py")
    with pytest.raises(InputError, match=f"(?s){message}"):
        recipe.main(parse(recipe.Recipe, flags(output_dir=tmp_path / "run", **given(home, **settings))))
    assert not (tmp_path / "run").exists()


def test_masking_needs_our_own_model(home, tmp_path):
    recipe = modules.load("recipes/pretrain_vit.py")
    with pytest.raises(InputError, match=r"--model_name_or_path .*native: a vit is not hf_tiny's ViT"):
        recipe.main(parse(recipe.Recipe, flags(**given(home, model_name_or_path=home / "native"))))


def test_patches_start_from_their_principal_components(caplog, tmp_path):
    numbers = np.random.default_rng(0)
    strips = numbers.normal(size=(60, 1, 8)) * [1, 1, 1, 1, 3, 3, 3, 3] + numbers.normal(size=(60, 8, 1))
    pixels = (128 + 20 * strips).clip(0, 255).astype(np.uint8)
    rows = [LabelledImage(lambda one=one: Image.fromarray(one), "ab"[n % 2], "") for n, one in enumerate(pixels)]
    data = ImageData(rows, (8, 8), 1, ["a", "b"])
    config = HfTinyViTConfig(image_size=8, patch_size=2, num_channels=1, hidden_size=16, num_hidden_layers=1,
                             num_attention_heads=2, intermediate_size=16)  # fmt: skip
    torch.manual_seed(0)
    model = HfTinyViTForImageClassification(config)
    before = model.get_input_embeddings().weight.detach().clone()
    recipe = SimpleNamespace(init=None, model_name_or_path=None)
    collate = ClassifyImages(
        HfTinyGreyImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5]), 0
    )
    start_patches(SimpleNamespace(init="random", model_name_or_path=None), model, data, collate)
    with checkpoint.complete_or_absent(tmp_path / "checkpoint-2") as draft:
        (draft / "config.json").write_text("{}")
    resumed = {
        "resume_from_checkpoint": "latest",
        "output_dir": str(tmp_path),
    }  # the weights are those of the checkpoint
    start_patches(SimpleNamespace(init=None, model_name_or_path=None, **resumed), model, data, collate)
    assert torch.equal(model.get_input_embeddings().weight, before)
    start_patches(recipe, model, data, collate)
    weight = model.get_input_embeddings().weight.detach()
    assert torch.equal(weight[4:], before[4:])  # a patch has four pixels, and no more components
    patches = patchify(collate(data[np.arange(60)], 0)["pixel_values"], config).flatten(0, 1)
    size = before.norm(dim=1).mean()
    assert torch.allclose(weight[:4] @ weight[:4].T, torch.eye(4) * size**2, atol=1e-5)
    spread = (patches @ weight[:4].T).var(0)
    assert spread.tolist() == sorted(spread.tolist(), reverse=True) and spread[0] > 4 * spread[3]
    small = ImageData(rows[:1], (4, 4), 1, ["a", "b"])
    start_patches(recipe, model, small, collate)
    assert "4 patches say too little of 4 pixels" in caplog.text
