"""docs/quickstart.ipynb runs from its first cell to its last, in an empty folder."""

import json
from pathlib import Path

import nbformat
import pytest
from fixtures import tiny_run
from nbclient import NotebookClient

NOTEBOOK = tiny_run.ROOT / "docs" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_trains_looks_and_loads(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    results = {folder: json.loads((tmp_path / "runs" / folder / "all_results.json").read_text()) for folder in
               ("notebook", "two")}  # fmt: skip
    assert results["notebook"]["train_steps"] == 40 and results["notebook"]["eval_accuracy"] > 0.9
    assert results["two"]["num_processes"] == 2
    (answers,) = [output["data"]["text/plain"] for output in shown if "'score'" in str(output.get("data"))]
    assert "좋다" in answers and "나쁘다" in answers


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(Path(NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
