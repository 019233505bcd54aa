"""HostExecutor: runs forward passes on a CPU, on every rank. Small steps are replays of a recording where the
model has one.
"""

from torch import Tensor

from quire_server.core.step import Step
from quire_server.models.decoder import Decoder
from quire_server.runner import batch_builder, sampler
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.gpu.executor import ForwardOutput
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.recorded_decode import RecordedDecode


class HostExecutor:
    """A model on the host. ``can_replay``: whether small steps may be replays; on several ranks rank 0
    decides, because all of them have to make the same exchanges.
    """

    def __init__(self, model: Decoder, kv_caches: tuple[Tensor, ...], input_batch: InputBatch) -> None:
        self._model, self._kv_caches, self._input_batch = model, kv_caches, input_batch
        self._recorded_decode = RecordedDecode.of(model, kv_caches, *input_batch.block_table.shape)
        self.can_replay = self._recorded_decode is not None

    def replays(self, step: Step, layout: StepLayout) -> bool:
        """Whether to compute the step by a replay."""
        return (
            self.can_replay
            and self._recorded_decode is not None
            and not self._wants_prompt_logprobs(step, layout)
            and self._recorded_decode.takes(step)
        )

    def compute(self, step: Step, layout: StepLayout, *, is_replay: bool) -> ForwardOutput:
        """The logits f32 of the sampled positions, and the requested log-probabilities of prompts. On other
        ranks than the first, of no use.
        """
        if is_replay:
            assert self._recorded_decode is not None
            return ForwardOutput(self._recorded_decode(layout, self._input_batch).float(), None, {})
        model, config = self._model, self._model.config
        batch = batch_builder.build(step, layout, self._input_batch, config.num_kv_heads, config.windows)
        states = model.states(batch, self._kv_caches)
        found = {}
        if self._wants_prompt_logprobs(step, layout):
            found = sampler.prompt_logprobs(model, states, layout, self._input_batch)
        return ForwardOutput(model.logits(states, batch.sample_rows).float(), None, found)

    def _wants_prompt_logprobs(self, step: Step, layout: StepLayout) -> bool:
        wanted = self._input_batch.num_prompt_logprobs[layout.rows]
        return len(layout.sampled) < step.total_tokens and bool((wanted >= 0).any())
