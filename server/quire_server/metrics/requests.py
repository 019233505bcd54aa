"""Prometheus metrics of one server's requests, and the registry of all its metrics.

Under Quire's names and, for the most used ones, vLLM's, so that dashboards, autoscalers and routers that read
those work unchanged. The API process writes them: it sees every request, and the engine reports every step to
it. Nothing is global.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from quire_server.core.stats import EngineStats, Timing
from quire_server.metrics.engine import (
    AdapterCollector,
    KVCollector,
    SpeculationCollector,
    StepCollector,
    TransferCollector,
)
from quire_server.metrics.gpu import GpuCollector
from quire_server.metrics.labelled import VLLM_REQUEST_SECONDS, Exemplar, Labelled, one_two_five
from quire_server.metrics.ranks import RankCollector

#: How a request can end. shed: 503 by overload or drain; limited: 429; aborted: the client hung up;
#: cancelled: cut by the end of a drain.
STATUSES = ("success", "client_error", "shed", "limited", "aborted", "cancelled", "error")
#: Why a request is not served although nothing is wrong with it.
REFUSALS = (
    "queue_full",
    "load_shed",
    "memory_pressure",
    "body_memory",
    "too_many_connections",
    "deadline_exceeded",
    "rate_limit_exceeded",
)

#: What was done to requests so that they, or the others, get an answer at all.
DEGRADATIONS = ("deadline", "halved_max_tokens", "out_of_memory")

_TTFT = (0.1, 0.2, 0.5, 1, 2, 5, 10)
_LATENCY = (0.5, 1, 2, 5, 10, 30, 60)
_N = (1, 2, 5, 10, 20)
_LAG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
_VLLM_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip


@dataclass(frozen=True)
class CacheFacts:
    """The KV cache as it was set up: vLLM's cache_config_info."""

    block_size: int
    num_gpu_blocks: int
    cache_dtype: str
    enable_prefix_caching: bool


class AnswerMetrics:
    """Histograms over answers, under vLLM's names; an answer is one prompt and one choice.

    Made once the engine has reported how long a context can be: the buckets of token counts end there.
    """

    def __init__(self, vllm: Labelled, max_model_len: int) -> None:
        tokens = one_two_five(max_model_len)

        def seconds(part: str, about: str) -> tuple[str, str, tuple[float, ...]]:
            return f"vllm:request_{part}_time_seconds", about, VLLM_REQUEST_SECONDS

        self._queue = vllm.histogram(*seconds("queue", "Arrival at the engine to the last start."))
        self._prefill = vllm.histogram(*seconds("prefill", "Last start to the first token."))
        self._decode = vllm.histogram(*seconds("decode", "First token to the last one."))
        self._inference = vllm.histogram(*seconds("inference", "Last start to the last token."))
        self._prompt = vllm.histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", tokens)
        self._generated = vllm.histogram("vllm:request_generation_tokens", "Tokens of an answer.", tokens)
        self._most_generated = vllm.histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest answer to a request.", tokens
        )
        self._max_tokens = vllm.histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request.", tokens
        )
        self._n = vllm.histogram("vllm:request_params_n", "n of a request.", _N)

    def asked(self, n: int, max_tokens: int) -> None:
        """A request went to the engine, with at most ``max_tokens`` for each answer."""
        self._n.observe(n)
        self._max_tokens.observe(max_tokens)

    def finished(self, prompt_tokens: int, tokens: int, timing: Timing, exemplar: Exemplar | None) -> None:
        """An answer ended by itself; ``timing`` is complete."""
        self._prompt.observe(prompt_tokens)
        self._generated.observe(tokens)
        if timing.finished is None:
            return
        self._queue.observe(timing.scheduled - timing.queued, exemplar)
        self._prefill.observe(timing.first_token - timing.scheduled, exemplar)
        self._decode.observe(timing.finished - timing.first_token, exemplar)
        self._inference.observe(timing.finished - timing.scheduled, exemplar)

    def longest(self, tokens: int) -> None:
        """All answers to a request have ended; the longest has so many tokens."""
        self._most_generated.observe(tokens)


