"""GpuExecutor: runs forward passes on a GPU without waiting for it.

Decode steps are replays of CUDA graphs where one of the shape was captured, and so are small steps with
prompt chunks, whose tokens are sequences of their own then. Larger ones are launched kernel by kernel, which
costs little compared with what they compute. All rows are sampled on the GPU. Of several ranks the graphs end
with each one's logits: how much of these is exchanged depends on the step. Of several stages each has graphs
of its layers; what stages exchange is exchanged before and after them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core import cuda_graph_shapes
from quire_server.core.cuda_graph_shapes import Shape
from quire_server.core.step import Step, TokenLogprobs
from quire_server.core.watermark import Watermark
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.layers.lora import BatchAdapters
from quire_server.layers.parallel import Communicator
from quire_server.models.decoder import Decoder
from quire_server.runner import batch_builder, exchanges
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.exchanges import Exchange, Kind
from quire_server.runner.gpu import logits_edits, sampler
from quire_server.runner.gpu.cuda_graphs import CudaGraphs
from quire_server.runner.gpu.device import Device, Outputs, upload_together
from quire_server.runner.gpu.input_batch import GpuInputBatch
from quire_server.runner.gpu.sampler import Sampled
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.sampler import PromptPositions, prompt_logprobs, prompt_positions


class ForwardOutput(NamedTuple):
    """The result of a forward pass, valid until the next one."""

    logits: Tensor  # f32 [S, vocab]
    tokens: Tensor | None  # i64 [S] sampled without logits processors, if the pass did
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]  # by row, where requested
    has_largest: bool = False  # instead of all logits f32 [S, 2]: the largest one, and its token


def output_of(
    model: Decoder, positions: Sequence[PromptPositions], rows: Tensor, *, only_largest: bool
) -> Callable[[tuple[Tensor, Tensor] | None], ForwardOutput]:
    """A function from the states of the last layer to the output for sampled ``rows`` and prompt
    ``positions``, which may be called when rows have other requests. Without states it receives what the last
    stage computes.
    """

    def finish(states: tuple[Tensor, Tensor] | None) -> ForwardOutput:
        found = prompt_logprobs(model, states, positions)
        logits = model.logits(states, rows, only_largest=only_largest)
        return ForwardOutput(logits.float(), None, found, only_largest)

    return finish


class GpuExecutor:
    """A model on a GPU with its part of the input batch.

    ``num_drafts``: the most that a row has in a step. ``adapters``: what is set for each pass, where the
    model has any. ``is_draft``: a draft model. Input tokens may be beyond its vocabulary, and it computes no
    prompt logprobs. Of several ranks only the first samples, after the graph: the others have the logits of
    their part of the vocabulary.
    """

    def __init__(
        self,
        model: Decoder,
        kv_caches: tuple[Tensor, ...],
        input_batch: InputBatch,
        device: Device,
        *,
        num_drafts: int = 0,
        is_draft: bool = False,
        adapters: BatchAdapters | None = None,
        watermark: Watermark | None = None,
    ) -> None:
        self._model, self._kv_caches, self._input_batch, self._device = model, kv_caches, input_batch, device
        self._is_draft, self._adapters, self._watermark = is_draft, adapters, watermark
        self.num_drafts = num_drafts
        self._state = GpuInputBatch(input_batch, device)
        self._graphs = CudaGraphs(device)
        self._is_whole = model.config.topology.size == 1
        self._has_replayed = False  # in the current pass
        self.can_replay = True  # whether decode steps may be replays; on several ranks rank 0 decides
        self.graph_bytes = 0  # memory of the captured graphs

    @property
    def graph_shapes(self) -> tuple[Shape, ...]:
        """Those that are captured."""
        return cuda_graph_shapes.shapes(len(self._input_batch.tokens), self.num_drafts)

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled here: by the model's first rank."""
        return self._model.config.topology.is_leader

    def apart(self) -> tuple["GpuExecutor", InputBatch]:
        """An executor of the same model with the same caches, and a batch of its own."""
        num_rows, max_len = self._input_batch.tokens.shape
        input_batch = InputBatch(num_rows, max_len, self._input_batch.block_size)
        made = GpuExecutor(
            self._model, self._kv_caches, input_batch, self._device, num_drafts=self.num_drafts,
            is_draft=self._is_draft, adapters=self._adapters, watermark=self._watermark,
        )  # fmt: skip
        return made, input_batch

    @contextmanager
    def without_other_stages(self) -> Iterator[None]:
        """Within it a stage computes alone."""
        self._model.is_apart = True
        yield
        self._model.is_apart = False

    @torch.inference_mode()
    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture decode steps of all shapes that the batch can have."""
        shapes = self.graph_shapes
        before = self._device.memory().reserved
        model, padding = self._model, self._state.padding
        self._graphs.capture(shapes, padding, self._decode, model.no_states, on_progress)
        self.graph_bytes = self._device.memory().reserved - before

    def apply(self, step: Step) -> None:
        """Apply the step's differences, after the host's input batch did."""
        self._state.apply(step)

    def prepare(self, layout: StepLayout) -> None:
        """Nothing: the device's arrays are filled in by its own operations, after the step before."""

    def graph_for(self, step: Step, layout: StepLayout) -> Shape | None:
        """The shape of the graph that computes the step; None: kernel by kernel."""
        if not self.can_replay:
            return None
        if cuda_graph_shapes.is_uniform(step):
            return self._graphs.shape_for(step.num_tokens)
        if not (self._is_whole and cuda_graph_shapes.is_small(step)) or self._prompt_positions(step, layout):
            return None
        return self._graphs.shape_for((1,) * step.total_tokens)

    def compute(self, step: Step, layout: StepLayout, graph: Shape | None) -> ForwardOutput:
        """Run the forward pass of a whole model; a decode step, and a replay, also sample."""
        return self.launch(step, layout, graph)()

    def launch(
        self, step: Step, layout: StepLayout, graph: Shape | None, *, only_largest: bool = False
    ) -> Callable[[], ForwardOutput]:
        """Run the forward pass of this rank's part. The function returns the output; in the first of several
        stages it waits for the last one. On other ranks than the first, of no use. ``only_largest``: of the
        logits only the largest of each position.
        """
        self._has_replayed = False
        if graph is not None or cuda_graph_shapes.is_uniform(step):
            return self._launch_decode(step, layout, graph, only_largest=only_largest)
        config = self._model.config
        built = batch_builder.build(step, layout, self._input_batch, config.num_kv_heads, config.windows)
        token_rows = self._device.upload(np.repeat(layout.rows, layout.ends - layout.starts))
        uploaded = self._uploaded(built)
        known = self._state.known(uploaded.token_ids, token_rows)
        uploaded = dataclasses.replace(uploaded, token_ids=self._embeddable(known))
        if self._adapters is not None:
            self._adapters.group(self._state.adapter_slot[token_rows])
        states = self._model.states(uploaded, self._kv_caches)
        positions = self._prompt_positions(step, layout)
        finish = output_of(self._model, positions, uploaded.sample_rows, only_largest=only_largest)
        if not config.topology.is_last_stage:
            return lambda: finish(None)
        output = finish(states)
        return lambda: output

    def output(
        self, step: Step, layout: StepLayout, *, only_largest: bool
    ) -> Callable[[tuple[Tensor, Tensor] | None], ForwardOutput]:
        """As ``output_of``, for a step."""
        rows = torch.from_numpy(layout.sampled)
        return output_of(self._model, self._prompt_positions(step, layout), rows, only_largest=only_largest)

    def take_part(
        self, graph: Shape | None, communicator: Communicator, plan: Sequence[Exchange], made: int
    ) -> None:
        """Make the exchanges that are left of a pass which ran out of memory. The sums of a graph are made by
        a graph on all ranks or on none, so it is replayed on padding, which allocates nothing.
        """
        if graph is None:
            exchanges.take_part(communicator, plan[made:], self._device.place)
            return
        rest = [each for each in plan if each.kind is not Kind.SUM][made:]
        before = [each for each in rest if each.kind is Kind.RECV]
        exchanges.take_part(communicator, before, self._device.place)
        if not self._has_replayed:
            self._graphs.replay_padding(graph)
        exchanges.take_part(communicator, rest[len(before) :], self._device.place)

    def finish(self, seconds: float) -> bool:
        """Wait until everything that was launched is computed; False: it was not within ``seconds``."""
        return self._device.finish(seconds)

    @property
    def place(self) -> torch.device:
        """Where the model is."""
        return self._device.place

    def upload(self, array: NDArray[Any]) -> Tensor:
        """Copy an array to the GPU."""
        return self._device.upload(array)

    def sample(
        self,
        computed: ForwardOutput,
        row_ids: NDArray[np.int64],
        ends: NDArray[np.int64],
        constrain: Callable[[Tensor], None] | None = None,
    ) -> Callable[[], Sampled]:
        """The returned function waits for the tokens of the sampled positions, at context lengths ``ends`` of
        rows. ``constrain``: masks the logits in place by the grammars.
        """
        input_batch, upload, download = self._input_batch, self._device.upload, self._device.download
        logits = computed.logits
        if computed.has_largest:
            wait = download(sampler.likeliest(logits, self._state, upload(row_ids)))
            return lambda: Sampled(wait(), {})
        wanted = input_batch.num_logprobs[row_ids]
        asking = np.flatnonzero((wanted >= 0) & (not self._is_draft))
        places = upload(asking)
        raw = logits[places] if asking.size else None  # before they are changed
        tokens = computed.tokens
        if tokens is None or sampler.wants_more(input_batch, row_ids, ends):
            if constrain is not None:
                constrain(logits)
            tokens = self._choose(logits, row_ids, ends)
        wait = download(tokens)
        if raw is None:
            return lambda: Sampled(wait(), {})
        logprobs = sampler.logprobs_of(raw, tokens[places], asking, wanted[asking], download)
        return lambda: Sampled(wait(), logprobs())

    def _choose(self, logits: Tensor, row_ids: NDArray[np.int64], ends: NDArray[np.int64]) -> Tensor:
        """Tokens i64 [S] by all sampling parameters of the rows but grammars; changes the logits f32 [S, V]
        in place.
        """
        input_batch, upload = self._input_batch, self._device.upload
        eos_ids = self._model.config.eos_token_ids
        edits = logits_edits.plan(input_batch, row_ids, ends, eos_ids, logits.shape[1], self._watermark)
        if self._is_draft:  # its passes skip tokens of a context, and it drafts some that come to nothing
            self._state.forget_contexts(row_ids)
        edits.before_penalties(logits, upload)
        sampler.penalise(logits, self._state, input_batch, row_ids, ends, upload)
        edits.after_penalties(logits, upload)
        index, lengths = upload_together(upload, row_ids, ends)
        return sampler.choose(logits, self._state, index, lengths)

    def _launch_decode(
        self, step: Step, layout: StepLayout, graph: Shape | None, *, only_largest: bool
    ) -> Callable[[], ForwardOutput]:
        """A decode step: the last tokens of each row as one sequence, or as separate sequences where less is
        padding. Or a small step with prompts, all of whose tokens are separate sequences.
        """
        shape = graph or cuda_graph_shapes.eager_shape(step.num_tokens, self.num_drafts)
        rows, starts, counts = layout.rows, layout.starts, layout.ends - layout.starts
        if shape[1] == 1:
            rows, starts = layout.tokens()
            counts = np.ones_like(rows)
        entries, is_real = self._state.entries(rows, starts, counts, shape)
        given = self._device.upload(entries)
        received = self._model.received(shape[0] * shape[1])
        outputs = self._decode(given, received) if graph is None else self._graphs.replay(given, received)
        self._has_replayed = graph is not None
        if not self._model.config.topology.is_last_stage:
            self._model.pass_on(outputs)
            finish = self.output(step, layout, only_largest=only_largest)
            return lambda: finish(None)
        output = self._decoded(outputs, layout, is_real, only_largest=only_largest)
        return lambda: output

    def _decoded(
        self, outputs: Outputs, layout: StepLayout, is_real: NDArray[np.bool_], *, only_largest: bool
    ) -> ForwardOutput:
        (logits, tokens), count = outputs, len(layout.sampled)
        places = np.flatnonzero(is_real)[layout.sampled]
        if (places == np.arange(count)).all():
            logits, tokens = logits[:count], tokens[:count]
        else:
            wanted = self._device.upload(places)
            logits, tokens = logits[wanted], tokens[wanted]
        if self._is_whole:
            if count and count < is_real.sum():  # the graph stored a token of any position of a prompt
                self._state.store(layout.sampled_rows, tokens)
            return ForwardOutput(logits, tokens, {})
        logits = self._model.whole_logits(logits, only_largest=only_largest)
        return ForwardOutput(logits.float(), None, {}, only_largest)

    def _decode(self, entries: Tensor, received: Tensor | None) -> Outputs:
        """(logits, tokens) of a whole model. Of a rank of several (its logits, nothing) in the last stage, in
        others the states.
        """
        batch = self._state.batch(entries, self._model.config)
        given = self._embeddable(batch.token_ids)
        batch = dataclasses.replace(batch, token_ids=given)
        rows, starts, _ = entries.flatten(1)
        if self._adapters is not None:
            self._adapters.group(self._state.adapter_slot[rows])
        states = self._model.computed(batch, self._kv_caches, received)
        if not self._model.config.topology.is_last_stage:
            return states
        own = self._model.own_logits(states, batch.sample_rows)
        if not self._is_whole:
            return own, rows
        logits = self._model.whole_logits(own).float()
        return logits, sampler.choose(logits, self._state, rows, starts + 1)

    def _prompt_positions(self, step: Step, layout: StepLayout) -> list[PromptPositions]:
        """Those whose log-probabilities are requested."""
        wanted = self._input_batch.num_prompt_logprobs[layout.rows]
        is_none = self._is_draft or cuda_graph_shapes.is_uniform(step) or not (wanted >= 0).any()
        return [] if is_none else prompt_positions(layout, self._input_batch)

    def _embeddable(self, token_ids: Tensor) -> Tensor:
        return token_ids.clamp(max=self._model.config.vocab_size - 1) if self._is_draft else token_ids

    def _uploaded(self, built: ForwardBatch) -> ForwardBatch:
        tensors: dict[str, Any] = {
            field.name: self._device.upload(value.numpy())
            for field in dataclasses.fields(built)
            if isinstance(value := getattr(built, field.name), Tensor)
        }
        return dataclasses.replace(built, **tensors)
