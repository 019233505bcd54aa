"""What may stand nowhere: ways to run data as code, and traces of the machine on which it was written."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.contracts import source_code

ROOT = Path(__file__).parents[2]

# Reading these formats, or calling these, runs whatever their author wrote.
CODE_FORMATS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {
    "compile",
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "numpy.load",
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.serialization.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.full_load_all",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
}

# Homes of people and of build machines, and addresses from which packages were fetched.
MACHINE_PATHS = re.compile(rb"(?<![\w.$}])/(?:root|home/(?!(?:quire|me)\b)\w+|Users/\w+|work|workspace)/")
INDEX_FLAGS = re.compile(
    rb"--(?:extra-)?index-url|--find-links|--trusted-host|GOPROXY=http|files\.pythonhosted\.org"
)
INDEX_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "GOPROXY")
PUBLIC_HOSTS = {"pypi.org", "proxy.golang.org"}


def modules() -> list[Path]:
    return [
        path
        for folder in ("operator", "server", "kernels", "e2e", "bench", "docs", "charts")
        for path in (ROOT / folder).rglob("*.py")
    ]


def tracked() -> Iterator[tuple[str, bytes]]:
    """Every file of the repository but this one, which names what it looks for."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            yield name, path.read_bytes()


def test_no_module_reads_a_format_that_runs_code() -> None:
    found = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules()
        for name in source_code.of_file(path).imports
        if name.partition(".")[0] in CODE_FORMATS
    }
    assert found == set()


def test_no_module_runs_text_as_code() -> None:
    assert {
        f"{path.relative_to(ROOT)}: {call}"
        for path in modules()
        for call in source_code.of_file(path).called & CALLS
    } == set()


@pytest.mark.parametrize(
    "text",
    [
        "import yaml\nyaml.load(x)",
        "import torch as t\nt.load(x, weights_only=True)",
        "from torch import load\nload(x)",
        "from yaml import unsafe_load as read\nread(x)",
        "import builtins as b\nb.eval(x)",
        "from builtins import exec as run\nrun(x)",
        "import numpy as np\nnp.load(x)",
    ],
)
def test_another_name_hides_no_such_call(text: str) -> None:
    assert CALLS & source_code.of_text(text).called


def test_no_program_is_started_through_a_shell() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        for line, name, value in source_code.of_file(path).keywords
        if name == "shell" and value is not False
    }
    assert found == set()


def test_nothing_names_a_path_of_somebodys_machine() -> None:
    assert {f"{name}: {m[0]!r}" for name, text in tracked() for m in MACHINE_PATHS.finditer(text)} == set()


def test_nothing_names_where_packages_were_fetched_from() -> None:
    assert {f"{name}: {m[0]!r}" for name, text in tracked() for m in INDEX_FLAGS.finditer(text)} == set()
    urls = [url for variable in INDEX_VARIABLES for url in re.split(r"[\s,|]+", os.environ.get(variable, ""))]
    hosts = {host for url in urls if (host := urlsplit(url).hostname)} - PUBLIC_HOSTS
    assert {f"{name}: {host}" for name, text in tracked() for host in hosts if host.encode() in text} == set()
