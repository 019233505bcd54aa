"""Who reaches whom under NetworkPolicies, as `e2e/cluster/go/reachability` evaluates them, with no cluster.

What a pod, a namespace and a connection are in the tables of the tests beside this file. Knows no policy of
ours.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from e2e.cluster import programs

BIN = Path(__file__).parents[2] / ".cluster" / "bin"
NODE = "10.0.0.1"  # of every pod

Body = dict[str, Any]


class Connection(NamedTuple):
    """Each end is `namespace/pod`, or the address of something that is no pod."""

    source: str
    target: str
    port: int
    protocol: str = "TCP"


@dataclass(frozen=True)
class World:
    """Labels of namespaces, pods and policies, as the API server has them."""

    namespaces: Mapping[str, Mapping[str, str]]
    pods: tuple[Body, ...]
    policies: tuple[Body, ...]


def pod(name: str, template: Mapping[str, Any] | None = None, /, **labels: str) -> Body:
    """The pod `namespace/name` with these labels, or with the labels and containers of a pod template."""
    namespace, _, short = name.partition("/")
    made = template or {"metadata": {"labels": labels}, "spec": {"containers": []}}
    return {
        "metadata": {"namespace": namespace, "name": short, "labels": made["metadata"]["labels"]},
        "spec": {
            "containers": [
                {"name": c["name"], "ports": c["ports"]} for c in made["spec"]["containers"] if "ports" in c
            ]
        },
    }


def deniers(world: World, connections: Iterable[Connection]) -> dict[Connection, list[str]]:
    """For each connection what denies it, such as `egress of team-a/m`; nothing for one that is allowed."""
    asked = list(connections)
    done = run(question(world, asked))
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    return {one: verdict.get("deniedBy", []) for one, verdict in zip(asked, verdicts, strict=True)}


def question(world: World, connections: Iterable[Connection]) -> Body:
    """What the program reads; pods get addresses in their order."""
    names = {
        name: {"kubernetes.io/metadata.name": name, **labels} for name, labels in world.namespaces.items()
    }
    return {
        "namespaces": [{"metadata": {"name": name, "labels": labels}} for name, labels in names.items()],
        "pods": [
            {**body, "status": {"podIP": f"10.244.0.{number}", "hostIP": NODE}}
            for number, body in enumerate(world.pods, start=1)
        ],
        "networkPolicies": list(world.policies),
        "connections": [
            {"from": one.source, "to": one.target, "port": one.port, "protocol": one.protocol}
            for one in connections
        ],
    }


def run(asked: Body) -> subprocess.CompletedProcess[str]:
    """The program with this question, whatever its exit status."""
    programs.build(BIN, ("reachability",))
    return subprocess.run(
        [str(BIN / "reachability")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def without_ip_blocks(world: World) -> World:
    """The world where an ipBlock selects no pod, as with Cilium: for connections between pods, it is as if
    it were not there.
    """
    return replace(world, policies=tuple(_without_ip_blocks(policy) for policy in world.policies))


def _without_ip_blocks(policy: Body) -> Body:
    spec = dict(policy["spec"])
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        left = []
        for rule in spec.get(direction, []):
            selectors = [peer for peer in rule.get(peers, []) if "ipBlock" not in peer]
            if peers not in rule or selectors:  # a rule with no peers is for everybody
                left.append({**rule, **({peers: selectors} if selectors else {})})
        spec[direction] = left
    return {**policy, "spec": spec}


def table(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """The headings of the columns, and the cells of each row, two spaces apart; # begins a comment."""
    lines = [re.split(r" {2,}", line.partition("#")[0].strip()) for line in text.strip().splitlines()]
    (_, *headings), *rows = [line for line in lines if line != [""]]
    cells = {label: row for label, *row in rows}
    assert len(cells) == len(rows), "a row is there twice"
    assert all(len(row) == len(headings) and {*row} <= {"yes", "-"} for row in cells.values())
    return headings, cells
