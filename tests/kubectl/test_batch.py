"""`kubectl quire batch`: progress as the gateway says it, and no key in an argument."""

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from e2e.http_server import HttpServer
from quire_kubectl.__main__ import main


def batch(number: int, status: str = "in_progress", **more: Any) -> dict[str, Any]:
    return {
        "id": f"batch_{number}",
        "status": status,
        "created_at": int(time.time()) - 3 * 3600,
        "request_counts": {"total": 200, "completed": 95, "failed": 5},
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file-1",
        "output_file_id": None,
        "error_file_id": None,
        "errors": None,
        **more,
    }


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What it answers, by path; `keys`: those that it was asked with."""
    answers: dict[str, Any] = {"keys": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers["keys"].append(self.headers["authorization"])
            status, body = answers.get(self.path, (404, {"error": {"message": f"There is no {self.path}."}}))
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    with HttpServer(("127.0.0.1", 0), Handler) as server:
        server.start()
        monkeypatch.setenv("QUIRE_GATEWAY_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.delenv("QUIRE_API_KEY", raising=False)
        yield answers
        server.shutdown()


def test_batches_are_listed_with_their_progress(
    gateway: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "sk-alice")
    page = {"data": [batch(2), batch(1, "completed")], "has_more": True}
    gateway["/v1/batches?limit=100"] = (200, page)
    assert main(["batch"]) == 0
    heading, first, second, rest = capsys.readouterr().out.splitlines()
    assert heading.split() == ["ID", "STATUS", "PROGRESS", "FAILED", "AGE"]
    assert first.split() == ["batch_2", "in_progress", "100/200", "5", "3h"]
    assert second.split()[1] == "completed" and "older" in rest
    assert gateway["keys"] == ["Bearer sk-alice"]


def test_one_batch_says_which_lines_are_wrong(
    gateway: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {"data": [{"line": 7, "message": "url: must be\x1b[2J another"}]}
    gateway["/v1/batches/batch_1"] = (200, batch(1, "failed", errors=errors))
    key = tmp_path / "key"
    key.write_text("sk-bob\n")
    assert main(["batch", "batch_1", "--key-file", str(key)]) == 0
    out = capsys.readouterr().out
    assert "batch_1: failed" in out and "[############............] 100/200, 5 failed" in out
    assert "line 7: url: must be?[2J another" in out
    assert gateway["keys"] == ["Bearer sk-bob"]
    assert main(["batch", "batch_1", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "batch_1"


def test_what_fails_is_one_sentence(
    gateway: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway["/v1/batches?limit=100"] = (401, {"error": {"message": "The API key is not valid."}})
    gateway["/v1/batches/batch_2"] = (200, b"<html>")
    for arguments, said in (
        ([], "the gateway says: The API key is not valid."),
        (["batch_9"], "There is no /v1/batches/batch_9."),
        (["batch_2"], "does not answer as a gateway"),
        (["../x"], "the id of a batch begins with batch_"),
        (["--gateway", "ftp://x"], "is no http or https URL"),
        (["--gateway", "http://127.0.0.1:1"], "does not answer as a gateway"),
        (["--key-file", "/nowhere"], "/nowhere cannot be read"),
    ):
        assert main(["batch", *arguments]) == 1
        assert said in capsys.readouterr().err
    monkeypatch.delenv("QUIRE_GATEWAY_URL")
    assert main(["batch"]) == 1
    assert "--gateway" in capsys.readouterr().err
