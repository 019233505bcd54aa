"""Signature only, for now."""

from pathlib import Path


def run(path: Path, out: Path) -> None:
    """Convert a GGUF file into a model directory that this server loads."""
    raise NotImplementedError
