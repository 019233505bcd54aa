"""A session of a program that uses Anthropic's SDK; test_anthropic.py runs it in the clients' environment.

messages_with_anthropic.py URL MODEL    prints the results as JSON
"""

import json
import sys

import anthropic
from weather_task import QUESTION, Report

CAPITAL = {"role": "user", "content": "What is the capital of France?"}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main(url, name):
    """Run all calls and print their results."""
    client = anthropic.Anthropic(base_url=url, api_key="KEY", max_retries=0)
    common = {"model": name, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**common, messages=[CAPITAL], system="Be brief.")
    with client.messages.stream(**common, messages=[CAPITAL], system="Be brief.") as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    counted = client.messages.count_tokens(model=name, messages=[CAPITAL], system="Be brief.")
    stopped = client.messages.create(**common, messages=[CAPITAL], stop_sequences=["France"])
    report = client.messages.parse(**{**common, "max_tokens": 100}, messages=[CAPITAL], output_format=Report)
    sys.stdout.write(
        json.dumps(
            {
                "whole": message(whole),
                "streamed": message(streamed),
                "events": kinds,
                "counted": counted.input_tokens,
                "request_id": whole._request_id,
                "stopped": [stopped.stop_reason, stopped.stop_sequence],
                "report": report.parsed_output.model_dump(),
                **weather(client, common),
                "errors": errors(client, common),
            }
        )
    )


def message(one):
    usage = one.usage
    return {
        "text": "".join(block.text for block in one.content),
        "ended": one.stop_reason,
        "model": one.model,
        "tokens": [usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens],
    }


def weather(client, common):
    """A loop over calls, of which the first is streamed and has to be made."""
    asked = {"role": "user", "content": QUESTION}
    with client.messages.stream(
        **{**common, "max_tokens": 100},
        messages=[asked],
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        called = stream.get_final_message()
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "Rain."}
        for block in called.content
        if block.type == "tool_use"
    ]
    messages = [asked, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    answer = client.messages.create(
        **common, messages=messages, tools=[WEATHER], tool_choice={"type": "none"}
    )
    return {
        "called": called.stop_reason,
        "cities": [block.input["city"] for block in called.content if block.type == "tool_use"],
        "pieces": len(pieces),
        "answer": message(answer)["text"],
    }


def errors(client, common):
    """The SDK's exceptions, and the types of the errors."""
    found = {}
    for fields in ({"extra_body": {"temperature": 9}}, {"model": "claude"}):
        try:
            client.messages.create(**{**common, **fields}, messages=[CAPITAL])
        except anthropic.APIStatusError as error:
            found[type(error).__name__] = error.body["error"]["type"]
    return found


main(*sys.argv[1:])
