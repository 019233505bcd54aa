"""What the ranks of a model exchange goes through one module, and nothing of it can run code."""

from pathlib import Path

from tests.contracts import source_code

ROOT = Path(__file__).parents[2]


def importers(*modules):
    """Files of the server and its kernels that import one of the modules."""
    return {
        path.name
        for folder in ("server", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if any(
            name == one or name.startswith(one + ".")
            for name in source_code.of_file(path).imports
            for one in modules
        )
    }


def test_only_the_module_of_communicators_knows_torch_distributed():
    assert importers("torch.distributed", "torch._C._distributed_c10d") == {"parallel.py"}


def test_nothing_is_pickled():
    assert importers("pickle", "cloudpickle", "multiprocessing.connection", "shelve", "marshal") == set()
