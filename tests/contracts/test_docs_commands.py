"""The commands on the pages: what they send is what the server and the API take."""

import json
import re
from pathlib import Path

import pytest

from e2e.api.specs import merged, minimal
from quire_operator import spec
from quire_server.api.calls import parse_chat, parse_completion
from quire_server.api.sampling_defaults import SamplingDefaults

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
TEXTS = {page.name: page.read_text() for page in PAGES}
REQUESTS = [
    pytest.param(path, body, id=f"{name} {path}")
    for name, text in TEXTS.items()
    for path, body in re.findall(r"curl [^\n]*/v1/(\S+) [^`]*?-d '(\{.*?\})'", text, flags=re.DOTALL)
]
PATCHES = [
    pytest.param(patch, id=f"{name} {number}")
    for name, text in TEXTS.items()
    for number, patch in enumerate(re.findall(r"kubectl patch llmdep [^`]*?-p[\s\\]*'(\{.*?\})'", text))
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_request_on_a_page_is_one_that_the_server_takes(path, body):
    parse = parse_chat if path == "chat/completions" else parse_completion
    parse(json.loads(body), SamplingDefaults(), vocab_size=100)


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_on_a_page_is_one_that_the_api_takes(patch):
    spec.parse(merged(minimal(), json.loads(patch)))


def test_there_are_commands_to_check():
    assert len(REQUESTS) >= 2 and len(PATCHES) >= 3
