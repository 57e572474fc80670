"""Simple statements of Python as sentences: tokens are words, and the syntax tree says on which other each depends.

A call is headed by the name of what is called, an attribute by its own name, an operation by its operator, a display by
its opening bracket, a statement by its keyword or `=`. Brackets, commas and the like hang on what they belong to.
"""

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

STATEMENTS = (
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert, ast.Delete),
    *(ast.Import, ast.ImportFrom),
)
FEWEST, MOST = 3, 25  # tokens
LONGEST_STRING = 12  # characters
CONSTANTS = {"True", "False", "None", "..."}
TYPES = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.NAME: "variable", tokenize.OP: "operator"}


@dataclass(frozen=True)
class Tree:
    """Heads are counted from 1; that of the root is 0."""

    text: str
    line: int
    words: tuple[str, ...]
    types: tuple[str, ...]
    roles: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]

    def conllu(self, name: str) -> str:
        rows = zip(self.words, self.roles, self.types, self.heads, self.relations, strict=True)
        lines = [
            f"{number}\t{word}\t{word}\t{role}\t{kind}\t_\t{head}\t{relation}\t_\t_"
            for number, (word, role, kind, head, relation) in enumerate(rows, 1)
        ]
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
    """None when it is too short, too long, not in ASCII, or of a syntax that is not known here."""
    text = ast.unparse(_ShortStrings().visit(statement))
    if not text.isascii() or "\n" in text or len(text) > MOST * 20:
        return None
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.string.strip()]
    if not FEWEST <= len(tokens) <= MOST or any(" " in token.string for token in tokens):
        return None
    builder = _Builder(tokens, modules)
    try:
        builder.statement(ast.parse(text).body[0])
    except _NewSyntaxError:
        return None
    words = tuple(token.string for token in tokens)
    types = tuple(tokenize.tok_name[token.type] for token in tokens)
    heads = tuple(head + 1 for head in builder.heads)
    return Tree(text, statement.lineno, words, types, tuple(builder.roles), heads, tuple(builder.relations))


class _NewSyntaxError(Exception):
    """A node that this file does not know: of a later Python."""


