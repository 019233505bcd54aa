"""Settings of the runner, before the model is known."""

from dataclasses import dataclass
from pathlib import Path

from quire_server.core.watermark import Watermark


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """None means that the model and the machine decide."""

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
    watermark: Watermark | None = None  # for requests with "watermark": true
    speculative_model: Path | None = None
    num_speculative_tokens: int = 0  # at most, per row and step; 0: no speculation
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    tensor_parallel_size: int = 1  # bytes of caches are those of all ranks together
    pipeline_parallel_size: int = 1
    cpu_offload_gb: float = 0.0  # GiB of layer weights kept in the host's memory
    shares_kv_cache: bool = False  # among ranks, and with processes of the host that are given it to read
    max_adapters: int = 0  # LoRA adapters on the device at once
    max_adapter_rank: int = 16
    kv_staging_bytes: int = 0  # on a GPU: of the host's memory that is shared in place of the cache
