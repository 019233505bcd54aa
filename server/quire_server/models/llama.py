"""Dense decoders of the Llama shape: RMS norm, rotary grouped-query attention, gated MLP; biases and tying
as flags.

Built by ``models.registry``, filled by ``models.weights``, called by ``runner.model_runner``.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quire_server.layers.activation import silu_mul
from quire_server.layers.attention import Attention
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.layers.linear import Linear, LinearFactory, LinearLayer
from quire_server.layers.norm import RMSNorm
from quire_server.models import rope
from quire_server.models.config import ModelConfig


class Llama:
    """Weights and forward pass. The constructor allocates; ``targets`` says where each tensor belongs, and
    ``finish`` is called once they are filled.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFactory = Linear,
    ) -> None:
        self.config = config
        make = partial(linear, dtype=dtype, device=device)
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = make(["lm_head"], config.hidden_size, [config.vocab_size], bias=False, weight=tied)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
        self.layers = [
            _Layer(config, f"model.layers.{index}", make, dtype=dtype, device=device)
            for index in range(config.num_layers)
        ]
        tables = rope.tables(config.head_size, config.rope_theta, config.rope_scaling, max_len)
        self.cos, self.sin = (table.to(device) for table in tables)

    def targets(self) -> dict[str, Tensor]:
        """Name in the checkpoint -> the tensor or view to fill."""
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        for layer in self.layers:
            named |= layer.norm_targets()
        for linear in self._linears():
            named |= linear.targets()
        return named

    def finish(self) -> None:
        """The weights are there: let every linear layer bring them into its own form."""
        for linear in self._linears():
            linear.finish()

    def _linears(self) -> list[LinearLayer]:
        return [self.head, *(linear for layer in self.layers for linear in layer.linears)]

    def __call__(self, batch: ForwardBatch, kv_caches: Sequence[Tensor]) -> Tensor:
        """Logits float32 [S, vocab] of the rows to sample."""
        residual = functional.embedding(batch.token_ids, self.embedding)
        rotary = (self.cos[batch.positions], self.sin[batch.positions])
        hidden: Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, residual, rotary, batch, kv_cache)
        assert hidden is not None
        if batch.sample_rows.shape[0] < hidden.shape[0]:
            hidden, residual = hidden[batch.sample_rows], residual[batch.sample_rows]
        return self.head(self.norm(hidden, residual)).float()


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        make: Callable[..., LinearLayer],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden, bias = config.hidden_size, config.attention_bias
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        inner, mlp_bias = config.intermediate_size, config.mlp_bias
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.prefix = prefix
        self.input_norm = RMSNorm(hidden, config.norm_eps, dtype=dtype, device=device)
        self.qkv = make(
            [f"{attention}.{part}_proj" for part in "qkv"], hidden, [q_size, kv_size, kv_size], bias=bias
        )
        self.attention = Attention(config.head_size**-0.5)
        self.output = make([f"{attention}.o_proj"], q_size, [hidden], bias=bias)
        self.mlp_norm = RMSNorm(hidden, config.norm_eps, dtype=dtype, device=device)
        self.gate_up = make([f"{mlp}.gate_proj", f"{mlp}.up_proj"], hidden, [inner, inner], bias=mlp_bias)
        self.down = make([f"{mlp}.down_proj"], inner, [hidden], bias=mlp_bias)
        self.linears = [self.qkv, self.output, self.gate_up, self.down]

    def norm_targets(self) -> dict[str, Tensor]:
        return {
            f"{self.prefix}.input_layernorm.weight": self.input_norm.weight,
            f"{self.prefix}.post_attention_layernorm.weight": self.mlp_norm.weight,
        }

    def __call__(
        self,
        hidden: Tensor | None,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        kv_cache: Tensor,
    ) -> Tensor:
        """``residual`` is the stream, updated in place; ``hidden`` what is still to be added to it."""
        x = self.input_norm(residual, None) if hidden is None else self.input_norm(hidden, residual)
        x = self.output(self.attention(self.qkv(x), rotary, batch, kv_cache))
        return self.down(silu_mul(self.gate_up(self.mlp_norm(x, residual))))
