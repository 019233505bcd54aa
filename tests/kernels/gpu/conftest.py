"""The tests run on a GPU if there is one, otherwise in Triton's interpreter on CPU tensors."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from quire_server.runner.gpu import memory_profile

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
    run = memory_profile._run
    with interpreted():
        with address_log() as log:
            # The steps that measure memory store all their tokens in the only block that there is then.
            def measured(*args: Any, **more: Any) -> None:
                with log.unread_writes("rope_kv_write_kernel"):
                    run(*args, **more)

            with patch.object(memory_profile, "_run", measured):
                yield
        assert not log.faults, "within one launch: " + ", ".join(map(str, log.faults.items()))
