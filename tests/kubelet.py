"""What a container is started with: the kubelet replaces $(NAME) in arguments and values by variables, and
$$ by $.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

POD_FIELDS = {"status.podIP": "10.244.0.7"}
# What LeaderWorkerSet puts in front of the variables of a group's pods.
OF_A_GROUP = {"LWS_LEADER_ADDRESS": "m-0.m-0.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}

_REFERENCE = re.compile(r"\$(\$|\(([^)]*)\))")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """The text with its references replaced, as in Kubernetes' third_party/forked/golang/expansion."""
    return _REFERENCE.sub(lambda found: _value(found, variables), text)


def started_with(
    container: Mapping[str, Any], config_map: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a container whose envFrom names that ConfigMap."""
    environment = dict(config_map)
    for entry in container.get("env", []):
        if (source := entry.get("valueFrom")) is None:
            environment[entry["name"]] = expand(entry.get("value", ""), environment)
        elif "fieldRef" in source:
            environment[entry["name"]] = POD_FIELDS.get(source["fieldRef"]["fieldPath"], "a-label")
        else:
            assert source["configMapKeyRef"]["optional"], "of a ConfigMap that is not there"
    return [expand(argument, environment) for argument in container["args"]], environment


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str:
    return "$" if found[1] == "$" else variables.get(found[2], found[0])
