"""The exception handlers of a module: their names, and the module's syntax tree with a record in each.

A handler is an `except` clause or a `contextlib.suppress`. Its name has the module, the function and what is
caught, and no line number, so that it stays the same while the code around it changes.
"""

from __future__ import annotations

import ast
from collections import Counter

_RECORDER = "__import__('e2e.failure_paths.recorder', fromlist=['record'])"
_SUPPRESS = {"suppress", "contextlib.suppress"}


def names(module: str, source: str | bytes) -> list[str]:
    """The name of each handler in the source."""
    return _instrument(module, source)[1]


def instrumented(module: str, source: str | bytes) -> ast.Module:
    """The module, with a call of the recorder at the start of each handler."""
    return _instrument(module, source)[0]


def _instrument(module: str, source: str | bytes) -> tuple[ast.Module, list[str]]:
    visitor = _Instrumenter(module)
    tree = visitor.visit(ast.parse(source))
    assert isinstance(tree, ast.Module)
    return ast.fix_missing_locations(tree), list(visitor.names)


class _Instrumenter(ast.NodeTransformer):
    """Finds handlers and inserts records, in one pass, so that both agree on the names."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._scope: list[str] = []
        self._alike: Counter[str] = Counter()
        self.names: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._scoped(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._scoped(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._scoped(node)

    def _scoped(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        caught = ast.unparse(node.type) if node.type else ""
        name = self._name(f"except {caught}".rstrip())
        self.generic_visit(node)
        statement = ast.parse(f"{_RECORDER}.record('except', {name!r})").body[0]
        for each in ast.walk(statement):  # errors and debuggers still show the line of the clause
            ast.copy_location(each, node)
        node.body.insert(0, statement)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node.func) in _SUPPRESS:
            name = self._name(f"suppress {', '.join(map(ast.unparse, node.args))}")
            node.func = ast.copy_location(
                ast.parse(f"{_RECORDER}.RecordedSuppress", mode="eval").body, node.func
            )
            node.args.insert(0, ast.copy_location(ast.Constant(name), node))
        self.generic_visit(node)
        return node

    def _name(self, what: str) -> str:
        name = f"{self._module}:{'.'.join(self._scope)}: {what}"
        self._alike[name] += 1
        if (number := self._alike[name]) > 1:
            name = f"{name} ({number})"
        self.names.append(name)
        return name
