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


def test_the_load_is_the_sum_over_the_ready_pods_and_as_old_as_its_oldest_part() -> None:
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
def test_less_than_all_ready_pods_lately_is_no_value(
    pods: str, samples: dict[str, LoadSample], says: str
) -> None:
    found = load(pods, **samples)

    assert isinstance(found, Unknown)
    assert says in found.message


def test_a_sample_counts_until_it_is_stale() -> None:
    assert load("a", a=sample(3, age=STALE_SECONDS)) == Load(3, STALE_SECONDS)


def test_what_no_pod_has_is_absent_and_what_one_does_not_say_is_not() -> None:
    neither, one = load("a b", a=sample(None), b=sample(None)), load("a b", a=sample(1), b=sample(None))

    assert isinstance(neither, Unknown) and neither.is_absent
    assert isinstance(one, Unknown) and not one.is_absent


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (1.6, "1600m"), (1.1, "1100m"), (0.7 * 3, "2100m"), (1e-4, "1m")],
)
def test_a_value_becomes_a_quantity_of_kubernetes(value: float, text: str) -> None:
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


def test_the_text_of_a_server_is_read() -> None:
    assert parse(SOUND) == {
        "llm_queue_depth": 12,
        "llm_running_requests": 3,
        "llm_kv_cache_utilization": 0.25,
        "llm_gpu_utilization": 0.75,
    }


def test_a_metric_that_is_not_there_has_no_value() -> None:
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
def test_a_value_that_cannot_be_believed_takes_its_metric_away_and_no_other(value: str) -> None:
    text = f'llm_queue_depth{{model="m"}} {value}\nllm_running_requests{{model="m"}} 3\n'

    assert parse(text.encode()) == {"llm_running_requests": 3}


def test_a_share_above_one_is_a_lie() -> None:
    assert parse(b"llm_kv_cache_utilization 1.01\nllm_gpu_utilization_ratio 100\n") == {}


def test_one_lying_series_takes_the_metric_away() -> None:
    assert parse(b'llm_queue_depth{model="a"} 1\nllm_queue_depth{model="b"} NaN\n') == {}


def test_a_flood_of_series_is_not_summed() -> None:
    lines = b"".join(b'llm_queue_depth{model="%d"} 1\n' % i for i in range(MAX_SERIES + 1))

    assert parse(lines) == {}


def test_a_line_cannot_be_smuggled_in_through_a_label() -> None:
    """Unicode knows more line ends than the text format does."""
    assert parse('other{model="\u2028llm_queue_depth 5"} 1\n'.encode()) == {}
    assert parse(b'other{model="\x0bllm_queue_depth 5\x0c"} 1\n') == {}


def test_an_endless_answer_is_refused() -> None:
    with pytest.raises(HostileAnswerError):
        parse(b"#" * (MAX_BYTES + 1))
