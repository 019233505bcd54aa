"""Requests get the same tokens on an asynchronous device as on the host."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_server.core import cuda_graph_shapes
from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.cuda_graph_shapes import Shape
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams, ThinkingBudget
from quire_server.core.step import NOT_FINITE, OUT_OF_MEMORY, StartedRow, Step, TokenEvent
from quire_server.core.watermark import Watermark
from quire_server.engine.engine_core import StepPipeline
from quire_server.errors import ConfigError
from quire_server.layers import attention
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.models.decoder import Decoder
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.gpu.input_batch import GpuInputBatch
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.loader import load_model
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from quire_server.runner.structured_outputs import Grammars
from quire_server.termination import Reason, failure_of
from tests.server.models import compressed_tensors_oracle as compressed
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.test_model_runner import PROMPTS, SAMPLING
from tests.server.runner.test_quantized_parity import tiny_llama

LONG = [3 + i % 200 for i in range(90)]


def gpu_runner(device: FakeDevice, directory: Path, **options: object) -> ModelRunner:
    settings: dict[str, object] = {"dtype": "float32", "max_num_seqs": 16, "enforce_eager": True}
    chosen = RunnerConfig(**(settings | options))  # type: ignore[arg-type]  # mixed values
    parts = load_model(directory, chosen, lambda loaded, total: None, device)
    runner = ModelRunner(parts, chosen, Grammars(lambda: pytest.fail("no grammar is used")))
    runner.capture(lambda captured, wanted: None if wanted == 0 else pytest.fail("nothing is captured"))
    return runner


def outputs_of(
    runner: ModelRunner,
    requests: list[Request],
    *,
    late: list[Request] | None = None,
    abort: str = "",
    **limits: object,
) -> tuple[dict[str, list[int]], dict[str, TokenEvent]]:
    """Run an asynchronous pipeline: tokens and last event by request. ``late`` requests arrive one per
    step.
    """
    engine = InProcessEngine(runner, **limits)
    pipeline, late = StepPipeline(engine.scheduler, runner), list(late or ())
    tokens: dict[str, list[int]] = {}
    last: dict[str, TokenEvent] = {}
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_work or late:
        if late:
            engine.scheduler.add(late.pop())
        advanced = pipeline.advance()
        for event in advanced[1] if advanced is not None else ():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            last[event.request_id] = event
            if event.request_id == abort and event.finish_reason is None:
                engine.scheduler.abort(abort)
    engine.scheduler.check()
    return tokens, last


def test_all_sampling_methods_in_one_batch_match_the_host(directory: Path, host: ModelRunner) -> None:
    requests = [
        Request(str(i), tuple(prompt), sampling, 0.0)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
    ]
    expected, at_the_end = outputs_of(host, requests)
    device = FakeDevice()
    runner = gpu_runner(device, directory)
    tokens, last = outputs_of(runner, requests[:12], late=requests[12:])
    assert tokens == expected
    for name, event in at_the_end.items():
        assert (event.logprobs is None) == (last[name].logprobs is None)
        for mine, theirs in zip(last[name].logprobs or (), event.logprobs or (), strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@pytest.fixture
def takes_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU ops know no padding, which graphs have: it is written to the last block and reads one key."""
    write, attend = attention.rope_kv_write, attention.paged_decode_attention

    def written(*args: Any, cache_rows: object, **more: Any) -> torch.Tensor:
        *before, slots, cache = args
        spare = cache.keys.shape[0] * cache.keys.shape[2] - 1
        return write(*before, slots.where(slots >= 0, spare), cache, **more)

    def attended(q: torch.Tensor, kv: Any, *, gather: object, **more: Any) -> torch.Tensor:
        return attend(q, replace(kv, seq_lens=kv.seq_lens.clamp(min=1)), **more)

    monkeypatch.setattr(attention, "rope_kv_write", written)
    monkeypatch.setattr(attention, "paged_decode_attention", attended)


@pytest.mark.parametrize("most_keys", [1 << 16, 0])
def test_small_steps_with_prompts_are_replays_and_give_the_tokens_of_the_host(
    directory: Path, host: ModelRunner, monkeypatch: pytest.MonkeyPatch, takes_padding: None, most_keys: int
) -> None:
    monkeypatch.setattr(cuda_graph_shapes, "_MOST_KEYS", most_keys)
    requests = [
        Request(str(i), tuple(prompt), sampling, 0.0)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
    ]
    expected, _ = outputs_of(host, requests)
    device = FakeDevice()
    config = RunnerConfig(dtype="float32", max_num_seqs=16, num_blocks_override=65, max_model_len=64)
    runner = ModelRunner.load(directory, config, lambda *_: None, device=device)
    runner.capture(lambda *_: None)
    steps = runner._device
    assert steps is not None
    launched, graph_for = list[tuple[bool, bool]](), steps.graph_for

    def noted(step: Step, layout: StepLayout) -> Shape | None:
        graph = graph_for(step, layout)
        launched.append((cuda_graph_shapes.is_uniform(step), graph is not None))
        return graph

    monkeypatch.setattr(steps, "graph_for", noted)
    limits = {"max_num_batched_tokens": 16, "num_blocks": 64}
    tokens, _ = outputs_of(runner, requests[:6], late=requests[6:], **limits)
    assert tokens == expected
    assert ((False, True) in launched) == bool(most_keys) and (True, True) in launched
    assert (False, False) in launched, "prompts whose log-probabilities are requested"
    assert device.log.count("replay") == sum(is_replay for _, is_replay in launched)


