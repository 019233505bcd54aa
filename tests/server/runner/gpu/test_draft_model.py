"""A draft model on the device changes no answer. (Captured graphs of draft models are tested on GPUs.)"""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from quire_server.core import cuda_graph_shapes, gpu_memory
from quire_server.runner import loader
from quire_server.runner.gpu import memory_profile
from quire_server.runner.loader import LoadedModel, load_model
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from quire_server.runner.structured_outputs import Grammars
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.in_process import InProcessEngine, greedy
from tests.server.runner.test_speculation import CIRCUMSTANCES, DRAFT_MODEL, LENGTH, SAMPLING, prompts


def gpu_runner(
    device: FakeDevice, directory: Path, draft: Path, **options: object
) -> tuple[LoadedModel, ModelRunner]:
    settings: dict[str, object] = {"dtype": "float32", "num_speculative_tokens": 4, "enforce_eager": True}
    chosen = RunnerConfig(speculative_model=draft, **(settings | options))  # type: ignore[arg-type]
    parts = load_model(directory, chosen, lambda loaded, total: None, device)
    runner = ModelRunner(parts, chosen, Grammars(lambda: pytest.fail("no grammar is used")))
    runner.capture(lambda captured, wanted: None)
    return parts, runner


def test_answers_are_those_of_the_model_alone(directory: Path, host: ModelRunner) -> None:
    device = FakeDevice()
    _, runner = gpu_runner(device, directory, directory, kv_offload_host_bytes=2 << 20)
    expected = InProcessEngine(host).generate(prompts(), greedy(LENGTH))
    drawn = InProcessEngine(host).generate(prompts(), SAMPLING)
    for name in ("all together", "chunks of 7", "preemption", "prefixes from the host"):
        engine = InProcessEngine(runner, speculation=DRAFT_MODEL, **CIRCUMSTANCES[name])
        assert engine.generate(prompts(), greedy(LENGTH)) == expected, name
        stats = engine.scheduler.stats.speculation
        assert stats.accepted_tokens > 0.8 * stats.draft_tokens > 0, "its draft is itself"
    assert InProcessEngine(runner, speculation=DRAFT_MODEL).generate(prompts(), SAMPLING) == drawn
    assert device.widest_download <= 20, "no row of logits leaves it"


def test_tokens_beyond_the_drafts_vocabulary_do_no_harm(
    directory: Path, host: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models with one tokenizer may pad its vocabulary to different sizes."""
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "refuse_misfit", lambda model, draft: None)
    expected = InProcessEngine(host).generate(prompts(), greedy(LENGTH))
    _, runner = gpu_runner(FakeDevice(), directory, tmp_path)
    engine = InProcessEngine(runner, speculation=DRAFT_MODEL)
    assert engine.generate(prompts(), greedy(LENGTH)) == expected
    assert engine.scheduler.stats.speculation.draft_tokens > 0


def test_its_graphs_are_reserved_and_its_steps_share_the_models_workspace(directory: Path) -> None:
    device, options = FakeDevice(), RunnerConfig(num_speculative_tokens=4, max_num_seqs=8)
    parts, _ = gpu_runner(device, directory, directory)
    assert parts.draft is not None
    both, alone = (
        memory_profile.measure(parts.model, options, device, parts.kv_caches[0].dtype, 128, draft=draft)
        for draft in (parts.draft, None)
    )
    of_drafts = gpu_memory.graph_bytes(1 << 20, cuda_graph_shapes.shapes(8, 0), 4 * 211)
    assert (both.graphs, both.workspace) == (alone.graphs + of_drafts, alone.workspace)
