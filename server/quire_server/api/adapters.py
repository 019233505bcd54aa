"""The handlers of /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's fields.

An admin's key may load what lies in --adapters-dir, and nothing else of the machine.
"""

from __future__ import annotations

import functools
from pathlib import Path

from quire_http.errors import ApiError, bad_field
from quire_http.exchange import HttpExchange
from quire_server.api.context import ServerContext
from quire_server.api.protocol.names import is_adapter_name
from quire_server.api.protocol.requests import LoadAdapterRequest, UnloadAdapterRequest
from quire_server.api.protocol.validation import validate


async def load(context: ServerContext, exchange: HttpExchange) -> None:
    """Load an adapter; the answer comes when requests may name it."""
    folder = _folder(context)
    request = await context.read(exchange, functools.partial(validate, LoadAdapterRequest))
    name = request.lora_name
    if not is_adapter_name(name):
        raise bad_field("lora_name", "may have letters, digits, '-', '.' and '_', and begin and end with one")
    if name in context.served_names:
        raise bad_field("lora_name", "is a name of the model itself: choose another one")
    directory = _inside(folder, request.lora_path)
    state = await context.engine.load_adapter(name, directory, is_new=True)
    if not state.is_ready:
        raise ApiError(
            400, f"The adapter is not loaded. {state.reason}", param="lora_path", code="bad_adapter"
        )
    await exchange.json({})


async def unload(context: ServerContext, exchange: HttpExchange) -> None:
    """Drop an adapter: its requests finish, and new ones get a 404."""
    _folder(context)
    request = await context.read(exchange, functools.partial(validate, UnloadAdapterRequest))
    if request.lora_name not in context.engine.adapters:
        raise ApiError(404, "There is no adapter of this name.", param="lora_name", code="adapter_not_found")
    await context.engine.drop_adapter(request.lora_name)
    await exchange.json({})


def _folder(context: ServerContext) -> Path:
    if context.adapters_dir is None:
        raise ApiError(
            404,
            "This server loads no adapters: it runs without --adapters-dir.",
            code="adapters_not_enabled",
        )
    return context.adapters_dir


def _inside(folder: Path, asked: str) -> Path:
    """The directory that a path names, which has to lie in the folder, links resolved."""
    home = folder.resolve()
    try:
        found = (home / asked).resolve()
        is_inside = found != home and found.is_relative_to(home) and found.is_dir()
    except (OSError, ValueError):
        is_inside = False
    if not is_inside:
        raise bad_field("lora_path", "is no directory in --adapters-dir")
    return found
