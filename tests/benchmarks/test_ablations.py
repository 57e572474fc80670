"""The same run with one thing changed at a time: what is changed, what is compared, what is said of it."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from fixtures import modules
from fixtures.labelled import write_table
from fixtures.tiny_run import ROOT, assert_refused, finish, results_of, run_to, write_text

from hf_tiny import HfTinyElectraConfig, InputError

sys.path.append(str(ROOT / "benchmarks"))
ELECTRA, SEQ2SEQ = "../benchmarks/ablate_electra", "../benchmarks/ablate_seq2seq"


@pytest.fixture(scope="module")
def ablate():
    return modules.load("benchmarks/ablate.py")


def test_many_models_are_not_pushed(ablate):
    recipe = SimpleNamespace(model_name_or_path=None, resume_from_checkpoint=None, push_to_hub=True)
    with pytest.raises(InputError, match=r"--push_to_hub: an ablation trains many models.*push FOLDER"):
        ablate.run_rows(None, recipe, {}, None)


# Attention Is All You Need, Table 3


def test_rows_of_table_3_beside_the_papers(tmp_path):
    words = {"배": "ship", "달": "moon", "새": "bird", "책": "book"}
    pairs = [(f"{one} {two}", f"{words[one]} {words[two]}") for one in words for two in words] * 2
    data = {"train_file": write_table(tmp_path / "train.tsv", pairs, ("source", "target")), "vocab_size": 400}
    sizes = {"max_source_length": 16, "max_target_length": 16, "num_beams": 1, "max_steps": 2, "max_eval_samples": 4}
    settings = {**data, **sizes, "hidden_size": 64, "seeds": 2, "rows": ["base", "2_layers", "dropout_0"]}
    made = finish(tmp_path / "table", SEQ2SEQ, **settings)
    changed = {name: json.loads((made / name / "seed-43" / "config.json").read_text()) for name in settings["rows"]}
    assert [config["encoder_layers"] for config in changed.values()] == [4, 2, 4]
    assert [config["hidden_dropout_prob"] for config in changed.values()] == [0.1, 0.1, 0.0]
    assert {config["hidden_size"] for config in changed.values()} == {64}
    lines = (made / "table" / "table.md").read_text().splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| base", "| 2_layers", "| dropout_0"]
    figures = [results_of(made / "base" / f"seed-{seed}")["eval_ppl"] for seed in (42, 43)]
    mean, spread = np.mean(figures), np.std(figures, ddof=1)
    assert lines[0].split(" | ")[1:3] == [f"{mean:.2f} ± {spread:.2f}", "4.92"]
    assert (made / "table" / "table.png").stat().st_size
    again = run_to(made, SEQ2SEQ, **settings)
    assert again.code == 0 and again.out.count("is finished: delete it to run it again") == 3
    assert_refused(run_to(made, SEQ2SEQ, **{**settings, "rows": "3_heads"}), "--rows 3_heads", "1_head")
    resumed = run_to(made, SEQ2SEQ, **settings, resume_from_checkpoint="latest")
    assert_refused(resumed, "from scratch", "--resume_from_checkpoint")


@pytest.mark.parametrize(
    ("row", "base", "spread", "said"),
    [
        (5.0, 4.0, 0.1, "seen: worse by 1.00"),
        (3.0, 4.0, 0.1, "not seen: better by 1.00"),
        (4.1, 4.0, 0.1, "too small to tell (worse by 0.10)"),
    ],
)
def test_a_difference_counts_when_it_is_larger_than_the_seeds(ablate, row, base, spread, said):
    rows = {"base": ablate.Row({}, {"PPL": 4.92}), "other": ablate.Row({}, {"PPL": 5.77})}
    found = {name: {"ppl": value, "ppl_std": spread} for name, value in (("base", base), ("other", row))}
    assert ablate.verdict(found, rows, "other", "PPL", ablate.Figure("ppl", higher_is_better=False)) == said


# ELECTRA


def test_an_ablation_at_equal_flops(tmp_path):
    """Rows by themselves and again, judged by two sets; what is compared with what is in the table."""
    words = {"a": "the old ship sails", "b": "quiet birds carry letters"}
    sets = [tmp_path / f"{name}.yaml" for name in ("one", "two")]
    for path in sets:
        table = write_table(path.with_suffix(".tsv"), [(words[label], label) for label in "ab" * 20])
        path.write_text(json.dumps({"train_file": [str(table)], "max_steps": 2}))
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 200,
        "max_seq_length": 16,
    }
    settings = {"train_file": write_text(tmp_path / "text.txt"), "max_steps": 4, "classify": sets, "seeds": 2, **small}
    out = tmp_path / "out"
    finish(out, ELECTRA, rows="base", **settings)
    second = run_to(out, ELECTRA, rows=["base", "share_all", "generator_1"], **settings)
    assert second.code == 0, second.err
    assert second.out.count("is finished") == 1
    table = {row["what"]: row["figures"] for row in json.loads((out / "table" / "table.json").read_text())}
    assert list(table) == ["base", "generator_1", "share_all"]  # in the order of ROWS
    assert float(table["generator_1"]["steps"]) < float(table["base"]["steps"]) == 4
    assert {"one", "two", "score"} <= table["base"].keys()
    assert table["share_all"]["score, paper"] == "better (84.4 : 84.3)"
    assert " than generator_1" in table["share_all"]["score: as there?"]
    results = results_of(out / "share_all")
    assert results["score"] == pytest.approx((results["score_one"] + results["score_two"]) / 2)
    folders = {name: out / name / "seed-42" / "pretrained" for name in ("base", "share_all")}
    recipe = yaml.safe_load((folders["share_all"] / "recipe.yaml").read_text())
    assert recipe["sharing"] == "all" and "classify" not in recipe  # pretrain_electra.py can read it
    config = HfTinyElectraConfig.from_pretrained(folders["base"])
    assert (config.generator_size, config.hidden_size, config.sharing) == (0.25, 32, "embeddings")
    refused = run_to(out, ELECTRA, rows=["base", "three_stage"], **settings)
    assert_refused(refused, "--rows three_stage", "two_stage")


def test_flops_are_those_of_the_products():
    """By hand: 2 per multiplication and addition, three times over for what is trained, once for what is frozen."""
    ablation = modules.load("benchmarks/ablate_electra.py")
    size, inner, words, length = 32, 64, 64, 16
    config = HfTinyElectraConfig(
        vocab_size=words, embedding_size=size, hidden_size=size, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=inner, max_position_embeddings=length, sharing="none", generator_size=1,
    )  # fmt: skip
    recipe = {
        "max_seq_length": length,
        "mlm_probability": 0.25,
        "max_steps": 2,
        "max_minutes": None,
        "first_stage_steps": -1,
    }
    cost = {
        name: ablation.flops_per_token(config, SimpleNamespace(objective=name, weight_decay=0.0, **recipe))
        for name in ("joint", "two_stage")
    }
    layer = 2 * (4 * size * size + 2 * size * inner)
    head = 0.25 * 2 * (size * size + size * words)
    judge = 2 * (size * size + size)
    attention = cost["joint"] - 3 * (2 * layer + head + judge)  # the scores, if they are counted
    assert 0 <= attention <= 3 * 2 * 2 * 2 * 2 * size * length
    stages = (3 * (layer + head) + (layer + head) + 3 * (layer + judge)) / 2
    assert cost["two_stage"] == pytest.approx(stages + attention * 7 / 12, rel=0.02)
