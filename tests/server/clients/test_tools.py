"""Agent frameworks do a task in two steps: a call that has to be made, and an answer to its result."""

import pytest

from tests.server.clients.conftest import MODEL, SHOWN_URL, code_blocks

CITIES = {"Oslo", "Rome"}  # of weather_task.py


@pytest.fixture(scope="module")
def run(smollm2_server, run_session):
    def run(client):
        return run_session(f"tools_with_{client}.py", smollm2_server.url, MODEL)

    return run


def is_report(report):
    return report["sky"] in ("clear", "cloudy") and report["degrees"] in (1, 2, 3)


def test_openai_python_runs_a_loop_over_calls_and_parses_them(run):
    found = run("openai_python")
    assert found["cities"] and set(found["cities"]) <= CITIES and found["text"]
    assert set(found["streamed"]) <= CITIES and "tool_calls.function.arguments.delta" in found["events"]
    assert is_report(found["report"])


@pytest.mark.deep
def test_langchain_binds_tools_and_streams_calls(run):
    found = run("langchain")
    assert len(found["cities"]) == 1 and set(found["cities"]) <= CITIES
    assert found["streamed"] == found["cities"] and found["text"]
    assert is_report(found["report"])


@pytest.mark.deep
def test_an_agent_of_the_openai_agents_sdk_calls_and_answers_in_a_stream_and_by_a_type(run):
    found = run("openai_agents")
    assert found["cities"] and set(found["cities"]) <= CITIES and found["text"]
    assert "raw_response_event" in found["events"]
    assert is_report(found["report"])


@pytest.mark.deep
def test_an_agent_of_pydantic_ai_answers_by_its_own_tool(run):
    found = run("pydantic_ai")
    assert set(found["cities"]) <= CITIES and "final_result" in found["calls"]
    assert is_report(found["report"])


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "imported",
    [
        "from openai import OpenAI, p",
        "from langchain_openai",
        "OpenAIChatCompletionsModel",
        "from pydantic_ai import",
    ],
)
def test_the_program_of_the_documentation_calls_the_tool(smollm2_server, run_client, imported):
    (program,) = [
        block
        for block in code_blocks("docs/clients.md", "python")
        if imported in block and "weather" in block
    ]
    written = run_client("python", "-c", program.replace(SHOWN_URL, smollm2_server.url))
    assert "The weather of" in written
