"""RMS norms: of the residual stream, fused with FP8 quantization, and of query and key heads."""
