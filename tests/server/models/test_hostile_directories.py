"""Loading a malicious model directory ends with the right reason and exit code, runs no code of it, and takes
no memory for it.
"""

import errno
import json
import os
import pickle
import resource
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_server import termination
from quire_server.errors import ModelCorruptError, ModelNotFoundError
from quire_server.models import weights
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from tests.server.models import directories
from tests.server.runner.in_process import load

DOWN = "model.layers.0.mlp.down_proj.weight"
CORRUPT, CONFIG, NOT_FOUND = 65, 2, 66


class _Trap:
    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return os.system, ("touch pwned",)


def _config(**changes: object) -> Callable[[Path], object]:
    return lambda root: directories.write(root, config=changes)


def _entry(**changes: object) -> Callable[[Path], object]:
    return lambda root: directories.write(root, change=lambda entries: entries[DOWN].update(changes))


def _file(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda root: (root / name).write_bytes(data)


def _index(names: list[str]) -> Callable[[Path], object]:
    weight_map = dict(zip((f"t{i}" for i in range(len(names))), names, strict=True))
    return _file("model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())


def _header(size: int, text: bytes) -> Callable[[Path], object]:
    return _file("model.safetensors", size.to_bytes(8, "little") + text)


def _only_pickles(root: Path) -> None:
    (root / "model.safetensors").rename(root / "x")
    (root / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap()))


def _tensor_twice_in_a_header(root: Path) -> None:
    data = (root / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    twice = data[8 : 8 + size - 1] + b',"model.norm.weight":' + json.dumps({"dtype": "F32"}).encode() + b"}"
    (root / "model.safetensors").write_bytes(len(twice).to_bytes(8, "little") + twice + data[8 + size :])


def _tensor_in_two_files(root: Path) -> None:
    (root / "again.safetensors").write_bytes((root / "model.safetensors").read_bytes())
    _index(["model.safetensors", "again.safetensors"])(root)


def _link(target: str) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        (root / "model.safetensors").unlink()
        (root / "model.safetensors").symlink_to(target)

    return make


def _no_file(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(root: Path) -> None:
        (root / "model.safetensors").unlink()
        make(root / "model.safetensors")

    return replace


_ENTRY = b'"t%d":{"dtype":"F32","shape":[],"data_offsets":[0,0]}'
_MANY = b"{" + b",".join(_ENTRY % number for number in range(100_001)) + b"}"
_CODE = {"auto_map": {"AutoModelForCausalLM": "trap.Model"}, "model_type": "trap"}

ATTACKS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "a header that is no JSON": (_header(5, b"{nope"), CORRUPT, "JSON"),
    "a header of 4 exabytes": (_header(1 << 62, b"{}"), CORRUPT, "no safetensors file"),
    "a header of 100,001 tensors": (_header(len(_MANY), _MANY), CORRUPT, "100001 tensors"),
    "a header nested without end": (_header(1 << 17, b"[" * (1 << 17)), CORRUPT, "JSON"),
    "a number of 100,000 digits": (_header(100_007, b'{"t": ' + b"9" * 100_000 + b"}"), CORRUPT, "JSON"),
    "a wrong shape": (_entry(shape=[24, 16]), CORRUPT, DOWN),
    "a shape of yottabytes": (_entry(shape=[1 << 40, 1 << 40]), CORRUPT, DOWN),
    "a wrong dtype": (_entry(dtype="F64"), CONFIG, "F64.*supported"),
    "a dtype that is code": (_entry(dtype="__import__('os').system('touch pwned')"), CONFIG, "supported"),
    "a file cut short": (lambda root: os.truncate(root / "model.safetensors", 5000), CORRUPT, "cut short"),
    "an empty file": (_file("model.safetensors", b""), CORRUPT, "no safetensors file"),
    "a pickle": (_only_pickles, CONFIG, "pickled"),
    "a pickle by another name": (_file("model.safetensors", pickle.dumps(_Trap())), CORRUPT, "safetensors"),
    "a pickle in the index": (_index(["pytorch_model.bin"]), CORRUPT, "no safetensors file beside it"),
    "an index that climbs out": (_index(["../../etc/x.safetensors"]), CORRUPT, "beside it"),
    "an index to the root": (_index(["/etc/x.safetensors"]), CORRUPT, "beside it"),
    "an index with a NUL": (_index(["x\0.safetensors"]), CORRUPT, "beside it"),
    "an index of 5,000 files": (_index([f"{i}.safetensors" for i in range(5000)]), CORRUPT, "5000 files"),
    "an index to a missing file": (_index(["x.safetensors"]), NOT_FOUND, "x.safetensors is missing"),
    "a tensor twice in a header": (_tensor_twice_in_a_header, CORRUPT, "'model.norm.weight' twice"),
    "a tensor in two files": (_tensor_in_two_files, CORRUPT, "as well"),
    "a link that climbs out": (_link("/etc/passwd"), CORRUPT, "leads out"),
    "a link to itself": (_link("model.safetensors"), NOT_FOUND, "model.safetensors"),
    "a pipe": (_no_file(os.mkfifo), CORRUPT, "not a regular file"),
    "a socket": (_no_file(lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)), CORRUPT, "cannot be read"),
    "a directory": (_no_file(os.mkdir), CORRUPT, "not a regular file"),
    "classes to import": (_config(architectures=["TrapForCausalLM"], **_CODE), CONFIG, "TrapForCausalLM"),
    "a setting twice": (_file("config.json", b'{"a": 1, "a": 2}'), CORRUPT, "'a' twice"),
    "a config of 9 MB": (_file("config.json", b"{" + b" " * (9 << 20) + b"}"), CORRUPT, "believable"),
    "a vocabulary of exabytes": (_config(vocab_size=1 << 60), CORRUPT, "vocab_size"),
    "all sizes at their limits": (
        _config(hidden_size=1 << 17, head_dim=4, intermediate_size=1 << 20, vocab_size=1 << 22),
        CORRUPT,
        "shape",
    ),
    "millions of experts": (
        _config(
            architectures=["MixtralForCausalLM"], num_local_experts=1 << 12, num_hidden_layers=1 << 10
        ),
        CORRUPT,
        "experts",
    ),
    "an endless context": (_config(max_position_embeddings=1 << 62), CORRUPT, "max_position_embeddings"),
    "a context of one token, stretched": (
        _config(
            max_position_embeddings=1 << 24,
            rope_scaling={"type": "yarn", "factor": 1e12, "original_max_position_embeddings": 1},
            num_hidden_layers=2,
        ),
        CORRUPT,
        "in no file",
    ),
    "a rotation that divides by nothing": (
        _config(rope_theta=1.0, rope_scaling={"type": "yarn", "factor": 2.0}),
        CORRUPT,
        "rope_theta",
    ),
    "not a number": (_config(rms_norm_eps=float("nan")), CORRUPT, "rms_norm_eps"),
    "infinity": (_config(rope_theta=float("inf")), CORRUPT, "rope_theta"),
}  # fmt: skip


@pytest.mark.parametrize(("attack", "code", "message"), ATTACKS.values(), ids=ATTACKS)
def test_an_attack_ends_with_its_reason_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[[Path], object], code: int, message: str
) -> None:
    root = directories.write(tmp_path / "model")
    attack(root)
    (root / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root))
    files, modules = set(root.iterdir()), set(sys.modules)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(Exception, match=message) as caught:
        load(root)

    failure = termination.failure_of(caught.value)
    assert failure.exit_code == code, failure
    assert len(failure.to_json()) < 1000
    assert set(root.iterdir()) == files and "trap" not in set(sys.modules) - modules
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000  # KiB


