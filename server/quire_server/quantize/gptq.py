"""GPTQ (arXiv:2210.17323): four bits, column after column, each group's range cut where that loses least
when its turn comes.
"""

from quire_server.layers.quantized.format import Rounded
from quire_server.quantize.block import Block
from quire_server.quantize.grid import in_groups
from quire_server.quantize.watched import Watched


def quantise(block: Block) -> dict[Watched, Rounded]:
    """Each matrix by the inputs that it had."""
    return {linear: in_groups(block, linear.weight, linear.inputs.second) for linear in block.linears}
