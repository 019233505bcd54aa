"""Rules of `model.source` and `cache`: one source, and a place for what is downloaded. Part of `rules`."""

from __future__ import annotations

from dataclasses import fields

from quire_operator import quantity
from quire_operator.errors import SpecError
from quire_operator.spec.sources import ModelCache, Source
from quire_operator.spec.tree import Spec

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
    if bool(cache.size) == bool(cache.existing_claim):
        raise SpecError("spec.cache.size", "give it, or existingClaim: a claim that is there has its size")
    if cache.size and not 0 < quantity.parse(cache.size) <= quantity.parse(MAX_SIZE):
        raise SpecError("spec.cache.size", f"give a positive quantity up to {MAX_SIZE}, such as 20Gi")
    if cache.storage_class_name and (cache.mode == "None" or cache.existing_claim):
        raise SpecError("spec.cache.storageClassName", "drop it: no claim is made")
    if not cache.is_shared and (cache.access_mode or cache.existing_claim):
        raise SpecError("spec.cache", "set mode SharedPVC, or drop accessMode and existingClaim")


def check_replicas(spec: Spec) -> None:
    """What one node mounts, one pod uses. Raises SpecError."""
    most = spec.replicas if spec.autoscaling is None else spec.autoscaling.max_replicas
    if spec.cache is not None and spec.cache.access_mode == "ReadWriteOnce" and (most or 0) > 1:
        raise SpecError("spec.cache.accessMode", "set ReadWriteMany, or give one replica at most")
