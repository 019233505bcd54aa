"""A client with minimal cost: bench/minimal_client.py PORT CLIENTS REQUESTS.jsonl [RATE]

One process, one thread, plain sockets, and no parsing beyond the end of a response, so that the server is
measured almost without a load generator. Each line of the file is the body of a request. Prints JSON: when
each request was sent and when parts of its answer arrived, in seconds. With RATE that many requests a second
are sent, evenly spaced, each on a free connection; without it each connection sends its next one at once.
Started by ``bench.http_load``.
"""

import json
import selectors
import socket
import sys
import time
from pathlib import Path


class Exchange:
    """One connection: a request and what has been received."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, body: bytes) -> None:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
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
        length = head.partition(b"content-length: ")[2].split(b"\r\n")[0]
        return bool(found) and len(body) == int(length)


def main() -> None:
    port, clients = int(sys.argv[1]), int(sys.argv[2])
    bodies = Path(sys.argv[3]).read_bytes().splitlines()[::-1]
    rate = float(sys.argv[4]) if len(sys.argv) > 4 else None
    selector, began = selectors.DefaultSelector(), time.monotonic()
    requests: list[dict[str, object]] = []
    free = [Exchange(port) for _ in range(clients)]
    for exchange in free:
        selector.register(exchange.socket, selectors.EVENT_READ, exchange)
    asked, due = 0, began
    while bodies or len(requests) < asked:
        while bodies and free and due <= time.monotonic():
            free.pop().ask(bodies.pop())
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
