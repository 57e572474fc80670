"""What trackers get of a run: figures, images, samples. trackio is the real one, on this machine."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures import tiny_run
from PIL import Image

from hf_tiny import InputError, tracking
from hf_tiny.train import TrainConfig

REVIEWS = "".join(f"{'good' if i % 2 else 'bad'}\t{'정말 좋다' if i % 2 else '너무 지루했다'} {i}\n" for i in range(24))
SHORT = {"max_steps": 3, "vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


def tracked(folder: str, file: str) -> None:
    """A run, and what trackio has kept of it: a process of its own, since trackio settles its folder when it is imported."""
    flags = tiny_run.flags(train_file=file, output_dir=f"{folder}/run", report_to=["trackio", "tensorboard"], **SHORT)
    tiny_run.run_named("finetune_classifier", *flags, "--logging_steps", "1")
    from trackio.sqlite_storage import SQLiteStorage

    kept = {"runs": SQLiteStorage.get_runs("hf_tiny"), "config": SQLiteStorage.get_run_config("hf_tiny", "run")}
    Path(folder, "kept.json").write_text(json.dumps({**kept, "lines": SQLiteStorage.get_logs("hf_tiny", "run")}))


@pytest.mark.slow
def test_trackio_and_tensorboard_get_figures_images_and_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "reviews.tsv").write_text("label\ttext\n" + REVIEWS, encoding="utf-8")
    home = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    ended = tiny_run.start(tmp_path, tracked, str(tmp_path), str(tmp_path / "reviews.tsv"), env=home).wait(300)
    assert ended.code == 0, ended.err
    kept, log = json.loads((tmp_path / "kept.json").read_text()), tiny_run.metrics(tmp_path / "run")
    assert kept["runs"] == ["run"] and kept["config"]["max_steps"] == 3
    results = tiny_run.results_of(tmp_path / "run")
    for name in ("loss", "learning_rate", "eval_loss", "eval_accuracy"):
        written = [(line["step"], line[name]) for line in log if name in line]
        assert [(line["step"], line[name]) for line in kept["lines"] if name in line] == written and written
    (last,) = [line for line in kept["lines"] if "curves" in line]
    assert last["baseline_accuracy"] == results["baseline_accuracy"] and last["step"] == 3
    for name in ("curves", "validation_confusion"):
        assert last[name]["_type"] == "trackio.image"
        copy, own = tmp_path / "trackio" / "media" / last[name]["file_path"], tmp_path / "run" / f"{name}.png"
        assert copy.read_bytes() == own.read_bytes()
    predictions = (tmp_path / "run" / "validation_predictions.tsv").read_text(encoding="utf-8")
    assert last["validation_predictions"]["_value"] == "".join(f"    {line}\n" for line in predictions.splitlines())

    events = EventAccumulator(str(tmp_path / "run" / "hf_tiny"), size_guidance={"images": 0}).Reload()
    assert {"curves", "validation_confusion"} <= set(events.Tags()["images"])
    with Image.open(tmp_path / "run" / "curves.png") as image:
        assert (events.Images("curves")[0].width, events.Images("curves")[0].height) == image.size
    assert "validation_predictions/text_summary" in events.Tags()["tensors"]


def test_a_missing_trackio_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(InputError, match=r'trackio is not installed: pip install "hf_tiny\[trackio\]"'):
        tracking.check_trackers(TrainConfig(report_to=["trackio"]))


def test_a_space_needs_trackio_and_a_token(monkeypatch):
    with pytest.raises(InputError, match="--trackio_space_id: a Space is for --report_to trackio"):
        tracking.check_trackers(TrainConfig(trackio_space_id="you/watch"))
    monkeypatch.setattr(tracking, "get_token", lambda: None)
    with pytest.raises(InputError, match="--trackio_space_id you/watch: you are not logged in"):
        tracking.check_trackers(TrainConfig(report_to=["trackio"], trackio_space_id="you/watch"))
    tracking.check_trackers(TrainConfig(report_to=["trackio"]))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"output_dir": "runs/mine"}, {"name": "mine", "space_id": None, "private": None, "resume": "never"}),
        (
            {"output_dir": "runs/mine/seed-42", "trackio_space_id": "you/watch", "hub_private_repo": True,
             "resume_from_checkpoint": "latest"},
            {"name": "mine-seed-42", "space_id": "you/watch", "private": True, "resume": "allow"},
        ),
    ],
)  # fmt: skip
def test_what_trackio_is_told(settings, expected):
    given = []
    accelerator = SimpleNamespace(init_trackers=lambda project, config, init_kwargs: given.append(init_kwargs))
    tracking.start_trackers(accelerator, TrainConfig(**settings))
    assert given == [{"trackio": expected}]


class Notes:
    """A tracker that keeps what it is given."""

    def __init__(self, name: str):
        self.name, self.kept = name, {}

    def log(self, values: dict, step: int) -> None:
        self.kept |= values

    def log_images(self, values: dict, step: int, **options) -> None:
        self.kept |= {name: value.shape for name, value in values.items()}


@pytest.mark.parametrize(
    ("name", "server", "settings", "shown"),
    [
        ("wandb", None, {}, False),
        ("wandb", None, {"push_predictions": True}, True),
        ("tensorboard", None, {}, True),
        ("trackio", None, {}, True),
        ("trackio", "you/watch", {}, False),
        ("trackio", "you/watch", {"push_predictions": True}, True),
    ],
)
def test_rows_of_the_data_stay_at_home_unless_they_may_leave(tmp_path, monkeypatch, name, server, settings, shown):
    variables = SimpleNamespace(current_server=SimpleNamespace(get=lambda: server))
    trackio = SimpleNamespace(Image=lambda path: (1, 4, 5, 3), Markdown=str, context_vars=variables)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    (tmp_path / "test_predictions.tsv").write_text("text\tprediction\n<script>\tgood\n", encoding="utf-8")
    (tmp_path / "more_predictions.parquet").write_bytes(b"PAR1")
    Image.new("RGB", (5, 4)).save(tmp_path / "curves.png")
    notes, results = Notes(name), {"eval_f1": 1.0, "test_f1": 0.5, "baseline_test_f1": 0.4, "train_steps": 3}
    config = TrainConfig(output_dir=str(tmp_path), report_to=[name], **settings)
    tracking.log_what_is_left(SimpleNamespace(trackers=[notes]), config, results, 3)
    samples = {"test_predictions": "    text\tprediction\n    <script>\tgood\n"} if shown else {}
    assert notes.kept == {"test_f1": 0.5, "baseline_test_f1": 0.4, "curves": (1, 4, 5, 3), **samples}
