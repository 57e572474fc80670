"""Sentences whose words have labels: treebanks in CoNLL-U or KLUE's format, and Korean morphemes, read and written back."""

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from hf_tiny.data import sources
from hf_tiny.data.encoding import Decoding
from hf_tiny.errors import InputError
from hf_tiny.models.words import split_words

COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
FORM, LEMMA, UPOS, XPOS, FEATS, HEAD, DEPREL, DEPS, MISC = range(1, 10)
TREEBANK, KLUE = ".conllu", ".tsv"
# What stands in the columns of a file. KLUE has INDEX, WORD_FORM, LEMMA, POS, HEAD and DEPREL.
LAYOUTS = {TREEBANK: tuple(range(len(COLUMNS))), KLUE: (0, FORM, LEMMA, XPOS, HEAD, DEPREL)}
LISTS = (".jsonl", ".json", ".parquet", ".arrow")  # tables whose cells can be lists
MAX_EDITED = 0.5  # A word that differs more than this from its morphemes is a mistake of the corpus.

NumberedLines = list[tuple[int, str]]


@dataclass(frozen=True)
class Sentence:
    """Words, and for each a label: its tag, or its relation to its head. None says that it is not scored.

    kind: the suffix of the file.
    lines: the lines of the file; the row of a table is one line of JSON.
    text: the raw text, where the file tells what it is.
    places: when the words are characters, where in the text each stands: the text is then tokenized as a whole.
    word_of: when the words are characters of words of CoNLL-U, which of these each belongs to.
    """

    words: tuple[str, ...]
    word_labels: tuple[str | None, ...]
    place: str
    kind: str
    lines: tuple[str, ...]
    heads: tuple[int | None, ...] = ()
    upos: tuple[str, ...] = ()
    text: str = ""
    places: tuple[int, ...] | None = None
    word_of: tuple[int, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for label in self.word_labels if label is not None)

    @property
    def tokenized_text(self) -> str:
        """What a tokenizer sees of it."""
        return " ".join(self.words) if self.places is None else self.text


def read_treebank(
    path: str, decoding: Decoding, sentence: Callable[[list[list[str]], str], dict]
) -> Iterator[Sentence]:
    """The sentences of a file. `sentence(rows, name)` gives what a task takes from the columns of the words; `name` is for
    messages."""
    kind = sources.kind(path)
    for block in blocks(sources.numbered_lines(path, decoding)):
        rows = words(block, path, LAYOUTS[kind])
        if rows:
            place = f"{path}:{block[0][0]}"
            marked = (line.partition("=")[2].strip() for _, line in block if line.startswith("# sent_id"))
            fields = _fields(rows, sentence(rows, f"{place}: in sentence {next(marked, place)}"))
            yield Sentence(**fields, place=place, kind=kind, lines=tuple(line for _, line in block))


def _fields(rows: list[list[str]], others: dict) -> dict:
    fields: dict = {name: tuple(row[at] for row in rows) for name, at in (("words", FORM), ("upos", UPOS))}
    return {**fields, "text": raw_text(rows)[0], **others}


def from_text(text: str, place: str, sentence: Callable[[list[list[str]], str], dict]) -> Sentence:
    """A sentence of CoNLL-U, of which only the words are known, from its raw text."""
    rows, rest = [], characters(text)
    for number, word in enumerate(split_words(rest), 1):
        rest = rest[rest.index(word) + len(word) :]
        space = "_" if not rest or rest[0].isspace() else "SpaceAfter=No"
        rows.append([str(number), word, *["_"] * (len(COLUMNS) - 3), space])
    lines = (f"# text = {text}", *map("\t".join, rows))
    return Sentence(**_fields(rows, sentence(rows, place)), place=place, kind=TREEBANK, lines=lines)


def raw_text(rows: list[list[str]]) -> tuple[str, list[int]]:
    """The text of a sentence, with the spaces that it says, and where in it each word begins."""
    text, begins = "", []
    for row in rows:
        begins.append(len(text))
        text += characters(row[FORM]) + ("" if "SpaceAfter=No" in row[MISC].split("|") else " ")
    return text.rstrip(), begins


