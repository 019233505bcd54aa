"""Tools with the OpenAI Agents SDK; test_tools.py runs it in the clients' environment."""

import asyncio

import agents
from openai import AsyncOpenAI
from weather_task import QUESTION, City, Report, main


def run(url, name):
    """An agent that has to call its tool, and then gives an answer of a type."""
    agents.set_tracing_disabled(True)
    seen = []

    @agents.function_tool
    def weather(city: City) -> str:
        """The weather of a city."""
        seen.append(city)
        return f"Rain in {city}."

    client = AsyncOpenAI(base_url=url, api_key="KEY", max_retries=0)
    model = agents.OpenAIChatCompletionsModel(model=name, openai_client=client)
    settings = agents.ModelSettings(
        tool_choice="required", temperature=0, parallel_tool_calls=False, max_tokens=100
    )
    # After a call the SDK leaves the choice to the model, which then gives the answer.
    agent = agents.Agent(
        "Reporter", instructions="Be brief.", tools=[weather], model=model, model_settings=settings
    )
    reporter = agent.clone(
        output_type=Report, model_settings=agents.ModelSettings(tool_choice="none", max_tokens=100)
    )

    async def session():
        streamed = agents.Runner.run_streamed(agent, QUESTION, max_turns=2)
        kinds = {event.type async for event in streamed.stream_events()}
        report = await agents.Runner.run(reporter, QUESTION, max_turns=1)
        return {
            "cities": seen,
            "text": streamed.final_output,
            "events": sorted(kinds),
            "report": report.final_output.model_dump(),
        }

    return asyncio.run(session())


main(run)
