"""The operator's rights: what it needs, by name, and nothing that allows privilege escalation."""

from __future__ import annotations

import itertools
import re

import pytest

from quire_operator.cluster import kinds
from tests.chart.helm import CHART, MATRIX, ROOT, Body, named, of_kind, render

FORBIDDEN_RESOURCES = {"secrets", "nodes", "serviceaccounts/token"}
FORBIDDEN_RESOURCES |= {f"pods/{way}" for way in ("exec", "attach", "portforward", "proxy")}
FORBIDDEN_VERBS = {"*", "escalate", "bind", "impersonate", "deletecollection"}


def roles(bodies: list[Body]) -> list[Body]:
    """Those that the operator is bound to: the others are for people."""
    bindings = [*of_kind(bodies, "RoleBinding"), *of_kind(bodies, "ClusterRoleBinding")]
    bound = {binding["roleRef"]["name"] for binding in bindings}
    all_roles = [*of_kind(bodies, "Role"), *of_kind(bodies, "ClusterRole")]
    return [role for role in all_roles if role["metadata"]["name"] in bound]


def granted(role: Body) -> dict[tuple[str, str], set[str]]:
    rights: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for place in itertools.product(rule["apiGroups"], rule["resources"]):
            rights[place] = rights.get(place, set()) | set(rule["verbs"])
    return rights


@pytest.mark.parametrize("name", MATRIX)
def test_no_role_grants_secrets_wildcards_or_privilege_escalation(name: str) -> None:
    for role in roles(render(*MATRIX[name])):
        for (group, resource), verbs in granted(role).items():
            assert "*" not in (group, resource)
            assert resource not in FORBIDDEN_RESOURCES
            assert group != "rbac.authorization.k8s.io"
            assert not verbs & FORBIDDEN_VERBS


def test_the_operator_has_exactly_the_rights_that_its_code_uses() -> None:
    (role,) = [r for r in roles(render(*MATRIX["no adapter"])) if r["kind"] == "ClusterRole"]
    expected = {(k.group, k.plural): set(k.verbs) for k in (*kinds.CACHED, kinds.EVENT, kinds.PROFILE)}
    expected |= {
        ("serving.quire.dev", "llmdeployments/status"): {"patch"},
        ("serving.quire.dev", "llmdeployments/finalizers"): {"update"},
    }

    assert granted(role) == expected


def test_the_operator_may_get_secrets_only_where_references_to_them_need_a_label() -> None:
    def all_granted(*values: str) -> list[dict[tuple[str, str], set[str]]]:
        return [granted(role) for role in roles(render(*MATRIX["no adapter"], *values))]

    usual, labelled = all_granted(), all_granted("--set", "secretReferences=Labelled")
    more = [
        {place: verbs for place, verbs in after.items() if before.get(place) != verbs}
        for before, after in zip(usual, labelled, strict=True)
    ]
    assert sorted(map(len, more)) == [0] * (len(more) - 1) + [1]
    assert {("", "secrets"): {"get"}} in more


def test_a_namespaced_operator_has_no_cluster_role() -> None:
    bodies = render(*MATRIX["namespaced"])

    assert of_kind(bodies, "ClusterRoleBinding") == []
    assert of_kind(bodies, "ClusterRole") == []
    assert {r["kind"] for r in roles(bodies)} == {"Role"}
    namespaces = sorted(r["metadata"]["namespace"] for r in roles(bodies))
    assert namespaces == ["quire-system", "team-a", "team-b"]


def test_a_namespaced_operator_may_get_profiles_only_when_enabled() -> None:
    bodies = render(*MATRIX["namespaced"], "--set", "rbac.readAcceleratorProfiles=true")
    (role,) = [r for r in roles(bodies) if r["kind"] == "ClusterRole"]

    assert granted(role) == {(kinds.PROFILE.group, kinds.PROFILE.plural): {"get"}}


def test_in_its_own_namespace_the_operator_has_rights_on_its_lease_only() -> None:
    (role,) = [r for r in roles(render()) if r["kind"] == "Role"]

    assert role["metadata"]["namespace"] == "quire-system"
    assert granted(role) == {("coordination.k8s.io", "leases"): {"create", "get", "update"}}
    assert all(rule.get("resourceNames") or rule["verbs"] == ["create"] for rule in role["rules"])


def test_aggregated_roles_for_users_grant_write_access_only_when_enabled() -> None:
    def aggregated(*values: str) -> set[str]:
        return {
            label.rpartition("-")[2]
            for role in of_kind(render(*values), "ClusterRole")
            for label in role["metadata"]["labels"]
            if label.startswith("rbac.authorization.k8s.io/aggregate-to-")
            and any("create" in rule["verbs"] for rule in role["rules"])
        }

    assert aggregated() == set()
    assert aggregated("--set", "rbac.aggregateClusterRoles.admin=true") == {"admin"}
    assert aggregated("--set", "rbac.aggregateClusterRoles.edit=true") == {"edit", "admin"}


def test_viewer_editor_and_admin_roles_each_include_the_one_before() -> None:
    names = [f"quire-llmdeployment-{name}" for name in ("viewer", "editor", "admin")]
    viewer, editor, admin = (granted(named(render(), "ClusterRole", name)) for name in names)

    for less, more in ((viewer, editor), (editor, admin)):
        assert all(verbs <= more[place] for place, verbs in less.items()) and less != more
    assert {group for group, _ in admin} == {"serving.quire.dev"}
    assert ("serving.quire.dev", "llmdeployments/status") in viewer
    assert all(verbs == {"get"} for (_, thing), verbs in admin.items() if thing.endswith("/status"))


def test_templates_use_no_random_time_or_lookup_functions() -> None:
    """GitOps tools render again and again, and without a cluster. The signing key is left out there."""
    paths = [path for path in (CHART / "templates").iterdir() if path.name != "gateway-keys.yaml"]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)

    assert not re.search(r"\b(lookup|rand\w+|now|uuidv4|genCA)\b", text)
    assert (ROOT / "charts" / "quire" / "values.schema.json").exists()
