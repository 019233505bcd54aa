"""On a device that computes by itself requests get what they get on the host."""

from pathlib import Path

import pytest
import torch

from quire_server.core.errors import ConfigError
from quire_server.core.limits import SpeculationConfig, SpeculativeMethod
from quire_server.core.request import Request, SamplingParams
from quire_server.core.step import OUT_OF_MEMORY, StartedRow, Step, TokenEvent
from quire_server.engine.pipeline import Pipeline
from quire_server.exits import Reason, failure_of
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.models.decoder import Decoder
from quire_server.runner.device_rows import DeviceRows
from quire_server.runner.grammars import Grammars
from quire_server.runner.model_runner import ModelRunner, RunnerOptions
from quire_server.runner.parts import assemble
from quire_server.runner.rows import Rows
from quire_server.runner.sampler import NOT_FINITE
from tests.server.models import compressed_tensors_oracle as compressed
from tests.server.runner.in_process import InProcessEngine, greedy
from tests.server.runner.pretend_device import PretendDevice
from tests.server.runner.test_model_runner import PROMPTS, SAMPLING
from tests.server.runner.test_quantized_parity import tiny_llama

LONG = [3 + i % 200 for i in range(90)]


def on(device: PretendDevice, directory: Path, **options: object) -> ModelRunner:
    settings: dict[str, object] = {"dtype": "float32", "max_num_seqs": 16, "enforce_eager": True}
    chosen = RunnerOptions(**(settings | options))  # type: ignore[arg-type]  # mixed values
    parts = assemble(directory, chosen, lambda loaded, total: None, device)
    runner = ModelRunner(parts, chosen, Grammars(lambda: pytest.fail("no grammar is used")))
    runner.capture(lambda captured, wanted: pytest.fail("nothing is captured"))
    return runner


def play(
    runner: ModelRunner,
    requests: list[Request],
    *,
    late: list[Request] | None = None,
    abort: str = "",
    **limits: object,
) -> tuple[dict[str, list[int]], dict[str, TokenEvent]]:
    """By a pipeline: tokens and last events by request; late ones come one by one with the steps."""
    engine = InProcessEngine(runner, **limits)
    pipeline, late = Pipeline(engine.scheduler, runner), list(late or ())
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


def test_all_ways_of_sampling_together_give_what_the_host_gives(directory: Path, host: ModelRunner) -> None:
    requests = [
        Request(str(i), tuple(prompt), sampling, 0.0)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
    ]
    expected, at_the_end = play(host, requests)
    device = PretendDevice()
    runner = on(device, directory)
    tokens, last = play(runner, requests[:12], late=requests[12:])
    assert tokens == expected
    assert last["0"].logprobs is not None and at_the_end["0"].logprobs is not None
    assert last["0"].logprobs[0].token_id == at_the_end["0"].logprobs[0].token_id


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_num_batched_tokens": 5}, {"num_blocks": 6, "max_model_len": 64}],
    ids=["together", "chunks", "preemption"],
)
def test_plain_rows_are_sampled_there_with_a_step_ahead(
    directory: Path, host: ModelRunner, limits: dict[str, object]
) -> None:
    sampling = [
        greedy(9),
        SamplingParams(9, temperature=0.8, top_p=0.9, min_p=0.02, seed=3, ignore_eos=True),
        greedy(9, repetition_penalty=1.5, frequency_penalty=0.4),
    ]
    requests = [Request(str(i), tuple(prompt), sampling[i % 3], 0.0) for i, prompt in enumerate(PROMPTS)]
    expected, _ = play(host, requests, **limits)
    device = PretendDevice()
    runner = on(device, directory)
    assert play(runner, requests, **limits)[0] == expected
    log = "".join(event[0] for event in device.log)
    assert "dd" in log, "two steps are launched before a result is asked for"
    assert log.count("d") == log.count("w")


