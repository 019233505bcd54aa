"""Child processes of the supervisor."""

import os
import time

from quire_server.supervisor.children import Children


def test_a_child_runs_no_code_of_the_directory_it_is_started_in(tmp_path, monkeypatch):
    """`cd MODEL && quire-server serve .`: nothing in a model's directory is to be trusted."""
    for module in ("ctypes", "runpy", "json", "quire_server"):
        (tmp_path / f"{module}.py").write_text("open('pwned', 'w')")
    monkeypatch.chdir(tmp_path)
    children = Children()
    children.spawn("health", "quire_server.health", ["run-dir", "--help"], os.environ)
    while not (ended := children.reap()):
        time.sleep(0.01)
    assert not (tmp_path / "pwned").exists()
    assert ended[0].wait_status == 0
