"""The tests run on a GPU if there is one, otherwise in Triton's interpreter on CPU tensors."""

from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from quire_server.runner.gpu import memory_profile, warm_up

if not torch.cuda.is_available():  # it patches the pinned triton version; a GPU machine may have another one
    from tests.kernels.gpu.address_log import address_log
    from tests.kernels.gpu.interpreter import interpreted


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _launched(device: str) -> Iterator[None]:
    torch.manual_seed(0)
    if device == "cuda":
        yield
        return
    with interpreted(), ExitStack() as stack:
        log = stack.enter_context(address_log())
        # Steps that measure memory, or compile, store all their tokens in the first block.
        for module in (memory_profile, warm_up):
            run = log.unread_writes(module._run, "rope_kv_write_kernel")
            stack.enter_context(patch.object(module, "_run", run))
        yield
        assert not log.faults, "within one launch: " + ", ".join(map(str, log.faults.items()))
