"""HostExecutor: runs forward passes on a CPU, on every rank. Small steps are replays of a recording where the
model has one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire_server.core.cuda_graph_shapes import Shape
from quire_server.core.step import Step
from quire_server.layers.lora import BatchAdapters
from quire_server.layers.parallel import Communicator
from quire_server.models.decoder import Decoder
from quire_server.runner import batch_builder, exchanges, sampler
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.exchanges import Exchange
from quire_server.runner.gpu.executor import ForwardOutput, output_of
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.recorded_decode import RecordedDecode


class HostExecutor:
    """A model on the host. ``can_replay``: whether small steps may be replays; on several ranks rank 0
    decides, because all of them have to make the same exchanges.
    """

    def __init__(
        self,
        model: Decoder,
        kv_caches: tuple[Tensor, ...],
        input_batch: InputBatch,
        adapters: BatchAdapters | None = None,
    ) -> None:
        self._model, self._kv_caches, self._input_batch = model, kv_caches, input_batch
        self._adapters = adapters
        self._recorded_decode: RecordedDecode | None = None
        if model.config.topology.pipeline == 1:
            self._recorded_decode = RecordedDecode.of(
                model, kv_caches, *input_batch.block_table.shape, adapters
            )
        self.can_replay = self._recorded_decode is not None

    def graph_for(self, step: Step, layout: StepLayout) -> Shape | None:
        """The part of the recording that computes the step: one for any number of single tokens. None: layer
        by layer.
        """
        is_replay = (
            self.can_replay
            and self._recorded_decode is not None
            and not self._wants_prompt_logprobs(step, layout)
            and self._recorded_decode.takes(step)
        )
        return (step.total_tokens, 1) if is_replay else None

    def apply(self, step: Step) -> None:
        """Nothing: there is no other input batch than the host's."""

    def prepare(self, layout: StepLayout) -> None:
        """Prepare a step of decodes that may come next."""
        if self.can_replay and self._recorded_decode is not None:
            self._recorded_decode.prepare(layout, self._input_batch)

    def launch(
        self, step: Step, layout: StepLayout, graph: Shape | None, *, only_largest: bool = False
    ) -> Callable[[], ForwardOutput]:
        """Compute this rank's layers. The function returns the logits f32 of the sampled positions, and the
        requested log-probabilities of prompts; in the first of several stages it waits for them. On other
        ranks than the first, of no use. ``only_largest``: of the logits only the largest of each position.
        """
        if graph is not None:
            assert self._recorded_decode is not None
            logits = self._recorded_decode(layout, self._input_batch, only_largest=only_largest)
            output = ForwardOutput(logits.float(), None, {}, only_largest)
            return lambda: output
        model, config = self._model, self._model.config
        finish = self.output(step, layout, only_largest=only_largest)
        if self._adapters is not None:
            slots = self._input_batch.adapter_slot[layout.tokens()[0]]
            self._adapters.on_host = torch.from_numpy(slots) if (slots >= 0).any() else None
        batch = batch_builder.build(step, layout, self._input_batch, config.num_kv_heads, config.windows)
        states = model.states(batch, self._kv_caches)
        if not config.topology.is_last_stage:
            return lambda: finish(None)
        output = finish(states)
        return lambda: output

    def output(
        self, step: Step, layout: StepLayout, *, only_largest: bool
    ) -> Callable[[tuple[Tensor, Tensor] | None], ForwardOutput]:
        """As ``output_of``, for a step."""
        positions = list[sampler.PromptPositions]()
        if self._wants_prompt_logprobs(step, layout):
            positions = sampler.prompt_positions(layout, self._input_batch)
        rows = torch.from_numpy(layout.sampled)
        return output_of(self._model, positions, rows, only_largest=only_largest)

    def take_part(
        self, graph: Shape | None, communicator: Communicator, plan: Sequence[Exchange], made: int
    ) -> None:
        """Make the exchanges that are left of a pass which ran out of memory."""
        exchanges.take_part(communicator, plan[made:], torch.device("cpu"))

    def finish(self, seconds: float) -> bool:
        """Everything is computed when ``launch`` returns."""
        return True

    def _wants_prompt_logprobs(self, step: Step, layout: StepLayout) -> bool:
        wanted = self._input_batch.num_prompt_logprobs[layout.rows]
        return len(layout.sampled) < step.total_tokens and bool((wanted >= 0).any())
