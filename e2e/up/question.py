"""Asks the served model one question over plain HTTP, through its Service."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.kubectl import Kubectl
from e2e.up.errors import UpError

QUESTION = "What is the capital of France?"
_PATH = "/v1/chat/completions"
# The address is on this machine: no proxy of the environment may come between.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def request_body(served_name: str) -> str:
    """The request that `ask` sends, as one line of JSON."""
    messages = [{"role": "user", "content": QUESTION}]
    return json.dumps({"model": served_name, "messages": messages, "temperature": 0, "max_tokens": 32})


def ask(url: str, served_name: str) -> str:
    """The answer's text."""
    request = urllib.request.Request(url + _PATH, data=request_body(served_name).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    try:
        with _OPENER.open(request, timeout=60) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise UpError(f"{url}{_PATH} answered {error.code}: {error.read()[:500]!r}") from None
    except OSError as error:
        raise UpError(f"{url}{_PATH} did not answer: {error}") from None
    return str(answer["choices"][0]["message"]["content"])


def wait_until_served(url: str, served_name: str, seconds: float = 60) -> None:
    """A gateway hears of a ready pod when its watch does."""
    end = time.monotonic() + seconds
    while not _is_served(url, served_name):
        if time.monotonic() > end:
            raise UpError(f"{url}/v1/models has no {served_name} after {seconds:g} s")
        time.sleep(0.2)  # between two looks at a server that is elsewhere


def _is_served(url: str, served_name: str) -> bool:
    try:
        with _OPENER.open(f"{url}/v1/models", timeout=5) as response:
            return any(card["id"] == served_name for card in json.loads(response.read())["data"])
    except OSError:  # not there yet
        return False


def service_url(kubectl: Kubectl, name: str, namespace: str) -> str:
    """The Service's own address, which this machine routes to the node."""
    service = kubectl.get("services", name, namespace)
    if service is None:
        raise UpError(f"there is no Service {name} in {namespace}")
    return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"


@contextmanager
def forwarded_url(kubectl: Kubectl, name: str, namespace: str) -> Iterator[str]:
    """A port of this machine that leads to the Service, for clusters whose addresses are not routed here."""
    argv = kubectl.argv("port-forward", "-n", namespace, f"service/{name}", ":80", "--address=127.0.0.1")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = re.search(r"127\.0\.0\.1:(\d+)", line)
            if port is None:
                raise UpError(f"kubectl port-forward service/{name}: {line.strip()}")
            yield f"http://127.0.0.1:{port[1]}"
        finally:
            process.terminate()
