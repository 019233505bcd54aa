"""A KV cache of one byte an element: as exact as eight bits are, the same whatever chunks and blocks do, and
cheaper.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire_server.errors import ModelCorruptError
from quire_server.runner import kv_cache
from tests.server.models import compressed_tensors_oracle as compressed
from tests.server.models import families
from tests.server.models.variants import VARIANTS
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.ranks_in_process import Ranks
from tests.server.runner.test_parity import CONDITIONS, prompts
from tests.server.runner.test_quantized_parity import assert_same_answers, tiny_llama

LENGTH = 20
VARIED = ("chunks of 7", "no prefix cache", "preemption", "swap", "preemption over host and disk")
BYTES = pytest.mark.parametrize("dtype", ["fp8", "int8"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    families.make(path, "Llama, llama3 rope, own head size")
    return path


@pytest.mark.one_in(2)
@BYTES
def test_answers_do_not_depend_on_chunks_batches_prefix_hits_preemption_or_tiers(
    dtype: str, directory: Path, tmp_path: Path
) -> None:
    size = 2 << 20
    runner = load(
        directory,
        kv_cache_dtype=dtype,
        kv_offload_host_bytes=size,
        kv_offload_disk_path=tmp_path,
        kv_offload_disk_bytes=size,
    )
    expected = InProcessEngine(runner, max_num_seqs=1).generate(prompts(), greedy(LENGTH))
    for name in VARIED:
        condition = CONDITIONS[name]
        engine = InProcessEngine(runner, **condition)
        for _ in range(
            1 + ("num_disk_slots" in condition)
        ):  # the second time, prefixes of prompts are on the disk
            assert engine.generate(prompts(), greedy(LENGTH)) == expected, name
        assert ("num_blocks" in condition) == (engine.scheduler.stats.preemptions > 0), name
        if condition.get("enable_prefix_caching", True):
            assert engine.generate(prompts()[-2:], greedy(LENGTH)) == expected[-2:], name
            assert engine.last["0"].num_cached_tokens >= 48
        kv = engine.scheduler.kv.stats()
        assert kv.corrupt == 0 and (kv.swaps > 0) == ("preemption_mode" in condition), name
        assert (kv.disk_loaded > 0) == ("num_disk_slots" in condition), name
    runner.close()


@pytest.mark.parametrize(("dtype", "bound"), [("auto", 1e-5), ("int8", 0.1), ("fp8", 0.4)])
def test_probabilities_stay_near_those_of_a_full_cache(dtype: str, bound: float, directory: Path) -> None:
    found = []
    for stored in ("auto", dtype):
        engine = InProcessEngine(load(directory, kv_cache_dtype=stored), max_num_batched_tokens=16)
        engine.generate([prompts()[6]], greedy(1, logprobs=211))
        found.append(torch.tensor([value for _, value in sorted(engine.logprobs["0"][0].top)]))
    exact, rounded = (logprobs.exp() for logprobs in found)
    assert float((exact - rounded).abs().sum()) <= bound  # twice the total variation distance
    assert torch.equal(exact, rounded) == (dtype == "auto")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_answers_nearly_the_same_in_all_circumstances_and_over_a_full_cache(
    variant: str, tmp_path: Path
) -> None:
    families.make(tmp_path, variant)
    first: dict[str, torch.Tensor] = {}
    for dtype in ("auto", "fp8", "int8"):
        runner = load(tmp_path, kv_cache_dtype=dtype, kv_offload_host_bytes=4 << 20)
        alone, crowded = InProcessEngine(runner, max_num_seqs=1), InProcessEngine(runner, **families.HARD)
        answers = [
            engine.generate(families.PROMPTS, greedy(LENGTH, logprobs=211)) for engine in (alone, crowded)
        ]
        assert crowded.scheduler.kv.stats().swaps > 0
        for name, *pair in zip(alone.logprobs, *answers, strict=True):
            _assert_same_up_to_a_tie(*(_distributions(e, name) for e in (alone, crowded)), *pair)
        first[dtype] = _distributions(alone, "0")[0].exp()
    for dtype, bound in (("int8", 0.2), ("fp8", 0.8)):
        assert float((first[dtype] - first["auto"]).abs().sum()) <= bound


@pytest.mark.one_in(3)
@BYTES
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_answer_nearly_as_one_over_the_same_cache(ranks: int, dtype: str, directory: Path) -> None:
    options: dict[str, object] = {"kv_cache_dtype": dtype, "kv_offload_host_bytes": 4 << 20}
    whole = InProcessEngine(load(directory, quantization="none", **options), max_num_seqs=1)
    expected = whole.generate(families.PROMPTS, greedy(LENGTH, logprobs=211))
    divided = Ranks(directory, ranks, **options)
    engine = InProcessEngine(divided.runner, **families.HARD)
    answers = engine.generate(families.PROMPTS, greedy(LENGTH, logprobs=211))
    assert engine.scheduler.kv.stats().swaps > 0
    for name, *pair in zip(whole.logprobs, answers, expected, strict=True):
        _assert_same_up_to_a_tie(*(_distributions(e, name) for e in (engine, whole)), *pair)
    divided.close()


def _distributions(engine: InProcessEngine, name: str) -> torch.Tensor:
    return torch.tensor([[value for _, value in sorted(entry.top)] for entry in engine.logprobs[name]])


def _assert_same_up_to_a_tie(
    ours: torch.Tensor, expected: torch.Tensor, answer: list[int], wanted: list[int]
) -> None:
    """Sums in another order differ in the last bit, which may round an element the other way by a whole step:
    probabilities move a little, and two tokens that are almost equally likely may change places.
    """
    same = [a == b for a, b in zip(answer, wanted, strict=True)]
    length = same.index(False) if False in same else len(same)
    assert float((ours[: length + 1] - expected[: length + 1]).abs().max()) < 0.05
    if length < len(same):
        best, second = expected[length].topk(2).values.tolist()
        assert best - second < 0.1


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_the_same_memory_holds_more_tokens(compute: torch.dtype, directory: Path) -> None:
    runners = {
        name: load(
            directory,
            dtype=str(compute).removeprefix("torch."),
            kv_cache_dtype=name,
            kv_cache_memory_bytes=1 << 16,
        )
        for name in ("auto", "fp8", "int8")
    }
    size = runners["auto"].model_config.head_size
    ratio = size * compute.itemsize / (size + 4)
    for name, runner in runners.items():
        config, stored = runner.model_config, kv_cache.storage_dtype(name, compute)
        assert (
            runner.kv_cache_bytes == runner.num_blocks * kv_cache.block_bytes(config, 16, stored) <= 1 << 16
        )
        if name != "auto":
            assert runner.num_blocks >= int(runners["auto"].num_blocks * ratio)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scaled")
    source = tiny_llama(path / "float", num_hidden_layers=2)
    compressed.write(source, path / "model", "fp8 by channel", kv_scales=(0.011, 0.013))
    return path / "model"


def test_scales_of_the_checkpoint_round_as_compressed_tensors_does(scaled: Path) -> None:
    model = compressed.reference(scaled)
    exact = families.answers(model, [[7] * 40], 30)
    compressed.round_kv(model, (0.011, 0.013))
    assert families.answers(model, [[7] * 40], 30) != exact  # it does round
    assert_same_answers(scaled, model, kv_cache_dtype="fp8")
    unrounded = compressed.reference(scaled)
    assert_same_answers(scaled, unrounded)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused(value: float, scaled: Path, tmp_path: Path) -> None:
    tensors = load_file(scaled / "model.safetensors")
    tensors["model.layers.1.self_attn.v_scale"].fill_(value)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((scaled / "config.json").read_bytes())
    with pytest.raises(ModelCorruptError, match=r"layers\.1\.self_attn: k_scale or v_scale"):
        load(tmp_path)


def test_scales_that_were_promised_must_be_there(scaled: Path, tmp_path: Path) -> None:
    tensors = load_file(scaled / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((scaled / "config.json").read_bytes())
    with pytest.raises(
        ModelCorruptError, match=r"1 tensors are in no file, model\.layers\.0\.self_attn\.k_scale"
    ):
        load(tmp_path)
