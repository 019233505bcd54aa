"""An OpenAI-compatible HTTPS server that is none of ours, and breaks as others do."""

import contextlib
import json
import socket
import ssl
import struct
import threading
from dataclasses import dataclass

from e2e.cluster.pki import Authority, Identity

RESET = struct.pack("ii", 1, 0)
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
MODEL = "gpt-4o-mini-2024-07-18"


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    line: str
    headers: dict
    body: dict


def chunk(delta, finish=None, **more):
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": "c-1", "object": "chat.completion.chunk", "model": MODEL, "choices": choices, **more}


def chunks(request, *words):
    """The chunks of a stream, with a usage where that is asked for, as OpenAI has it."""
    asked = (request.body.get("stream_options") or {}).get("include_usage")
    more = {"usage": None} if asked else {}
    found = [chunk({"content": word}, **more) for word in words] + [chunk({}, "stop", **more)]
    return found + ([{**chunk({}), "choices": [], "usage": USAGE}] if asked else [])


def event(document, end=b"\n\n"):
    return b"data: " + (document if isinstance(document, bytes) else json.dumps(document).encode()) + end


def head(status=b"200 OK", kind=b"text/event-stream", *more):
    lines = [b"HTTP/1.1 " + status, b"content-type: " + kind, b"connection: close", *more]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def well(connection, request):
    """The answer of one that is well."""
    if request.body.get("stream"):
        connection.sendall(head())
        for each in (*chunks(request, "Hello ", "from ", "outside"), b"[DONE]"):
            connection.sendall(event(each))
        return
    message = {"role": "assistant", "content": "Hello from outside"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    text = json.dumps({"id": "c-1", "model": MODEL, "choices": choices, "usage": USAGE}).encode()
    limits = b"x-ratelimit-remaining-requests: 3"
    connection.sendall(head(b"200 OK", b"application/json", b"content-length: %d" % len(text), limits) + text)


def reset(connection):
    """End with a reset: what is not read yet may be lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RD)
    socket.socket.close(connection)


class ExternalServer:
    """A context manager. ``answer``: what it does with a request, given its connection. ``num_connections``
    counts those that were accepted, whether or not TLS was agreed upon.
    """

    def __init__(self, directory):
        authority = Authority(directory)
        authority.issue(Identity("server", "server", serves=("127.0.0.1", "localhost")))
        self.ca = authority.certificate.read_text()
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(directory / "server.crt", directory / "server.key")
        self.answer = well
        self.requests = []
        self.num_connections = 0
        self.num_closed = 0  # by the other end, before an answer was complete
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"https://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # the end of the test closes it
            while True:
                raw, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw):
        try:
            with self._tls.wrap_socket(raw, server_side=True) as connection:
                request = _read(connection)
                self.requests.append(request)
                self.answer(connection, request)
        except OSError:
            self.num_closed += 1


def _read(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(1 << 16)):
            raise ConnectionError
        data += more
    text, _, body = data.partition(b"\r\n\r\n")
    line, *lines = text.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(1 << 16)
    return Request(line, headers, json.loads(body))
