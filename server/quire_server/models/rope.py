"""Rotary frequencies and tables, with the scalings that Llama models use.

Called by ``models.llama`` (tables) and the GGUF import (to recognise a scaling by its effect).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch


def inverse_frequencies(head_size: int, theta: float, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """float32 [head_size / 2]. ``scaling`` in config.json's words: rope_type default, linear or llama3."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    plain = 1.0 / torch.pow(theta, exponents)
    kind = scaling["rope_type"] if scaling else "default"
    if kind == "default":
        return plain
    assert scaling is not None
    if kind == "linear":
        return plain / float(scaling["factor"])
    assert kind == "llama3", kind  # models.config lets nothing else through
    return _llama3(plain, scaling)


def tables(
    head_size: int, theta: float, scaling: Mapping[str, Any] | None, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each float32 [length, head_size / 2]."""
    angles = torch.outer(torch.arange(length).float(), inverse_frequencies(head_size, theta, scaling))
    return angles.cos(), angles.sin()


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """High frequencies stay, low ones are stretched by the factor, the band between is blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > original / low, plain / factor, plain)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, blended, stretched)
