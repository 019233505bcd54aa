"""The server context: the parts of one API process that every handler works with.

Work that blocks (tokenizer, chat template, grammar compiler) is reached through methods that keep long work
off the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from quire_http.body_memory import BodyMemory
from quire_http.drain import Drain
from quire_http.errors import ApiError, bad_field, overloaded
from quire_http.exchange import HttpExchange
from quire_http.rate_limit import Rates
from quire_server.api.admission import Admission
from quire_server.api.auth import Keys, Principal
from quire_server.api.deep_check import DeepCheck
from quire_server.api.gateway_tokens import GatewayKeys
from quire_server.api.protocol.requests import MAX_TEXT_TOKENS, Prompts
from quire_server.api.protocol.validation import Json, parse_object
from quire_server.api.request_log import RequestLog, RequestLogging
from quire_server.api.response_store import ResponseStore
from quire_server.api.tracing import Tracing
from quire_server.core.sampling_params import Grammar
from quire_server.core.watermark import WatermarkMode
from quire_server.engine.client import EngineClient
from quire_server.errors import PromptTooLongError, RequestError
from quire_server.health.decision import Thresholds
from quire_server.health.heartbeat import SharedState
from quire_server.metrics.requests import Metrics
from quire_server.model_dir.generation_config import SamplingDefaults
from quire_server.text.chat import ChatTemplate
from quire_server.text.fair_executor import FairExecutor
from quire_server.text.grammar_compiler import GrammarCompiler, GrammarRequest
from quire_server.text.long_texts import LongTexts
from quire_server.text.tokenizer import Tokenizer

# Shorter texts are tokenised on the spot: a thread costs more than the few hundred microseconds it saves.
_SHORT_TEXT = 2000
_LONG_TEXT = 64 * 1024  # characters; longer texts are tokenised by a process of their own
_SHORT_BODY = 64 * 1024  # bytes; longer bodies are parsed by a thread
_LOADS_MORE = "previous_response_id"  # the field of a body that is parsed with more than itself
_THREADS = 2
# JSON values of a body, which are parsed in 20 ms; more only as token ids that the engine has room for.
_MAX_VALUES = 1 << 18
_OTHER_VALUES = 1 << 16
_MAX_GATE = 32  # of one client
_MAX_GRAMMARS = 32  # of one client, that wait to be compiled


T = TypeVar("T")


class SerialGate:
    """Runs work that is not admitted as a completion one at a time for each client, and bounds how much of it
    waits: a client can take neither all threads nor the place of another one.
    """

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._num_inside = Counter[str]()

    @contextlib.asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        """Wait for the client's lock; raises ApiError where too many of its requests wait already."""
        if (waiting := self._num_inside[client]) >= _MAX_GATE:
            raise overloaded("queue_full", f"{waiting} requests like this one are waiting", 1)
        self._num_inside[client] += 1
        try:
            async with self._locks.setdefault(client, asyncio.Lock()):
                yield
        finally:
            self._num_inside[client] -= 1
            if not self._num_inside[client]:
                del self._num_inside[client], self._locks[client]


