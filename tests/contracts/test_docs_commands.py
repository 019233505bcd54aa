"""The commands on the pages: the server accepts the requests, the API the patches."""

import json
import re
from pathlib import Path

import pytest

from e2e.api.specs import merged, minimal
from quire_operator import spec
from quire_server.api.protocol.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from quire_server.api.protocol.messages import parse_messages
from quire_server.api.protocol.openai_responses import parse_responses
from quire_server.api.protocol.requests import LoadAdapterRequest, parse_chat, parse_completion
from quire_server.api.protocol.validation import validate
from quire_server.model_dir.generation_config import SamplingDefaults

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
TEXTS = {page.name: page.read_text() for page in PAGES}
REQUESTS = [
    pytest.param(path, body, id=f"{name} {path}")
    for name, text in TEXTS.items()
    for path, body in re.findall(r"curl [^\n]*/v1/(\S+) [^`]*?-d '(\{.*?\})'", text, flags=re.DOTALL)
]
POOLING = {"embeddings": EmbeddingRequest, "rerank": RerankRequest, "score": ScoreRequest}
PATCHES = [
    pytest.param(patch, id=f"{name} {number}")
    for name, text in TEXTS.items()
    for number, patch in enumerate(re.findall(r"kubectl patch llmdep [^`]*?-p[\s\\]*'(\{.*?\})'", text))
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_the_server_accepts_every_request_on_a_page(path, body):
    document = json.loads(body)
    if path == "jobs":  # which has a request in it
        path, document = document["endpoint"].removeprefix("/v1/"), document["body"]
    if path in POOLING:
        validate(POOLING[path], document, 100)
        return
    if path == "responses":
        parse_responses(document, 100).to_call(SamplingDefaults(), 100, lambda _: None)
        return
    if path == "load_lora_adapter":
        validate(LoadAdapterRequest, document)
        return
    parsers = {"chat/completions": parse_chat, "completions": parse_completion, "messages": parse_messages}
    parsers[path](document, SamplingDefaults(), vocab_size=100)


@pytest.mark.parametrize("patch", PATCHES)
def test_the_api_accepts_every_patch_on_a_page(patch):
    spec.parse(merged(minimal(), json.loads(patch)))


def test_the_pages_have_commands_to_check():
    assert len(REQUESTS) >= 2 and len(PATCHES) >= 3
