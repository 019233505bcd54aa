"""One accepting and one refusing LLMDeployment (at least) for every CEL rule of the CRD.

Used twice: on a real API server against the CRD, and in tests/contracts against quire_operator.spec, which
must judge the same way. A rule without cases fails both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from e2e.api.adapter_cases import ADAPTER_CASES
from e2e.api.disaggregation_cases import DISAGGREGATION_CASES
from e2e.api.engine_cases import ENGINE_CASES
from e2e.api.kv_cases import KV_CASES
from e2e.api.log_cases import LOG_CASES
from e2e.api.parallelism_cases import PARALLELISM_CASES
from e2e.api.rollout_cases import ROLLOUT_CASES
from e2e.api.scaling_cases import SCALING_CASES
from e2e.api.sharing_cases import SHARING_CASES
from e2e.api.source_cases import SOURCE_CASES
from e2e.api.specs import Body, merged, minimal, schemas
from e2e.api.task_cases import TASK_CASES


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A CEL rule: where it is in the schema, and what it reports whom it refuses."""

    path: str
    index: int
    message: str

    @property
    def id(self) -> str:
        return f"{self.path or 'object'}#{self.index}"


@dataclass(frozen=True, kw_only=True)
class Cases:
    """`field` is what the refusal must name."""

    field: str
    accepted: tuple[Body, ...]
    refused: tuple[Body, ...]


def rules() -> Iterator[Rule]:
    """Every CEL rule of the CRD about an object as it is, in its order; those about a change have tests of
    their own.
    """
    for path, schema in schemas():
        for index, rule in enumerate(schema.get("x-kubernetes-validations", [])):
            if "oldSelf" not in rule["rule"]:
                yield Rule(path=path, index=index, message=" ".join(rule["message"].split()))


def _named(name: str) -> Body:
    return merged(minimal(), {"metadata": {"name": name}})


def _pvc(path: str) -> Body:
    return minimal(model={"source": {"pvc": {"path": path}}})


def _engine(**fields: Any) -> Body:
    return minimal(engine=fields)


def _arguments(*arguments: str) -> Body:
    return _engine(extraArgs=list(arguments))


def _env(name: str) -> Body:
    return _engine(env=[{"name": name, "value": "1"}])


def _resources(**fields: Any) -> Body:
    return minimal(resources=fields)


def _selector(labels: Mapping[str, str]) -> Body:
    return minimal(scheduling={"nodeSelector": dict(labels)})


def _toleration(**fields: Any) -> Body:
    return minimal(scheduling={"tolerations": [fields]})


def _annotations(*keys: str) -> Body:
    return minimal(networking={"service": {"annotations": dict.fromkeys(keys, "x")}})


def _peer(**fields: Any) -> Body:
    return minimal(networking={"networkPolicy": {"allowFrom": [fields]}})


def _requirement(kind: str, **fields: Any) -> Body:
    return _peer(**{kind: {"matchExpressions": [{"key": "app", **fields}]}})


_ENV = "spec.engine.env[].name"
_TOLERATION = "spec.scheduling.tolerations[]"
_ALLOW = "spec.networking.networkPolicy.allowFrom[]"

