"""What is drawn and printed when a run is over, and what is not loaded before."""

import json
import shlex
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from huggingface_hub.utils import validate_repo_id
from matplotlib import font_manager
from PIL import Image

from hf_tiny import InputError, errors, report


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (6.5, "6.5"),
        (0.98765, "0.9877"),
        (123456.7, "123,457"),
        (1000000, "1,000,000"),
        (3, "3"),
        (1e-6, "1e-06"),
        (float("nan"), "nan"),
        (-2.0, "-2"),
    ],
)
def test_numbers_are_for_people(value, text):
    assert report.number(value) == text


def colours(path) -> int:
    """How many there are in an image: a few where nothing is drawn."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        return len(image.convert("RGB").getcolors(1 << 24))


def test_one_logged_line_can_be_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "epoch": 0.1, "loss": 2.0, "rtd_auc": NaN}\n')
    report.draw_curves(tmp_path)
    assert Image.open(tmp_path / "curves.png").size == (1200, 260)


def test_a_figure_that_is_known_at_the_end_only_has_no_panel(tmp_path):
    """Unless training has it, too."""
    lines = [{"step": step, "loss": 1 / step} for step in (1, 2)] + [{"step": 2, "eval_loss": 1, "eval_accuracy": 0.8}]
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    titles = []
    with mock.patch("matplotlib.axes.Axes.set_title", lambda axis, title: titles.append(title)):
        report.draw_curves(tmp_path)
        assert titles == ["loss"]
        log.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 4, "eval_accuracy": 0.9}]))
        report.draw_curves(tmp_path)
    assert titles == ["loss", "loss", "accuracy"]


def test_confusion(tmp_path, monkeypatch):
    report.draw_confusion(tmp_path / "two.png", ["$a$", "b"], [0, 0, 0, 0], [0, 0, 0, 1])
    assert Image.open(tmp_path / "two.png").size[0] > 300 and colours(tmp_path / "two.png") > 50
    large = Image.open(tmp_path / "two.png").size
    monkeypatch.setattr(report, "MOST_CLASSES", 3)
    report.draw_confusion(tmp_path / "many.png", [f"label {n}" for n in range(9)], range(9), range(9))
    report.draw_confusion(tmp_path / "three.png", [f"label {n}" for n in range(3)], range(3), range(3))
    many, three = (Image.open(tmp_path / f"{name}.png").size for name in ("many", "three"))
    assert abs(many[0] - three[0]) < 20 and many != large
    assert [path.name for path in tmp_path.glob("*.txt")] == []


def test_letters_that_no_font_has_become_numbers(tmp_path, monkeypatch):
    own = [font for font in font_manager.fontManager.ttflist if font.name.startswith("DejaVu")]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    assert report.fonts_for("abc") == ["DejaVu Sans"] and report.fonts_for("긍정") is None
    assert report.drawable(["a", "b"], tmp_path / "x.png") == (["a", "b"], "") and not list(tmp_path.glob("x*"))
    assert report.drawable(["a", "긍정"], tmp_path / "x.png") == (["1", "2"], "numbers: see x.txt")
    assert (tmp_path / "x.txt").read_text(encoding="utf-8") == "1: a\n2: 긍정\n"
    report.draw_confusion(tmp_path / "hangul.png", ["긍정", "부정"], [0, 0, 1, 1], [0, 1, 1, 1])
    assert (tmp_path / "hangul.txt").read_text(encoding="utf-8") == "1: 긍정\n2: 부정\n"
    report.draw_attention(tmp_path / "attention.png", np.eye(2), ["긍정", "부정"], ["a", "b"])
    assert colours(tmp_path / "attention.png") > 50


def test_the_summary_has_the_code_of_the_card(tmp_path, capsys):
    code = 'from transformers import AutoModelForSeq2SeqLM\n\nmodel = AutoModelForSeq2SeqLM.from_pretrained("PATH_OR_ID")\n'
    (tmp_path / "README.md").write_text(f"# name\n\n```python\n{code}```\n\n```python\nother\n```\n")
    report.print_summary(tmp_path, {"eval_loss": 1.5, "train_runtime": 60.0})
    printed = capsys.readouterr().out.splitlines()
    place = printed.index("  use it:  from transformers import AutoModelForSeq2SeqLM")
    assert printed[place + 1].strip() == f'model = AutoModelForSeq2SeqLM.from_pretrained("{tmp_path}")'
    assert printed[place + 2].startswith("  push it: ") and "other" not in "".join(printed)


@pytest.mark.parametrize(("folder", "repo"), [("분류", "model"), ("영화 reviews", "reviews"), ("my.run-2", "my.run-2")])
def test_the_hint_how_to_push_works_when_it_is_pasted(tmp_path, capsys, folder, repo):
    """The Hub takes no Hangul in a name."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "README.md").write_text("card")
    report.print_summary(tmp_path / folder, {"eval_loss": 1.5, "train_runtime": 60.0})
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[2:] == ["hf-tiny", "push", str(tmp_path / folder), "--hub_model_id", f"you/{repo}"]
    validate_repo_id(words[-1])


