"""Gated activation. Called by the models."""

from quire_kernels import gelu_tanh_mul, silu_mul, silu_mul_fp8

__all__ = ["gelu_tanh_mul", "silu_mul", "silu_mul_fp8"]
