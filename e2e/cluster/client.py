"""The few requests that bringing a cluster up takes: is it ready, apply this, what does that say.

For starting a cluster only; tests use the Kubernetes client or kubectl.
"""

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from e2e.cluster.errors import NotReadyError

_LOOK_SECONDS = 5  # a read is repeated until the wait is over
_WRITE_SECONDS = 60  # as long as the API server itself tries, where the disk is busy


class Client:
    """The API server as its administrator sees it."""

    def __init__(self, url: str, pki: Path) -> None:
        self._url = url
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        # No proxy of the environment may come between: the address is on this machine.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls)
        )

    def is_ready(self) -> bool:
        """Whether the server says that it is."""
        return self._answers("/readyz")

    def exists(self, path: str) -> bool:
        """Whether there is an object at this path."""
        return self._answers(path)

    def node_is_ready(self, name: str) -> bool:
        """Whether the kubelet reported the node's Ready condition as true."""
        try:
            node = json.loads(self._request("GET", f"/api/v1/nodes/{name}"))
        except OSError:
            return False
        conditions = node.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def apply(self, path: str, manifest: Mapping[str, Any]) -> None:
        """Server-side apply of one object."""
        query = "?fieldManager=quire-cluster&force=true"
        self._request("PATCH", path + query, json.dumps(manifest).encode(), seconds=_WRITE_SECONDS)

    def _answers(self, path: str) -> bool:
        try:
            self._request("GET", path)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _request(
        self, method: str, path: str, body: bytes | None = None, *, seconds: float = _LOOK_SECONDS
    ) -> bytes:
        request = urllib.request.Request(self._url + path, data=body, method=method)
        request.add_header("Content-Type", "application/apply-patch+yaml")
        try:
            with self._opener.open(request, timeout=seconds) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            # The error owns the connection: unread and unclosed it would leak.
            with error:
                raise ConnectionError(f"{method} {path}: {error.code} {error.read()[:300]!r}") from None


def wait_until(
    what: str, ready: Callable[[], bool], *, seconds: float, death: Callable[[], str | None]
) -> None:
    """Returns once `ready`; fails when `death` names something dead or the time is over."""
    deadline = time.monotonic() + seconds
    while not ready():
        died = death()
        if died is not None:
            raise NotReadyError(f"{what}: {died}")
        if time.monotonic() > deadline:
            raise NotReadyError(f"{what} was not ready within {seconds:.0f} s: see .cluster/log")
        time.sleep(0.1)
