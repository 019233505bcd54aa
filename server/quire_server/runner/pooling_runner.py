"""PoolingRunner: executes the steps of an engine that embeds texts. Each step has whole texts, which are
complete with it: the runner keeps nothing of a text, and the scheduler's KV blocks stand for no memory.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from quire_server.core.request import PoolingParams
from quire_server.core.step import NOT_FINITE, StartedRow, Step, StepResult
from quire_server.core.topology import Topology
from quire_server.errors import ConfigError
from quire_server.runner import oom_retry
from quire_server.runner.config import RunnerConfig
from quire_server.runner.gpu.device import Device, translate_device_errors
from quire_server.runner.model_runner import device_of
from quire_server.runner.pooling_model import LoadedPoolingModel, Text
from quire_server.runner.pooling_model import load as load_model
from quire_server.runner.structured_outputs import Grammars
from quire_server.text.grammar import Vocabulary

_BLOCK_SIZE = 256  # tokens of one of the scheduler's blocks, which only count texts here


class PoolingRunner:
    """A loaded embedder or cross-encoder."""

    max_steps_in_flight = 1

    adapters: None = None  # of models that generate

    def __init__(self, loaded: LoadedPoolingModel, options: RunnerConfig, device: Device | None) -> None:
        self._loaded = loaded
        self._device = device
        self.grammars = Grammars(_no_vocabulary)
        self.max_model_len, self.longest = loaded.max_model_len, loaded.longest
        self.dtype, self.quantization, self.stored_dtype = (
            loaded.dtype,
            loaded.quantization,
            loaded.stored_dtype,
        )
        self.vocab_size, self.embedding_size = loaded.vocab_size, loaded.size
        self.pooling = "score" if loaded.scores_pairs else "embed"
        self.block_size = _BLOCK_SIZE
        self.num_blocks = options.max_num_seqs * -(-(self.max_model_len + 1) // _BLOCK_SIZE)
        self.gpu_memory: Mapping[str, int] = {}
        if device is not None:
            self.gpu_memory = {"weights": device.memory().allocated}

    @classmethod
    def load(
        cls, model_dir: Path, options: RunnerConfig, pooling: str, on_progress: Callable[[int, int], None]
    ) -> "PoolingRunner":
        """Read, check and place the model; on_progress(loaded bytes, total bytes) between chunks."""
        with translate_device_errors("while the model is loaded"):
            device = device_of(options, Topology())
            loaded = load_model(model_dir, options, pooling, on_progress, device)
            return cls(loaded, options, device)

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self._device is not None

    @property
    def facts(self) -> Mapping[str, object]:
        """What vectors depend on beside the model's weights and the arithmetic."""
        pooling = self._loaded.pooling
        return {"pooling": pooling.pooling, "normalizes": pooling.normalizes}

    def damage_weight(self) -> None:
        """Make one weight NaN: the fault nan_weight."""
        self._loaded.model.damage_weight()

    @torch.inference_mode()
    def launch(self, step: Step) -> Callable[[], StepResult]:
        """Compute a step; the result is there when this returns."""
        started = {one.row: one for one in step.started}
        with translate_device_errors():
            return oom_retry.launch(
                step, lambda rest: self._start(rest, started), lambda row: started[row].request_id
            )

    def _start(self, step: Step, started: Mapping[int, StartedRow]) -> oom_retry.Pending:
        rows = [started[row] for row in step.rows]
        texts = [Text(row.token_ids, row.pooling or PoolingParams()) for row in rows]
        vectors = self._loaded.model(texts).cpu()
        is_finite = vectors.isfinite().all(1).tolist()
        result = StepResult(
            step.step_id,
            (0,) * len(rows),  # the token that stands for the vector
            failures={row.row: NOT_FINITE for row, fine in zip(rows, is_finite, strict=True) if not fine},
            pooled={
                row.row: self._vector(vector, text.asked)
                for row, vector, text in zip(rows, vectors, texts, strict=True)
            },
        )
        return lambda: result

    def _vector(self, vector: Tensor, asked: PoolingParams) -> bytes:
        """As f32 little-endian: its first ``dimensions`` components, then scaled to length 1."""
        kept = vector[: asked.dimensions or len(vector)]
        if self._loaded.pooling.normalizes and not self._loaded.scores_pairs:
            kept = functional.normalize(kept, dim=0)
        return kept.numpy().astype("<f4").tobytes()


def _no_vocabulary() -> Vocabulary:
    raise ConfigError("A model that embeds texts has no structured outputs.")
