"""Two engines for all tests of the gateway, and a gateway in front of them for those that break none; what is
asked instead of them, a model without pods, and an external backend.
"""

import concurrent.futures
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from e2e.http_server import HttpServer
from tests.gateway.external_server import ExternalServer
from tests.gateway.fault_proxy import FaultProxy
from tests.gateway.kube_stub import NAMESPACE, KubeStub, endpoint_slice, llm_object
from tests.gateway.launch import Gateway
from tests.server import tiny_model
from tests.server.launch import Server
from tests.server.otlp import Spans

SLEEPS = {"autoscaling": {"minReplicas": 0, "maxReplicas": 2}}
IN_CLUSTER = {"POD_NAMESPACE": NAMESPACE, "POD_NAME": "gateway-1"}
LOOPBACK = {"EXTERNAL_NETWORKS": "127.0.0.0/8"}
SECRETS = [{"name": "openai", "hosts": ["127.0.0.1"]}]


class Clock:
    """Stands still, but for what a test adds."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="session")
def spans():
    with Spans() as spans:
        yield spans


@pytest.fixture(scope="session")
def engines(tmp_path_factory, spans):
    """Two replicas of one model, which export their spans."""
    model = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    flags = ("--otlp-endpoint", spans.url)
    with (
        Server(model, tmp_path_factory.mktemp("one"), *flags) as one,
        Server(model, tmp_path_factory.mktemp("two"), *flags) as two,
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


class Echo(BaseHTTPRequestHandler):
    """Answers with the request; has no answer to one that streams."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("stream"):
            self.server.gone.wait(30)
            self.close_connection = True
            return
        text = json.dumps({"body": body, "headers": dict(self.headers)}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def replica():
    with HttpServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads, server.gone = True, threading.Event()
        server.start()
        yield server
        server.gone.set()
        server.shutdown()


@pytest.fixture
def asleep(start, kube):
    """Makes a gateway before a model without pods."""

    def asleep(spec=SLEEPS, status=None, hold=None, environ=None, **route):
        body = llm_object("LLMDeployment", "tiny", {"model": {"servedName": "tiny"}, **spec})
        kube.put({**body, "status": status or {}})
        kube.put(endpoint_slice("tiny-none", {}))
        if hold is not None or route:
            rules = [{"targets": [{"deployment": "tiny"}]}]
            hold = {} if hold is None else {"hold": hold}
            kube.put(llm_object("LLMRoute", "r", {"models": ["tiny"], "rules": rules, **hold, **route}))
        gateway = start(**IN_CLUSTER, **(environ or {}))
        gateway.kube = kube
        return gateway

    return asleep


def wake(gateway, engine, uid="one"):
    gateway.kube.put(slice_of(uid, engine))


def num_held(gateway, model="tiny"):
    with contextlib.suppress(AssertionError):  # none has waited yet
        return gateway.metric("gateway_held_requests", model=model)
    return 0


@pytest.fixture
def background():
    """Calls in threads."""
    with concurrent.futures.ThreadPoolExecutor(256) as pool:
        yield pool.submit


@pytest.fixture
def external(tmp_path):
    with ExternalServer(tmp_path / "pki") as server:
        yield server


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "external" / "openai" / "api-key"
    path.parent.mkdir(parents=True)
    path.write_text("sk-outside")
    return path


@pytest.fixture
def gateway_for(start, proxy, kube, external, secret, tmp_path):
    """A gateway with a route to a replica behind a proxy, and the external backend as its fallback; with
    ``targets``, to these."""

    def gateway_for(*, targets=None, backend=None, environ=None, fallback=None, **spec):
        put_backend(kube, external, **(backend or {}))
        fallbacks = [{"external": "outside", **(fallback or {})}]
        rules = [{"targets": targets or [{"deployment": "tiny"}]}]
        kube.put(
            llm_object("LLMRoute", "r", {"models": ["chat"], "rules": rules, "fallbacks": fallbacks, **spec})
        )
        mounted = {"EXTERNAL_SECRETS": json.dumps(SECRETS), "EXTERNAL_SECRETS_DIR": tmp_path / "external"}
        environ = LOOPBACK if environ is None else environ
        return start(endpoint_slice("tiny-one", {"one": "127.0.0.1"}, port=proxy.port), **mounted, **environ)

    return gateway_for


def put_backend(kube, external, name="outside", **spec):
    spec = {"baseURL": external.url, "model": "gpt-4o-mini", "caBundle": external.ca, **spec}
    spec.setdefault("apiKeySecretRef", {"name": "openai"})
    kube.put(
        llm_object(
            "LLMExternalBackend", name, {one: value for one, value in spec.items() if value is not None}
        )
    )


def outside_alone(**fields):
    """A route that sends all to the backend."""
    return {"targets": [{"external": "outside"}], "fallbacks": [], **fields}