class Metrics:
    """Every metric of the server, by what happened."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._ours = Labelled(self._registry, {"model": model})
        self._vllm = Labelled(self._registry, {"model_name": model, "engine": "0"})
        self._kv_cache = KVCollector(self._ours.values, self._vllm.values)
        self._registry.register(self._kv_cache)
        self._speculation = SpeculationCollector(self._ours.values, self._vllm.values)
        self._registry.register(self._speculation)
        self._transfers = TransferCollector(self._ours.values)
        self._registry.register(self._transfers)
        self.adapter_requests = Counter[str]()  # by adapter
        self._adapters = AdapterCollector(self._ours.values, self.adapter_requests)
        self._registry.register(self._adapters)
        self.ranks = RankCollector(self._ours.values)
        self._registry.register(self.ranks)
        self.steps = StepCollector(self._ours.values, self._vllm.values)
        self._registry.register(self.steps)
        self.gpus = GpuCollector(self._ours.values)
        self._registry.register(self.gpus)
        self.answers: AnswerMetrics | None = None  # from when the engine is known
        self._make_histograms(self._ours, self._vllm)
        self._make_gauges(self._ours)
        self._make_counters(self._ours, self._vllm)

    def _make_histograms(self, ours: Labelled, vllm: Labelled) -> None:
        self._ttft = (
            ours.histogram("llm_ttft_seconds", "Arrival of a request to its first token.", _TTFT),
            vllm.histogram("vllm:time_to_first_token_seconds", "Alias of llm_ttft_seconds.", _VLLM_TTFT),
        )
        self._latency = (
            ours.histogram("llm_request_latency_seconds", "Arrival of a request to its end.", _LATENCY),
            vllm.histogram(
                "vllm:e2e_request_latency_seconds",
                "Alias of llm_request_latency_seconds.",
                VLLM_REQUEST_SECONDS,
            ),
        )
        self._lag = ours.histogram(
            "llm_event_loop_lag_seconds", "Lateness of timers in the API process.", _LAG
        )

    def _make_gauges(self, ours: Labelled) -> None:
        self._queued_tokens = ours.gauge(
            "llm_queued_prompt_tokens", "Tokens of prompts whose answers have not begun."
        )
        self._load = ours.gauge(
            "llm_model_load_seconds", "What the last load of the model took; 0 before it."
        )
        self._active = ours.gauge("llm_active_requests", "Requests that are admitted and not finished.")

    def _make_counters(self, ours: Labelled, vllm: Labelled) -> None:
        self._prompt = (
            ours.counter("llm_prompt_tokens", "Tokens of prompts."),
            vllm.counter("vllm:prompt_tokens", "Alias of llm_prompt_tokens_total."),
        )
        self._drained = ours.counter(
            "llm_drained_requests", "Requests that finished while the server drained."
        )
        self._cancelled = ours.counter(
            "llm_cancelled_requests", "Requests cut when the drain's time was over."
        )
        self._cut = ours.counter("llm_deadline_cut_answers", "Answers that ended early at their deadline.")
        self._refused = ours.counter_by("llm_requests_refused", "Requests not served, by reason.", "reason")
        self._degraded = ours.counter_by(
            "llm_degraded_requests", "Requests that got less than they asked for, by reason.", "reason"
        )
        self._requests = ours.counter_by("llm_requests", "Requests by how they ended.", "status")
        self._success = vllm.counter_by("vllm:request_success", "Finished answers.", "finished_reason")
        # Series exist from the start: a rate over a series that appears with its first event misses it.
        for status in STATUSES:
            self._requests.labels(**ours.values, status=status)
        for reason in REFUSALS:
            self._refused.labels(**ours.values, reason=reason)
        for reason in DEGRADATIONS:
            self._degraded.labels(**ours.values, reason=reason)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**vllm.values, finished_reason=reason)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The text of /metrics and its type: OpenMetrics, with exemplars, where ``accept`` asks for it."""
        types = {one.partition(";")[0].strip() for one in accept.split(",")}
        if "application/openmetrics-text" not in types:
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        # None of our names needs escaping; asked to escape, the library takes the colon out of vLLM's.
        text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]  # it is not annotated
            self._registry, escaping=openmetrics.ALLOWUTF8
        )
        return text, "application/openmetrics-text; version=1.0.0; charset=utf-8"

    def engine_known(
        self, max_model_len: int, cache: CacheFacts, gpu_memory: Mapping[str, int], load_seconds: float
    ) -> None:
        """The engine is connected; after a restart only its memory and its load time can differ."""
        self.gpus.set_engine_memory(gpu_memory)
        self._load.set(load_seconds)
        if self.answers is None:
            self.answers = AnswerMetrics(self._vllm, max_model_len)
            facts = {
                "block_size": str(cache.block_size),
                "cache_dtype": cache.cache_dtype,
                "enable_prefix_caching": str(cache.enable_prefix_caching),
                "num_gpu_blocks": str(cache.num_gpu_blocks),
            }
            self._vllm.info("vllm:cache_config_info", "1; the labels say how the KV cache is set up.", facts)

    def request_ended(self, status: str, latency: float, exemplar: Exemplar | None = None) -> None:
        """One request is over, with one of STATUSES."""
        self._requests.labels(**self._ours.values, status=status).inc(1, exemplar)
        if status == "success":
            for histogram in self._latency:
                histogram.observe(latency, exemplar)

    def choice_finished(self, reason: str) -> None:
        """One answer ended with stop, length, abort or error."""
        self._success.labels(**self._vllm.values, finished_reason=reason).inc()

    def asked(self, num_answers: int, max_tokens: int) -> None:
        """A request's parameters are known."""
        if self.answers is not None:
            self.answers.asked(num_answers, max_tokens)

    def prompt_taken(self, num_tokens: int) -> None:
        """A prompt went to the engine."""
        for counter in self._prompt:
            counter.inc(num_tokens)

    def first_token(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        """The first token of a request came."""
        for histogram in self._ttft:
            histogram.observe(seconds, exemplar)

    def loop_lag(self, seconds: float) -> None:
        """A timer of the API process was late by so much."""
        self._lag.observe(seconds)

    def admitted(self, num_requests: int, queued_tokens: int) -> None:
        """How many requests are admitted, and how many tokens of prompts wait."""
        self._active.set(num_requests)
        self._queued_tokens.set(queued_tokens)

    def refused(self, reason: str) -> None:
        """A request was not served, for one of REFUSALS."""
        self._refused.labels(**self._ours.values, reason=reason).inc()

    def degraded(self, reason: str) -> None:
        """A request got less than it asked for, by one of DEGRADATIONS."""
        self._degraded.labels(**self._ours.values, reason=reason).inc()

    def answer_cut(self) -> None:
        """An answer ended at its deadline with what it had."""
        self._cut.inc()

    def drained(self) -> None:
        """A request finished during the drain."""
        self._drained.inc()

    def cancelled(self) -> None:
        """A request was cut by the end of the drain."""
        self._cancelled.inc()

    def step(self, stats: EngineStats) -> None:
        """The engine reported."""
        self._kv_cache.stats = stats.kv
        self._speculation.stats = stats.speculation
        self._transfers.stats = stats.transfers
        self._adapters.stats = stats.adapters
        self.steps.report(stats)
