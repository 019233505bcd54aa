"""A session of a program that uses LangChain; test_langchain.py runs it in the clients' environment.

langchain_session.py URL MODEL    prints the results as JSON
"""

import asyncio
import json
import sys

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "What is the capital of France?"


def main(url, name):
    """Run all calls and print their results."""
    settings = {"base_url": url + "/v1", "api_key": "KEY", "model": name, "max_retries": 0, "temperature": 0}
    model = ChatOpenAI(**settings, max_tokens=24)
    whole = model.invoke(QUESTION)
    streamed = None
    chunks = []
    for chunk in model.stream(QUESTION, stream_usage=True):
        chunks.append(chunk.content)
        streamed = chunk if streamed is None else streamed + chunk
    history = [
        SystemMessage("Be brief."),
        HumanMessage(QUESTION),
        whole,
        HumanMessage("In which country is that?"),
    ]
    chain = (
        ChatPromptTemplate.from_messages([("human", "What is the capital of {land}?")])
        | model
        | StrOutputParser()
    )
    with_logprobs = model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    results = {
        "whole": message(whole),
        "streamed": message(streamed),
        "chunks": chunks,
        "asynchronous": asyncio.run(asynchronous(model)),
        "batch": [one.content for one in model.batch([QUESTION, "Name a fruit.", QUESTION])],
        "history": model.invoke(history).content,
        "given": model.invoke([HumanMessage("Hi"), AIMessage("Hello!"), HumanMessage(QUESTION)]).content,
        "chain": chain.batch([{"land": "Germany"}, {"land": "Japan"}]),
        "stopped": message(model.invoke(QUESTION, stop=["France"])),
        "tokens": [one["token"] for one in with_logprobs.response_metadata["logprobs"]["content"]],
        "completion": OpenAI(**settings, max_tokens=4).invoke("The capital of France is"),
        "error": refusal(ChatOpenAI(**{**settings, "temperature": 9})),
    }
    sys.stdout.write(json.dumps(results))


def message(one):
    return {
        "text": one.content,
        "ended": one.response_metadata["finish_reason"],
        "model": one.response_metadata["model_name"],
        "usage": one.usage_metadata,
    }


async def asynchronous(model):
    whole, parts = await asyncio.gather(model.ainvoke(QUESTION), joined(model))
    return [whole.content, parts]


async def joined(model):
    return "".join([chunk.content async for chunk in model.astream(QUESTION)])


def refusal(model):
    try:
        model.invoke(QUESTION)
    except openai.BadRequestError as error:
        return error.param
    return None


main(*sys.argv[1:])
