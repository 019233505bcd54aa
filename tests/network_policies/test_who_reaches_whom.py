"""Who reaches whom under the policies of the operator and of its chart, as tables: LLMDeployments of each
kind in one namespace, foreign pods beside them and elsewhere, and addresses outside the cluster.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from e2e.api import specs
from quire_operator import resources, spec
from quire_operator.settings import Settings
from tests.chart import helm
from tests.network_policies import reachability
from tests.network_policies.reachability import Body, Connection, World

SETTINGS = Settings(engine_image="registry.example/quire-server:1")
ALLOWED = [
    {"namespaceSelector": {"matchLabels": {"llm-clients": "allowed"}}},
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}},
        "podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["gateway"]}]},
    },
    {"ipBlock": {"cidr": "198.51.100.0/24"}},
]
MIRROR = {"repo": "org/model", "endpoint": "http://mirror.hubs.svc"}
PROXY = [{"name": "HTTPS_PROXY", "value": "http://203.0.113.8:3128"}]
FOR_EACH_POD = {"mode": "None", "size": "20Gi"}
ONCE = {"mode": "SharedPVC", "size": "20Gi", "accessMode": "ReadWriteMany", "storageClassName": "fast-rwx"}


def downloaded(cache: Body, workload: str = "", **source: Any) -> Body:
    """A spec with this source instead of a claim."""
    identity = {"security": {"identity": {"workload": workload}}} if workload else {}
    return {"model": {"source": source}, "cache": cache, **identity}


def traced(endpoint: str) -> Body:
    return {"observability": {"tracing": {"endpoint": endpoint}}}


HUB = {"huggingFace": {"repo": "org/model"}}
SPECS: dict[str, Body] = {
    "plain": {},
    "allowing": {"networking": {"networkPolicy": {"allowFrom": ALLOWED}}},
    "hub": downloaded(FOR_EACH_POD, **HUB),
    "mirror": downloaded({**FOR_EACH_POD, "download": {"env": PROXY}}, huggingFace=MIRROR),
    "shared": downloaded(ONCE, **HUB),
    "traced": traced("http://collector.observability.svc:4318"),
    "traced-ip": traced("http://192.0.2.10:4317"),
    "traced-name": traced("http://otel.example.com"),
    "gke": downloaded(FOR_EACH_POD, "GKE", gcs={"uri": "gs://models/model"}),
    "once": downloaded(ONCE, "GKE", gcs={"uri": "gs://models/model"}),
    "eks": downloaded(FOR_EACH_POD, "EKS", s3={"uri": "s3://models/model", "region": "eu-central-1"}),
    "aks": downloaded(FOR_EACH_POD, "AKS", oci={"reference": "models.azurecr.io/model:v1"}),
    "group": {"parallelism": {"tensor": 2, "nodes": 2}},
    "group-b": {
        "parallelism": {"tensor": 4, "pipeline": 2, "nodes": 2},
        "resources": {"cpu": "8", "gpu": {}},
    },
    "split": {"disaggregation": {"prefill": {}}},
    "apart": {"disaggregation": {"prefill": {}, "transport": "NIXL"}},
    "open": {**downloaded(FOR_EACH_POD, **HUB), "networking": {"networkPolicy": {"mode": "None"}}},
}

NAMESPACES: dict[str, dict[str, str]] = {
    **{name: {} for name in ("team-a", "team-b", "quire-system", "monitoring", "keda", "kube-system")},
    **{name: {} for name in ("hubs", "observability", "gateways")},
    "partner": {"llm-clients": "allowed"},
}
OTHERS = (
    "kube-system/dns", "hubs/mirror", "observability/collector",
    "monitoring/prometheus", "keda/keda", "quire-system/client",
    "partner/client", "team-a/client", "team-b/client",
)  # fmt: skip

# Who may connect to which port of which pod. Pods of others have the labels of a gateway, of a serving pod
# (impostor) or of the operator. 10.0.0.1 is the pods' own node, 10.0.0.2 another one.
ADMITTED = """
from                   plain:8000  plain:8001  allowing:8000  allowing:8001  shared-fetch:8001  open:8001
team-a/client          yes         -           yes            -              -                  yes
team-b/client          -           -           -              -              -                  yes
partner/client         -           -           yes            -              -                  yes
gateways/gateway       -           -           yes            -              -                  yes
gateways/client        -           -           -              -              -                  yes
team-b/gateway         -           -           -              -              -                  yes
quire-system/operator  -           yes         -              yes            yes                yes
quire-system/adapter   yes         -           yes            -              -                  -
quire-system/gateway   yes         yes         yes            yes            -                  yes
monitoring/prometheus  yes         yes         yes            yes            -                  yes
team-a/impostor        -           -           -              -              -                  -
team-b/impostor        -           -           -              -              -                  yes
team-b/operator        -           -           -              -              -                  yes
team-a/hub             -           -           -              -              -                  -
team-a/shared          -           -           -              -              -                  -
team-a/shared-fetch    -           -           -              -              -                  -
team-a/open            yes         -           yes            -              -                  yes
10.0.0.1               yes         yes         yes            yes            yes                yes
10.0.0.2               -           -           -              -              -                  yes
198.51.100.9           -           -           yes            -              -                  yes
203.0.113.7            -           -           -              -              -                  yes
"""

# The same for pods of two roles. `split` and `apart` are decode pods of two LLMDeployments; KV blocks are
# read at port 7602.
ADMITTED_TO_ROLES = """
from                   split:8000  split:7602  split-prefill:7602  split-prefill:8000  split-prefill:8001
team-a/client          yes         -           -                   -                   -
team-b/client          -           -           -                   -                   -
quire-system/operator  -           -           -                   -                   yes
quire-system/adapter   yes         -           -                   yes                 -
quire-system/gateway   yes         -           -                   -                   -
monitoring/prometheus  yes         -           -                   yes                 yes
team-a/split           -           -           yes                 -                   -
team-a/split-prefill   -           -           -                   -                   -
team-a/apart           -           -           -                   -                   -
team-a/apart-prefill   -           -           -                   -                   -
team-a/plain           -           -           -                   -                   -
team-b/decode          -           -           -                   -                   -
team-a/open            yes         -           -                   -                   -
10.0.0.1               yes         yes         yes                 yes                 yes
10.0.0.2               -           -           -                   -                   -
203.0.113.7            -           -           -                   -                   -
"""

# The ports of NIXL are open to the other role of the same LLMDeployment alone, and closed without it.
ADMITTED_BY_NIXL = """
from                   apart:7603  apart:7602  apart-prefill:7602  apart-prefill:7603  apart-prefill:7635
team-a/apart           -           -           yes                 yes                 -
team-a/apart-prefill   yes         -           -                   -                   -
team-a/split           -           -           -                   -                   -
team-a/split-prefill   -           -           -                   -                   -
team-a/client          -           -           -                   -                   -
team-b/decode          -           -           -                   -                   -
team-a/open            -           -           -                   -                   -
quire-system/operator  -           -           -                   -                   -
monitoring/prometheus  -           -           -                   -                   -
203.0.113.7            -           -           -                   -                   -
"""

# The same for the pods of the chart, and for a pod elsewhere with the labels of a serving pod, which no
# policy of ours restricts.
ADMITTED_BY_THE_CHART = """
from                   operator:8080  operator:8081  adapter:6443  adapter:8080  team-b/impostor:8001
team-a/client          -              -              yes           -             yes
team-a/plain           -              -              -             -             -
team-a/hub             -              -              -             -             -
team-a/open            -              -              yes           -             yes
team-b/impostor        -              -              yes           -             yes
quire-system/operator  -              -              yes           -             yes
quire-system/adapter   -              -              yes           -             -
monitoring/prometheus  yes            -              yes           yes           yes
keda/keda              -              -              yes           yes           yes
10.0.0.1               yes            yes            yes           yes           yes
10.0.0.10              -              -              yes           -             yes  # the API server
203.0.113.7            -              -              yes           -             yes
"""

# The gateway serves its own namespace, and whom its values name: here partner's clients. quire-batch serves
# the gateway alone.
ADMITTED_BY_THE_GATEWAY = """
from                   gateway:8080  gateway:8082  batch:8080
quire-system/operator  -             -             -
quire-system/gateway   -             yes           yes
quire-system/batch     yes           -             -
quire-system/client    yes           -             -
partner/client         yes           -             -
team-a/client          -             -             -
team-a/plain           -             -             -
team-b/client          -             -             -
gateways/gateway       -             -             -
monitoring/prometheus  yes           -             yes
10.0.0.1               yes           yes           yes
203.0.113.7            -             -             -
"""

# The ports of a group of pods (7600 of its leader, and those that gloo and NCCL choose) are open to its own
# pods alone, not to those of another LLMDeployment's.
ADMITTED_BY_A_GROUP = """
from                   group:7600  group:40123  group-worker:8001  group-worker:40123  group-b:7600
team-a/group           yes         yes          yes                yes                 -
team-a/group-worker    yes         yes          yes                yes                 -
team-a/group-b         -           -            -                  -                   yes
team-a/group-b-worker  -           -            -                  -                   yes
team-a/client          -           -            -                  -                   -
team-a/open            -           -            -                  -                   -
team-a/impostor        -           -            -                  -                   -
team-b/client          -           -            -                  -                   -
team-b/impostor        -           -            -                  -                   -
quire-system/operator  -           -            yes                -                   -
quire-system/adapter   -           -            -                  -                   -
monitoring/prometheus  -           -            yes                -                   -
203.0.113.7            -           -            -                  -                   -
"""

# The same for a group on GPUs: NCCL takes any port that the kernel gives it.
ADMITTED_BY_A_GROUP_ON_GPUS = """
from                   group-b:7601  group-b:32768  group-b:60999  group-b-worker:32768  group-b-worker:60999
team-a/group-b         yes           yes            yes            yes                   yes
team-a/group-b-worker  yes           yes            yes            yes                   yes
team-a/group           -             -              -              -                     -
team-a/group-worker    -             -              -              -                     -
team-a/client          -             -              -              -                     -
team-a/open            -             -              -              -                     -
team-a/impostor        -             -              -              -                     -
team-b/client          -             -              -              -                     -
team-b/impostor        -             -              -              -                     -
quire-system/operator  -             -              -              -                     -
quire-system/adapter   -             -              -              -                     -
monitoring/prometheus  -             -              -              -                     -
203.0.113.7            -             -              -              -                     -
"""

# What a pod may connect to. A model on a claim needs nothing but DNS; a pod that downloads needs the ports of
# its source, and with a workload identity the metadata server of its cloud.
REACHED = """
to                            plain  hub  mirror  shared  shared-fetch  gke  eks  aks
kube-system/dns 53/UDP        yes    yes  yes     yes     yes           yes  yes  yes
kube-system/dns 53            yes    yes  yes     yes     yes           yes  yes  yes
169.254.20.10 53/UDP          yes    yes  yes     yes     yes           yes  yes  yes  # NodeLocal DNSCache
203.0.113.7 53/UDP            yes    yes  yes     yes     yes           yes  yes  yes
203.0.113.7 443               -      yes  yes     -       yes           yes  yes  yes
2001:db8::7 443               -      yes  yes     -       yes           yes  yes  yes
203.0.113.7 80                -      -    yes     -       -             -    -    -
203.0.113.8 3128              -      -    yes     -       -             -    -    -    # the proxy
hubs/mirror 80                -      -    yes     -       -             -    -    -
hubs/mirror 443               -      yes  yes     -       yes           yes  yes  yes
hubs/mirror 9090              -      -    -       -       -             -    -    -
observability/collector 4318  -      -    -       -       -             -    -    -
team-a/client 8000            -      -    -       -       -             -    -    -
team-b/client 8000            -      -    -       -       -             -    -    -
team-a/allowing 8000          -      -    -       -       -             -    -    -
10.0.0.10 6443                -      -    -       -       -             -    -    -    # the API server
10.0.0.2 10250                -      -    -       -       -             -    -    -    # a kubelet
169.254.169.254 80            -      -    -       -       -             yes  -    -    # GCE, EC2, Azure
169.254.169.254 443           -      -    -       -       -             -    -    -
169.254.169.254 988           -      -    -       -       -             yes  -    -    # GKE
169.254.169.252 80            -      -    -       -       -             yes  -    -    # GKE
169.254.169.252 988           -      -    -       -       -             yes  -    -
169.254.170.2 80              -      -    -       -       -             -    -    -    # ECS
169.254.170.23 80             -      -    -       -       -             -    yes  -    # EKS
169.254.170.23 443            -      -    -       -       -             -    -    -
fd00:ec2::23 80               -      -    -       -       -             -    yes  -    # EKS
fd00:ec2::254 80              -      -    -       -       -             -    -    -    # EC2
fd00:ec2::254 443             -      -    -       -       -             -    -    -
fe80::1 443                   -      -    -       -       -             -    -    -
"""

# The same for a pod of others with the labels of `plain`, for traces, for a shared model with GKE's identity,
# and with no NetworkPolicy.
REACHED_BY_OTHERS = """
to                            team-a/impostor  traced  traced-ip  traced-name  once  once-fetch  open
kube-system/dns 53/UDP        yes              yes     yes        yes          yes   yes         yes
203.0.113.7 443               -                -       -          -            -     yes         yes
203.0.113.7 80                -                -       -          yes          -     -           yes
observability/collector 4318  -                yes     -          -            -     -           yes
hubs/mirror 4318              -                -       -          -            -     -           yes
hubs/mirror 80                -                -       -          yes          -     -           yes
192.0.2.10 4317               -                -       yes        -            -     -           yes
192.0.2.11 4317               -                -       -          -            -     -           yes
team-b/client 8000            -                -       -          -            -     -           yes
10.0.0.10 6443                -                -       -          -            -     -           yes
169.254.169.254 80            -                -       -          -            -     yes         yes
169.254.169.252 988           -                -       -          -            -     yes         yes
169.254.170.23 80             -                -       -          -            -     -           yes
fd00:ec2::254 80              -                -       -          -            -     -           yes
"""

REACHED_BY_A_GROUP = """
to                           group  group-worker  group-b  group-b-worker
kube-system/dns 53/UDP       yes    yes           yes      yes
team-a/group 7600            yes    yes           -        -
team-a/group-worker 40123    yes    yes           -        -
team-a/group-b 7600          -      -             yes      yes
team-a/group-b-worker 60999  -      -             yes      yes
team-a/client 8000           -      -             -        -
203.0.113.7 443              -      -             -        -
169.254.169.254 80           -      -             -        -
"""

# The same for pods of two roles.
REACHED_BY_ROLES = """
to                         split  split-prefill  apart  apart-prefill
kube-system/dns 53/UDP     yes    yes            yes    yes
team-a/split-prefill 7602  yes    -              -      -
team-a/apart-prefill 7602  -      -              yes    -
team-a/apart-prefill 7603  -      -              yes    -
team-a/apart 7634          -      -              -      yes
team-a/apart 7602          -      -              -      -
team-a/split-prefill 7603  -      -              -      -
team-a/split-prefill 8000  -      -              -      -
team-a/split 8000          -      -              -      -
team-a/client 7602         -      -              -      -
203.0.113.7 443            -      -              -      -
203.0.113.7 7602           -      -              -      -
"""

# The chart opens 443 and 6443 to every address, because it does not know the API server's.
REACHED_BY_THE_CHART = """
to                      operator  adapter  gateway  batch
kube-system/dns 53/UDP  yes       yes      yes      yes
10.0.0.10 6443          yes       yes      yes      -
203.0.113.7 443         yes       yes      yes      -
203.0.113.7 80          -         -        -        -
hubs/mirror 80          -         -        -        -
team-a/client 8000      -         -        -        -
team-a/client 8001      -         -        -        -
team-a/open 8000        -         yes      yes      -
team-a/open 8001        yes       -        yes      -
team-b/impostor 8000    -         yes      -        -
team-b/impostor 8001    yes       -        -        -
169.254.169.254 80      -         -        -        -
169.254.169.254 988     -         -        -        -
169.254.170.23 80       -         -        -        -
fd00:ec2::254 80        -         -        -        -
"""


def children(name: str) -> tuple[Body, ...]:
    body = {**specs.minimal(), "metadata": {"name": name, "namespace": "team-a"}}
    fields = SPECS[name]
    if "model" in fields:
        body["spec"].pop("model")
    return resources.build(spec.parse(specs.merged(body, {"spec": fields})), SETTINGS)


def pods_of(made: tuple[Body, ...]) -> list[Body]:
    """The serving pods, named as their Deployment, the worker of a group and the download pod."""
    found = []
    for child in made:
        name = f"team-a/{child['metadata']['labels']['serving.quire.dev/name']}"
        role = str(child["metadata"]["name"]).removeprefix(name.partition("/")[2])
        group = child.get("spec", {}).get("leaderWorkerTemplate", {})
        templates = {
            "Deployment": {role: child.get("spec", {}).get("template")},
            "Job": {"-fetch": child.get("spec", {}).get("template")},
            "LeaderWorkerSet": {"": group.get("leaderTemplate"), "-worker": group.get("workerTemplate")},
        }.get(child["kind"], {})
        found += [reachability.pod(f"{name}{suffix}", template) for suffix, template in templates.items()]
    return found


@functools.cache
def world() -> World:
    built = [children(name) for name in SPECS]
    chart = helm.render(*helm.MATRIX["batch"])
    templates = {
        short: helm.named(chart, "Deployment", f"quire-{name}")["spec"]["template"]
        for short, name in (("operator", "operator"), ("adapter", "metrics-adapter"), ("gateway", "gateway"))
    }
    templates["batch"] = helm.named(chart, "StatefulSet", "quire-batch")["spec"]["template"]
    (plain,) = [child["spec"]["template"] for child in children("plain") if child["kind"] == "Deployment"]
    (decode,) = [
        child["spec"]["template"]
        for child in children("split")
        if (child["kind"], child["metadata"]["name"]) == ("Deployment", "split")
    ]
    pods = (
        *[pod for made in built for pod in pods_of(made)],
        *[reachability.pod(f"quire-system/{short}", template) for short, template in templates.items()],
        *[reachability.pod(name, app=name.partition("/")[2]) for name in OTHERS],
        reachability.pod("gateways/gateway", app="gateway"),
        reachability.pod("gateways/client", app="client"),
        reachability.pod("team-b/gateway", app="gateway"),
        reachability.pod("team-a/impostor", plain),
        reachability.pod("team-b/impostor", plain),
        reachability.pod("team-b/operator", templates["operator"]),
        reachability.pod("team-b/decode", decode),
    )
    rendered = [*helm.of_kind(chart, "NetworkPolicy"), *(child for made in built for child in made)]
    return World(NAMESPACES, pods, tuple(body for body in rendered if body["kind"] == "NetworkPolicy"))


def full_name(name: str) -> str:
    """A pod with no namespace in a heading is the chart's or one of team-a."""
    if "/" in name:
        return name
    return f"quire-system/{name}" if name in ("operator", "adapter", "gateway", "batch") else f"team-a/{name}"