def blocks(lines: Iterator[tuple[int, str]]) -> Iterator[NumberedLines]:
    """The sentences of a file: runs of lines with a blank line between."""
    for blank, block in groupby(lines, lambda numbered: not numbered[1].strip()):
        if not blank:
            yield list(block)


def words(block: NumberedLines, path: str, layout: tuple[int, ...] = LAYOUTS[TREEBANK]) -> list[list[str]]:
    """The columns of each word, as CoNLL-U has them. Comments, ranges such as 1-2 and empty nodes such as 1.1 are no
    words."""
    rows = []
    for number, line in block:
        cells = line.split("\t")
        if line.startswith("#"):
            continue
        if len(cells) != len(layout):
            name = "CoNLL-U" if len(layout) == len(COLUMNS) else f"a treebank in a {KLUE} file, as KLUE has it,"
            raise InputError(
                f"{path}:{number}: this line has {len(cells)} columns; {name} has {len(layout)}, with tabs between."
            )
        if not _is_word(cells):
            continue
        if cells[0] != str(len(rows) + 1):
            raise InputError(f"{path}:{number}: the word's ID is {cells[0]!r} and should be {len(rows) + 1}.")
        known = dict(zip(layout, cells, strict=True))
        rows.append([known.get(column, "_") for column in range(len(COLUMNS))])
    return rows


def _is_word(columns: list[str]) -> bool:
    return "-" not in columns[0] and "." not in columns[0]


def heads(rows: list[list[str]], name: str) -> tuple[int, ...]:
    """The head of each word, checked: in the sentence, and no cycle. Several roots are let through."""
    found = []
    for row in rows:
        if not row[HEAD].isdecimal() or int(row[HEAD]) > len(rows):
            raise InputError(
                f"{name} the HEAD of word {row[0]} ({row[FORM]}) is {row[HEAD]!r}; it must be a "
                f"number from 0 to {len(rows)}."
            )
        found.append(int(row[HEAD]))
    safe = {0}
    for word in range(1, len(found) + 1):
        path = []
        while word not in safe:
            if word in path:
                cycle = " -> ".join(map(str, [*path[path.index(word) :], word]))
                raise InputError(f"{name} the heads go round in a cycle: {cycle}.")
            path.append(word)
            word = found[word - 1]
        safe.update(path)
    return tuple(found)


def fill(sentence: Sentence, columns: dict[int, list[str]], misc: dict[str, list[str | None]] | None = None) -> str:
    """The lines of a sentence with other values for its words in some columns, if the file has them, and more entries in
    MISC where they are not None. What is no word stays as it is."""
    filled, index, layout = [], 0, LAYOUTS[sentence.kind]
    for line in sentence.lines:
        cells = line.split("\t")
        if not line.startswith("#") and _is_word(cells):
            for place, column in enumerate(layout):
                cells[place] = columns[column][index] if column in columns else cells[place]
            for key, values in (misc or {}).items():
                if values[index] is not None:
                    others = [part for part in cells[MISC].split("|") if part != "_" and part.partition("=")[0] != key]
                    cells[MISC] = "|".join([*others, f"{key}={values[index]}"])
            index += 1
        filled.append("\t".join(cells))
    return "\n".join([*filled, ""])


# Korean morphemes


def characters(word: str) -> str:
    """Whole syllables, however the file wrote them."""
    return unicodedata.normalize("NFC", word)


