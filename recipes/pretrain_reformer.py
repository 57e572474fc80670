# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_tiny>=0.1"]
# ///
"""Pretrain a Reformer from long raw text: causal (each token from those before it) or masked.

hf-tiny pretrain-reformer  # the built-in corpus, under 10 minutes on 2 cores
hf-tiny pretrain-reformer --train_file my_books/ --max_seq_length 16384 --tokenizer_model bytes
hf-tiny pretrain-reformer --full_attention True --output_dir runs/full  # for comparison
"""

from hf_tiny.flags import begin

begin(__name__, __file__)  # before the imports below, which take seconds

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from hf_tiny import HfTinyReformerConfig, HfTinyReformerForCausalLM, HfTinyReformerForMaskedLM
from hf_tiny.arguments import flag
from hf_tiny.data.corpus import Corpus, CorpusArguments
from hf_tiny.data.masking import MaskTokens, NextTokens
from hf_tiny.hub import Card
from hf_tiny.models import SIZES
from hf_tiny.start import InitArguments
from hf_tiny.tasks.pretrain import TokenEvaluation, pretrain, start_from_corpus
from hf_tiny.tokenizer import TokenizerArguments, frame, load_tokenizer, token_bytes
from hf_tiny.train import TrainConfig, run

OBJECTIVES = {
    "causal": (HfTinyReformerForCausalLM, "text-generation"),
    "masked": (HfTinyReformerForMaskedLM, "fill-mask"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe(InitArguments, TokenizerArguments, CorpusArguments, TrainConfig):
    """Pretrain a Reformer from long raw text: causal (each token from those before it) or masked."""

    CONFIG: ClassVar[type] = HfTinyReformerConfig
    MODEL_SIZES: ClassVar[dict[str, dict]] = SIZES[HfTinyReformerConfig]
    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"max_seq_length": 2048, "vocab_size": 4096, "learning_rate": 2e-3, "max_steps": 1000,
                 "eval_steps": 500, "save_steps": 500},
        "base": {"max_seq_length": 65_536, "gradient_accumulation_steps": 8, "tokenizer_model": "bytes",
                 "learning_rate": 5e-4, "warmup_steps": 4000.0, "max_steps": 100_000},
    }  # fmt: skip
    DEFAULTS: ClassVar[dict] = {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "tokenizer_model": "bpe",
        "sample_by": "document",
        "adam_beta2": 0.98,
    }

    output_dir: str = flag("runs/reformer", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny, or base (the paper's, on bytes): sets all that follows.")
    objective: str = flag(
        "causal",
        "causal (predict the next token) or masked (predict tokens that are hidden).",
        choices=tuple(OBJECTIVES),
    )
    full_attention: bool = flag(False, "Chunks as long as a block, for comparison: every layer has all in reach.")
    chunk_length: int = flag(
        64, "Tokens in a chunk of attention; a token sees its own chunk and the one before.", low=1
    )
    mlm_probability: float = flag(0.15, "Share of tokens that are hidden, if --objective masked.", above=0, below=1)
    max_eval_samples: int = flag(64, "Number of held-out blocks to evaluate on.", low=1)


def main(recipe: Recipe) -> dict[str, float]:
    (model_class, task), causal = OBJECTIVES[recipe.objective], recipe.objective == "causal"
    corpus, length = Corpus(recipe, recipe.seed), recipe.max_seq_length
    tokenizer = load_tokenizer(recipe, corpus.documents, corpus.fingerprint, model_max_length=length)
    tokenizer = frame(tokenizer, ends=not causal)
    model = model_class(model_config(recipe, tokenizer))
    start_from_corpus(recipe, model, tokenizer, corpus)
    collate = NextTokens(tokenizer) if causal else MaskTokens(tokenizer, recipe.mlm_probability, recipe.seed)
    card = Card(pipeline_tag=task, data=recipe.corpus_name, mask=tokenizer.mask_token)
    evaluation = partial(TokenEvaluation, token_bytes=token_bytes(tokenizer))
    return pretrain(recipe, corpus, model, tokenizer, collate, evaluation, card=card)


def model_config(recipe: Recipe, tokenizer) -> HfTinyReformerConfig:
    length = recipe.max_seq_length
    chunk, side = length if recipe.full_attention else recipe.chunk_length, math.isqrt(length - 1) + 1
    return recipe.build_config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        lsh_attn_chunk_length=chunk,
        local_attn_chunk_length=chunk,
        axial_pos_shape=[side, side],
    )


if __name__ == "__main__":
    run(main, Recipe)
