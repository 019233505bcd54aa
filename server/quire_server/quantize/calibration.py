"""Runs the calibration text through the model, one layer at a time.

Each layer gets the outputs of the quantised layers before it, so it is quantised for the inputs that it will
have in use (as in GPTQ and llm-compressor).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire_server.errors import ConfigError
from quire_server.evaluate import text_windows
from quire_server.models import rope
from quire_server.models.decoder import Layer
from quire_server.quantize.calibrated_layer import ObservedLinear
from quire_server.quantize.source_model import SourceModel

SAMPLES, WINDOW = 128, 512


def cut(token_ids: Sequence[int], longest: int) -> list[list[int]]:
    """At most 128 windows of 512 tokens, spread evenly over the text and no longer than the model's context.
    Raises ConfigError if the text is too short for one.
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

    def __init__(self, source: SourceModel, samples: Sequence[Sequence[int]]) -> None:
        config, length = source.config, len(samples[0])
        # The same for all samples except the token ids.
        self._batch = text_windows.batch_of(samples[0], config)
        (self._cache,) = text_windows.caches(length, replace(config, layers=config.layers[:1]), torch.float32)
        self._tables = {layer.rope: rope.tables(layer.rope, length) for layer in config.layers}
        embedding = source.tensor("model.embed_tokens.weight")
        ids = torch.tensor(samples).clamp_(max=config.vocab_size - 1)
        self.streams = [embedding[sample].float().mul_(config.embedding_scale) for sample in ids]

    def show(self, layer: Layer, linears: Sequence[ObservedLinear]) -> None:
        """Run the samples through the layer and record the inputs of these matrices."""
        for linear in linears:
            linear.watch()
        for stream in self.streams:
            self._run(layer, stream.clone())

    def advance(self, layer: Layer) -> None:
        """Run the samples through the layer as it is now, and keep the results."""
        self.streams = [self._run(layer, stream) for stream in self.streams]

    def _run(self, layer: Layer, stream: Tensor) -> Tensor:
        hidden = layer(None, stream, self._tables[layer.rope], self._batch, self._cache)
        return stream.add_(hidden)