def test_rows_and_blocks_of_answers_that_stopped_serve_the_next_ones_at_once(
    directory: Path, host: ModelRunner
) -> None:
    def requests(runner: ModelRunner) -> list[Request]:
        found = []
        for i, prompt in enumerate(PROMPTS):
            (free,) = InProcessEngine(host).generate([prompt], greedy(8))
            stop = greedy(8, stop_token_ids=(free[2 + i % 4],))
            found.append(Request(str(i), tuple(prompt), stop, 0.0))
        return found

    asked = requests(host)
    expected, _ = play(host, asked)
    runner = on(PretendDevice(), directory, max_num_seqs=3)
    tight = {"max_num_seqs": 3, "num_blocks": 8, "max_model_len": 64, "enable_prefix_caching": False}
    assert play(runner, asked, **tight)[0] == expected
    without, _ = play(runner, asked, abort="1", **tight)
    assert {name: tokens for name, tokens in without.items() if name != "1"} == {
        name: tokens for name, tokens in expected.items() if name != "1"
    }


def test_drafts_are_verified_there(directory: Path, host: ModelRunner) -> None:
    biased = [greedy(30, logit_bias=((100 + i, 100.0),)) if i % 2 else greedy(30) for i in range(6)]
    requests = [Request(str(i), tuple(PROMPTS[i]), sampling, 0.0) for i, sampling in enumerate(biased)]
    expected, _ = play(host, requests)
    drafts = SpeculationConfig(SpeculativeMethod.NGRAM, 4, lookup_min=1)
    runner = on(PretendDevice(), directory)
    assert play(runner, requests, speculation=drafts)[0] == expected
    alone = {
        name: play(runner, [request], speculation=drafts)[0][name]
        for name, request in zip(expected, requests, strict=True)
    }
    assert alone == expected


def test_blocks_on_the_host_come_back_to_it(directory: Path, host: ModelRunner) -> None:
    requests = [Request(str(i), tuple(prompt), greedy(12), 0.0) for i, prompt in enumerate(PROMPTS)]
    expected, _ = play(host, requests)
    runner = on(PretendDevice(), directory, kv_offload_host_bytes=2 << 20)
    limits = {"num_blocks": 6, "max_model_len": 64, "num_host_slots": 32}
    assert play(runner, requests, **limits)[0] == expected


def test_what_is_no_number_fails_alone_though_the_next_step_was_launched(
    directory: Path, host: ModelRunner
) -> None:
    runner = on(PretendDevice(), directory)
    poisoned = PROMPTS[0][0]
    runner._model.embedding[poisoned] = float("nan")  # no public way to break a model
    runner._model.head.weight = runner._model.head.weight.nan_to_num()
    clean = [Request(str(i), tuple(p), greedy(6), 0.0) for i, p in enumerate(PROMPTS) if poisoned not in p][
        :3
    ]
    expected, _ = play(host, clean)
    assert not any(poisoned in answer for answer in expected.values())
    bad = Request("bad", tuple(PROMPTS[0]), greedy(6), 0.0)
    for _ in range(2):  # the second time over blocks that the first has left
        tokens, last = play(runner, [bad, *clean], num_blocks=8, max_model_len=64)
        assert last["bad"].error == NOT_FINITE and tokens.pop("bad") == []
        assert tokens == expected