CASES: dict[str, Cases] = (
    {
        "object#0": Cases(
            field="",
            accepted=(_named("a"), _named("a" * 40), _named("qwen3-32b")),
            refused=(_named("a" * 41), _named("9lives"), _named("a.b")),
        ),
        "spec.model.source.pvc.path#0": Cases(
            field="spec.model.source.pvc.path",
            accepted=(_pvc("a/b"), _pvc(""), _pvc("a/..b"), _pvc("-x $(id); 'y'"), _pvc(".hidden")),
            refused=(_pvc("/a"), _pvc("a/../b"), _pvc(".."), _pvc("../../etc")),
        ),
        "spec.engine.extraArgs[]#0": Cases(
            field="spec.engine.extraArgs[0]",
            accepted=(
                _arguments("--seed", "1"),
                _arguments("--max-num-batched-tokens=512", "--watermark-gamma=0.25"),
                _arguments("--no-disable-fastapi-docs", "--log-level=--host"),
                _arguments("$(id)", "a\nb"),
            ),
            refused=(
                _arguments("--hostile"),
                _arguments("-x"),
                _arguments("--"),
                _arguments(""),
                _arguments("--chat-template=/etc/quire/watermark/key"),
                _arguments("--host"),
                _arguments("-h"),
                _arguments("--port=1"),
                _arguments("--tensor-parallel-size=2"),
                _arguments("--health-port=1\n2"),
                _arguments("--served-model-name", "x"),
                _arguments("--scheduling-policy", "sjf", "--watermark=always"),
                _arguments("--no-enable-prefix-caching"),
                _arguments("--api-keys-dir=/tmp"),
                _arguments("--drain-timeout-seconds=1"),
            ),
        ),
        f"{_ENV}#0": Cases(
            field="spec.engine.env[0].name",
            accepted=(_env("OMP_NUM_THREADS"), _env("QUIRE_FAULT"), _env("MY_QUIRE_X"), _env("_LD_X")),
            refused=(
                _env("QUIRE_PORT"),
                _env("QUIRE_ALLOW_FAULTS"),
                _env("QUIRE_FAULTS"),
                _env("LD_PRELOAD"),
                _env("PYTHONPATH"),
            ),
        ),
        "spec.resources#0": Cases(
            field="spec.resources.sharedMemory",
            accepted=(
                _resources(sharedMemory="1Gi"),
                _resources(sharedMemory="Auto"),
                _resources(sharedMemory=4096),
            ),
            refused=(_resources(sharedMemory="2Gi"), _resources(sharedMemory="3Gi", memory="2.5Gi")),
        ),
        "spec.resources#1": Cases(
            field="spec.resources.profileRef",
            accepted=(_resources(gpu={}), _resources(profileRef={"name": "h100"})),
            refused=(_resources(gpu={}, profileRef={"name": "h100"}),),
        ),
        "spec.resources.cpu#0": Cases(
            field="spec.resources.cpu",
            accepted=(
                _resources(cpu="100m"),
                _resources(cpu=1),
                _resources(cpu="0.5"),
                _resources(cpu="1024"),
            ),
            refused=(
                _resources(cpu="0"),
                _resources(cpu=0),
                _resources(cpu=-1),
                _resources(cpu="1025"),
                _resources(cpu="1 core"),
            ),
        ),
        "spec.resources.memory#0": Cases(
            field="spec.resources.memory",
            accepted=(_resources(memory="64Mi"), _resources(memory=2**30), _resources(memory="1.5Gi")),
            refused=(
                _resources(memory="512m"),
                _resources(memory="63Mi"),
                _resources(memory=2),
                _resources(memory="65Ti"),
            ),
        ),
        "spec.resources.sharedMemory#0": Cases(
            field="spec.resources.sharedMemory",
            accepted=(
                _resources(sharedMemory="Auto"),
                _resources(sharedMemory="256Mi"),
                _resources(sharedMemory=1),
            ),
            refused=(
                _resources(sharedMemory="auto"),
                _resources(sharedMemory="0"),
                _resources(sharedMemory=-5),
            ),
        ),
        "spec.scheduling.nodeSelector#0": Cases(
            field="spec.scheduling.nodeSelector",
            accepted=(_selector({"disktype": "ssd"}), _selector({"example.com/a_B.c": ""})),
            refused=(
                _selector({"a b": "x"}),
                _selector({"-a": "x"}),
                _selector({"Example.com/a": "x"}),
                _selector({"": "x"}),
            ),
        ),
        f"{_TOLERATION}#0": Cases(
            field="spec.scheduling.tolerations[0]",
            accepted=(_toleration(key="a", operator="Exists"), _toleration(key="a", value="x")),
            refused=(_toleration(key="a", operator="Exists", value="x"),),
        ),
        f"{_TOLERATION}#1": Cases(
            field="spec.scheduling.tolerations[0]",
            accepted=(_toleration(operator="Exists"), _toleration(key="a", value="x")),
            refused=(_toleration(value="x"), _toleration(), _toleration(key="", operator="Equal")),
        ),
        f"{_TOLERATION}#2": Cases(
            field="spec.scheduling.tolerations[0]",
            accepted=(
                _toleration(key="a", effect="NoExecute", tolerationSeconds=0),
                _toleration(key="a", effect="NoSchedule"),
            ),
            refused=(
                _toleration(key="a", tolerationSeconds=1),
                _toleration(key="a", effect="NoSchedule", tolerationSeconds=1),
            ),
        ),
        "spec.health#0": Cases(
            field="spec.health.loadStallTimeoutSeconds",
            accepted=(
                minimal(health={"startupTimeoutSeconds": 300}),
                minimal(health={"loadStallTimeoutSeconds": 1800}),
            ),
            refused=(
                minimal(health={"startupTimeoutSeconds": 299}),
                minimal(health={"loadStallTimeoutSeconds": 1801}),
            ),
        ),
        "spec.drain#0": Cases(
            field="spec.drain",
            accepted=(
                minimal(drain={"timeoutSeconds": 3590}),
                minimal(drain={"preStopSeconds": 0, "timeoutSeconds": 3600}),
            ),
            refused=(
                minimal(drain={"timeoutSeconds": 3591}),
                minimal(drain={"preStopSeconds": 120, "timeoutSeconds": 3481}),
            ),
        ),
        "spec.networking.service.annotations#0": Cases(
            field="spec.networking.service.annotations",
            accepted=(_annotations("a", "example.com/A"),),
            refused=(
                _annotations("serving.quire.dev/applied-hash"),
                _annotations("a b"),
                _annotations("a/b/c"),
            ),
        ),
        f"{_ALLOW}#0": Cases(
            field="spec.networking.networkPolicy.allowFrom[0]",
            accepted=(
                _peer(ipBlock={"cidr": "10.0.0.0/8"}),
                _peer(podSelector={}),
                _peer(namespaceSelector={}, podSelector={"matchLabels": {"app": "web"}}),
            ),
            refused=(_peer(), _peer(ipBlock={"cidr": "10.0.0.0/8"}, podSelector={})),
        ),
    }
    | {
        case_id: cases
        for kind in ("namespaceSelector", "podSelector")
        for case_id, cases in {
            f"{_ALLOW}.{kind}.matchLabels#0": Cases(
                field=f"spec.networking.networkPolicy.allowFrom[0].{kind}.matchLabels",
                accepted=(_peer(**{kind: {"matchLabels": {"a.b/c": "d"}}}),),
                refused=(_peer(**{kind: {"matchLabels": {"a b": "d"}}}),),
            ),
            f"{_ALLOW}.{kind}.matchExpressions[]#0": Cases(
                field=f"spec.networking.networkPolicy.allowFrom[0].{kind}.matchExpressions[0]",
                accepted=(
                    _requirement(kind, operator="In", values=["a"]),
                    _requirement(kind, operator="Exists"),
                ),
                refused=(
                    _requirement(kind, operator="NotIn"),
                    _requirement(kind, operator="Exists", values=["a"]),
                ),
            ),
        }.items()
    }
    | {
        case_id: Cases(**arguments)
        for case_id, arguments in (
            KV_CASES
            | ADAPTER_CASES
            | ENGINE_CASES
            | LOG_CASES
            | PARALLELISM_CASES
            | DISAGGREGATION_CASES
            | SCALING_CASES
            | SHARING_CASES
            | TASK_CASES
            | ROLLOUT_CASES
            | SOURCE_CASES
        ).items()
    }
)
