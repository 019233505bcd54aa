"""Rules of `model.source` and `cache`: one source, and a place for what is downloaded. Part of `rules`."""

from __future__ import annotations

from dataclasses import fields

from quire_operator import quantity
from quire_operator.errors import SpecError
from quire_operator.spec.sources import ModelCache, Source

MAX_SIZE = "64Ti"


def check(source: Source, cache: ModelCache | None) -> None:
    """Raises SpecError."""
    given = [item.name for item in fields(source) if getattr(source, item.name) is not None]
    if len(given) != 1:
        raise SpecError("spec.model.source", "give exactly one of pvc, huggingFace, s3, gcs and oci")
    if (source.pvc is not None) == (cache is not None):
        raise SpecError(
            "spec.cache",
            "set it beside a source that is downloaded (mode and size), and drop it beside a pvc",
        )
    if cache is None:
        return
    if not 0 < quantity.parse(cache.size) <= quantity.parse(MAX_SIZE):
        raise SpecError("spec.cache.size", f"give a positive quantity up to {MAX_SIZE}, such as 20Gi")
    if cache.storage_class_name and cache.mode != "PerReplica":
        raise SpecError("spec.cache.storageClassName", "set mode PerReplica, or drop it: None has no claim")
