"""What the limit store decides, against a real server: as one bucket would, whichever gateway asks."""

import asyncio
import contextlib
import math
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import TimeoutError as LateError

from quire_gateway.client_limits import ClientLimiter
from quire_gateway.limit_script import LEASE_SECONDS, SCRIPT, Held, Question, answer, arguments, key
from quire_gateway.limit_store import LimitStore
from quire_gateway.limit_store_url import LimitStoreError, read_url
from quire_gateway.llm_client import Budget, Limits, LLMClient
from quire_gateway.llm_route import Prices
from quire_gateway.metrics import Metrics
from quire_gateway.replicas import ReplicaTable
from quire_gateway.shared_limits import SharedLimiter
from quire_gateway.usage_ledger import Spending, UsageLedger
from quire_http.errors import ApiError
from quire_http.rate_limit import RateLimits, Rates
from tests.gateway.conftest import Clock
from tests.gateway.limit_store_server import StoreServer

NOTHING = Held()
NOW = 1_800_000_000.0
CLOCK = "local clock = redis.call('TIME')"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with StoreServer(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(autouse=True)
def empty(server):
    server.client.flushall()


def client(name="alice", budget=None, **limits):
    return LLMClient(
        "models", name, f"uid-{name}", "", (), limits=Limits(**limits), budget=budget or Budget()
    )


def tokens(number):
    return Spending(1, 0, number)


class Script:
    """The script with a clock of the test."""

    def __init__(self, server):
        assert CLOCK in SCRIPT
        self._run = server.client.register_script(
            SCRIPT.replace(CLOCK, "local clock = {ARGV[#ARGV - 1], ARGV[#ARGV]}").replace(
                "while at < #ARGV do", "while at < #ARGV - 2 do"
            )
        )
        self.now = NOW

    def ask(self, who, *amounts, gateway="g-0", held=NOTHING, saved=0, believed=None, returned=(0, 0)):
        spent = Spending(0, 0, saved)
        requests = [tokens(amount) for amount in amounts]
        question = Question(who, spent, held, requests, returned, believed)
        seconds = math.floor(self.now)
        clock = [seconds, round((self.now - seconds) * 1e6)]
        return answer(self._run(keys=[key(who)], args=[*arguments(question, gateway), *clock]))


@pytest.fixture
def script(server):
    return Script(server)


STEPS = st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 900), st.integers(-300, 300)), max_size=20)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.sampled_from([60, 600, 7]), st.sampled_from([600, 5000]))
def test_the_store_decides_as_one_bucket_does(server, script, steps, a_minute, tokens_a_minute):
    server.client.flushall()
    script.now = NOW
    clock = Clock()
    oracle = Rates(lambda uid: RateLimits(a_minute, tokens_a_minute), clock)
    who = client(requests_per_minute=a_minute, tokens_per_minute=tokens_a_minute)
    for number, (milliseconds, amount, given_back) in enumerate(steps):
        clock.now += milliseconds / 1000
        script.now += milliseconds / 1000
        verdict = "ok"
        try:
            oracle.charge(who.uid, amount)
        except ApiError as error:
            verdict = "requests" if "requests a minute" in str(error) else "tokens"
        found = script.ask(who, amount, gateway=f"g-{number % 3}")
        assert found.verdicts == (verdict,)
        if given_back >= 0 and verdict == "ok":
            oracle.spend(who.uid, -given_back)
            found = script.ask(who, gateway=f"g-{number % 3}", returned=(0, given_back))
        assert found.levels == pytest.approx(oracle.levels(who.uid), abs=1e-2)


def test_requests_at_once_are_counted_over_all_gateways_and_those_of_a_lost_one_come_back(script):
    who = client(concurrent_requests=3)
    assert script.ask(who, 0, 0, gateway="g-0").verdicts == ("ok", "ok")
    assert script.ask(who, 0, 0, gateway="g-1").verdicts == ("ok", "concurrency")
    script.now += LEASE_SECONDS - 1
    assert script.ask(who, 0, gateway="g-1", held=Held(1)).verdicts == ("concurrency",)
    script.now += 1.1
    assert script.ask(who, 0, 0, 0, gateway="g-1", held=Held(1)).verdicts == ("ok", "ok", "concurrency")
    script.ask(who, gateway="g-1", held=Held(0))
    assert script.ask(who, 0, 0, 0, 0, gateway="g-0").verdicts == ("ok", "ok", "ok", "concurrency")