def test_a_file_that_is_truncated_while_it_is_read_is_corrupt_and_no_crash(tmp_path: Path) -> None:
    """A memory-mapped file would end the process with SIGBUS here."""
    root = directories.write(tmp_path)

    def cut(loaded: int, total: int) -> None:
        if loaded:
            os.truncate(root / "model.safetensors", 3000)

    with pytest.raises(ModelCorruptError, match="ends within"):
        ModelRunner.load(root, RunnerConfig(dtype="float32", num_blocks_override=4), cut)


def test_files_that_this_user_may_not_read_are_named_with_the_user_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is injected, because root, as which tests may run, is refused nothing."""
    root = directories.write(tmp_path)
    refused = {root / "model.safetensors"}
    open_, is_dir = os.open, Path.is_dir

    def refusing_open(path: Any, *arguments: Any, **named: Any) -> int:
        if path in refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_(path, *arguments, **named)

    def refusing_is_dir(path: Path) -> bool:
        if path in refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_dir(path)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(Path, "is_dir", refusing_is_dir)
    remedy = rf"not readable by user {os.getuid()}\. .*chmod"
    with pytest.raises(ModelNotFoundError, match=f"model\\.safetensors is {remedy}"):
        load(root)
    refused.add(root)
    with pytest.raises(ModelNotFoundError, match=remedy):
        load(root)


def test_a_disk_error_while_weights_are_read_is_corrupt_and_names_file_and_volume() -> None:
    with open("/proc/self/mem", "rb", buffering=0) as file:  # its first page fails with EIO
        chunks = weights._Reader(file, "model.safetensors", bytearray(16), lambda _: None).chunks(16, "x")
        with pytest.raises(ModelCorruptError, match=r"model\.safetensors cannot be read: .*volume"):
            next(chunks)
