"""curl: every request on a page is sent as it stands there, and answered."""

import json
import re
import shlex
import subprocess

import pytest

from tests.server import adapter_files
from tests.server.clients.conftest import MODEL, ROOT, SHOWN_URL, code_blocks
from tests.server.conftest import ADMIN_KEY, KEY
from tests.server.launch import Server

PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
COMMANDS = [
    pytest.param(
        command,
        id=f"{page} {number}",
        marks=pytest.mark.deep if '"watermark": true' in command else [],  # it asks for 200 tokens
    )
    for page in PAGES
    for number, command in enumerate(
        found
        for language in ("", "bash", "sh")
        for block in code_blocks(page, language)
        for found in re.findall(r"^curl [^\n]*/v1/(?!jobs).*?(?<=')$", block, flags=re.M | re.S)
    )
]
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def adapter_server(tiny, tmp_path_factory):
    """With the adapter of docs/adapters.md."""
    directory = tmp_path_factory.mktemp("adapter-server")
    adapter_files.write(directory / "adapters" / "support", tiny)
    (directory / "keys").mkdir()
    (directory / "keys" / "client").write_text(KEY)
    (directory / "keys" / "admin").write_text(f"{ADMIN_KEY}\nadmin: true")
    folders = ("--adapters-dir", directory / "adapters", "--api-keys-dir", directory / "keys")
    with Server(tiny, directory, "--max-adapters", "4", *map(str, folders)) as server:
        server.wait_ready()
        server.wait(
            "the adapter", lambda: [one["state"] for one in server.statusz()["adapters"]] == ["Ready"]
        )
        yield server


def words(command, url):
    keys = command.replace("$ADMIN_KEY", ADMIN_KEY).replace("$KEY", KEY)
    return [
        re.sub(rf"{SHOWN_URL}|http://{MODEL}(?=/)|^localhost:8000", url, word)
        for word in shlex.split(keys.replace("\\\n", " "))
    ]


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def curl(server, body, *flags, key=KEY):
    url = server.url + "/v1/chat/completions"
    return ["curl", *flags, url, "-H", f"Authorization: Bearer {key}", "--json", json.dumps(body)]


def events(text):
    *lines, last = [line for line in text.split("\n\n") if line]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_curl_command_of_the_documentation_is_answered(request, command):
    if any(path in command for path in ("/v1/embeddings", "/v1/rerank")):
        server = request.getfixturevalue("embedding_server")
        answer = json.loads(run(words(command, server.url)))
        assert answer["model"] == MODEL and (answer.get("data") or answer.get("results")), answer
        return
    if '"support"' in command:
        answer = json.loads(run(words(command, request.getfixturevalue("adapter_server").url)))
        assert answer == {} if "load_lora_adapter" in command else answer["model"] == "support", answer
        return
    smollm2_server = request.getfixturevalue("smollm2_server")
    output = run(words(command, smollm2_server.url))
    answers = events(output) if '"stream": true' in command else [json.loads(output)]
    by_path = {"/v1/messages": "content", "/v1/responses": "output"}
    content = next((name for path, name in by_path.items() if path in command), "choices")
    assert all(content in answer for answer in answers), output
    assert answers[0]["model"] == MODEL
    if "capital of France?" in command:
        assert "Paris" in output


def test_the_documentation_has_curl_commands():
    pages = {param.id.split()[0] for param in COMMANDS}
    assert {"README.md", "docs/clients.md", "docs/sampling.md"} <= pages
    assert len(COMMANDS) >= 9


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_of_the_documentation_may_be_answered_without_end(command):
    assert "/chat/completions" not in command or '"max_tokens"' in command


def test_a_stream_arrives_while_the_answer_is_generated_and_ends_with_its_usage(server):
    body = {**CHAT, "max_tokens": 1000, "stream": True, "stream_options": {"include_usage": True}}
    with subprocess.Popen(curl(server, body, "-sN"), stdout=subprocess.PIPE, text=True) as reader:
        first = reader.stdout.readline()
        still_running = server.metric("llm_running_requests")
        rest = reader.stdout.read()
    assert still_running == 1
    *_, closing, usage = events(first + rest)
    assert closing["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 1000)


@pytest.mark.parametrize(
    ("fields", "key", "status", "param", "code"),
    [
        ({"temperature": 3}, KEY, 400, "temperature", None),
        ({"surprise": 1, "stream": True}, KEY, 400, "surprise", None),
        ({"model": "gpt-9"}, KEY, 404, "model", "model_not_found"),
        ({}, "unknown-key", 401, None, "invalid_api_key"),
    ],
)
def test_an_error_has_its_status_and_a_body_with_param_and_code(server, fields, key, status, param, code):
    written = run(curl(server, {**CHAT, **fields}, "-s", "-w", "\n%{http_code} %{content_type}", key=key))
    body, status_line = written.rsplit("\n", 1)
    error = json.loads(body)["error"]
    assert status_line == f"{status} application/json"
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"] and error["type"]


def test_fail_with_body_exits_with_22_on_an_error(server):
    done = subprocess.run(
        curl(server, {}, "-s", "--fail-with-body"), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 22
    assert json.loads(done.stdout)["error"]["param"] == "messages"


def test_routes_need_a_key_except_health(server):
    def status(path, *flags):
        return run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", server.url + path, *flags])

    assert status("/v1/models") == "401"
    assert status("/v1/models", "-H", f"Authorization: Bearer {KEY}") == "200"
    assert status("/v1/models", "-u", f"alice:{KEY}") == "401"
    assert status("/health") == "200"
