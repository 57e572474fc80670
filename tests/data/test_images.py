"""Images: folders, idx files, tables and the Hub give the same, decoded at once or batch by batch, as a processor does."""

from functools import partial
from pathlib import Path
from unicodedata import normalize

import datasets
import numpy as np
import pytest
import torch
from fixtures.files import CLASSES, stripes, write_classes, write_idx
from PIL import Image
from transformers import ViTImageProcessorPil

from hf_tiny import InputError
from hf_tiny.data.augment import Augment, AugmentArguments
from hf_tiny.data.images import (
    ImageArguments,
    ImageBatches,
    ImageData,
    LabelledImage,
    Normalize,
    Survey,
    decode,
    file_images,
    read_images,
    survey,
)
from hf_tiny.models.image_processing import HfTinyGreyImageProcessor


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("images")
    write_classes(home / "train", 20)
    write_classes(home / "dev", 5, first=100)
    write_classes(home / "colour", 6, colour=True, suffix="jpg")
    return home


def data_of(
    arguments: ImageArguments, labels=CLASSES, size=(8, 8), channels=1, some=slice(None), **settings
) -> ImageData:
    return ImageData(read_images(arguments, labelled=True)["train"][some], size, channels, labels, **settings)


def broken(folder: Path) -> Path:
    """A truncated image and one that is none."""
    write_classes(folder, 6)
    whole = (folder / "bars" / "002.png").read_bytes()
    (folder / "bars" / "002.png").write_bytes(whole[: len(whole) // 2])
    (folder / "rows" / "004.png").write_text("not an image")
    return folder


# Reading


def test_photographs_of_telephones_are_read_or_named(tmp_path, caplog):
    write_classes(tmp_path / "사진", 6, suffix="jpg")
    names = [path.rename(path.with_suffix(".jfif")).stem for path in sorted((tmp_path / "사진").rglob("*.jpg"))]
    for name in ("a.HEIC", "b.heic", "._c.heic", "Thumbs.db"):
        (tmp_path / "사진" / "bars" / name).write_bytes(b"\0\0\0\x18ftypheic")
    splits = read_images(ImageArguments(train_file=[str(tmp_path / "사진")]), labelled=True)
    assert sum(map(len, splits.values())) == len(names)
    assert f"{tmp_path / '사진'}: 2 files that end in .heic are left out. Save them as .jpg." in caplog.text


def test_folders_idx_files_and_parquet_give_the_same_images(home, tmp_path):
    folders = read_images(ImageArguments(train_file=[str(home / "train")]), labelled=True)
    assert {split: len(part) for split, part in folders.items()} == {"train": 36, "validation": 4}
    both = ImageArguments(train_file=[str(home / "train")], validation_file=[str(home / "dev")])
    whole = data_of(both)
    assert whole.labels.tolist() == [0] * 20 + [1] * 20
    array = np.stack([np.asarray(image.load()) for image in whole.images])
    assert (whole.array[:, 0] == array).all()

    images = write_idx(tmp_path / "train-images-idx3-ubyte.gz", array)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", whole.labels.astype(np.uint8))
    idx = data_of(ImageArguments(train_file=[str(images)], validation_file=[str(images)]), labels=("0", "1"))
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
        read = data_of(arguments)
        assert (read.array == whole.array).all()
        assert (read.labels == whole.labels).all()
        assert read.fingerprint == whole.fingerprint
    with pytest.raises(InputError, match=r"train.parquet, row 1: there is no column 'picture'.*--image_column"):
        read_images(ImageArguments(train_file=table, image_column="picture"), labelled=True)
    with pytest.raises(InputError, match=r"row 1: 'label' must hold the bytes of an image. See --image_column"):
        read_images(ImageArguments(train_file=table, image_column="label"), labelled=True)


def test_images_without_labels_need_no_folders(home):
    nested, flat = (
        read_images(ImageArguments(train_file=[str(path)], max_eval_samples=1), labelled=False)
        for path in (home / "train", home / "train" / "bars")
    )
    assert (len(nested["train"]), len(flat["train"]), len(flat["validation"])) == (36, 18, 1)
    assert flat["train"][0].label is None and flat["train"][0].labels == ()


@pytest.mark.parametrize("labelled", [True, False])
def test_hidden_files_are_no_images(tmp_path, labelled):
    """As `._0.png`, which lies beside 0.png in an archive of a Mac: the run ended with it."""
    for label in ("bars", "dots"):
        (tmp_path / label).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / label / "0.png")
        (tmp_path / label / "._0.png").write_bytes(b"Mac OS X")
    found = file_images([str(tmp_path)], "--train_file", ImageArguments(), labelled)
    assert [image.place for image in found] == [str(tmp_path / label / "0.png") for label in ("bars", "dots")]


def test_a_class_may_be_named_by_a_mac_and_images_of_a_run_are_no_class(tmp_path):
    for label in ("꽃", normalize("NFD", "얼굴")):
        for number in range(5):
            (tmp_path / label).mkdir(exist_ok=True)
            Image.new("L", (4, 4)).save(tmp_path / label / f"{number}.png")
    run = tmp_path / "꽃" / "run"
    run.mkdir()
    Image.new("L", (4, 4)).save(run / "curves.png")
    for name in ("recipe.yaml", "metrics.jsonl"):
        (run / name).write_text("")
    found = list(file_images([str(tmp_path)], "--train_file", ImageArguments(), labelled=True))
    assert sorted({image.label for image in found}) == ["꽃", "얼굴"] and len(found) == 10


def test_a_glob_takes_folders_as_classes_and_files(home):
    by_folder = read_images(ImageArguments(train_file=[str(home / "train" / "*")]), labelled=True)
    by_file = read_images(ImageArguments(train_file=[str(home / "train" / "*" / "0*.png")]), labelled=True)
    places = [[(image.label, image.place) for image in found["train"]] for found in (by_folder, by_file)]
    assert places[0] == places[1] and {label for label, _ in places[0]} == set(CLASSES)


def test_the_digits_are_the_default():
    splits = read_images(ImageArguments(), labelled=True)
    assert {split: len(part) for split, part in splits.items()} == {"train": 1348, "validation": 449}
    assert {image.label for image in splits["validation"]} == set("0123456789")
    assert max(decode(image, (8, 8), 1).max() for image in splits["train"][:20]) == 255


def empty_class(folder):
    write_classes(folder / "data", 3)
    (folder / "data" / "waves").mkdir()
    return folder / "data", "the class folder 'waves' is empty"


def one_class(folder):
    write_classes(folder / "data" / "all", 3)
    return folder / "data", "are of one class, 'all': .* a folder for each class"


def no_class(folder):
    write_classes(folder / "data", 3)
    stripes("bars", 0).save(folder / "data" / "lost.png")
    return folder / "data", "lost.png: it lies in no class"


def no_labels(folder):
    images = write_idx(folder / "train-images-idx3-ubyte.gz", np.zeros((4, 8, 8), np.uint8))
    return images, f"its labels are missing. They are looked for in {folder / 'train-labels-idx1-ubyte'}"


def too_few_labels(folder):
    write_idx(folder / "train-labels-idx1-ubyte", np.zeros(3, np.uint8))
    return write_idx(
        folder / "train-images-idx3-ubyte", np.zeros((4, 8, 8), np.uint8)
    ), "has 3 labels, and .* has 4 images"


def cut_off(folder):
    images = write_idx(folder / "train-images-idx3-ubyte", np.zeros((4, 8, 8), np.uint8))
    images.write_bytes(images.read_bytes()[:-9])
    return images, f"{images}: it is cut off or damaged"


def no_idx(folder):
    (folder / "notes.txt").write_text("hello")
    return folder / "notes.txt", "notes.txt: neither an image"


def nothing(folder):
    (folder / "empty").mkdir()
    return folder / "empty", "this folder has no file that ends in .png"


MISTAKES = [empty_class, one_class, no_class, no_labels, too_few_labels, cut_off, no_idx, nothing]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_with_their_place(tmp_path, mistake):
    given, message = mistake(tmp_path)
    with pytest.raises(InputError, match=message):
        read_images(ImageArguments(train_file=[str(given)]), labelled=True)


def test_a_size_that_cannot_be():
    with pytest.raises(InputError, match="--image_size 8 8 8: give one number, or height and width"):
        read_images(ImageArguments(image_size=[8, 8, 8]), labelled=True)


# Decoding


def test_what_does_not_fit_in_memory_is_decoded_batch_by_batch(home):
    arguments = ImageArguments(train_file=[str(home / "colour")], validation_file=[str(home / "dev")])
    eager, lazy = (data_of(arguments, size=(6, 10), channels=3, in_memory=limit) for limit in (2**20, 0))
    assert eager.array.shape == (12, 3, 6, 10)
    assert lazy.array is None
    assert (lazy[[3, 1, 7]]["pixels"] == eager[[3, 1, 7]]["pixels"]).all()
    assert lazy.fingerprint == eager.fingerprint
    assert lazy.mean_and_deviation() == eager.mean_and_deviation()
    mean, deviation = eager.mean_and_deviation()
    assert mean == pytest.approx(eager.array.mean((0, 2, 3)) / 255, abs=1e-4)
    assert deviation == pytest.approx(eager.array.std((0, 2, 3)) / 255, abs=1e-4)


def test_the_processor_gives_what_training_sees(home):
    """Resized once, divided by 255 once; and a grey model gets grey images of coloured ones."""
    for channels, folder in ((1, "train"), (1, "colour"), (3, "colour")):
        data = data_of(ImageArguments(train_file=[str(home / folder)]), size=(6, 10), channels=channels)
        kind = HfTinyGreyImageProcessor if channels == 1 else ViTImageProcessorPil
        given = {"size": {"height": 6, "width": 10}, "image_mean": [0.4] * channels, "image_std": [0.3] * channels}
        reads, rows = kind(**given), data[[0, 1]]
        changes = Normalize(reads, seed=0)
        trained = changes.normalized(changes.images(rows, np.empty((2, 0))))
        images = [data.images[row].load() for row in (0, 1)]
        for form in (lambda x: x, lambda x: x.convert("RGB"), lambda x: np.asarray(x.convert("RGB"))):
            assert torch.equal(reads([form(image) for image in images], return_tensors="pt")["pixel_values"], trained)
        assert trained.abs().max() < 4
        np.testing.assert_allclose(changes.restored(trained).transpose(0, 3, 1, 2), rows["pixels"] / 255, atol=1e-6)


def test_bad_images_can_be_skipped_and_are_counted(home, tmp_path, caplog):
    arguments = ImageArguments(train_file=[str(broken(tmp_path / "data"))], validation_file=[str(home / "dev")])
    for limit in (2**20, 0):
        assert len(data_of(arguments, skip_bad=True, in_memory=limit)) == 10
    assert caplog.text.count("2 of 12 images cannot be read and are left out") == 2
    with pytest.raises(InputError, match=r"002.png: this image cannot be read: .*--skip_bad_images"):
        data_of(arguments)
    with pytest.raises(InputError, match=r"--skip_bad_images: none of 1 images, such as .*002.png, can be read"):
        data_of(arguments, skip_bad=True, some=slice(2, 3))
    lazy = data_of(arguments, in_memory=0, some=slice(3, 4))
    (tmp_path / "data" / "bars" / "003.png").write_text("broken since")
    with pytest.raises(InputError, match=r"003.png: this image cannot be read"):
        lazy[[0]]


def test_images_of_more_than_8_bits_are_refused(tmp_path):
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(InputError, match=r"deep.png.*more than 8 bits"):
        decode(LabelledImage(lambda: Image.open(tmp_path / "deep.png"), None, "deep.png"), (8, 8), 1)


def test_a_camera_that_was_held_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    pixels = np.arange(32, dtype=np.uint8).reshape(4, 8)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    turned = decode(LabelledImage(lambda: Image.open(tmp_path / "a.png"), None, "a.png"), (8, 4), 1)
    assert (turned[0] == np.rot90(pixels, -1)).all()


def test_the_usual_size_and_the_share_of_grey_images(home, tmp_path):
    def images(folder: Path) -> list[LabelledImage]:
        return read_images(ImageArguments(train_file=[str(folder)]), labelled=True)["train"]

    assert survey(images(home / "train")) == Survey((8, 8), 1.0, 1.0)
    assert survey([*images(home / "train")[:9], *images(home / "colour")[:3]]) == Survey((8, 8), 1.0, 0.75)
    assert survey(images(broken(tmp_path / "data"))).grey == 1.0  # what cannot be read says nothing


def test_the_first_image_does_not_decide_the_size():
    """A banner that came first stretched all others to its form."""

    def images(*sizes: tuple[int, int]) -> list[LabelledImage]:
        return [LabelledImage(partial(Image.new, "L", size[::-1]), None, "here") for size in sizes]

    assert survey(images((4, 60), (20, 30), (20, 30), (20, 30))) == Survey((20, 30), 0.75, 1.0)
    assert survey(images((4, 60), (28, 30), (20, 40), (32, 30))) == Survey((30, 30), 0.0, 1.0)
    assert survey([LabelledImage(partial(Image.open, "nowhere"), None, "here")]) == Survey((1, 1), 1.0, 0.0)


def test_the_size_of_a_camera_that_was_held_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (8, 4)).save(tmp_path / "a.png", exif=exif)
    assert survey([LabelledImage(partial(Image.open, tmp_path / "a.png"), None, "a.png")]).size == (8, 4)


