"""The sum over the ready pods: fresh samples of all of them, or no value at all."""

from __future__ import annotations

import pytest

from quire_metrics_adapter.errors import HostileAnswerError
from quire_metrics_adapter.exposition import MAX_BYTES, MAX_SERIES, parse
from quire_metrics_adapter.load import STALE_SECONDS, Load, LoadSample, Unknown, quantity, total

NOW = 1000.0
QUEUE = "llm_queue_depth"


def sample(value: float | None, age: float = 0.0) -> LoadSample:
    return LoadSample(NOW - age, {} if value is None else {QUEUE: value})


def load(pods: str, **samples: LoadSample) -> Load | Unknown:
    return total(QUEUE, set(pods.split()), samples, NOW)


def test_the_load_is_the_sum_over_the_ready_pods_with_the_age_of_the_oldest_sample() -> None:
    assert load("a b", a=sample(3, age=1), b=sample(4, age=6)) == Load(7, 6)


def test_pods_that_are_not_ready_do_not_count() -> None:
    assert load("a", a=sample(3), loading=sample(50), gone=sample(50)) == Load(3, 0)


def test_an_idle_deployment_has_a_load_of_zero() -> None:
    assert load("a b", a=sample(0), b=sample(0)) == Load(0, 0)


@pytest.mark.parametrize(
    ("pods", "samples", "says"),
    [
        ("a b", {"a": sample(3)}, "1 of 2 ready pods did not answer"),
        ("a b", {}, "2 of 2 ready pods did not answer"),
        ("a b", {"a": sample(3), "b": sample(0, age=STALE_SECONDS + 0.1)}, "1 of 2 ready pods did not"),
        ("a b", {"a": sample(3), "b": sample(None)}, "1 of 2 ready pods have no believable llm_queue_depth"),
        ("a", {"a": sample(None)}, "1 of 1 ready pods have no believable"),
        ("", {"a": sample(3)}, "no pod of it is ready"),
    ],
)
def test_without_a_fresh_sample_of_every_ready_pod_there_is_no_value(
    pods: str, samples: dict[str, LoadSample], says: str
) -> None:
    found = load(pods, **samples)

    assert isinstance(found, Unknown)
    assert says in found.message


def test_a_sample_counts_until_it_is_stale() -> None:
    assert load("a", a=sample(3, age=STALE_SECONDS)) == Load(3, STALE_SECONDS)


def test_a_metric_is_absent_only_if_no_ready_pod_reports_it() -> None:
    neither, one = load("a b", a=sample(None), b=sample(None)), load("a b", a=sample(1), b=sample(None))

    assert isinstance(neither, Unknown) and neither.is_absent
    assert isinstance(one, Unknown) and not one.is_absent


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (1.6, "1600m"), (1.1, "1100m"), (0.7 * 3, "2100m"), (1e-4, "1m")],
)
def test_a_value_is_formatted_as_a_kubernetes_quantity(value: float, text: str) -> None:
    assert quantity(value) == text


SOUND = b"""# HELP llm_queue_depth Requests that wait for the engine.
# TYPE llm_queue_depth gauge
llm_queue_depth{model="a} 7 {"} 12.0
llm_queue_depth_other{model="m"} 99.0
vllm:num_requests_waiting{model_name="m",engine="0"} 12.0
llm_running_requests{model="m"} 3.0 1700000000000
llm_kv_cache_utilization{model="m"} 2.5e-01
llm_gpu_utilization_ratio{gpu_id="0",model="m"} 0.5
llm_gpu_utilization_ratio{gpu_id="1",model="m"} 1.0
"""


def test_the_metrics_text_of_a_server_is_parsed() -> None:
    assert parse(SOUND) == {
        "llm_queue_depth": 12,
        "llm_running_requests": 3,
        "llm_kv_cache_utilization": 0.25,
        "llm_gpu_utilization": 0.75,
    }


def test_a_missing_metric_has_no_value() -> None:
    assert parse(b"llm_queue_depth 4\n") == {"llm_queue_depth": 4}
    assert parse(b"") == {}
    assert parse(b"\xff\xfe{}\x00\n") == {}


@pytest.mark.parametrize(
    "value",
    [
        "NaN",
        "nan",
        "+Inf",
        "-Inf",
        "inf",
        "-1",
        "-0.5",
        "1e300",
        "1_0",
        "0x10",
        "",
        "one",
        "1 2 3",
        "١",
        "1e7",
    ],
)
def test_an_invalid_value_drops_its_metric_and_no_other(value: str) -> None:
    text = f'llm_queue_depth{{model="m"}} {value}\nllm_running_requests{{model="m"}} 3\n'

    assert parse(text.encode()) == {"llm_running_requests": 3}


def test_a_ratio_above_one_is_dropped() -> None:
    assert parse(b"llm_kv_cache_utilization 1.01\nllm_gpu_utilization_ratio 100\n") == {}


def test_one_invalid_series_drops_the_whole_metric() -> None:
    assert parse(b'llm_queue_depth{model="a"} 1\nllm_queue_depth{model="b"} NaN\n') == {}


def test_a_metric_with_too_many_series_is_dropped() -> None:
    lines = b"".join(b'llm_queue_depth{model="%d"} 1\n' % i for i in range(MAX_SERIES + 1))

    assert parse(lines) == {}


def test_line_separators_in_a_label_cannot_inject_a_metric() -> None:
    """Unicode knows more line ends than the text format does."""
    assert parse('other{model="\u2028llm_queue_depth 5"} 1\n'.encode()) == {}
    assert parse(b'other{model="\x0bllm_queue_depth 5\x0c"} 1\n') == {}


def test_an_oversized_response_is_refused() -> None:
    with pytest.raises(HostileAnswerError):
        parse(b"#" * (MAX_BYTES + 1))
