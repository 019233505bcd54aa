"""The engine without processes: a scheduler and a runner in a loop. The reference for asynchronous
engines.
"""

from collections.abc import Sequence
from pathlib import Path

from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import TokenEvent, TokenLogprobs
from quire_server.runner.model_runner import ModelRunner, RunnerConfig


def load(model_dir: Path, **options: object) -> ModelRunner:
    settings: dict[str, object] = {"dtype": "float32", "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}
    settings |= options
    return ModelRunner.load(model_dir, RunnerConfig(**settings), lambda loaded, total: None)


class InProcessEngine:
    """One scheduler with a runner, which other engines may use later."""

    def __init__(self, runner: ModelRunner, **limits: object) -> None:
        settings = {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "max_model_len": runner.max_model_len,
            "num_blocks": runner.num_blocks,
            "block_size": 16,
        } | limits
        self.runner = runner
        self.scheduler = Scheduler(
            SchedulerConfig(**settings),
            eos_token_ids=runner.model_config.eos_token_ids,
            clock=lambda: 0.0,  # the cost of steps is then assumed, and drafts do not depend on the machine
        )
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.last: dict[str, TokenEvent] = {}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Submit all prompts at once; returns the outputs in their order."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        self.logprobs = {name: [] for name in tokens}
        self.prompt_logprobs = {name: [] for name in tokens}
        for name, prompt, params in zip(tokens, prompts, each, strict=True):
            if params.grammar is not None:
                self.runner.grammars.admit(name, self.runner.grammars.build(params.grammar))
            self.scheduler.add(Request(name, tuple(prompt), params, arrival=0.0))
        while (step := self.scheduler.schedule()) is not None:
            for event in self.scheduler.commit(step, self.runner.run(step)):
                assert event.error is None, event.error
                tokens[event.request_id] += event.token_ids
                self.logprobs[event.request_id] += event.logprobs or ()
                self.prompt_logprobs[event.request_id] += event.prompt_logprobs
                self.last[event.request_id] = event
        self.scheduler.check()
        return list(tokens.values())


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0.0, ignore_eos=True, **more)  # type: ignore[arg-type]  # mixed values