def edited_rows() -> list[SamplingParams]:
    """Each kind of change that is neither a penalty nor a grammar, and what two of them do together."""
    thinking = ThinkingBudget(3, end_token_id=9)
    return [
        greedy(8, logit_bias=((5, 4.0), (9, -50.0)), frequency_penalty=0.5),
        greedy(8, allowed_token_ids=(3, 4, 5, 6, 7, 8), bad_words=((4,), (5, 6))),
        greedy(8, watermark=True),
        greedy(8, thinking=thinking),
        greedy(8, thinking=thinking, bad_words=((9,),)),
        SamplingParams(8, temperature=0.9, seed=4, min_tokens=5, stop_token_ids=tuple(range(2, 180))),
        SamplingParams(8, temperature=0.9, seed=4, top_k=9, logprobs=3, ignore_eos=True),
        greedy(8),
    ]


@pytest.mark.parametrize("drafts", [0, 3])
def test_changes_of_some_rows_are_made_on_the_device_and_no_row_of_logits_leaves_it(
    directory: Path, drafts: int
) -> None:
    options = {"watermark": Watermark(b"k" * 16, 0.5, 3.0), "max_num_seqs": 16}
    requests = [
        Request(f"{i}", tuple(prompt), sampling, 0.0)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, edited_rows() * 2, strict=False))
    ]
    limits: dict[str, object] = {}
    if drafts:
        limits["speculation"] = SpeculationConfig(SpeculativeMethod.NGRAM, drafts, lookup_min=1)
    expected, _ = outputs_of(load(directory, **options), requests)
    device = FakeDevice()
    runner = gpu_runner(device, directory, **options)
    tokens, last = outputs_of(runner, requests, **limits)
    assert tokens == expected
    assert last["6"].logprobs is not None and len(last["6"].logprobs[0].top) == 3
    assert device.widest_download <= 20, "the likeliest tokens, as many as a request may list"


def test_a_row_that_wants_logprobs_does_not_keep_the_batch_from_running_ahead(directory: Path) -> None:
    device = FakeDevice()
    runner = gpu_runner(device, directory)
    sampling = [greedy(9, logprobs=2), greedy(9, min_tokens=5, logit_bias=((5, 2.0),)), greedy(9)]
    outputs_of(runner, [Request(str(i), tuple(PROMPTS[i]), sampling[i], 0.0) for i in range(3)])
    log = "".join(event[0] for event in device.log)
    # Of each step with log-probabilities: the tokens of all rows, and four results of that one row.
    assert "d" * 10 in log, "two steps are launched before a result is asked for"


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_num_batched_tokens": 5}, {"num_blocks": 6, "max_model_len": 64}],
    ids=["together", "chunks", "preemption"],
)
def test_simple_rows_are_sampled_on_the_device_one_step_ahead(
    directory: Path, host: ModelRunner, limits: dict[str, object]
) -> None:
    sampling = [
        greedy(9),
        SamplingParams(9, temperature=0.8, top_p=0.9, min_p=0.02, seed=3, ignore_eos=True),
        greedy(9, repetition_penalty=1.5, frequency_penalty=0.4),
    ]
    requests = [Request(str(i), tuple(prompt), sampling[i % 3], 0.0) for i, prompt in enumerate(PROMPTS)]
    expected, _ = outputs_of(host, requests, **limits)
    device = FakeDevice()
    runner = gpu_runner(device, directory)
    assert outputs_of(runner, requests, **limits)[0] == expected
    log = "".join(event[0] for event in device.log)
    assert "dd" in log, "two steps are launched before a result is asked for"
    assert log.count("d") == log.count("w")


