"""Make the data that lies in hf_tiny/data/builtin: a treebank of Python statements, and dates in two languages.

python benchmarks/make_builtin.py  # writes hf_tiny/data/builtin/*.gz

Run it only to change them: the statements are those of the Python that runs it.

Simple statements of Python are sentences: tokens are words, and the syntax tree says on which other each depends. A token
belongs to the smallest node of the syntax tree around it. One of a node's own tokens is its head: the first that is no
punctuation, or else the first. A call and a subscript have only brackets, so what is called or subscripted heads them. The
head depends on that of the node above, with the field as relation; the node's other tokens depend on its head.
"""

import ast
import gzip
import io
import keyword
import random
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from hf_tiny.data import builtin

TREEBANK_SIZES = {"train": 3000, "validation": 500}  # sentences
SENTENCES_OF_MODULE = 40
PAIR_SIZES = {"train": 5000, "validation": 500}
YEARS = range(1600, 2100)


# Statements as dependency trees

STATEMENTS = (
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert, ast.Delete),
    *(ast.Import, ast.ImportFrom),
)
PLACED = (ast.stmt, ast.expr, ast.arg, ast.keyword, ast.alias)  # nodes that have a place in the text
FEWEST, MOST = 3, 25  # tokens
LONGEST_STRING = 12  # characters
HEADED_BY_FIRST_PART = (ast.Expr, ast.Call, ast.Subscript)
PUNCTUATION = set("()[]{},:.") | {"..."}  # The dots of `from ... import`: those that are a value have a role as such.
VALUES = {str: "string", bytes: "string", int: "number", float: "number", complex: "number"}
NAMES = {ast.Attribute: "attribute", ast.keyword: "argument", ast.arg: "argument", ast.ImportFrom: "module"}
OWN_RELATIONS = {"punctuation": "punct", "keyword": "mark"}  # Else it is a `part`: b of `import a.b`.


@dataclass(frozen=True)
class Tree:
    """Heads are counted from 1; that of the root is 0."""

    text: str
    line: int
    words: tuple[str, ...]
    roles: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]

    def conllu(self, name: str) -> str:
        rows = enumerate(zip(self.words, self.roles, self.heads, self.relations, strict=True), 1)
        lines = [f"{n}\t{word}\t{word}\t{role}\t_\t_\t{head}\t{rel}\t_\t_" for n, (word, role, head, rel) in rows]
        return "\n".join([f"# sent_id = {name}:{self.line}", f"# text = {self.text}", *lines, "", ""])


def statements(module: ast.Module) -> list[ast.stmt]:
    """All simple statements of a module, but for docstrings."""
    return [
        node
        for node in ast.walk(module)
        if isinstance(node, STATEMENTS) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


def module_names(module: ast.Module) -> set[str]:
    """The names that stand for other modules in this one."""
    imports = (node for node in ast.walk(module) if isinstance(node, ast.Import))
    return {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}


def tree(statement: ast.stmt, modules: set[str]) -> Tree | None:
    """None when it is too short or too long, has non-ASCII letters or bytes with blanks, or a node without tokens."""
    text = ast.unparse(_ShortStrings().visit(statement))
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.string.strip()]
    words = tuple(token.string for token in tokens)
    if not text.isascii() or not FEWEST <= len(words) <= MOST or any(" " in word for word in words):
        return None
    root = ast.parse(text).body[0]
    edges = list(_edges(root, root))
    parents = {child: parent for parent, _, child in edges}
    owners = [root] * len(tokens)
    for node in parents:  # from above, so that the smallest comes last
        for i, token in enumerate(tokens):
            if node.col_offset <= token.start[1] < node.end_col_offset:
                owners[i] = node
    roles = [_role(word, node, parents.get(node), modules) for word, node in zip(words, owners, strict=True)]
    heads_of = {}
    for node in reversed([root, *parents]):  # from below: the head may be that of a part
        own = [i for i, owner in enumerate(owners) if owner is node]
        if isinstance(node, HEADED_BY_FIRST_PART):
            heads_of[node] = heads_of[next(_edges(node, node))[2]]
        elif own:
            heads_of[node] = min(own, key=lambda i: roles[i] == "punctuation")
        else:
            return None
    heads = [heads_of[owner] + 1 for owner in owners]
    relations = [OWN_RELATIONS.get(role, "part") for role in roles]
    heads[heads_of[root]], relations[heads_of[root]] = 0, "root"
    for parent, relation, child in edges:
        if heads_of[child] != heads_of[parent]:
            heads[heads_of[child]], relations[heads_of[child]] = heads_of[parent] + 1, relation
    return Tree(text, statement.lineno, words, tuple(roles), tuple(heads), tuple(relations))


