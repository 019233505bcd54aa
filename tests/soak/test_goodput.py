"""A replica at several times the load that it can serve, whose clients try again: it goes on to serve as
much as it can, refuses the rest at once, and is as before soon after the burst.

Loads are compared within one run, so that the speed of the machine does not matter; `bench.overload` leaves
out the time that other work took from the engine. The curve with more loads is in docs/overload.md.
"""

import asyncio
import itertools
import os
import time

import pytest

from bench import overload
from bench.overload import MachineTimer, quantile
from tests.soak.open_loop import offer

# Rounds of a quarter of a minute for each load, and more of them in a longer soak.
ROUNDS = max(2, round(float(os.environ.get("SOAK_MINUTES", "2")) / 3))
SECONDS = 12.0
MULTIPLES = (0.75, 1.0, 1.5, 2.0, 4.0)
RAMP_SECONDS, WINDOW_SECONDS, BURST_SECONDS, BACK_SECONDS = 3.0, 20.0, 12.0, 10.0
pytestmark = [pytest.mark.soak, pytest.mark.timeout(240 + ROUNDS * len(MULTIPLES) * (SECONDS + 10))]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with overload.start(tmp_path_factory.mktemp("goodput")) as server:
        server.wait_ready()
        yield overload.calibrate(server, 8.0)


@pytest.fixture(scope="module")
def measured(bench):
    """The phases by the multiple of their load, and how late the machine's own timers were."""
    with MachineTimer() as machine:
        phases = overload.curve(bench, MULTIPLES, SECONDS, ROUNDS)
    for phase in phases:
        assert not phase.broken, phase.broken
    return {phase.multiple: phase for phase in phases}, machine.lateness


@pytest.mark.parametrize("multiple", [2.0, 4.0])
def test_goodput_of_an_overloaded_replica_is_90_percent_of_its_peak(measured, multiple):
    phases, _ = measured
    assert phases[multiple].shed_share > 0.3, "it was no overload"
    goodputs = {each: round(phase.goodput) for each, phase in phases.items()}
    assert goodputs[multiple] >= 0.9 * max(goodputs.values()), goodputs


def test_what_is_shed_is_told_so_within_50_ms(measured):
    """Beyond the time by which the machine itself is late: clients and server share its CPUs."""
    phases, lateness = measured
    for multiple in (2.0, 4.0):
        assert quantile(phases[multiple].shed, 0.99) < 0.05 + quantile(lateness, 0.99)


def test_few_answers_of_an_overloaded_replica_are_computed_twice(measured):
    phases, _ = measured
    for multiple in (2.0, 4.0):
        assert phases[multiple].preemptions <= 0.2 * len(phases[multiple].first_token), phases[multiple]


def test_ten_seconds_after_a_burst_the_replica_serves_as_before(bench):
    """A third of what it can serve goes on all the time, the same requests before the burst and after it. The
    clients of the burst go on to retry when it is over.
    """
    rate, start = bench.saturation / 3, time.monotonic()
    numbers = itertools.cycle(range(round(rate * WINDOW_SECONDS)))
    calm = RAMP_SECONDS + WINDOW_SECONDS
    steady_seconds = calm + BURST_SECONDS + BACK_SECONDS + WINDOW_SECONDS

    async def burst():
        await asyncio.sleep(calm)
        rate_of_burst = 4 * bench.saturation
        return await offer(bench.server.port, rate_of_burst, BURST_SECONDS, bench.numbers, linger=60.0)

    async def both():
        task = asyncio.create_task(burst())
        steady = await offer(bench.server.port, rate, steady_seconds, numbers, linger=5.0)
        task.cancel()
        return steady

    steady = asyncio.run(both())
    assert not steady.broken, steady.broken
    assert any(code == "memory_pressure" for code in steady.codes), "the burst was to be felt"
    before = goodput(steady, bench.slo, start + RAMP_SECONDS)
    after = goodput(steady, bench.slo, start + calm + BURST_SECONDS + BACK_SECONDS)
    assert after >= 0.95 * before


def goodput(record, slo, begin):
    """Tokens within the SLO of the requests that arrived from then on, a second."""
    within = [one for one in record.answers if begin <= one.arrived < begin + WINDOW_SECONDS]
    return sum(one.tokens for one in within if one.is_good(slo)) / WINDOW_SECONDS
