"""What the chart renders for each choice of values, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from e2e import yaml_files
from quire_operator.settings import Settings
from tests.chart.helm import (
    CHART,
    GATEWAY,
    IMAGES,
    MATRIX,
    PROMETHEUS,
    ROOT,
    Body,
    named,
    of_kind,
    parse,
    render,
    run,
    template,
)


def test_helm_lint_passes_for_every_choice_of_values() -> None:
    for arguments in MATRIX.values():
        values = [a for a in arguments if a not in PROMETHEUS[:2]]
        done = run("lint", "--strict", str(CHART), "--kube-version", "1.34.0", *IMAGES, *values)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", MATRIX)
def test_every_choice_of_values_renders_each_object_once_and_reproducibly(name: str) -> None:
    rendered = template(*MATRIX[name])
    bodies = parse(rendered)
    identities = [(b["kind"], b["metadata"].get("namespace", ""), b["metadata"]["name"]) for b in bodies]

    assert len(identities) == len(set(identities))
    assert template(*MATRIX[name]) == rendered, "rendering again gives the same"


@pytest.mark.parametrize(
    "values",
    [
        "replicas=two",
        "no.such.value=1",
        "image.tga=v1",
        "image.repository=a b",
        "tolerations[0].effect=Never",
        "imagePullSecrets[0].nome=pull",
        "image.digest=sha256:short",
        "watchNamespaces={Not_A_Name}",
        "allowFaults=perhaps",
        "logLevel=loud",
        "leaderElection.retrySeconds=0",
        "networkPolicy.apiServerPorts={99999}",
        "monitoring.podMonitor.interval=often",
        "metricsAdapter.replicas=two",
        "metricsAdapter.tls.secretName=Not_A_Name",
        "gateway.namespaces={Not_A_Name}",
        "gateway.drainSeconds=-1",
        "gateway.allowFrom={team-a}",
        "admissionPolicy.hosts={https://hub.example.com/}",
        "admissionPolicy.sources={ftp}",
        "admissionPolicy.maxGPUs=many",
    ],
)
def test_invalid_values_are_rejected_by_the_schema(values: str) -> None:
    done = run("template", "quire", str(CHART), "--kube-version", "1.34.0", *IMAGES, "--set", values)

    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


@pytest.mark.parametrize("value", ["image", "engineImage"])
def test_a_missing_image_is_rejected_with_a_remedy(value: str) -> None:
    chart = ("template", "quire", str(CHART), "--kube-version", "1.34.0")
    done = run(*chart, *IMAGES, "--set", f"{value}.repository=")

    assert done.returncode != 0
    assert f"set {value}.repository to the image in your registry, such as --set {value}" in done.stderr


def test_default_image_repositories_are_empty() -> None:
    values = yaml_files.load((CHART / "values.yaml").read_text(encoding="utf-8"))

    assert values["image"]["repository"] == values["engineImage"]["repository"] == ""


@pytest.mark.parametrize("name", ["quire-operator", "quire-metrics-adapter", "quire-gateway"])
def test_scheduling_values_apply_to_the_chart_s_own_pods(name: str) -> None:
    pod = named(render(*MATRIX["everything"]), "Deployment", name)["spec"]["template"]["spec"]

    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["priorityClassName"] == "high"
    assert pod["nodeSelector"] == {"disk": "fast"}
    assert set(pod["affinity"]) == {"nodeAffinity"}
    assert {"key": "dedicated", "operator": "Exists"} in pod["tolerations"]
    assert len(pod["tolerations"]) == 3, "those for a lost node are there, too"
    default = named(render(*GATEWAY), "Deployment", name)["spec"]["template"]["spec"]
    assert not {"imagePullSecrets", "priorityClassName", "nodeSelector", "affinity"} & default.keys()


def test_values_and_their_schema_have_the_same_fields() -> None:
    values = yaml_files.load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = yaml_files.load((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def compare(value: Any, node: Any, path: str) -> None:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        if isinstance(value, dict) and "properties" in node:
            known = set(node["properties"]) - {"global"}
            optional = {"requests", "limits"} if path.endswith(".resources") else set()
            assert known - optional <= set(value) <= known, path
            assert node["additionalProperties"] is False, path
            for key, inner in value.items():
                compare(inner, node["properties"][key], f"{path}.{key}")

    compare(values, schema, "")


@pytest.mark.parametrize(
    "plural", ["llmdeployments", "acceleratorprofiles", "llmroutes", "llmclients", "llmexternalbackends"]
)
def test_the_rendered_crds_equal_the_canonical_ones_and_are_kept_on_uninstall(plural: str) -> None:
    kind, name = "CustomResourceDefinition", f"{plural}.serving.quire.dev"
    canonical = yaml_files.load((ROOT / "crds" / f"{plural}.yaml").read_text(encoding="utf-8"))

    crd = named(render(), kind, name)
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == canonical
    assert named(render("--set", "crds.keep=false"), kind, name) == canonical
    assert of_kind(render("--set", "crds.enabled=false"), kind) == []


def test_profiles_are_rendered_only_when_enabled_and_overridden_field_by_field() -> None:
    shipped = (CHART / "files" / "default-profiles.yaml").read_text(encoding="utf-8")
    expected = {body["metadata"]["name"]: body["spec"] for body in yaml_files.load_all(shipped)}
    expected |= {
        "mine": {"memory": "24G"},
        "t4-16gb": {**expected["t4-16gb"], "nodeSelector": {"pool": "t4"}},
    }

    assert of_kind(render(), "AcceleratorProfile") == []
    made = of_kind(render(*MATRIX["profiles"]), "AcceleratorProfile")
    assert {body["metadata"]["name"]: body["spec"] for body in made} == expected


def container(bodies: list[Body]) -> Body:
    (found,) = named(bodies, "Deployment", "quire-operator")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(bodies: list[Body]) -> dict[str, str]:
    return {e["name"]: e.get("value", "from-the-pod") for e in container(bodies)["env"]}


@pytest.mark.parametrize("name", MATRIX)
def test_the_operator_parses_the_environment_that_the_chart_renders(name: str) -> None:
    given = environment(render(*MATRIX[name]))

    settings = Settings.from_environ(given)

    assert settings.allow_faults == (name == "everything")
    assert settings.engine_image_pull_secrets == (("pull",) if name == "everything" else ())
    assert settings.watch_namespaces == (("team-a", "team-b") if name == "namespaced" else ())
    assert settings.monitoring_namespace_labels == (("kubernetes.io/metadata.name", "monitoring"),)
    assert settings.metrics_port == container(render(*MATRIX[name]))["ports"][0]["containerPort"]


def test_a_digest_takes_precedence_over_a_tag() -> None:
    assert container(render())["image"].endswith("/quire-operator:0.1.0")
    digest = f"sha256:{'a' * 64}"
    bodies = render("--set", f"image.digest={digest},image.tag=v2,engineImage.digest={digest}")

    assert container(bodies)["image"].endswith(f"/quire-operator@{digest}")
    assert environment(bodies)["QUIRE_ENGINE_IMAGE"].endswith(f"/quire-server@{digest}")


def test_two_replicas_by_default_and_a_pod_disruption_budget_only_for_more_than_one() -> None:
    for name in ("quire-operator", "quire-metrics-adapter"):  # that of the gateway: test_gateway
        assert named(render(), "Deployment", name)["spec"]["replicas"] == 2
        budget = named(render(), "PodDisruptionBudget", name)["spec"]
        assert budget["selector"] == named(render(), "Deployment", name)["spec"]["selector"]
    assert of_kind(render(*MATRIX["single"]), "PodDisruptionBudget") == []


@pytest.mark.parametrize("name", MATRIX)
def test_pods_satisfy_the_restricted_pod_security_standard(name: str) -> None:
    rendered = render(*MATRIX[name])
    for deployment in (*of_kind(rendered, "Deployment"), *of_kind(rendered, "StatefulSet")):
        pod = deployment["spec"]["template"]["spec"]
        (only,) = pod["containers"]

        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        volumes = {next(iter(v.keys() - {"name"})) for v in pod.get("volumes", [])}
        public = {"configMap"} if name == "batch" else set()
        assert volumes <= {"emptyDir", "secret", *public}, "a Secret only where it is needed"
        has_key = deployment["metadata"]["name"] == "quire-gateway" and name != "one gateway"
        assert ("secret" not in volumes) or name == "cert-manager" or has_key
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_monitoring_objects_are_rendered_only_when_enabled_and_their_crds_exist() -> None:
    rule = ("--set", "monitoring.prometheusRule.enabled=true")
    switches_only = (*PROMETHEUS[2:], *rule)
    crds_only = PROMETHEUS[:2]

    assert len(of_kind(render(*PROMETHEUS), "PodMonitor")) == 2
    assert len(of_kind(render(*PROMETHEUS, *rule), "PrometheusRule")) == 1
    for values in (switches_only, crds_only):
        assert not {b["kind"] for b in render(*values)} & {"PodMonitor", "PrometheusRule"}


def test_the_notes_have_at_most_12_lines() -> None:
    assert len((CHART / "templates" / "NOTES.txt").read_text(encoding="utf-8").splitlines()) <= 12
