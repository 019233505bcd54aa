"""Open-loop clients: requests arrive at a constant rate, however many are unanswered, and who is refused
tries again as openai-python does, after the seconds that Retry-After says.

Plain asyncio streams, so that on a machine of two cores the load is not what is measured. For one server on
the loopback interface.
"""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

MAX_RETRIES = 2  # openai-python's default
PROMPT_TOKENS, MAX_TOKENS = 64, 256


@dataclass(frozen=True)
class Slo:
    """What a client calls good: seconds from the attempt that was admitted to its first token, and seconds
    for each token of the answer from then on.
    """

    first_token: float
    each_token: float


@dataclass(frozen=True)
class Answer:
    """A whole answer; times are seconds of the monotonic clock. `arrived` is when its first attempt began."""

    arrived: float
    asked: float
    first_token: float
    ended: float
    tokens: int

    def is_good(self, slo):
        pace = (self.ended - self.first_token) / self.tokens
        return self.first_token - self.asked <= slo.first_token and pace <= slo.each_token


@dataclass
class Record:
    """What became of the requests of one phase."""

    arrived: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    sheds: list[tuple[float, float]] = field(
        default_factory=list
    )  # (when, seconds until the refusal was there)
    codes: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    broken: Counter[str] = field(default_factory=Counter)


def body(number):
    """The request of a number: a prompt that shares nothing with others', and an answer whose length nobody
    knows before its end.
    """
    dice = random.Random(number)
    prompt = [dice.randrange(200) for _ in range(PROMPT_TOKENS)]
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 1, "seed": number}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(asked).encode()


async def offer(port, rate, seconds, numbers, *, linger=0.0):
    """So many requests a second for so long; those without an answer `linger` seconds later are given up.
    Returns a Record.
    """
    record, loop = Record(), asyncio.get_running_loop()
    begun = loop.time()
    tasks = set()
    for count, number in zip(range(round(rate * seconds)), numbers, strict=False):
        await asyncio.sleep(max(0.0, begun + count / rate - loop.time()))
        tasks.add(loop.create_task(_request(port, body(number), record)))
    await asyncio.sleep(max(0.0, begun + seconds + linger - loop.time()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return record


async def ask_in_turn(port, num_clients, seconds, numbers):
    """Closed loop, to find out what the server can do: each client asks again as soon as it was answered."""
    record, end = Record(), time.monotonic() + seconds

    async def client():
        while time.monotonic() < end:
            if await _attempt(port, body(next(numbers)), record, time.monotonic()) is not None:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return record


async def _request(port, sent, record):
    arrived = time.monotonic()
    record.arrived.append(arrived)
    for retries_left in reversed(range(MAX_RETRIES + 1)):
        retry_after = await _attempt(port, sent, record, arrived)
        if retry_after is None:
            return
        if retries_left:
            await asyncio.sleep(retry_after)
    record.given_up += 1


async def _attempt(port, sent, record, arrived):
    """Ask once. None, or the seconds after which to ask again."""
    asked = time.monotonic()
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer none\r\n"
            b"connection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(sent)
            + sent
        )
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 200:
            record.answers.append(await _read_answer(reader, arrived, asked))
            return None
        said = await reader.read()
        now = time.monotonic()
        code = json.loads(said)["error"]["code"]
        record.codes[code] += 1
        if status == 503:
            record.sheds.append((now, now - asked))
            return float(head.lower().split(b"retry-after:")[1].split()[0])
        record.broken[f"{status} {code}"] += 1
    except (OSError, asyncio.IncompleteReadError, KeyError, ValueError) as error:
        record.broken[repr(error)] += 1
    finally:
        if writer is not None:
            writer.close()
    return None


async def _read_answer(reader, arrived, asked):
    """Read the events of a stream to their end."""
    received, first_token = b"", 0.0
    while more := await reader.read(1 << 16):
        received += more
        if not first_token and b"data:" in received:
            first_token = time.monotonic()
    if b"data: [DONE]" not in received:
        raise ValueError(f"the stream broke off: {received[-200:]!r}")
    usage = received.rpartition(b'"completion_tokens":')[2]
    tokens = int(usage.split(b",")[0].split(b"}")[0])
    return Answer(arrived, asked, first_token, time.monotonic(), tokens)
