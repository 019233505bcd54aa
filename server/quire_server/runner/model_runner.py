"""Signature only, for now."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire_server.core.step import Step, StepResult


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What the user decides about tensors. None = decided by the model and the machine."""

    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    num_blocks_override: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None


class ModelRunner:
    num_blocks: int
    max_model_len: int  # options.max_model_len, or what model and KV cache allow
    model_config: object  # .vocab_size .max_position .eos_token_ids .dtype

    @classmethod
    def load(
        cls, model_dir: Path, options: RunnerOptions, on_progress: Callable[[int, int], None]
    ) -> "ModelRunner":
        """Read, check and place the model; on_progress(loaded bytes, total bytes) between chunks."""
        raise NotImplementedError

    def run(self, step: Step) -> StepResult:
        raise NotImplementedError
