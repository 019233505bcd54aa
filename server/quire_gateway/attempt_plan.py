"""Which replica is asked next for one request: never the same again, within its attempts and the budget.

A further one is asked because the last one failed, or beside the first, because that is slow (a hedge). Both
are retries, and take from one budget. Pure, with the time passed in.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_gateway.replica import Replica
from quire_gateway.replicas import Model
from quire_gateway.retry_budget import RetryBudget
from quire_gateway.routing.router import Pick, RequestFacts, Router


class AttemptPlan:
    """The attempts of one request at one model. ``avoided``: replicas that are asked last, because they have
    failed it already. ``kept_by``: the hint of the one that may be asked. ``adapter``: what it is for, if not
    for the model itself.
    """

    def __init__(
        self,
        model: Model,
        router: Router,
        facts: RequestFacts,
        retries: RetryBudget,
        most: int,
        avoided: Sequence[str] = (),
        kept_by: str | None = None,
        adapter: str = "",
    ) -> None:
        self.tried: list[str] = []
        self._model = model
        self._router = router
        self._facts = facts
        self._retries = retries
        self._most = most
        self._avoided = avoided
        self._kept_by = kept_by
        self._adapter = adapter

    def next(self, now: float) -> Pick | None:
        """The first replica, or another one after a failure; None: no one more is asked. The one that keeps
        what the request goes on with is asked though it be ejected: no other one can answer.
        """
        if self._kept_by is not None:
            keeper = None if self.tried else self._model.keeper(self._kept_by)
            return None if keeper is None else self._pick([keeper], now)
        others = self._candidates(*self._avoided)
        return self._pick(others or self._candidates(), now)

    def hedge(self, now: float) -> Pick | None:
        """Another replica beside one that is slow; None where none is well, or there is no retry left."""
        others = self._candidates(*self._avoided)
        return self._pick([one for one in others if self._is_well(one)], now)

    def _candidates(self, *avoided: str) -> list[Replica]:
        return self._model.candidates([*self.tried, *avoided], self._adapter)

    def _is_well(self, replica: Replica) -> bool:
        return not self._model.outliers.is_ejected(replica.endpoint.uid)

    def _pick(self, candidates: Sequence[Replica], now: float) -> Pick | None:
        if not candidates or len(self.tried) >= self._most:
            return None
        if self.tried and not self._retries.take_retry(now):
            return None
        choice = self._router.pick(self._facts, candidates, now)
        if choice is not None:
            self.tried.append(choice.replica.endpoint.uid)
        return choice