@dataclass(frozen=True)
class ServerContext:
    """The parts of one API process."""

    served_names: tuple[str, ...]
    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    grammars: GrammarCompiler
    defaults: SamplingDefaults
    metrics: Metrics
    admission: Admission
    drain: Drain
    keys: Keys
    state: SharedState
    thresholds: Thresholds
    deep_check: DeepCheck
    rates: Rates
    gateway_keys: GatewayKeys = field(default_factory=GatewayKeys.none)
    tracing: Tracing = field(default_factory=Tracing.off)
    request_log: RequestLog = field(default_factory=lambda: RequestLog(RequestLogging.METADATA))
    with_priorities: bool = False
    with_docs: bool = True
    request_timeout: float = math.inf
    adapters_dir: Path | None = None  # of the adapters that may be loaded; None: none may be
    watermark: WatermarkMode = WatermarkMode.OFF
    task: str = "generate"  # or embed
    tool_form: str | None = None  # how the model writes calls; None where no tools are taken
    thinks: bool = False  # whether answers may begin with a thought
    # Special tokens that parsers of answers look for, and their ids.
    shown_tokens: Mapping[str, int] = field(default_factory=dict)
    long_texts: LongTexts | None = None
    responses: ResponseStore = field(default_factory=ResponseStore)
    text_gate: SerialGate = field(default_factory=SerialGate)
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    created: int = field(default_factory=lambda: int(time.time()))
    _text_threads: FairExecutor = field(default_factory=lambda: FairExecutor("text", _THREADS))
    _long_text_thread: FairExecutor = field(default_factory=lambda: FairExecutor("long text"))
    _template_thread: FairExecutor = field(default_factory=lambda: FairExecutor("template"))
    _body_thread: FairExecutor = field(default_factory=lambda: FairExecutor("body"))
    _grammar_thread: FairExecutor = field(default_factory=lambda: FairExecutor("grammar"))

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The LoRA adapters that requests may name as their model."""
        return tuple(state.name for state in self.engine.adapters.values() if state.is_ready)

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that requests may ask for."""
        return (*self.served_names, *self.adapter_names)

    def adapter_of(self, name: str) -> str:
        """The adapter of a request for this model; empty for the model itself."""
        return name if name in self.adapter_names and name not in self.served_names else ""

    def check_model(self, name: str, principal: Principal | None = None) -> None:
        """Raises a 404 that names the models there are. A gateway may have a name of its own for one."""
        if name not in self.model_names and (principal is None or not name or name != principal.model):
            raise ApiError(
                404,
                f"The model {name!r} is not served here; there is {', '.join(self.model_names)}.",
                param="model",
                code="model_not_found",
            )

    def priority(self, principal: Principal, asked: int) -> int:
        """The priority of a request. Raises a 400 where it would be ignored, a 403 where the key may not ask
        for it.
        """
        if self.with_priorities:
            return principal.priority(asked)
        if asked:
            raise bad_field("priority", "this server runs without --scheduling-policy priority; leave it out")
        return asked

    def watermarks(self, wanted: bool | None) -> bool:
        """Whether an answer gets a watermark. Raises a 400 where the request would be ignored."""
        if wanted and self.watermark is WatermarkMode.OFF:
            raise bad_field("watermark", "this server runs without --watermark; leave it out")
        if wanted is False and self.watermark is WatermarkMode.ALWAYS:
            raise bad_field("watermark", "every answer of this server has one; leave it out")
        return self.watermark is WatermarkMode.ALWAYS or bool(wanted)

    @property
    def max_prompt_tokens(self) -> int:
        """What the engine's context leaves for a prompt."""
        return self.engine.info.max_prompt_tokens

    @property
    def max_text_tokens(self) -> int:
        """The most tokens that /tokenize and /detokenize take."""
        return max(MAX_TEXT_TOKENS, self.engine.info.max_model_len if self.engine.connected else 0)

    async def read(self, exchange: HttpExchange, parse: Callable[[Json], T], max_tokens: int = 0) -> T:
        """Read a body and parse it, off the event loop where it is long or loads more. ``max_tokens``: the
        most token ids that it may have. Raises ApiError.
        """
        body = await exchange.body(max(_MAX_VALUES, max_tokens + _OTHER_VALUES))
        if len(body) <= _SHORT_BODY:
            values = parse_object(body)
            if _LOADS_MORE not in values:
                return parse(values)
            return await _run(self._body_thread, exchange.client, lambda: parse(values))
        return await _run(self._body_thread, exchange.client, lambda: parse(parse_object(body)))

    def check_length(self, text: str, limit: int, param: str = "prompt") -> None:
        """Raises PromptTooLongError where a text has more than ``limit`` tokens by its length alone."""
        if (least := self.tokenizer.least_tokens(text)) > limit:
            found = f"{len(text)} characters, which are {least} tokens at least"
            raise _too_long(param, found, limit)

    async def tokenize(
        self,
        text: str,
        *,
        special: bool,
        limit: int,
        client: str = "",
        param: str = "prompt",
        on_the_spot: bool = True,
    ) -> tuple[int, ...]:
        """Token ids of a text. Clients take turns. Raises PromptTooLongError where there are more than
        ``limit``, without tokenising where the length of the text says so. ``on_the_spot``: a short text may
        be tokenised by the event loop.
        """
        self.check_length(text, limit, param)
        encode = functools.partial(self.tokenizer.encode, text, add_special_tokens=special)
        if len(text) <= _SHORT_TEXT and on_the_spot:
            tokens = tuple(encode())
        elif len(text) <= _LONG_TEXT or self.long_texts is None:
            tokens = tuple(await _run(self._text_threads, client, encode))
        else:
            long = functools.partial(self.long_texts.encode, text, add_special_tokens=special, limit=limit)
            found_tokens = await _run(self._long_text_thread, client, long)
            if isinstance(found_tokens, int):
                raise _too_long(param, f"{found_tokens} tokens", limit)
            tokens = found_tokens
        if len(tokens) > limit:
            raise _too_long(param, f"{len(tokens)} tokens", limit)
        return tokens

    async def tokenize_all(self, prompts: Prompts, *, limit: int, client: str) -> list[tuple[int, ...]]:
        """Token ids of each prompt."""
        is_short = sum(map(len, prompts)) <= _SHORT_TEXT
        return [
            await self.tokenize(one, special=True, limit=limit, client=client, on_the_spot=is_short)
            if isinstance(one, str)
            else one
            for one in prompts
        ]

    async def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool, client: str = "") -> str:
        """The text of token ids."""
        decode = functools.partial(self.tokenizer.decode, tokens, skip_special_tokens=skip_special_tokens)
        if len(tokens) <= _SHORT_TEXT:
            return decode()
        return await _run(self._text_threads, client, decode)

    async def render_chat(
        self,
        messages: Sequence[Json],
        *,
        client: str = "",
        tools: Sequence[Json] = (),
        enable_thinking: bool | None = None,
    ) -> str:
        """The text of a conversation, up to where the answer begins. Clients take turns. Raises ApiError."""
        render = functools.partial(
            self.template.render,
            messages,
            tools=tools,
            tool_form=self.tool_form or "Hermes",
            enable_thinking=enable_thinking,
        )
        try:
            return await _run(self._template_thread, client, render)
        except RequestError as error:
            raise ApiError(400, str(error), param=error.param or "messages") from None

    async def tokenize_chat(
        self, messages: Sequence[Json], *, limit: int, client: str = ""
    ) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the answer begins. As `tokenize`."""
        text = await self.render_chat(messages, client=client)
        return await self.tokenize(text, special=False, limit=limit, client=client, param="messages")

    async def compile(self, form: GrammarRequest | None, principal: Principal) -> Grammar | None:
        """The compiled grammar. Clients take turns, so that a hostile grammar delays others by its own time
        only. Raises ApiError where too many of the client's wait already.
        """
        if form is None:
            return None
        client, scope = principal.client, principal.cache_scope
        if (known := self.grammars.known(form, scope)) is not None:
            return known
        if (waiting := self._grammar_thread.num_waiting(client)) >= _MAX_GRAMMARS:
            raise overloaded("queue_full", f"{waiting} constraints of this key wait to be compiled", 1)
        return await _run(self._grammar_thread, client, functools.partial(self.grammars.compile, form, scope))


async def _run(threads: FairExecutor, client: str, call: Callable[[], T]) -> T:
    return await asyncio.wrap_future(threads.submit(client, call))


def _too_long(param: str, found: str, limit: int) -> PromptTooLongError:
    return PromptTooLongError(
        f"The prompt has {found}, and at most {limit} are taken: shorten the prompt.", param=param
    )
