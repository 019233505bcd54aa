"""One API server for all tests of the API, with the CRD of this checkout installed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from e2e.api import gateway_kinds, profiles
from e2e.api.client import Client
from e2e.api.specs import ROOT
from e2e.cluster import crds, lws, programs
from e2e.cluster.apiserver import ApiServer
from e2e.cluster.errors import HostError


@pytest.fixture(scope="package")
def api() -> Iterator[Client]:
    """etcd and kube-apiserver alone; every test uses dry runs or names of its own."""
    try:
        programs.build(ROOT / ".cluster" / "bin", ("kube",))
    except HostError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the API server cannot be built: {error}")
    with ApiServer() as server, Client(server.kubeconfig) as client:
        client.install_crd()
        client.install_crd(profiles.CRD)
        for other in [*gateway_kinds.CRDS.values(), *map(crds.crd, crds.ALL), *lws.crds()]:
            client.install_crd(other)
        yield client