def test_a_budget_is_what_is_saved_and_what_all_gateways_hold(script):
    who = client(budget=Budget(tokens=1000))
    assert script.ask(who, 500, gateway="g-0", saved=200).verdicts == ("ok",)
    assert script.ask(who, 301, 300, gateway="g-1", saved=200).verdicts == ("budget", "ok")
    script.ask(who, gateway="g-0", held=Held(0, 100))
    assert script.ask(who, 400, 1, gateway="g-1", held=Held(0, 300), saved=200).verdicts == ("ok", "budget")


def test_a_store_without_its_data_begins_with_what_the_gateways_know(script):
    who = client(requests_per_minute=60)
    assert script.ask(who, *[0] * 5, believed={"requests": 3.0}).verdicts.count("ok") == 3
    assert script.ask(who, 0, gateway="g-1", believed={"requests": 60.0}).verdicts == ("requests",)


def test_a_clock_of_the_store_that_is_set_back_stops_no_client(script):
    who = client(requests_per_minute=60, concurrent_requests=40)
    assert script.ask(who, *[0] * 30).verdicts.count("ok") == 30
    script.now -= 86_400
    assert script.ask(who, *[0] * 31, gateway="g-1").verdicts.count("ok") == 10
    script.now += 20
    found = script.ask(who, *[0] * 41, gateway="g-1")
    assert found.verdicts.count("ok") == 40, "20 were left, and 20 came back"


def test_nothing_of_a_client_without_requests_stays_in_the_store(server, script):
    script.ask(client(requests_per_minute=60, concurrent_requests=1), 0)
    assert 0 < server.client.pttl(key(client())) < (LEASE_SECONDS + 5) * 1000


class Gateway:
    """The limits of one gateway in this process."""

    def __init__(self, server, name, num=3, deadline=10.0, **options):
        self.clock = Clock()
        self.metrics = Metrics(ReplicaTable((), 0, self.clock, lambda strategy: None))
        self.local = ClientLimiter(lambda: num, UsageLedger(lambda place: None, lambda: NOW), self.clock)
        store = LimitStore(server.url_file, SCRIPT, deadline)
        self.limiter = SharedLimiter(self.local, store, self.metrics, name, clock=self.clock, **options)

    async def ask(self, who, number=0):
        """The reservation, or the code of the refusal."""
        try:
            return await self.limiter.admit(who, 0, number, Prices())
        except ApiError as error:
            return error.code

    def is_up(self):
        return bool(self.metrics.registry.get_sample_value("gateway_limit_store_up"))

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def gateways(server, number=3, **options):
    """They run, and the store answers them."""
    fleet = [Gateway(server, f"g-{index}", **options) for index in range(number)]
    tasks = [asyncio.create_task(one.limiter.run()) for one in fleet]
    try:
        for one in fleet:
            await one.until(one.is_up)
        yield fleet
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for one in fleet:
            await one.limiter.close()


def admitted(answers):
    return [one for one in answers if not isinstance(one, str)]


def codes(answers):
    return {one for one in answers if isinstance(one, str)}


async def test_of_requests_to_several_gateways_at_once_as_many_are_admitted_as_the_limit_says(server):
    who = client(requests_per_minute=60)
    async with gateways(server) as fleet:
        answers = await asyncio.gather(*(fleet[number % 3].ask(who) for number in range(300)))
        assert 60 <= len(admitted(answers)) <= 62


async def test_what_a_request_did_not_take_is_there_for_other_gateways(server):
    who = client(tokens_per_minute=1000)
    async with gateways(server) as (one, other, _):
        held = await one.ask(who, 900)
        assert await other.ask(who, 900) == "rate_limit_exceeded"
        held.settle(0, 100)
        other.clock.now += 1  # a refusal is remembered for a moment
        await one.until(lambda: not one.limiter._dirty)
        assert admitted([await other.ask(who, 800)])
        assert dict((await other.ask(who, 0)).headers())["x-ratelimit-remaining-tokens"] in ("100", "101")


