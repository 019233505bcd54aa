"""A whole model by the kernels of a GPU, through its runner and its graphs, answers as torch does."""

from pathlib import Path
from typing import Any

import pytest

from quire_server.core.request import Request, SamplingParams
from quire_server.engine.pipeline import Pipeline
from quire_server.runner.grammars import Grammars
from quire_server.runner.model_runner import ModelRunner, RunnerOptions
from quire_server.runner.parts import assemble
from tests.kernels.gpu.as_cuda import as_cuda
from tests.server.models import families
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.pretend_device import PretendDevice

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"num_hidden_layers": 2}),
    "Qwen3": ("Qwen3", {"num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": True}),
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [30, 31], [40] * 9]
SAMPLING = [
    greedy(8),
    SamplingParams(8, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(8, temperature=1.1, top_k=20, top_p=0.9, min_p=0.01, seed=6, ignore_eos=True),
]
KERNELS = {
    "add_rmsnorm_triton",
    "rope_kv_write_triton",
    "silu_mul_triton",
    "paged_decode_attention_triton",
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
    """By torch, as on a CPU, one request at a time."""
    runner = load(directory)
    return [
        InProcessEngine(runner).generate([prompt], sampling)[0]
        for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
    ]


def answers(runner: ModelRunner) -> list[list[int]]:
    """All together, with a step ahead."""
    scheduler = InProcessEngine(runner, max_num_seqs=5).scheduler
    pipeline = Pipeline(scheduler, runner)
    for name, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        scheduler.add(Request(str(name), tuple(prompt), sampling, 0.0))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while scheduler.has_work:
        advanced = pipeline.advance()
        for event in advanced[1] if advanced is not None else ():
            assert event.error is None
            tokens[int(event.request_id)] += event.token_ids
    return tokens


@pytest.mark.kernels
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_its_answers_are_those_of_the_torch_path(
    directory: Path, expected: list[list[int]], is_eager: bool
) -> None:
    device, progress = PretendDevice(), list[tuple[int, int]]()
    options = RunnerOptions(
        dtype="float32", max_num_seqs=5, max_num_batched_tokens=24, max_model_len=32, enforce_eager=is_eager
    )
    with as_cuda() as called:
        parts = assemble(directory, options, lambda loaded, total: None, device)
        runner = ModelRunner(parts, options, Grammars(lambda: pytest.fail("no grammar is used")))
        runner.capture(lambda done, wanted: progress.append((done, wanted)))
        called.clear()
        given = answers(runner)
    assert set(called) >= KERNELS
    assert given == expected
    assert ("replay" in device.log) is not is_eager
    sizes = 4  # 5, 4, 2 and 1: three rows are padded to four
    assert progress == ([] if is_eager else [(done, sizes) for done in range(sizes + 1)])
