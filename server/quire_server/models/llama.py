"""Dense decoders of the Llama shape: RMS norm, rotary grouped-query attention, gated MLP; biases and tying
as flags.

Built by ``models.registry``, filled by ``models.weights``, called by ``runner.model_runner``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quire_server.layers.activation import silu_mul
from quire_server.layers.attention import Attention
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.layers.linear import Linear
from quire_server.layers.norm import RMSNorm
from quire_server.models import rope
from quire_server.models.config import ModelConfig


class Llama:
    """Weights and forward pass. The constructor allocates; ``targets`` says where each tensor belongs."""

    def __init__(
        self, config: ModelConfig, *, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
        self.layers = [_Layer(config, dtype=dtype, device=device) for _ in range(config.num_layers)]
        tables = rope.tables(config.head_size, config.rope_theta, config.rope_scaling, max_len)
        self.cos, self.sin = (table.to(device) for table in tables)

    def targets(self) -> dict[str, Tensor]:
        """Name in the checkpoint -> the tensor or view to fill."""
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            named["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            named |= layer.targets(f"model.layers.{index}")
        return named

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
        return functional.linear(self.norm(hidden, residual), self.head).float()


class _Layer:
    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        hidden, bias = config.hidden_size, config.attention_bias
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        inner, mlp_bias = config.intermediate_size, config.mlp_bias
        self.input_norm = RMSNorm(hidden, config.norm_eps, dtype=dtype, device=device)
        self.qkv = Linear(hidden, [q_size, kv_size, kv_size], bias=bias, dtype=dtype, device=device)
        self.attention = Attention(config.head_size)
        self.output = Linear(q_size, [hidden], bias=bias, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(hidden, config.norm_eps, dtype=dtype, device=device)
        self.gate_up = Linear(hidden, [inner, inner], bias=mlp_bias, dtype=dtype, device=device)
        self.down = Linear(inner, [hidden], bias=mlp_bias, dtype=dtype, device=device)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        attention = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        return (
            {
                f"{prefix}.input_layernorm.weight": self.input_norm.weight,
                f"{prefix}.post_attention_layernorm.weight": self.mlp_norm.weight,
            }
            | self.qkv.targets(attention)
            | self.output.targets([f"{prefix}.self_attn.o_proj"])
            | self.gate_up.targets([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"])
            | self.down.targets([f"{prefix}.mlp.down_proj"])
        )

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