@pytest.mark.parametrize("number", [1, 3])
async def test_of_fifty_requests_for_a_budget_of_one_exactly_one_is_admitted(server, number):
    who = client(budget=Budget(tokens=10))
    async with gateways(server, number) as fleet:
        answers = await asyncio.gather(*(fleet[n % number].ask(who, 10) for n in range(50)))
        assert len(admitted(answers)) == 1
        assert codes(answers) == {"insufficient_quota"}


async def test_what_has_just_been_refused_is_refused_without_the_store(server):
    who = client(requests_per_minute=1)
    async with gateways(server, 1) as (one,):
        assert admitted([await one.ask(who)])
        assert await one.ask(who) == "rate_limit_exceeded"
        server.client.config_resetstat()
        assert {await one.ask(who) for _ in range(1000)} == {"rate_limit_exceeded"}
        calls = server.client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
        assert calls <= 2, "what it holds is said now and then"
        server.client.delete(key(who))
        one.clock.now += 60
        assert admitted([await one.ask(who)])


EDITS = [  # of limits by which a request has just been refused
    ({"tokens_per_minute": 10}, {"requests_per_minute": 60}),
    ({"requests_per_minute": 1}, {"tokens_per_minute": 600}),
    ({"concurrent_requests": 1}, {"concurrent_requests": 2}),
    ({"budget": Budget(tokens=10)}, {"budget": Budget(tokens=100)}),
    ({"requests_per_minute": 1}, {}),
]


@pytest.mark.parametrize(("before", "after"), EDITS)
async def test_a_refusal_is_forgotten_when_the_limits_of_the_client_change(server, before, after):
    async with gateways(server, 2) as (one, other):
        held = await other.ask(client(**before), 10)
        await other.until(lambda: not other.limiter._dirty)
        assert isinstance(await one.ask(client(**before), 10), str), "the refusal to remember"
        assert admitted([await one.ask(client(**after), 10)])
        held.settle(0, 5)
        await other.until(lambda: not other.limiter._dirty)
        assert one.is_up() and other.is_up()


async def test_a_refusal_for_a_cost_is_none_for_a_cheaper_request(server):
    who = client(budget=Budget(cost=Decimal(1)))
    async with gateways(server, 2) as (one, other):
        await other.limiter.admit(who, 0, 10, Prices(Decimal(0), Decimal(50_000)))
        with pytest.raises(ApiError):
            await one.limiter.admit(who, 0, 10, Prices(Decimal(0), Decimal(60_000)))
        await one.limiter.admit(who, 0, 20, Prices())


async def test_what_ends_after_its_client_got_a_limit_gives_nothing_back_that_was_not_charged(server):
    async with gateways(server, 1) as (one,):
        running = [await one.ask(client(), 10_000) for _ in range(5)]
        limited = client(tokens_per_minute=1000)
        assert admitted([await one.ask(limited, 1000)])
        for each in running:
            each.settle(0, 10)
        await one.until(lambda: not one.limiter._dirty)
        one.clock.now += 1
        assert await one.ask(limited, 1000) == "rate_limit_exceeded"


async def test_a_request_that_is_cancelled_while_it_is_decided_holds_nothing(server):
    who = client(concurrent_requests=1)
    async with gateways(server, 1) as (one,):
        for _ in range(20):
            task = asyncio.create_task(one.ask(who))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await one.until(lambda: not one.limiter._waiting and not one.limiter._dirty)
        one.clock.now += 1
        assert admitted([await one.ask(who)])


async def test_while_the_store_is_away_a_gateway_gives_out_its_share_of_what_was_left(server, caplog):
    who, other = client(requests_per_minute=60), client("bob", requests_per_minute=60)
    async with gateways(server, 1, deadline=1.0) as (one,):
        for _ in range(30):
            await one.ask(who)
        with server_stopped(server):
            answers = await asyncio.gather(*(one.ask(who) for _ in range(50)))
            assert len(admitted(answers)) == 10, "a third of 30"
            await one.until(lambda: not one.is_up())
            assert len(admitted([await one.ask(other) for _ in range(50)])) == 20, "a third of 60"
        await one.until(one.is_up)
        left = len(admitted([await one.ask(who) for _ in range(60)]))
        assert left <= 1, "what this gateway knows counts, though the store knows of 30 only"
    messages = [record.message for record in caplog.records if "limit store" in record.message]
    assert len(messages) == 1 and "timeout" in messages[0]
    assert one.metrics.registry.get_sample_value("gateway_limit_store_errors_total", {"reason": "timeout"})


