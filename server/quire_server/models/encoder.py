"""The bidirectional encoder of BERT and XLM-RoBERTa: embeddings with absolute positions, then blocks of
attention and feed-forward with a norm after each.

``build`` allocates it and ``models.weights`` fills it, as for a decoder. Knows no tokenizer and no pooling.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quire_server.layers.linear import LinearFactory, LinearLayer, LinearMaker
from quire_server.layers.ops import bidirectional_attention
from quire_server.models.encoder_config import EncoderConfig

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class LayerNorm:
    """A norm with weight and bias, after the residual add."""

    def __init__(self, name: str, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self._name, self._eps = name, eps
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.bias = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)

    def targets(self) -> dict[str, Tensor]:
        """Name in the checkpoint -> the tensor to fill."""
        return {f"{self._name}.weight": self.weight, f"{self._name}.bias": self.bias}


class EncoderLayer:
    """One block."""

    def __init__(
        self, config: EncoderConfig, prefix: str, make: LinearMaker, norm: "partial[LayerNorm]"
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._shape = (3, config.num_heads, config.head_size)
        self._activate = _ACTIVATIONS[config.activation]
        names = [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")]
        self._qkv = make(names, hidden, [hidden] * 3, bias=True)
        self._output = make([f"{prefix}.attention.output.dense"], hidden, [hidden], bias=True)
        self._up = make([f"{prefix}.intermediate.dense"], hidden, [inner], bias=True)
        self._down = make([f"{prefix}.output.dense"], inner, [hidden], bias=True)
        self.linears = [self._qkv, self._output, self._up, self._down]
        self._attention_norm = norm(f"{prefix}.attention.output.LayerNorm", hidden)
        self._norm = norm(f"{prefix}.output.LayerNorm", hidden)
        self.norms = [self._attention_norm, self._norm]

    def __call__(self, x: Tensor, bounds: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = self._qkv(x).unflatten(1, self._shape).unbind(1)
        attended = bidirectional_attention(q, k, v, bounds, lengths, self._shape[2] ** -0.5).flatten(1)
        x = self._attention_norm(self._output(attended) + x)
        return self._norm(self._down(self._activate(self._up(x))) + x)


class Encoder:
    """Weights and forward pass of packed texts."""

    def __init__(
        self, config: EncoderConfig, *, dtype: torch.dtype, device: torch.device, linear: LinearFactory
    ) -> None:
        self.config = config
        make = LinearMaker(linear, dtype, device)
        norm = partial(LayerNorm, eps=config.norm_eps, dtype=dtype, device=device)
        rows = {
            "word_embeddings": config.vocab_size,
            "position_embeddings": config.position_rows,
            "token_type_embeddings": config.type_vocab_size,
        }
        self._tables = {
            name: torch.empty(count, config.hidden_size, dtype=dtype, device=device)
            for name, count in rows.items()
        }
        self.norm = norm(f"{config.prefix}embeddings.LayerNorm", config.hidden_size)
        self.layers = [
            EncoderLayer(config, f"{config.prefix}encoder.layer.{index}", make, norm)
            for index in range(config.num_layers)
        ]
        hidden = config.hidden_size
        self._head: list[LinearLayer] = []
        if config.head == "bert":
            self._head = [
                make(["bert.pooler.dense"], hidden, [hidden], bias=True),
                make(["classifier"], hidden, [1], bias=True),
            ]
        elif config.head == "roberta":
            self._head = [
                make(["classifier.dense"], hidden, [hidden], bias=True),
                make(["classifier.out_proj"], hidden, [1], bias=True),
            ]

    @property
    def ignored(self) -> tuple[str, ...]:
        """Tensors that a checkpoint may have and that are not read."""
        prefix = self.config.prefix
        pooler = () if self.config.head else ("pooler.dense.weight", "pooler.dense.bias")
        return (
            tuple(prefix + name for name in ("embeddings.position_ids", "embeddings.token_type_ids")) + pooler
        )

    def targets(self) -> dict[str, Tensor]:
        """Name in the checkpoint -> the tensor or view to fill."""
        named = {
            f"{self.config.prefix}embeddings.{name}.weight": table for name, table in self._tables.items()
        }
        for norm in (self.norm, *(each for layer in self.layers for each in layer.norms)):
            named |= norm.targets()
        for linear in self._linears:
            named |= linear.targets()
        return named

    def finish(self) -> None:
        """Convert the loaded weights to the form that each layer computes with."""
        for linear in self._linears:
            linear.finish()

    @property
    def _linears(self) -> list[LinearLayer]:
        return [*(each for layer in self.layers for each in layer.linears), *self._head]

    def states(
        self, token_ids: Tensor, positions: Tensor, token_types: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        """[T, hidden] of the last layer. i64 [T] each; positions count from 0 in each text."""
        words, places, types = self._tables.values()
        x = words[token_ids] + types[token_types] + places[positions + self.config.first_position]
        x = self.norm(x)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(x.device)
        for layer in self.layers:
            x = layer(x, bounds, lengths)
        return x

    def scores(self, first_states: Tensor) -> Tensor:
        """[B, 1]: a cross-encoder's score of each pair, from the states [B, hidden] of its first token."""
        dense, out = self._head
        scores = out(torch.tanh(dense(first_states))).float()
        return torch.sigmoid(scores) if self.config.has_sigmoid else scores
