"""LLMDeployments to test with: a minimal one, one with every field, and random ones drawn from the CRD.

Used by the tests on the API server and by the unit tests of spec and resources. The random ones come from the
schema itself, so that a new field is drawn without a line here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from e2e import yaml_files
from quire_operator.resources import environment
from quire_operator.spec import reader

Body = dict[str, Any]

ROOT = Path(__file__).parents[2]
CRD: Body = yaml_files.load((ROOT / "crds" / "llmdeployments.yaml").read_text(encoding="utf-8"))
SCHEMA: Body = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC_SCHEMA: Body = SCHEMA["properties"]["spec"]

#: Limits that mean nothing without API keys.
PER_KEY = ("maxRequestsPerKey", "maxRequestsPerMinutePerKey", "maxTokensPerMinutePerKey")

MINIMAL: Body = {
    "apiVersion": "serving.quire.dev/v1alpha1",
    "kind": "LLMDeployment",
    "metadata": {"name": "minimal", "namespace": "default"},
    "spec": {
        "model": {"source": {"pvc": {"claimName": "models"}}},
        "resources": {"cpu": "1", "memory": "2Gi"},
    },
}

FULL: Body = yaml_files.load((Path(__file__).parent / "full.yaml").read_text(encoding="utf-8"))
#: What FULL cannot have beside its replicas: the first is scaled by an HPA, the second by KEDA.
AUTOSCALED, IDLING = yaml_files.load_all(
    (Path(__file__).parent / "autoscaled.yaml").read_text(encoding="utf-8")
)
#: Nor this beside its GPU: several ranks.
SHARDED: Body = yaml_files.load((Path(__file__).parent / "sharded.yaml").read_text(encoding="utf-8"))
SHARING: Body = yaml_files.load((Path(__file__).parent / "sharing.yaml").read_text(encoding="utf-8"))
#: Nor these beside its ranks and tiers: adapters of every source.
ADAPTED: Body = yaml_files.load((Path(__file__).parent / "adapted.yaml").read_text(encoding="utf-8"))
EMBEDDING: Body = yaml_files.load((Path(__file__).parent / "embedding.yaml").read_text(encoding="utf-8"))
GROUPED: Body = yaml_files.load((Path(__file__).parent / "grouped.yaml").read_text(encoding="utf-8"))
#: The same with accelerators: a stage of eight ranks on each of two nodes.
GROUPED_ON_GPUS: Body = {
    **GROUPED,
    "metadata": {"name": "grouped-gpus", "namespace": "default"},
    "spec": {
        **GROUPED["spec"],
        "resources": {"cpu": "16", "memory": "128Gi", "profileRef": {"name": "h100"}},
        "parallelism": {"tensor": 8, "pipeline": 2, "nodes": 2, "authSecretRef": {"name": "ranks"}},
    },
}
#: Nor these: pods of two roles, first with numbers of them, then with autoscalers, then with GPUs.
DISAGGREGATED: tuple[Body, ...] = tuple(
    yaml_files.load_all((Path(__file__).parent / "disaggregated.yaml").read_text(encoding="utf-8"))
)

#: One for each source of which a model is downloaded.
DOWNLOADED: tuple[Body, ...] = tuple(
    yaml_files.load_all((Path(__file__).parent / "downloaded.yaml").read_text(encoding="utf-8"))
)


def minimal(**spec: Any) -> Body:
    """The minimal LLMDeployment with parts of the spec merged in: minimal(drain={"timeoutSeconds": 5})."""
    return merged(MINIMAL, {"spec": spec})


def merged(base: Body, patch: Mapping[str, Any]) -> Body:
    """A copy of `base` with `patch` merged into its objects; lists and values are replaced."""
    result = copy.deepcopy(base)
    for key, value in patch.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


def name_of(body: Body) -> str:
    """For the id of a test."""
    return str(body["metadata"]["name"])


def schemas(schema: Body = SCHEMA, path: str = "") -> Iterator[tuple[str, Body]]:
    """Every schema of the CRD with its path, such as spec.engine.env[].name."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from schemas(inner, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from schemas(schema["items"], f"{path}[]")


