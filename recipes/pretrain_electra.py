"""Pretrain ELECTRA from raw text.

accelerate launch recipes/pretrain_electra.py  # the built-in corpus, under 10 minutes on 2 cores
accelerate launch recipes/pretrain_electra.py --train_file my_texts/ --size small --output_dir runs/mine
accelerate launch recipes/pretrain_electra.py runs/mine/recipe.yaml --resume_from_checkpoint latest
accelerate launch recipes/pretrain_electra.py --model_name_or_path runs/mine --train_file law --extend_vocab 500
accelerate launch recipes/pretrain_electra.py --objective two_stage --sharing none --generator_size 1 --output_dir runs/two_stage
"""

from dataclasses import dataclass
from typing import ClassVar

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, InputError
from hf_tiny.arguments import flag
from hf_tiny.continued import ContinueArguments, go_on
from hf_tiny.data.collate import Batches, MaskTokens
from hf_tiny.data.corpus import CorpusArguments, documents, fingerprint
from hf_tiny.data.stream import text_batches
from hf_tiny.metrics import CollapseWarning, Evaluation, collect_electra, compute_electra
from hf_tiny.objectives import ObjectiveArguments, start_objective
from hf_tiny.tokenizer import TokenizerArguments, load_tokenizer
from hf_tiny.train import TrainConfig, run, train

MODELS = {  # the paper's sizes, and a tiny one for a few minutes on a laptop
    "tiny": {
        "embedding_size": 128, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
        "intermediate_size": 512, "norm_first": True, "initializer_range": 0.1,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "small": {
        "embedding_size": 128, "hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "base": {
        "embedding_size": 768, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "large": {
        "embedding_size": 1024, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}  # fmt: skip
PAPER = {"warmup_steps": 10_000.0, "vocab_size": 30522, "position_embedding_type": "absolute"}


@dataclass(frozen=True, kw_only=True)
class Recipe(ContinueArguments, ObjectiveArguments, TokenizerArguments, CorpusArguments, TrainConfig):
    """Pretrain ELECTRA from raw text."""

    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"max_seq_length": 64, "per_device_train_batch_size": 16, "learning_rate": 1e-3, "adam_beta2": 0.98,
                 "max_steps": 4300, "warmup_steps": 0.05, "eval_steps": 1000, "save_steps": 1000, "vocab_size": 4096,
                 "mlm_probability": 0.25, "generator_size": 9 / 32, "position_embedding_type": "rotary"},
        "small": {**PAPER, "max_seq_length": 128, "per_device_train_batch_size": 128, "learning_rate": 5e-4,
                  "max_steps": 1_000_000, "generator_size": 1 / 4},
        "base": {**PAPER, "max_seq_length": 512, "per_device_train_batch_size": 256, "learning_rate": 2e-4,
                 "max_steps": 766_000, "generator_size": 1 / 3},
        "large": {**PAPER, "max_seq_length": 512, "per_device_train_batch_size": 2048, "learning_rate": 2e-4,
                  "max_steps": 400_000, "generator_size": 1 / 4, "mlm_probability": 0.25},
    }  # fmt: skip

    output_dir: str = flag("runs/electra", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny, or the paper's small, base or large: sets all that follows.")
    sharing: str = flag("embeddings", "What generator and discriminator share: none, embeddings or all.")
    generator_size: float = flag(0.25, "The generator's width as a fraction of the discriminator's.")
    position_embedding_type: str = flag("rotary", "absolute (as in the paper) or rotary.")
    mlm_probability: float = flag(0.15, "The share of tokens that are masked.")
    max_eval_samples: int = flag(1024, "Held-out blocks to evaluate on.")


def main(recipe: Recipe) -> dict[str, float]:
    model, tokenizer, callbacks = start(recipe)
    mask = MaskTokens(tokenizer, recipe.mlm_probability, recipe.seed)
    batches, held_out = text_batches(recipe, tokenizer, mask)
    held_out_batches = Batches(held_out, mask, recipe.per_device_eval_batch_size, recipe.seed, shuffle=False)
    groups, stages = start_objective(model, recipe)
    evaluate = Evaluation(held_out_batches, collect_electra, compute_electra(model.config.discriminator_weight))
    about = {"pipeline_tag": "fill-mask", "data": recipe.corpus_name}
    callbacks += [CollapseWarning(), stages]
    return train(
        model, batches, recipe, evaluate=evaluate, groups=groups, callbacks=callbacks, processor=tokenizer, card=about
    )


def start(recipe: Recipe):
    """Model, tokenizer and callbacks: of an earlier run, or from scratch."""
    if recipe.model_name_or_path:
        return go_on(recipe, lambda: documents(recipe))
    if recipe.extend_vocab or recipe.measure_forgetting:
        raise InputError("--extend_vocab and --measure_forgetting need --model_name_or_path: what to go on from.")
    length = max(512, recipe.max_seq_length)
    tokenizer = load_tokenizer(recipe, lambda: documents(recipe), fingerprint(recipe), model_max_length=length)
    model = HfTinyElectraForPreTraining(model_config(recipe, len(tokenizer), tokenizer.pad_token_id))
    return model, tokenizer, []


def model_config(recipe: Recipe, vocab_size: int, pad_token_id: int = 0) -> HfTinyElectraConfig:
    try:
        return HfTinyElectraConfig(
            vocab_size=vocab_size,
            pad_token_id=pad_token_id,
            max_position_embeddings=max(512, recipe.max_seq_length),
            sharing=recipe.sharing,
            generator_size=recipe.generator_size,
            position_embedding_type=recipe.position_embedding_type,
            **MODELS[recipe.size],
        )
    except ValueError as error:
        raise InputError(str(error)) from error


if __name__ == "__main__":
    run(main, Recipe)
