"""The objects that an LLMDeployment may only name where they carry the label `serving.quire.dev/referable:
"true"`.

A shared claim of the user's is mounted writable and its group is changed, so its owner has to agree. Secrets
need the label where the administrator chose `secretReferences: Labelled`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from quire_operator.settings import LABELLED, Settings
from quire_operator.spec import LLMDeployment
from quire_operator.spec.reader import camel


@dataclass(frozen=True)
class Reference:
    """An object of the same namespace, and the field of the spec that names it."""

    kind: str
    name: str
    field: str


def restricted(model: LLMDeployment, settings: Settings) -> tuple[Reference, ...]:
    """The references to objects that need the label."""
    claim = model.spec.cache.existing_claim if model.spec.cache is not None else ""
    claims = (Reference("PersistentVolumeClaim", claim, "spec.cache.existingClaim"),) if claim else ()
    secrets = tuple(_secrets(model.spec, "spec")) if settings.secret_references == LABELLED else ()
    return (*claims, *secrets)


def _secrets(part: Any, path: str) -> Iterator[Reference]:
    for item in fields(part):
        value, here = getattr(part, item.name), f"{path}.{camel(item.name)}"
        if item.name.endswith("secret_ref"):
            if value is not None:
                yield Reference("Secret", value.name, f"{here}.name")
        elif is_dataclass(value):
            yield from _secrets(value, here)
        elif isinstance(value, tuple):
            for index, each in enumerate(value):
                if is_dataclass(each):
                    yield from _secrets(each, f"{here}[{index}]")
