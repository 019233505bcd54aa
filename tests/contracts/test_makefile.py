"""`make test` and `make deep` together run every test, and what make runs keeps its bytecode."""

import argparse
import ast
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _pytest.mark.expression import Expression

ROOT = Path(__file__).parents[2]

# The options of pytest that the Makefile uses and that take a value or choose tests.
_PYTEST = argparse.ArgumentParser(allow_abbrev=False)
_PYTEST.add_argument("-m", dest="expression", default="")
_PYTEST.add_argument("--ignore", action="append", default=[])
_PYTEST.add_argument("-n")
_PYTEST.add_argument("-p")
_PYTEST.add_argument("--dist")
_PYTEST.add_argument("--timeout")
_PYTEST.add_argument("folders", nargs="*")


@dataclass(frozen=True)
class Run:
    """One call of pytest in the Makefile: its folders, those it ignores, and the markers that it selects."""

    folders: tuple[Path, ...]
    ignored: tuple[Path, ...]
    expression: str

    def selects(self, path: Path, markers: frozenset[str]) -> bool:
        """Whether it runs a test of this file with these markers."""
        compiled = Expression.compile(self.expression)
        is_selected = not self.expression or compiled.evaluate(lambda name, /, **_: name in markers)
        return is_selected and _is_in(path, self.folders) and not _is_in(path, self.ignored)


def _is_in(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(folder in path.parents for folder in folders)


def runs(*targets: str) -> list[Run]:
    """What `make TARGETS` would run, without running it."""
    asked = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *targets],
        cwd=ROOT,
        # Another cluster named in the environment leaves tests out on purpose.
        env={name: value for name, value in os.environ.items() if name != "KUBECONFIG"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [_run(line) for line in asked.stdout.replace("\\\n", "").splitlines() if "-m pytest " in line]


def _run(line: str) -> Run:
    arguments = shlex.split(line.partition("-m pytest ")[2])
    options, _ = _PYTEST.parse_known_args(arguments)
    return Run(
        tuple(ROOT / folder for folder in options.folders),
        tuple(ROOT / folder for folder in options.ignore),
        options.expression,
    )


def written() -> Iterator[tuple[Path, str, frozenset[str]]]:
    """Every test with its markers; twice where only some of its parameters have one."""
    for folder in ("tests", "e2e"):
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            # e2e/stories/conftest.py marks all that lie beside it.
            of_all = {"cluster"} if path.is_relative_to(ROOT / "e2e" / "stories") else set()
            for node in tree.body:
                if isinstance(node, ast.Assign) and "pytestmark" in [ast.unparse(t) for t in node.targets]:
                    of_all |= marks(node.value)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    own = set().union(*(marks(each) for each in node.decorator_list), of_all)
                    yield path, node.name, frozenset(own)
                    if "one_in" in own:  # tests/conftest.py makes the other cases deep
                        yield path, node.name, frozenset(own | {"deep"})
                    if some := set().union(*(marks_of_parameters(each) for each in node.decorator_list)):
                        yield path, node.name, frozenset(own | some)


def marks(node: ast.expr) -> set[str]:
    """The markers of an expression, but for those of single parameters."""
    if isinstance(node, ast.List | ast.Tuple):
        return set().union(*map(marks, node.elts))
    return set(re.findall(r"^pytest\.mark\.(\w+)", ast.unparse(node)))


def marks_of_parameters(node: ast.expr) -> set[str]:
    return set(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node))) - marks(node)


def test_make_test_and_make_deep_together_run_every_test() -> None:
    both = runs("test", "deep")
    all_tests = list(written())

    assert len(all_tests) >= 1500
    left = [
        f"{path.relative_to(ROOT)}::{name} {sorted(markers)}"
        for path, name, markers in all_tests
        if not any(run.selects(path, markers) for run in both)
    ]
    assert left == []


def test_each_of_the_two_targets_runs_what_the_other_does_not() -> None:
    shallow, deep = runs("test"), runs("deep")

    assert shallow and not set(shallow) & set(deep)
    assert {run.expression for run in deep} == {
        "kernels",
        "soak",
        "chaos",
        "keda",
        "deep",
        "(deep or hypothesis) and not cluster",
        "(api or cluster) and deep",
        "images and deep",
    }


def test_what_make_runs_keeps_bytecode_whatever_the_machine_says() -> None:
    """A server's start takes 7 s instead of 3 without, and a test run starts fifty."""
    asked = subprocess.run(
        ["make", "-s", "--eval", 'probe: ; @echo "[$${PYTHONDONTWRITEBYTECODE-}]"', "probe"],
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout == "[]\n"
