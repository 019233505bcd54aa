"""Publishes this replica's certificate authority in the caBundle of both APIServices, and renews it.

The API server trusts a replica by that bundle. Each replica adds its own authority and keeps the others';
every write is conditional, so that two replicas never overwrite each other. A new authority is published one
period before it is used, and the old one is removed one period after. An APIService that names another
Service is never touched: the process ends.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from quire_metrics_adapter import certificates, discovery
from quire_metrics_adapter.certificates import Credentials
from quire_metrics_adapter.errors import ApiError, ConflictError, ForeignApiServiceError
from quire_metrics_adapter.kube_api import MERGE_PATCH, Connection
from quire_metrics_adapter.settings import Settings

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 10.0
_RETRY_SECONDS = 1.0
_PATH = "/apis/apiregistration.k8s.io/v1/apiservices"


class Publisher:
    """`published`: whether the authority that is in use has been published."""

    def __init__(self, connection: Connection, settings: Settings) -> None:
        self._connection = connection
        self._settings = settings
        self._next: Credentials | None = None
        self.credentials = self._issue()
        self.published = False

    async def run(self, renewed: Callable[[], None]) -> None:
        """Until cancelled, or ForeignApiServiceError; `renewed` is called when `credentials` change."""
        while True:
            try:
                await self._publish()
            except ConflictError:
                continue  # another replica wrote in between
            except ApiError as error:
                logger.warning("cannot publish the certificate authority: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if not self.published:
                logger.info("published the certificate authority in %s", " and ".join(discovery.API_SERVICES))
                self.published = True
            await asyncio.sleep(self._period)
            if self._next is not None:  # published one period ago
                self.credentials, self._next = self._next, None
                renewed()
            elif self.credentials.renew_at is not None and _now() >= self.credentials.renew_at:
                self._next = self._issue()

    @property
    def _period(self) -> float:
        return min(PERIOD_SECONDS, self._settings.certificate_seconds / 10)

    async def _publish(self) -> None:
        own = [made.authority for made in (self.credentials, self._next) if made is not None]
        for name in discovery.API_SERVICES:
            await self._add(name, own)

    async def _add(self, name: str, own: list[bytes]) -> None:
        service = await self._connection.request("GET", f"{_PATH}/{name}")
        require_ours(service, self._settings)
        current = base64.b64decode(service["spec"].get("caBundle") or "")
        wanted = certificates.bundle(current, own, self._settings.pod_name, _now())
        if wanted != current:
            patch = {
                "metadata": {"resourceVersion": service["metadata"]["resourceVersion"]},
                "spec": {"caBundle": base64.b64encode(wanted).decode()},
            }
            await self._connection.request("PATCH", f"{_PATH}/{name}", body=patch, content_type=MERGE_PATCH)

    def _issue(self) -> Credentials:
        settings = self._settings
        lifetime = timedelta(seconds=settings.certificate_seconds)
        return certificates.issue(settings.pod_name, settings.hosts, _now(), lifetime)


def require_ours(api_service: dict[str, Any], settings: Settings) -> None:
    """Return for an APIService that names our Service; raise ForeignApiServiceError for any other."""
    service = api_service["spec"].get("service") or {}
    place = (service.get("namespace"), service.get("name"))
    if place != (settings.namespace, settings.service):
        owner = f"the Service {place[0]}/{place[1]}" if service else "the API server itself"
        raise ForeignApiServiceError(
            f"APIService {api_service['metadata']['name']} belongs to {owner} and is left alone. A cluster "
            "has one custom.metrics.k8s.io: remove the other adapter, or set metricsAdapter.enabled=false"
        )


def _now() -> datetime:
    return datetime.now(UTC)