class _ShortStrings(ast.NodeTransformer):
    """A string becomes one short word, so that it is one token without blanks."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            return ast.Constant(_short(node.value))
        return ast.Constant(_short(node.value.decode("latin-1")).encode()) if isinstance(node.value, bytes) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        literal = "".join(part.value for part in node.values if isinstance(part, ast.Constant))
        return ast.Constant(_short(literal))


def _short(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text)[:LONGEST_STRING]


class _Builder(ast.NodeVisitor):
    """The tokens of one line of source get heads and relations as the syntax tree is gone through."""

    def __init__(self, tokens: list[tokenize.TokenInfo], modules: set[str]):
        self.words = [token.string for token in tokens]
        self.starts = [token.start[1] for token in tokens]
        self.ends = [token.end[1] for token in tokens]
        self.modules = modules
        self.heads: list[int] = [-1] * len(tokens)
        self.relations: list[str] = ["root"] * len(tokens)
        self.roles = [self._role(token) for token in tokens]

    @staticmethod
    def _role(token: tokenize.TokenInfo) -> str:
        """What the token alone says of its role."""
        if token.string in CONSTANTS:
            return "constant"
        if keyword.iskeyword(token.string):
            return "keyword"
        return "punctuation" if token.string in "()[]{},:.;" else TYPES[token.type]

    def statement(self, node: ast.stmt) -> None:
        self._sweep(self.visit(node), range(len(self.words)))

    def visit(self, node: ast.AST) -> int:
        """The head of the node's tokens, which themselves now all depend on it."""
        head = super().visit(node)
        tokens = [i for i, start in enumerate(self.starts) if node.col_offset <= start < node.end_col_offset]
        self._sweep(head, tokens)
        return head

    def generic_visit(self, node: ast.AST) -> int:
        raise _NewSyntaxError(type(node).__name__)

    def _sweep(self, head: int, tokens: Iterable[int]) -> None:
        """What no part of the syntax tree stands for: brackets, commas, the words between."""
        for token in tokens:
            if token != head and self.heads[token] < 0:
                self._attach(token, head, "mark" if self.roles[token] == "keyword" else "punct")

    def _attach(self, token: int, head: int, relation: str) -> None:
        self.heads[token], self.relations[token] = head, relation

    def _hang(self, node: ast.AST | None, head: int, relation: str) -> None:
        if node is not None:
            self._attach(self.visit(node), head, relation)

    def _first(self, node: ast.AST) -> int:
        return self.starts.index(node.col_offset)

    def _find(self, word: str, after: int, before: int | None = None) -> int:
        """The token after one place of the source and before another."""
        places = (i for i, found in enumerate(self.words) if found == word and self.starts[i] >= after)
        return next(i for i in places if before is None or self.ends[i] <= before)

    # Names and constants

    def visit_Name(self, node: ast.Name) -> int:
        token = self._first(node)
        self.roles[token] = "module" if node.id in self.modules else "variable"
        return token

    def visit_Constant(self, node: ast.Constant) -> int:
        return self._first(node)

    def visit_Attribute(self, node: ast.Attribute) -> int:
        head = self.ends.index(node.end_col_offset)
        self.roles[head] = "attribute"
        self._hang(node.value, head, "object")
        return head

    # Calls and subscripts

    def visit_Call(self, node: ast.Call) -> int:
        head = self.visit(node.func)
        if isinstance(node.func, ast.Name | ast.Attribute):
            self.roles[head] = "method" if isinstance(node.func, ast.Attribute) else "function"
        for argument in node.args:
            self._hang(argument, head, "arg")
        for argument in node.keywords:
            self._hang(argument, head, "keyword")
        return head

    def visit_keyword(self, node: ast.keyword) -> int:
        head = self._first(node)
        if node.arg:
            self.roles[head] = "argument"
        self._hang(node.value, head, "value")
        return head

    def visit_Starred(self, node: ast.Starred) -> int:
        head = self._first(node)
        self._hang(node.value, head, "value")
        return head

    def visit_Subscript(self, node: ast.Subscript) -> int:
        head = self.visit(node.value)
        self._hang(node.slice, head, "index")
        return head

    def visit_Slice(self, node: ast.Slice) -> int:
        head = self._find(":", node.lower.end_col_offset if node.lower else node.col_offset)
        for part, relation in ((node.lower, "lower"), (node.upper, "upper"), (node.step, "step")):
            self._hang(part, head, relation)
        return head

    # Operations

    def _between(self, left: ast.AST, right: ast.AST) -> int:
        """The operator between two operands, which may be in brackets."""
        tokens = [i for i, s in enumerate(self.starts) if left.end_col_offset <= s < right.col_offset]
        return next(i for i in tokens if self.words[i] not in "()")

    def _chain(self, values: list[ast.expr]) -> int:
        """The first operator heads the others, and each of those what follows it."""
        operators = [self._between(*pair) for pair in pairwise(values)]
        self._hang(values[0], operators[0], "left")
        for operator, value in zip(operators, values[1:], strict=True):
            if operator != operators[0]:
                self._attach(operator, operators[0], "chain")
            self._hang(value, operator, "right")
            if self.words[operator : operator + 2] in (["is", "not"], ["not", "in"]):
                self._attach(operator + 1, operator, "fixed")
        return operators[0]

    def visit_BinOp(self, node: ast.BinOp) -> int:
        return self._chain([node.left, node.right])

    def visit_BoolOp(self, node: ast.BoolOp) -> int:
        return self._chain(node.values)

    def visit_Compare(self, node: ast.Compare) -> int:
        return self._chain([node.left, *node.comparators])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> int:
        return self._chain([node.target, node.value])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> int:
        head = self._first(node)
        self._hang(node.operand, head, "operand")
        return head

    def visit_IfExp(self, node: ast.IfExp) -> int:
        head = self._find("if", node.body.end_col_offset)
        self._hang(node.body, head, "then")
        self._hang(node.test, head, "test")
        self._hang(node.orelse, head, "else")
        return head

    def visit_Lambda(self, node: ast.Lambda) -> int:
        head = self._first(node)
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for argument in named:
            self._hang(argument, head, "parameter")
        for default in (*arguments.defaults, *arguments.kw_defaults):
            self._hang(default, head, "default")
        self._hang(node.body, head, "body")
        return head

    def visit_arg(self, node: ast.arg) -> int:
        self.roles[self._first(node)] = "argument"
        return self._first(node)

    def _keyword_first(self, node: ast.Await | ast.Yield | ast.YieldFrom | ast.Return) -> int:
        head = self._first(node)
        self._hang(node.value, head, "value")
        return head

    visit_Await = visit_Yield = visit_YieldFrom = visit_Return = _keyword_first

    # Displays and comprehensions

    def visit_List(self, node: ast.List | ast.Set) -> int:
        head = self._first(node)
        for element in node.elts:
            self._hang(element, head, "element")
        return head

    visit_Set = visit_List

    def visit_Tuple(self, node: ast.Tuple) -> int:
        if not node.elts or node.col_offset < node.elts[0].col_offset:
            return self.visit_List(node)
        head = self._find(",", node.elts[0].end_col_offset)  # without brackets
        for element in node.elts:
            self._hang(element, head, "element")
        return head

    def visit_Dict(self, node: ast.Dict) -> int:
        head = self._first(node)
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                tokens = [i for i, end in enumerate(self.ends) if end <= value.col_offset and self.words[i] == "**"]
                colon = tokens[-1]
            else:
                colon = self._find(":", key.end_col_offset)
                self._hang(key, colon, "key")
            self._hang(value, colon, "value")
            self._attach(colon, head, "element")
        return head

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> int:
        return self._generators(node, [(node.elt, "element")])

    visit_ListComp = visit_SetComp = visit_GeneratorExp = _comprehension

    def visit_DictComp(self, node: ast.DictComp) -> int:
        return self._generators(node, [(node.key, "key"), (node.value, "value")])

    def _generators(self, node: ast.AST, results: list[tuple[ast.expr, str]]) -> int:
        heads, after = [], results[-1][0].end_col_offset
        for generator in node.generators:
            loop = self._find("for", after)
            self._hang(generator.target, loop, "target")
            self._hang(generator.iter, loop, "iter")
            after = generator.iter.end_col_offset
            for condition in generator.ifs:
                self._hang(condition, self._condition(after, loop), "test")
                after = condition.end_col_offset
            heads.append(loop)
        for loop in heads[1:]:
            self._attach(loop, heads[0], "chain")
        for result, relation in results:
            self._hang(result, heads[0], relation)
        return heads[0]

    def _condition(self, after: int, loop: int) -> int:
        token = self._find("if", after)
        self._attach(token, loop, "if")
        return token

    # Statements

    def visit_Expr(self, node: ast.Expr) -> int:
        return self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> int:
        head = self._find("=", node.targets[0].end_col_offset)
        for target in node.targets:
            self._hang(target, head, "target")
        self._hang(node.value, head, "value")
        return head

    def visit_AnnAssign(self, node: ast.AnnAssign) -> int:
        head = self._find("=" if node.value else ":", (node.annotation if node.value else node.target).end_col_offset)
        self._hang(node.target, head, "target")
        self._hang(node.annotation, head, "annotation")
        self._hang(node.value, head, "value")
        return head

    def visit_AugAssign(self, node: ast.AugAssign) -> int:
        head = self._between(node.target, node.value)
        self._hang(node.target, head, "target")
        self._hang(node.value, head, "value")
        return head

    def visit_Raise(self, node: ast.Raise) -> int:
        head = self._first(node)
        self._hang(node.exc, head, "value")
        self._hang(node.cause, head, "cause")
        return head

    def visit_Assert(self, node: ast.Assert) -> int:
        head = self._first(node)
        self._hang(node.test, head, "test")
        self._hang(node.msg, head, "message")
        return head

    def visit_Delete(self, node: ast.Delete) -> int:
        head = self._first(node)
        for target in node.targets:
            self._hang(target, head, "target")
        return head

    def visit_Import(self, node: ast.Import) -> int:
        head = self._first(node)
        for alias in node.names:
            self._attach(self._dotted(alias.col_offset, alias.name, "module", alias.asname), head, "value")
        return head

    def visit_ImportFrom(self, node: ast.ImportFrom) -> int:
        head = self._find("import", node.col_offset)
        if node.module:
            after = self.ends[self._first(node)]
            start = next(i for i, s in enumerate(self.starts) if s >= after and self.words[i] not in (".", "..."))
            self._attach(self._dotted(self.starts[start], node.module, "module", None), head, "from")
        for alias in node.names:
            self._attach(self._dotted(alias.col_offset, alias.name, "variable", alias.asname), head, "value")
        return head

    def _dotted(self, start: int, name: str, role: str, asname: str | None) -> int:
        """`a.b as c`: b heads a, the dot, and c."""
        first = self.starts.index(start)
        parts = range(first, first + 2 * name.count(".") + 1, 2)
        for part, following in pairwise(parts):
            self._attach(part, following, "object")
            self._attach(part + 1, following, "punct")
        head = parts[-1]
        for part in parts:
            self.roles[part] = role if self.words[part] != "*" else "operator"
        if asname:
            self._attach(head + 1, head, "mark")
            self._attach(head + 2, head, "alias")
            self.roles[head + 2] = role
        return head
