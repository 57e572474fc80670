"""Train a WordPiece or BPE tokenizer on a corpus, take bytes as tokens, or load one that exists."""

import hashlib
import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import tokenizers
from accelerate import PartialState
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_tiny.arguments import flag
from hf_tiny.data import cache
from hf_tiny.errors import InputError, similar

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
NEEDED_TOKENS = ("pad_token", "cls_token", "sep_token", "mask_token")
SEQ2SEQ_TOKENS = {
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
SEQ2SEQ_NEEDED_TOKENS = ("pad_token", "eos_token")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # of characters that are not in the vocabulary
SPACE = "▁"
COVERED = 0.98  # share of a text whose characters must be in its vocabulary
CHARACTERS = 400  # of text for each token of a vocabulary, nearly
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
UNICODE_FORMS = {"NFC": normalizers.NFC, "NFKC": normalizers.NFKC}


@dataclass(frozen=True, kw_only=True)
class TokenizerArguments:
    """By default nothing of the text is thrown away: case and accents stay, and Unicode is composed (NFC)."""

    GROUP: ClassVar[str] = "tokenizer"

    tokenizer_name: str | None = flag(None, "An existing tokenizer (folder or Hub id); without it one is trained.")
    tokenizer_model: str = flag(
        "wordpiece",
        "What to train: wordpiece (for encoders), bpe (for what writes text); or bytes, untrained.",
        choices=("wordpiece", "bpe", "bytes"),
    )
    vocab_size: int = flag(8192, "Size of the vocabulary to train.", low=1)
    extra_ids: int = flag(0, "Number of sentinels <extra_id_0>, ... in a bpe vocabulary, for span corruption.", low=0)
    lowercase: bool = flag(False, "Lower-case the text.")
    strip_accents: bool = flag(False, "Remove accents; Hangul stays whole.")
    unicode_form: str = flag("NFC", "Unicode normal form.", choices=tuple(UNICODE_FORMS))


def load_tokenizer(
    arguments: TokenizerArguments,
    texts: Callable[[], Iterable[str]],
    fingerprint: str,
    *,
    model_max_length: int = 512,
    needed_tokens: Sequence[str] = NEEDED_TOKENS,
) -> PreTrainedTokenizerFast:
    """The tokenizer named in the arguments, else one trained on `texts()`. What was trained is kept in the cache, under
    the `fingerprint` of the texts and the settings."""
    if arguments.tokenizer_name:
        return load_existing("--tokenizer_name", arguments.tokenizer_name, needed_tokens)
    _check(arguments)
    settings = [arguments.vocab_size, arguments.lowercase, arguments.strip_accents, arguments.unicode_form]
    if arguments.tokenizer_model != "wordpiece":
        settings += [arguments.tokenizer_model, arguments.extra_ids]
    content = repr((fingerprint, settings, model_max_length, tokenizers.__version__))
    folder = cache.place("hf_tiny_tokenizers", hashlib.sha256(content.encode()).hexdigest()[:32])

    def write(draft: Path) -> None:
        train_tokenizer(texts(), arguments, model_max_length=model_max_length).save_pretrained(draft)

    with PartialState().local_main_process_first():
        return load_existing("--tokenizer_name", str(cache.kept(folder, write)), needed_tokens)


def train_tokenizer(
    texts: Iterable[str],
    arguments: TokenizerArguments,
    *,
    model_max_length: int = 512,
    max_chars: int = 50_000_000,
) -> PreTrainedTokenizerFast:
    """Trained on at most `max_chars` of evenly spread texts; the same texts always give the same vocabulary.

    WordPiece frames a text as [CLS] text [SEP]. BPE ends it with </s>, has bytes for characters that are not in the
    vocabulary, and keeps the spaces: what it decodes is the text again, but that all white space between words is one
    space. Bytes do the same with all white space as it is.
    """
    _check(arguments)
    learns = arguments.tokenizer_model != "bytes"
    sample = _sample(tqdm(texts, desc="Reading text for the tokenizer", unit=" documents"), max_chars) if learns else []
    backend = MODELS[arguments.tokenizer_model](sample, _normalizer(arguments), arguments)
    if learns and backend.get_vocab_size() < arguments.vocab_size:
        logger.warning(
            f"The text fills a vocabulary of {backend.get_vocab_size():,} only, not the {arguments.vocab_size:,} asked for."
        )
    settings: dict = {**SPECIAL_TOKENS, "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    if arguments.tokenizer_model != "wordpiece":
        settings = {
            **SEQ2SEQ_TOKENS,
            "mask_token": AddedToken("<mask>", lstrip=True, special=True),
            # What packs blocks of raw text asks for cls and sep: they are the tokens that begin and end a text.
            "cls_token": SEQ2SEQ_TOKENS["bos_token"],
            "sep_token": SEQ2SEQ_TOKENS["eos_token"],
            "extra_special_tokens": _sentinels(arguments),
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
        }
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=model_max_length, **settings)


def extend_tokenizer(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], count: int, *, max_chars: int = 50_000_000
) -> dict[str, list[int]]:
    """Append to a WordPiece vocabulary the `count` pieces that texts would use most often, had they a vocabulary of
    their own; returns the old pieces of each, in its order."""
    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.to_str())
    if state["model"]["type"] != "WordPiece":
        raise InputError(f"--extend_vocab: only WordPiece vocabularies can grow, this one is {state['model']['type']}.")
    old, first = tokenizer.get_vocab(), max(tokenizer.get_vocab().values()) + 1
    sample = _sample(texts, max_chars)
    settings = TokenizerArguments(vocab_size=max(4096, first + count))  # the alphabet may take a third of it
    own = _train_wordpiece(sample, backend.normalizer, settings)
    uses = Counter()
    for text in sample:
        uses.update(own.encode(text, add_special_tokens=False).tokens)
    new = sorted(uses.keys() - old.keys(), key=lambda piece: (-uses[piece], piece))[:count]
    if len(new) < count:
        logger.warning(f"--extend_vocab {count}: the text has only {len(new)} pieces that are not in the vocabulary.")
    state["model"]["vocab"] |= {piece: first + number for number, piece in enumerate(new)}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    # "##ab" is taken apart as if it were a word, so that "##a" fits, but "##" must not.
    pieces = models.WordPiece({piece: old[piece] for piece in old.keys() - {"##"}}, unk_token=tokenizer.unk_token)
    return {piece: [part.id for part in pieces.tokenize(piece)] for piece in new}


