"""The decoder of all model families: norm, rotary grouped-query attention, norm, feed-forward. Differences
between families are flags of ModelConfig.

``models.registry`` builds it and ``models.weights`` fills it. Knows no family.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quire_server.errors import ModelCorruptError
from quire_server.layers.attention import Attention
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.layers.linear import GpuLinear, LinearFactory, LinearLayer, LinearMaker, Weights
from quire_server.layers.norm import RMSNorm
from quire_server.layers.ops import take_partial_rows, take_rows
from quire_server.layers.parallel import Communicator, SingleRank, argmax
from quire_server.models import rope
from quire_server.models.config import LayerConfig, ModelConfig
from quire_server.models.config_fields import REMEDY
from quire_server.models.mlp import MLP, Adapt, FeedForward, GroupedSparseMLP, SparseMLP


class LayerStream(Protocol):
    """Copies weights that are not resident on the device, layer by layer."""

    @property
    def host_bytes(self) -> int:
        """Bytes copied in each step."""

    def before(self, layer: int) -> None:
        """Called before the layer is computed."""

    def after(self, layer: int) -> None:
        """Called after the layer was computed."""


class Decoder:
    """Weights and forward pass. The constructor allocates, ``targets`` maps the checkpoint's names to
    tensors, and ``finish`` is called once they are filled.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFactory,
        host_layers: Collection[int] = (),
        communicator: Communicator | None = None,
    ) -> None:
        """The matrices of ``host_layers`` are allocated on the host, to be streamed by ``stream``.
        ``communicator``: of the ranks that the configuration is one of.
        """
        self.config = config
        self._communicator = communicator or SingleRank()
        self.stream: LayerStream | None = None
        #: This stage computes without the others, to measure its memory: it receives zeros and sends nothing.
        self.is_apart = False
        make = LinearMaker(linear, dtype, device)
        # Zeros, because padding stays as it is.
        rows = config.vocab_rows if config.has_embedding else 0
        self.embedding = torch.zeros(rows, config.hidden_size, dtype=dtype, device=device)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head: LinearLayer | None = None
        if config.topology.is_last_stage:
            self.head = make(["lm_head"], config.hidden_size, [config.vocab_rows], bias=False, weight=tied)
        # Rounded to the model's dtype, as in transformers.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.norm = _norm_factory(config, dtype, device)(config.hidden_size)
        self._kv_scales: dict[str, tuple[Tensor, Tensor]] = {}
        if config.quantization is not None and config.quantization.has_kv_scales:
            for index in range(config.num_layers):
                scales = torch.empty(2, dtype=torch.float32, device=device)
                self._kv_scales[layer_name(config, index)] = (scales[0], scales[1])
        self.layers = [
            build_layer(
                config,
                index,
                dtype=dtype,
                device=device,
                linear=linear,
                kv_scales=self._kv_scales.get(layer_name(config, index)),
                communicator=self._communicator,
                matrices_on=torch.device("cpu") if index in host_layers else device,
            )
            for index in range(config.num_layers)
        ]
        self._tables = {
            layer.rope: tuple(table.to(device) for table in rope.tables(layer.rope, max_len))
            for layer in config.layers
        }

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that each forward pass copies from the host."""
        return 0 if self.stream is None else self.stream.host_bytes

    @property
    def needs_host_sync(self) -> bool:
        """Whether a forward pass waits for results on the host, which rules out CUDA graphs."""
        return any(layer.mlp.needs_host_sync for layer in self.layers)

    def targets(self) -> dict[str, Tensor]:
        """Name in the checkpoint -> the tensor or view to fill."""
        named = {"model.embed_tokens.weight": self.embedding} if self.config.has_embedding else {}
        for layer in self.layers:
            named |= layer.targets()
        for prefix, (k_scale, v_scale) in self._kv_scales.items():
            named |= {f"{prefix}.self_attn.k_scale": k_scale, f"{prefix}.self_attn.v_scale": v_scale}
        if self.head is None:
            return named
        return named | {"model.norm.weight": self.norm.weight} | self.head.targets()

    def finish(self) -> None:
        """Convert the loaded weights to the form that each layer computes with."""
        if self.head is not None:
            self.norm.finish()
            self.head.finish()
        for layer in self.layers:
            layer.finish()
        for prefix, scales in self._kv_scales.items():
            if not all(0 < scale.item() < float("inf") for scale in scales):
                raise ModelCorruptError(
                    f"{prefix}.self_attn: k_scale or v_scale is no positive number. {REMEDY}"
                )

    def __call__(self, batch: ForwardBatch, kv_caches: Sequence[Tensor]) -> Tensor:
        """Logits [S, vocab] of the sampled rows, in the model's dtype; float32 if they are capped."""
        return self.logits(self.states(batch, kv_caches), batch.sample_rows)

    def states(self, batch: ForwardBatch, kv_caches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """[T, hidden] for every token: the output of the last layer, and the residual stream that it is added
        to. With several stages those of this stage, which are then sent to the next one.
        """
        states = self.computed(batch, kv_caches, self.received(len(batch.token_ids)))
        self.pass_on(states)
        return states

    def no_states(self, num_tokens: int) -> Tensor | None:
        """Zeros in place of what the stage before sends for so many tokens; None in the first stage."""
        if self.config.topology.is_first_stage:
            return None
        shape, like = (2, num_tokens, self.config.hidden_size), self.embedding
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def received(self, num_tokens: int) -> Tensor | None:
        """[2, T, hidden]: the states of the stage before; None in the first stage."""
        topology = self.config.topology
        if self.is_apart or topology.is_first_stage:
            return self.no_states(num_tokens)
        shape = (2, num_tokens, self.config.hidden_size)
        return self._communicator.recv(shape, self.embedding.dtype, topology.previous)

    def pass_on(self, states: tuple[Tensor, Tensor]) -> None:
        """Send the states of this stage to the next one, if there is one."""
        topology = self.config.topology
        if not (self.is_apart or topology.is_last_stage):
            self._communicator.send(torch.stack(states), topology.next)

    def computed(
        self, batch: ForwardBatch, kv_caches: Sequence[Tensor], received: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The states of this stage's layers, without an exchange between stages. ``received``, from the stage
        before, is overwritten.
        """
        hidden: Tensor | None = None
        if received is not None:
            hidden, residual = received
        else:
            residual = self._embed(batch.token_ids)
        rotary = {
            kind: (take_rows(cos, batch.positions), take_rows(sin, batch.positions))
            for kind, (cos, sin) in self._tables.items()
        }
        for index, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            if self.stream is not None:
                self.stream.before(index)
            hidden = layer(hidden, residual, rotary[layer.rope], batch, kv_cache)
            if self.stream is not None:
                self.stream.after(index)
        assert hidden is not None
        return hidden, residual

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T, hidden]. A rank has the embeddings of its part of the vocabulary, zeros for others."""
        topology = self.config.topology
        if topology.tensor == 1:
            embedded = take_rows(self.embedding, token_ids)
        else:
            first = topology.tensor_rank * self.config.vocab_rows
            part = take_partial_rows(self.embedding, token_ids, first)
            embedded = self._communicator.all_reduce(part)
        if self._embedding_scale != 1.0:
            embedded *= self._embedding_scale
        return embedded

    def logits(
        self, states: tuple[Tensor, Tensor] | None, rows: Tensor, *, only_largest: bool = False
    ) -> Tensor:
        """[S, vocab] of rows i64 [S] of the states. If all rows are requested, the states are overwritten. Of
        several ranks the first has the logits, the others those of their part of the vocabulary. With several
        stages only the last one computes logits; the first rank receives them, and needs no states for it.
        ``only_largest``: as ``parallel.argmax``.
        """
        if self.head is not None:
            assert states is not None
            return self.whole_logits(self.own_logits(states, rows), only_largest=only_largest)
        shape, dtype = (rows.shape[0], self.config.vocab_size), self.logits_dtype
        if only_largest:
            shape, dtype = (rows.shape[0], 2), torch.float32
        if self.is_apart or not shape[0]:
            return torch.zeros(shape, dtype=dtype, device=self.embedding.device)
        return self._communicator.recv(shape, dtype, self.config.topology.head_rank)

    def own_logits(self, states: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
        """[S, vocab_rows]: this rank's part of ``logits``, with its padding."""
        assert self.head is not None
        hidden, residual = states
        if rows.shape[0] < hidden.shape[0]:
            hidden, residual = hidden[rows], residual[rows]
        return self.head(self.norm(hidden, residual))

    def whole_logits(self, own: Tensor, *, only_largest: bool = False) -> Tensor:
        """``logits`` from this rank's part of them."""
        topology, vocab_size = self.config.topology, self.config.vocab_size
        first = topology.tensor_rank * self.config.vocab_rows
        if only_largest:
            own = own[:, : max(0, vocab_size - first)]
        elif topology.tensor > 1:
            own = self._communicator.gather_to_leader(own)[:, :vocab_size]
        cap = self.config.logit_softcap
        logits = own if cap is None else own.float().div_(cap).tanh_().mul_(cap)
        if only_largest:
            logits = argmax(self._communicator, logits, first)
        if topology.rank == topology.head_rank != 0 and own.shape[0] and not self.is_apart:
            self._communicator.send(logits, 0)
        return logits

    @property
    def logits_dtype(self) -> torch.dtype:
        """The type of logits."""
        return self.embedding.dtype if self.config.logit_softcap is None else torch.float32


class Layer:
    """One decoder layer. ``norms``: by name in the checkpoint."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        prefix: str,
        make: LinearMaker,
        norm: "partial[RMSNorm]",
        kv_scales: tuple[Tensor, Tensor] | None,
        communicator: Communicator,
    ) -> None:
        names, hidden = config.names, config.hidden_size
        self._config, self._prefix = config, prefix
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        qkv_sizes = [q_size, kv_size, kv_size]
        self.rope = layer.rope
        self._communicator = communicator
        self.norms: dict[str, RMSNorm] = {}

        def named_norm(name: str, size: int) -> RMSNorm:
            self.norms[f"{prefix}.{name}"] = made = norm(size)
            return made

        self.input_norm = named_norm(names.input_norm, hidden)
        self.qkv = make(
            [f"{prefix}.{name}" for name in names.qkv],
            hidden,
            qkv_sizes if len(names.qkv) == 3 else [sum(qkv_sizes)],
            bias=config.qkv_bias,
        )
        head_norms = None
        if config.has_head_norms:
            head_norms = (
                named_norm(names.q_norm, config.head_size),
                named_norm(names.k_norm, config.head_size),
            )
        self.attention = Attention(
            config.attention_scale,
            window=layer.window,
            softcap=config.attention_softcap,
            norms=head_norms,
            kv_scales=kv_scales,
        )
        # Ranks add their parts, so that one of them has the bias.
        has_bias = config.output_bias and config.topology.tensor_rank == 0
        self.output = make([f"{prefix}.{names.output}"], q_size, [hidden], bias=has_bias)
        self.output_norm = self.mlp_output_norm = None
        if names.attention_output_norm is not None:
            self.output_norm = named_norm(names.attention_output_norm, hidden)
        self.mlp_norm = named_norm(names.mlp_norm, hidden)
        self.mlp = _feed_forward(config, layer, prefix, make)
        if names.mlp_output_norm is not None:
            self.mlp_output_norm = named_norm(names.mlp_output_norm, hidden)
        self._qkv_sizes, self._q_size = qkv_sizes, q_size
        self.linears: list[Weights] = [self.qkv, self.output, *self.mlp.linears]

    def adapt(self, adapt: Adapt) -> None:
        """Put LoRA adapters beside the matrices, once these are filled; beside experts there are none."""
        names, hidden, prefix = self._config.names, self._config.hidden_size, self._prefix
        sizes = self._qkv_sizes if len(names.qkv) == 3 else [sum(self._qkv_sizes)]
        self.qkv = adapt([f"{prefix}.{name}" for name in names.qkv], self.qkv, hidden, sizes)
        self.output = adapt([f"{prefix}.{names.output}"], self.output, self._q_size, [hidden])
        if isinstance(self.mlp, MLP):
            self.mlp.adapt(adapt)

    def targets(self) -> dict[str, Tensor]:
        """As in ``Decoder``."""
        named = {f"{name}.weight": norm.weight for name, norm in self.norms.items()}
        for linear in self.linears:
            named |= linear.targets()
        return named

    def finish(self) -> None:
        """As in ``Decoder``."""
        for norm in self.norms.values():
            norm.finish()
        for linear in self.linears:
            linear.finish()

    def __call__(
        self,
        hidden: Tensor | None,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        kv_cache: Tensor,
    ) -> Tensor:
        """``residual`` is the residual stream, updated in place; ``hidden`` is the output that was not added
        to it yet.
        """
        to_add = (residual, None) if hidden is None else (hidden, residual)
        qkv = self.input_norm.into(self.qkv, *to_add)
        all_reduce = self._communicator.all_reduce
        x = all_reduce(self.output(self.attention(qkv, rotary, batch, kv_cache)))
        if self.output_norm is not None:
            x = self.output_norm(x, None)
        x = all_reduce(self.mlp_norm.into(self.mlp, x, residual))
        return x if self.mlp_output_norm is None else self.mlp_output_norm(x, None)


def build_layer(
    config: ModelConfig,
    index: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    linear: LinearFactory,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    communicator: Communicator | None = None,
    matrices_on: torch.device | None = None,
) -> Layer:
    """One layer, allocated and not filled. A decoder has all of them; ``quantize`` has one at a time."""
    return Layer(
        config,
        config.layers[index],
        layer_name(config, index),
        LinearMaker(linear, dtype, matrices_on or device),
        _norm_factory(config, dtype, device),
        kv_scales,
        communicator or SingleRank(),
    )


def layer_name(config: ModelConfig, index: int) -> str:
    """The name in the checkpoint of the layer with this index in the configuration."""
    return f"model.layers.{config.first_layer + index}"


def _feed_forward(config: ModelConfig, layer: LayerConfig, prefix: str, make: LinearMaker) -> FeedForward:
    names = config.names
    if layer.is_sparse:
        assert config.experts is not None
        if make.factory is GpuLinear and config.activation == "silu" and not config.mlp_bias:
            return GroupedSparseMLP(config, config.experts, prefix, make)
        return SparseMLP(config, config.experts, prefix, make)
    gate_up = [f"{prefix}.{name}" for name in names.gate_up]
    return MLP(config, gate_up, f"{prefix}.{names.down}", config.intermediate_size, make)


def _norm_factory(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> "partial[RMSNorm]":
    return partial(
        RMSNorm, eps=config.norm_eps, is_offset=config.has_offset_norms, dtype=dtype, device=device
    )
