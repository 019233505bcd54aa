"""The parts of the runner that need a GPU: device interface, CUDA graphs, sampling, memory profile."""
