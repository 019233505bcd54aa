"""LoRA adapters on a CPU: python -m bench.adapters MODEL_DIR [--rank R] [--pairs N]

8 streams with 4 adapters on all seven matrices, against the same streams of the same server without
adapters, alternating in one run; the median of the ratios of each pair.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.models.adapter_file import AdapterFile
from quire_server.runner.adapters import Adapters
from quire_server.runner.model_runner import ModelRunner, RunnerConfig

STREAMS, ADAPTERS, PROMPT, LENGTH = 8, 4, 32, 64


def load(directory: Path, rank: int) -> ModelRunner:
    """A server's runner, and random adapters 1 to 4."""
    options = RunnerConfig(
        max_num_seqs=STREAMS,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 28,
        max_adapters=ADAPTERS,
        max_adapter_rank=rank,
    )
    runner = ModelRunner.load(directory, options, lambda loaded, total: None)
    adapters = runner.adapters
    assert isinstance(adapters, Adapters)
    for number in range(1, ADAPTERS + 1):
        factors = {
            name: (
                torch.randn(rank, inputs).to(adapters.dtype) * 0.01,
                torch.zeros(out, rank).to(adapters.dtype),
            )
            for name, (out, inputs, *_) in adapters.matrices.items()
        }
        adapters.add(number, AdapterFile(rank, factors, str(number)))
    return runner


def tokens_per_second(runner: ModelRunner, *, adapters: bool) -> float:
    """Of all streams together, once all of them have a token."""
    limits = SchedulerConfig(
        STREAMS, 512, runner.max_model_len, runner.num_blocks, 16, False, num_adapter_slots=ADAPTERS
    )
    scheduler = Scheduler(limits, eos_token_ids=())
    sampling = SamplingParams(LENGTH, temperature=0.0, ignore_eos=True)
    for index in range(STREAMS):
        prompt = tuple((7 * index + 3 * place) % 900 + 5 for place in range(PROMPT))
        adapter = index % ADAPTERS + 1 if adapters else 0
        scheduler.add(Request(str(index), prompt, sampling, 0.0), adapter=adapter, adapter_key=str(adapter))
    begun, count, begin = set[str](), 0, 0.0
    while (step := scheduler.schedule()) is not None:
        for event in scheduler.commit(step, runner.run(step)):
            count += len(event.token_ids) if begin else 0
            begun.add(event.request_id)
        if len(begun) == STREAMS and not begin:
            begin = time.perf_counter()
    return count / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    runner = load(given.model, given.rank)
    ratios, speeds = [], []
    for number in range(given.pairs + 1):
        without = tokens_per_second(runner, adapters=False)
        adapted = tokens_per_second(runner, adapters=True)
        if number:  # the first pair warms up
            ratios.append(adapted / without)
            speeds.append((without, adapted))
    without, adapted = (statistics.median(one) for one in zip(*speeds, strict=True))
    print(f"{torch.get_num_threads()} threads, {runner.dtype} {runner.quantization}, rank {given.rank}")
    print(f"base {without:.0f} tokens/s, {ADAPTERS} adapters {adapted:.0f} tokens/s")
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
