"""The ledger: which record is the best so far, and what counts as better."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from fixtures.tiny_run import ROOT, recipe_module

sys.path.append(str(ROOT / "benchmarks"))
import speedrun

from hf_tiny import arguments

RECORDS = sorted((ROOT / "benchmarks" / "speedrun").iterdir())


def keep(folder: Path, scores: list[float]) -> Path:
    folder.mkdir()
    (folder / speedrun.FIGURES).write_text(json.dumps({"scores": scores}))
    return folder


def test_a_record_is_compared_with_the_best_before_it(tmp_path):
    keep(tmp_path / "01_first", [0.60, 0.62])
    keep(tmp_path / "02_better", [0.70, 0.72])
    third = keep(tmp_path / "03_worse", [0.65, 0.66])
    keep(tmp_path / "04_later", [0.90, 0.91])
    assert speedrun.best_before(third) == ("02_better", [0.70, 0.72])
    assert speedrun.best_before(tmp_path / "01_first") is None


def test_a_lead_within_the_noise_of_the_seeds_is_no_record():
    best = [0.700, 0.704, 0.696, 0.702, 0.698]
    assert speedrun.p_value([score + 0.001 for score in best], best) > 0.2
    assert speedrun.p_value([score + 0.010 for score in best], best) < speedrun.SIGNIFICANT
    assert speedrun.p_value([score - 0.010 for score in best], best) > 0.99


@pytest.mark.parametrize("record", RECORDS, ids=[record.name for record in RECORDS])
def test_recipes_of_records_are_flags_of_the_recipe(record):
    recipe = arguments.parse(recipe_module("pretrain_electra").Recipe, [str(record / "recipe.yaml")])
    given = yaml.safe_load((record / "recipe.yaml").read_text(encoding="utf-8"))
    assert {name: vars(recipe)[name] for name in given if name in vars(recipe)} == {
        name: value for name, value in given.items() if name in vars(recipe)
    }
