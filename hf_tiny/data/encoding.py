"""From the bytes of text files to text: which encoding, and what happens to bytes that it does not have."""

import codecs
import gzip
import io
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from hf_tiny.arguments import flag
from hf_tiny.errors import InputError

ENCODING_ERRORS = ("strict", "replace")
UTF8 = "utf-8"
MARKS = {  # the bytes that a file may begin with; those of UTF-32 begin with those of UTF-16
    codecs.BOM_UTF8: UTF8,
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
COMMON = (  # of those in which a file reads about as well, the first is named
    *("utf-8", "cp949", "cp932", "gb18030", "big5", "cp1252", "cp1251", "cp1250", "cp1253", "cp1254", "cp1255"),
    *("cp1256", "cp1257", "cp1258", "cp874", "koi8-r", "euc-jp", "utf-16-le", "utf-16-be"),
)
SAMPLE_BYTES = 1 << 16  # that tell which encoding a file is likely to have
DAMAGED = 0.2  # A file of which fewer characters than this share are wrong is damaged, not in another encoding.
ABOUT = 0.1  # of charset_normalizer's measure of chaos
SHOWN = 30  # characters of a line, so that a person can tell whether the encoding is right


def is_gzip(path: str) -> bool:
    return path.lower().endswith(".gz")


def open_bytes(path: str) -> io.BufferedIOBase:
    return (gzip.open if is_gzip(path) else open)(path, "rb")


@dataclass(frozen=True)
class Decoding:
    """How text files are read. counts: what was replaced."""

    encoding: str = UTF8
    errors: str = "strict"
    counts: Counter = field(default_factory=Counter, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            " ".encode(self.encoding)
        except LookupError:
            raise InputError(
                f"--encoding {self.encoding}: there is no such encoding. Common ones are utf-8, cp949 (Korean), utf-16, "
                "cp932 (Japanese), gb18030 (Chinese), cp1252 and latin-1."
            ) from None

    def encoding_of(self, file: io.BufferedIOBase) -> str:
        """That of the mark which the file begins with, else the one that was given, unless it begins as UTF-8 only does:
        in a folder of older files some may be newer."""
        head = file.read(4 if self.encoding == UTF8 else SAMPLE_BYTES)
        file.seek(0)
        usual = UTF8 if self.encoding != UTF8 and _is_utf8(head) else self.encoding
        return next((name for mark, name in MARKS.items() if head.startswith(mark)), usual)

    def text(self, raw: bytes, place) -> str:
        """UTF-8 bytes as text, without the mark that a file may begin with."""
        try:
            text = raw.decode()
            wrong = raw.find(b"\0")
        except UnicodeDecodeError as error:
            text, wrong = "", error.start
        if wrong >= 0:
            if self.errors == "strict":
                with open_bytes(place.part.path) as file:
                    file.seek(place.offset)
                    sample = file.read(SAMPLE_BYTES)
                raise InputError(_complaint(place, place.offset + wrong, UTF8, sample, raw[wrong] == 0))
            text = raw.decode(errors="replace").replace("\0", "\ufffd")
            self.counts["characters replaced"] += text.count("\ufffd") - raw.count("\ufffd".encode())
        return text.removeprefix("\ufeff") if place.offset == 0 else text


@dataclass(frozen=True, kw_only=True)
class EncodingArguments:
    """How the bytes of text files become text."""

    GROUP: ClassVar[str] = "data"

    encoding: str = flag(
        UTF8,
        "The encoding of text files, such as cp949 or utf-16. A file with a byte order mark is read as that says, and one that is "
        "UTF-8 as UTF-8.",
    )
    encoding_errors: str = flag(
        "strict",
        "Bytes that are no text in the encoding: strict stops, replace counts and replaces them.",
        choices=ENCODING_ERRORS,
    )

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.encoding, self.encoding_errors)


class Recoded(io.RawIOBase):
    """The bytes of a text file of another encoding, as UTF-8."""

    def __init__(self, file: io.BufferedIOBase, path: str, encoding: str, decoding: Decoding):
        self.file, self.path, self.encoding, self.decoding = file, path, encoding, decoding
        self.decoder = codecs.getincrementaldecoder(encoding)()
        self.ready, self.offset, self.lines = b"", 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        raw = b"more"
        while not self.ready and raw:
            raw = self.file.read(SAMPLE_BYTES)
            try:
                self.ready = self._text(raw).encode()
            except UnicodeError as error:
                raise InputError(
                    f"{self.path}: {error}. Where a file has no byte order mark, its encoding says the order, such as "
                    "--encoding utf-16-le."
                ) from None
            self.offset += len(raw)
            self.lines += self.ready.count(b"\n")
        size = min(len(buffer), len(self.ready))
        buffer[:size], self.ready = self.ready[:size], self.ready[size:]
        return size

    def _text(self, raw: bytes) -> str:
        state = self.decoder.getstate()
        try:
            return self.decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            wrong, sample = error.start - len(state[0]), error.object  # a character may have begun before
        self.decoder.setstate(state)
        self.decoder.errors = "replace"
        if self.decoding.errors == "strict":
            line = self.lines + self.decoder.decode(raw[: max(0, wrong)]).count("\n") + 1
            raise InputError(_complaint(f"{self.path}:{line}", self.offset + wrong, self.encoding, sample))
        text = self.decoder.decode(raw, final=not raw)
        self.decoder.errors = "strict"
        self.decoding.counts["characters replaced"] += text.count("\ufffd")
        return text

    def close(self) -> None:
        self.file.close()
        super().close()


def _is_utf8(sample: bytes) -> bool:
    """Whether the bytes are UTF-8 and not only ASCII: text in another encoding hardly ever is."""
    try:
        codecs.getincrementaldecoder(UTF8)().decode(sample, final=len(sample) < SAMPLE_BYTES)
    except UnicodeDecodeError:
        return False
    return not sample.isascii() and b"\0" not in sample


def _complaint(place, offset: int, encoding: str, sample: bytes, zero: bool = False) -> str:
    """sample: bytes around the wrong one, from the start of a line or at least of a character."""
    end = sample.rfind(b"\n") + 1 or len(sample)
    sample = sample[: end + end % 2 * (b"\0" in sample)]  # in UTF-16 each character has an even number of bytes
    text = sample.decode(encoding, errors="replace")
    wrong = text.count("\0") + text.count("\ufffd")
    of = len(text) if zero else sum(letter > "\x7f" for letter in text)
    name = "0, which no text has" if zero else f"not {encoding.upper()}"
    complaint = f"{place}: the byte at offset {offset} of the file is {name}"
    if wrong < DAMAGED * of:
        return (
            f"{complaint}, but the text around it is fine: the file is damaged there. Correct it, or have such bytes "
            "replaced and counted with --encoding_errors replace."
        )
    found = [f"--encoding {name}, in which it begins {line!r}" for name, line in _likely(sample).items()]
    advice = f"Likely is {', or '.join(found)}" if found else "No encoding fits: it does not look like text"
    return f"{complaint}. {advice}."


def _likely(sample: bytes) -> dict[str, str]:
    """At most two encodings that the bytes may have, and how the first line reads in each."""
    from charset_normalizer import from_bytes  # late: only a message needs it

    ranked = []
    for match in from_bytes(sample):
        names = [name.replace("_", "-") for name in match.could_be_from_charset]
        line = str(match).strip().partition("\n")[0].strip()[:SHOWN]
        ranked += [(int(match.chaos / ABOUT), COMMON.index(name), line) for name in names if name in COMMON]
    found = {}
    for _, place, line in sorted(ranked):
        found.setdefault(line, COMMON[place])
    return {name: line for line, name in islice(found.items(), 2)}
