"""The metrics adapter's process, started as its container would start it, with the chart's rights."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx

from e2e.operator.process import Replica
from e2e.ports import free_port
from e2e.waiting import eventually

SERVICE = "quire-metrics-adapter"
HOST = f"{SERVICE}.quire-system.svc"


class AdapterReplica(Replica):
    """One replica. `https_port`: where the aggregated API is."""

    def __init__(
        self, name: str, kubeconfig: Path, directory: Path, engine_port: int, **environ: str
    ) -> None:
        self.https_port = free_port()
        probes = free_port()
        given = {
            "KUBECONFIG": str(kubeconfig),
            "QUIRE_ADAPTER_SERVICE": SERVICE,
            "QUIRE_ADAPTER_PORT": str(self.https_port),
            "QUIRE_ADAPTER_PROBE_PORT": str(probes),
            "QUIRE_ADAPTER_ENGINE_PORT": str(engine_port),
            **environ,
        }
        super().__init__(name, ["-m", "quire_metrics_adapter"], directory, probes, given)

    def wait_ready(self) -> AdapterReplica:
        eventually(f"{self.name} is ready", lambda: self.ask("/readyz")[0] == 200 or self.code)
        assert self.code is None, self.tail()
        return self

    def get(self, path: str, trusted: bytes, **request: Any) -> httpx.Response:
        """A request that bypasses the API server. `trusted`: authorities as PEM."""
        tls = ssl.create_default_context(cadata=trusted.decode())
        for certificate in request.pop("certificate", ()):
            tls.load_cert_chain(*certificate)
        with httpx.Client(verify=tls, trust_env=False, timeout=60) as client:
            url = f"https://127.0.0.1:{self.https_port}{path}"
            return client.get(url, extensions={"sni_hostname": HOST}, **request)
