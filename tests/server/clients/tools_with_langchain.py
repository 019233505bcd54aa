"""Tools with LangChain; test_tools.py runs it in the clients' environment."""

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from weather_task import QUESTION, City, Report, main


def run(url, name):
    """bind_tools, and the conversation with the result."""

    @tool
    def weather(city: City) -> str:
        """The weather of a city."""
        return f"Rain in {city}."

    model = ChatOpenAI(base_url=url, api_key="KEY", model=name, max_retries=0, temperature=0, max_tokens=400)
    bound = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    messages = [HumanMessage(QUESTION)]
    called = bound.invoke(messages)
    streamed = None
    for chunk in bound.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    results = [weather.invoke(call) for call in called.tool_calls]
    assert all(isinstance(one, ToolMessage) for one in results)
    final = model.bind_tools([weather]).bind(tool_choice="none").invoke([*messages, called, *results])
    return {
        "cities": [call["args"]["city"] for call in called.tool_calls],
        "text": final.content,
        "streamed": [call["args"]["city"] for call in streamed.tool_calls],
        "report": model.with_structured_output(Report, method="function_calling")
        .invoke(QUESTION)
        .model_dump(),
    }


main(run)
