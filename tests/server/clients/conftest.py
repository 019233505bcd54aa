"""Fixtures of the tests with strangers' clients, each a program of its own that knows only an address."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.server.launch import Server

ROOT = Path(__file__).parents[3]
BIN = ROOT / ".cache" / "clients" / "bin"  # as the Makefile fills it
SHOWN_URL, MODEL = "http://127.0.0.1:8080", "my-model"  # what the pages say
WORKS_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@pytest.fixture(scope="session")
def smol(smollm2, tmp_path_factory):
    """SmolLM2 under the name that it has on the pages, with all that a page's requests may ask for."""
    directory = tmp_path_factory.mktemp("smol")
    key = directory / "watermark-key"
    key.write_text("a secret that is long enough\n")
    flags = ["--served-model-name", MODEL, "--dtype", "float32", "--kv-cache-memory-bytes", str(256 << 20)]
    flags += [
        "--scheduling-policy",
        "priority",
        "--watermark",
        "on-request",
        "--watermark-key-path",
        str(key),
    ]
    with Server(smollm2, directory, *flags) as server:
        yield server.wait_ready(120)  # half a gigabyte of weights, and each worker loads its own


@pytest.fixture(scope="session")
def stranger(tmp_path_factory):
    """Runs a program of the clients' environment; gives what it wrote."""

    home = tmp_path_factory.mktemp("stranger")

    def run(*command, **environ):
        assert BIN.is_dir(), "the clients are not installed: make setup"
        program, *arguments = command
        keep = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        done = subprocess.run(
            [BIN / program, *arguments],
            cwd=home,
            env={**keep, "HOME": str(home), "OMP_NUM_THREADS": "1", **WORKS_OFFLINE, **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def session(stranger):
    """Runs a script beside the tests; gives the JSON that it wrote."""

    def run(script, *arguments):
        return json.loads(stranger("python", str(Path(__file__).parent / script), *arguments))

    return run


def blocks(page, language=""):
    """The code blocks of a page, by their language."""
    text = (ROOT / page).read_text()
    return [
        code
        for kind, code in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S)
        if kind == language
    ]
