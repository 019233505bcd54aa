"""What other managers added is removed where it excludes a part of ours, and left alone everywhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quire_operator.observed import Observed, ref
from quire_operator.plan import managed_fields
from tests.operator.plan.planning import plan_of
from tests.operator.plan.test_plan import BODY, DESIRED, live

Body = dict[str, Any]
CONTAINER = ("f:spec", "f:template", "f:spec", "f:containers", 'k:{"name":"server"}')


def child(kind: str) -> Body:
    return live(next(manifest for manifest in DESIRED if manifest["kind"] == kind))


def server(deployment: Body) -> Body:
    container: Body = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


def plan_for(body: Body) -> Any:
    return plan_of(
        DESIRED, Observed(body=BODY, children={ref(m): live(m) for m in DESIRED} | {ref(body): body})
    )


def test_a_port_of_the_name_of_ours_is_taken_over_and_one_of_another_name_is_not() -> None:
    service = child("Service")
    other = {"name": "metrics", "port": 9090, "protocol": "TCP"}
    service["spec"]["ports"] = [{**service["spec"]["ports"][0], "port": 8080}, other]

    plan = plan_for(service)

    assert plan.take_over == {ref(service): (("f:spec", "f:ports", 'k:{"port":8080,"protocol":"TCP"}'),)}
    assert plan.repairs == (ref(service),)


def test_a_variable_with_our_prefix_is_a_repair_although_we_have_no_variables() -> None:
    deployment = child("Deployment")
    server(deployment)["env"] = [{"name": "QUIRE_MAX_NUM_SEQS", "value": "1"}]

    plan = plan_for(deployment)

    assert plan.take_over == {ref(deployment): ((*CONTAINER, "f:env", 'k:{"name":"QUIRE_MAX_NUM_SEQS"}'),)}
    assert plan.repairs == (ref(deployment),)
    assert plan.details == (
        "apply Deployment m: has spec.template.spec.containers[server].env[QUIRE_MAX_NUM_SEQS] "
        "of another manager",
    )


def added_variable(deployment: Body) -> None:
    server(deployment)["env"] = [{"name": "HTTP_PROXY", "value": "http://proxy"}]


def added_sidecar(deployment: Body) -> None:
    sidecar = {"name": "proxy", "image": "proxy:1", "env": [{"name": "QUIRE_LOG_LEVEL", "value": "x"}]}
    deployment["spec"]["template"]["spec"]["containers"].append(sidecar)


def added_volume(deployment: Body) -> None:
    deployment["spec"]["template"]["spec"]["volumes"].append({"name": "logs", "emptyDir": {}})
    server(deployment)["volumeMounts"].append({"name": "logs", "mountPath": "/logs"})


def added_port(deployment: Body) -> None:
    server(deployment)["ports"].append({"name": "debug", "containerPort": 9999, "protocol": "TCP"})


def added_label(deployment: Body) -> None:
    deployment["metadata"]["labels"]["valueFrom"] = "x"


@pytest.mark.parametrize("add", [added_variable, added_sidecar, added_volume, added_port, added_label])
def test_what_excludes_nothing_of_ours_is_no_reason_to_apply(add: Any) -> None:
    deployment = child("Deployment")
    add(deployment)

    assert not plan_for(deployment)


def test_the_operator_becomes_the_only_owner_of_what_it_takes_over() -> None:
    place = ("f:spec", "f:ports", 'k:{"port":8080,"protocol":"TCP"}')
    port: Body = {".": {}, "f:name": {}, "f:port": {}}
    claims = [
        {"manager": "quire-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:type": {}}}},
        {
            "manager": "kubectl-patch",
            "operation": "Update",
            "fieldsV1": {"f:spec": {"f:ports": {place[2]: port}}},
        },
        {
            "manager": "helm",
            "operation": "Update",
            "fieldsV1": {"f:spec": {"f:ports": {place[2]: port}, "f:x": {}}},
        },
    ]
    body = {"apiVersion": "v1", "metadata": {"managedFields": copy.deepcopy(claims)}}

    owners = managed_fields(body, [place])

    assert [(claim["manager"], claim["fieldsV1"]) for claim in owners] == [
        ("quire-operator", {"f:spec": {"f:type": {}, "f:ports": {place[2]: {".": {}}}}}),
        ("helm", {"f:spec": {"f:x": {}}}),
    ]
    assert body["metadata"]["managedFields"] == claims, "the input is not changed"
    assert managed_fields({**body, "metadata": {"managedFields": owners}}, [place]) == owners
