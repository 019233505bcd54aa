"""What the engine serves with is in the status; a context that nobody asked to be short is a condition."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.operator import pods as kubelet
from quire_operator.reports import Sample, parse_statusz
from quire_operator.status import transitions
from tests.operator.status.objects import Body, compute, condition, deployment, model_body, pod

WHOLE = {"maxModelLen": 8192, "wantedModelLen": 8192, "dtype": "bfloat16", "quantization": "none"}
REDUCED = {**WHOLE, "maxModelLen": 4096}
TINY = {**WHOLE, "maxModelLen": 176}
SMALL_CACHE = model_body(engine={"kvCache": {"memory": "4Mi"}})


def said(effective: Any, phase: str = "serving") -> Sample:
    """The sample of a pod with this in its /statusz."""
    sample = parse_statusz(json.dumps({"phase": phase, "effective": effective}).encode())
    assert sample is not None
    return sample


def serving(*effective: Any, body: Body | None = None, old: Body | None = None, ready: bool = True) -> Body:
    """The status with one pod for each; None: a pod that has not been asked."""
    reported = kubelet.ready() if ready else kubelet.loading()
    found = [pod(reported, name=f"m-{index}") for index, _ in enumerate(effective)]
    samples = {f"uid-m-{index}": said(each) for index, each in enumerate(effective) if each is not None}
    number = len(effective)
    of = deployment(replicas=number, ready=number if ready else 0)
    body = body or model_body(replicas=number)
    return compute(*found, of=of, body=body, old=old, samples=samples)


def message(status: Body, kind: str) -> str:
    (found,) = [c for c in status["conditions"] if c["type"] == kind]
    return str(found["message"])


def warnings(old: Body, new: Body) -> list[str]:
    return [event.reason for event in transitions.events(old, new) if event.kind == "Warning"]


def test_context_dtype_and_quantisation_are_those_that_the_pod_reports() -> None:
    engine = serving({**WHOLE, "quantization": "int8", "inexactDefaults": ["quantization"]})["engine"]

    assert engine == {
        "image": "engine:1",
        **WHOLE,
        "quantization": "int8",
        "inexactDefaults": ["quantization"],
    }


def test_the_kernels_are_those_of_the_pod_with_the_shortest_context() -> None:
    unlike = [{**WHOLE, "nativeKernels": "avx512_vnni"}, {**REDUCED, "nativeKernels": "avx2"}]

    engine = serving(*unlike)["engine"]

    assert (engine["maxModelLen"], engine["nativeKernels"]) == (4096, "avx2")


def test_a_context_below_the_models_own_is_reported_with_both_numbers_and_the_remedy() -> None:
    status = serving(REDUCED)

    assert condition(status, "ContextReduced") == ("True", "ContextReduced")
    text = message(status, "ContextReduced")
    assert "4,096 of 8,192 tokens" in text and "spec.engine.kvCache.memory" in text
    assert condition(status, "Ready")[0] == "True"
    assert warnings({}, status) == ["ContextReduced"] and warnings(status, status) == []


def test_a_context_that_was_asked_for_is_not_reduced() -> None:
    asked = {**WHOLE, "maxModelLen": 176, "wantedModelLen": 176}

    status = serving(asked)

    assert condition(status, "ContextReduced") == ("False", "AsWanted")
    assert condition(status, "Ready")[0] == "True"


def test_a_context_below_2048_tokens_that_nobody_asked_for_is_stalled() -> None:
    status = serving(TINY, body=SMALL_CACHE)

    for kind, value in (("Ready", "False"), ("Stalled", "True"), ("ContextReduced", "True")):
        assert condition(status, kind) == (value, "ContextTooSmall")
    assert condition(status, "Available")[0] == "True"
    assert status["phase"] == "Failed"
    assert "176 of 8,192 tokens; kvCache.memory 187Mi would hold them all" in message(status, "Ready")
    assert warnings({}, status) == ["ContextTooSmall"]


@pytest.mark.parametrize(
    ("length", "own", "stalled"),
    [(2047, 8192, "True"), (2048, 8192, "False"), (1023, 1024, "True"), (1024, 1024, "False")],
)
def test_a_model_with_a_shorter_context_needs_all_of_its_own(length: int, own: int, stalled: str) -> None:
    status = serving({**WHOLE, "maxModelLen": length, "wantedModelLen": own})

    assert condition(status, "Stalled")[0] == stalled


def test_of_several_pods_the_shortest_context_counts() -> None:
    assert serving(WHOLE, REDUCED, WHOLE)["engine"]["maxModelLen"] == 4096


def test_what_is_known_stays_until_every_pod_has_been_asked_after_a_restart_of_the_operator() -> None:
    known = serving(TINY, WHOLE, body=model_body(replicas=2))
    unasked = serving(None, None, old=known)
    half = serving(None, WHOLE, old=known)
    asked = serving(WHOLE, WHOLE, old=known)

    for status in (unasked, half):
        assert status["engine"]["maxModelLen"] == 176 and warnings(known, status) == []
        assert condition(status, "Stalled")[0] == "True"
    assert asked["engine"]["maxModelLen"] == 8192
    assert condition(asked, "Ready")[0] == "True" and condition(asked, "ContextReduced")[0] == "False"


def test_a_rollout_that_mends_it_is_not_stalled_by_what_the_old_pods_serve() -> None:
    known = serving(TINY)
    new = serving(None, old=known, ready=False)

    assert new["engine"]["maxModelLen"] == 176, "that is what clients get meanwhile"
    assert condition(new, "Stalled")[0] == "False" and condition(new, "Ready") == ("False", "Loading")
    assert condition(serving(TINY, ready=False), "Stalled")[0] == "True", "no better than before"


@pytest.mark.parametrize(
    "hostile",
    [
        {},
        [],
        "x",
        {**WHOLE, "maxModelLen": -1},
        {**WHOLE, "maxModelLen": True},
        {**WHOLE, "maxModelLen": 1e30},
        {**WHOLE, "wantedModelLen": "8192"},
        {**WHOLE, "wantedModelLen": 4096},
        {**WHOLE, "dtype": "\x1b[31mred"},
        {**WHOLE, "dtype": "a" * 400},
        {**WHOLE, "quantization": ["none"]},
        {**WHOLE, "quantization": None},
        {**WHOLE, "nativeKernels": "\x1b[31mred"},
        {**WHOLE, "nativeKernels": None},
    ],
)
def test_a_pod_that_reports_nonsense_is_as_one_that_reports_nothing(hostile: Any) -> None:
    status = serving(hostile)

    assert status["engine"] == {"image": "engine:1"}
    assert not [c for c in status["conditions"] if c["type"] == "ContextReduced"]


@pytest.mark.parametrize("listed", ["quantization", 7, {"dtype": 1}, ["image", {}, [], "\x00"] * 99])
def test_only_known_fields_are_taken_from_what_a_pod_lists(listed: Any) -> None:
    assert "inexactDefaults" not in serving({**WHOLE, "inexactDefaults": listed})["engine"]