def admission(row: str, heading: str) -> Connection:
    pod, _, port = heading.rpartition(":")
    return Connection(row, full_name(pod), int(port))


def reach(row: str, heading: str) -> Connection:
    target, _, port = row.partition(" ")
    number, _, protocol = port.partition("/")
    return Connection(full_name(heading), target, int(number), protocol or "TCP")


def cases() -> dict[str, dict[Connection, bool]]:
    """For each column of each table the connections in it, and whether they are allowed."""
    tables = {
        ADMITTED: admission, ADMITTED_BY_THE_CHART: admission, ADMITTED_BY_A_GROUP: admission,
        ADMITTED_BY_A_GROUP_ON_GPUS: admission, ADMITTED_TO_ROLES: admission, ADMITTED_BY_NIXL: admission,
        REACHED: reach, REACHED_BY_A_GROUP: reach, REACHED_BY_ROLES: reach, REACHED_BY_OTHERS: reach,
        REACHED_BY_THE_CHART: reach, ADMITTED_BY_THE_GATEWAY: admission,
    }  # fmt: skip
    found = {}
    for text, connection in tables.items():
        headings, rows = reachability.table(text)
        for number, heading in enumerate(headings):
            word = "to" if connection is admission else "from"
            found[f"{word} {heading}"] = {
                connection(row, heading): cells[number] == "yes" for row, cells in rows.items()
            }
    return found


