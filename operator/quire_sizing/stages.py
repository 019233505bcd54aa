"""The stages of a pipeline: which layers each has, the weights of its ranks, and how busy its devices are.

The server balances stages by the bytes that a step reads. The same is computed here from a config.json, with
all layers taken as equally large, as they are but for models of which only some layers are sparse, and with
as many bits for the head as for the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_sizing.errors import SizingError
from quire_sizing.model import ModelShape, rank_parameters, rank_vocab


@dataclass(frozen=True, kw_only=True)
class Stage:
    """``parameters``: of one of its ranks. ``read``: those of them that a step reads, which is of the
    embedding only a row for each token.
    """

    layers: int
    parameters: int
    read: int


def check_pipeline(model: ModelShape, pipeline: int) -> None:
    """Raises SizingError if there cannot be so many stages."""
    if not 0 < pipeline <= model.num_layers:
        raise SizingError(
            f"The model cannot be divided among {pipeline} stages; give 1 to {model.num_layers}, the number "
            "of its layers."
        )


def stages(model: ModelShape, pipeline: int, tensor: int = 1) -> tuple[Stage, ...]:
    """Each stage, with the weights of its first rank. The first stage has the embedding, the last one the
    norm before the head, and the head; a matrix that is both is on both.
    """
    check_pipeline(model, pipeline)
    table = rank_vocab(model, tensor) * model.hidden_size
    layers = rank_parameters(model, tensor) - table * _tables(model) - model.hidden_size
    found = []
    for index, count in enumerate(stage_layers(model, pipeline)):
        is_last = index == pipeline - 1
        read = layers * count // model.num_layers + (table + model.hidden_size if is_last else 0)
        has_embedding = not index and not (is_last and _tables(model) == 1)
        found.append(Stage(layers=count, parameters=read + (table if has_embedding else 0), read=read))
    return tuple(found)


def stage_layers(model: ModelShape, pipeline: int) -> tuple[int, ...]:
    """The number of layers of each stage, as the server chooses them: the smallest sum of squares of the
    stages' bytes, then the borders that are nearest to equal parts.
    """
    if pipeline == 1:
        return (model.num_layers,)
    head = model.vocab_size * model.hidden_size
    layer = (model.parameters - model.vocab_parameters - model.whole_parameters) // model.num_layers
    before = pipeline - 1

    def squares(last: int) -> int:
        each, more = divmod(model.num_layers - last, before)
        even = (before - more) * each**2 + more * (each + 1) ** 2
        return even * layer**2 + (last * layer + head) ** 2

    lasts = range(1, model.num_layers - before + 1)
    least = min(map(squares, lasts))
    equal = [
        _placed(model.num_layers, last, layer, head, pipeline) for last in lasts if squares(last) == least
    ]
    _, borders = min(equal)
    return tuple(end - begin for begin, end in zip((0, *borders), (*borders, model.num_layers), strict=True))


def _placed(layers: int, last: int, layer: int, head: int, pipeline: int) -> tuple[int, tuple[int, ...]]:
    """(distance of the borders from equal parts, the borders), of the stages before the last one, some of
    which have one layer more than others: where these are best.
    """
    each, more = divmod(layers - last, pipeline - 1)
    total = layers * layer + head
    found: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # by the number of larger stages so far
    for stage in range(1, pipeline):
        found = {
            larger: min(
                (
                    distance + abs(pipeline * layer * (stage * each + larger) - stage * total),
                    (*borders, stage * each + larger),
                )
                for used, (distance, borders) in found.items()
                if used in (larger, larger - 1)
            )
            for larger in range(max(0, more - (pipeline - 1 - stage)), min(stage, more) + 1)
        }
    return found[more]


def balance(found: tuple[Stage, ...]) -> float:
    """The mean of the stages' times divided by the longest, for steps that take as long as the weights take
    to be read.
    """
    reads = [stage.read for stage in found]
    return sum(reads) / len(reads) / max(reads)


def utilization(found: tuple[Stage, ...], streams: int) -> float:
    """The share of time in which the stages are busy with so many requests, each of which is in one stage at
    a time; the rest is the pipeline's bubble.
    """
    return min(1.0, streams / len(found)) * balance(found)


def _tables(model: ModelShape) -> int:
    """1 where the embedding is the head, else 2."""
    return model.vocab_parameters // (model.vocab_size * model.hidden_size) or 2
