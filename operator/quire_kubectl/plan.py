"""``kubectl quire plan``: previews an edit: which fields and children change, whether and how pods are
replaced, and how many serve during the rollout.

The API server merges the edit (a dry run of ``kubectl apply``), and the operator's own code plans for the
result. Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TextIO

from quire_kubectl import changes, deployed, kubectl, steps
from quire_kubectl.deployed import Live, Rendered
from quire_kubectl.kubectl import Document
from quire_kubectl.terminal import Look
from quire_kubectl.view import span
from quire_operator import names, spec, status
from quire_operator.observed import (
    NEED_A_POD,
    WORKLOAD_KINDS,
    Observed,
    Ref,
    as_deployment,
    pod_template,
    ref,
)
from quire_operator.plan import (
    Plan,
    PlanInput,
    ReplicaOwner,
    find_replica_owner,
    lost_fields,
    make_plan,
    replica_owner,
)
from quire_operator.plan.scale_to_zero import is_idle
from quire_operator.spec import LLMDeployment

PODS_CHANGE = 3
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_FEW = 8  # changed fields of one child that are listed


@dataclass(frozen=True, kw_only=True)
class _Edit:
    """`before`: the live objects; None where the LLMDeployment is new."""

    before: Live | None
    after: Rendered
    plan: Plan
    owner: ReplicaOwner

    @property
    def deployment(self) -> Mapping[str, Any] | None:
        return None if self.before is None else self.before.observed.workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Like those of kubectl diff."""
    parser.add_argument(
        "-f", "--filename", metavar="FILE", required=True, help="a manifest, - for standard input"
    )
    parser.add_argument("-n", "--namespace", help="(default: that of kubectl's context)")


def run(arguments: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """0: no pod is started or stopped; 3: pods are. Raises KubectlError, QuireOperatorError."""
    codes = []
    for body in deployed.in_file(arguments.filename, arguments.namespace):
        before = deployed.stored(body)
        after = _dry_run(body, before)
        code, note, lines = _preview(before, after)
        sys.stderr.write(f"{note}\n")
        look = Look.of(out)
        out.write("\n".join(part for line in lines for part in _wrapped(line, look)) + "\n")
        codes.append(code)
    return max(codes)


def _wrapped(line: str, look: Look) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    return look.wrapped(line.lstrip(), indent, f"{indent}  ")


def _dry_run(body: Document, before: Document | None) -> Document:
    """The result of `kubectl apply`, from a dry run on the API server. Where another manager applied the
    object server-side, as GitOps tools do, the same kind of apply is used, so that fields it omits are
    removed.
    """
    command = ["apply", "--dry-run=server", "-f", "-"]
    managers = [] if before is None else _managers(before)
    if managers:
        command += ["--server-side", "--force-conflicts", f"--field-manager={managers[0]}"]
    (after,) = kubectl.documents(command, json.dumps(body))
    return after


def _managers(before: Document) -> list[str]:
    metadata = before["metadata"]
    if _LAST_APPLIED in (metadata.get("annotations") or {}):
        return []
    claims = metadata.get("managedFields") or ()
    return [
        str(claim["manager"])
        for claim in claims
        if claim.get("operation") == "Apply" and "f:spec" in (claim.get("fieldsV1") or {})
    ]


def _preview(before: Document | None, after: Document) -> tuple[int, str, list[str]]:
    """Exit code, a note on where the settings come from, and the lines to print."""
    model = spec.parse(after)
    live = None if before is None else deployed.live(after, model)
    settings, note = deployed.settings(model.namespace, live)
    now = datetime.now(UTC)
    rendered = deployed.rendered(after, settings, live, now)
    observed = Observed(body=after) if live is None else live.observed
    has_gateway = settings.has_gateway(model.namespace)
    given = PlanInput(
        model=model, desired=rendered.children, observed=observed, now=now, has_gateway=has_gateway
    )
    result = make_plan(given)
    edit = _Edit(
        before=live,
        after=replace(rendered, children=result.desired),
        plan=result.plan,
        owner=find_replica_owner(
            model,
            observed,
            is_idle=is_idle(model, observed, now, has_gateway=has_gateway),
        ),
    )
    pods = list(_pods(edit, model, after))
    fields = [] if before is None else changes.between(before["spec"], after["spec"], "spec")
    lines = [
        f"{model.namespace}/{model.name}" + ("" if before is not None else ": new"),
        *_section("Fields", list(fields)),
        *_section("Children", list(_children(edit))),
        *_section("Pods", pods or ["none is started, stopped or replaced"]),
        *_section("Autoscaler", list(_autoscaler(edit, model))),
        *_section("Warnings", list(_warnings(edit, model))),
    ]
    return PODS_CHANGE if pods else 0, note, lines


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"  {title}", *(f"    {line}" for line in lines)] if lines else []


