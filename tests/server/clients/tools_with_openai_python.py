"""Tools with openai-python; test_tools.py runs it in the clients' environment."""

import openai
from weather_task import QUESTION, Report, Weather, main


def run(url, name):
    """A loop over calls, with the library alone, and its parse helper with tools."""
    client = openai.OpenAI(base_url=url, api_key="KEY", max_retries=0)
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    messages = [{"role": "user", "content": QUESTION}]
    seen, choice = [], "required"
    while True:
        answer = client.chat.completions.parse(
            model=name, messages=messages, tools=tools, tool_choice=choice, max_tokens=400, temperature=0
        ).choices[0]
        messages.append(answer.message)
        if answer.finish_reason != "tool_calls":
            break
        for call in answer.message.tool_calls:
            city = call.function.parsed_arguments.city
            seen.append(city)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Rain in {city}."})
        choice = "none"
    with client.chat.completions.stream(
        model=name, messages=messages[:1], tools=tools, tool_choice="required", temperature=0, max_tokens=400
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    report = client.beta.chat.completions.parse(
        model=name, messages=messages, tools=tools, response_format=Report, tool_choice="none", max_tokens=400
    )
    return {
        "cities": seen,
        "text": answer.message.content,
        "events": sorted(set(events)),
        "streamed": [call.function.parsed_arguments.city for call in final.message.tool_calls],
        "report": report.choices[0].message.parsed.model_dump(),
    }


main(run)
