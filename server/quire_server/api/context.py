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
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from quire_server.api.admission import Admission
from quire_server.api.auth import Keys, Principal
from quire_server.api.deep_check import DeepCheck
from quire_server.api.drain import Drain
from quire_server.api.protocol.errors import ApiError, bad_field, overloaded
from quire_server.api.rate_limit import Rates
from quire_server.api.request_log import RequestLog, RequestLogging
from quire_server.api.tracing import Tracing
from quire_server.core.sampling_params import Grammar
from quire_server.core.watermark import WatermarkMode
from quire_server.engine.client import EngineClient
from quire_server.errors import RequestError
from quire_server.health.decision import Thresholds
from quire_server.health.heartbeat import SharedState
from quire_server.metrics.requests import Metrics
from quire_server.model_dir.generation_config import SamplingDefaults
from quire_server.text.chat import ChatTemplate
from quire_server.text.fair_executor import FairExecutor
from quire_server.text.grammar_compiler import GrammarCompiler, GrammarRequest
from quire_server.text.tokenizer import Tokenizer

# Shorter texts are tokenised on the spot: a thread costs more than the few hundred microseconds it saves.
_SHORT_TEXT = 2000
_THREADS = 2
_MAX_GATE = 32
_MAX_GRAMMARS = 32  # of one client, that wait to be compiled


class SerialGate:
    """Runs work that is not admitted as a completion one at a time, and bounds how much of it waits: it can
    take neither all threads nor all memory.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_inside = 0

    @contextlib.asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Wait for the lock; raises ApiError where too many wait already."""
        if self._num_inside >= _MAX_GATE:
            raise overloaded("queue_full", f"{self._num_inside} requests like this one are waiting", 1)
        self._num_inside += 1
        try:
            async with self._lock:
                yield
        finally:
            self._num_inside -= 1


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
    tracing: Tracing = field(default_factory=Tracing.off)
    request_log: RequestLog = field(default_factory=lambda: RequestLog(RequestLogging.METADATA))
    with_priorities: bool = False
    with_docs: bool = True
    request_timeout: float = math.inf
    watermark: WatermarkMode = WatermarkMode.OFF
    text_gate: SerialGate = field(default_factory=SerialGate)
    created: int = field(default_factory=lambda: int(time.time()))
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "text"))
    _grammar_thread: FairExecutor = field(default_factory=lambda: FairExecutor("grammar"))

    def check_model(self, name: str) -> None:
        """Raises a 404 that names the models there are."""
        if name not in self.served_names:
            raise ApiError(
                404,
                f"The model {name!r} is not served here; there is {', '.join(self.served_names)}.",
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

    async def tokenize(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Token ids of a text."""
        if len(text) <= _SHORT_TEXT:
            return tuple(self.tokenizer.encode(text, add_special_tokens=special))
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(
            self._threads, lambda: self.tokenizer.encode(text, add_special_tokens=special)
        )
        return tuple(ids)

    async def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        if len(tokens) <= _SHORT_TEXT:
            return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, lambda: self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        )

    async def tokenize_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the answer begins."""
        loop = asyncio.get_running_loop()
        try:
            text = await loop.run_in_executor(self._threads, lambda: self.template.render(messages))
        except RequestError as error:
            raise ApiError(400, str(error), param=error.param or "messages") from None
        return await self.tokenize(text, special=False)

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
        compiling = self._grammar_thread.submit(client, functools.partial(self.grammars.compile, form, scope))
        return await asyncio.wrap_future(compiling)