def is_wordpiece(tokenizer: PreTrainedTokenizerFast) -> bool:
    return isinstance(tokenizer.backend_tokenizer.model, models.WordPiece)


def split_into_characters(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer such that a character is a token: of a WordPiece vocabulary only single characters are left, each under
    its number; the others become [unused...], as in BERT's vocabularies."""
    if not is_wordpiece(tokenizer):
        raise InputError("--character_tokens: only a WordPiece vocabulary can be reduced to characters.")
    state, kept = json.loads(tokenizer.backend_tokenizer.to_str()), set(tokenizer.all_special_tokens)
    state["model"]["vocab"] = {
        piece if piece in kept or len(piece.removeprefix("##")) == 1 else f"[unused{number}]": number
        for piece, number in state["model"]["vocab"].items()
    }
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    return tokenizer


def _train_wordpiece(sample: list[str], normalizer: normalizers.Normalizer, arguments: TokenizerArguments) -> Tokenizer:
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    alphabet = _alphabet(sample, normalizer, arguments)
    # The trainer numbers "##x" in the order of a randomly seeded hash map and breaks ties by these numbers.
    # Given first, as if they were special tokens, they get fixed numbers and the training becomes deterministic.
    inner = [f"##{c}" for c in alphabet if len(pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(f"a{c}"))) == 1]
    special, unknown = list(SPECIAL_TOKENS.values()), SPECIAL_TOKENS["unk_token"]
    learner = _assembled(models.WordPiece(unk_token=unknown), normalizer, pre_tokenizer)
    vocabulary = _learn(learner, trainers.WordPieceTrainer, special + inner, alphabet, sample, arguments)
    backend = _assembled(models.WordPiece(vocabulary, unk_token=unknown), normalizer, pre_tokenizer, special)
    backend.decoder = decoders.WordPiece()
    return _ended(backend, "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ["[CLS]", "[SEP]"])


def _train_bpe(sample: list[str], normalizer: normalizers.Normalizer, arguments: TokenizerArguments) -> Tokenizer:
    learner = _assembled(models.BPE(), normalizer, _words_with_spaces())
    alphabet = _alphabet(sample, normalizer, arguments)
    vocabulary = _learn(learner, trainers.BpeTrainer, _special(arguments) + BYTES, alphabet, sample, arguments)
    merges = [tuple(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]
    backend = _byte_fallback(vocabulary, merges, normalizer, _words_with_spaces(), arguments)
    metaspace = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace])
    return backend


