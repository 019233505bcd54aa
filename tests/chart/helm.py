"""The chart as Helm renders it, for the tests beside this file."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

from e2e import yaml_files
from e2e.cluster import programs

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".cluster" / "bin"
CHART = ROOT / "charts" / "quire"

Body = dict[str, Any]

# The values that have no default.
IMAGES = (
    "--set", "image.repository=registry.example.com/quire-operator",
    "--set", "engineImage.repository=registry.example.com/quire-server",
)  # fmt: skip

PROMETHEUS = ("--api-versions", "monitoring.coreos.com/v1", "--set", "monitoring.podMonitor.enabled=true")

# A gateway to the models of team-a, for pods of its own namespace and of partners.
GATEWAY = (
    "--set", "gateway.enabled=true,gateway.namespaces={team-a}",
    "--set", "gateway.image.repository=registry.example.com/quire-gateway",
    "--set", "gateway.allowFrom[0].namespaceSelector.matchLabels.llm-clients=allowed",
    "--set", "gateway.signingKey.existingSecret=my-key",
    "--set", "gateway.signingKey.publicKeys.current=-----BEGIN PUBLIC KEY-----a",
)  # fmt: skip

# Values that change which objects there are, or their shape.
MATRIX: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "namespaced": ("--set", "watchNamespaces={team-a,team-b}"),
    "single": ("--set", "replicas=1,metricsAdapter.replicas=1"),
    "none": ("--set", "replicas=0,metricsAdapter.replicas=0"),
    "no adapter": ("--set", "metricsAdapter.enabled=false"),
    "cert-manager": (
        "--set", "metricsAdapter.tls.secretName=quire-metrics-adapter-tls",
        "--set", "metricsAdapter.tls.apiServiceAnnotations.cert-manager\\.io/inject-ca-from=quire-system/x",
    ),
    "prometheus": (
        *PROMETHEUS, *GATEWAY, "--set", "monitoring.podMonitor.labels.release=kube-prometheus",
        "--set", "monitoring.prometheusRule.enabled=true,monitoring.prometheusRule.labels.release=kube-prom",
        "--set", "monitoring.prometheusRule.runbooks=https://quire.example.com/alerts",
        "--set", "monitoring.dashboard.enabled=true",
    ),
    "gateway": GATEWAY,
    "batch": (*GATEWAY, "--set", "batch.enabled=true"),
    "one gateway": (
        *GATEWAY, "--set", "gateway.replicas=1,gateway.autoscaling.enabled=false",
        "--set", "gateway.signingKey.enabled=false",
    ),
    "bare": (
        *GATEWAY, "--set", "gateway.serviceAccount.create=false,gateway.serviceAccount.name=mine-as-well",
        "--set", "crds.enabled=false,networkPolicy.enabled=false,podDisruptionBudget.enabled=false",
        "--set", "rbac.create=false,serviceAccount.create=false,serviceAccount.name=mine",
        "--set", "rbac.aggregateClusterRoles.view=false",
        "--set", "metricsAdapter.serviceAccount.create=false,metricsAdapter.serviceAccount.name=mine-too",
    ),
    "profiles": (
        "--set", "acceleratorProfiles.create=true,acceleratorProfiles.overrides.mine.memory=24G",
        "--set-string", "acceleratorProfiles.overrides.t4-16gb.nodeSelector.pool=t4",
    ),
    "policy": ("--set", "admissionPolicy.enabled=true,admissionPolicy.maxGPUs=4"),
    "everything": (
        *GATEWAY, "--set", "gateway.serviceAccount.annotations.a=b",
        "--set", f"image.digest=sha256:{'0' * 64},engineImage.tag=v9,allowFaults=true,logLevel=debug",
        "--set", "rbac.aggregateClusterRoles.edit=true,imagePullSecrets[0].name=pull,priorityClassName=high",
        "--set", "nodeSelector.disk=fast,serviceAccount.annotations.a=b,crds.keep=false",
        "--set", "metricsAdapter.serviceAccount.annotations.a=b",
        "--set", "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight=1",
        "--set", "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].preference"
                 ".matchExpressions[0].key=disk",
        "--set", "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].preference"
                 ".matchExpressions[0].operator=Exists",
        "--set", "tolerations[0].key=dedicated,tolerations[0].operator=Exists",
    ),
}  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Helm with these arguments, whatever its exit status."""
    return subprocess.run([_helm(), *arguments], capture_output=True, text=True, timeout=60, check=False)


@functools.cache
def _helm() -> str:
    programs.build(BIN, ("helm",))
    return str(BIN / "helm")


def template(*arguments: str) -> str:
    """The release `quire` in `quire-system`, as YAML."""
    command = ("template", "quire", str(CHART), "-n", "quire-system", "--kube-version", "1.34.0")
    done = run(*command, *IMAGES, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


_template_once = functools.cache(template)


def render(*arguments: str) -> list[Body]:
    """Every object of the release; Helm runs once for the same arguments."""
    return parse(_template_once(*arguments))


def parse(rendered: str) -> list[Body]:
    """The objects of what `template` returned."""
    return [body for body in yaml_files.load_all(rendered) if body]


def of_kind(bodies: list[Body], kind: str) -> list[Body]:
    """The objects of one kind."""
    return [body for body in bodies if body["kind"] == kind]


def named(bodies: list[Body], kind: str, name: str) -> Body:
    """The only object of its kind and name."""
    (body,) = [body for body in of_kind(bodies, kind) if body["metadata"]["name"] == name]
    return body


def the(bodies: list[Body], kind: str) -> Body:
    """The only object of its kind."""
    (body,) = of_kind(bodies, kind)
    return body
