"""Simple statements of Python as sentences: tokens are words, and the syntax tree says on which other each depends.

A token belongs to the smallest node of the syntax tree around it. One of a node's own tokens is its head: the first that
is no punctuation, or else the first. A call and a subscript have only brackets, so what is called or subscripted heads
them. The head depends on that of the node above, with the field as relation; the node's other tokens depend on its head.
"""

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

STATEMENTS = (
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert, ast.Delete),
    *(ast.Import, ast.ImportFrom),
)
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
            if hasattr(part, "col_offset"):
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
