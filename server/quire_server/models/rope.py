"""Rotary frequencies and tables, with the scalings of the model families."""

import math

import torch

from quire_server.models.rope_config import Rope


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """float32 [rope.size / 2]."""
    exponents = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    powers = torch.pow(rope.theta, exponents)
    match rope.kind:
        case "linear":
            return 1.0 / powers / rope.factor
        case "llama3":
            return _llama3(1.0 / powers, rope)
        case "yarn":
            return _yarn(powers, rope)
        case "longrope":
            return 1.0 / (torch.tensor(rope.divisors) * powers)
    return 1.0 / powers


def tables(rope: Rope, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each float32 [length, rope.size / 2]."""
    angles = torch.outer(torch.arange(length).float(), inverse_frequencies(rope))
    return angles.cos() * rope.amplitude, angles.sin() * rope.amplitude


def _llama3(plain: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Keep high frequencies, divide low ones by the factor, and blend in between."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > original / low, plain / rope.factor, plain)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, blended, stretched)


def _yarn(powers: torch.Tensor, rope: Rope) -> torch.Tensor:
    """NTK by parts (arXiv:2309.00071 section 3.2): a ramp between the dimensions that rotate beta_fast and
    beta_slow times within the original context.
    """

    def dimension(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rope.size * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    width = high - low or 0.001
    stretching = ((torch.arange(rope.size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretching / (rope.factor * powers) + (1 - stretching) / powers
