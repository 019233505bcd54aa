"""All measurements that need a GPU, by one command, `make bench-gpu`: kernel tests, tuning, rooflines, whole
models, and the gain of CUDA graphs and of asynchronous scheduling. Uses neither a network nor HTTP. A tiny
form of it runs on a CPU in the tests, so that it is known to work before there is a GPU.
"""
