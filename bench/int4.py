"""int4 and int8 beside llama.cpp's formats (sections of ``bench.cpu``): tokens per second in turns, and the
share of the memory's bandwidth at which a step of few streams reads its weights.
"""

from collections.abc import Mapping
from pathlib import Path

from bench.batch_sizes import bandwidth
from bench.compare import OURS, REPEATS, Comparison, Maker, kept
from bench.engine import Quire

STREAMS = (1, 8, 16)
WAYS = ("int4", "int8")


def compare(
    directory: Path,
    theirs: Mapping[str, Maker],
    *,
    length: int,
    new_tokens: int,
    streams: tuple[int, ...] = STREAMS,
    repeats: int = REPEATS,
) -> str:
    """``theirs``: the engines beside which Quire's decode."""
    engines = {way: Quire(directory, quantization=way, max_streams=max(streams)) for way in WAYS}
    ours: dict[str, Maker] = {f"{OURS} {way}": kept(engine) for way, engine in engines.items()}
    comparison = Comparison({**theirs, **ours}, engines[WAYS[0]].vocab_size)
    table = comparison.decode(length, streams, new_tokens, repeats)
    limit = bandwidth()
    lines = [f"A sum over 512 MB reads {limit / 1e9:.1f} GB/s."]
    for way, engine in engines.items():
        read = _weight_bytes(engine)
        rates = comparison.rates(streams[0], f"{OURS} {way}")
        median, best = (read * rate / streams[0] for rate in rates)
        lines.append(
            f"At x{streams[0]} a step in {way} reads {read / 1e6:.0f} MB of weights with "
            f"{median / 1e9:.1f} GB/s, {100 * median / limit:.0f} % of that (fastest step: "
            f"{100 * best / limit:.0f} %)."
        )
    return f"{table}\n\n{' '.join(lines)}"


def _weight_bytes(engine: Quire) -> int:
    """Of all matrices as they are multiplied: a step reads each once, and little of the embedding."""
    model = engine.runner._model
    assert model.head is not None
    linears = [model.head, *(linear for layer in model.layers for linear in layer.linears)]
    return sum(tensor.nbytes for linear in linears for tensor in linear.weights())
