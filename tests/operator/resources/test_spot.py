"""On spot nodes the drain of a pod ends before the node is gone; a longer one is a warning in the status."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.api import profiles, specs
from quire_operator import resources, spec, status
from quire_operator.settings import Settings
from quire_operator.status import transitions
from tests.operator.status.objects import Body, compute, condition, deployment, model_body

SETTINGS = Settings(engine_image="quire-server:1")
SPOT = "cloud.google.com/gke-spot"
LATER = "DuringSchedulingIgnoredDuringExecution"


def pod(**fields: Any) -> tuple[int, int, int]:
    """Of a rendered pod: seconds of preStop, of the drain, and until the kubelet kills it."""
    children = resources.build(spec.parse(specs.minimal(**fields)), SETTINGS)
    (settings,) = [child["data"] for child in children if child["kind"] == "ConfigMap"]
    template = children[-1]["spec"]["template"]["spec"]
    sleep = template["containers"][0].get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})
    return (
        sleep["preStop"]["sleep"]["seconds"],
        int(settings["QUIRE_DRAIN_TIMEOUT_SECONDS"]),
        template["terminationGracePeriodSeconds"],
    )


@pytest.mark.parametrize(
    ("spot", "drain", "expected"),
    [
        (None, {}, (10, 120, 135)),
        ({"enabled": True}, {}, (10, 10, 25)),
        ({"enabled": True}, {"preStopSeconds": 0}, (0, 20, 25)),
        ({"enabled": True, "noticeSeconds": 120}, {}, (10, 105, 120)),
        ({"enabled": True, "noticeSeconds": 3600}, {}, (10, 120, 135)),
        ({"enabled": True}, {"timeoutSeconds": 90}, (10, 90, 105)),  # as it was asked for, with a warning
        ({"enabled": True}, {"preStopSeconds": 60}, (60, 1, 66)),
        ({"enabled": False}, {"timeoutSeconds": 90}, (10, 90, 105)),
    ],
)
def test_pre_stop_drain_and_margin_fit_the_notice_of_a_spot_node_unless_a_longer_drain_is_asked_for(
    spot: Body | None, drain: Body, expected: tuple[int, int, int]
) -> None:
    assert pod(drain=drain, scheduling={"spot": spot} if spot is not None else {}) == expected


def fits(**fields: Any) -> tuple[str, str] | None:
    computed = compute(body=model_body(**fields))
    return condition(computed, "DrainFitsNotice") if "DrainFitsNotice" in str(computed) else None


def test_the_status_says_whether_the_drain_fits_the_notice() -> None:
    spot = {"spot": {"enabled": True}}
    assert fits() is None
    assert fits(scheduling=spot) == ("True", "Fits")
    assert fits(scheduling=spot, drain={"timeoutSeconds": 11}) == ("False", "DrainExceedsNotice")
    patient = {"spot": {"enabled": True, "noticeSeconds": 120}}
    assert fits(scheduling=patient, drain={"timeoutSeconds": 11}) == ("True", "Fits")


@pytest.mark.parametrize(
    "scheduling",
    [
        {"nodeSelector": {SPOT: "true"}},
        {"tolerations": [{"key": SPOT, "operator": "Exists"}]},
        {
            "affinity": {
                "nodeAffinity": {
                    f"preferred{LATER}": [
                        {
                            "weight": 1,
                            "preference": {
                                "matchExpressions": [{"key": SPOT, "operator": "In", "values": ["true"]}]
                            },
                        }
                    ]
                }
            }
        },
    ],
    ids=["node-selector", "toleration", "affinity"],
)
def test_spot_nodes_that_are_chosen_by_label_or_taint_are_recognised(scheduling: Body) -> None:
    assert fits(scheduling=scheduling) == ("False", "DrainExceedsNotice")
    assert fits(scheduling=scheduling, drain={"timeoutSeconds": 10}) == ("True", "Fits")
    assert fits(scheduling={"nodeSelector": {SPOT: "false"}}) is None


def test_spot_nodes_of_an_accelerator_profile_are_recognised() -> None:
    on_spot = specs.merged(profiles.FULL, {"spec": {"nodeSelector": {SPOT: "true"}}})
    accelerator = status.RequestedAccelerator(profile=spec.profiles.parse(on_spot))

    assert condition(compute(accelerator=accelerator), "DrainFitsNotice") == ("False", "DrainExceedsNotice")


def test_pods_of_an_earlier_release_are_judged_by_their_own_grace_period() -> None:
    live = deployment()
    live["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 135
    computed = compute(of=live, body=model_body(scheduling={"spot": {"enabled": True}}))

    assert condition(computed, "DrainFitsNotice") == ("False", "DrainExceedsNotice")
    assert "rollout.restartId" in str(computed["conditions"])


def test_a_drain_that_exceeds_the_notice_is_reported_in_one_event() -> None:
    body = model_body(scheduling={"spot": {"enabled": True}}, drain={"timeoutSeconds": 60})
    first = compute(body=body)
    (event,) = [one for one in transitions.events({}, first) if one.reason == "DrainExceedsNotice"]

    assert event.kind == "Warning" and "75 seconds" in event.note and "noticeSeconds" in event.note
    assert "DrainExceedsNotice" not in str(transitions.events(first, compute(body=body, old=first)))
