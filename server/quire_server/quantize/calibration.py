"""The calibration text on its way through the model, a layer at a time. Called by ``run``.

Each layer reads what the layers before it made of the text after they were rounded, so that it is rounded for
the inputs that it is going to have (GPTQ's way, and llm-compressor's).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire_server.core.errors import ConfigError
from quire_server.models import rope
from quire_server.models.decoder import Layer
from quire_server.quantize.source import Source
from quire_server.quantize.watched import Watched
from quire_server.runner import windows

SAMPLES, WINDOW = 128, 512


def cut(token_ids: Sequence[int], longest: int) -> list[list[int]]:
    """At most 128 windows of 512 tokens, evenly from the whole text; no longer than the model's context.
    Raises ConfigError where there is not one.
    """
    length = min(WINDOW, longest)
    count = min(SAMPLES, len(token_ids) // length)
    if not count:
        raise ConfigError(
            f"The calibration text has {len(token_ids)} tokens, and a sample takes {length}: give a "
            f"longer one; {SAMPLES} samples are wanted."
        )
    room = len(token_ids) - length
    starts = [room * index // max(count - 1, 1) for index in range(count)]
    return [list(token_ids[start : start + length]) for start in starts]


class Calibration:
    """f32 [length, hidden] for each sample: the residual stream before the next layer."""

    def __init__(self, source: Source, samples: Sequence[Sequence[int]]) -> None:
        config, length = source.config, len(samples[0])
        self._batch = windows.batch_of(samples[0], config)  # only its tokens differ from sample to sample
        (self._cache,) = windows.caches(length, replace(config, layers=config.layers[:1]), torch.float32)
        self._tables = {layer.rope: rope.tables(layer.rope, length) for layer in config.layers}
        embedding = source.tensor("model.embed_tokens.weight")
        ids = torch.tensor(samples).clamp_(max=config.vocab_size - 1)
        self.streams = [embedding[sample].float().mul_(config.embedding_scale) for sample in ids]

    def show(self, layer: Layer, linears: Sequence[Watched]) -> None:
        """Let each matrix remember the inputs that it gets."""
        for linear in linears:
            linear.watch()
        for stream in self.streams:
            self._run(layer, stream.clone())

    def advance(self, layer: Layer) -> None:
        """Go through the layer, as it is now."""
        self.streams = [self._run(layer, stream) for stream in self.streams]

    def _run(self, layer: Layer, stream: Tensor) -> Tensor:
        hidden = layer(None, stream, self._tables[layer.rope], self._batch, self._cache)
        return stream.add_(hidden)
