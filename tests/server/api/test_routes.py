"""The pages for people, and what the shell and the routes answer to paths and methods that do not exist."""

import dataclasses
import re
import time
from typing import ClassVar

import httpx
import pytest

from quire_http.drain import Drain, DrainLimits
from quire_server.api.app import create_app
from quire_server.api.auth import Keys
from quire_server.api.context import ServerContext
from quire_server.model_dir.generation_config import SamplingDefaults


class LoadingEngine:
    connected = False
    adapters: ClassVar = {}


class SmallTokenizer:
    vocab_size = 10


def make_context(**parts):
    """A server without an engine, and without keys."""
    missing = dataclasses.MISSING
    needed = [
        field.name
        for field in dataclasses.fields(ServerContext)
        if field.default is missing and field.default_factory is missing
    ]
    nothing = dict.fromkeys(needed)
    known = {
        "served_names": ("tiny", "org/other"),
        "engine": LoadingEngine(),
        "tokenizer": SmallTokenizer(),
        "defaults": SamplingDefaults(),
        "drain": Drain(DrainLimits(1, 0), time.monotonic),
        "keys": Keys(None, time.monotonic),
    }
    return ServerContext(**{**nothing, **known, **parts})


@pytest.fixture
def client():
    transport = httpx.ASGITransport(create_app(make_context()))
    return httpx.AsyncClient(transport=transport, base_url="http://quire")


async def test_the_root_page_links_to_existing_paths(client):
    page = await client.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert 5 <= page.text.count("\n") <= 15
    links = set(re.findall(r'href="([^"]+)"', page.text))
    assert links == {"docs", "openapi.json", "v1/models", "health", "metrics", "version"}
    for link in links - {"health", "metrics"}:  # these two need an engine's state
        assert (await client.get(f"/{link}")).status_code == 200, link


async def test_the_documentation_page_loads_nothing_from_other_hosts(client):
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "//" not in re.sub(r"<!--.*?-->", "", page.text), "an address with a host"
    assert '"validatorUrl": null' in page.text, "else Swagger UI sends the document to a validator of others"
    files = set(re.findall(r'(?:href|src)="([^"]+)"', page.text))
    assert files == {"docs/swagger-ui-bundle.js", "docs/swagger-ui.css", "docs/favicon-32x32.png"}
    for name in files:
        file = await client.get(f"/{name}")
        assert file.status_code == 200 and len(file.content) > 500
    assert (await client.get("/docs/main.py")).status_code == 404


async def test_the_openapi_document_and_its_page_can_be_disabled():
    transport = httpx.ASGITransport(create_app(make_context(with_docs=False)))
    async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
        for path in ("/docs", "/docs/swagger-ui.css", "/openapi.json"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/")).status_code == 200


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/version/", "//version"])
async def test_an_unknown_path_is_a_404_in_openai_s_shape(client, path):
    answer = await client.get(httpx.URL("http://quire", raw_path=path.encode()))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("PUT", "/version", "GET, HEAD"), ("GET", "/tokenize", "POST")]
)
async def test_a_wrong_method_is_a_405_that_names_the_right_one(client, method, path, allowed):
    answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_head_is_answered_as_a_get(client):
    assert (await client.head("/version")).status_code == 200


async def test_a_model_s_name_may_have_a_slash(client):
    assert (await client.get("/v1/models/org/other")).json()["id"] == "org/other"
    assert (await client.get("/v1/models/none")).status_code == 404
