"""A draft model on the device, beside the model: it changes no answer there either (captured ones: by the
kernels, in ``tests.kernels.gpu.test_whole_model_triton``).
"""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from quire_server.core import gpu_memory, graph_buckets
from quire_server.runner import drafts, gpu_setup
from quire_server.runner.grammars import Grammars
from quire_server.runner.model_runner import ModelRunner, RunnerOptions
from quire_server.runner.parts import Parts, assemble
from tests.server.runner.in_process import InProcessEngine, greedy
from tests.server.runner.pretend_device import PretendDevice
from tests.server.runner.test_speculation import CIRCUMSTANCES, DRAFT_MODEL, LENGTH, SAMPLING, prompts


def on(device: PretendDevice, directory: Path, draft: Path, **options: object) -> tuple[Parts, ModelRunner]:
    settings: dict[str, object] = {"dtype": "float32", "num_speculative_tokens": 4, "enforce_eager": True}
    chosen = RunnerOptions(speculative_model=draft, **(settings | options))  # type: ignore[arg-type]
    parts = assemble(directory, chosen, lambda loaded, total: None, device)
    runner = ModelRunner(parts, chosen, Grammars(lambda: pytest.fail("no grammar is used")))
    runner.capture(lambda captured, wanted: None)
    return parts, runner


def test_answers_are_those_of_the_model_alone(directory: Path, host: ModelRunner) -> None:
    _, runner = on(PretendDevice(), directory, directory, kv_offload_host_bytes=2 << 20)
    expected = InProcessEngine(host).generate(prompts(), greedy(LENGTH))
    drawn = InProcessEngine(host).generate(prompts(), SAMPLING)
    for name in ("all together", "chunks of 7", "preemption", "prefixes from the host"):
        engine = InProcessEngine(runner, speculation=DRAFT_MODEL, **CIRCUMSTANCES[name])
        assert engine.generate(prompts(), greedy(LENGTH)) == expected, name
        stats = engine.scheduler.stats.speculation
        assert stats.accepted_tokens > 0.8 * stats.draft_tokens > 0, "its draft is itself"
    assert InProcessEngine(runner, speculation=DRAFT_MODEL).generate(prompts(), SAMPLING) == drawn


def test_tokens_beyond_the_drafts_vocabulary_do_no_harm(
    directory: Path, host: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vocabularies of one tokenizer are padded to different widths."""
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr(drafts, "refuse_misfit", lambda model, draft: None)
    expected = InProcessEngine(host).generate(prompts(), greedy(LENGTH))
    _, runner = on(PretendDevice(), directory, tmp_path)
    engine = InProcessEngine(runner, speculation=DRAFT_MODEL)
    assert engine.generate(prompts(), greedy(LENGTH)) == expected
    assert engine.scheduler.stats.speculation.draft_tokens > 0


def test_its_graphs_are_set_aside_and_its_steps_take_the_models_room(directory: Path) -> None:
    device, options = PretendDevice(), RunnerOptions(num_speculative_tokens=4, max_num_seqs=8)
    parts, _ = on(device, directory, directory)
    assert parts.draft is not None
    both, alone = (
        gpu_setup.measure(parts.model, options, device, parts.kv_caches[0].dtype, 128, draft=draft)
        for draft in (parts.draft, None)
    )
    of_drafts = gpu_memory.graph_bytes(1 << 20, graph_buckets.shapes(8, 0), 4 * 211)
    assert (both.graphs, both.workspace) == (alone.graphs + of_drafts, alone.workspace)
