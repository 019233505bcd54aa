"""The CPU kernels in C: build, ctypes binding, and recorded call lists."""
