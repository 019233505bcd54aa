"""The real quire-batch, `python -m quire_batch`, and tokens such as a gateway signs for it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from openai import OpenAI

from e2e.ports import free_port
from quire_gateway.request_signing import RequestSigner
from tests.server.launch import HANG_SECONDS, NO_TLS

CHAT = "/v1/chat/completions"


def write_keys(directory):
    """A gateway's private key, and its public one in `public`."""
    key = Ed25519PrivateKey.generate()
    (directory / "public").mkdir(parents=True)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / "tls.key").write_bytes(private)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (directory / "public" / "current.pem").write_bytes(public)
    return directory


def wait(what, condition, seconds=HANG_SECONDS):
    """Until the condition is true; what it is then."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        time.sleep(0.02)  # between two looks at another process
    return value


def line(number, *, custom_id=None, url=CHAT, method="POST", **body):
    """A line of an input file."""
    content = body.pop("content", f"question {number}")
    message = {"model": "tiny", "messages": [{"role": "user", "content": content}], **body}
    return {"custom_id": custom_id or f"line-{number}", "method": method, "url": url, "body": message}


def jsonl(*lines):
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


class Batch:
    """A running quire-batch; `kill` and `start` are one of its crashes. ``within``: a command that runs it in
    the same process, elsewhere.
    """

    def __init__(self, gateway_url, keys, directory, within=(), **environ):
        self.port = free_port()
        self.directory = directory
        self.log = keys / f"batch-{self.port}.log"
        self.url = f"http://127.0.0.1:{self.port}"
        environ = {f"QUIRE_BATCH_{name}": str(value) for name, value in environ.items()}
        self._environ = {
            "QUIRE_BATCH_GATEWAY_URL": gateway_url,
            "QUIRE_BATCH_GATEWAY_KEYS_DIR": str(keys / "public"),
            "QUIRE_BATCH_DIR": str(directory),
            "QUIRE_BATCH_HOST": "127.0.0.1",
            "QUIRE_BATCH_PORT": str(self.port),
            "QUIRE_BATCH_WORKER": "worker-0",
            **environ,
        }
        self._argv = [*within, "setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "quire_batch"]
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.kill()

    def start(self):
        with self.log.open("ab") as log:
            environ = {**os.environ, **self._environ}
            self.process = subprocess.Popen(self._argv, env=environ, stdout=log, stderr=log)
        return self

    def wait_ready(self):
        wait("quire-batch is ready", self._is_ready)
        return self

    def _is_ready(self):
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz", verify=NO_TLS).status_code == 200
        return False

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(HANG_SECONDS)

    def metric(self, name, **labels):
        """The value of a metric, 0 where there is none yet."""
        text = httpx.get(f"{self.url}/metrics", verify=NO_TLS).text
        wanted = name + (
            "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
        )
        found = [row.rpartition(" ")[2] for row in text.splitlines() if row.startswith(f"{wanted} ")]
        return float(found[0]) if found else 0.0


class Signed(httpx.Auth):
    """Signs each request as a gateway does, for one client."""

    def __init__(self, signer, client):
        self._signer, self._client = signer, client

    def auth_flow(self, request):
        request.headers.pop("authorization", None)
        request.headers["x-quire-gateway-token"] = self._signer.for_batch(self._client)
        request.headers["x-quire-delegation"] = f"delegation of {self._client}"
        yield request


class Signer:
    """Tokens of a gateway whose keys are in a directory."""

    def __init__(self, keys):
        self._signer = RequestSigner(keys / "tls.key")

    def for_batch(self, client):
        return self._signer.signed({"aud": "quire-batch", "client": client}, 30)


_clients = []


def http_client(**options):
    """One that is closed at the end of the test."""
    _clients.append(httpx.Client(verify=NO_TLS, timeout=60, **options))
    return _clients[-1]


def close_clients():
    """All that a test has used."""
    while _clients:
        _clients.pop().close()


def sdk(batch, signer, client="models/alice"):
    """OpenAI's SDK, as a client behind the gateway."""
    http = http_client(auth=Signed(signer, client))
    return OpenAI(base_url=f"{batch.url}/v1", api_key="none", http_client=http, max_retries=0)


def submit(client, *lines, content=None, endpoint=CHAT, **more):
    """A batch of these lines."""
    data = jsonl(*lines) if content is None else content
    file = client.files.create(file=("input.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


OVER = ("completed", "failed", "expired", "cancelled")


def wait_over(client, batch_id, seconds=HANG_SECONDS):
    """The batch when it is over."""

    def over():
        found = client.batches.retrieve(batch_id)
        return found if found.status in OVER else None

    return wait("the batch is over", over, seconds)


def lines_of(client, file_id):
    """The lines of an output or error file."""
    text = client.files.content(file_id).read() if file_id else b""
    return [json.loads(one) for one in text.splitlines()]
