"""Windows of a text, each computed by a model from position 0 without a scheduler, for measurements on
texts.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire_server.core.step import Step
from quire_server.errors import ConfigError
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.runner import batch_builder, kv_cache
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.input_batch import InputBatch

_BLOCK = 16


def read_text(path: Path) -> str:
    """The whole file. Raises ConfigError if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}.") from None


def batch_of(token_ids: Sequence[int], config: ModelConfig) -> ForwardBatch:
    """One prompt from position 0, with logits after every token."""
    length = len(token_ids)
    input_batch = InputBatch(1, length, _BLOCK)
    input_batch.tokens[0] = token_ids
    input_batch.block_table[0] = range(input_batch.block_table.shape[1])
    step = Step(0, (), (), rows=(0,), starts=(0,), num_tokens=(length,), samples=(1,))
    built = batch_builder.build(step, StepLayout.of(step), input_batch, config.num_kv_heads, config.windows)
    return replace(
        built,
        token_ids=built.token_ids.clamp_(max=config.vocab_size - 1),
        sample_rows=torch.arange(length),
    )


def caches(length: int, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """KV caches of one window, for each layer of the configuration."""
    num_blocks = -(-length // _BLOCK)
    return kv_cache.allocate(config, num_blocks, _BLOCK, dtype=dtype, device=torch.device("cpu"))


def logits(decoder: Decoder, token_ids: Sequence[int], dtype: torch.dtype) -> Tensor:
    """f32 [T, V]: the logits after each token."""
    config = decoder.config
    return decoder(batch_of(token_ids, config), caches(len(token_ids), config, dtype)).float()
