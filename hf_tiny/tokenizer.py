"""Train a WordPiece tokenizer on a corpus, or load one that exists."""

import hashlib
import logging
import os
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from accelerate import PartialState
from datasets.config import HF_DATASETS_CACHE
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_tiny.errors import InputError

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
NEEDED_TOKENS = ("pad_token", "cls_token", "sep_token", "mask_token")
UNICODE_FORMS = {"NFC": normalizers.NFC, "NFKC": normalizers.NFKC}


@dataclass(frozen=True, kw_only=True)
class TokenizerArguments:
    """By default nothing of the text is thrown away: case and accents stay, and Unicode is composed (NFC)."""

    tokenizer_name: str | None = field(
        default=None, metadata={"help": "An existing tokenizer (folder or Hub id); without it one is trained."}
    )
    vocab_size: int = field(default=8192, metadata={"help": "Size of the vocabulary to train."})
    lowercase: bool = field(default=False, metadata={"help": "Lower-case the text."})
    strip_accents: bool = field(default=False, metadata={"help": "Remove accents; Hangul stays whole."})
    unicode_form: str = field(default="NFC", metadata={"help": "Unicode normal form: NFC or NFKC."})


def load_tokenizer(
    arguments: TokenizerArguments, texts: Callable[[], Iterable[str]], fingerprint: str, *, model_max_length: int = 512
) -> PreTrainedTokenizerFast:
    """The tokenizer named in the arguments, else one trained on `texts()`. What was trained is kept in the cache, under
    the `fingerprint` of the texts and the settings."""
    if arguments.tokenizer_name:
        return _load(arguments.tokenizer_name)
    settings = [arguments.vocab_size, arguments.lowercase, arguments.strip_accents, arguments.unicode_form]
    content = repr((fingerprint, settings, model_max_length, tokenizers.__version__))
    folder = Path(HF_DATASETS_CACHE) / "hf_tiny_tokenizers" / hashlib.sha256(content.encode()).hexdigest()[:32]
    with PartialState().local_main_process_first():
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
                trained = train_tokenizer(texts(), arguments, model_max_length=model_max_length)
                trained.save_pretrained(Path(unfinished) / "files")
                with suppress(OSError):  # Another run may have been faster.
                    os.replace(Path(unfinished) / "files", folder)
        return _load(str(folder))


def train_tokenizer(
    texts: Iterable[str],
    arguments: TokenizerArguments,
    *,
    model_max_length: int = 512,
    max_chars: int = 50_000_000,
) -> PreTrainedTokenizerFast:
    """WordPiece on at most `max_chars` of evenly spread texts; the same texts always give the same vocabulary."""
    normalizer = _normalizer(arguments)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    sample = _sample(tqdm(texts, desc="Reading text for the tokenizer", unit=" documents"), max_chars)
    alphabet = _alphabet(sample, normalizer, arguments)
    # The trainer numbers "##x" in the order of a randomly seeded hash map and breaks ties by these numbers.
    # Given first, as if they were special tokens, they get fixed numbers and the training becomes deterministic.
    inner = [f"##{c}" for c in alphabet if len(pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(f"a{c}"))) == 1]
    special = list(SPECIAL_TOKENS.values())
    learner = Tokenizer(models.WordPiece(unk_token=SPECIAL_TOKENS["unk_token"]))
    learner.normalizer, learner.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=arguments.vocab_size,
        special_tokens=special + inner,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
    )
    learner.train_from_iterator(sample, trainer, length=len(sample))
    vocabulary = learner.get_vocab(with_added_tokens=True)
    if len(vocabulary) < arguments.vocab_size:
        logger.warning(
            f"The text fills a vocabulary of {len(vocabulary):,} only, not the {arguments.vocab_size:,} asked for."
        )

    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **SPECIAL_TOKENS,
    )


def _load(name: str) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(f"--tokenizer_name {name}: no tokenizer could be loaded from there: {error}") from error
    if not tokenizer.is_fast:
        raise InputError(f"--tokenizer_name {name}: it has no tokenizer.json; only fast tokenizers can be used.")
    missing = [token for token in NEEDED_TOKENS if token not in tokenizer.special_tokens_map]
    if missing:
        raise InputError(
            f"--tokenizer_name {name}: it has no {', '.join(missing)}. Give a tokenizer made for masked language "
            "models, or leave out --tokenizer_name to train one."
        )
    return tokenizer


def _normalizer(arguments: TokenizerArguments) -> normalizers.Normalizer:
    if arguments.unicode_form not in UNICODE_FORMS:
        raise InputError(f"--unicode_form {arguments.unicode_form}: must be one of {', '.join(UNICODE_FORMS)}.")
    steps = [
        UNICODE_FORMS[arguments.unicode_form](),
        normalizers.BertNormalizer(strip_accents=False, lowercase=arguments.lowercase),
    ]
    if arguments.strip_accents:
        # NFD also takes Hangul syllables apart; NFC puts them together again.
        steps += [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    return normalizers.Sequence(steps)


def _sample(texts: Iterable[str], max_chars: int) -> list[str]:
    """Every k-th text, with the smallest power of two for k that keeps at most `max_chars`."""
    sample, size, stride = [], 0, 1
    for number, text in enumerate(texts):
        if number % stride:
            continue
        sample.append(text)
        size += len(text)
        while size > max_chars and len(sample) > 1:
            sample, stride = sample[::2], stride * 2
            size = sum(map(len, sample))
    return sample


def _alphabet(sample: list[str], normalizer: normalizers.Normalizer, arguments: TokenizerArguments) -> list[str]:
    """The characters of the text, the most frequent first, at most a third of the vocabulary."""
    raw, counts = Counter(), Counter()
    for text in sample:
        raw.update(unicodedata.normalize(arguments.unicode_form, text))
    for character, count in raw.items():
        for normalized in normalizer.normalize_str(character).replace(" ", ""):
            counts[normalized] += count
    kept = sorted(counts, key=lambda character: (-counts[character], character))[: arguments.vocab_size // 3]
    total = counts.total()
    if not total:
        raise InputError("The corpus has no text to train a tokenizer on. Check --train_file.")
    covered = sum(counts[character] for character in kept) / total
    if covered < 0.98:
        raise InputError(
            f"--vocab_size {arguments.vocab_size} is too small: a third of it ({len(kept)}) covers only {covered:.0%} "
            f"of the text, which has {len(counts):,} different characters. Use a larger --vocab_size."
        )
    return kept
