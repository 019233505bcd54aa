"""Kernels run on the device where there is one, otherwise in the interpreter, on CPU tensors."""

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # it is made for the pinned versions, which a GPU's machine need not have
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
    with interpreted():
        yield
