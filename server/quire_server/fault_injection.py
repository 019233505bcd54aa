"""Fault injection: `QUIRE_FAULT=name[:after=N][,option][;...]` makes the server fail on purpose, to test how
failures are detected and handled.

Refused unless `QUIRE_ALLOW_FAULTS=1`. Without faults, each injection point is one dictionary look-up. When a
fault takes effect the log says so, by which a test proves that it tests what it means to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire_server.errors import ConfigError

logger = logging.getLogger(__name__)

#: The message of the log line for a fault that took effect; its field `fault` has the name.
INJECTED = "a fault took effect"

NAMES = frozenset(
    {
        "slow_load",  # after = seconds per 10 % of the load
        "stalled_load",
        "crash_on_load",
        "crash_step",  # after = steps that work
        "stuck_step",  # after = steps that work
        "stuck_drain",
        "queue_depth",  # after = the forced depth
        "flapping_readiness",  # after = seconds per half period
        "wrong_canary",  # after = reruns that are still right
        "corrupt_kv_transfer",  # after = KV blocks that are sent as they are
        "nan_weight",  # after = steps before a weight becomes NaN
        # Of a rank of a divided model; after = passes that work. Options: `rank=K` (default 1), and
        # `late`: when the exchanges of the pass are made, instead of before them.
        "rank_exit",
        "rank_freeze",
        "rank_revision",  # it says that it is of another revision when it joins
        "rank_delay",  # by `seconds=S`, at one pass in ten, by chance early or late
    }
)


@dataclass(frozen=True)
class Fault:
    """One enabled fault."""

    name: str
    after: float
    once: bool
    rank: int = 1
    late: bool = False
    seconds: float = 0.3


class Faults:
    """The faults of this process, and marker files for those that are injected only once."""

    def __init__(self, faults: Mapping[str, Fault], marker_dir: Path) -> None:
        self._faults = faults
        self._marker_dir = marker_dir
        self._injected: set[str] = set()

    def get(self, name: str) -> Fault | None:
        """The fault if it is enabled, and was not injected before if it is a `once` fault."""
        fault = self._faults.get(name)
        if fault is None or (fault.once and self._marker(name).exists()):
            return None
        return fault

    def mark_injected(self, name: str) -> None:
        """Record that a fault took effect: in the log, once a process, and for a `once` fault by a marker,
        which outlives a restart of the container, but not the pod.
        """
        if name in self._injected:
            return
        self._injected.add(name)
        logger.warning(INJECTED, extra={"fault": name})
        if self._faults[name].once:
            self._marker(name).touch()

    def due(self, name: str, count: float) -> bool:
        """Whether to inject the fault now: it is enabled and `count` has reached its `after`. Records the
        injection.
        """
        fault = self.get(name)
        if fault is None or count < fault.after:
            return False
        self.mark_injected(name)
        return True

    def _marker(self, name: str) -> Path:
        return self._marker_dir / f"quire-fault-{name}"


def parse(environ: Mapping[str, str], marker_dir: Path = Path("/tmp")) -> Faults:
    """The faults in the environment. Raises ConfigError where they are invalid or not allowed."""
    text = environ.get("QUIRE_FAULT", "")
    if text and environ.get("QUIRE_ALLOW_FAULTS") != "1":
        raise ConfigError(
            "QUIRE_FAULT is set but faults are not allowed: unset it, or set QUIRE_ALLOW_FAULTS=1"
        )
    faults = [_parse_one(part.strip()) for part in text.split(";") if part.strip()]
    return Faults({fault.name: fault for fault in faults}, marker_dir)


def _parse_one(text: str) -> Fault:
    head, *flags = text.split(",")
    name, _, argument = head.partition(":")
    if name not in NAMES:
        raise ConfigError(f"QUIRE_FAULT: unknown fault {name!r}; known are {', '.join(sorted(NAMES))}")
    fault = Fault(name, 0.0, False)
    for option in [argument, *flags]:
        key, _, value = option.strip().partition("=")
        if key == "once" and not value:
            fault = replace(fault, once=True)
        elif key == "late" and not value:
            fault = replace(fault, late=True)
        elif key == "after":
            fault = replace(fault, after=_number(text, key, value))
        elif key == "seconds":
            fault = replace(fault, seconds=_number(text, key, value))
        elif key == "rank":
            fault = replace(fault, rank=int(_number(text, key, value)))
        elif key:
            raise ConfigError(
                f"QUIRE_FAULT: {text!r} has an unknown option {key!r}; known are after=N, once, rank=K, late "
                "and seconds=S"
            )
    return fault


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise ConfigError(f"QUIRE_FAULT: {text!r} needs a number >= 0 after `{key}=`")
    return number
