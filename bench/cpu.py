"""Speed on a CPU compared with transformers and llama.cpp, in one run: python -m bench.cpu [--only SECTION
...]

Each section writes a table to bench/results/cpu/, so that an interrupted run can be continued;
bench/results/cpu.md has all of them, with machine, versions and command.
"""

import argparse
import platform
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from bench import (
    arrivals,
    grammars,
    int4,
    kv_waste,
    offload,
    prefix,
    quality,
    quantized,
    random_llama,
    ranges,
    sampled,
    scheduler,
)
from bench.baselines import GREEDY, SAMPLED, Drawing, Transformers
from bench.batching import batching
from bench.compare import REPEATS, Comparison, Maker, kept
from bench.engine import Quire
from bench.http_overhead import http_overhead, http_rates
from bench.interference import interference
from bench.kv_dtypes import speeds
from bench.llama import LlamaCpp, requantised
from e2e import models
from quire_server.layers.int8_linear import native_kernels

RESULTS = Path(__file__).parent / "results"
STREAMS = (1, 4, 8, 16, 32)
SOME = (1, 8, 16)
GGUF = models.CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
VOCAB_SIZE = 49152
PACKAGES = ("torch", "transformers", "llama-cpp-python")


EXACT = (("float32", "none"), ("bfloat16", "none"))
SERVED = ("auto", "int8")  # the default on a CPU that has the instructions


WITH_SCHEMA = Drawing(schema=grammars.LIST_SCHEMA)


def comparison(*ours: tuple[str, str], drawing: Drawing = GREEDY) -> Comparison:
    """The baselines that draw tokens so, and Quire in these dtypes. Engines that do not depend on the number
    of streams are loaded once.
    """
    directory = models.smollm2()
    makers: dict[str, Maker] = {}
    if not drawing.schema:
        makers["transformers"] = kept(Transformers(directory, drawing))
    makers |= _llamas(GGUF, "Q4_1", drawing)
    for dtype, quantization in ours:
        engine = Quire(directory, dtype=dtype, quantization=quantization, drawing=drawing)
        makers[f"quire {dtype} {quantization}"] = kept(engine)
    return Comparison(makers, VOCAB_SIZE)


def _llamas(gguf: Path, stored: str, drawing: Drawing = GREEDY) -> dict[str, Maker]:
    """llama.cpp with this file, ``stored`` so, and with the formats that it is fastest with."""
    files = {stored: gguf} | {kind: requantised(gguf, kind) for kind in ("Q4_0", "Q8_0")}
    return {f"llama.cpp {kind}": _llama(file, drawing) for kind, file in files.items()}


def _llama(gguf: Path, drawing: Drawing) -> Maker:
    return lambda streams: LlamaCpp(gguf, streams, torch.get_num_threads(), drawing)


def int4_of_smollm2() -> str:
    """After prompts as in ``decode``."""
    return int4.compare(models.smollm2(), _llamas(GGUF, "Q4_1"), length=128, new_tokens=64)


def int4_of_1b() -> str:
    """After shorter prompts, or they would take most of the time. Its float16 is left out, too."""
    directory = random_llama.write(models.CACHE / "random-llama-1b")
    llamas = _llamas(random_llama.write_gguf(directory, directory.with_suffix(".F16.gguf")), "F16")
    del llamas["llama.cpp F16"]
    return int4.compare(directory, llamas, length=32, new_tokens=32)


def open_loop() -> str:
    """Both baselines and Quire; they do not take turns, since each of them waits for arrivals."""
    directory = models.smollm2()
    servers: dict[str, arrivals.Serve] = {
        "transformers, one after the other": arrivals.OneAfterTheOther(Transformers(directory, SAMPLED)),
        "quire auto int8": partial(
            arrivals.serve, arrivals.Scheduled(Quire(directory, quantization="int8", drawing=SAMPLED))
        ),
    }
    for kind in ("Q4_0", "Q8_0"):
        llama = LlamaCpp(requantised(GGUF, kind), arrivals.STREAMS, torch.get_num_threads(), SAMPLED)
        servers[f"llama.cpp {kind}"] = partial(arrivals.serve, arrivals.Slotted(llama))
    return arrivals.table(servers, VOCAB_SIZE)