def test_without_memory_for_a_step_the_largest_request_fails(
    directory: Path, host: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = on(PretendDevice(), directory)
    requests = [Request(str(i), tuple(prompt), greedy(6), 0.0) for i, prompt in enumerate(PROMPTS[:5])]
    expected, _ = play(host, requests)
    compute, strikes = runner._forward, list[int]()

    def hungry(step, spans):  # type: ignore[no-untyped-def]  # a fault
        if step.total_tokens > 60:
            strikes.append(step.step_id)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return compute(step, spans)

    monkeypatch.setattr(runner, "_forward", hungry)
    late = [Request("long", tuple(LONG), greedy(6), 0.0)]
    tokens, last = play(runner, requests, late=late)
    assert len(strikes) == 1 and last["long"].error == OUT_OF_MEMORY
    tokens.pop("long")
    assert tokens == expected


def test_tables_grow_there_as_on_the_host_by_several_blocks_at_once_too() -> None:
    rows = Rows(3, 16, 2)
    there = DeviceRows(rows, PretendDevice())
    started = tuple(
        StartedRow(row, str(row), (7,) * 3, 3, (10 * row + 1, 10 * row + 2), greedy(9), 0) for row in (2, 0)
    )
    for step in (
        Step(1, started, (), (), (), (), ()),
        Step(2, (), ((0, 5), (2, 25), (0, 6), (0, 7)), (), (), (), ()),
    ):
        rows.apply(step)
        there.apply(step)
        for row in (0, 2):
            count = rows.num_blocks[row]
            assert there.block_table[row, :count].tolist() == rows.block_table[row, :count].tolist()
    assert there.block_table[0, :5].tolist() == [1, 2, 5, 6, 7]


def test_the_cache_gets_what_the_measured_peak_leaves(directory: Path) -> None:
    runner = on(PretendDevice(), directory, max_model_len=128)
    assert runner.num_blocks == 16 * 128 // 16, "more is of no use"
    assert runner.gpu_memory == {
        "weights": 48 << 20, "workspace": 1 << 20, "kv": runner.kv_cache_bytes, "graphs": 0,
    }  # fmt: skip
    small = on(PretendDevice(total=84 << 20), directory, gpu_memory_utilization=0.98)
    each = runner.kv_cache_bytes // runner.num_blocks
    taken = (96 - 64 + 48 + 1) << 20
    assert small.num_blocks == (int((84 << 20) * 0.98) - taken) // each
    with pytest.raises(ConfigError, match="Raise --gpu-memory-utilization to 0"):
        on(PretendDevice(), directory, gpu_memory_utilization=0.01)


def test_steps_and_graphs_are_measured_with_logits_for_every_draft(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[tuple[int, int]] = []
    states = Decoder.states

    def noted(model: Decoder, batch: ForwardBatch, kv_caches: tuple[torch.Tensor, ...]) -> object:
        sampled.append((len(batch.token_ids), len(batch.sample_rows)))
        return states(model, batch, kv_caches)

    monkeypatch.setattr(Decoder, "states", noted)
    settings: dict[str, object] = {"max_model_len": 128, "max_num_batched_tokens": 100, "max_num_seqs": 16}
    for drafts, counted in ((0, [(100, 16), (16, 16)]), (4, [(100, 80), (80, 80)])):
        chosen = RunnerOptions(dtype="float32", num_speculative_tokens=drafts, **settings)  # type: ignore[arg-type]
        sampled.clear()
        parts = assemble(directory, chosen, lambda loaded, total: None, PretendDevice())
        assert sampled == counted and parts.num_blocks == 128


def test_an_fp8_checkpoint_is_not_made_float_in_silence_where_the_gpu_has_no_fp8(tmp_path: Path) -> None:
    compressed.write(tiny_llama(tmp_path / "float"), tmp_path / "model", "fp8 by channel")
    with pytest.raises(ConfigError, match="compute capability 8.0 has no FP8") as caught:
        on(PretendDevice(capability=80), tmp_path / "model")
    assert failure_of(caught.value).reason is Reason.CONFIG_ERROR
    with pytest.raises(ConfigError, match="fp8 needs a GPU of compute capability 8.9 or more.* use int8"):
        on(PretendDevice(capability=80), tmp_path / "float", kv_cache_dtype="fp8")
    assert on(PretendDevice(capability=89), tmp_path / "model").quantization == "compressed-tensors"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "int8 is the CPU's arithmetic"),
        ({"max_model_len": 257}, "256 positions"),
    ],
)
def test_settings_that_only_the_host_has_are_refused(
    directory: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        on(PretendDevice(), directory, **options)
