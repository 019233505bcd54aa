"""Loads model directories one after the other and prints the process's peak memory after each, in MB.

A separate process for ``test_hostile_memory``, because a process that did other work has had its peak.
"""

import json
import sys
from pathlib import Path

import torch

from quire_server.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from quire_server.text.chat import ChatTemplate
from quire_server.text.tokenizer import Tokenizer
from tests.server.runner.in_process import load


def peak() -> int:
    """Of this program; getrusage would include the program that started it."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) // 1024


def read_all(root: Path) -> str:
    try:
        if (root / "tokenizer.json").exists():
            Tokenizer.load(root)
        ChatTemplate.load(root)
        load(root)
    except (ModelCorruptError, ConfigError, ModelNotFoundError) as error:
        return f"{type(error).__name__} {error}"
    return "loaded"


def main(roots: list[str]) -> None:
    """The first directory is a good one."""
    torch.set_num_threads(1)
    for root in roots:
        outcome = read_all(Path(root))
        sys.stdout.write(json.dumps([Path(root).name, outcome, peak()]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
