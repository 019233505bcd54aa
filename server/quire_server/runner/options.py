"""What the user decides about tensors, before the model is known."""

from dataclasses import dataclass
from pathlib import Path

from quire_server.core.watermark import Watermark


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """None = decided by the model and the machine."""

    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "auto"
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    num_blocks_override: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    kv_offload_host_bytes: int = 0
    kv_offload_disk_path: Path | None = None
    kv_offload_disk_bytes: int = 0
    watermark: Watermark | None = None  # of the requests that ask for one
    speculative_model: Path | None = None
    num_speculative_tokens: int = 0  # drafts of a row at most; 0: nobody drafts
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    cpu_offload_gb: float = 0.0  # GiB of layers' weights that stay on the host