SECTIONS: dict[str, tuple[str, Callable[[], str]]] = {
    "decode": (
        f"Decode after prompts of 128 tokens (medians of {REPEATS} runs in turns)",
        lambda: comparison(*EXACT, SERVED).decode(128, STREAMS, 64),
    ),
    "decode-long": (
        f"Decode after prompts of 1,024 tokens (medians of {REPEATS} runs in turns; from 32 streams down, 24 "
        "steps each)",
        lambda: comparison(SERVED).decode_leaving(1024, STREAMS, 24),
    ),
    "decode-sampled": (
        "Decode after prompts of 128 tokens, drawn with temperature 0.7 and top_p 0.95 (medians of "
        f"{REPEATS} runs in turns)",
        lambda: comparison(SERVED, drawing=SAMPLED).decode(128, SOME, 64),
    ),
    "decode-schema": (
        "Decode after prompts of 128 tokens by a JSON schema, greedy; transformers has no schemas (medians "
        f"of {REPEATS} runs in turns)",
        lambda: comparison(SERVED, drawing=WITH_SCHEMA).decode(128, SOME, 64),
    ),
    "arrivals": ("Requests that arrive by a Poisson process (open loop)", open_loop),
    "prefill": (
        f"Prefill of one prompt (medians of {REPEATS} runs in turns)",
        lambda: comparison(*EXACT, SERVED).prefill((128, 1024)),
    ),
    "batching": ("Batching", lambda: batching(models.smollm2())),
    "prefix": ("The prefix cache: cost and saving", lambda: prefix.report(models.smollm2())),
    "scheduler": ("What a step costs beside the model", scheduler.table),
    "sampled": ("What a sampled step costs", lambda: sampled.report(models.smollm2())),
    "grammars": ("What grammars cost a step", lambda: grammars.table(models.smollm2())),
    "kv-waste": ("KV memory without a token", kv_waste.table),
    "offload": ("A block's way to the host and back", lambda: offload.report(models.smollm2())),
    "kv-dtypes": (
        "Decode after 1,024 tokens over a KV cache of each dtype",
        lambda: speeds(models.smollm2()),
    ),
    "interference": (
        "8 streams while a 10,000-token prompt comes in",
        lambda: interference(models.smollm2()),
    ),
    "http": (
        "Through HTTP: 32 clients, prompts of 128 tokens, 128 new ones",
        lambda: http_overhead(models.smollm2()),
    ),
    "int4": (
        f"int4: decode after prompts of 128 tokens (medians of {REPEATS} runs in turns)",
        int4_of_smollm2,
    ),
    "int4-1b": (
        "int4: a Llama of 1.1 B random parameters, decode after prompts of 32 tokens (medians of "
        f"{REPEATS} runs in turns)",
        int4_of_1b,
    ),
    "int4-http": (
        "int4 through HTTP: 16 clients, prompts of 128 tokens, 128 new ones",
        lambda: http_rates(models.smollm2(), quantization="int4", clients=16),
    ),
    "quality": ("What int8 costs in quality", lambda: quality.compare(models.smollm2())),
    "quantized": ("What quantised checkpoints cost in quality", lambda: quantized.report(models.smollm2())),
}


def machine() -> str:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    return (
        f"{processor}, CPU kernels {native_kernels()}, {torch.get_num_threads()} threads, wall time; "
        f"Python {platform.python_version()}, {versions}. Command: `make bench`."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    folder = RESULTS / "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    where = machine()  # before measuring, so that an error here does not cost an hour
    for name in arguments.only:
        title, measure = SECTIONS[name]
        text = f"## {title}\n\n{measure()}\n\n{where}\n"
        print(text, flush=True)
        (folder / f"{name}.md").write_text(text)
        if name in ranges.RANGED:
            ranges.keep(name, text)
    parts = [path.read_text() for name in SECTIONS if (path := folder / f"{name}.md").exists()]
    (RESULTS / "cpu.md").write_text("\n".join(["# SmolLM2-135M-Instruct on a CPU\n", *parts]))


if __name__ == "__main__":
    main()
