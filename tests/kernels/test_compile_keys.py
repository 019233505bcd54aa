"""No request waits for a kernel to be compiled: after the warm-up no step has a launch with a new key."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from quire_server.runner.gpu import warm_up
from tests.kernels.gpu.compile_keys import recorded
from tests.kernels.gpu.serving import VOCAB, Served, play, recording
from tests.server.models import families

AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "group_size": 32}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT8 | {"strategy": "channel"},
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
KINDS = {
    "dense": Served(),
    "no graphs": Served(drafts=2, options={"enforce_eager": True}),
    "fp8 KV": Served(options={"kv_cache_dtype": "fp8"}),
    "int8 KV": Served(options={"kv_cache_dtype": "int8"}, drafts=3),
    "AWQ": Served({"quantization_config": AWQ}),
    "FP8": Served({"quantization_config": FP8}),
    "W8A8": Served({"quantization_config": W8A8}),
    "experts": Served(MIXTRAL),
    "drafts": Served(drafts=3),
}
LOADED = {
    "adapters": Served(options={"max_adapters": 3, "max_adapter_rank": 16}),
    "host tier": Served(options={"kv_offload_host_bytes": 1 << 22, "num_blocks_override": 60}),
    "draft model": Served(drafts=2, options={"speculative_model": Path()}),
}
QUICK = {"no graphs", "AWQ", "experts", "adapters"}
MODEL = {
    "vocab_size": VOCAB, "max_position_embeddings": 2048, "num_hidden_layers": 1, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    families.build(path, "Llama", MODEL)
    return path


def check(served: Served, steps: int, directory: Path | None) -> None:
    with recording() as keys:
        play(keys, served, steps, 1, directory)
    assert keys.launches > steps and len(keys.met_in("warm-up")) > 10
    assert not keys.met_in("serving"), keys.explain("serving")


ALL = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.kernels) for kind in (*KINDS, *LOADED)]


@pytest.mark.parametrize("kind", ALL)
def test_after_the_warm_up_no_step_has_a_new_compile_key(kind: str, directory: Path) -> None:
    check((KINDS | LOADED)[kind], 40, directory if kind in LOADED else None)


@pytest.mark.timeout(3600)
@pytest.mark.deep
@pytest.mark.parametrize("kind", [*KINDS, *LOADED])
def test_nor_has_one_of_2000_steps(kind: str, directory: Path) -> None:
    check((KINDS | LOADED)[kind], 2000, directory if kind in LOADED else None)


def test_without_a_warm_up_steps_have_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "warm_up", lambda *args, **kwargs: None)
    with recording() as keys:
        play(keys, KINDS["dense"], 50, 1)
    assert {key.kernel for key in keys.met_in("serving")} >= {"prefill_kernel", "token_bitmask_kernel"}


@triton.jit(do_not_specialize=["count"])
def _scaled(x_ptr, count, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at * stride, tl.load(x_ptr + at * stride) * count)


def test_the_key_is_what_triton_would_compile_anew() -> None:
    x = torch.zeros(64)
    with recorded() as keys:
        for given, count, stride, block in ((x, 3, 16, 8), (x, 5, 32, 8), (x, 16, 48, 8)):
            _scaled[(1,)](given, count, stride, BLOCK=block)
        assert len(keys.first) == 1, "the same for other multiples of 16, and for any count"
        keys.stage = "changed"
        for given, count, stride, block in ((x[1:], 3, 16, 8), (x, 3, 1, 8), (x, 3, 17, 8), (x, 3, 16, 4)):
            _scaled[(1,)](given, count, stride, BLOCK=block)
        _scaled[(1,)](x, 3, 16, BLOCK=8, num_warps=8)
    assert len(keys.met_in("changed")) == 5
    assert "x_ptr" in keys.explain("changed") and "num_warps" in keys.explain("changed")