def test_a_context_is_uploaded_once_for_its_penalties_and_not_with_every_step(
    directory: Path, host: ModelRunner
) -> None:
    sampling = [greedy(12, repetition_penalty=1.5, frequency_penalty=0.4)] * 3
    prompts = [LONG, PROMPTS[1], LONG[::-1]]
    requests = [Request(str(i), tuple(prompts[i]), sampling[i], 0.0) for i in range(3)]
    expected, _ = outputs_of(host, requests)
    device = FakeDevice()
    runner = gpu_runner(device, directory)
    assert outputs_of(runner, requests[:1])[0] == {"0": expected["0"]}
    engine = InProcessEngine(runner)
    pipeline = StepPipeline(engine.scheduler, runner)
    tokens: dict[str, list[int]] = {"1": [], "2": []}
    for request in requests[1:]:
        engine.scheduler.add(request)
    steps = 0
    while engine.scheduler.has_work:
        steps += 1
        advanced = pipeline.advance()
        for event in advanced[1] if advanced is not None else ():
            tokens[event.request_id] += event.token_ids
        if steps == 2:
            device.largest_upload = 0
    assert tokens == {name: expected[name] for name in ("1", "2")}
    assert device.largest_upload < 8 * len(LONG)


def test_rows_and_blocks_of_finished_requests_are_reused_at_once(directory: Path, host: ModelRunner) -> None:
    def requests(runner: ModelRunner) -> list[Request]:
        found = []
        for i, prompt in enumerate(PROMPTS):
            (free,) = InProcessEngine(host).generate([prompt], greedy(8))
            stop = greedy(8, stop_token_ids=(free[2 + i % 4],))
            found.append(Request(str(i), tuple(prompt), stop, 0.0))
        return found

    asked = requests(host)
    expected, _ = outputs_of(host, asked)
    runner = gpu_runner(FakeDevice(), directory, max_num_seqs=3)
    tight = {"max_num_seqs": 3, "num_blocks": 8, "max_model_len": 64, "enable_prefix_caching": False}
    assert outputs_of(runner, asked, **tight)[0] == expected
    without, _ = outputs_of(runner, asked, abort="1", **tight)
    assert {name: tokens for name, tokens in without.items() if name != "1"} == {
        name: tokens for name, tokens in expected.items() if name != "1"
    }


def test_drafts_are_verified_on_the_device(directory: Path, host: ModelRunner) -> None:
    biased = [greedy(30, logit_bias=((100 + i, 100.0),)) if i % 2 else greedy(30) for i in range(6)]
    requests = [Request(str(i), tuple(PROMPTS[i]), sampling, 0.0) for i, sampling in enumerate(biased)]
    expected, _ = outputs_of(host, requests)
    drafts = SpeculationConfig(SpeculativeMethod.NGRAM, 4, lookup_min=1)
    runner = gpu_runner(FakeDevice(), directory)
    assert outputs_of(runner, requests, speculation=drafts)[0] == expected
    alone = {
        name: outputs_of(runner, [request], speculation=drafts)[0][name]
        for name, request in zip(expected, requests, strict=True)
    }
    assert alone == expected


