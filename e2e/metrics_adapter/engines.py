"""Serving pods as the adapter sees them: a Pod in the API server, and a /metrics that a test sets."""

from __future__ import annotations

import contextlib
import http.server
import secrets
import threading
from collections.abc import Callable, Iterator

from e2e.http_server import HttpServer
from e2e.operator import pods
from e2e.operator.world import Body, World

# (status, body) of each answer
Answer = Callable[[], tuple[int, bytes]]


def says(queue: object = 0, running: object = 0, kv: object = 0.0) -> Answer:
    """A valid answer with the given values."""
    text = (
        "# HELP llm_queue_depth Requests that wait for the engine.\n# TYPE llm_queue_depth gauge\n"
        f'llm_queue_depth{{model="m"}} {queue}\nllm_running_requests{{model="m"}} {running}\n'
        f'llm_kv_cache_utilization{{model="m"}} {kv}\n'
    )
    return lambda: (200, text.encode())


class Engine:
    """`answer` may be changed while it serves; `asked` counts the requests."""

    def __init__(self, answer: Answer) -> None:
        self.ip = _address()
        self.answer = answer
        self.asked = 0


@contextlib.contextmanager
def serving(port: int, answer: Answer) -> Iterator[Engine]:
    """Serves /metrics (and every other path) while the block runs."""
    engine = Engine(answer)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            engine.asked += 1
            status, body = engine.answer()
            with contextlib.suppress(OSError):  # the client had read or waited enough
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = HttpServer((engine.ip, port), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


POD_SPEC = {"containers": [{"name": "server", "image": "registry.example/quire-server:1"}]}


def make_pod(world: World, namespace: str, deployment: str, ip: str, *, ready: bool = True) -> str:
    """A serving pod as operator, controllers and kubelet would create it; its name."""
    name = f"{deployment}-{secrets.token_hex(4)}"
    replica_set = _replica_set(world, namespace, deployment)
    owners = [_controlled_by("apps/v1", "ReplicaSet", replica_set)]
    labels = {"serving.quire.dev/name": deployment, "serving.quire.dev/role": "leader"}
    metadata = {"name": name, "labels": labels, "ownerReferences": owners}
    world.create("Pod", namespace, {"metadata": metadata, "spec": POD_SPEC})
    set_ready(world, namespace, name, ip, ready=ready)
    return name


def _replica_set(world: World, namespace: str, deployment: str) -> Body:
    """The ReplicaSet of the LLMDeployment's Deployment; both are created for its first pod."""
    if (found := world.get("ReplicaSet", namespace, deployment)) is not None:
        return found
    labels = {"serving.quire.dev/name": deployment, "serving.quire.dev/role": "leader"}
    spec = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": POD_SPEC},
    }
    owner = {"metadata": {"name": deployment, "uid": secrets.token_hex(8)}}
    for kind, owned_by in (
        ("Deployment", ("serving.quire.dev/v1alpha1", "LLMDeployment")),
        ("ReplicaSet", ("apps/v1", "Deployment")),
    ):
        metadata = {
            "name": deployment, "labels": labels, "ownerReferences": [_controlled_by(*owned_by, owner)]
        }  # fmt: skip
        if (found := world.get(kind, namespace, deployment)) is None:
            owner = world.create(kind, namespace, {"metadata": metadata, "spec": spec})
        elif found["metadata"].get("ownerReferences"):  # an operator's
            owner = found
        else:
            owner = world.patch(kind, namespace, deployment, {"metadata": metadata})
    return owner


def _controlled_by(api_version: str, kind: str, owner: Body) -> Body:
    about = owner["metadata"]
    reference = {"apiVersion": api_version, "kind": kind, "name": about["name"], "uid": about["uid"]}
    return {**reference, "controller": True}


def set_ready(world: World, namespace: str, name: str, ip: str, *, ready: bool) -> None:
    """As the kubelet reports it."""
    state = pods.condition("Ready", "True" if ready else "False")
    status = pods.status(pods.running(ready=ready), conditions=(state,), ip=ip)
    world.patch("Pod", namespace, name, {"status": status}, status=True)


def unreachable_address() -> str:
    """An address at which nothing answers."""
    return _address()


def _address() -> str:
    # Its own, since the port is the same for all.
    return f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
