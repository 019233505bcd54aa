"""The command line of ``quire-server fetch``: arguments, progress output, and an exit code per kind of
failure.

Credentials come from the environment and files, never from arguments. Only Quire's own texts are printed, or
the type of an unexpected error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import certifi

from quire_server import config, termination
from quire_server.errors import ConfigError, QuireServerError
from quire_server.fetch import directory, progress
from quire_server.fetch.directory import Fetched, FetchRequest
from quire_server.fetch.http_client import HttpClient
from quire_server.fetch.hub import HubClient
from quire_server.fetch.local_directory import DirectoryClient
from quire_server.fetch.oci_registry import RegistryClient
from quire_server.fetch.source import Artifact, Bucket, HubModel, LocalDirectory, SourceClient, parse
from quire_server.fetch.transfer import RetryPolicy
from quire_server.termination import Failure

_MAX_RESULT_BYTES = 4000  # the kubelet cuts a termination message at 4096
_CA_VARIABLES = ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Fetch, and return the exit code."""
    wanted = parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_at_once)
    log_path = Path(environ.get("QUIRE_TERMINATION_LOG", config.ServeConfig.termination_log))
    try:
        fetched = _fetch(wanted)
    except QuireServerError as error:
        failure = termination.failure_of(error)
    except Exception as error:  # its text may contain a signed URL, so only its type is shown
        sys.stderr.write("".join(traceback.format_tb(error.__traceback__)))
        failure = Failure(
            termination.Reason.MODEL_DOWNLOAD_FAILED,
            f"The download met an unexpected {type(error).__name__}. It is tried again; report it with "
            "the log.",
        )
    else:
        _write_result(log_path, fetched)
        return 0
    termination.write_termination_log(log_path, failure)
    sys.stderr.write(f"quire-server: {failure.message}\n")
    return failure.exit_code


def _exit_at_once(number: int, _: object) -> None:
    """Without a handler pid 1 of a container ignores the signal, and Ctrl-C waits for threads. A later run
    resumes.
    """
    os._exit(128 + number)


def _fetch(wanted: argparse.Namespace) -> Fetched:
    source = parse(wanted.source)
    trust(os.environ)
    client = _client(source, wanted)
    counted = progress.Progress()
    to, retry = wanted.to.absolute(), _retry_policy(wanted)
    request = FetchRequest(wanted.source, to, wanted.parallel, retry, is_adapter=wanted.adapter)
    server = None if wanted.status_port is None else progress.serve(counted, wanted.status_port)
    try:
        with progress.Reporter(counted, _say, wanted.progress_file):
            fetched = directory.fetch(client, request, counted)
            counted.begin("done", fetched.size)
            for name, entry in fetched.files.items():
                counted.at(name, entry.size)
    finally:
        client.close()
        if server is not None:
            server.shutdown()
            server.server_close()
    _say(f"{json.dumps(_result(fetched))}\n")
    return fetched


def _retry_policy(wanted: argparse.Namespace) -> RetryPolicy:
    return RetryPolicy(wanted.attempts, stall_seconds=wanted.stall_timeout_seconds)


def _client(
    source: HubModel | Bucket | Artifact | LocalDirectory, wanted: argparse.Namespace
) -> SourceClient:
    stall_seconds = wanted.stall_timeout_seconds
    match source:
        case HubModel():
            return HubClient(HttpClient(stall_seconds), source, os.environ)
        case Artifact():
            return RegistryClient(HttpClient(stall_seconds), source, os.environ)
        case LocalDirectory():
            return DirectoryClient(source, wanted.root)
    # Imported on demand: the two SDKs take a second, and only these sources need them.
    buckets = importlib.import_module("quire_server.fetch.buckets")
    client: SourceClient = buckets.BucketClient(source, os.environ, stall_seconds, anonymous=wanted.anonymous)
    return client


def trust(environ: MutableMapping[str, str]) -> None:
    """Use one CA bundle for all clients, which read it from different variables."""
    bundle = environ.get("SSL_CERT_FILE") or certifi.where()
    if not os.access(bundle, os.R_OK):
        raise ConfigError("SSL_CERT_FILE names a file that cannot be read. Mount the CA bundle there.")
    for name in _CA_VARIABLES:
        environ.setdefault(name, bundle)


def _result(fetched: Fetched) -> dict[str, object]:
    return {
        "reason": "Fetched",
        "digest": fetched.digest,
        "revision": fetched.revision,
        "totalBytes": fetched.size,
        "files": {name: entry.sha256 for name, entry in sorted(fetched.files.items())},
    }


def _write_result(path: Path, fetched: Fetched) -> None:
    """Write the result for the operator, which can do without it. If there are too many files, without their
    digests.
    """
    result = _result(fetched)
    if len(json.dumps(result)) > _MAX_RESULT_BYTES:
        del result["files"]
    try:
        if path.exists():
            path.write_text(json.dumps(result), encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"quire-server: {path} cannot be written: {error.strerror}\n")


def _say(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def parser() -> argparse.ArgumentParser:
    """The argument parser; a contract test parses the operator's arguments with it."""
    built = argparse.ArgumentParser(
        prog="quire-server fetch",
        allow_abbrev=False,
        description="Download a model into a directory that appears when it is whole and checked. "
        "Run again, it continues; over a directory that is there, it checks every file and "
        "fetches again what differs.",
        epilog="Exit codes: 2 configuration, 65 other bytes than promised, 66 not found, 69 network, 73 "
        "disk, 77 access denied. Credentials: HF_TOKEN or HF_TOKEN_PATH; AWS_*; "
        "GOOGLE_APPLICATION_CREDENTIALS; "
        "DOCKER_CONFIG. Also honoured: HF_ENDPOINT, AWS_ENDPOINT_URL, HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE.",
    )
    built.add_argument(
        "source",
        metavar="SOURCE",
        help="hf://org/name@revision, s3://bucket/prefix, gs://bucket/prefix, "
        "oci://registry/repository:tag or file:///directory",
    )
    built.add_argument("--to", required=True, type=Path, metavar="DIR", help="the model's directory")
    built.add_argument("--parallel", type=_count, default=4, help="files at a time (default: 4)")
    built.add_argument(
        "--attempts", type=_count, default=8, help="tries of one file without progress (default: 8)"
    )
    built.add_argument(
        "--stall-timeout-seconds",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="a connection that gives no byte, or less than 4 KiB/s, for this long is given up and tried "
        "again (default: 60)",
    )
    built.add_argument(
        "--progress-file", type=Path, metavar="FILE", help="keeps the newest progress, as JSON"
    )
    built.add_argument(
        "--anonymous", action="store_true", help="read a public bucket, without any credentials"
    )
    built.add_argument(
        "--adapter",
        action="store_true",
        help="the source is a LoRA adapter: fetch adapter_config.json and adapter_model.safetensors alone",
    )
    built.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="a file:// source lies in it, links resolved (default: /)",
    )
    built.add_argument(
        "--status-port",
        type=_port,
        metavar="PORT",
        help="answers GET /statusz with the progress while it runs",
    )
    return built


def _count(text: str) -> int:
    if not 1 <= int(text) <= 64:
        raise ValueError
    return int(text)


def _seconds(text: str) -> float:
    if not 0.1 <= float(text) <= 3600:
        raise ValueError
    return float(text)


def _port(text: str) -> int:
    if not 1 <= int(text) <= 65_535:
        raise ValueError
    return int(text)
