"""A forward pass as one list of native calls. Called by ``runner.static_decode``."""

from quire_kernels import Recording, record

__all__ = ["Recording", "record"]
