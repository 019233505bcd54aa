"""All-reduce of small messages among GPUs that can read each other's memory, in one launch.

Each rank writes its part to memory that all of them have mapped (`one_shot_place`), sets a flag of each other
rank, and adds all parts itself: one round over the links, where a ring takes several. All ranks add in the
same order, so they get the same bits. Knows nothing of who maps the memory.
"""

import torch
from torch import Tensor

from quire_kernels.one_shot_place import OneShotPlace

if torch.cuda.is_available():
    from quire_kernels.one_shot_all_reduce_triton import one_shot_all_reduce_triton


def one_shot_all_reduce(part: Tensor, place: OneShotPlace) -> Tensor:
    """The sum of all ranks' parts, which have one shape and dtype; the part is overwritten if it is
    contiguous. For GPUs alone: `all_reduce_reference` is the reference, from the parts of all ranks.
    """
    return one_shot_all_reduce_triton(part.contiguous(), place)
