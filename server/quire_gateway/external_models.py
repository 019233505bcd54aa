"""External backends as models with one replica each, so that one is asked, counted and ejected as a pod is.

What is known of a backend's failures stays until its object changes. Pure but for the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire_gateway.llm_external_backend import LLMExternalBackend
from quire_gateway.outlier_detection import OutlierDetection
from quire_gateway.replica import Endpoint, Replica
from quire_gateway.replicas import Model
from quire_gateway.routing.by_load import RoundRobin

#: Before the name of a backend where an LLMDeployment could be named as well.
PREFIX = "external/"


@dataclass(frozen=True, slots=True)
class ExternalEndpoint(Endpoint):
    """Where a backend answers."""

    base_url: str = ""

    @property
    def url(self) -> str:
        """The root of its API."""
        return self.base_url


class ExternalModel(Model):
    """One backend."""

    def __init__(self, backend: LLMExternalBackend, clock: Callable[[], float]) -> None:
        super().__init__(backend.namespace, PREFIX + backend.name, clock, lambda _: RoundRobin())
        self.backend = backend
        self.replicas = {backend.uid: Replica(ExternalEndpoint(backend.uid, "", 0, 0, backend.base_url))}
        self.outliers = OutlierDetection(clock, max_share=1.0)  # others answer while it is left alone

    def candidates(self, tried: Iterable[str], adapter: str = "") -> list[Replica]:
        """None while it is ejected. A backend has no adapters."""
        return [
            one
            for uid, one in self.replicas.items()
            if uid not in tried and self.outliers.takes_requests(uid)
        ]


class ExternalModels:
    """Those of one gateway."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._models: dict[str, ExternalModel] = {}  # by UID

    def of(self, backend: LLMExternalBackend, existing: Iterable[LLMExternalBackend]) -> ExternalModel:
        """The model of a backend, one of those that exist."""
        known = self._models.get(backend.uid)
        if known is None or known.backend != backend:
            uids = {one.uid for one in existing}
            self._models = {uid: model for uid, model in self._models.items() if uid in uids}
            known = self._models[backend.uid] = ExternalModel(backend, self._clock)
        return known
