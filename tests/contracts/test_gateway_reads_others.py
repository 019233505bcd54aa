"""What the gateway reads of the operator's Services and of the server is what these write."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.api import gateway_kinds
from e2e.api.specs import CRD, DISAGGREGATED, MINIMAL, ROOT, Body, merged, minimal
from quire_gateway import demand, llm_client, llm_external_backend, llm_route, relay, replicas
from quire_gateway.load_poller import adapter_states, context_length, total_load
from quire_gateway.openai import calls
from quire_gateway.replica import AdapterState, Endpoint, Replica
from quire_gateway.routing.by_load import RoundRobin
from quire_gateway.routing_table import resolve
from quire_gateway.settings import Settings
from quire_operator import names, resources, spec, status
from quire_operator.observed import Observed
from quire_operator.plan import scale_to_zero, sharing
from quire_operator.resources import scaling_behavior
from quire_operator.settings import Settings as OperatorSettings
from quire_operator.status import sharing as status_of_sharing
from quire_server.api import pooling_routes, routes
from quire_server.health import decision, engine_report
from quire_server.health.decision import ProbeResult, Verdict
from quire_server.metrics.requests import REFUSALS

OK = ProbeResult()
VERDICT = Verdict(OK, OK, OK, "serving", "")


def test_names_of_the_cluster_are_the_operators() -> None:
    assert replicas.LABEL_MODEL == names.LABEL_NAME
    assert replicas.PORT_NAME == names.PORT_HTTP_NAME
    assert replicas.HEALTH_PORT_NAME == names.PORT_HEALTH_NAME
    assert Settings(namespaces=("x",), kube_api="x").health_port == names.PORT_HEALTH


def test_the_slices_of_the_service_for_clients_are_a_model_and_those_of_another_one_are_not() -> None:
    """The controller of EndpointSlices copies a Service's labels to them, beside the Service's name."""
    model = spec.parse(DISAGGREGATED[0])
    children = resources.build(model, OperatorSettings(engine_image="x:1"))
    bodies = [child["metadata"] for child in children if child["kind"] == "Service"]
    assert len(bodies) > 1
    table = replicas.ReplicaTable((model.namespace,), names.PORT_HEALTH, lambda: 0.0, lambda _: RoundRobin())
    for number, metadata in enumerate(bodies):
        labels = {**metadata["labels"], replicas.LABEL_SERVICE: metadata["name"]}
        endpoint = {"addresses": ["10.0.0.1"], "conditions": {"ready": True}}
        table.put(
            {
                "metadata": {"name": f"s{number}", "namespace": model.namespace, "labels": labels},
                "ports": [{"name": names.PORT_HTTP_NAME, "port": names.PORT_HTTP}],
                "endpoints": [{**endpoint, "targetRef": {"uid": metadata["name"]}}],
            }
        )
    assert [one.endpoint.uid for one in table.replicas()] == [model.name]


def test_a_503_that_says_that_there_is_no_room_is_known_as_one() -> None:
    """Others, such as a key's own limit or an engine that is gone, are not of the replica's load."""
    assert {*REFUSALS, "draining"} - {"rate_limit_exceeded"} == relay.REFUSALS


def test_the_load_in_a_servers_status_is_read() -> None:
    now = 100.0
    sample = decision._NO_HEARTBEAT._replace(written_at=now, queued=3, running=4)
    assert total_load(json.dumps(decision.statusz(sample, VERDICT, now, "1")).encode()) == 7
    assert total_load(json.dumps(decision.statusz(sample, VERDICT, now + 60, "1")).encode()) is None


def test_the_adapters_in_a_servers_status_are_read(tmp_path: Path) -> None:
    common = {"is_loading": False, "reason": "", "digest": "d", "rank": 4, "size": 9}
    states = [{"name": "a", "is_ready": True, **common}, {"name": "b", "is_ready": False, **common}]
    engine_report.write_adapters(tmp_path, states)
    text = json.dumps({"adapters": engine_report.read_adapters(tmp_path)}).encode()
    found = adapter_states(text)
    assert found == {"a": "Ready", "b": "Failed"}
    replica = Replica(Endpoint("u", "10.0.0.1", 8000, 8001))
    replica.polled_adapters(found, 0.0)
    expected = {"a": AdapterState.READY, "b": AdapterState.FAILED, "c": AdapterState.LOADING}
    assert {name: replica.adapter(name, 0.0) for name in expected} == expected


def test_the_context_in_a_servers_status_is_read(tmp_path: Path) -> None:
    engine_report.write_effective_config(
        tmp_path, engine_report.EffectiveConfig(2048, 4096, "bfloat16", "int8")
    )
    text = json.dumps({"effective": engine_report.read_effective_config(tmp_path)}).encode()
    assert context_length(text) == 2048


@pytest.mark.parametrize(
    "text",
    [
        b"<html>",
        b"[]",
        b"{}",
        b'{"sampleAge": null, "effective": null}',
        b'{"sampleAge": 1, "queued": "x", "effective": {"maxModelLen": -1}}',
    ],
)
def test_what_is_no_status_says_nothing_of_the_load_and_the_context(text: bytes) -> None:
    assert (total_load(text), context_length(text)) == (None, None)


def test_the_relayed_paths_are_routes_of_the_server() -> None:
    of_tasks = (*routes.router.routes, *pooling_routes.router.routes)
    served = {getattr(route, "path", "") for route in of_tasks}
    assert set(calls.PATHS) <= served


STORED = {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}


def read_of(body: Body) -> Any:
    stored = merged(body, {"metadata": STORED})
    modules = {"LLMRoute": llm_route, "LLMClient": llm_client, "LLMExternalBackend": llm_external_backend}
    return modules[body["kind"]].parse(stored)


def without(value: Any) -> list[Any]:
    """The same document once for each of its fields, without that field."""
    if isinstance(value, dict):
        less = [{name: inner for name, inner in value.items() if name != gone} for gone in value]
        return less + [{**value, name: one} for name, inner in value.items() for one in without(inner)]
    if isinstance(value, list):
        return [[*value[:i], one, *value[i + 1 :]] for i, inner in enumerate(value) for one in without(inner)]
    return []


@pytest.mark.parametrize("body", gateway_kinds.EVERY, ids=lambda body: body["kind"])
def test_every_field_of_what_the_gateway_reads_is_read(body: Body) -> None:
    """An option that nothing reads promises what does not happen."""
    whole = read_of(body)
    for less in without(body["spec"]):
        try:
            assert read_of({**body, "spec": less}) != whole, less
        except llm_route.ObjectError:
            continue  # it is required


def test_defaults_of_the_api_server_are_those_of_the_gateway() -> None:
    properties = gateway_kinds.SCHEMAS["llmroutes"]["properties"]["spec"]["properties"]
    for name, ours in (
        ("reliability", llm_route.Reliability()),
        ("killSwitch", llm_route.KillSwitch()),
        ("hold", llm_route.DEFAULT_HOLD),
    ):
        theirs = [field["default"] for field in properties[name]["properties"].values() if "default" in field]
        assert theirs == [one for one in dataclasses.astuple(ours) if one is not None]
    external = gateway_kinds.SCHEMAS["llmexternalbackends"]["properties"]["spec"]["properties"]
    assert external["apiKeySecretRef"]["properties"]["key"]["default"] == llm_external_backend.DEFAULT_KEY
    target = properties["rules"]["items"]["properties"]["targets"]["items"]["properties"]
    assert target["weight"]["default"] == llm_route.Target("x").weight
    shadow = properties["rules"]["items"]["properties"]["shadow"]["properties"]
    assert _defaults(shadow) == dataclasses.astuple(llm_route.Shadow(""))[1:]
    classifier = properties["routing"]["properties"]["classifier"]["properties"]
    assert _defaults(classifier) == dataclasses.astuple(llm_route.Classifier(""))[1:]


def _defaults(properties: dict[str, Any]) -> tuple[object, ...]:
    return tuple(field["default"] for field in properties.values() if "default" in field)


def test_the_names_of_an_llmdeployment_are_the_operators() -> None:
    body = merged(MINIMAL, {"spec": {"model": {"servedName": "org/m", "aliases": ["a"]}}})
    for one in (MINIMAL, body):
        model = spec.parse(one)
        (names,) = resolve([], [], [one]).served_names.values()
        assert names == model.served_names


PROPERTIES = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


def test_the_lease_that_asks_for_a_pod_is_the_operators() -> None:
    labels = demand.lease(("ns", "m"), "")["metadata"]["labels"]
    assert labels == {names.LABEL_ROLE: names.ROLE_DEMAND, names.LABEL_NAMESPACE: "ns", names.LABEL_NAME: "m"}
    assert demand.RENEW_SECONDS * 2 < scale_to_zero.DEMAND_SECONDS, "one renewal may be lost"
    for accelerator in ({}, {"gpu": {}}, {"profileRef": {"name": "h100"}}):
        body = minimal(resources={"cpu": "1", "memory": "1Gi", **accelerator})
        assert demand.slots(body) == scaling_behavior.batch(spec.parse(body))


@pytest.mark.parametrize(
    "body",
    [
        merged(MINIMAL, {"spec": {"autoscaling": {"maxReplicas": 2, **scaling}, **more}})
        for scaling in (
            {},
            {"minReplicas": 0},
            {"idle": {}},
            {"minReplicas": 0, "backend": "HPA"},
            {"minReplicas": 0, "backend": "KEDA"},
            {"idle": {"activator": {"scalerAddress": "holder.ns:9090"}}},
            {"minReplicas": 0, "fallback": {"replicas": 1}},
            {"backend": "External"},
        )
        for more in ({}, {"suspend": True})
    ],
    ids=lambda body: str(body["spec"]["autoscaling"]) + str(body["spec"].get("suspend", "")),
)
def test_requests_wait_for_the_models_that_the_operator_starts_for_a_lease(body: Body) -> None:
    assert demand.scales_to_zero(body) is spec.parse(body).scales_to_zero


@pytest.mark.parametrize(
    ("fields", "waits"),
    [({}, True), ({"replicas": 1}, True), ({"suspend": True}, False), ({"replicas": 0}, False)],
)
def test_requests_wait_for_a_model_that_shares_an_accelerator_unless_it_may_not_run(
    fields: Body, waits: bool
) -> None:
    body = minimal(sharing={"pool": "card"}, **fields)
    assert demand.scales_to_zero(body) is waits
    observed = Observed(body=body)
    assert sharing.member(spec.parse(body), observed, 0.0, datetime.now(UTC)).may_run is waits


def test_the_rest_of_a_load_and_the_turn_in_the_operators_status_are_read() -> None:
    fields = PROPERTIES["status"]["properties"]["model"]["properties"]
    assert {"etaSeconds", "lastLoadSeconds"} <= fields.keys()
    turn = status.TurnState(pool="card", state="Waiting", turn_at=datetime.fromtimestamp(1_000_000, UTC))
    body = {"status": {"model": {"lastLoadSeconds": 40}, "sharing": status_of_sharing.summary(turn, {})}}
    assert demand.seconds_until_loaded(body, 1_000_000 - 25) == 65
    assert demand.seconds_until_loaded(body, 1_000_000 + 25) == 40, "the turn has begun"


@pytest.mark.parametrize("plural", gateway_kinds.CRDS)
def test_the_charts_crd_is_this_crd(plural: str) -> None:
    copy = ROOT / "charts" / "quire" / "files" / f"{plural}.yaml"
    assert copy.read_bytes() == (ROOT / "crds" / f"{plural}.yaml").read_bytes(), f"copy crds/ to {copy}"
