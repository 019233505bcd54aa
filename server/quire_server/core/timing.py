"""When a request passed which point in the engine, for those who ask where its time went.

Stamped by ``sequence``, carried by a request's first and last event, read by the API process for metrics and
spans. Nothing is ever decided by it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of the machine's monotonic clock, which all processes of a server share.

    ``scheduled`` is the last time before the first token that the request was given a row: with a preemption
    in between, the wait counts as queueing. What a later preemption costs is a part of the decode.
    """

    queued: float
    scheduled: float
    first_token: float
    finished: float | None  # None: not by the engine yet
    preemptions: int
