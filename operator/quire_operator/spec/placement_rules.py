"""Rules of what a replica gets and where it runs. The CRD has them in CEL.

`rules.check` and `profiles.parse` call them, and the same table of cases (e2e/api) drives both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from quire_operator import quantity
from quire_operator.errors import SpecError
from quire_operator.spec.placement import AUTO, Resources, Scheduling, Toleration
from quire_operator.spec.references import LABEL_KEY

MAX_CPU = "1024"
MIN_MEMORY, MAX_MEMORY = "64Mi", "64Ti"


def check_resources(resources: Resources) -> None:
    """What one replica gets."""
    if not 0 < quantity.parse(resources.cpu) <= quantity.parse(MAX_CPU):
        raise SpecError("spec.resources.cpu", f"give more than 0 and at most {MAX_CPU}, such as 500m or 4")
    memory = quantity.parse(resources.memory)
    if not quantity.parse(MIN_MEMORY) <= memory <= quantity.parse(MAX_MEMORY):
        raise SpecError(
            "spec.resources.memory",
            f"give {MIN_MEMORY} to {MAX_MEMORY}, such as 4Gi (512m is half a byte; write 512Mi)",
        )
    shared = resources.shared_memory
    if shared != AUTO and not 0 < quantity.parse(shared) < memory:
        raise SpecError(
            "spec.resources.sharedMemory", "counts against resources.memory: give less than that, or Auto"
        )
    if resources.gpu is not None and resources.profile_ref is not None:
        raise SpecError(
            "spec.resources.profileRef", "the profile says what nodes call the GPU: drop gpu, or profileRef"
        )


def check_scheduling(scheduling: Scheduling) -> None:
    """On which nodes it runs."""
    check_keys(scheduling.node_selector, "spec.scheduling.nodeSelector")
    check_tolerations(scheduling.tolerations, "spec.scheduling.tolerations")


def check_tolerations(tolerations: Iterable[Toleration], path: str) -> None:
    """Each of them, as the API server would judge it in a pod."""
    for index, toleration in enumerate(tolerations):
        _check_toleration(toleration, f"{path}[{index}]")


def check_keys(entries: Mapping[str, str], path: str) -> None:
    """Keys of labels."""
    for key in entries:
        if not re.fullmatch(LABEL_KEY, key):
            raise SpecError(path, f"{key!r:.80} is no label key: write name or domain/name")


def _check_toleration(toleration: Toleration, path: str) -> None:
    if toleration.operator == "Exists" and toleration.value:
        raise SpecError(path, "operator Exists matches every value: drop value, or use operator Equal")
    if toleration.operator == "Equal" and not toleration.key:
        raise SpecError(path, "without a key only operator Exists works: give a key, or use operator Exists")
    if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
        raise SpecError(
            path, "tolerationSeconds works with effect NoExecute only: set it, or drop the seconds"
        )