def random_bodies() -> st.SearchStrategy[Body]:
    """Valid LLMDeployments, with texts as hostile as the patterns let them be."""
    metadata = st.fixed_dictionaries(
        {
            "name": st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True),
            "namespace": st.just("default"),
        }
    )
    return st.builds(
        lambda metadata, spec: {**MINIMAL, "metadata": metadata, "spec": spec},
        metadata,
        _strategy(SPEC_SCHEMA, "spec"),
    )


_SOURCES = st.sampled_from([body["spec"]["model"]["source"] for body in DOWNLOADED]) | st.builds(
    lambda claim, path: {"pvc": {"claimName": claim, "path": path}},
    st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True),
    st.from_regex(r"[^\x00-\x1f\x7f]{0,40}", fullmatch=True).filter(
        lambda path: not path.startswith("/") and ".." not in path.split("/")
    ),
)
# What a pattern cannot say, or where most of what it lets through would be noise.
_KEYS = st.sampled_from(["disktype", "topology.kubernetes.io/zone", "A.b_c-d", "example.com/X"])
_HOSTILE = ["$(id)", "`id`", "; rm -rf /", "--host", "a\nb", "'\"", "$(QUIRE_HOST)", "{{ .Values }}", "-"]
_CPU = st.sampled_from([1, 64, "1", "100m", "1500m", "0.5", "1.250", "1k"])
_MEMORY = st.sampled_from([2**31, "64Mi", "1.5Gi", "2048Mi", "3000000k", "0.7Ti", "100.1M"])
_OVERRIDES: dict[str, st.SearchStrategy[Any]] = {
    "spec.resources.cpu": _CPU,
    "spec.resources.memory": _MEMORY,
    **{
        f"spec.disaggregation.{role}.resources.{name}": values
        for role in ("prefill", "decode")
        for name, values in (("cpu", _CPU), ("memory", _MEMORY))
    },
    "spec.resources.sharedMemory": st.sampled_from(["Auto", "1Mi", "0.5Ki", 4096, "12.5M", "1000000"]),
    "spec.engine.kvCache.memory": st.sampled_from([1, "1M", "1.5Mi", "33554432", "2500m"]),
    "spec.engine.weightOffload": st.sampled_from(["1Mi", "1.5M", 4096]),
    "spec.engine.kvCache.hostOffload": st.sampled_from(["1Mi", "12.5M", 4096]),
    "spec.engine.kvCache.diskOffload": st.sampled_from(["20Gi", "0.5Ti", 10**12]),
    "spec.engine.extraArgs": st.lists(
        st.sampled_from(_HOSTILE) | st.text(min_size=1, max_size=20).filter(lambda t: "\0" not in t),
        max_size=4,
    ).map(lambda args: [argument for argument in args if argument[0] != "-"]),
    "spec.engine.env[].name": st.sampled_from(environment.SERVER),
    "spec.cache.download.env[].name": st.sampled_from(environment.DOWNLOAD),
    "spec.model.source": _SOURCES,
    "spec.adapters[].name": st.from_regex(r"adapter-[A-Za-z0-9._]{0,20}[a-z0-9]", fullmatch=True),
    "spec.adapters[].source": _SOURCES,
    "spec.resources.profileRef.name": st.just("h100"),
    "spec.disaggregation.prefill.resources.profileRef.name": st.just("h100"),
    "spec.disaggregation.decode.resources.profileRef.name": st.just("h100"),
    "spec.disaggregation.stagingMemory": st.sampled_from(["16Mi", 10**6]),
    "spec.cache.size": st.sampled_from(["20Gi", "0.5Ti", 10**12]),
    "spec.scheduling.affinity": st.sampled_from(
        [
            {},
            {"nodeAffinity": {}},
            {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "weight": 1,
                            "podAffinityTerm": {
                                "labelSelector": {},
                                "namespaceSelector": {},
                                "topologyKey": "zone",
                                "namespaces": [],
                            },
                        }
                    ]
                }
            },
            {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
        ]
    ),
    "spec.cache.download.env[].value": st.sampled_from(["", "http://proxy.example.com:3128"]),
    "spec.engine.chatTemplate.configMapRef.key": st.sampled_from(["tools.jinja", "A.b_c-d"]),
    "spec.engine.watermark.keySecretRef.key": st.sampled_from(["key", "A.b_c-d", ".hidden"]),
    "cidr": st.sampled_from(["10.0.0.0/8", "192.168.1.7/32", "fd00::/8", "::/0", "0.0.0.0/0"]),
    "key": _KEYS,
}
_NUMBERED = {"env": "name", "metrics": "type"}  # lists whose entries need distinct names


