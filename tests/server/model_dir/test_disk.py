"""What writes model directories meets a crash and a full disk: complete under its name, or not there."""

import os
import subprocess
import sys

import pytest

from quire_server.__main__ import run
from tests.server.fetch import published
from tests.server.fetch.hub_server import HubServer
from tests.server.models import families, gguf_files
from tests.server.quantize import small_models

OUT_OF_DISK = 73
AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
# A tmpfs of $0 bytes at $1, in a mount namespace of its own; what is left there after the command is printed.
ON_TMPFS = """
mount -t tmpfs -o size="$0" tmpfs "$1" || exit 99
place=$1; shift; "$@"; code=$?
find "$place" -mindepth 1 -printf 'left %P\\n'
exit $code
"""
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture(scope="module")
def hub():
    server = HubServer(published.files())
    yield server
    server.close()


@pytest.fixture(scope="module")
def sources(tmp_path_factory, hub):
    """Arguments of each command that writes a model directory, by name; {out} is where it goes."""
    place = tmp_path_factory.mktemp("sources")
    small_models.build(place / "float")
    sizes = {"vocab_size": gguf_files.VOCAB, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "head_dim": 16}
    families.build(place / "original", "Llama", sizes)
    gguf_files.write(place / "model.gguf", place / "original")
    text = small_models.text(place / "text", 1)
    quantize = ("quantize", str(place / "float"), "--scheme", "fp8", "--calibration", str(text))
    return {
        "import-gguf": ("import-gguf", str(place / "model.gguf"), "{out}"),
        "quantize": (*quantize, "--output", "{out}"),
        "fetch": ("fetch", "hf://org/tiny", "--to", "{out}"),
    }


@pytest.fixture
def environment(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    return dict(os.environ)


def to(out, arguments):
    return [argument.format(out=out) for argument in arguments]


COMMANDS = ["import-gguf", "quantize", "fetch"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_byte_is_on_the_disk_before_the_directory_has_its_name(
    command, sources, environment, tmp_path, monkeypatch
):
    done = []  # (what, path, its size, or its entries), in the order of the calls
    fsync, replace = os.fsync, os.replace

    def state(path):
        return sorted(os.listdir(path)) if os.path.isdir(path) else os.path.getsize(path)

    def recorded_fsync(descriptor):
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append(("sync", path, state(path)))

    def recorded_replace(source, target):
        replace(source, target)
        done.append(("rename", str(source), str(target)))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    out = tmp_path / "volume" / "out"
    assert run(to(out, sources[command]), environment) == 0

    renamed = next(index for index, call in enumerate(done) if call[2] == str(out))
    staging = done[renamed][1]
    before = done[:renamed]
    for file in out.iterdir():
        assert ("sync", f"{staging}/{file.name}", file.stat().st_size) in before, file.name
    assert ("sync", staging, sorted(os.listdir(out))) in before
    assert ("sync", str(out.parent)) in [call[:2] for call in done[renamed:]]


def on_tmpfs(size, place, command, environment):
    """Run a command beside a mounted tmpfs; returns (exit code, stderr, paths that are left there)."""
    place.mkdir()
    argv = ["unshare", *AS_ROOT, "--mount", "sh", "-c", ON_TMPFS, str(size), str(place), *command]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 99, done.stderr
    lines = done.stdout.splitlines()
    return done.returncode, done.stderr, [line[5:] for line in lines if line.startswith("left ")]


def quire_server(*arguments):
    return [sys.executable, "-m", "quire_server", *arguments]


def size_of_tmpfs(command, sources, tmp_path, environment):
    """Too little for all files; for `quantize` enough for the weights, which it checks before it begins."""
    if command == "fetch":
        return 1 << 20
    run(to(tmp_path / "whole", sources[command]), environment)
    weights = (tmp_path / "whole" / "model.safetensors").stat().st_size
    return int(1.06 * weights if command == "quantize" else weights / 2) // PAGE * PAGE + PAGE


@pytest.mark.one_in(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_a_clear_error_and_leaves_nothing_under_the_name(
    command, sources, environment, tmp_path
):
    size = size_of_tmpfs(command, sources, tmp_path, environment)
    assert size < 4 << 20
    place = tmp_path / "small"
    argv = quire_server(*to(place / "out", sources[command]))
    code, error, left = on_tmpfs(size, place, argv, environment)
    assert code == OUT_OF_DISK, error
    assert "Enlarge the volume" in error and "Traceback" not in error
    if command == "fetch":  # refused before the first byte; its lock and its staging directory are hidden
        assert "has" in error and all(path.startswith(".") for path in left)
    else:
        assert "There is no room for out (No space left on device)" in error
        assert left == []


def test_a_full_disk_under_the_progress_file_is_told_and_the_download_goes_on(hub, environment, tmp_path):
    out, place = tmp_path / "model", tmp_path / "small"
    fetch = quire_server("fetch", "hf://org/tiny", "--to", str(out), "--progress-file", f"{place}/progress")
    fill = 'head -c 100000 /dev/zero >"$0/fill"; exec "$@"'
    code, error, left = on_tmpfs(16 * PAGE, place, ["sh", "-c", fill, str(place), *fetch], environment)
    assert code == 0, error
    assert "fill" in left, "the disk was full"
    assert f"{place}/progress cannot be written: No space left on device" in error
    assert "Exception" not in error
    assert (out / "quire-manifest.json").exists()


def test_a_full_disk_under_the_termination_log_does_not_fail_a_finished_download(hub, environment, tmp_path):
    out, place = tmp_path / "model", tmp_path / "small"
    log = place / "termination-log"
    fetch = quire_server("fetch", "hf://org/tiny", "--to", str(out))
    fill = 'touch "$0/termination-log"; head -c 100000 /dev/zero >"$0/fill"; exec "$@"'
    environment = {**environment, "QUIRE_TERMINATION_LOG": str(log)}
    code, error, left = on_tmpfs(16 * PAGE, place, ["sh", "-c", fill, str(place), *fetch], environment)
    assert {"fill", "termination-log"} <= set(left), "the disk was full"
    assert code == 0, error
    assert f"{log} cannot be written: No space left on device" in error
    assert (out / "quire-manifest.json").exists()
