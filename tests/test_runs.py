"""Runs side by side: the table and the curves."""

import json

import pytest
import yaml
from PIL import Image

from hf_tiny import cli, runs


def leave(folder, rate: float, accuracy: float | None, name: str = "classify") -> str:
    """What a run leaves, as far as it is read; without an accuracy it has not finished."""
    folder.mkdir(parents=True)
    steps = [{"step": step, "loss": 1 / step, "learning_rate": rate} for step in range(1, 5)]
    lines = [*steps, {"step": 4, "eval_loss": 0.3, "eval_accuracy": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "output_dir": str(folder),
        "learning_rate": rate,
        "seed": 42,
        "task": name,
        "num_threads": int(9 * rate),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    if accuracy is not None:
        results = {"eval_loss": 0.25, "eval_accuracy": accuracy, "eval_majority": 0.5, "test_f1": 0.125}
        results |= {
            "baseline_name": "words",
            "baseline_accuracy": 0.75,
            "baseline_test_f1": 0.25,
            "train_runtime": 90.0,
        }
        (folder / "all_results.json").write_text(json.dumps(results))
        (folder / "README.md").write_text("# card")
        (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def test_runs_stand_in_a_table_with_their_baselines_and_what_differs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = leave(tmp_path / "실험" / "느림", 1e-4, 0.8)
    leave(tmp_path / "실험" / "seed-1", 1e-3, 0.7)
    leave(tmp_path / "other", 0.5, None)
    runs.main(["실험", "other"])
    head, *rows, brackets, curves = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "eval_loss", "eval_accuracy", "test_f1", "minutes", "learning_rate"]
    cells = [row.split("  ") for row in rows]
    assert [[cell.strip() for cell in row if cell.strip()] for row in cells] == [
        ["실험/seed-1", "0.25", "0.7 (0.75)", "0.125 (0.25)", "1.5", "0.001"],
        ["실험/느림", "0.25", "0.8 (0.75)", "0.125 (0.25)", "1.5", "0.0001"],
        ["other", "0.3", "0.5", "at step 4", "0.5"],
    ]
    assert brackets == "In brackets: the baseline." and curves == "curves: runs.png"
    assert rows[0].index("0.25") == rows[1].index("0.25") + 2  # 느림 is as wide as 4 letters
    with Image.open(tmp_path / "runs.png") as image:
        assert image.size == (1200, 260) and len(image.convert("RGB").getcolors(1 << 24)) > 100
    runs.main([first, first, "--output_file", str(tmp_path / "one.png")])
    assert len(capsys.readouterr().out.splitlines()) == 4 and (tmp_path / "one.png").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["nowhere"], "nowhere: there is no such folder."), (["empty"], "empty: there is no run in it."),
     (["broken"], "recipe.yaml cannot be read"),
     (["broken", "--output_file", "no/such.png"], "--output_file no/such.png: give the name of a file")],
)  # fmt: skip
def test_what_is_no_run_is_refused(tmp_path, monkeypatch, capsys, words, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    leave(tmp_path / "broken", 0.1, 0.5)
    (tmp_path / "broken" / "recipe.yaml").write_text("- a list")
    with pytest.raises(SystemExit) as end:
        cli.main(["runs", *words])
    assert end.value.code == 2 and reason in capsys.readouterr().err
    assert not (tmp_path / "runs.png").exists()
