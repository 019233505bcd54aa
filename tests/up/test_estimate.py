"""What `make up` says before it begins."""

from e2e.cluster import programs
from e2e.up import estimate


def test_an_empty_machine_is_promised_minutes_downloads_and_disk() -> None:
    text = estimate.describe({cost.name for cost in estimate.COSTS})

    assert "min on 2 cores" in text and "GB of downloads" in text and "GB of disk" in text
    assert "kube, coredns, helm, images, model" in text


def test_a_second_run_takes_a_minute_and_fetches_nothing() -> None:
    assert estimate.describe(()) == "It takes about 1 min: everything is built already."


def test_more_cores_take_less_time() -> None:
    def minutes(cores: int) -> int:
        return int(estimate.describe({"kube", "images"}, cores=cores).split()[3])

    assert minutes(8) < minutes(2)


def test_every_program_that_a_cluster_needs_and_that_takes_long_is_counted() -> None:
    assert {*programs.OF_UP} - {cost.name for cost in estimate.COSTS} == {"pause"}
