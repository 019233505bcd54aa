"""How late the event loop runs what is due: the first thing to look at when answers come in jerks.

Runs beside the requests in the API process; knows nothing of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_PERIOD_SECONDS = 0.1


async def watch(observe: Callable[[float], None]) -> None:
    """Tell `observe` ten times a second by how many seconds a timer was late. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _PERIOD_SECONDS
        await asyncio.sleep(_PERIOD_SECONDS)
        observe(max(0.0, loop.time() - due))