def _strategy(schema: Body, path: str) -> st.SearchStrategy[Any]:
    name = path.rpartition(".")[2]
    override = _OVERRIDES.get(path, _OVERRIDES.get(name))
    if override is not None:
        return override
    match schema:
        case {"enum": values}:
            return st.sampled_from(values)
        case {"type": "boolean"}:
            return st.booleans()
        case {"type": "integer", "minimum": low, "maximum": high}:
            return st.integers(low, high)
        case {"type": "string", "pattern": pattern, "maxLength": longest}:
            return st.from_regex(pattern, fullmatch=True).filter(lambda text: len(text) <= longest)
        case {"type": "array", "items": items}:
            keys = schema.get("x-kubernetes-list-map-keys") or [key for key in [_NUMBERED.get(name)] if key]
            by = (lambda entry: tuple(entry.get(key, "") for key in keys)) if keys else str
            least = schema.get("minItems", 0)
            return st.lists(_strategy(items, f"{path}[]"), min_size=least, max_size=3, unique_by=by)
        case {"additionalProperties": values}:
            return st.dictionaries(_KEYS, _strategy(values, f"{path}.*"), max_size=3)
        case _:
            return _objects(schema, path)


def _objects(schema: Body, path: str) -> st.SearchStrategy[Any]:
    required = schema.get("required", [])
    fields = {key: _strategy(inner, f"{path}.{key}") for key, inner in schema["properties"].items()}
    return st.fixed_dictionaries(
        {key: fields[key] for key in required},
        optional={key: value for key, value in fields.items() if key not in required},
    ).map(lambda entry: _repaired(entry, path))


def pod_templates(children: Iterable[Body]) -> list[Body]:
    """The templates of the pods of each role, and of workers where replicas are groups."""
    found: list[Body] = []
    for child in children:
        if child["kind"] == "Deployment":
            found.append(child["spec"]["template"])
        elif child["kind"] == "LeaderWorkerSet":
            group = child["spec"]["leaderWorkerTemplate"]
            found += [group["leaderTemplate"], group["workerTemplate"]]
    assert found, "no child runs the pods"
    return found


def _repaired(entry: Body, path: str) -> Body:
    """The entry without what a rule across its fields forbids."""
    match path.removeprefix("spec."):
        case "spec":
            _repair_spec(entry)
        case "resources" | "disaggregation.prefill.resources" | "disaggregation.decode.resources":
            if "profileRef" in entry:
                entry.pop("gpu", None)
        case "cache":
            _repair_cache(entry)
        case "engine.kvCache":
            if "hostOffload" not in entry:
                entry.pop("diskOffload", None)
                entry.pop("preemptionMode", None)
        case "engine.watermark":
            if "keySecretRef" not in entry:
                entry.pop("mode", None)
        case "engine.speculation":
            entry.pop("draftModelPath", None)
            if entry.get("method") == "DraftModel":
                entry["draftModelPath"] = "drafts/small"
        case "engine.chatTemplate":
            entry["file"] = "" if "configMapRef" in entry else entry.get("file") or "tools.jinja"
        case "observability.requestLogging":
            if "redactConfigMapRef" in entry:
                entry["mode"] = "Content"
        case "autoscaling" | "disaggregation.prefill.autoscaling":
            _repair_scaling(entry)
        case "autoscaling.metrics[]":
            if entry["type"].endswith("Utilization") and "targetPerReplica" in entry:
                entry["targetPerReplica"] = 1 + entry["targetPerReplica"] % 100
        case "health":
            if entry.get("loadStallTimeoutSeconds", 300) > entry.get("startupTimeoutSeconds", 1800):
                entry["loadStallTimeoutSeconds"] = 10
        case "drain":
            entry["timeoutSeconds"] = min(entry.get("timeoutSeconds", 120), 3480)
        case "rollout":
            if entry.get("maxSurge", 1) == 0:
                entry["maxUnavailable"] = 1
                if entry.get("strategy") == "Surge":
                    entry["strategy"] = "Auto"
        case "scheduling.tolerations[]":
            if entry.get("operator") == "Exists":
                entry.pop("value", None)
            entry.setdefault("key", "gpu")
            if entry.get("effect") != "NoExecute":
                entry.pop("tolerationSeconds", None)
        case "networking.networkPolicy.allowFrom[]":
            if not ("namespaceSelector" in entry or "podSelector" in entry):
                entry.setdefault("ipBlock", {"cidr": "10.0.0.0/8"})
            else:
                entry.pop("ipBlock", None)
        case other if other.endswith("matchExpressions[]"):
            if entry["operator"] in ("In", "NotIn"):
                entry["values"] = entry.get("values") or ["a"]
            else:
                entry.pop("values", None)
    return entry


