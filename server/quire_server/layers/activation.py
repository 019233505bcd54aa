"""Gated activation. Called by the models."""

from quire_kernels import gelu_tanh_mul, silu_mul

__all__ = ["gelu_tanh_mul", "silu_mul"]