def test_attention_and_images(tmp_path):
    weights = np.random.default_rng(0).random((3, 5))
    report.draw_attention(tmp_path / "attention.png", weights, list("abc"), ["$x$", "_y", "z" * 50, "", "e"])
    assert colours(tmp_path / "attention.png") > 50
    grey, colour = np.zeros((2, 8, 8, 1)), np.random.default_rng(0).random((2, 8, 8, 3)) * 2
    report.draw_images(tmp_path / "images.png", {"grey": grey, "colour": colour}, ["$one$", "two"])
    assert Image.open(tmp_path / "images.png").size == (380, 300) and colours(tmp_path / "images.png") > 50


def test_what_few_runs_need_is_loaded_late():
    late = {"matplotlib", "sklearn", "sacrebleu", "seqeval", "evaluate", "peft"}
    code = f"import sys, hf_tiny, hf_tiny.train; print(*{late} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, ""), ended.stderr


def test_a_missing_package_is_named_with_its_extra():
    assert errors.require("json.decoder", "tag").__name__ == "json.decoder"
    with pytest.raises(InputError, match=r'^seqeval_ is not installed: pip install "hf_tiny\[tag\]"$'):
        errors.require("seqeval_.metrics", "tag")


def test_the_summary_leads_with_the_score_and_hides_what_few_need(tmp_path, capsys):
    (tmp_path / "README.md").write_text("card")
    results = {"eval_loss": 0.5, "eval_accuracy": 0.9, "baseline_name": "a bag of words", "baseline_accuracy": 0.8}
    results |= {"train_steps": 70, "train_runtime": 90.0, "train_images": 12_000, "train_images_per_second": 133.3}
    results |= {"num_parameters": 1_000, "num_processes": 1, "model_flops_per_second": 1e9, "data_wait_share": 0.1}
    report.print_summary(tmp_path, results)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["eval_accuracy", "0.9", "baseline", "0.8"]
    assert lines[3].split() == ["eval_loss", "0.5"]
    assert lines[4] == "  1.5 minutes, 70 steps, 12,000 images, 1,000 parameters"
    assert not [line for line in lines if "flops" in line or "share" in line or "processes" in line]


def test_a_heat_map_has_a_colour_bar(tmp_path):
    rows = {"image": np.zeros((3, 4, 4, 1)), "attention": np.ones((3, 4, 4, 1))}
    for name, scale in (("without", ""), ("with", "attention")):
        report.draw_images(tmp_path / f"{name}.png", rows, scale=scale)
    assert colours(tmp_path / "with.png") == 256 > colours(tmp_path / "without.png")  # all greys
    report.draw_attention(tmp_path / "two.png", np.eye(2), ["a", "b"], ["a", "b"])
    assert colours(tmp_path / "two.png") >= 256  # more than the two blues of the weights and the greys of the text


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_too_little_memory_is_answered_with_advice(error, capsys):
    with pytest.raises(SystemExit) as end, errors.exit_codes():
        raise error
    assert end.value.code == 2 and "Use a lower --per_device_train_batch_size" in capsys.readouterr().err
