"""What the code declares and a whole test run has to exercise, each as a record says it when it happens."""

from __future__ import annotations

from pathlib import Path

from e2e.failure_paths import handlers, import_hook
from quire_operator.status.reasons import REASONS
from quire_server import fault_injection, termination

ROOT = Path(__file__).parents[2]


def records() -> set[str]:
    """Every record that a whole run must have made, but for those of `exempt`."""
    return faults() | exception_handlers() | conditions() | terminations()


def faults() -> set[str]:
    """Each fault took effect, by the log of a server."""
    return {f"fault {name}" for name in fault_injection.NAMES}


def exception_handlers() -> set[str]:
    """Each handler of the packages that are recorded has run."""
    found = set()
    for shelf in ("operator", "server"):
        for path in (ROOT / shelf).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT / shelf).with_suffix("").parts).removesuffix(".__init__")
            if import_hook.covers(module):
                found |= {f"except {name}" for name in handlers.names(module, path.read_bytes())}
    return found


def conditions() -> set[str]:
    """Each reason stood in every condition that the table says, in a status that a test read from a real API
    server, and an Event reported it.
    """
    shown = {
        f"condition {condition} {reason.name}"
        for reason in REASONS.values()
        for condition in filter(None, reason.shown.split(", "))
    }
    return shown | {f"event {reason.name}" for reason in REASONS.values()}


def terminations() -> set[str]:
    """A program of the server ended with each reason, by the termination log that a test read."""
    return {f"termination {reason.value}" for reason in termination.Reason}
