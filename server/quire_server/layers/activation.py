"""Gated activation. Called by the models."""

from quire_kernels import silu_mul

__all__ = ["silu_mul"]
