"""Linear layers of a model on a GPU: a ``LinearFactory``, chosen by ``runner.quantization``."""

from quire_server.layers.linear import Linear


class GpuLinear(Linear):
    """Dense; ``layers.quantized`` puts layers beside it that multiply what a checkpoint holds as it is."""
