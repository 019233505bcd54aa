"""Writes a safetensors file: the header first, since all sizes are known, then one tensor at a time, so that
memory holds only one. ``weights`` is the reader.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quire_server.layers.quantized.format import TensorSpec
from quire_server.models.weights import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Writer:
    """Tensors are written at their offsets, in any order."""

    def __init__(self, file: BinaryIO, tensors: Mapping[str, TensorSpec]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._file, self._specs, self._offsets = file, dict(tensors), dict[str, int]()
        offset = 0
        # Widest types first, so that each tensor is aligned to its type for readers that map the file.
        for name, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            end = offset + math.prod(spec.shape) * spec.dtype.itemsize
            header[name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, end],
            }
            self._offsets[name] = offset
            offset = end
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._start = 8 + len(encoded)
        file.write(struct.pack("<Q", len(encoded)) + encoded)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, once; its shape is the announced one, and its type is converted to the announced
        one.
        """
        spec = self._specs.pop(name)
        assert tuple(tensor.shape) == spec.shape, f"{name} has shape {tuple(tensor.shape)}, not {spec.shape}"
        stored = tensor.detach().to(spec.dtype).contiguous()
        self._file.seek(self._start + self._offsets[name])
        self._file.write(stored.view(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Check that every tensor was written."""
        assert not self._specs, (
            f"{len(self._specs)} tensors were not written, {next(iter(self._specs))} first"
        )
