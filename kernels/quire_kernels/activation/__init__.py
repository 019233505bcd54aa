"""Gated activations of the MLP, with and without FP8 quantization of the result."""
