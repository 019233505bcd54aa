"""A client with minimal cost: bench/minimal_client.py PORT CLIENTS REQUESTS.jsonl [--rate RATE]

One process, one thread, plain sockets, and no parsing beyond the end of a response, so that the server is
measured almost without a load generator. Each line of the file is the body of a request. Prints JSON: when
each request was sent and when parts of its answer arrived, in seconds. With --rate that many requests a
second are sent, evenly spaced, each on a free connection; without it each connection sends its next one at
once.
Started by ``bench.http_load``.
"""

import argparse
import json
import selectors
import socket
import sys
import time
from collections import deque
from pathlib import Path


class Exchange:
    """One connection: a request and what has been received."""

    def __init__(self, port: int, path: str, headers: str) -> None:
        self._head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, body: bytes) -> None:
        head = f"{self._head}content-length: {len(body)}\r\n\r\n"
        self.received = b""
        self.arrivals: list[float] = []
        self.asked = time.time()
        self.socket.sendall(head.encode() + body)

    def read(self) -> bool:
        """Receive what is available; True if the response is complete."""
        self.received += self.socket.recv(1 << 16)
        self.arrivals.append(time.time())
        if b"transfer-encoding: chunked" in self.received:
            return self.received.endswith(b"0\r\n\r\n")
        head, found, body = self.received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        return bool(found) and len(body) == int(length)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("clients", type=int)
    parser.add_argument("bodies", type=Path)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--path", default="/v1/completions")
    parser.add_argument("--key")
    arguments = parser.parse_args()
    bodies = arguments.bodies.read_bytes().splitlines()[::-1]
    rate = arguments.rate
    headers = f"authorization: Bearer {arguments.key}\r\n" if arguments.key else ""
    selector, began = selectors.DefaultSelector(), time.monotonic()
    requests: list[dict[str, object]] = []
    free = deque(Exchange(arguments.port, arguments.path, headers) for _ in range(arguments.clients))
    for exchange in free:
        selector.register(exchange.socket, selectors.EVENT_READ, exchange)
    asked, due = 0, began
    while bodies or len(requests) < asked:
        while bodies and free and due <= time.monotonic():
            free.popleft().ask(bodies.pop())
            asked += 1
            due = began + asked / rate if rate else began
        pause = max(0.0, due - time.monotonic()) if bodies and free else None
        for key, _ in selector.select(pause):
            exchange = key.data
            if not exchange.read():
                continue
            if not exchange.received.startswith(b"HTTP/1.1 200"):
                sys.exit(exchange.received.decode())
            requests.append({"start": exchange.asked, "arrivals": exchange.arrivals})
            free.append(exchange)
    print(json.dumps(requests))


if __name__ == "__main__":
    main()
