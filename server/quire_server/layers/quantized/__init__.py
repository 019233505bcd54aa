"""Formats of quantised checkpoints, one module each: the tensors that hold a matrix, and their meaning."""
