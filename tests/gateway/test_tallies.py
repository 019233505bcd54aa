"""Counts are exposed as prometheus_client exposes its own metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily

from quire_gateway.tallies import Distribution, Tally

BOUNDS = (0.1, 0.5, 1, 10)
VALUES = (0.0, 0.1, 0.100001, 0.5, 1.0, 9.5, 10, 11.0, 1e9)


def text(registry):
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_counters_and_gauges_are_exposed_as_those_of_the_library():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    requests = Tally("requests", "By status.", ["model", "status"], registry=ours)
    running = Tally("running", "Now.", registry=ours, family=GaugeMetricFamily)
    idle = Tally("idle", "Never.", registry=ours)
    counter = Counter("requests", "By status.", ["model", "status"], registry=theirs)
    gauge = Gauge("running", "Now.", registry=theirs)
    Counter("idle", "Never.", registry=theirs)
    assert text(ours) == text(theirs), "one without labels is 0 before it is counted"
    for model, number in (('a"b\\c\n', 1), ("tiny", 3), ("tiny", 2.5)):
        requests.add(model, "success", number=number)
        counter.labels(model, "success").inc(number)
    for change in (1, 1, -1):
        running.add(number=change)
        gauge.inc(change)
    assert list(idle) == [()]
    assert text(ours) == text(theirs)


def test_histograms_are_exposed_as_those_of_the_library():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    seconds = Distribution("seconds", "Of requests.", ["model"], bounds=BOUNDS, registry=ours)
    histogram = Histogram("seconds", "Of requests.", ["model"], buckets=BOUNDS, registry=theirs)
    seconds.begin("early")
    histogram.labels("early")
    for value in VALUES:
        seconds.observe(value, "tiny")
        histogram.labels("tiny").observe(value)
    seconds.begin("tiny")
    assert text(ours) == text(theirs)
    seconds.remove(("early",))
    histogram.remove("early")
    assert text(ours) == text(theirs)
