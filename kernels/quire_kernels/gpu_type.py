"""How entries of `tuned` name a GPU and what a cache holds. Called by the kernels that have such entries."""

import torch

# What a type is called among those of a kernel's pointers.
POINTERS = {"bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv", "int8": "i8"}


def capability(device: torch.device) -> int:
    """90 of an H100 or H200; 0 where there is none, as in the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def type_name(dtype: torch.dtype) -> str:
    """bfloat16, float8_e4m3fn, ..."""
    return str(dtype).removeprefix("torch.")
