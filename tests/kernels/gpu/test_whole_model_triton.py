"""Whole models on the GPU code path, with runner and CUDA graphs, give the same answers as by torch."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.request import Request
from quire_server.core.sampling_params import Grammar, GrammarKind, SamplingParams
from quire_server.engine.engine_core import StepPipeline
from quire_server.runner.gpu.cuda_device import CudaDevice
from quire_server.runner.gpu.device import Device
from quire_server.runner.loader import load_model
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from quire_server.runner.structured_outputs import Grammars
from quire_server.text import grammar as texts
from tests.kernels.gpu.as_cuda import as_cuda
from tests.server.models import families
from tests.server.models.variants import VOCAB
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.in_process import InProcessEngine, greedy, load

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"num_hidden_layers": 2}),
    "Qwen3": ("Qwen3", {"num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": True}),
}
SPARSE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3Moe": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [30, 31], [40] * 9]
SAMPLING = [
    greedy(8),
    SamplingParams(8, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(8, temperature=1.1, top_k=20, top_p=0.9, min_p=0.01, seed=6, ignore_eos=True),
]
LETTERS = Grammar(GrammarKind.REGEX, texts.compiled(GrammarKind.REGEX, "[a-z]{20,30}"))
VOCABULARY = texts.Vocabulary([bytes([byte]) if byte else b"" for byte in range(VOCAB)], [0], [0])
KERNELS = {
    "add_rmsnorm_triton",
    "rope_kv_write_triton",
    "silu_mul_triton",
    "paged_decode_attention_triton",
    "paged_prefill_attention_triton",
    "gumbel_sample_triton",
    "topk_topp_threshold_triton",
}


@pytest.fixture(scope="module", params=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    families.build(path, *MODELS[request.param])
    return path


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    return by_torch(load(directory, device="cpu"), PROMPTS, SAMPLING)


def by_torch(
    runner: ModelRunner, prompts: list[list[int]], sampling: list[SamplingParams]
) -> list[list[int]]:
    """Answers on a CPU, one request at a time."""
    return [
        InProcessEngine(runner).generate([prompt], each)[0]
        for prompt, each in zip(prompts, sampling, strict=True)
    ]


def answers(
    runner: ModelRunner, prompts: list[list[int]], sampling: list[SamplingParams], **limits: object
) -> list[list[int]]:
    """Answers of all requests in one batch, with asynchronous steps."""
    scheduler = InProcessEngine(runner, max_num_seqs=5, **limits).scheduler
    pipeline = StepPipeline(scheduler, runner)
    for name, (prompt, each) in enumerate(zip(prompts, sampling, strict=True)):
        if each.grammar is not None:
            runner.grammars.admit(str(name), runner.grammars.build(each.grammar))
        scheduler.add(Request(str(name), tuple(prompt), each, 0.0))
    tokens: list[list[int]] = [[] for _ in prompts]
    while scheduler.has_work:
        advanced = pipeline.advance()
        for event in advanced[1] if advanced is not None else ():
            assert event.error is None
            tokens[int(event.request_id)] += event.token_ids
    return tokens


def on_gpu(
    directory: Path, device: Device, on_progress: Callable[[int, int], None], **options: object
) -> ModelRunner:
    settings = {"dtype": "float32", "max_num_seqs": 5, "max_num_batched_tokens": 24, "max_model_len": 32}
    chosen = RunnerConfig(**(settings | options))  # type: ignore[arg-type]  # mixed values
    parts = load_model(directory, chosen, lambda loaded, total: None, device)
    runner = ModelRunner(parts, chosen, Grammars(lambda: VOCABULARY))
    runner.capture(on_progress)
    return runner


def new_device() -> Device:
    return CudaDevice() if torch.cuda.is_available() else FakeDevice()


@pytest.mark.kernels
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_its_answers_are_those_of_the_torch_path(
    directory: Path, expected: list[list[int]], is_eager: bool
) -> None:
    device, progress = new_device(), list[tuple[int, int]]()
    with as_cuda() as called:
        runner = on_gpu(directory, device, lambda *seen: progress.append(seen), enforce_eager=is_eager)
        called.clear()
        given = answers(runner, PROMPTS, SAMPLING)
    assert set(called) >= KERNELS
    assert given == expected
    if isinstance(device, FakeDevice):
        assert ("replay" in device.log) is not is_eager
    sizes = 4  # 5, 4, 2 and 1: three rows are padded to four
    captured = [(0, 0)] if is_eager else [(done, sizes) for done in range(sizes + 1)]
    assert list(dict.fromkeys(progress)) == captured and progress.count(captured[0]) > 3, "kernels come first"


@pytest.mark.kernels
@pytest.mark.parametrize("kind", SPARSE_MODELS)
def test_experts_are_computed_together_and_captured(kind: str, tmp_path: Path) -> None:
    families.build(tmp_path, *SPARSE_MODELS[kind])
    expected = by_torch(load(tmp_path, device="cpu"), PROMPTS, SAMPLING)
    device = new_device()
    with as_cuda() as called:
        runner = on_gpu(tmp_path, device, lambda done, wanted: None)
        called.clear()
        given = answers(runner, PROMPTS, SAMPLING)
    assert given == expected
    assert "moe_triton" in called and "silu_mul_triton" not in called, "no expert is computed alone"
    assert not isinstance(device, FakeDevice) or "replay" in device.log


@pytest.mark.kernels
def test_long_prompts_without_a_cached_prefix_use_torch_attention(
    directory: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[int] = []
    module = importlib.import_module("quire_kernels.attention.paged_prefill_attention")
    attention = module.whole_prompt_attention

    def noted(q: torch.Tensor, *more: Any) -> torch.Tensor:
        whole.append(len(q))
        return attention(q, *more)

    monkeypatch.setattr(module, "MIN_WHOLE_PROMPT", 17)
    monkeypatch.setattr(module, "whole_prompt_attention", noted)
    with as_cuda() as called:
        runner = on_gpu(directory, new_device(), lambda done, wanted: None, enforce_eager=True)
        called.clear()
        whole.clear()
        alone = [answers(runner, [prompt], [each])[0] for prompt, each in zip(PROMPTS, SAMPLING, strict=True)]
    assert alone == expected
    assert set(whole) == {len(PROMPTS[0])} and "paged_prefill_attention_triton" in called


@pytest.mark.kernels
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_drafts_are_verified_by_their_kernel(directory: Path, is_eager: bool) -> None:
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8], [40] * 9, [30, 31]]
    sampling = [greedy(12)] * 3
    host = load(directory, device="cpu")
    expected = [
        InProcessEngine(host).generate([prompt], each)[0]
        for prompt, each in zip(prompts, sampling, strict=True)
    ]
    drafts = SpeculationConfig(SpeculativeMethod.NGRAM, 2, lookup_min=1)
    with as_cuda() as called:
        runner = on_gpu(
            directory,
            new_device(),
            lambda done, wanted: None,
            num_speculative_tokens=2,
            enforce_eager=is_eager,
        )
        called.clear()
        together = answers(runner, prompts, sampling, speculation=drafts)
        alone = [answers(runner, [each], [greedy(12)], speculation=drafts)[0] for each in prompts]
    assert together == expected and alone == expected
    assert "paged_verify_attention_triton" in called


@pytest.mark.kernels
def test_a_draft_model_is_captured_beside_the_model(directory: Path) -> None:
    prompts, sampling = [[7, 8, 9, 7], [40] * 9, [30, 31]], [greedy(8)] * 3
    expected = by_torch(load(directory, device="cpu"), prompts, sampling)
    drafts = SpeculationConfig(SpeculativeMethod.DRAFT_MODEL, 2)
    device, progress = new_device(), list[tuple[int, int]]()
    with as_cuda() as called:
        runner = on_gpu(
            directory,
            device,
            lambda *seen: progress.append(seen),
            speculative_model=directory,
            num_speculative_tokens=2,
        )
        called.clear()
        given = answers(runner, prompts, sampling, speculation=drafts)
    assert given == expected
    assert "paged_verify_attention_triton" in called
    assert progress.count((4, 4)) == 1 and progress[-1] == (4, 4), "the draft model's graphs come last"
    assert not isinstance(device, FakeDevice) or "replay" in device.log


@pytest.mark.kernels
def test_penalties_and_grammar_masks_are_applied_on_the_device(directory: Path) -> None:
    sampling = [
        greedy(8, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(8, temperature=0.9, seed=5, ignore_eos=True, frequency_penalty=0.7),
        greedy(8, grammar=LETTERS),
    ]
    host = load(directory, device="cpu")
    host.grammars = Grammars(lambda: VOCABULARY)
    expected = [
        InProcessEngine(host).generate([prompt], each)[0]
        for prompt, each in zip(PROMPTS, sampling, strict=True)
    ]
    device = new_device()
    with as_cuda() as called:
        runner = on_gpu(directory, device, lambda done, wanted: None)
        called.clear()
        given = answers(runner, PROMPTS, sampling)
        kernels, log = set(called), getattr(device, "log", [])
        log.clear()
        without = answers(runner, PROMPTS[:2], sampling[:2])
    assert given == expected and without == expected[:2]
    assert {"apply_penalties_triton", "apply_token_bitmask_triton"} <= kernels
    if isinstance(device, FakeDevice):
        events = "".join(event[0] for event in log if event in ("download", "wait"))
        assert "dd" in events, "penalties cause no wait: the device has the tokens that the host lacks"
