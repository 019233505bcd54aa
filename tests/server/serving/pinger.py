"""Another key's client: asks for /v1/models again and again, over a connection that it keeps and over new
ones in turn.

`python -m tests.server.serving.pinger PORT KEY` is a process of its own, so that what the test does delays
nothing here. It says when it is ready. A line on its input begins a round and the next one ends it: then it
prints the latencies, in seconds, as a JSON list; null stands for an answer that is no 200.
"""

import contextlib
import http.client
import json
import sys
import threading
import time

_PERIOD = 0.004
_TIMEOUT = 10.0


def _ask(connection, key):
    """Seconds that one answer took, or None where it is none."""
    begun = time.perf_counter()
    try:
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
        with connection.getresponse() as response:
            response.read()
            return time.perf_counter() - begun if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        connection.close()
        return None


def _round(port, key, latencies, over):
    """Collects latencies until the end of the round."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)) as kept:
        while not latencies or not over.wait(_PERIOD):
            latencies.append(_ask(kept, key))
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)) as new:
                latencies.append(_ask(new, key))


def main(port, key):
    _say("ready")
    while sys.stdin.readline():
        latencies, over = [], threading.Event()
        pinging = threading.Thread(target=_round, args=(port, key, latencies, over))
        pinging.start()
        sys.stdin.readline()
        over.set()
        pinging.join()
        _say(json.dumps(latencies))


def _say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
