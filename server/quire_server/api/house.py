"""What every handler needs, made once: the parts of one API process.

Built by `python -m quire_server.api`, handed to `app`. The blocking parts (tokenizer, chat template) are
reached through methods that keep long work off the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from quire_server.api.admission import Admission
from quire_server.api.auth import Keys
from quire_server.api.deep_check import DeepCheck
from quire_server.api.drain import Drain
from quire_server.api.errors import ApiError, bad_field, overloaded
from quire_server.api.rates import Rates
from quire_server.api.request_log import RequestLog, RequestLogging
from quire_server.api.sampling_defaults import SamplingDefaults
from quire_server.api.tracing import Tracing
from quire_server.core.errors import RequestError
from quire_server.core.request import Grammar
from quire_server.core.watermark import WatermarkMode
from quire_server.engine.client import EngineClient
from quire_server.health.decision import Thresholds
from quire_server.health.heartbeat import SharedState
from quire_server.metrics import Metrics
from quire_server.text.chat import ChatTemplate
from quire_server.text.grammar_compiler import GrammarCompiler, Wanted
from quire_server.text.tokenizer import Tokenizer

# Shorter texts are tokenised on the spot: a thread costs more than the few hundred microseconds it saves.
_SHORT_TEXT = 2000
_THREADS = 2
_MAX_BESIDE = 32


class SideDoor:
    """For work that is no completion and has no place in the house: one at a time, and few that wait, so that
    it can neither take all threads from the completions nor all memory.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_inside = 0

    @contextlib.asynccontextmanager
    async def pass_through(self) -> AsyncIterator[None]:
        """Wait for one's turn; raises ApiError when too many wait already."""
        if self._num_inside >= _MAX_BESIDE:
            raise overloaded("queue_full", f"{self._num_inside} requests like this one are waiting", 1)
        self._num_inside += 1
        try:
            async with self._turn:
                yield
        finally:
            self._num_inside -= 1


@dataclass(frozen=True)
class House:
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
    request_timeout: float = math.inf
    watermark: WatermarkMode = WatermarkMode.OFF
    side_door: SideDoor = field(default_factory=SideDoor)
    grammar_door: SideDoor = field(default_factory=SideDoor)
    created: int = field(default_factory=lambda: int(time.time()))
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "text"))
    _grammar_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "grammar"))

    def check_model(self, name: str) -> None:
        """Raises a 404 that names the models there are."""
        if name not in self.served_names:
            raise ApiError(
                404,
                f"The model {name!r} is not served here; there is {', '.join(self.served_names)}.",
                param="model",
                code="model_not_found",
            )

    def check_priority(self, priority: int) -> None:
        """Raises a 400 where a priority would be ignored."""
        if priority and not self.with_priorities:
            raise bad_field("priority", "this server runs without --scheduling-policy priority; leave it out")

    def watermarks(self, wanted: bool | None) -> bool:
        """Whether an answer gets a watermark. Raises a 400 where the client's word would be ignored."""
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
        """Token ids of a conversation, up to where the assistant is to speak."""
        loop = asyncio.get_running_loop()
        try:
            text = await loop.run_in_executor(self._threads, lambda: self.template.render(messages))
        except RequestError as error:
            raise ApiError(400, str(error), param=error.param or "messages") from None
        return await self.tokenize(text, special=False)

    async def compile(self, form: Wanted | None) -> Grammar | None:
        """What the engine takes. A hostile one holds up nobody but others that are not known yet."""
        if form is None:
            return None
        if (known := self.grammars.known(form)) is not None:
            return known
        async with self.grammar_door.pass_through():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._grammar_thread, self.grammars.compile, form)
