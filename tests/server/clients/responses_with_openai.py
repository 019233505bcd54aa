"""A session of programs that use OpenAI's Responses: openai-python, and the Agents SDK as it is.

responses_with_openai.py URL MODEL    prints the results as JSON; test_responses.py runs it
"""

import asyncio
import json
import sys

import agents
import openai
from weather_task import QUESTION, City, Report, Weather

CAPITAL = "What is the capital of France?"


def main(url, name):
    """Run all calls and print their results."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="KEY", max_retries=0)
    common = {"model": name, "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**common, input=CAPITAL, instructions="Be brief.")
    with client.responses.stream(**common, input=CAPITAL, instructions="Be brief.") as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    again = client.responses.create(
        **common, input="In which country is that?", previous_response_id=whole.id, instructions="Be brief."
    )
    parsed = client.responses.parse(**{**common, "max_output_tokens": 100}, input=CAPITAL, text_format=Report)
    kept = client.responses.retrieve(whole.id).output_text
    client.responses.delete(whole.id)
    found = {
        "whole": whole.output_text,
        "streamed": streamed.output_text,
        "tokens": [whole.usage.output_tokens, streamed.usage.output_tokens],
        "events": kinds,
        "again": again.output_text,
        "kept": kept,
        "report": parsed.output_parsed.model_dump(),
        "called": called(client, name),
        "errors": errors(client, common, whole.id),
        "agent": asyncio.run(agent(url, name)),
    }
    sys.stdout.write(json.dumps(found))


def called(client, name):
    """The arguments of a call that has to be made, parsed by the library, and the answer to its result."""
    tools = [openai.pydantic_function_tool(Weather, name="weather")["function"] | {"type": "function"}]
    asked = [{"role": "user", "content": QUESTION}]
    fields = {"model": name, "tools": tools, "max_output_tokens": 100, "temperature": 0}
    response = client.responses.parse(
        **fields, input=asked, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = response.output
    asked += [call.model_dump(exclude={"parsed_arguments"}, exclude_none=True)]
    asked.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain."})
    answer = client.responses.create(**fields, input=asked, tool_choice="none")
    return [json.loads(call.arguments)["city"], answer.output_text]


def errors(client, common, deleted):
    """The library's exceptions, and the fields that they name."""
    found = {}
    for fields in (
        {"temperature": 9},
        {"model": "gpt-9"},
        {"background": True},
        {"previous_response_id": deleted},
    ):
        try:
            client.responses.create(**{**common, **fields}, input=CAPITAL)
        except openai.APIStatusError as error:
            found[error.param] = type(error).__name__
    return found


async def agent(url, name):
    """The Agents SDK as it is: its default model of a client is that of Responses."""
    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="KEY", max_retries=0))
    seen = []

    @agents.function_tool
    def weather(city: City) -> str:
        """The weather of a city."""
        seen.append(city)
        return f"Rain in {city}."

    settings = agents.ModelSettings(
        tool_choice="required", temperature=0, parallel_tool_calls=False, max_tokens=100
    )
    reporter = agents.Agent(
        "Reporter", instructions="Be brief.", tools=[weather], model=name, model_settings=settings
    )
    streamed = agents.Runner.run_streamed(reporter, QUESTION, max_turns=2)
    kinds = {event.type async for event in streamed.stream_events()}
    typed = agents.Agent(
        "Typed", model=name, output_type=Report, model_settings=agents.ModelSettings(max_tokens=100)
    )
    report = await agents.Runner.run(typed, QUESTION, max_turns=1)
    return {
        "cities": seen,
        "text": streamed.final_output,
        "events": sorted(kinds),
        "report": report.final_output.model_dump(),
    }


main(*sys.argv[1:])
