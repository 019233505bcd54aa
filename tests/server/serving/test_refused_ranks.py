"""A number of ranks that does not divide the model: what the server says reaches the status."""

import pytest

from e2e import models
from e2e.operator import pods as kubelet
from quire_operator import reports
from quire_operator.status.reasons import REASONS
from tests.operator.status.objects import compute, condition, pod
from tests.server.launch import Server


@pytest.mark.deep
def test_the_sizes_that_work_reach_the_status_with_the_remedy(tmp_path):
    with Server(models.smollm2(), tmp_path, "--tensor-parallel-size", "2") as server:
        server.wait_end()
        assert server.process.returncode == 2
        said = reports.parse_termination(server.termination_log.read_text())

    computed = compute(pod(kubelet.terminated(2, said.reason, message=said.message)))

    assert said.reason == "ConfigError"
    assert "cannot be divided among 2 ranks" in said.message and "one of 1, 3." in said.message
    assert condition(computed, "Degraded") == ("True", "ConfigError")
    assert said.message.rstrip(".") in computed["lastFailure"]["message"]
    assert REASONS["ConfigError"].remedy[1:] in computed["lastFailure"]["message"]
    assert "spec.parallelism" in computed["lastFailure"]["message"]
