"""Servers of buckets, and what is put into a bucket."""

import shutil
import subprocess
import time
from pathlib import Path

import httpx

BIN = Path(__file__).parents[3] / ".cluster/bin"
KEY, SECRET = "AKIACANARYKEY", "s3-canary-secret"


class running:
    """A server that runs until the block ends."""

    def __init__(self, port: int, *command: object) -> None:
        self._port = port
        self._command = [str(part) for part in command]

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self._port}/")
                return
            except httpx.TransportError:
                assert self._process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def publish(bucket: Path, name: str, files: dict[str, bytes]) -> Path:
    directory = bucket / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for file, data in files.items():
        (directory / file).write_bytes(data)
    return directory


def s3_environment(endpoint: str, secret: str = SECRET) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
    }
