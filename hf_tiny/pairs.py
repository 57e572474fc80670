"""What the recipes for pairs of texts share: what to start from, averaging of checkpoints, the report at the end."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from . import checkpoint, hub
from .data.parallel import Pair, write_pairs
from .errors import InputError
from .metrics import Generation, Results, collect_pairs, compute_pairs, generate_texts, predict_pairs
from .models.seq2seq import HfTinySeq2SeqConfig, HfTinySeq2SeqForConditionalGeneration
from .tokenizer import SEQ2SEQ_NEEDED_TOKENS, load_tokenizer
from .train import Callback, TrainState

logger = logging.getLogger(__name__)

MODELS = {  # the paper's base and big, and a tiny one for small sets and machines
    "tiny": {"hidden_size": 128, "encoder_layers": 4, "num_attention_heads": 4, "intermediate_size": 256,
             "norm_first": True},
    "base": {"hidden_size": 512, "encoder_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048},
    "big": {"hidden_size": 1024, "encoder_layers": 6, "num_attention_heads": 16, "intermediate_size": 4096},
}  # fmt: skip
SAMPLES = 3  # shown after each evaluation


def check(recipe) -> None:
    for name in ("num_beams", "average_checkpoints"):
        if vars(recipe)[name] < 1:
            raise InputError(f"--{name} {vars(recipe)[name]}: it must be above 0.")
    if recipe.load_best_model_at_end and recipe.average_checkpoints > 1:
        raise InputError(
            f"--load_best_model_at_end and --average_checkpoints {recipe.average_checkpoints}: the finished model is the "
            "best or a mean. Give --average_checkpoints 1 for the best."
        )


def start_tokenizer(
    recipe, texts: Callable[[], Iterable[str]], fingerprint: str | None = None
) -> PreTrainedTokenizerBase:
    """The one named in the recipe, else that of its model, else one trained on the texts, of both sides together."""
    if recipe.model_name_or_path:
        _check_encoder_decoder(recipe.model_name_or_path)  # or its tokenizer would be blamed
    name = recipe.tokenizer_name or recipe.model_name_or_path
    fingerprint = fingerprint or hashlib.sha256("\n".join(texts()).encode()).hexdigest()[:32]
    return load_tokenizer(replace(recipe, tokenizer_name=name), texts, fingerprint, needed_tokens=SEQ2SEQ_NEEDED_TOKENS)


def _check_encoder_decoder(name: str) -> None:
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(f"--model_name_or_path {name}: no encoder-decoder could be loaded: {error}") from error
    if type(config) not in AutoModelForSeq2SeqLM._model_mapping:
        raise InputError(
            f"--model_name_or_path {name}: a {config.model_type} is no encoder-decoder. Give one, such as a folder that "
            "pretrain_seq2seq.py left, or a T5, BART or Marian; or leave it out to start from scratch."
        )


def start_model(recipe, tokenizer: PreTrainedTokenizerBase, **settings) -> PreTrainedModel:
    """The encoder-decoder named in the recipe, else one of its size from scratch, with these settings."""
    settings = {"hidden_dropout_prob": recipe.dropout, **settings}
    if recipe.model_name_or_path:
        with checkpoint.loaded(f"--model_name_or_path {recipe.model_name_or_path}: no encoder-decoder could be loaded"):
            config = AutoConfig.from_pretrained(recipe.model_name_or_path)
            changes = settings if isinstance(config, HfTinySeq2SeqConfig) else _native_settings(config, settings)
            model = AutoModelForSeq2SeqLM.from_pretrained(recipe.model_name_or_path, **changes).float()
        known = model.get_input_embeddings().num_embeddings
        if len(tokenizer) > known:
            raise InputError(
                f"--model_name_or_path {recipe.model_name_or_path} knows {known:,} tokens and the tokenizer has "
                f"{len(tokenizer):,}: give the model's own, or leave out --tokenizer_name."
            )
        _check_lengths(recipe, model.config)
        return model
    start = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id  # as T5 does
    try:
        config = HfTinySeq2SeqConfig(
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=start,
            **{**MODELS[recipe.size], **settings},
        )
        return HfTinySeq2SeqForConditionalGeneration(config)
    except ValueError as error:
        raise InputError(str(error)) from error


def _native_settings(config: PreTrainedConfig, settings: dict) -> dict:
    """Of the settings what a native model has: dropout, under its own name."""
    if settings["label_smoothing"]:
        logger.warning(f"A {config.model_type} has no label smoothing: it is trained without.")
    known = config.to_dict()
    return {name: settings["hidden_dropout_prob"] for name in ("dropout", "dropout_rate") if name in known}


def _check_lengths(recipe, config: PreTrainedConfig) -> None:
    room = getattr(config, "max_position_embeddings", None)  # T5 has none; of hf_tiny's only learned ones end
    if room is None or getattr(config, "position_embedding_type", "learned") != "learned":
        return
    for name in ("max_source_length", "max_target_length", "max_seq_length"):
        if getattr(recipe, name, 0) > room:
            raise InputError(
                f"--{name} {getattr(recipe, name)}: --model_name_or_path {recipe.model_name_or_path} has positions for "
                f"{room} tokens only. Use --{name} {room} or less."
            )


class AverageCheckpoints(Callback):
    """The finished model is the mean of the last `count` checkpoints, as in the paper."""

    replaces_weights = True

    def __init__(self, output_dir: str, count: int):
        self.output_dir, self.count = Path(output_dir), count

    @torch.no_grad()
    def on_train_end(self, state: TrainState, model: nn.Module) -> dict[str, float]:
        folders = checkpoint.checkpoints(self.output_dir)[-self.count :]
        if not folders:  # resumed at its end, from another folder
            return {"averaged_checkpoints": 0}
        sums: dict[str, torch.Tensor] = {}
        for folder in folders:
            for name, weight in load_file(folder / "model.safetensors").items():  # a tied weight is saved once
                sums[name] = sums.get(name, 0) + weight.double()
        weights = model.state_dict()  # also what is saved and not trained: BART and Marian have a buffer
        for name, total in sums.items():
            weights[name].copy_(total / len(folders))
        logger.info(f"The finished model is the mean of {', '.join(folder.name for folder in folders)}.")
        return {"averaged_checkpoints": len(folders)}


def judge_pairs(
    recipe, pairs: dict[str, list[Pair]], batches: Callable, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Generation]:
    """For each held-out split what the model writes, beside a copy of the source and the most frequent target."""
    settings = {name: vars(recipe)[name] for name in ("num_beams", "length_penalty")}
    write = generate_texts(tokenizer, max_new_tokens=recipe.max_target_length, **settings)
    ((most_frequent, _),) = Counter(pair.target for pair in pairs["train"]).most_common(1)
    judges = {}
    for split, part in pairs.items():
        if split == "train":
            continue
        baselines = {"copy": [pair.source for pair in part], "majority": [most_frequent] * len(part)}
        compute = log_samples(compute_pairs([pair.target for pair in part], baselines), part)
        held_out = batches(split, recipe.per_device_eval_batch_size, False)
        report = report_pairs(split, part, model, tokenizer)
        judges[split] = Generation(held_out, collect_pairs, compute, report, generate=write)
    return judges


def report_pairs(
    split: str, pairs: Sequence[Pair], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Results, Path], None]:
    """Predictions in the format of the input, and a picture of what the decoder looks at."""

    def report(results: Results, folder: Path) -> None:
        write_pairs(pairs, predict_pairs(results), folder, f"{split}_predictions")
        draw_attention(folder / f"{split}_attention.png", model, tokenizer, pairs[0])

    return report


def log_samples(compute: Callable[[Results], dict[str, float]], pairs: Sequence[Pair]) -> Callable:
    """`compute` that also shows what the model wrote for the first pairs."""

    def shown(results: Results) -> dict[str, float]:
        figures = compute(results)
        if "texts" in results:
            for pair, text in zip(pairs[:SAMPLES], predict_pairs(results), strict=False):
                logger.info(f"  {pair.source!r} -> {text!r} (right: {pair.target!r})")
        return figures

    return shown


@torch.no_grad()
def draw_attention(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pair: Pair) -> None:
    """The last layer's attention from the tokens of the target to those of the source, the mean over heads."""
    device, used = model.device, model.config._attn_implementation
    source = tokenizer(pair.source, return_tensors="pt", truncation=True, max_length=48).to(device)
    labels = tokenizer(text_target=pair.target, return_tensors="pt", truncation=True, max_length=48).to(device)
    model.set_attn_implementation("eager")
    model.eval()
    outputs = model(
        input_ids=source["input_ids"],
        attention_mask=source["attention_mask"],
        decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels["input_ids"]),
        output_attentions=True,
    )
    model.set_attn_implementation(used)
    weights = outputs.cross_attentions[-1][0].mean(0).float().cpu().numpy()  # (target, source)
    rows, columns = (tokenizer.convert_ids_to_tokens(side["input_ids"][0]) for side in (labels, source))
    fonts = hub.fonts_for("".join(rows + columns))
    if fonts is None:  # no installed font has these letters
        rows, columns, fonts = range(1, len(rows) + 1), range(1, len(columns) + 1), hub.fonts_for("")
    figure, axis = plt.subplots(figsize=(2 + 0.3 * len(columns), 1.5 + 0.3 * len(rows)), layout="constrained")
    axis.imshow(weights, cmap="Blues", vmin=0)
    axis.set_xticks(range(len(columns)), columns, rotation=90, family=fonts)
    axis.set_yticks(range(len(rows)), rows, family=fonts)
    axis.set_xlabel("source")
    axis.set_ylabel("target")
    figure.savefig(path, dpi=100)
    plt.close(figure)