def _children(edit: _Edit) -> Iterator[str]:
    old = {} if edit.before is None else _last_applied(edit.before)
    for manifest in edit.plan.apply:
        target = ref(manifest)
        if target not in old:
            yield f"create {target}"
            continue
        found = [line for line in _differences(old[target], manifest) if line]
        more = f", and {len(found) - _FEW} more" if len(found) > _FEW else ""
        yield f"change {target}: {', '.join(found[:_FEW]) or 'nothing that the pods see'}{more}"
    for target in map(ref, edit.after.children if edit.before is None else ()):
        if target.kind in NEED_A_POD:
            yield f"create {target}, with the first pod"
    for target, _ in (*edit.plan.delete_first, *edit.plan.delete):
        yield f"delete {target}"
    observed = None if edit.before is None else edit.before.observed
    for kind in sorted(observed.missing if observed else ()):
        if any(child["kind"] == kind for child in edit.after.children):
            yield f"{kind} is not installed in this cluster: it is made as soon as it is"


def _last_applied(before: Live) -> dict[Ref, tuple[Mapping[str, Any], bool]]:
    """Each child as its revision stores it (True) or, where it is not stored, as the live object (False)."""
    found = {target: (live, False) for target, live in before.observed.children.items()}
    name = _revision(before.observed.workload)
    stored = (before.revision_data.get(name) or {}).get("children", ()) if name else ()
    return found | {ref(child): (child, True) for child in stored if ref(child) in found}


def _revision(deployment: Mapping[str, Any] | None) -> str:
    annotations = ((deployment or {}).get("metadata") or {}).get("annotations") or {}
    return str(annotations.get(names.ANNOTATION_RENDER_REVISION, ""))


def _differences(old: tuple[Mapping[str, Any], bool], manifest: Mapping[str, Any]) -> Iterator[str]:
    body, is_stored = old
    if not is_stored:
        yield from lost_fields(_without_metadata(manifest), body)
        return
    for key in ("spec", "data"):
        before, after = body.get(key) or {}, manifest.get(key) or {}
        if manifest["kind"] in WORKLOAD_KINDS:  # its other fields are not stored in the revision
            after = {part: after[part] for part in before if part in after}
        yield from changes.between(before, after, key)


def _without_metadata(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in manifest.items() if key != "metadata"}


def _pods(edit: _Edit, model: LLMDeployment, body: Document) -> Iterator[str]:
    live = edit.deployment
    (wanted,) = [as_deployment(child) for child in edit.after.children if child["kind"] in WORKLOAD_KINDS]
    if live is None:
        yield f"start {_count(int(wanted['spec']['replicas']))}"
        return
    now = replica_owner.live_replicas(live)
    applied = next((m for m in edit.plan.apply if m["kind"] in WORKLOAD_KINDS), None)
    then = now if applied is None else int(applied["spec"].get("replicas", now))
    if not _is_replaced(edit, wanted):
        if then != now:
            yield f"{'start' if then > now else 'stop'} {_count(abs(then - now))}: {now} -> {then} replicas"
        return
    if model.spec.rollout.paused:
        yield "all are to be replaced, once spec.rollout.paused is false"
        return
    yield from _rollout(model, wanted["spec"]["strategy"], now, then, body)


