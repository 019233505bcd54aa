"""What a Python file imports, calls and declares. A file is parsed once for all tests of this folder."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SourceCode:
    """``imports``: `a` of `import a`, `a` and `a.b` of `from a import b`. ``attributes``: names with dots, as
    they stand there. ``called``: full names, by whatever name they were imported. ``keywords``: line, name
    and value (None where it is no constant) of each argument by keyword. ``functions``: name and lines.
    """

    docstring: str | None
    imports: frozenset[str]
    attributes: frozenset[str]
    called: frozenset[str]
    keywords: tuple[tuple[int, str | None, object], ...]
    functions: tuple[tuple[str, int], ...]


@functools.cache
def of_file(path: Path) -> SourceCode:
    """Of a file, in UTF-8."""
    return of_text(path.read_text(encoding="utf-8"))


def of_text(text: str) -> SourceCode:
    """Of a module's text."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    origins = {"builtins": ""} | {name: origin for node in nodes for name, origin in _origins(node)}
    names = {id(node): _dotted(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)}
    return SourceCode(
        docstring=ast.get_docstring(tree),
        imports=frozenset(name for node in nodes for name in _imports(node)),
        attributes=frozenset(
            name for node in nodes if isinstance(node, ast.Attribute) and (name := names[id(node)])
        ),
        called=frozenset(
            _full(name, origins)
            for node in nodes
            if isinstance(node, ast.Call) and (name := names.get(id(node.func)))
        ),
        keywords=tuple(
            (node.lineno, node.arg, node.value.value if isinstance(node.value, ast.Constant) else None)
            for node in nodes
            if isinstance(node, ast.keyword)
        ),
        functions=tuple(
            (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
    )


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _origins(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _dotted(node: ast.expr) -> str | None:
    """`a.b.c`; None where it begins with anything else than a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _full(name: str, origins: dict[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return (origins.get(first, first) + dot + rest).removeprefix("builtins").removeprefix(".")
