"""The part of an API server that the informer uses, in this process: real ones take no loopback addresses.

e2e/api has the informer before a real one.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from e2e.http_server import HttpServer

NAMESPACE = "models"


def llm_object(kind, name, spec, *, created="2026-01-01T00:00:00Z", namespace=NAMESPACE, generation=1):
    """An LLMRoute, LLMClient or LLMDeployment as the API server stores it."""
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "generation": generation}
    metadata["creationTimestamp"] = created
    return {"apiVersion": "serving.quire.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def endpoint_slice(name, endpoints, *, model="tiny", port=8000, health_port=None, service=None):
    """A slice as Kubernetes writes it. ``endpoints``: by the pod's UID its address, or the whole endpoint."""
    ports = [{"name": "http", "port": port}]
    ports += [{"name": "health", "port": health_port}] if health_port else []
    return {
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {
                "serving.quire.dev/name": model,
                "kubernetes.io/service-name": service or model,
            },
        },
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": [
            value
            if isinstance(value, dict)
            else {
                "addresses": [value],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "targetRef": {"kind": "Pod", "uid": uid},
            }
            for uid, value in endpoints.items()
        ],
    }


class KubeStub:
    """A context manager. `put` and `remove` change objects; `close` makes it unreachable. Custom kinds
    are not installed until there is an object of them.
    """

    def __init__(self):
        self.objects = {"endpointslices": {}}  # by the plural of their kind, then by name
        self.requests = []  # query strings of those for slices, in their order
        self.oldest = 0  # watches from before are 410
        self.refusals = {}  # by method and plural the status of the answer, None for no answer at all
        self.refused = []  # the requests that were, by the same
        self._events = []
        self._version = 10
        self._changed = threading.Condition()
        self._server = HttpServer(("127.0.0.1", 0), _handler(self))
        self.is_open = True
        self.url = self._server.url
        self._server.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.is_open:
            self.close()

    def close(self):
        """Unreachable from now on, with every watch cut."""
        with self._changed:
            self.is_open = False
            self._changed.notify_all()
        self._server.stop()

    def put(self, body):
        plural, name = f"{body['kind'].lower()}s", body["metadata"]["name"]
        known = self.objects.setdefault(plural, {})
        self._change("MODIFIED" if name in known else "ADDED", plural, name, body)

    def remove(self, name, plural="endpointslices"):
        self._change("DELETED", plural, name, self.objects[plural][name])

    def bookmark(self):
        """Tell the watches a version without a change."""
        with self._changed:
            self._version += 1
            body = {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(self._version)}}
            self._events.append((self._version, "BOOKMARK", "endpointslices", body))
            self._changed.notify_all()

    def expire(self):
        """All versions up to now are too old to watch from, and the running watches end with that."""
        with self._changed:
            self._version += 1
            self.oldest = self._version
            status = {"kind": "Status", "code": 410, "reason": "Expired"}
            self._events.append((self._version, "ERROR", "endpointslices", status))
            self._changed.notify_all()

    def forget(self, name, body):
        """Change a slice without an event."""
        self._version += 1
        self.objects["endpointslices"][name] = body

    def _change(self, kind, plural, name, body):
        with self._changed:
            self._version += 1
            body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self._version)}}
            self.objects[plural][name] = body
            if kind == "DELETED":
                del self.objects[plural][name]
            self._events.append((self._version, kind, plural, body))
            self._changed.notify_all()

    def wait_closed(self):
        with self._changed:
            self._changed.wait_for(lambda: not self.is_open)

    def listed(self, plural, selector=""):
        with self._changed:
            metadata = {"resourceVersion": str(self._version)}
            items = [one for one in self.objects[plural].values() if _matches(one, selector)]
            return {"kind": "List", "metadata": metadata, "items": items}

    def events_since(self, version, plural, selector=""):
        """Waits for the first; none when the stub is closed."""

        def since():
            later = (each for each in self._events if each[0] > version and each[2] == plural)
            return [each for each in later if each[1] in ("BOOKMARK", "ERROR") or _matches(each[3], selector)]

        with self._changed:
            self._changed.wait_for(lambda: not self.is_open or since())
            return since() if self.is_open else []


def _matches(body, selector):
    """Whether the labels have what a selector asks for, where it asks for a value."""
    labels = body["metadata"].get("labels") or {}
    pairs = [part.partition("=") for part in selector.split(",")]
    return all(labels.get(name) == value for name, equals, value in pairs if equals)


def _handler(stub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            parts = urlsplit(self.path)
            plural = parts.path.rpartition("/")[2]
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            if plural == "endpointslices":
                stub.requests.append(query)
            if plural not in stub.objects:
                self._json(404, {"kind": "Status", "code": 404})
            elif "watch" not in query:
                self._json(200, stub.listed(plural, query.get("labelSelector", "")))
            elif int(query["resourceVersion"]) < stub.oldest:
                self._json(410, {"kind": "Status", "code": 410})
            else:
                self._watch(int(query["resourceVersion"]), plural, query.get("labelSelector", ""))

        def do_PATCH(self):
            """Apply a Lease, or merge a status."""
            path = urlsplit(self.path).path
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self._is_refused():
                return
            if path.endswith("/status"):
                *_, plural, name, _ = path.split("/")
                old = stub.objects[plural][name]
                merged = {**(old.get("status") or {}), **body["status"]}
                body = {**old, "status": {name: one for name, one in merged.items() if one is not None}}
                stub.put(body)
                self._json(200, stub.objects[plural][name])
                return
            body["metadata"].setdefault("namespace", NAMESPACE)
            stub.put(body)
            self._json(200, body)

        def do_POST(self):
            """Create an Event."""
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self._is_refused():
                return
            if body["metadata"]["name"] in stub.objects.get("events", {}):
                self._json(409, {"kind": "Status", "code": 409})
                return
            stub.put(body)
            self._json(201, body)

        def do_DELETE(self):
            if self._is_refused():
                return
            *_, plural, name = urlsplit(self.path).path.split("/")
            if name not in stub.objects.get(plural, {}):
                self._json(404, {"kind": "Status", "code": 404})
                return
            stub.remove(name, plural)
            self._json(200, {"kind": "Status"})

        def _is_refused(self):
            parts = urlsplit(self.path).path.removesuffix("/status").split("/")
            plural = parts[-1] if self.command == "POST" else parts[-2]
            if (key := (self.command, plural)) not in stub.refusals:
                return False
            stub.refused.append(key)
            if (status := stub.refusals[key]) is None:
                stub.wait_closed()
            else:
                self._json(status, {"kind": "Status", "code": status})
            return True

        def _json(self, status, body):
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _watch(self, version, plural, selector):
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            while events := stub.events_since(version, plural, selector):
                version = events[-1][0]
                for _, kind, _, body in events:
                    line = json.dumps({"type": kind, "object": body}).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            self.close_connection = True

        def log_message(self, *args):
            pass

    return Handler