def _is_replaced(edit: _Edit, wanted: Mapping[str, Any]) -> bool:
    """Whether the pod template differs from the last applied one, or from the live one where that is not
    stored.
    """
    if edit.before is None:
        return True
    last = _last_applied(edit.before).get(ref(wanted))
    if last is None:
        return True  # one pod becomes a group of pods, or the other way round
    (old, is_stored), new = last, pod_template(wanted)
    if is_stored:
        return bool(pod_template(old) != new)
    return bool(lost_fields(new, pod_template(old)))


def _rollout(
    model: LLMDeployment, how: Mapping[str, Any], now: int, then: int, body: Document
) -> Iterator[str]:
    rollout, numbers = model.spec.rollout, how.get("rollingUpdate") or {}
    if not now or not then:
        yield f"{now} -> {then} replicas: " + (f"start {_count(then)}" if then else f"stop {_count(now)}")
        return
    kind = "Recreate" if how["type"] == "Recreate" else "Surge" if numbers["maxSurge"] else "InPlace"
    chosen = f" ({rollout.strategy} begins so)" if rollout.strategy == "Auto" else ""
    yield f"replace {_count(now)}{f' by {then}' if then != now else ''}, strategy {kind}{chosen}:"
    if kind == "Recreate":
        taken = steps.recreated(now, then)
    else:
        taken = steps.rolling(now, then, surge=numbers["maxSurge"], unavailable=numbers["maxUnavailable"])
    yield from (f"  {line}" for line in steps.described(taken, then))
    yield from (f"  {line}" for line in _notes(model, kind, then, body))
    seconds = span(model.spec.drain.pre_stop_seconds + model.drain_timeout_seconds)
    yield f"  A pod that stops finishes what it answers, within {seconds}."


def _notes(model: LLMDeployment, kind: str, then: int, body: Document) -> Iterator[str]:
    rollout, gpu = model.spec.rollout, model.spec.resources.gpu
    if kind == "Surge":
        each = f", each with {model.spec.parallelism.ranks_per_pod} {gpu.resource_name}" if gpu else ""
        room = f"{_count(rollout.max_surge)} more{each}"
        yield f"Needs room for {room}."
        if rollout.strategy == "Auto":
            left = steps.rolling(then, then, surge=0, unavailable=1)[0].serving
            yield (
                f"If there is none for {span(rollout.surge_wait_seconds)}, the rest goes in place: "
                f"one after the other, {left} of {then} serve meanwhile."
            )
        else:
            yield "If there is none, it waits: strategy Surge never serves with fewer."
    seconds = ((body.get("status") or {}).get("model") or {}).get("lastLoadSeconds")
    if isinstance(seconds, int):
        yield f"Each new pod loads for about {span(seconds)}, as the last one did."


def _autoscaler(edit: _Edit, model: LLMDeployment) -> Iterator[str]:
    scaling = model.spec.autoscaling
    if edit.owner is ReplicaOwner.UNDECLARED:
        yield "an autoscaler that the spec knows nothing of decides about the number: it stays as that says"
    if scaling is None or not model.autoscaler:
        return
    limits = f"between {scaling.min_replicas} and {scaling.max_replicas}"
    yield f"{model.autoscaler} decides about the number {limits}, during a rollout too"
    live = edit.deployment
    count = scaling.min_replicas if live is None else replica_owner.live_replicas(live)
    if count > scaling.max_replicas:
        yield f"it will stop {_count(count - scaling.max_replicas)}: more than {scaling.max_replicas} run"


def _warnings(edit: _Edit, model: LLMDeployment) -> Iterator[str]:
    (deployment,) = [child for child in edit.after.children if child["kind"] in WORKLOAD_KINDS]
    drain = status.drain_fits_notice(model, edit.after.accelerator, deployment)
    if drain is not None and drain[0] == "False":
        yield drain[2]


def _count(number: int) -> str:
    return f"{number} pod{'' if number == 1 else 's'}"
