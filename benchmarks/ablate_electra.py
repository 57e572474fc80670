"""Pretrain ELECTRA with one choice of the paper changed at a time, for the same FLOPs, and judge it by fine-tuning.

accelerate launch benchmarks/ablate_electra.py --seeds 2  # the built-in corpus and tagged sets
accelerate launch benchmarks/ablate_electra.py --train_file texts/ --classify reviews.yaml topics.yaml --rows base two_stage
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from ablate import Figure, Row, change, compare, load_recipe, run_rows
from torch.utils.flop_counter import FlopCounterMode

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, arguments
from hf_tiny.arguments import flag
from hf_tiny.models.electra import OBJECTIVES
from hf_tiny.tasks.pretrain import start_objective
from hf_tiny.train import run

finetune_classifier, finetune_tagger = load_recipe("finetune_classifier"), load_recipe("finetune_tagger")
pretrain_electra = load_recipe("pretrain_electra")

EQUAL = {"generator_size": 1.0}
ROWS = {  # what is changed, and the paper's GLUE score (Table 5), or what its text says
    "base": Row({}, {"score": 85.0}),
    "generator_8th": Row({"generator_size": 1 / 8}, {"score": "worse"}),
    "generator_half": Row({"generator_size": 1 / 2}, {"score": "same"}),
    "generator_1": Row(EQUAL, {"score": "worse"}),
    "share_none": Row({**EQUAL, "sharing": "none"}, {"score": "worse (83.6 : 84.3)"}, "generator_1"),
    "share_all": Row({**EQUAL, "sharing": "all"}, {"score": "better (84.4 : 84.3)"}, "generator_1"),
    "two_stage": Row({**EQUAL, "sharing": "none", "objective": "two_stage"}, {"score": "worse"}),
    "adversarial": Row({"objective": "adversarial"}, {"score": "worse"}),
    "bert": Row({**EQUAL, "sharing": "all", "objective": "mlm"}, {"score": 82.2}),
    "masked_rtd": Row({"objective": "masked_rtd"}, {"score": 82.4}),
    "replace_mlm": Row({"objective": "replace_mlm"}, {"score": 82.4}),
    "all_tokens_mlm": Row({"objective": "all_tokens_mlm"}, {"score": 84.3}),
    "learned_positions": Row({"position_embedding_type": "absolute"}, {}),
}
FACTS = {
    "MLM accuracy": Figure("eval_mlm_accuracy", None),
    "RTD AUC": Figure("eval_rtd_auc", None),
    "steps": Figure("train_steps", None),
    "TFLOP": Figure("teraflop", None),
}
JUDGES = {"classify": (finetune_classifier, "eval_accuracy"), "tag": (finetune_tagger, "eval_f1")}
BUILT_IN = {"classify": ("classify", ["--max_steps", "200"]), "tag": ("tag", ["--max_steps", "100"])}


@dataclass(frozen=True, kw_only=True)
class Recipe(pretrain_electra.Recipe):
    """Pretrain ELECTRA with one choice changed at a time, for the same FLOPs, and judge it by fine-tuning."""

    SIZES: ClassVar[dict[str, dict]] = {
        **pretrain_electra.Recipe.SIZES,
        "tiny": {**pretrain_electra.Recipe.SIZES["tiny"], "max_steps": 400, "save_steps": 0, "eval_steps": 0},
    }
    MODEL_SIZES: ClassVar[dict[str, dict]] = {
        size: {**settings, "generator_size": 1 / 4, "generator_layers": None, "sharing": "embeddings"}
        for size, settings in pretrain_electra.Recipe.MODEL_SIZES.items()
    }
    DEFAULTS: ClassVar[dict] = {"save_steps": 0, "eval_steps": 0}

    output_dir: str = flag("runs/ablation", "A folder for each row, and one for the table.")
    rows: list[str] | None = flag(None, "Only these rows; those that are finished are not run again.")
    classify: list[str] | None = flag(None, "YAML files of flags of finetune_classifier.py: sets to be judged by.")
    tag: list[str] | None = flag(None, "The same of finetune_tagger.py; with neither, two built-in sets.")


def main(recipe: Recipe) -> dict[str, float]:
    run_rows(pretrain_and_judge, recipe, ROWS, recipe.rows)
    sets = {name: Figure(f"score_{name}", True) for name in judges(recipe)}
    return compare(Path(recipe.output_dir), ROWS, {"score": Figure("score", True), **sets, **FACTS})


def judges(recipe: Recipe) -> dict[str, tuple[str, list[str]]]:
    """The kind of each set and the flags for it, by the set's name."""
    given = [(kind, file) for kind in JUDGES for file in vars(recipe)[kind] or []]
    return {Path(file).stem: (kind, [file]) for kind, file in given} or BUILT_IN


def pretrain_and_judge(recipe: Recipe, settings: dict) -> dict[str, float]:
    own = {field.name: vars(recipe)[field.name] for field in fields(pretrain_electra.Recipe)}
    base, folder = pretrain_electra.Recipe(**{**own, "given_settings": recipe.model_settings}), Path(recipe.output_dir)
    changed = replace(change(base, settings), output_dir=str(folder / "pretrained"))
    changed = replace(changed, max_steps=round(recipe.max_steps * flops(base) / flops(changed)))
    results = pretrain_electra.main(changed)
    scores = {}
    for name, (kind, flags) in judges(recipe).items():
        recipe_module, figure = JUDGES[kind]
        place = {"model_name_or_path": changed.output_dir, "output_dir": str(folder / name), "seed": recipe.seed}
        tuned = replace(arguments.parse(recipe_module.Recipe, flags), **place)
        scores[f"score_{name}"] = 100 * recipe_module.main(tuned)[figure]
    total = flops(changed) * results["train_tokens"] / 1e12
    return {**results, **scores, "score": float(np.mean(list(scores.values()))), "teraflop": total}


def flops(recipe: pretrain_electra.Recipe) -> float:
    """Of a token, by what the recipe says of the model."""
    sizes = {"vocab_size": recipe.vocab_size, "max_position_embeddings": max(512, recipe.max_seq_length)}
    return flops_per_token(recipe.build_config(**sizes), recipe)


def flops_per_token(config: HfTinyElectraConfig, recipe: pretrain_electra.Recipe) -> float:
    """Of a training step, forward and backward. The stages of two_stage count as equally long, of others the last."""
    with torch.random.fork_rng():
        model = HfTinyElectraForPreTraining(config)
    ids = torch.arange(recipe.max_seq_length)[None] % config.vocab_size
    labels = torch.where(ids < recipe.mlm_probability * ids.numel(), ids, -100)
    stages = start_objective(model, recipe)[1].stages
    found = []
    for stage in stages if recipe.objective == "two_stage" else stages[-1:]:
        model.objective = OBJECTIVES[stage]
        with FlopCounterMode(display=False) as counter:
            model(ids, labels=labels, sampling_noise=torch.full(ids.shape, 0.5)).loss.backward()
        found.append(counter.get_total_flops() / ids.numel())
    return sum(found) / len(found)


if __name__ == "__main__":
    run(main, Recipe, repeat=False)
