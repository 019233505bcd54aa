"""Every configuration that the Triton kernels are compiled in. Imported by the ahead-of-time compile, the
docs and the tuning, and by nothing that serves.
"""

from quire_kernels import add_rmsnorm_triton

CONFIGURATIONS = (*add_rmsnorm_triton.CONFIGURATIONS,)