def _repair_task(entry: Body) -> None:
    """Without what the other task excludes."""
    engine = entry.get("engine", {})
    if entry.get("task", "Generate") == "Generate":
        engine.pop("pooling", None)
        return
    for key in ("disaggregation", "parallelism", "adapters"):
        entry.pop(key, None)
    for key in ("kvCache", "speculation", "watermark", "chatTemplate", "toolCallParser", "reasoningParser"):
        engine.pop(key, None)
    for key in ("weightOffload", "maxAdapters", "maxAdapterRank", "adaptersPath"):
        engine.pop(key, None)


def _repair_adapters(entry: Body, engine: Body, *, is_one: bool) -> None:
    """``is_one``: one process has the whole model."""
    if "maxAdapters" not in engine or not is_one or "weightOffload" in engine:
        entry.pop("adapters", None)
        for key in ("maxAdapters", "maxAdapterRank", "adaptersPath"):
            engine.pop(key, None)
    elif entry.get("adapters"):
        engine.pop("adaptersPath", None)
    elif engine.get("adaptersPath"):
        engine["adaptersPath"] = "adapters"


def _repair_access(entry: Body) -> None:
    """Every bucket with one kind of access: that of the model's source decides about the identity."""
    source = entry["model"]["source"]
    if bucket := source.get("s3") or source.get("gcs"):
        has_access = "credentialsSecretRef" in bucket or bucket.get("anonymous")
        entry.setdefault("security", {})["identity"] = {"workload": "None" if has_access else "EKS"}
    has_identity = entry.get("security", {}).get("identity", {}).get("workload", "None") != "None"
    for adapter in entry.get("adapters", ()) if has_identity else ():
        adapter["source"] = copy.deepcopy(adapter["source"])  # drawn from the examples
        for bucket in (adapter["source"].get("s3", {}), adapter["source"].get("gcs", {})):
            bucket.pop("credentialsSecretRef", None)


def _repair_spec(entry: Body) -> None:
    _repair_task(entry)
    if "sharing" in entry:
        for key in ("autoscaling", "replicas", "disaggregation"):
            entry.pop(key, None)
        entry.get("parallelism", {}).pop("nodes", None)
        for key in ("strategy", "autoRollback"):
            entry.get("rollout", {}).pop(key, None)
    engine, scaling = entry.get("engine", {}), entry.get("autoscaling", {})
    sizes = entry.get("parallelism", {})
    if sizes.get("tensor", 1) * sizes.get("pipeline", 1) > 32:
        sizes["pipeline"] = 1
    ranks = sizes.get("tensor", 1) * sizes.get("pipeline", 1)
    if ranks % sizes.get("nodes", 1):
        sizes["nodes"] = 1
    if sizes.get("nodes", 1) > 1:
        for key in ("strategy", "autoRollback"):
            entry.get("rollout", {}).pop(key, None)
        entry.get("rollout", {}).pop("minReadySeconds", None)
        entry.get("cache", {}).pop("accessMode", None)
    _repair_adapters(entry, engine, is_one=ranks == 1 and "disaggregation" not in entry)
    if ranks > 1:
        entry["resources"] = {**entry["resources"], "cpu": "64"}
        engine.get("kvCache", {}).pop("diskOffload", None)
        if engine.get("speculation", {}).get("method") == "DraftModel":
            del engine["speculation"]
    if "disaggregation" in entry:
        _repair_roles(entry, engine, scaling)
    if "apiKeysSecretRef" not in entry.get("security", {}):
        for limit in PER_KEY:
            engine.pop(limit, None)
    if not {"gpu", "profileRef"} & entry["resources"].keys():
        engine.pop("enforceEager", None)
        engine.pop("weightOffload", None)
        metrics = scaling.get("metrics", [])
        metrics[:] = [metric for metric in metrics if metric["type"] != "GPUUtilization"]
    else:
        engine.pop("quantization", None)
        engine.pop("dtype", None)
    if scaling:
        entry.pop("replicas", None)
    _repair_access(entry)
    if "pvc" in entry["model"]["source"]:
        entry.pop("cache", None)
    else:
        cache = entry.setdefault("cache", {"mode": "None", "size": "20Gi"})
        if max(entry.get("replicas", 1), scaling.get("maxReplicas", 1)) > 1 or "disaggregation" in entry:
            cache.pop("accessMode", None)


