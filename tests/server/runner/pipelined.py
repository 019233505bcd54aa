"""The engine without processes, with as many steps in flight as its model has stages."""

from collections.abc import Callable, Sequence

from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import Step, StepResult, TokenLogprobs
from quire_server.engine.engine_core import StepPipeline
from quire_server.runner.model_runner import ModelRunner


class PipelinedEngine:
    """A scheduler with the runner of rank 0."""

    def __init__(self, runner: ModelRunner, stages: int, **limits: object) -> None:
        settings = {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "max_model_len": runner.max_model_len,
            "num_blocks": runner.num_blocks,
            "block_size": 16,
            "pipeline_size": stages,
        } | limits
        eos = runner.model_config.eos_token_ids
        self.scheduler = Scheduler(
            SchedulerConfig(**settings),  # type: ignore[arg-type]  # mixed values
            eos_token_ids=eos,
            clock=lambda: 0.0,
        )
        self._runner = runner
        self._pipeline = StepPipeline(self.scheduler, self)
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.num_in_flight = self.most_in_flight = 0

    @property
    def max_steps_in_flight(self) -> int:
        return self._runner.max_steps_in_flight

    def launch(self, step: Step) -> Callable[[], StepResult]:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        wait = self._runner.launch(step)

        def waited() -> StepResult:
            self.num_in_flight -= 1
            return wait()

        return waited

    def add(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.tokens[name], self.logprobs[name], self.prompt_logprobs[name] = [], [], []
        self.scheduler.add(Request(name, tuple(prompt), sampling, 0.0))

    def step(self) -> None:
        advanced = self._pipeline.advance()
        self.scheduler.check()
        for event in advanced[1] if advanced else ():
            self.tokens[event.request_id] += event.token_ids
            self.logprobs[event.request_id] += event.logprobs or ()
            self.prompt_logprobs[event.request_id] += event.prompt_logprobs
            if event.error is not None:
                self.errors[event.request_id] = event.error

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()
        assert self.scheduler.num_unaccounted_blocks == 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        for number, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            self.add(str(number), prompt, params)
        self.drain()
        return [self.tokens[str(number)] for number in range(len(prompts))]
