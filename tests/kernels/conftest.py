"""The CPU kernels of each instruction set that this machine runs, for tests that use the fixture."""

import sys
from collections.abc import Iterator

import pytest

from quire_kernels import NATIVE
from quire_kernels.cpu.library import LIBRARY
from quire_kernels.cpu.native import Isa, Native, choices


@pytest.fixture(scope="module", params=choices(LIBRARY) or [None])
def each_isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """All ops use the kernels of one of them."""
    isa: Isa | None = request.param
    with pytest.MonkeyPatch.context() as patch:
        if LIBRARY is not None and isa is not None and NATIVE is not None:
            native = Native(LIBRARY, isa)
            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] == "quire_kernels" and hasattr(module, "NATIVE"):
                    patch.setattr(module, "NATIVE", native)
        yield
