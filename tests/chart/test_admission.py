"""The chart's admission policy on a real API server: what it admits, and with what message it denies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.api.client import Client, RefusedError
from e2e.api.specs import DOWNLOADED, merged, minimal
from e2e.cluster import lws
from e2e.cluster.apiserver import ApiServer
from e2e.operator.world import PATHS
from e2e.waiting import eventually
from quire_operator import names
from tests.chart.helm import Body, of_kind, render

pytestmark = pytest.mark.api

POLICY = (
    "--set", "admissionPolicy.enabled=true,admissionPolicy.sources={pvc,huggingFace,s3,oci}",
    "--set", "admissionPolicy.hosts={hub.example.com,store.example.com,proxy.example.com}",
    "--set", "admissionPolicy.registries={registry.example.com/models}",
    "--set", "admissionPolicy.images={registry.example.com/quire-server,mirror.example.com}",
    "--set", "admissionPolicy.gpuResources={nvidia.com/gpu}",
    "--set", "admissionPolicy.serviceAccounts={reader},admissionPolicy.priorityClasses={system-models}",
    "--set", "allowedEnv={MY_TUNING}",
    "--set", "admissionPolicy.maxReplicas=8,admissionPolicy.maxGPUs=2",
    "--set", "admissionPolicy.namespaceSelector.matchLabels.tenant=yes",
)  # fmt: skip
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
POLICIES = {
    "ValidatingAdmissionPolicy": f"{ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{ADMISSION}/validatingadmissionpolicybindings",
}
HUB, S3, GCS, OCI = DOWNLOADED[:4]
GPU = {"cpu": "1", "memory": "2Gi", "gpu": {}}
ON_GPU = {**GPU, "cpu": "4", "memory": "8Gi"}  # with room for what is staged between two roles
MIG = {"cpu": "1", "memory": "8Gi", "gpu": {"resourceName": "nvidia.com/mig-1g.5gb"}}
IMAGE = "registry.example.com/quire-server:1"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with ApiServer() as server, Client(server.kubeconfig) as client:
        client.install_crd()
        for crd in lws.crds():
            client.install_crd(crd)
        for name in ("quire-system", "tenant", "other"):
            labels = {"tenant": "yes"} if name == "tenant" else {}
            body = {"metadata": {"name": name, "labels": labels}}
            client.request("POST", "/api/v1/namespaces", body)
        create_policies(client, POLICY)
        yield client


def create_policies(client: Client, values: tuple[str, ...]) -> None:
    bodies = render(*values)
    for kind, path in POLICIES.items():
        for body in of_kind(bodies, kind):
            client.request("POST", f"{path}?fieldValidation=Strict", body)
    eventually("the policies are enforced", lambda: refused(client, GCS) and refused_image(client, "other:1"))


def delete_policies(client: Client) -> None:
    """Wait until they are in force no more."""
    for path in POLICIES.values():
        client.request("DELETE", path, {})
    eventually(
        "the policies are gone", lambda: not refused(client, GCS) and not refused_image(client, "other:1")
    )


def there(body: Body, namespace: str = "tenant") -> Body:
    return merged(body, {"metadata": {"namespace": namespace}})


def refused(client: Client, body: Body) -> str:
    """What the API server says; empty if it takes the object."""
    try:
        client.try_create(there(body))
    except RefusedError as error:
        return str(error)
    return ""


def server(image: str) -> Body:
    labels = {"app.kubernetes.io/managed-by": "quire-operator"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "server", "image": image}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "m", "namespace": "tenant", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": pod},
    }


def refused_image(client: Client, image: str) -> str:
    return refused(client, server(image))


def source(base: Body, **fields: Any) -> Body:
    (kind,) = base["spec"]["model"]["source"]
    return merged(base, {"spec": {"model": {"source": {kind: fields}}}})


def fetched_with(name: str, value: str) -> Body:
    return merged(HUB, {"spec": {"cache": {"download": {"env": [{"name": name, "value": value}]}}}})


def adapted(**source: Any) -> Body:
    return minimal(engine={"maxAdapters": 2}, adapters=[{"name": "support", "source": source}])


ACCEPTED = {
    "an adapter of an allowed hub": adapted(
        huggingFace={"repo": "a/b", "endpoint": "https://hub.example.com"}
    ),
    "an adapter of an allowed registry": adapted(oci={"reference": "registry.example.com/models/a:v1"}),
    "an adapter in a claim": adapted(pvc={"claimName": "adapters"}),
    "a proxy on an allowed host": fetched_with("https_proxy", "http://proxy.example.com:3128"),
    "hosts that no proxy is asked for": fetched_with("NO_PROXY", "store.example.com"),
    "a claim": minimal(),
    "pods of two roles": minimal(disaggregation={"prefill": {"replicas": 3}, "decode": {"replicas": 5}}),
    "an allowed hub": HUB,
    "an allowed account": minimal(security={"serviceAccountName": "reader"}),
    "a class of the cluster's users": minimal(scheduling={"priorityClassName": "urgent"}),
    "an allowed class of the system": minimal(scheduling={"priorityClassName": "system-models"}),
    "a toleration of one taint": minimal(scheduling={"tolerations": [{"key": "gpu", "operator": "Exists"}]}),
    "variables that are allowed": minimal(
        engine={
            "env": [{"name": "OMP_NUM_THREADS", "value": "2"}, {"name": "MY_TUNING"}, {"name": "QUIRE_FAULT"}]
        }
    ),
    "an allowed store": S3,
    "an allowed registry": OCI,
    "as many GPUs as are allowed": minimal(resources=GPU, replicas=2),
    "as many GPUs as are allowed, of one replica": minimal(resources=GPU, parallelism={"tensor": 2}),
    "ranks without a GPU": minimal(resources={"cpu": "4"}, parallelism={"tensor": 4, "nodes": 2}),
    "as many replicas as are allowed": minimal(replicas=8),
    "an autoscaler up to the ceiling": minimal(resources=GPU, autoscaling={"maxReplicas": 2}),
    "none at all": minimal(resources=GPU, replicas=0),
    "one GPU for each role": minimal(resources=ON_GPU, disaggregation={"prefill": {}}),
}
REFUSED: dict[str, tuple[Body, str, str]] = {
    "an account": (
        minimal(security={"serviceAccountName": "admin"}),
        "spec.security.serviceAccountName: admin is not allowed here",
        "admissionPolicy.serviceAccounts",
    ),
    "a class of the system": (
        minimal(scheduling={"priorityClassName": "system-cluster-critical"}),
        "spec.scheduling.priorityClassName: system-cluster-critical is for the cluster itself",
        "use another",
    ),
    "a toleration of everything": (
        minimal(scheduling={"tolerations": [{"operator": "Exists"}]}),
        "spec.scheduling.tolerations: a toleration of every taint",
        "name the taint",
    ),
    "control plane nodes": (
        minimal(scheduling={"tolerations": [{"key": "node-role.kubernetes.io/any", "operator": "Exists"}]}),
        "spec.scheduling.tolerations",
        "admissionPolicy.anyToleration",
    ),
    "an open network": (
        minimal(networking={"networkPolicy": {"mode": "None"}}),
        "spec.networking.networkPolicy.mode: None is not allowed here",
        "use allowFrom",
    ),
    "all GPUs of a node": (
        minimal(engine={"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}),
        "spec.engine.env: NVIDIA_VISIBLE_DEVICES may make the server load code",
        "drop it",
    ),
    "an adapter's source": (
        adapted(gcs={"uri": "gs://adapters/a", "anonymous": True}),
        "spec.adapters: support comes from a kind of source that is not allowed here",
        "use one of pvc, huggingFace, s3, oci",
    ),
    "an adapter's hub": (
        adapted(huggingFace={"repo": "a/b"}),
        "spec.adapters: support would come from another host",
        "hub.example.com, store.example.com",
    ),
    "an adapter's store": (
        adapted(s3={"uri": "s3://adapters/a", "endpoint": "https://evil.example.net", "anonymous": True}),
        "spec.adapters: support would come from another host",
        "name one of these hosts",
    ),
    "an adapter's registry": (
        adapted(oci={"reference": "registry.example.com/models2/a:v1"}),
        "spec.adapters: an adapter is in no allowed registry",
        "registry.example.com/models",
    ),
    "a source": (GCS, "spec.model.source.gcs is not allowed here", "use one of pvc, huggingFace, s3, oci"),
    "a hub": (
        source(HUB, endpoint="https://evil.example.net:80"),
        "spec.model.source.huggingFace would come from evil.example.net",
        "name one of these hosts in its endpoint: hub.example.com, store.example.com",
    ),
    "a hub by its variable": (
        fetched_with("HF_ENDPOINT", "https://evil.example.net"),
        "spec.cache.download.env: HF_ENDPOINT may lead elsewhere",
        "drop it",
    ),
    "a store by a file": (
        fetched_with("AWS_CONFIG_FILE", "/etc/quire/ca/aws"), "env: AWS_CONFIG_FILE", "drop it"
    ),
    "a proxy elsewhere": (
        fetched_with("HTTPS_PROXY", "http://proxy.example.com@evil.net"), "env: HTTPS_PROXY", "drop it"
    ),
    "a proxy without http://": (
        fetched_with("HTTPS_PROXY", "proxy.example.com:3128"), "env: HTTPS_PROXY", "with http:// before it"
    ),
    "the public hub": (source(HUB, endpoint=""), "come from huggingface.co", "hub.example.com"),
    "the public store": (source(S3, endpoint=""), "come from s3.amazonaws.com", "store.example.com"),
    "a registry": (
        source(OCI, reference="registry.example.com/models2/m:v1"),
        "spec.model.source.oci.reference: registry.example.com/models2/m:v1",
        "copy it to one of registry.example.com/models",
    ),
    "a GPU's name": (
        minimal(resources={**GPU, "gpu": {"resourceName": "nvidia.com/mig-1g.5gb"}}),
        "spec.resources.gpu.resourceName: nvidia.com/mig-1g.5gb",
        "use one of nvidia.com/gpu",
    ),
    "too many replicas": (minimal(replicas=9), "spec.replicas: 9 is more than the 8", "lower it"),
    "an autoscaler's most": (
        minimal(autoscaling={"maxReplicas": 9}), "spec.autoscaling.maxReplicas: 9 is more", "lower it"
    ),
    "too many prefill pods": (
        minimal(replicas=6, disaggregation={"prefill": {"replicas": 3}}),
        "spec.replicas and spec.disaggregation: 9 is more than the 8",
        "lower it",
    ),
    "the most of two autoscalers": (
        minimal(
            autoscaling={"maxReplicas": 5},
            disaggregation={"prefill": {"autoscaling": {"maxReplicas": 4}}},
        ),
        "spec.autoscaling.maxReplicas and spec.disaggregation: 9 is more than the 8",
        "lower it",
    ),
    "too many decode pods": (
        minimal(disaggregation={"prefill": {}, "decode": {"replicas": 8}}), "9 is more than the 8", "lower it"
    ),
    "too many GPUs on all nodes of a group": (
        minimal(resources=GPU, parallelism={"tensor": 2, "pipeline": 2, "nodes": 4}), "4 GPUs", "lower it"
    ),
    "too many GPUs": (minimal(resources=GPU, replicas=3), "spec.replicas: 3 GPUs, one for each", "lower it"),
    "too many GPUs of ranks": (
        minimal(resources={**GPU, "cpu": "4"}, parallelism={"tensor": 2, "pipeline": 2}), "4 GPUs", "lower it"
    ),
    "too many GPUs of two roles": (
        minimal(resources=ON_GPU, disaggregation={"prefill": {"replicas": 2}}), "3 GPUs", "lower it"
    ),
    "too many GPUs of one role": (
        minimal(resources=ON_GPU, disaggregation={"prefill": {"parallelism": {"tensor": 2}}}),
        "spec.replicas and spec.disaggregation: 3 GPUs",
        "lower it",
    ),
    "the GPU's name of a role": (
        minimal(resources=ON_GPU, disaggregation={"prefill": {"resources": MIG}}),
        "spec.resources.gpu.resourceName: nvidia.com/gpu, nvidia.com/mig-1g.5gb is not allowed here",
        "use one of nvidia.com/gpu",
    ),
}  # fmt: skip


BEYOND_A_NAMESPACE = (
    "an account",
    "a class of the system",
    "a toleration of everything",
    "control plane nodes",
    "an open network",
    "all GPUs of a node",
)


@pytest.mark.parametrize("name", ACCEPTED)
def test_allowed_objects_are_admitted(client: Client, name: str) -> None:
    assert refused(client, ACCEPTED[name]) == ""


@pytest.mark.parametrize("name", REFUSED)
def test_disallowed_objects_are_denied_with_the_field_and_a_remedy(client: Client, name: str) -> None:
    body, field, remedy = REFUSED[name]

    said = refused(client, body)

    assert field in said and remedy in said, said
    assert "denied request" in said


def test_objects_in_other_namespaces_are_admitted(client: Client) -> None:
    client.try_create(there(GCS, "other"))


def test_only_allowed_server_images_are_admitted(client: Client) -> None:
    assert refused_image(client, IMAGE) == ""
    for image in (
        "registry.example.com/quire-server2:1",
        "registry.example.com/quire-server:1/other",
        "mirror.example.com:5000/quire-server:1",
        "quire-server:1",
    ):
        said = refused_image(client, image)
        assert f"image {image} is not allowed" in said and "engineImage" in said


def test_only_allowed_download_images_are_admitted(client: Client) -> None:
    def job(image: str) -> Body:
        spec = {"restartPolicy": "Never", "containers": [{"name": "fetcher", "image": image}]}
        body = merged(server(image), {"apiVersion": "batch/v1", "kind": "Job"})
        return {**body, "spec": {"template": {"spec": spec}}}

    assert refused(client, job("mirror.example.com/quire-server:1")) == ""
    assert "image other:1 is not allowed" in refused(client, job("other:1"))


def workload(replicas: int, gpus: int, nodes: int = 1) -> Body:
    """What the operator makes of an LLMDeployment that was scaled."""
    body = server(IMAGE)
    (container,) = body["spec"]["template"]["spec"]["containers"]
    container["resources"] = {"limits": {"memory": "64Gi", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}}
    body["spec"]["replicas"] = replicas
    if nodes == 1:
        return body
    template = body["spec"]["template"]
    group = {"size": nodes, "leaderTemplate": template, "workerTemplate": template}
    spec = {"replicas": replicas, "leaderWorkerTemplate": group}
    return {**body, "apiVersion": names.GROUP_API_VERSION, "kind": names.GROUP_KIND, "spec": spec}


def test_what_scaling_leads_to_has_no_more_gpus_than_are_allowed(client: Client) -> None:
    for body in (workload(2, 1), workload(1, 2), workload(1, 1, 2), workload(9, 0), workload(9, 0, 2)):
        assert refused(client, body) == ""
    assert "4 GPUs are more than the 2 that are allowed" in refused(client, workload(2, 2))
    assert "8 GPUs are more than the 2 that are allowed" in refused(client, workload(1, 4, 2))


def test_a_workload_that_had_more_gpus_before_the_limit_may_change_but_not_grow(client: Client) -> None:
    delete_policies(client)
    body = client.create(there(workload(2, 4, 2)))
    create_policies(client, POLICY)
    path = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/tenant/leaderworkersets/{body['metadata']['name']}"

    def patch(spec: Body) -> None:
        client.request("PATCH", path, {"spec": spec}, "application/merge-patch+json")

    try:
        patch({"startupPolicy": "LeaderReady"})
        patch({"replicas": 1})
        with pytest.raises(RefusedError, match="16 GPUs are more than the 2"):
            patch({"replicas": 2})
        patch({"replicas": 0})
    finally:
        client.request("DELETE", path)


def test_policies_that_were_deleted_and_created_again_decide_as_before(client: Client) -> None:
    delete_policies(client)
    create_policies(client, POLICY)

    assert [name for name, body in ACCEPTED.items() if refused(client, body)] == []


def test_the_default_policy_denies_only_what_reaches_beyond_a_namespace(client: Client) -> None:
    delete_policies(client)
    for kind, path in POLICIES.items():
        for body in of_kind(render(), kind):
            client.request("POST", path, body)
    reaching = [body for name, (body, *_) in REFUSED.items() if name in BEYOND_A_NAMESPACE]
    eventually("the policy is enforced", lambda: refused(client, reaching[0]))

    assert all(refused(client, body) for body in reaching)
    assert [refused(client, body) for body in (minimal(replicas=99), HUB, S3, GCS, OCI, server("any:1"))] == [
        ""
    ] * 6
    for path in POLICIES.values():
        client.request("DELETE", path, {})
    create_policies(client, POLICY)


def test_the_administrator_can_open_each_of_these(client: Client) -> None:
    values = (
        "admissionPolicy.serviceAccounts={*}",
        "admissionPolicy.priorityClasses={system-cluster-critical}",
        "admissionPolicy.anyToleration=true",
        "admissionPolicy.unrestrictedNetwork=true",
        "allowedEnv={NVIDIA_VISIBLE_DEVICES}",
    )
    delete_policies(client)
    create_policies(client, (*POLICY, "--set", ",".join(values)))
    try:
        opened = {name: refused(client, REFUSED[name][0]) for name in BEYOND_A_NAMESPACE}
        assert opened == dict.fromkeys(BEYOND_A_NAMESPACE, "")
    finally:
        delete_policies(client)
        create_policies(client, POLICY)


def test_scaling_up_is_checked_and_scaling_to_zero_labelling_and_deleting_are_not(client: Client) -> None:
    body = client.create(there(minimal(replicas=1, resources=GPU)))
    path = f"{PATHS['LLMDeployment'].format('tenant')}/{body['metadata']['name']}"
    scale = client.request("GET", f"{path}/scale")
    scale["spec"]["replicas"] = 3
    with pytest.raises(RefusedError, match=r"spec\.replicas: 3 .* edit spec\.replicas instead"):
        client.request("PUT", f"{path}/scale", scale)
    scale["spec"]["replicas"] = 2
    client.request("PUT", f"{path}/scale", scale)

    patch = "application/merge-patch+json"
    delete_policies(client)
    create_policies(client, (*POLICY, "--set", "admissionPolicy.maxGPUs=0"))
    eventually("the new ceiling", lambda: refused(client, minimal(resources=GPU, replicas=1)))
    scale = client.request("GET", f"{path}/scale")
    client.request("PUT", f"{path}/scale", {**scale, "spec": {"replicas": 0}})
    client.request("PATCH", path, {"metadata": {"labels": {"a": "b"}}}, patch)
    client.request("DELETE", path)