def _edges(node: ast.AST, above: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Every node below this one: what it is part of, the field in the singular, and the node.

    A node without a place in the text, such as each `for` of a comprehension, leaves its parts to the node above.
    """
    for field, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, PLACED):
                yield above, field.removesuffix("s"), part
                yield from _edges(part, part)
            elif isinstance(part, ast.AST):
                yield from _edges(part, above)


def _role(word: str, node: ast.AST, parent: ast.AST | None, modules: set[str]) -> str:
    if isinstance(node, ast.Constant):
        return VALUES.get(type(node.value), "constant")
    if not word.isidentifier():
        return "punctuation" if word in PUNCTUATION else "operator"
    if keyword.iskeyword(word):
        return "keyword"
    if isinstance(parent, ast.Call) and parent.func is node:
        return "function"
    if isinstance(parent, ast.Import) or (isinstance(node, ast.Name) and word in modules):
        return "module"
    return NAMES.get(type(node), "variable")


class _ShortStrings(ast.NodeTransformer):
    """A string becomes one short word, so that it is one token without blanks."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        is_text = isinstance(node.value, str)
        return ast.Constant(re.sub(r"[^A-Za-z0-9]+", "_", node.value)[:LONGEST_STRING]) if is_text else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        return self.visit(ast.Constant("".join(part.value for part in node.values if isinstance(part, ast.Constant))))


# Dates in English and in Korean words, 1000 to 9999

ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ORDINALS = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"},
    **{"twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"},
}
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September", "October"),
    *("November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
KOREAN_DIGITS = ("", *"일이삼사오육칠팔구")
KOREAN_MONTHS = {6: "유월", 10: "시월"}  # not as the numbers are said
KOREAN_WEEKDAYS = "월화수목금토일"
FORMS = 3


def pair(day: date, form: int) -> tuple[str, str]:
    """English in one of its forms, and Korean."""
    weekday, month = WEEKDAYS[day.weekday()], MONTHS[day.month - 1]
    ordinal, year = english_ordinal(day.day), english_year(day.year)
    forms = (
        f"{weekday}, {month} {ordinal}, {year}",
        f"{weekday} the {ordinal} of {month} {year}",
        f"the {ordinal} of {month}, {year}, a {weekday}",
    )
    month = KOREAN_MONTHS.get(day.month, f"{korean(day.month)}월")
    return forms[form], f"{korean(day.year)}년 {month} {korean(day.day)}일 {KOREAN_WEEKDAYS[day.weekday()]}요일"


def english(number: int) -> str:
    """Below 100."""
    if number < 20:
        return ONES[number]
    tens, ones = TENS[number // 10 - 2], number % 10
    return f"{tens}-{ONES[ones]}" if ones else tens


def english_ordinal(number: int) -> str:
    """Below 40."""
    before, dash, last = english(number).rpartition("-")
    return before + dash + ORDINALS.get(last, f"{last}th")


def english_year(year: int) -> str:
    century, rest = divmod(year, 100)
    if century % 10 == 0 and rest < 10:
        return f"{ONES[century // 10]} thousand{f' {ONES[rest]}' if rest else ''}"
    return f"{english(century)} {english(rest) if rest > 9 else f'oh {ONES[rest]}' if rest else 'hundred'}"


def korean(number: int) -> str:
    """Below 10,000; one ten, hundred or thousand is said without the one."""
    words = ""
    for digit, unit in zip(f"{number:04d}", ("천", "백", "십", ""), strict=True):
        if digit != "0":
            words += unit if digit == "1" and unit else KOREAN_DIGITS[int(digit)] + unit
    return words


# Files


def treebank(library: Path) -> dict[str, str]:
    """The modules of a folder as CoNLL-U. No module is in both parts, and no sentence comes twice."""
    modules = [(f"{builtin.STANDARD_LIBRARY}.{path.stem}", path) for path in sorted(library.glob("*.py"))]
    modules.sort(key=lambda module: builtin.split_of(module[0]) == "validation")  # what comes again is not held out
    found, seen = {"train": [], "validation": []}, set()
    for name, path in modules:
        for found_tree in module_trees(path):
            if found_tree.words not in seen:
                seen.add(found_tree.words)
                found[builtin.split_of(name)].append((name, found_tree))
    texts, known = {}, set()
    for split, trees in found.items():
        if known:  # A label that is not trained on cannot be predicted.
            trees = [(name, one) for name, one in trees if known.issuperset((*one.roles, *one.relations))]
        trees = random.Random(0).sample(trees, min(TREEBANK_SIZES[split], len(trees)))
        known.update(label for _, one in trees for label in (*one.roles, *one.relations))
        texts[split] = "".join(one.conllu(name) for name, one in trees)
    return texts


def module_trees(path: Path) -> Iterator[Tree]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return
    names, found = module_names(module), statements(module)
    random.Random(0).shuffle(found)
    for statement in found[:SENTENCES_OF_MODULE]:
        if one := tree(statement, names):
            yield one


def pairs() -> dict[str, str]:
    """Dates as .tsv; no date is in both parts."""
    chance = random.Random(0)
    possible = range(date(YEARS.start, 1, 1).toordinal(), date(YEARS.stop, 1, 1).toordinal())
    days = iter(chance.sample(possible, sum(PAIR_SIZES.values())))
    texts = {}
    for split, size in PAIR_SIZES.items():
        rows = [pair(date.fromordinal(next(days)), chance.randrange(FORMS)) for _ in range(size)]
        texts[split] = "".join("\t".join(row) + "\n" for row in [("source", "target"), *rows])
    return texts


def main() -> None:
    for name, texts in (
        ("treebank_{}.conllu.gz", treebank(Path(sysconfig.get_path("stdlib")))),
        ("dates_{}.tsv.gz", pairs()),
    ):
        for split, text in texts.items():
            path = Path(builtin.__file__).with_name(name.format(split))
            path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
            print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
