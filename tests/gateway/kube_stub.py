"""The part of an API server that the informer uses, in this process: real ones take no loopback addresses.

e2e/api has the informer before a real one.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "models"


def endpoint_slice(name, endpoints, *, model="tiny", port=8000, health_port=None, service=None):
    """A slice as Kubernetes writes it. ``endpoints``: by the pod's UID its address, or the whole endpoint."""
    ports = [{"name": "http", "port": port}]
    ports += [{"name": "health", "port": health_port}] if health_port else []
    return {
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
    """A context manager. `put` and `remove` change slices; `close` makes it unreachable."""

    def __init__(self):
        self.slices = {}
        self.requests = []  # query strings, in their order
        self.oldest = 0  # watches from before are 410
        self._events = []
        self._version = 10
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.is_open = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

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
        self._server.shutdown()
        self._server.server_close()

    def put(self, body):
        name = body["metadata"]["name"]
        self._change("MODIFIED" if name in self.slices else "ADDED", name, body)

    def remove(self, name):
        self._change("DELETED", name, self.slices[name])

    def bookmark(self):
        """Tell the watches a version without a change."""
        with self._changed:
            self._version += 1
            body = {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(self._version)}}
            self._events.append((self._version, "BOOKMARK", body))
            self._changed.notify_all()

    def expire(self):
        """All versions up to now are too old to watch from, and the running watches end with that."""
        with self._changed:
            self._version += 1
            self.oldest = self._version
            status = {"kind": "Status", "code": 410, "reason": "Expired"}
            self._events.append((self._version, "ERROR", status))
            self._changed.notify_all()

    def forget(self, name, body):
        """Change a slice without an event."""
        self._version += 1
        self.slices[name] = body

    def _change(self, kind, name, body):
        with self._changed:
            self._version += 1
            body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self._version)}}
            self.slices[name] = body
            if kind == "DELETED":
                del self.slices[name]
            self._events.append((self._version, kind, body))
            self._changed.notify_all()

    def listed(self):
        with self._changed:
            metadata = {"resourceVersion": str(self._version)}
            return {"kind": "EndpointSliceList", "metadata": metadata, "items": list(self.slices.values())}

    def events_since(self, version):
        """Waits for the first; none when the stub is closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_open or self._version > version)
            return [each for each in self._events if each[0] > version] if self.is_open else []


def _handler(stub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
            stub.requests.append(query)
            if "watch" not in query:
                self._json(200, stub.listed())
            elif int(query["resourceVersion"]) < stub.oldest:
                self._json(410, {"kind": "Status", "code": 410})
            else:
                self._watch(int(query["resourceVersion"]))

        def _json(self, status, body):
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _watch(self, version):
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            while events := stub.events_since(version):
                version = events[-1][0]
                for _, kind, body in events:
                    line = json.dumps({"type": kind, "object": body}).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            self.close_connection = True

        def log_message(self, *args):
            pass

    return Handler