CASES = cases()


@functools.cache
def judged(*, ip_blocks_select_pods: bool) -> dict[Connection, list[str]]:
    asked = [connection for expected in CASES.values() for connection in expected]
    if ip_blocks_select_pods:
        return reachability.deniers(world(), asked)
    between_pods = [one for one in asked if "/" in one.source and "/" in one.target]
    return reachability.deniers(reachability.without_ip_blocks(world()), between_pods)


def wrong(expected: dict[Connection, bool], denied: dict[Connection, list[str]]) -> list[str]:
    """What differs from the table, one line each."""
    return [
        f"{one.source} -> {one.target} {one.port}/{one.protocol} is "
        + (f"denied by {' and '.join(denied[one])}" if denied[one] else "allowed")
        for one, allowed in expected.items()
        if one in denied and allowed == bool(denied[one])
    ]


@pytest.mark.parametrize("column", CASES)
def test_connections_are_allowed_as_in_the_table_and_no_others(column: str) -> None:
    differs = wrong(CASES[column], judged(ip_blocks_select_pods=True))
    assert not differs, "\n".join(differs)


def test_pods_reach_the_same_pods_where_address_blocks_select_no_pods() -> None:
    """As with Cilium: what may be in the cluster needs a selector, whatever addresses are allowed."""
    denied = judged(ip_blocks_select_pods=False)
    differs = [line for expected in CASES.values() for line in wrong(expected, denied)]
    assert not differs, "\n".join(differs)


def test_every_policy_that_is_rendered_selects_a_pod_with_a_column() -> None:
    """Else the tables would say nothing of it."""
    shown = {full_name(heading.split(" ")[1].partition(":")[0]) for heading in CASES}
    pods = [pod["metadata"] for pod in world().pods]
    shown_pods = [pod for pod in pods if f"{pod['namespace']}/{pod['name']}" in shown]
    for policy in world().policies:
        selector = policy["spec"]["podSelector"]["matchLabels"].items()
        namespace = policy["metadata"]["namespace"]
        assert any(
            pod["namespace"] == namespace and selector <= pod["labels"].items() for pod in shown_pods
        ), policy["metadata"]["name"]