@contextlib.contextmanager
def server_stopped(server):
    server.stop()
    try:
        yield
    finally:
        server.go_on()


async def test_with_deny_clients_with_limits_are_refused_and_others_are_not(server):
    async with gateways(server, 1, denies=True, deadline=1.0) as (one,):
        assert admitted([await one.ask(client(requests_per_minute=60))])
        with server_stopped(server):
            answers = await asyncio.gather(*(one.ask(client(requests_per_minute=60)) for _ in range(9)))
            assert set(answers) == {"limit_store_unavailable"}
            assert await one.ask(client(budget=Budget(tokens=100))) == "limit_store_unavailable"
            assert admitted([await one.ask(client())])


async def test_a_gateway_ends_though_the_store_does_not_answer(server):
    one = Gateway(server, "g-0", deadline=0.3)
    task = asyncio.create_task(one.limiter.run())
    await one.until(one.is_up)
    task.cancel()
    await asyncio.wait([task])
    with server_stopped(server):
        await one.limiter.close()


async def test_a_url_with_an_option_that_there_is_not_is_a_lost_store_and_no_end(server, caplog):
    async with gateways(server, 1) as (one,):
        url = server.url_file.read_text()
        try:
            server.url_file.write_text(url.strip() + "?foo=1")
            await one.limiter._store.close()
            await one.until(lambda: not one.is_up() or not one.limiter._wake.set())
            assert admitted([await one.ask(client(requests_per_minute=60))])
            assert not one.is_up()
        finally:
            server.url_file.write_text(url)
        await one.until(one.is_up)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "reply", [None, 7, [], [b"x", b"y", [b"ok"]], [b"1", b"1", ["ok"]], [b"1", b"1", []]]
)
async def test_a_reply_that_is_none_of_the_scripts_is_a_lost_store_and_no_end(server, reply):
    async with gateways(server, 1) as (one,):
        ask = one.limiter._store.run_script

        async def odd(calls):
            return [reply for _ in calls]

        one.limiter._store.run_script = odd
        assert admitted([await one.ask(client(requests_per_minute=60))]), "by its share"
        await one.until(lambda: not one.is_up())
        one.limiter._store.run_script = ask
        await one.until(one.is_up)


async def test_an_error_that_was_not_thought_of_is_logged_and_ends_no_gateway(server, caplog):
    async with gateways(server, 1) as (one,):
        ask = one.limiter._store.run_script

        async def broken(calls):
            raise ZeroDivisionError

        one.limiter._store.run_script = broken
        assert admitted([await one.ask(client(requests_per_minute=60))]), "by its share"
        await one.until(lambda: not one.is_up())
        one.limiter._store.run_script = ask
        await one.until(one.is_up)
    assert "ZeroDivisionError" in caplog.text


class Unclosable:
    """A connection that cannot be closed in time."""

    async def aclose(self):
        raise LateError("Timed out closing connection")


async def test_a_connection_that_cannot_be_closed_is_dropped_all_the_same(tmp_path):
    store = LimitStore(tmp_path / "url", "", 1.0)
    store._client = Unclosable()
    await store.close()
    with pytest.raises(LimitStoreError, match="cannot be read"):
        await store.run_script([])


def test_a_url_that_cannot_be_used_is_an_error_that_does_not_show_it(tmp_path):
    file = tmp_path / "url"
    with pytest.raises(LimitStoreError, match="cannot be read"):
        read_url(file)
    for wrong in ("http://:secret@host", "redis://", "rediss://:secret@host:99999", "secret"):
        file.write_text(wrong)
        with pytest.raises(LimitStoreError, match="has to be redis://") as error:
            read_url(file)
        assert "secret" not in str(error.value)
