"""Clients that send more requests than a server can serve, and count the outcome of each.

For one server on the loopback interface; ends by itself.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import openai

#: A request that has not ended by then hangs; the longest honest one takes a small part of it.
HANG_SECONDS = 60.0
_WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")


@dataclass
class Tally:
    """What became of requests: answered, given up by the client, shed (by reason), broken (by message)."""

    answered: int = 0
    given_up: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    #: When the requests were begun (`time.monotonic`) whose connection broke; not those that were refused.
    disconnected: list[float] = field(default_factory=list)

    @property
    def asked(self):
        return self.answered + self.given_up + self.shed.total() + self.broken.total()


async def run(base_url, *, num_clients, seconds, seed=0, urgent_share=0.0):
    """So many clients ask without pause for so long; returns their tally once every request has ended. A
    share of the requests has high priority.
    """
    tally = Tally()
    end = asyncio.get_running_loop().time() + seconds
    async with asyncio.TaskGroup() as clients:
        for number in range(num_clients):
            dice = random.Random(seed * 1000 + number)
            clients.create_task(_ask_until(end, base_url, dice, tally, urgent_share))
    return tally


async def _ask_until(end, base_url, dice, tally, urgent_share):
    loop = asyncio.get_running_loop()
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=HANG_SECONDS
    ) as client:
        while (begun := loop.time()) < end:
            try:
                async with asyncio.timeout(HANG_SECONDS):
                    if await _ask(client, dice, urgent_share):
                        tally.answered += 1
                    else:
                        tally.given_up += 1
            except openai.InternalServerError as error:
                if error.status_code == 503:
                    tally.shed[str(error.code)] += 1
                    await asyncio.sleep(dice.uniform(0.05, 0.2))
                else:
                    tally.broken[f"{error.status_code} {error}"] += 1
            except openai.APIConnectionError as error:
                tally.broken[type(error).__name__] += 1
                if not _found_nobody(error):
                    tally.disconnected.append(begun)
                return  # the server has gone
            except openai.APIError as error:
                tally.broken[str(error)] += 1
            except TimeoutError:
                tally.broken["hung"] += 1


def _found_nobody(error):
    """Whether the connection was refused: no process listened."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


async def _ask(client, dice, urgent_share):
    """One request of a random size and kind; False when this client hung up on purpose."""
    shared = "A prefix that many prompts share, for the cache. "
    prompt = (shared if dice.random() < 0.5 else "") + " ".join(dice.choices(_WORDS, k=dice.randint(1, 12)))
    fields = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": dice.randint(1, 250),
        "temperature": dice.choice((0, 1)),
        "extra_body": {"ignore_eos": True},
    }
    if dice.random() < urgent_share:
        fields["extra_body"]["priority"] = "high"
    if dice.random() < 0.5:
        await client.completions.create(**fields)
        return True
    patience = dice.randint(1, 20) if dice.random() < 0.2 else None
    async with await client.completions.create(**fields, stream=True) as stream:
        async for _ in stream:
            if patience is not None:
                patience -= 1
                if patience == 0:
                    return False
    return True
