"""LangChain's OpenAI models: one session in the clients' environment; each test checks a part of it."""

import pytest

from tests.server.clients.conftest import MODEL, SHOWN_URL, code_blocks


@pytest.fixture(scope="module")
def results(smollm2_server, run_session):
    return run_session("langchain_session.py", smollm2_server.url, MODEL)


@pytest.mark.deep
def test_a_stream_equals_the_answer_of_invoke_and_has_the_same_usage(results):
    assert "Paris" in results["whole"]["text"]
    assert results["streamed"]["text"] == results["whole"]["text"]
    assert results["streamed"]["ended"] == results["whole"]["ended"] == "stop"
    assert results["streamed"]["model"] == results["whole"]["model"] == MODEL
    counted = {"input_tokens", "output_tokens", "total_tokens"}
    assert {name: results["streamed"]["usage"][name] for name in counted} == {
        name: results["whole"]["usage"][name] for name in counted
    }
    assert results["whole"]["usage"]["output_tokens"] > 0
    assert sum(map(bool, results["chunks"])) > 3, "it was not streamed"


@pytest.mark.deep
def test_asynchronous_calls_return_the_same_answer(results):
    assert results["asynchronous"] == [results["whole"]["text"]] * 2


@pytest.mark.deep
def test_a_batch_is_answered_in_order(results):
    first, other, last = results["batch"]
    assert first == last == results["whole"]["text"] != other


@pytest.mark.deep
def test_messages_of_all_roles_are_accepted(results):
    assert "France" in results["history"]
    assert "Paris" in results["given"]


@pytest.mark.deep
def test_a_chain_of_prompt_model_and_parser_gives_text(results):
    germany, japan = results["chain"]
    assert "Berlin" in germany and "Tokyo" in japan


@pytest.mark.deep
def test_stop_strings_logprobs_and_completions_work(results):
    assert results["stopped"]["ended"] == "stop"
    assert results["stopped"]["text"] == results["whole"]["text"].partition("France")[0]
    assert "".join(results["tokens"]) == results["whole"]["text"]
    assert "Paris" in results["completion"]


@pytest.mark.deep
def test_an_invalid_field_raises_openai_s_exception_with_its_name(results):
    assert results["error"] == "temperature"


@pytest.mark.deep
@pytest.mark.parametrize("library", ["openai", "langchain_openai"])
def test_the_program_of_the_documentation_prints_the_answer(smollm2_server, run_client, library):
    (program,) = [
        block
        for block in code_blocks("docs/clients.md", "python")
        if f"from {library} import" in block
        and not any(word in block for word in ("weather", "responses", "embeddings"))
    ]
    written = run_client("python", "-c", program.replace(SHOWN_URL, smollm2_server.url))
    assert "Paris" in written.splitlines()[0]
    if library == "langchain_openai":
        assert "Berlin" in written.splitlines()[1]
