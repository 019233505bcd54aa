"""Formats of quantised checkpoints, one module each: which tensors hold a matrix, and what they mean."""
