"""Fixtures of the tests of what a running server answers."""

import pytest

from tests.server import tiny_model
from tests.server.launch import Server

# As Qwen 3's: tools, a switch, and a thought that the model begins.
TEMPLATE = """{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}"""

MAX_AGE = 1.0  # seconds of a connection to the server without keys


@pytest.fixture(scope="session")
def keyless(tiny, tmp_path_factory):
    """A server without keys that logs all there is to log, and whose connections and blocks are small."""
    directory = tmp_path_factory.mktemp("keyless")
    (directory / "patterns").write_text("# cards\n\\d{4}-\\d{4}\n\n")
    flags = ["--log-level", "debug", "--log-requests", "content", "--max-log-len", "30"]
    flags += ["--log-redact-path", str(directory / "patterns")]
    flags += ["--scheduling-policy", "priority", "--block-size", "1"]
    flags += ["--max-connection-age-seconds", f"{MAX_AGE:g}"]
    with Server(tiny, directory, *flags) as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def thinking(tmp_path_factory):
    """A model that thinks, with drafts."""
    directory = tmp_path_factory.mktemp("thinking")
    model = tiny_model.write(directory / "model", tokens=("<think>", "</think>"))
    (directory / "template.jinja").write_text(TEMPLATE)
    flags = ["--chat-template", str(directory / "template.jinja"), "--speculative-method", "ngram"]
    with Server(model, directory, *flags) as server:
        yield server.wait_ready()
