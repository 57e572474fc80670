"""Pretrain a Reformer from long raw text: causal (each token from those before it) or masked.

accelerate launch recipes/pretrain_reformer.py  # the built-in corpus, under 10 minutes on 2 cores
accelerate launch recipes/pretrain_reformer.py --train_file my_books/ --max_seq_length 16384 --tokenizer_model bytes
accelerate launch recipes/pretrain_reformer.py --full_attention True --output_dir runs/full  # for comparison
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from hf_tiny import HfTinyReformerConfig, HfTinyReformerForCausalLM, HfTinyReformerForMaskedLM, InputError
from hf_tiny.arguments import flag
from hf_tiny.data.collate import Batches, MaskTokens, NextTokens
from hf_tiny.data.corpus import CorpusArguments, documents, fingerprint
from hf_tiny.data.stream import text_batches
from hf_tiny.metrics import Evaluation, collect_tokens, compute_tokens
from hf_tiny.tokenizer import TokenizerArguments, frame, load_tokenizer, token_bytes
from hf_tiny.train import TrainConfig, run, train

CAUSAL = HfTinyReformerForCausalLM, "text-generation"
OBJECTIVES = {"causal": CAUSAL, "masked": (HfTinyReformerForMaskedLM, "fill-mask")}
MODELS = {  # the paper's for enwik8, and a tiny one for a few minutes on a laptop; half of the width is a stream's
    "tiny": {"hidden_size": 256, "attn_layers": ["local", "lsh"] * 2, "num_attention_heads": 4,
             "intermediate_size": 512, "initializer_range": 0.05},
    "base": {"hidden_size": 2048, "attn_layers": ["local", "lsh"] * 6, "num_attention_heads": 8,
             "intermediate_size": 4096},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe(TokenizerArguments, CorpusArguments, TrainConfig):
    """Pretrain a Reformer from long raw text: causal (each token from those before it) or masked."""

    SIZES: ClassVar[dict[str, dict]] = {
        "tiny": {"max_seq_length": 2048, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
                 "vocab_size": 4096, "learning_rate": 2e-3, "max_steps": 1000, "eval_steps": 500, "save_steps": 500},
        "base": {"max_seq_length": 65_536, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
                 "gradient_accumulation_steps": 8, "tokenizer_model": "bytes", "learning_rate": 5e-4,
                 "warmup_steps": 4000.0, "max_steps": 100_000, "num_hashes": 4, "dropout": 0.1},
    }  # fmt: skip

    output_dir: str = flag("runs/reformer", "Where the run leaves everything.")
    size: str = flag("tiny", "tiny, or base (the paper's, on bytes): sets all that follows.")
    objective: str = flag("causal", "causal (predict the next token) or masked (predict tokens that are hidden).")
    full_attention: bool = flag(False, "Chunks as long as a block, for comparison: every layer has all in reach.")
    chunk_length: int = flag(64, "Tokens in a chunk of attention; a token sees its own chunk and the one before.")
    num_hashes: int = flag(2, "Rounds of hashing: more of them miss less, and cost more.")
    position_embedding_type: str = flag("rotary", "axial (as in the paper) or rotary.")
    dropout: float = flag(0.0, "Of the layers' outputs.")
    mlm_probability: float = flag(0.15, "The share of tokens that are hidden, if --objective masked.")
    tokenizer_model: str = flag("bpe", "What to train: bpe, unigram or wordpiece; or bytes, untrained.")
    sample_by: str = flag("document", "What is a document in a text file: document (all of it), a paragraph or a line.")
    adam_beta2: float = flag(0.98, "AdamW's beta 2.")
    max_eval_samples: int = flag(64, "Held-out blocks to evaluate on.")


def main(recipe: Recipe) -> dict[str, float]:
    if recipe.objective not in OBJECTIVES:
        raise InputError(f"--objective {recipe.objective}: choose one of {', '.join(OBJECTIVES)}.")
    (model_class, task), length = OBJECTIVES[recipe.objective], recipe.max_seq_length
    tokenizer = load_tokenizer(recipe, lambda: documents(recipe), fingerprint(recipe), model_max_length=length)
    tokenizer = frame(tokenizer, ends=recipe.objective == "masked")
    model = model_class(model_config(recipe, tokenizer))
    hide = MaskTokens(tokenizer, recipe.mlm_probability, recipe.seed)
    collate = NextTokens(tokenizer) if recipe.objective == "causal" else hide
    batches, held_out = text_batches(recipe, tokenizer, collate)
    held_out_batches = Batches(held_out, collate, recipe.per_device_eval_batch_size, recipe.seed, shuffle=False)
    evaluate = Evaluation(held_out_batches, collect_tokens(token_bytes(tokenizer)), compute_tokens)
    about = {"pipeline_tag": task, "data": recipe.corpus_name, "filled": {"mask": tokenizer.mask_token}}
    return train(model, batches, recipe, evaluate=evaluate, processor=tokenizer, card=about)


def model_config(recipe: Recipe, tokenizer) -> HfTinyReformerConfig:
    length = recipe.max_seq_length
    chunk, side = length if recipe.full_attention else recipe.chunk_length, math.isqrt(length - 1) + 1
    try:
        return HfTinyReformerConfig(
            **MODELS[recipe.size], vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.cls_token_id, eos_token_id=tokenizer.sep_token_id, num_hashes=recipe.num_hashes,
            lsh_attn_chunk_length=chunk, local_attn_chunk_length=chunk, hidden_dropout_prob=recipe.dropout,
            position_embedding_type=recipe.position_embedding_type, axial_pos_shape=[side, side],
        )  # fmt: skip
    except ValueError as error:
        raise InputError(str(error)) from error


if __name__ == "__main__":
    run(main, Recipe)
