"""LangChain's OpenAI models: one session in the clients' own environment, read line by line."""

import pytest

from tests.server.clients.conftest import MODEL, SHOWN_URL, blocks


@pytest.fixture(scope="module")
def told(smol, session):
    return session("langchain_session.py", smol.url, MODEL)


def test_a_stream_adds_up_to_what_invoke_gives_with_the_same_usage(told):
    assert "Paris" in told["whole"]["text"]
    assert told["streamed"]["text"] == told["whole"]["text"]
    assert told["streamed"]["ended"] == told["whole"]["ended"] == "stop"
    assert told["streamed"]["model"] == told["whole"]["model"] == MODEL
    counted = {"input_tokens", "output_tokens", "total_tokens"}
    assert {name: told["streamed"]["usage"][name] for name in counted} == {
        name: told["whole"]["usage"][name] for name in counted
    }
    assert told["whole"]["usage"]["output_tokens"] > 0
    assert sum(map(bool, told["chunks"])) > 3, "it came in pieces"


def test_the_asynchronous_calls_give_the_same(told):
    assert told["asynchronous"] == [told["whole"]["text"]] * 2


def test_a_batch_is_answered_in_its_order(told):
    first, other, last = told["batch"]
    assert first == last == told["whole"]["text"] != other


def test_messages_of_all_roles_go_back_and_forth(told):
    assert "France" in told["history"]
    assert "Paris" in told["given"]


def test_a_chain_of_prompt_model_and_parser_gives_text(told):
    germany, japan = told["chain"]
    assert "Berlin" in germany and "Tokyo" in japan


def test_stop_strings_log_probabilities_and_completions_come_through(told):
    assert told["stopped"]["ended"] == "stop"
    assert told["stopped"]["text"] == told["whole"]["text"].partition("France")[0]
    assert "".join(told["tokens"]) == told["whole"]["text"]
    assert "Paris" in told["completion"]


def test_a_refused_field_is_openai_s_exception_with_its_name(told):
    assert told["error"] == "temperature"


@pytest.mark.parametrize("library", ["openai", "langchain_openai"])
def test_the_program_on_the_page_prints_the_answer(smol, stranger, library):
    (program,) = [block for block in blocks("docs/clients.md", "python") if f"from {library} import" in block]
    written = stranger("python", "-c", program.replace(SHOWN_URL, smol.url))
    assert "Paris" in written.splitlines()[0]
    if library == "langchain_openai":
        assert "Berlin" in written.splitlines()[1]
