"""The small routes: models, tokenize, detokenize, reset_prefix_cache, metrics, version, openapi.json.

Called by `app`.
"""

from __future__ import annotations

from quire_server import __version__
from quire_server.api import openapi
from quire_server.api.chat_messages import parse_messages
from quire_server.api.fields import Fields, parse_object
from quire_server.api.house import House
from quire_server.api.reply import MAX_BODY_BYTES, Reply


async def models(house: House, reply: Reply) -> None:
    """/v1/models and /v1/models/NAME."""
    max_model_len = house.engine.info.max_model_len if house.engine.connected else None
    cards = {
        name: {
            "id": name,
            "object": "model",
            "created": house.created,
            "owned_by": "quire",
            "max_model_len": max_model_len,
        }
        for name in house.served_names
    }
    wanted = reply.scope["path"].removeprefix("/v1/models").strip("/")
    if not wanted:
        await reply.json({"object": "list", "data": list(cards.values())})
        return
    house.check_model(wanted)
    await reply.json(cards[wanted])


async def tokenize(house: House, reply: Reply) -> None:
    """/tokenize: a prompt, or the messages of a chat, as the model sees it."""
    fields = Fields(parse_object(await reply.body()))
    _check_model(house, fields)
    prompt = fields.take("prompt")
    if prompt is None:
        messages = parse_messages(fields)
        fields.end()
        async with house.side_door.pass_through():
            tokens = await house.tokenize_chat(messages)
    else:
        if not isinstance(prompt, str):
            raise fields.error("prompt", "must be a string")
        special = fields.boolean("add_special_tokens", default=True)
        fields.end()
        async with house.side_door.pass_through():
            tokens = await house.tokenize(prompt, special=special)
    limit = house.engine.info.max_model_len if house.engine.connected else None
    await reply.json({"count": len(tokens), "max_model_len": limit, "tokens": tokens})


async def detokenize(house: House, reply: Reply) -> None:
    """/detokenize: the text of token ids, special tokens included."""
    fields = Fields(parse_object(await reply.body()))
    _check_model(house, fields)
    if "tokens" not in fields:
        raise fields.error("tokens", "is required")
    tokens = fields.integers("tokens", MAX_BODY_BYTES, house.tokenizer.vocab_size)
    fields.end()
    async with house.side_door.pass_through():
        text = await house.detokenize(tokens, skip_special_tokens=False)
    await reply.json({"prompt": text})


def _check_model(house: House, fields: Fields) -> None:
    model = fields.text("model", "", 256)
    if model:
        house.check_model(model)


async def version(house: House, reply: Reply) -> None:
    """/version."""
    await reply.json({"version": __version__})


async def openapi_document(house: House, reply: Reply) -> None:
    """/openapi.json, of this very server as far as its model is known."""
    vocab_size = house.engine.info.vocab_size if house.engine.connected else None
    await reply.json(
        openapi.document(house.served_names, vocab_size, house.tokenizer.vocab_size, house.defaults)
    )


async def reset_prefix_cache(house: House, reply: Reply) -> None:
    """/reset_prefix_cache: no later request finds what was computed before, in any tier."""
    house.engine.reset_prefix_cache()
    await reply.json({})


async def exposition(house: House, reply: Reply) -> None:
    """/metrics."""
    accept = [value.decode("latin-1") for name, value in reply.scope["headers"] if name == b"accept"]
    text, content_type = house.metrics.exposition(", ".join(accept))
    await reply.whole(200, text, content_type)
