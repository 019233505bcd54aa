"""Which programs there are, and which of them a running cluster needs."""

from e2e.cluster import programs


def test_up_builds_no_program_that_only_tests_need() -> None:
    tests_only = {p.name for p in programs.PROGRAMS} - {*programs.OF_UP}

    assert tests_only == {"otelcol", "verdicts", "reachability", "versitygw", "fakegcs", "kubeconform", "lws"}
    assert {*programs.OF_THE_NODE} < {*programs.OF_UP}


def test_leader_worker_set_is_built_for_several_nodes_and_not_for_one() -> None:
    assert programs.of_cluster(1) == programs.OF_THE_NODE
    assert {*programs.of_cluster(2)} - {*programs.OF_THE_NODE} == {"lws"}


def test_what_is_only_shown_is_no_part_of_the_key() -> None:
    (kube,) = [p for p in programs.PROGRAMS if p.name == "kube"]

    assert "steps" not in repr(kube)
