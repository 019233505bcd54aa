"""OpenAI's Responses by openai-python and the Agents SDK: one session; each test checks a part of it."""

import pytest

from tests.server.clients.conftest import MODEL, SHOWN_URL, code_blocks
from tests.server.clients.test_tools import is_report


@pytest.fixture(scope="module")
def results(smollm2_server, run_session):
    return run_session("responses_with_openai.py", smollm2_server.url, MODEL)


def test_a_stream_of_openai_python_is_the_response_that_create_returns_and_goes_on(results):
    assert "Paris" in results["whole"] and results["streamed"] == results["whole"] == results["kept"]
    assert results["tokens"][0] == results["tokens"][1]
    assert results["events"][0] == "response.created" and results["events"][-1] == "response.completed"
    assert "France" in results["again"]


def test_openai_python_parses_answers_and_calls_and_raises_its_exceptions(results):
    assert is_report(results["report"])
    city, text = results["called"]
    assert city in ("Oslo", "Rome") and text
    assert results["errors"] == {
        "temperature": "BadRequestError",
        "model": "NotFoundError",
        "background": "BadRequestError",
        "previous_response_id": "BadRequestError",
    }


def test_the_agents_sdk_works_with_its_default_model(results):
    agent = results["agent"]
    assert set(agent["cities"]) <= {"Oslo", "Rome"} and agent["cities"] and agent["text"]
    assert "raw_response_event" in agent["events"] and is_report(agent["report"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("marker", "printed"),
    [("client.responses.stream", "Paris"), ("set_default_openai_client", "The weather of")],
)
def test_the_program_of_the_documentation_prints_the_answer(smollm2_server, run_client, marker, printed):
    (program,) = [block for block in code_blocks("docs/clients.md", "python") if marker in block]
    assert printed in run_client("python", "-c", program.replace(SHOWN_URL, smollm2_server.url))