def _take_bytes(sample: list[str], normalizer: normalizers.Normalizer, arguments: TokenizerArguments) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(_special(arguments) + BYTES)}
    backend = _byte_fallback(vocabulary, [], normalizer, None, arguments)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


MODELS = {"wordpiece": _train_wordpiece, "bpe": _train_bpe, "bytes": _take_bytes}


def frame(tokenizer: PreTrainedTokenizerFast, ends: bool) -> PreTrainedTokenizerFast:
    """The tokenizer such that a text begins as packed blocks do, and ends as they do or, for a model that goes on writing,
    not at all. Two texts are parted in either case."""
    first, last = tokenizer.cls_token, tokenizer.sep_token
    end = f" {last}" if ends else ""
    _ended(tokenizer.backend_tokenizer, f"{first} $A{end}", f"{first} $A {last} $B{end}", [first, last])
    return tokenizer


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """How many bytes of text (UTF-8) each token stands for: special tokens for none, a space for one. WordPiece knows of no
    spaces, and none are counted."""
    backend = tokenizer.backend_tokenizer
    inner = "##" if isinstance(backend.model, models.WordPiece) else ""
    by_byte = isinstance(backend.decoder, decoders.ByteLevel)  # a letter of a token is a byte
    sizes = np.zeros(len(tokenizer), dtype=np.int64)
    for token, number in tokenizer.get_vocab().items():
        text = token.removeprefix(inner).replace(SPACE, " ")
        sizes[number] = 1 if token in BYTES else len(token if by_byte else text.encode())
    sizes[tokenizer.all_special_ids] = 0
    return sizes


def _words_with_spaces() -> pre_tokenizers.PreTokenizer:
    """A word keeps the space before it, as ▁; so does a run of punctuation, which is a word by itself."""
    metaspace = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    return pre_tokenizers.Sequence([metaspace, pre_tokenizers.Split(Regex(rf"{SPACE}?[^{SPACE}\w\s]+"), "isolated")])


def _learn(learner: Tokenizer, trainer_class, special: list[str], alphabet, sample, arguments) -> dict[str, int]:
    sizes = {"vocab_size": arguments.vocab_size, "limit_alphabet": len(alphabet)}
    trainer = trainer_class(special_tokens=special, initial_alphabet=alphabet, **sizes)
    learner.train_from_iterator(sample, trainer, length=len(sample))
    return learner.get_vocab(with_added_tokens=True)


def _byte_fallback(vocabulary, merges, normalizer, pre_tokenizer, arguments: TokenizerArguments) -> Tokenizer:
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    special = [AddedToken(token, lstrip=token == "<mask>", special=True) for token in _special(arguments)]
    end = SEQ2SEQ_TOKENS["eos_token"]
    return _ended(_assembled(model, normalizer, pre_tokenizer, special), f"$A {end}", f"$A {end} $B {end}", [end])


def _assembled(model: models.Model, normalizer, pre_tokenizer, special: Sequence[str | AddedToken] = ()) -> Tokenizer:
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    backend.add_special_tokens(list(special))
    return backend


def _ended(backend: Tokenizer, single: str, pair: str, special: list[str]) -> Tokenizer:
    """The tokenizer such that special tokens frame a text and a pair of texts."""
    known = [(token, backend.token_to_id(token)) for token in special]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=known)
    return backend


def _special(arguments: TokenizerArguments) -> list[str]:
    return [*SEQ2SEQ_TOKENS.values(), *_sentinels(arguments)]


def _sentinels(arguments: TokenizerArguments) -> list[str]:
    return [f"<extra_id_{number}>" for number in range(arguments.extra_ids)]


def _check(arguments: TokenizerArguments) -> None:
    if arguments.extra_ids and arguments.tokenizer_model == "wordpiece":
        raise InputError("--extra_ids: only --tokenizer_model bpe has sentinels.")


def check_place(option: str, name: str) -> None:
    """A folder that is not there is refused at once: the Hub is asked only for what can be the name of a repository."""
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or path.parent.is_dir()
    if path.exists() or not ("/" in name and looks_local):
        return
    raise InputError(f"{option} {name}: there is no such folder.{similar(name, folders=True)}".lstrip())


