"""Random requests to a tiny model on the GPU code path, whose launches are recorded: first those of the
warm-up, then those of steps of all kinds.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.gpu import random_model
from bench.gpu.place import Interpreter
from bench.gpu.sizes import llama
from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.request import Request
from quire_server.core.sampling_params import Grammar, GrammarKind, SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.engine.engine_core import StepPipeline
from quire_server.runner.config import RunnerConfig
from quire_server.runner.gpu import memory_profile
from quire_server.runner.loader import load_model
from quire_server.runner.model_runner import ModelRunner
from quire_server.runner.structured_outputs import Grammars
from quire_server.text import grammar as texts
from tests.kernels.gpu.as_cuda import as_cuda
from tests.kernels.gpu.compile_keys import CompileKeys, recorded
from tests.server.runner.gpu.fake_device import FakeDevice

VOCAB = 5120
_ARRIVES = 0.3  # how likely requests come before a step
LENGTHS = (2, 3, 9, 20, 50, 64, 65, 70, 120, 200, 400, 700, 1300)
LETTERS = Grammar(GrammarKind.REGEX, texts.compiled(GrammarKind.REGEX, "[a-z]{1,4000}"))
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.6, "presence_penalty": 0.5, "frequency_penalty": 0.2, "top_p": 0.95},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "grammar": LETTERS},
    {"temperature": 1.0, "min_tokens": 3, "logit_bias": ((5, 1.5),), "bad_words": ((7, 8), (9,))},
    {"temperature": 0.5, "allowed_token_ids": (1, 2, 3), "presence_penalty": 1.0, "logprobs": 0},
)
VOCABULARY = texts.Vocabulary([b"abcdefgh"[i % 8 : i % 8 + 1] for i in range(VOCAB)], [0], [0])


@dataclass(frozen=True)
class Served:
    """A kind of model and of server. ``stored``: more of config.json."""

    stored: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    drafts: int = 0


def runner(served: Served, directory: Path | None = None) -> ModelRunner:
    """Of random weights, or of the checkpoint in ``directory``."""
    document = {**llama(64, 128, 1, (16, 8, 32), VOCAB), **served.stored}
    options = RunnerConfig(
        device="cuda", dtype="bfloat16", block_size=64, max_num_seqs=24, max_num_batched_tokens=512,
        max_model_len=2048, num_blocks_override=400, num_speculative_tokens=served.drafts,
    )  # fmt: skip
    options = memory_profile.arithmetic(replace(options, **served.options), 90)
    if directory is not None:
        if options.speculative_model is not None:
            options = replace(options, speculative_model=directory)
        parts = load_model(directory, options, lambda loaded, total: None, FakeDevice(total=64 << 30))
        return ModelRunner(parts, options, Grammars(lambda: VOCABULARY))
    made = random_model.runner(Interpreter(), document, options)
    made.grammars = Grammars(lambda: VOCABULARY)
    return made


def play(keys: CompileKeys, served: Served, steps: int, seed: int, directory: Path | None = None) -> None:
    """Start a server, then make so many steps of it."""
    rng = random.Random(seed)
    keys.stage = "warm-up"
    ready = runner(served, directory)
    ready.capture(lambda done, wanted: None)
    keys.stage = "serving"
    scheduler = Scheduler(_config(served, ready), eos_token_ids=())
    pipeline = StepPipeline(scheduler, ready)
    made = number = 0
    while made < steps:
        if rng.random() < _ARRIVES:
            for _ in range(rng.choice((1, 1, 2, 3, 8))):
                sampling = SamplingParams(rng.randrange(1, 14), ignore_eos=True, **rng.choice(SAMPLING))
                if sampling.grammar is not None:
                    ready.grammars.admit(str(number), ready.grammars.build(sampling.grammar))
                prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice(LENGTHS)))
                scheduler.add(Request(str(number), prompt, sampling, 0.0))
                number += 1
        if not scheduler.has_work:
            continue
        advanced = pipeline.advance()
        for event in advanced[1] if advanced is not None else ():
            assert event.error is None or "grammar" in event.error, event.error  # masks are not applied
        made += 1


def _config(served: Served, ready: ModelRunner) -> SchedulerConfig:
    config = SchedulerConfig(
        24, 512, ready.max_model_len, ready.num_blocks, 64, enable_prefix_caching=True,
        num_host_slots=ready.num_host_slots,
    )  # fmt: skip
    if not served.drafts:
        return config
    method = SpeculativeMethod.NGRAM
    if "speculative_model" in served.options:
        method = SpeculativeMethod.DRAFT_MODEL
    return replace(config, speculation=SpeculationConfig(method, served.drafts, lookup_min=1))


@contextmanager
def recording() -> Iterator[CompileKeys]:
    """Within it launches are recorded."""
    with as_cuda(), recorded() as keys:
        yield keys