def _repair_roles(entry: Body, engine: Body, scaling: Body) -> None:
    """Without what pods of two roles exclude."""
    entry.get("parallelism", {}).pop("nodes", None)
    entry["resources"]["cpu"] = "64"
    on_gpu = {"gpu", "profileRef"} & entry["resources"].keys()
    for role in (entry["disaggregation"].get(name, {}) for name in ("prefill", "decode")):
        if "resources" in role:
            role["resources"]["cpu"] = "64"
            for accelerator in ("gpu", "profileRef") if not on_gpu else ():
                role["resources"].pop(accelerator, None)
        sizes = role.get("parallelism", {})
        if sizes.get("tensor", 1) * sizes.get("pipeline", 1) > 32:
            sizes["pipeline"] = 1
    if on_gpu:
        entry["disaggregation"].setdefault("stagingMemory", "16Mi")
    else:
        entry["disaggregation"].pop("stagingMemory", None)
    engine.pop("prefixCaching", None)
    for tier in ("hostOffload", "diskOffload", "preemptionMode"):
        engine.get("kvCache", {}).pop(tier, None)
    if engine.get("speculation", {}).get("method") == "DraftModel":
        del engine["speculation"]
    _keep_awake(scaling)
    roles = entry["disaggregation"]
    if entry.get("networking", {}).get("networkPolicy", {}).get("mode") == "None":
        roles.pop("transport", None)
    if "autoscaling" in roles["prefill"]:
        roles["prefill"].pop("replicas", None)
    if scaling or entry.get("replicas", 1) != 1:
        roles.get("decode", {}).pop("replicas", None)


def _repair_cache(entry: Body) -> None:
    if entry["mode"] != "SharedPVC":
        entry.pop("accessMode", None)
        entry.pop("existingClaim", None)
    if entry["mode"] == "None":
        entry.pop("storageClassName", None)
    if "existingClaim" in entry:
        entry.pop("size", None)
        entry.pop("storageClassName", None)
    else:
        entry.setdefault("size", "20Gi")


def _repair_scaling(entry: Body) -> None:
    entry["maxReplicas"] = max(entry["maxReplicas"], entry.get("minReplicas", 1))
    if entry.get("backend", "Auto") not in ("Auto", "KEDA"):
        entry.pop("fallback", None)
        entry.get("idle", {}).pop("activator", None)
    counted = {metric["type"] for metric in entry.get("metrics", ())}
    if entry.get("backend") == "External" or (counted and "RunningRequests" not in counted):
        _keep_awake(entry)


def _keep_awake(scaling: Body) -> None:
    """Without scale to zero."""
    scaling.pop("idle", None)
    if scaling.get("minReplicas") == 0:
        scaling["minReplicas"] = 1


def properties(tree: object) -> Any:
    """A tree of the spec's dataclasses as the object that it was read from, without what is absent."""
    if isinstance(tree, tuple):
        return [properties(entry) for entry in tree]
    if not is_dataclass(tree):
        return tree
    entries = {reader.camel(item.name): getattr(tree, item.name) for item in fields(tree)}
    return {key: properties(value) for key, value in entries.items() if value not in (None, "", (), {})}
