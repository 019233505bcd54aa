"""``kubectl quire batch``: the batches of a client, and how far they are, as the gateway says.

Asks its HTTP API with a key of the client's: batches are no objects of the cluster. The key comes from the
environment or a file, and never from an argument, which others on the machine can read.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire_kubectl.kubectl import KubectlError

_URL, _KEY = "QUIRE_GATEWAY_URL", "QUIRE_API_KEY"
_SECONDS = 30.0
_MOST_BYTES = 8 << 20
_ID = re.compile(r"batch_[A-Za-z0-9_-]{1,58}")
_BAR_CELLS = 24
_UNITS = ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s"))
Document = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No argument takes a key."""
    parser.add_argument("id", nargs="?", metavar="ID", help="one batch; without it all are listed")
    parser.add_argument(
        "--gateway",
        metavar="URL",
        default=os.environ.get(_URL, ""),
        help=f"such as http://127.0.0.1:8080 after kubectl port-forward; default: {_URL}",
    )
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help=f"has the client's key; default: what {_KEY} has"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def run(arguments: argparse.Namespace) -> int:
    """Always 0; what fails is raised."""
    if not arguments.gateway:
        raise KubectlError(f"which gateway? Name it with --gateway, or set {_URL}")
    if arguments.id is not None and not _ID.fullmatch(arguments.id):
        raise KubectlError(f"{arguments.id}: the id of a batch begins with batch_")
    path = f"/v1/batches/{arguments.id}" if arguments.id else "/v1/batches?limit=100"
    answer = _ask(arguments.gateway, path, _key(arguments.key_file))
    if arguments.output == "json":
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    elif arguments.id:
        sys.stdout.write(detail(answer))
    else:
        sys.stdout.write(table(answer["data"], time.time()))
        if answer["has_more"]:
            sys.stdout.write("... and older ones\n")
    return 0


def table(batches: Sequence[Document], now: float) -> str:
    """A line for each batch, the newest first."""
    rows = [("ID", "STATUS", "PROGRESS", "FAILED", "AGE")]
    for one in batches:
        rows.append((one["id"], one["status"], _progress(one), _failed(one), age(now - one["created_at"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines) if batches else "No batches.\n"


def detail(one: Document) -> str:
    """All of one batch."""
    counts = one["request_counts"]
    over = counts["completed"] + counts["failed"]
    filled = _BAR_CELLS * over // counts["total"] if counts["total"] else 0
    bar = "#" * filled + "." * (_BAR_CELLS - filled)
    facts = {
        "progress": f"[{bar}] {_progress(one)}, {_failed(one)} failed",
        "endpoint": one["endpoint"],
        "input": one["input_file_id"],
        "output": one["output_file_id"] or "-",
        "errors": one["error_file_id"] or "-",
    }
    lines = [f"{one['id']}: {one['status']}", *(f"  {name:<10}{value}" for name, value in facts.items())]
    for error in (one["errors"] or {}).get("data", ())[:10]:
        where = f"line {error['line']}: " if error["line"] else ""
        lines.append(f"  {where}{error['message']}")
    return "".join(f"{_printable(line)}\n" for line in lines)


def age(seconds: float) -> str:
    """In its largest unit."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return "0s"


def _progress(one: Document) -> str:
    counts = one["request_counts"]
    return f"{counts['completed'] + counts['failed']}/{counts['total']}"


def _failed(one: Document) -> str:
    return str(one["request_counts"]["failed"])


def _printable(text: str) -> str:
    """What a client has written moves no cursor."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _key(path: Path | None) -> str:
    if path is None:
        return os.environ.get(_KEY, "").strip()
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise KubectlError(f"{path} cannot be read: {error}") from None


def _ask(url: str, path: str, key: str) -> Document:
    """What the gateway answers. Raises KubectlError with its own words."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise KubectlError(f"{url}: is no http or https URL")
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    headers: Mapping[str, str] = {"authorization": f"Bearer {key}"} if key else {}
    try:
        connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=_SECONDS)
        connection.request("GET", parts.path.rstrip("/") + path, headers=dict(headers))
        response = connection.getresponse()
        body = json.loads(response.read(_MOST_BYTES))
        connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise KubectlError(f"{url} does not answer as a gateway: {error}") from None
    if response.status != 200 or not isinstance(body, dict):
        said = body.get("error") if isinstance(body, dict) else None
        message = said.get("message") if isinstance(said, dict) else f"HTTP {response.status}"
        raise KubectlError(_printable(f"the gateway says: {message}"))
    return body