@pytest.mark.parametrize("in_memory", [True, False])
def test_models_get_contiguous_images(home, in_memory):
    """Channels that are last in memory made the convolutions of a small ResNet crash."""
    arguments = ImageArguments(train_file=[str(home / "colour")])
    data = ImageData(read_images(arguments, labelled=True)["train"], (8, 8), 3, in_memory=2**20 * in_memory)
    processor = HfTinyGreyImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    collate = Normalize(processor, 0, Augment(AugmentArguments(random_shift=0.1 * in_memory)))
    images = collate.images(data[[0, 1]], np.zeros((2, collate.width)))
    assert not images.is_contiguous() and collate.normalized(images).is_contiguous()


# Batches


def test_batches_of_images_are_those_of_rows(home):
    data = data_of(ImageArguments(train_file=[str(home / "train")]))

    def rows(batch: dict, first: int) -> list[int]:
        return batch["example"].tolist()

    large, small = (ImageBatches(data, rows, size, seed=3) for size in (12, 4))
    for index in range(6):  # 72 samples: two epochs
        assert large[index] == [*small[3 * index], *small[3 * index + 1], *small[3 * index + 2]]
    assert sorted([*large[0], *large[1], *large[2]]) == list(range(36)) and large[0] != large[3]
    in_order = ImageBatches(data, rows, 10, seed=3, shuffle=False)
    assert [len(in_order[index]) for index in range(len(in_order))] == [10, 10, 10, 6]
    assert data.fingerprint in large.fingerprint and "rows" in large.fingerprint
