"""Quantized linear layers (FP8, INT8, 4-bit weights) and the quantization of their inputs."""
