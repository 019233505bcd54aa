"""Speed on a CPU compared with transformers and llama.cpp, in one run: python -m bench.cpu [--only SECTION
...]

Each section writes a table to bench/results/cpu/, so that an interrupted run can be continued;
bench/results/cpu.md has all of them, with machine, versions and command.
"""

import argparse
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

from bench import grammars, kv_waste, offload, prefix, quality, quantized, sampled, scheduler
from bench.baselines import Engine, Transformers
from bench.batching import batching
from bench.compare import REPEATS, Comparison, Maker
from bench.engine import Quire
from bench.http_overhead import http_overhead
from bench.interference import interference
from bench.kv_dtypes import speeds
from bench.llama import LlamaCpp, requantised
from e2e import models

RESULTS = Path(__file__).parent / "results"
STREAMS = (1, 4, 8, 16, 32)
GGUF = models.CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
VOCAB_SIZE = 49152
PACKAGES = ("torch", "transformers", "llama-cpp-python")


EXACT = (("float32", "none"), ("bfloat16", "none"))
SERVED = ("auto", "int8")  # the default on a CPU that has the instructions


def comparison(*ours: tuple[str, str]) -> Comparison:
    """Both baselines, and Quire in these dtypes. Engines that do not depend on the number of streams are
    loaded once.
    """
    directory = models.smollm2()
    makers: dict[str, Maker] = {"transformers": _kept(Transformers(directory))}
    for kind, gguf in (("Q4_1", GGUF), *((kind, requantised(GGUF, kind)) for kind in ("Q4_0", "Q8_0"))):
        makers[f"llama.cpp {kind}"] = _llama(gguf)
    for dtype, quantization in ours:
        engine = Quire(directory, dtype=dtype, quantization=quantization)
        makers[f"quire {dtype} {quantization}"] = _kept(engine)
    return Comparison(makers, VOCAB_SIZE)


def _kept(engine: Engine) -> Maker:
    return lambda streams: engine


def _llama(gguf: Path) -> Maker:
    return lambda streams: LlamaCpp(gguf, streams, torch.get_num_threads())


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
    "quality": ("What int8 costs in quality", lambda: quality.compare(models.smollm2())),
    "quantized": ("What quantised checkpoints cost in quality", lambda: quantized.report(models.smollm2())),
}


def machine() -> str:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    return (
        f"{processor}, {torch.get_num_threads()} threads, wall time; "
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
    parts = [path.read_text() for name in SECTIONS if (path := folder / f"{name}.md").exists()]
    (RESULTS / "cpu.md").write_text("\n".join(["# SmolLM2-135M-Instruct on a CPU\n", *parts]))


if __name__ == "__main__":
    main()
