"""The programs of the documentation with a model that embeds texts, in the clients' environment."""

import pytest

from tests.server.clients.conftest import SHOWN_URL, code_blocks


@pytest.mark.parametrize(
    ("library", "printed"),
    [("openai", "[8, 8] 15"), ("langchain_openai", "a cat")],
    ids=["openai", "langchain"],
)
def test_the_program_of_the_documentation_prints_what_it_found(
    embedding_server, run_client, library, printed
):
    (program,) = [
        block
        for block in code_blocks("docs/clients.md", "python")
        if f"from {library} import" in block and "embeddings" in block
    ]
    assert run_client("python", "-c", program.replace(SHOWN_URL, embedding_server.url)).strip() == printed
