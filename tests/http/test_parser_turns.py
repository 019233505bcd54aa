"""What is dropped is read after everything else, a little in each round of the event loop."""

import asyncio

from quire_http.parser_turns import ParserTurns


class Dropping:
    """A refused request whose client goes on sending."""

    def __init__(self, seen, turns, loop):
        self._seen, self._turns, self._loop = seen, turns, loop

    def parse_some(self):
        raise AssertionError("it has nothing to parse")

    def read_more(self):
        self._seen.append("dropped")
        self._turns.add_dropping(self, self._loop)


class Wanted:
    """A request whose body takes several steps to parse."""

    def __init__(self, seen, steps):
        self._seen, self._left = seen, steps

    def parse_some(self):
        self._seen.append("parsed")
        self._left -= 1
        return self._left > 0

    def read_more(self):
        raise AssertionError("it is not dropped")


async def _rounds(count):
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_round_of_the_loop_reads_a_few_of_many_connections_that_are_dropped():
    async def run():
        seen, turns, loop = [], ParserTurns(), asyncio.get_running_loop()
        for _ in range(1000):
            turns.add_dropping(Dropping(seen, turns, loop), loop)
        await _rounds(3)
        return len(seen)

    assert 0 < asyncio.run(run()) < 100


def test_a_body_that_is_wanted_comes_before_those_that_are_dropped():
    async def run():
        seen, turns, loop = [], ParserTurns(), asyncio.get_running_loop()
        for _ in range(1000):
            turns.add_dropping(Dropping(seen, turns, loop), loop)
        turns.add(Wanted(seen, 5), loop)
        await _rounds(3)
        return seen

    seen = asyncio.run(run())
    assert seen[:5] == 5 * ["parsed"]
    assert "dropped" in seen, "they are dropped in the end"
