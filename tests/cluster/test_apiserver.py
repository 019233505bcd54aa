"""The API server for tests: ready when entered, gone when left."""

import subprocess

import pytest

from e2e.cluster.apiserver import ApiServer

pytestmark = pytest.mark.api


class _Failure(Exception):
    pass


def test_it_answers_inside_and_leaves_nothing_even_after_a_failure() -> None:
    with pytest.raises(_Failure), ApiServer() as server:
        kubectl = [str(server.bin_dir / "kubectl"), f"--kubeconfig={server.kubeconfig}"]
        answer = subprocess.run(
            [*kubectl, "get", "namespaces", "--output=name"], capture_output=True, text=True
        )
        assert "namespace/default" in answer.stdout
        directory = str(server.directory)
        raise _Failure
    assert not server.directory.exists()
    assert subprocess.run(["pgrep", "--full", directory], capture_output=True).stdout == b""
