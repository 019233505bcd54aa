"""Fixtures of the tests with third-party clients. Each client runs in a process of its own and gets a URL."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.server.embeddings import embedders
from tests.server.launch import Server

ROOT = Path(__file__).parents[3]
BIN = ROOT / ".cache" / "clients" / "bin"  # as the Makefile fills it
SHOWN_URL, MODEL = "http://127.0.0.1:8080", "my-model"  # as in the documentation
WORKS_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@pytest.fixture(scope="session")
def smollm2_server(smollm2, tmp_path_factory):
    """SmolLM2 under the name that it has in the documentation, with all features that its requests use."""
    directory = tmp_path_factory.mktemp("smollm2")
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
        yield server.wait_ready()  # half a gigabyte of weights, and each worker loads its own


@pytest.fixture(scope="session")
def embedding_server(tmp_path_factory):
    """A random encoder under the name that a model has in the documentation."""
    model = embedders.write(tmp_path_factory.mktemp("models") / "bert", "bert", pooling="mean_tokens")
    flags = ("--task", "embed", "--served-model-name", MODEL)
    with Server(model, tmp_path_factory.mktemp("embedding"), *flags) as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def run_client(tmp_path_factory):
    """Runs a program of the clients' environment and returns its output."""

    home = tmp_path_factory.mktemp("client_home")

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
def run_session(run_client):
    """Runs a script of this folder in the clients' environment and returns the JSON that it prints."""

    def run(script, *arguments):
        return json.loads(run_client("python", str(Path(__file__).parent / script), *arguments))

    return run


def code_blocks(page, language=""):
    """The code blocks of a page that have this language."""
    text = (ROOT / page).read_text()
    return [
        code
        for kind, code in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S)
        if kind == language
    ]
