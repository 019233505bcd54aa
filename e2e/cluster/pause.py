"""The pause image, made of the static `pause` program and nothing else, as an archive that containerd
imports.

Imported at each start of a cluster; no registry and no network is involved.
"""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def archive(program: Path, tag: str) -> bytes:
    """A docker archive with one layer and one file."""
    layer = _tar({"pause": program.read_bytes()})
    digest = hashlib.sha256(layer).hexdigest()
    machine = platform.machine()
    config = json.dumps(
        {
            "architecture": _ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    name = hashlib.sha256(config).hexdigest()
    manifest = [{"Config": f"{name}.json", "RepoTags": [tag], "Layers": [f"{digest}.tar"]}]
    return _tar(
        {f"{digest}.tar": layer, f"{name}.json": config, "manifest.json": json.dumps(manifest).encode()}
    )


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
