"""Clients that stream without pause, and a record of every stream that broke.

The clients are openai-python without retries, since a retry would hide a broken connection. Each has its own
connection pool, as separate users would.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType

from openai import OpenAI

from e2e.stories.waiting import eventually


@dataclass
class StreamLoad:
    """`clients` threads that each send one streaming request after the other until the `with` block ends.

    A stream is whole when it ended with a finish reason; any other end is kept in `broken` with its error.
    """

    base_url: str
    model: str
    clients: int = 2
    max_tokens: int = 48
    whole: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    max_streams: int = 5000

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._send_requests, args=(number,), name=f"client-{number}", daemon=True)
            for number in range(self.clients)
        ]

    def __enter__(self) -> StreamLoad:
        for thread in self._threads:
            thread.start()
        self.wait_for_more(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=120)

    def wait_for_more(self, count: int, timeout: float = 60.0) -> None:
        """Returns when `count` more streams have ended since the call."""
        before = len(self.whole) + len(self.broken)
        eventually(
            f"{count} more streams end",
            lambda: len(self.whole) + len(self.broken) >= before + count,
            timeout=timeout,
        )

    def _send_requests(self, number: int) -> None:
        client = OpenAI(base_url=self.base_url, api_key="none", max_retries=0, timeout=120)
        asked = 0
        while not self._stop.is_set() and asked < self.max_streams:
            asked += 1
            try:
                self.whole.append(
                    stream_text(
                        client, self.model, f"Client {number}, question {asked}: count up.", self.max_tokens
                    )
                )
            except Exception as error:  # any kind of failure is a broken stream to a client
                self.broken.append(f"client {number}, stream {asked}: {type(error).__name__}: {error}")
        client.close()


def stream_text(client: OpenAI, model: str, question: str, max_tokens: int) -> str:
    """The text of one streamed answer; raises when the stream ends without a finish reason."""
    text, finish = "", None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    if finish is None:
        raise ConnectionError(f"the stream ended without a finish reason after {len(text)} characters")
    return text
