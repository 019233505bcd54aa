"""AcceleratorProfile: the administrator's description of an accelerator and of the nodes that have it.

What the CRD has validated is validated again, as for an LLMDeployment. Knows nothing of pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_operator import names, quantity
from quire_operator.errors import SpecError
from quire_operator.spec import reader, validation
from quire_operator.spec.field_types import default_text, items, mapping, required_quantity, text
from quire_operator.spec.field_types import quantity as optional_quantity
from quire_operator.spec.schema import DNS_1123_SUBDOMAIN, LABEL_VALUE, RESOURCE_NAME, Toleration

MIN_MEMORY, MAX_MEMORY = "1Gi", "64Ti"
MAX_BANDWIDTH = "1024T"
PRICE = r"[0-9]{1,9}([.][0-9]{1,6})?"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """`memory_bandwidth` is in bytes per second; `cost_per_hour` has no currency."""

    memory: str = required_quantity()
    resource_name: str = default_text("nvidia.com/gpu", RESOURCE_NAME, 253)
    memory_bandwidth: str = optional_quantity()
    interconnect: str = field(default="", metadata={"enum": ["PCIe", "NVLink", "InfinityFabric"]})
    node_selector: Mapping[str, str] = mapping(LABEL_VALUE, 63)
    tolerations: tuple[Toleration, ...] = items(32)
    runtime_class_name: str = text(DNS_1123_SUBDOMAIN, 253)
    cost_per_hour: str = text(PRICE, 16)


def parse(body: Mapping[str, Any]) -> Profile:
    """Read and validate one object. Raises SpecError, which names the profile and the field."""
    metadata = body.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    try:
        profile = reader.read(Profile, body.get("spec"), "spec")
        _check(profile)
    except SpecError as error:
        raise SpecError(f"{names.PROFILE_KIND} {name!s:.253}: {error.field_path}", error.message) from error
    return profile


def _check(profile: Profile) -> None:
    least, most = quantity.parse(MIN_MEMORY), quantity.parse(MAX_MEMORY)
    if not least <= quantity.parse(profile.memory) <= most:
        raise SpecError("spec.memory", f"give {MIN_MEMORY} to {MAX_MEMORY}, such as 80G")
    bandwidth = profile.memory_bandwidth
    if bandwidth and not 0 < quantity.parse(bandwidth) <= quantity.parse(MAX_BANDWIDTH):
        raise SpecError("spec.memoryBandwidth", f"give bytes a second up to {MAX_BANDWIDTH}, such as 3350G")
    validation.check_label_keys(profile.node_selector, "spec.nodeSelector")
    validation.check_tolerations(profile.tolerations, "spec.tolerations")
