"""FitsAccelerator says with numbers whether the model fits, from what pods report, and blocks nothing."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any

import pytest

from e2e.operator import pods as kubelet
from e2e.operator.statusz import LLAMA_2_13B
from quire_operator import reports, status
from quire_operator.spec import Profile
from quire_operator.status import transitions
from quire_sizing.model import ModelShape
from tests.operator.status.objects import Body, compute, condition, model_body, pod

H100 = status.RequestedAccelerator(profile=Profile(memory="80G"))
ON_H100 = {"accelerator": H100}


#: What sizes have only since models are divided among ranks.
_OF_RANKS = {item.name for item in fields(ModelShape) if item.default is not MISSING}


def statusz(config: Any = LLAMA_2_13B, **fields: Any) -> bytes:
    return json.dumps({"phase": "loading", "config": config, **fields}).encode()


def asked(memory: str = "96Gi", percent: int = 90, source: str = "models", **engine: Any) -> Body:
    resources = {"cpu": "1", "memory": memory, "profileRef": {"name": "h100", "memoryPercent": percent}}
    body = model_body()
    body["spec"] |= {"resources": resources, "engine": engine}
    body["spec"]["model"] = {"source": {"pvc": {"claimName": source}}}
    return body


def computed(body: Body, raw: bytes = statusz(), **fields: Any) -> Body:
    loading = pod(kubelet.loading())
    samples = {loading["metadata"]["uid"]: sample} if (sample := reports.parse_statusz(raw)) else {}
    return compute(loading, body=body, samples=samples, **(ON_H100 | fields))


def message(reported: Body) -> str:
    (found,) = [c for c in reported["conditions"] if c["type"] == "FitsAccelerator"]
    return str(found["message"])


def test_a_model_that_fits_is_reported_with_the_numbers() -> None:
    reported = computed(asked(maxModelLen=4096, maxNumSeqs=8))

    assert condition(reported, "FitsAccelerator") == ("True", "Fits")
    for number in ("weights 26.0 GB", "KV cache 26.8 GB for 8 requests of 4,096", "72.0 GB (90% of 80.0 GB)"):
        assert number in message(reported)
    assert transitions.events({}, reported) == ()


def test_a_13b_model_on_80_gb_is_reported_to_fit_13_requests_of_4096_tokens() -> None:
    reported = computed(asked(maxModelLen=4096, maxNumSeqs=64))

    assert condition(reported, "FitsAccelerator") == ("False", "FitsFewer")
    assert "13 requests of 4,096 tokens fit at once" in message(reported)
    assert condition(reported, "Degraded") == ("False", "AsExpected"), "it warns and hinders nothing"


def test_a_model_that_does_not_fit_is_reported_once_with_the_context_that_would() -> None:
    small = status.RequestedAccelerator(profile=Profile(memory="32G"))

    reported = computed(asked(maxModelLen=16384), accelerator=small)
    again = computed(asked(maxModelLen=16384), accelerator=small, old=reported)

    assert condition(reported, "FitsAccelerator") == ("False", "DoesNotFit")
    assert "no request fits" not in message(reported) and "tokens fits alone" in message(reported)
    assert [(e.kind, e.reason) for e in transitions.events({}, reported)] == [("Warning", "DoesNotFit")]
    assert transitions.events(reported, again) == ()


@pytest.mark.parametrize(
    ("engine", "raw", "words"),
    [
        ({}, statusz(totalBytes=7_000_000_000), "weights 7.0 GB"),
        ({"kvCache": {"dtype": "FP8"}}, statusz(), "KV cache 13.8 GB"),
        ({"weightOffload": "10Gi"}, statusz(), "weights 15.3 GB"),
        ({"kvCache": {"memory": "8Gi"}}, statusz(), "2 requests of 4,096 tokens fit at once"),
    ],
)
def test_the_sizes_follow_cache_dtype_and_offload_of_the_spec_and_the_reported_bytes(
    engine: Body, raw: bytes, words: str
) -> None:
    assert words in message(computed(asked(maxModelLen=4096, maxNumSeqs=8, **engine), raw))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (asked(percent=95, maxModelLen=4096), "memoryPercent gives 95 %"),
        (asked(), "maxModelLen is not set"),
        (asked(memory="16Gi", maxModelLen=4096), "Raise resources.memory"),
    ],
)
def test_the_message_warns_of_likely_misconfigurations(body: Body, words: str) -> None:
    assert words in message(computed(body))
    assert words not in message(computed(asked(maxModelLen=4096)))


def test_places_for_adapters_and_their_room_on_the_host_are_counted() -> None:
    few = computed(asked(maxModelLen=4096, maxNumSeqs=8, maxAdapters=4, maxAdapterRank=64))
    assert condition(few, "FitsAccelerator") == ("True", "Fits")
    assert "weights 26.0 GB, 4 places for adapters 2.0 GB, KV cache" in message(few)
    assert "The host has room" not in message(few)
    many = computed(asked(memory="96Gi", maxModelLen=4096, maxNumSeqs=8, maxAdapters=64, maxAdapterRank=64))
    assert condition(many, "FitsAccelerator") == ("False", "FitsFewer")
    assert "The host has room for 51 adapters of rank 64" in message(many)
    tier = {"hostOffload": "40Gi"}
    tiered = asked(maxModelLen=4096, maxNumSeqs=8, maxAdapters=64, maxAdapterRank=64, kvCache=tier)
    assert "The host has room for 29 adapters of rank 64" in message(computed(tiered))


def test_sizes_that_an_earlier_version_stored_are_still_used() -> None:
    before = computed(asked(maxModelLen=4096))
    sizes = before["model"]["sizes"]
    earlier = {name: sizes[name] for name in sizes if name not in _OF_RANKS}
    assert len(earlier) == len(sizes) - len(_OF_RANKS)
    old = {**before, "model": {"sizes": earlier}}

    assert "weights 26.0 GB" in message(before)
    assert message(compute(body=asked(maxModelLen=4096), old=old, **ON_H100)) == message(before)


def test_reported_sizes_are_kept_without_pods_and_dropped_for_another_model() -> None:
    before = computed(asked(maxModelLen=4096, maxNumSeqs=8))

    without_pods = compute(body=asked(maxModelLen=16384, maxNumSeqs=64), old=before, **ON_H100)
    other_model = compute(body=asked(source="other"), old=before, **ON_H100)

    assert condition(without_pods, "FitsAccelerator") == ("False", "FitsFewer")
    assert condition(other_model, "FitsAccelerator") == ("Unknown", "ModelUnknown")
    assert "model" not in other_model


def test_missing_information_gives_status_unknown_with_a_reason() -> None:
    gpu = asked()
    gpu["spec"]["resources"] = {"cpu": "1", "memory": "96Gi", "gpu": {}}

    assert condition(computed(asked(), statusz(config={})), "FitsAccelerator")[1] == "ModelUnknown"
    assert condition(computed(gpu, accelerator=status.RequestedAccelerator()), "FitsAccelerator") == (
        "Unknown",
        "MemoryUnknown",
    )
    missing = computed(asked(), accelerator=status.RequestedAccelerator(error="there is no h100"))
    assert condition(missing, "FitsAccelerator") == ("Unknown", "ProfileNotFound")
    assert condition(computed(asked(maxModelLen=99999)), "FitsAccelerator") == ("Unknown", "NotSized")
    assert not [c for c in compute()["conditions"] if c["type"] == "FitsAccelerator"], "none without a GPU"


@pytest.mark.parametrize(
    "config",
    [
        7,
        "x" * 9000,
        [1],
        LLAMA_2_13B | {"num_hidden_layers": 10**9, "num_experts": 8, "moe_intermediate_size": 1},
        LLAMA_2_13B | {"num_hidden_layers": True},
        LLAMA_2_13B | {"hidden_size": 10**300},
        LLAMA_2_13B | {"hidden_size": 1 << 39, "vocab_size": 1 << 39},
        LLAMA_2_13B | {"num_attention_heads": 10**6},
        LLAMA_2_13B | {"num_experts": 8, "mlp_only_layers": 7},
        LLAMA_2_13B | {"num_experts": 8, "mlp_only_layers": list(range(3000))},
        LLAMA_2_13B | {f"x{i}": i for i in range(100)},
        LLAMA_2_13B | {"hidden_size": -1},
        LLAMA_2_13B | {"hidden_size": 1.5},
    ],
)
def test_an_invalid_model_config_reported_by_a_pod_is_ignored(config: Any) -> None:
    reported = computed(asked(), statusz(config))

    assert condition(reported, "FitsAccelerator") == ("Unknown", "ModelUnknown")


@pytest.mark.parametrize("kept", [7, {"hidden_size": "x"}, {"parameters": -1}])
def test_invalid_sizes_in_the_stored_status_are_ignored(kept: Any) -> None:
    before = computed(asked())
    old = {
        **before,
        "model": {"sizes": {**before["model"]["sizes"], **kept} if isinstance(kept, dict) else kept},
    }

    assert condition(compute(body=asked(), old=old, **ON_H100), "FitsAccelerator")[1] == "ModelUnknown"


def test_ranks_and_stages_divide_what_an_accelerator_holds() -> None:
    def fits(**parallelism: int) -> tuple[str, str]:
        body = asked(maxModelLen=4096, maxNumSeqs=64)
        body["spec"]["resources"]["cpu"] = "4"
        body["spec"]["parallelism"] = parallelism
        reported = computed(body)
        return condition(reported, "FitsAccelerator")[1], message(reported)

    assert fits()[0] == "FitsFewer" and "weights 26.0 GB" in fits()[1]
    reason, text = fits(pipeline=2)
    assert reason == "FitsFewer" and "weights 13." in text, text
    assert fits(pipeline=4)[0] == "Fits"
    assert "weights 6." in fits(pipeline=2, tensor=2)[1]


def apart(memory: str = "96Gi", **roles: Any) -> Body:
    body = asked(memory=memory, maxModelLen=4096, maxNumSeqs=8)
    body["spec"]["disaggregation"] = {"prefill": {}, **roles}
    return body


def test_of_two_roles_the_one_that_fits_worse_decides_and_both_are_described() -> None:
    requested = status.RequestedAccelerator(
        profile=Profile(memory="80G"), prefill_profile=Profile(memory="24G")
    )
    reported = computed(apart(), accelerator=requested)

    assert condition(reported, "FitsAccelerator") == ("False", "DoesNotFit")
    assert message(reported).startswith("Decode pods: weights 26.0 GB")
    assert " Prefill pods: " in message(reported)
    alike = status.RequestedAccelerator(profile=Profile(memory="80G"), prefill_profile=Profile(memory="80G"))
    reported = computed(apart(), accelerator=alike)
    assert condition(reported, "FitsAccelerator") == ("True", "Fits")
    assert "Prefill pods" not in message(reported), "both are the same"


def test_each_role_is_judged_with_its_own_ranks() -> None:
    two = status.RequestedAccelerator(profile=Profile(memory="24G"), prefill_profile=Profile(memory="24G"))
    halves = {"parallelism": {"tensor": 2}}
    assert condition(computed(apart(decode=halves), accelerator=two), "FitsAccelerator")[0] == "False"
    both = computed(apart(prefill=halves, decode=halves), accelerator=two)
    assert condition(both, "FitsAccelerator") == ("False", "FitsFewer")


def test_memory_that_stages_blocks_is_no_room_for_weights_on_their_way() -> None:
    pods = {"profile": Profile(memory="80G"), "prefill_profile": Profile(memory="80G")}
    requested = status.RequestedAccelerator(**pods)
    roomy = computed(apart(memory="88Gi"), accelerator=requested)
    tight = computed(apart(memory="76Gi"), accelerator=requested)
    assert "stages KV blocks" in message(tight) and "stages KV blocks" not in message(roomy)


def test_a_prompt_that_the_hosts_have_no_room_for_is_named_with_the_tokens_that_fit() -> None:
    requested = status.RequestedAccelerator(
        profile=Profile(memory="80G"), prefill_profile=Profile(memory="80G")
    )
    assert "stagingMemory" not in message(computed(apart(), accelerator=requested))
    small = computed(apart(stagingMemory="1Gi"), accelerator=requested)
    assert "stagingMemory has room for 1,310 tokens" in message(small)
