"""Tools with PydanticAI; test_tools.py runs it in the clients' environment."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather_task import QUESTION, City, Report, main


def run(url, name):
    """An agent whose answer is a type: the library enforces it by a tool of its own."""
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="KEY"))
    seen = []
    agent = Agent(model, output_type=Report, retries=0, model_settings={"temperature": 0, "max_tokens": 100})

    async def once(context, tool):
        return None if seen else tool

    @agent.tool_plain(prepare=once)
    def weather(city: City) -> str:
        """The weather of a city."""
        seen.append(city)
        return f"Rain in {city}."

    result = agent.run_sync(QUESTION)
    names = [
        part.tool_name
        for message in result.all_messages()
        for part in message.parts
        if part.part_kind == "tool-call"
    ]
    return {"cities": seen, "calls": names, "report": result.output.model_dump()}


main(run)
