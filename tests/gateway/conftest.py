"""Two engines for all tests of the gateway, and a gateway in front of them for those that break none."""

import pytest

from tests.gateway.fault_proxy import FaultProxy
from tests.gateway.kube_stub import KubeStub, endpoint_slice
from tests.gateway.launch import Gateway
from tests.server import tiny_model
from tests.server.launch import Server


class Clock:
    """Stands still, but for what a test adds."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Two replicas of one model."""
    model = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    with (
        Server(model, tmp_path_factory.mktemp("one")) as one,
        Server(model, tmp_path_factory.mktemp("two")) as two,
    ):
        yield one.wait_ready(), two.wait_ready()


def slice_of(uid, engine, port=None):
    """The slice of a replica, in front of which there may be a proxy."""
    ports = {"port": port or engine.port, "health_port": engine.health_port}
    return endpoint_slice(f"tiny-{uid}", {uid: "127.0.0.1"}, **ports)


@pytest.fixture
def kube():
    with KubeStub() as stub:
        yield stub


@pytest.fixture
def start(kube, tmp_path):
    """Starts a gateway before these slices."""
    started = []

    def start(*slices, **environ):
        for each in slices:
            kube.put(each)
        gateway = Gateway(kube.url, tmp_path, **environ)
        gateway.kube = kube
        started.append(gateway)
        gateway.wait_replicas(len(slices))
        return gateway

    yield start
    for each in started:
        each.__exit__(None)


@pytest.fixture
def proxy(engines):
    """A proxy in front of the first replica."""
    with FaultProxy(engines[0].port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def shared(engines, tmp_path_factory):
    """A gateway in front of both replicas."""
    with KubeStub() as stub:
        for uid, engine in zip(("one", "two"), engines, strict=True):
            stub.put(slice_of(uid, engine))
        with Gateway(stub.url, tmp_path_factory.mktemp("gateway")) as gateway:
            yield gateway.wait_replicas(2)