@lru_cache(maxsize=1 << 16)
def morpheme_tags(form: str, lemmas: str, tags: str) -> tuple[str | None, ...]:
    """A tag for each character of a word: of 청하고, `청+하+고` and `NNG+XSV+EC` it is B-NNG, B-XSV, B-EC.

    A syllable of several morphemes (했 = 하+었) has the tags of all, joined: B-XSV+EP. It is B- where the first of them
    starts. All are None when word and morphemes do not fit together.
    """
    form = characters(form)
    nothing = (None,) * len(form)
    parts, names = _split(lemmas), _split(tags)
    if len(parts) != len(names) or "" in names:
        return nothing
    letters = [(letter, syllable) for syllable, character in enumerate(form) for letter in _letters(character)]
    pieces = [(letter, number) for number, part in enumerate(parts) for letter in _letters(characters(part))]
    cost, pairs = _align([letter for letter, _ in letters], [letter for letter, _ in pieces])
    touched = [sorted({pieces[j][1] for i, j in pairs if letters[i][1] == syllable}) for syllable in range(len(form))]
    if cost > MAX_EDITED * len(pieces) or not all(touched) or len(set().union(*touched)) < len(parts):
        return nothing
    begins = [not syllable or group[0] not in touched[syllable - 1] for syllable, group in enumerate(touched)]
    joined = ("+".join(names[number] for number in group) for group in touched)
    return tuple(f"{'B' if begin else 'I'}-{name}" for begin, name in zip(begins, joined, strict=True))


def _split(joined: str) -> list[str]:
    """Parts between plus signs; a plus sign may be a part itself, as in `1+++1`."""
    parts = joined.split("+")
    for index in range(len(parts) - 1, 0, -1):
        if not parts[index] and not parts[index - 1]:
            parts[index - 1 : index + 1] = ["+"]
    return parts


# Letters that a contraction merges are taken apart, so that 봐 (ㅂㅗㅏ) is near 보아 (ㅂㅗㅇㅏ), and 해 near 하이.
_MERGED = {
    "ㅐ": "ㅏㅣ", "ㅑ": "ㅣㅏ", "ㅒ": "ㅣㅏㅣ", "ㅔ": "ㅓㅣ", "ㅕ": "ㅣㅓ", "ㅖ": "ㅣㅓㅣ", "ㅘ": "ㅗㅏ", "ㅙ": "ㅗㅏㅣ",
    "ㅚ": "ㅗㅣ", "ㅛ": "ㅣㅗ", "ㅝ": "ㅜㅓ", "ㅞ": "ㅜㅓㅣ", "ㅟ": "ㅜㅣ", "ㅠ": "ㅣㅜ", "ㅢ": "ㅡㅣ",
    "ㄳ": "ㄱㅅ", "ㄵ": "ㄴㅈ", "ㄶ": "ㄴㅎ", "ㄺ": "ㄹㄱ", "ㄻ": "ㄹㅁ", "ㄼ": "ㄹㅂ", "ㄽ": "ㄹㅅ", "ㄾ": "ㄹㅌ",
    "ㄿ": "ㄹㅍ", "ㅀ": "ㄹㅎ", "ㅄ": "ㅂㅅ",
}  # fmt: skip
_JAMO = {  # such as "HANGUL JONGSEONG KIYEOK", which ends a syllable: "HANGUL LETTER KIYEOK"
    jamo: unicodedata.lookup(f"HANGUL LETTER {unicodedata.name(jamo).split(maxsplit=2)[2]}")
    for jamo in map(chr, (*range(0x1100, 0x1113), *range(0x1161, 0x1176), *range(0x11A8, 0x11C3)))
}


def _letters(text: str) -> str:
    """Hangul as the letters that a keyboard has, whether they begin or end a syllable."""
    jamo = (_JAMO.get(part, part) for part in unicodedata.normalize("NFD", text))
    return "".join(_MERGED.get(letter, letter) for letter in jamo)


def _align(left: list[str], right: list[str]) -> tuple[int, list[tuple[int, int]]]:
    """The edit distance of two sequences, and which elements stand for each other in it."""
    if left == right:
        return 0, [(place, place) for place in range(len(left))]
    costs = [list(range(len(right) + 1))]
    for i, letter in enumerate(left, 1):
        row = [i]
        for j, other in enumerate(right, 1):
            row.append(min(costs[i - 1][j - 1] + (letter != other), costs[i - 1][j] + 1, row[j - 1] + 1))
        costs.append(row)
    pairs, i, j = [], len(left), len(right)
    while i and j:
        if costs[i][j] == costs[i - 1][j - 1] + (left[i - 1] != right[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif costs[i][j] == costs[i][j - 1] + 1:
            j -= 1
        else:
            i -= 1
    return costs[-1][-1], pairs