def test_offloaded_blocks_are_loaded_back_to_the_device(directory: Path, host: ModelRunner) -> None:
    requests = [Request(str(i), tuple(prompt), greedy(12), 0.0) for i, prompt in enumerate(PROMPTS)]
    expected, _ = outputs_of(host, requests)
    device = FakeDevice()
    runner = gpu_runner(device, directory, kv_offload_host_bytes=2 << 20)
    limits = {"num_blocks": 6, "max_model_len": 64, "num_host_slots": 32}
    assert outputs_of(runner, requests, **limits)[0] == expected
    block_bytes = sum(cache.nbytes // cache.shape[1] for cache in runner._kv_caches)
    size = (2 << 20) // block_bytes * block_bytes
    assert f"pin {size} of --kv-offload-host-bytes" in device.log, "as much as was asked for"


def test_nan_logits_fail_one_request_although_the_next_step_was_launched(
    directory: Path, host: ModelRunner
) -> None:
    runner = gpu_runner(FakeDevice(), directory)
    poisoned = PROMPTS[0][0]
    runner._model.embedding[poisoned] = float("nan")  # no public way to damage a model
    runner._model.head.weight = runner._model.head.weight.nan_to_num()
    clean = [Request(str(i), tuple(p), greedy(6), 0.0) for i, p in enumerate(PROMPTS) if poisoned not in p][
        :3
    ]
    expected, _ = outputs_of(host, clean)
    assert not any(poisoned in answer for answer in expected.values())
    bad = Request("bad", tuple(PROMPTS[0]), greedy(6), 0.0)
    for _ in range(2):  # the second time on blocks that the first has used
        tokens, last = outputs_of(runner, [bad, *clean], num_blocks=8, max_model_len=64)
        assert last["bad"].error == NOT_FINITE and tokens.pop("bad") == []
        assert tokens == expected


def test_without_memory_for_a_step_the_largest_request_fails(
    directory: Path, host: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = gpu_runner(FakeDevice(), directory)
    requests = [Request(str(i), tuple(prompt), greedy(6), 0.0) for i, prompt in enumerate(PROMPTS[:5])]
    expected, _ = outputs_of(host, requests)
    compute, strikes = runner._forward, list[int]()

    def hungry(step, spans):  # type: ignore[no-untyped-def]  # a fault
        if step.total_tokens > 60:
            strikes.append(step.step_id)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return compute(step, spans)

    monkeypatch.setattr(runner, "_forward", hungry)
    late = [Request("long", tuple(LONG), greedy(6), 0.0)]
    tokens, last = outputs_of(runner, requests, late=late)
    assert len(strikes) == 1 and last["long"].error == OUT_OF_MEMORY
    tokens.pop("long")
    assert tokens == expected


def test_block_tables_grow_as_on_the_host_also_by_several_blocks() -> None:
    input_batch = InputBatch(3, 16, 2)
    there = GpuInputBatch(input_batch, FakeDevice())
    started = tuple(
        StartedRow(row, str(row), (7,) * 3, 3, (10 * row + 1, 10 * row + 2), greedy(9), 0) for row in (2, 0)
    )
    for step in (
        Step(1, started, (), (), (), (), ()),
        Step(2, (), ((0, 5), (2, 25), (0, 6), (0, 7)), (), (), (), ()),
    ):
        input_batch.apply(step)
        there.apply(step)
        for row in (0, 2):
            count = input_batch.num_blocks[row]
            assert there.block_table[row, :count].tolist() == input_batch.block_table[row, :count].tolist()
    assert there.block_table[0, :5].tolist() == [1, 2, 5, 6, 7]


def test_the_cache_gets_the_memory_that_the_measured_peak_leaves(directory: Path) -> None:
    runner = gpu_runner(FakeDevice(), directory, max_model_len=128)
    assert runner.num_blocks == 16 * 128 // 16, "more is of no use"
    assert runner.gpu_memory == {
        "weights": 48 << 20, "workspace": 1 << 20, "kv": runner.kv_cache_bytes, "graphs": 0,
    }  # fmt: skip
    small = gpu_runner(FakeDevice(total=84 << 20), directory, gpu_memory_utilization=0.98)
    each = runner.kv_cache_bytes // runner.num_blocks
    taken = (96 - 64 + 48 + 1) << 20
    assert small.num_blocks == (int((84 << 20) * 0.98) - taken) // each
    with pytest.raises(ConfigError, match="Raise --gpu-memory-utilization to 0"):
        gpu_runner(FakeDevice(), directory, gpu_memory_utilization=0.01)


def test_steps_and_graphs_are_measured_with_logits_for_every_draft(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[tuple[int, int]] = []
    computed = Decoder.computed

    def noted(model: Decoder, batch: ForwardBatch, *rest: Any) -> object:
        sampled.append((len(batch.token_ids), len(batch.sample_rows)))
        return computed(model, batch, *rest)

    monkeypatch.setattr(Decoder, "computed", noted)
    settings: dict[str, object] = {"max_model_len": 128, "max_num_batched_tokens": 100, "max_num_seqs": 16}
    for drafts, counted in ((0, [(100, 16), (16, 16)]), (4, [(100, 80), (80, 80)])):
        chosen = RunnerConfig(dtype="float32", num_speculative_tokens=drafts, **settings)  # type: ignore[arg-type]
        sampled.clear()
        parts = load_model(directory, chosen, lambda loaded, total: None, FakeDevice())
        assert sampled == counted and parts.num_blocks == 128


def test_an_fp8_checkpoint_is_refused_on_a_gpu_without_fp8(tmp_path: Path) -> None:
    compressed.write(tiny_llama(tmp_path / "float"), tmp_path / "model", "fp8 by channel")
    with pytest.raises(ConfigError, match="compute capability 8.0 has no FP8") as caught:
        gpu_runner(FakeDevice(capability=80), tmp_path / "model")
    assert failure_of(caught.value).reason is Reason.CONFIG_ERROR
    with pytest.raises(ConfigError, match="fp8 needs a GPU of compute capability 8.9 or more.* use int8"):
        gpu_runner(FakeDevice(capability=80), tmp_path / "float", kv_cache_dtype="fp8")
    assert gpu_runner(FakeDevice(capability=89), tmp_path / "model").quantization == "compressed-tensors"


def test_a_gpu_older_than_the_kernels_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"compute capability 7\.5, and the kernels need 8\.0 or more"):
        gpu_runner(FakeDevice(capability=75), directory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "int8 is the CPU's arithmetic"),
        ({"quantization": "int4"}, "int4 is the CPU's arithmetic"),
        ({"max_model_len": 257}, "256 positions"),
    ],
)
def test_settings_of_the_cpu_only_are_refused(
    directory: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        gpu_runner(FakeDevice(), directory, **options)