def load_existing(
    option: str, name: str, needed_tokens: Sequence[str], trust_remote_code: bool = False
) -> PreTrainedTokenizerFast:
    check_place(option, name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error)
        if Path(name).is_dir() and not any(Path(name, file).exists() for file in TOKENIZER_FILES):
            reason = f"the folder has none of {', '.join(TOKENIZER_FILES)}. Save the tokenizer in it, too."
        raise InputError(f"{option} {name}: no tokenizer could be loaded from there: {reason}") from error
    if not tokenizer.is_fast:
        raise InputError(f"{option} {name}: it has no tokenizer.json; only fast tokenizers can be used.")
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # made by transformers of a folder without one
        raise InputError(f"{option} {name}: there is no tokenizer: all text would be {tokenizer.unk_token}.")
    missing = [token for token in needed_tokens if token not in tokenizer.special_tokens_map]
    if missing:
        kind = "masked language models" if needed_tokens == NEEDED_TOKENS else "encoder-decoder models"
        raise InputError(
            f"{option} {name}: it has no {', '.join(missing)}. Give a tokenizer made for {kind}, "
            f"or leave out {option} to train one."
        )
    return tokenizer


def _normalizer(arguments: TokenizerArguments) -> normalizers.Normalizer:
    lower = [normalizers.Lowercase()] * arguments.lowercase
    own: dict[str, list] = {
        "wordpiece": [normalizers.BertNormalizer(strip_accents=False, lowercase=arguments.lowercase)],
        "bpe": [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(), *lower],
        "bytes": lower,
    }
    steps = own[arguments.tokenizer_model]
    if arguments.strip_accents:
        # NFD also takes Hangul syllables apart; NFC puts them together again.
        steps += [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    return normalizers.Sequence([UNICODE_FORMS[arguments.unicode_form](), *steps])


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
    """The characters of the text, the most frequent first, at most a third of the vocabulary; the sign for a space is
    one of them where spaces are kept."""
    raw, counts = Counter(), Counter()
    for text in sample:
        raw.update(unicodedata.normalize(arguments.unicode_form, text))  # type: ignore[arg-type]  # a choice of the flag
    for character, count in raw.items():
        for normalized in normalizer.normalize_str(character).replace(" ", ""):
            counts[normalized] += count
    kept = sorted(counts, key=lambda character: (-counts[character], character))[: arguments.vocab_size // 3]
    if not counts:
        raise InputError("The corpus has no text to train a tokenizer on. Check --train_file.")
    covered = sum(counts[character] for character in kept) / counts.total()
    if covered < COVERED:
        enough = _covering(counts)
        raise InputError(
            f"--vocab_size {arguments.vocab_size} is too small: a third of it ({len(kept)}) covers only {covered:.0%} "
            f"of the text, which has {len(counts):,} different characters. Use --vocab_size {1 << (3 * enough).bit_length()} "
            "or more."
        )
    if arguments.tokenizer_model == "wordpiece":
        return kept
    needed = len(kept) + 1 + len(BYTES) + len(_special(arguments))
    if needed >= arguments.vocab_size:
        raise InputError(
            f"--vocab_size {arguments.vocab_size} is too small: characters, bytes and special tokens alone are {needed}. "
            "Use a larger --vocab_size."
        )
    return [SPACE, *(character for character in kept if character != SPACE)]


def _covering(counts: Counter) -> int:
    """The number of most frequent characters that make up nearly all of a text."""
    shares = accumulate(count for _, count in counts.most_common())
    return 1 + sum(share < COVERED * counts.total() for share in shares)


def fitting_size(texts: Iterable[str]) -> int:
    """Of a vocabulary that a text can fill: from 512 to 8192, a token for every few hundred characters, and for each frequent
    character four."""
    counts = Counter(chain.from_iterable(texts))
    bits = max((counts.total() // CHARACTERS).bit_length() - 1, (4 * _covering(counts) - 1).bit_length())
    return 1 << min(max(bits, 9), 13)


def fertility(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> dict[str, float]:
    """Tokens per word (between spaces), the share of tokens that stand for nothing known, and that of single bytes."""
    counts = Counter()
    for text in texts:
        tokens = tokenizer.tokenize(text)
        counts["words"] += len(text.split())
        counts["tokens"] += len(tokens)
        counts["unknown"] += tokens.count(tokenizer.unk_token)
        counts["bytes"] += sum(token.startswith("<0x") for token in tokens)
    per = {"tokens per word": "words", "unknown": "tokens", "bytes": "tokens"}
    return {name: counts[name.split()[0]] / counts[total] for name, total in per.items()}
