"""Pods that disagree about the canary are named in the status."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from e2e.operator import pods as kubelet
from quire_operator import names, spec, status
from quire_operator.observed import Observed, Ref
from quire_operator.reports import Canary, Sample
from tests.operator.status.objects import condition, deployment, model_body, pod, replica_set

GOLDEN = Ref("ConfigMap", "m-golden-tokens")
FINGERPRINT = "1" * 64


def computed(
    *answers: tuple[str, list[int]], fingerprint: str = FINGERPRINT, stored: dict[str, Any] | None = None
) -> dict[str, Any]:
    """With the tokens 1, 2 of pod m-0 kept, and ready pods with these answers; one whose answer is empty has
    not been asked. `stored`: the status so far.
    """
    reported = {"phase": "Running", **kubelet.ready()}
    kept = [{"fingerprint": FINGERPRINT, "tokens": [1, 2], "pod": "m-0"}]
    samples = {
        f"uid-{name}": Sample(phase="serving", canary=Canary(fingerprint=fingerprint, tokens=tuple(tokens)))
        for name, tokens in answers
        if tokens
    }
    observed = Observed(
        body={**model_body(replicas=len(answers)), "status": stored or {}},
        children={
            Ref("Deployment", "m"): deployment(replicas=len(answers), ready=len(answers)),
            GOLDEN: {"kind": "ConfigMap", "data": {names.GOLDEN_TOKENS_FILE: json.dumps(kept)}},
        },
        replica_sets=(replica_set("rs2", 2),),
        pods=tuple(pod(reported, name=name) for name, _ in answers),
        samples=samples,
    )
    return status.compute_status(spec.parse(observed.body), observed, now=datetime.now(UTC))


def test_two_ready_pods_that_disagree_are_both_named_with_the_config_map_and_the_remedy() -> None:
    result = computed(("m-0", [1, 2]), ("m-1", [1, 3]))
    assert condition(result, "Degraded") == ("True", "CanaryMismatch")
    (message,) = [c["message"] for c in result["conditions"] if c["type"] == "Degraded"]
    for word in ("pod m-1", "pod m-0", "ConfigMap m-golden-tokens", "delete it"):
        assert word in message
    assert condition(result, "Ready")[0] == "True", "the status claims nothing that the kubelet does not"


def test_pods_that_agree_or_are_not_comparable_raise_no_alarm() -> None:
    for result in (
        computed(("m-0", [1, 2]), ("m-1", [1, 2])),
        computed(("m-0", [8, 9]), ("m-1", [1, 3]), fingerprint="2" * 64),
    ):
        assert condition(result, "Degraded") == ("False", "AsExpected")


def test_a_restarted_operator_repeats_what_it_knew_until_the_pods_are_asked() -> None:
    before = computed(("m-0", [1, 2]), ("m-1", [1, 3]))
    after = computed(("m-0", []), ("m-1", []), stored=before)
    assert after["conditions"] == before["conditions"], "it would be written twice at each restart"
    repaired = computed(("m-0", [1, 2]), ("m-1", [1, 2]), stored=after)
    assert condition(repaired, "Degraded") == ("False", "AsExpected")
    again = computed(("m-0", []), ("m-1", []), stored=repaired)
    assert condition(again, "Degraded") == ("False", "AsExpected"), "the last failure does not hold any more"
