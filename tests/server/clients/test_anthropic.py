"""Anthropic's SDK as it is: one session in the clients' environment; each test checks a part of it."""

import pytest

from tests.server.clients.conftest import MODEL, SHOWN_URL, code_blocks


@pytest.fixture(scope="module")
def results(smollm2_server, run_session):
    return run_session("messages_with_anthropic.py", smollm2_server.url, MODEL)


def test_a_stream_of_the_sdk_is_the_message_that_create_returns(results):
    assert "Paris" in results["whole"]["text"]
    assert results["streamed"] == results["whole"]
    assert (results["whole"]["ended"], results["whole"]["model"]) == ("end_turn", MODEL)
    assert results["counted"] == results["whole"]["tokens"][0]
    assert results["request_id"]
    first, *middle, last = [kind for kind in results["events"] if kind != "text"]
    assert (first, middle[0], middle[-2:], last) == (
        "message_start",
        "content_block_start",
        ["content_block_stop", "message_delta"],
        "message_stop",
    )
    assert results["stopped"] == ["stop_sequence", "France"]


def test_the_sdk_runs_a_loop_over_calls_streams_arguments_and_parses_an_answer(results):
    assert results["called"] == "tool_use" and set(results["cities"]) <= {"Oslo", "Rome"}
    assert len(results["cities"]) == 1 and results["pieces"] > 1 and results["answer"]
    assert results["report"]["sky"] in ("clear", "cloudy")


def test_the_sdk_raises_its_exceptions(results):
    assert results["errors"] == {
        "BadRequestError": "invalid_request_error",
        "NotFoundError": "not_found_error",
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("marker", "printed"), [("stream", "Paris"), ("weather", "The weather of")])
def test_the_program_of_the_documentation_prints_the_answer(smollm2_server, run_client, marker, printed):
    (program,) = [
        block
        for block in code_blocks("docs/clients.md", "python")
        if "from anthropic import" in block and marker in block
    ]
    assert printed in run_client("python", "-c", program.replace(SHOWN_URL, smollm2_server.url))
