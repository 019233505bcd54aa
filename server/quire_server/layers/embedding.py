"""Rows of a table by their numbers. Called by the models."""

from quire_kernels import take_rows

__all__ = ["take_rows"]
