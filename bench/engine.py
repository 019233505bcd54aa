"""Quire's scheduler and runner in this process, without HTTP: the engine that the benchmarks measure."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

from bench.baselines import GREEDY, Drawing
from quire_server.core.config import Batching
from quire_server.core.request import Request
from quire_server.core.sampling_params import Grammar, GrammarKind, SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import Step
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from quire_server.text import grammar as texts

CONTEXT = 1024 + 160
MAX_STREAMS = 32
CHUNK = 1024
BLOCK = 16


def request(number: int, prompt: list[int], new_tokens: int) -> Request:
    """Greedy, and never ended by a stop token."""
    return Request(str(number), tuple(prompt), SamplingParams(new_tokens, temperature=0.0), 0.0)


def prompts(seed: int, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random tokens: no two prompts share a prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


class Quire:
    """One loaded model; every run gets its own scheduler."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str = "auto",
        quantization: str = "auto",
        max_streams: int = MAX_STREAMS,
        drawing: Drawing = GREEDY,
    ) -> None:
        options = RunnerConfig(
            dtype=dtype,
            quantization=quantization,
            block_size=BLOCK,
            max_model_len=CONTEXT,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=max_streams,
            kv_cache_memory_bytes=3 << 30,
        )
        self.runner = ModelRunner.load(directory, options, lambda loaded, total: None)
        self._max_streams, self._drawing = max_streams, drawing

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.runner.model_config.vocab_size

    def scheduler(
        self,
        *,
        streams: int | None = None,
        chunk: int = CHUNK,
        prefix_caching: bool = False,
        batching: Batching = Batching.CONTINUOUS,
    ) -> Scheduler:
        """An empty scheduler over all of the runner's blocks, with at most ``streams`` running requests."""
        runner = self.runner
        config = SchedulerConfig(
            streams or self._max_streams,
            chunk,
            runner.max_model_len,
            runner.num_blocks,
            BLOCK,
            prefix_caching,
            batching=batching,
        )
        return Scheduler(config, eos_token_ids=())

    def request(self, number: int, prompt: list[int], new_tokens: int) -> Request:
        """Drawn as this engine was made for, and never ended by a stop token."""
        drawing, grammar = self._drawing, None
        if drawing.schema:
            grammar = Grammar(GrammarKind.JSON, texts.compiled(GrammarKind.JSON, drawing.schema))
            self.runner.grammars.admit(str(number), self.runner.grammars.build(grammar))
        sampling = SamplingParams(
            new_tokens, temperature=drawing.temperature, top_p=drawing.top_p, grammar=grammar, ignore_eos=True
        )
        return Request(str(number), tuple(prompt), sampling, 0.0)

    def close(self) -> None:
        """Nothing to free."""

    def run(self, prompts: list[list[int]], answers: list[int]) -> tuple[float, list[tuple[int, float]]]:
        """As in ``baselines.Engine``: all prompts are in the first step."""
        scheduler = self.scheduler(chunk=max(CHUNK, sum(map(len, prompts))))
        for number, (prompt, new_tokens) in enumerate(zip(prompts, answers, strict=True)):
            scheduler.add(self.request(number, prompt, new_tokens))
        steps = [(len(step.rows), seconds) for step, seconds in self.steps(scheduler)]
        return steps[0][1], steps[1:]

    def steps(self, scheduler: Scheduler) -> Iterator[tuple[Step, float]]:
        """Run until no requests are left: each step and its seconds, including scheduling."""
        start = time.perf_counter()
        while (step := scheduler.schedule()) is not None:
            scheduler.commit(step, self.runner.run(step))
            yield step, time.perf_counter() - start
            start = time.perf_counter()
