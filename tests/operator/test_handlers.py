"""The settings of kopf, where its defaults would end the process or write to objects."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Sized

import kopf

from e2e.failure_paths import import_hook
from quire_operator import names
from quire_operator.cluster import kinds
from quire_operator.handlers import EXIT_UNUSABLE, EndlessBackoffs, configure, is_logged


def configured() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    configure(settings)
    return settings


def test_api_errors_are_retried_forever_with_a_jittered_backoff_of_at_most_five_seconds() -> None:
    backoffs = configured().networking.error_backoffs

    assert isinstance(backoffs, EndlessBackoffs)
    assert not isinstance(backoffs, Sized), "kopf counts what has a length"
    first = list(itertools.islice(backoffs, 1000))
    assert len(first) == 1000
    assert min(first) > 0 and max(first) <= 5
    assert list(itertools.islice(backoffs, 1000)) != first, "each request begins anew, with other jitter"


def test_kopf_posts_no_events_watches_no_crds_and_uses_no_peering() -> None:
    settings = configured()

    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert settings.peering.standalone


def test_every_watch_but_those_of_our_own_kind_and_hpas_has_a_label_selector() -> None:
    selectors = configured().watching.label_selectors

    filtered = {selector.any_name for selector in list(selectors)}
    unfiltered = {kinds.LLM_DEPLOYMENT, kinds.HPA}  # another owner's autoscaler carries no label of ours
    assert filtered == {kind.plural for kind in kinds.WATCHED if kind not in unfiltered}
    assert set(selectors.values()) == {names.LABEL_NAME}


def test_retries_of_a_forbidden_watch_are_not_logged() -> None:
    def is_shown(error: str, logger: str = "kopf._cogs.clients.watching") -> bool:
        words = f"Request attempt #7 failed; will retry: GET /apis/batch/v1/jobs -> {error}"
        return is_logged(logging.LogRecord(logger, logging.ERROR, "", 0, words, (), None))

    assert not is_shown("APIForbiddenError('jobs.batch is forbidden', status=403)")
    assert is_shown("APIServerError('the database is gone', status=500)")
    assert is_shown("APIForbiddenError('jobs.batch is forbidden', status=403)", "quire_operator.controller")


def test_the_watch_timeout_of_the_server_is_shorter_than_that_of_the_client() -> None:
    watching = configured().watching

    assert watching.server_timeout is not None and watching.client_timeout is not None
    assert 290 <= watching.server_timeout <= 600
    assert watching.client_timeout == watching.server_timeout + 30


def test_freed_large_buffers_are_returned_to_the_system_despite_small_allocations_between_them() -> None:
    script = """
from quire_operator import handlers
handlers.allocate_large_buffers_with_mmap()
def megabytes():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
first = bytes(1_000_000)  # glibc makes more of its heap with the first that is freed
del first
before, pairs = megabytes(), [(b"x" * 300_000, b"y" * 20_000) for _ in range(300)]
full = megabytes()
kept = [small for _, small in pairs]
del pairs
print(full - before, megabytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    full, left = map(float, done.stdout.split())
    assert full > 80, "the buffers were there"
    assert left < full / 4


def test_a_setting_that_cannot_be_used_ends_the_process_with_its_name_and_no_traceback() -> None:
    environment = {
        "QUIRE_ENGINE_IMAGE": "engine:1",
        "QUIRE_RESYNC_SECONDS": "often",
        "PATH": os.environ["PATH"],
    }
    environment |= import_hook.environment("")
    done = subprocess.run(
        [sys.executable, "-m", "quire_operator", "run"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == EXIT_UNUSABLE
    assert done.stderr.startswith("quire-operator: ") and "QUIRE_RESYNC_SECONDS" in done.stderr
    assert "Traceback" not in done.stderr
