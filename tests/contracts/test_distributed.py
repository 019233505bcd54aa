"""What the ranks of a model exchange goes through one module, and nothing of it can run code."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imports(path):
    """Every module or name that a file imports, with dots."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(*modules):
    """Files of the server and its kernels that import one of the modules."""
    return {
        path.name
        for folder in ("server", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if any(name == one or name.startswith(one + ".") for name in imports(path) for one in modules)
    }


def test_only_the_module_of_communicators_knows_torch_distributed():
    assert importers("torch.distributed", "torch._C._distributed_c10d") == {"parallel.py"}


def test_nothing_is_pickled():
    assert importers("pickle", "cloudpickle", "multiprocessing.connection", "shelve", "marshal") == set()
