"""What clients have used in a period, and the budgets that are kept by it, at one and at several gateways."""

import calendar
from decimal import Decimal

import pytest

from quire_gateway.llm_client import Budget, LLMClient
from quire_gateway.llm_route import Prices
from quire_gateway.usage_ledger import Spending, UsageLedger, document, saved, spending
from quire_http.errors import ApiError
from tests.gateway.kube_stub import llm_object

PRICES = Prices(Decimal("0.15"), Decimal("0.6"))
NOON = calendar.timegm((2026, 11, 30, 12, 0, 0))


class Store:
    """The API server: the status that gateways save, and whether another one was faster."""

    def __init__(self, budget):
        self.body = llm_object("LLMClient", "alice", {"keyHashes": []})
        self.set_budget(budget)
        self.now = float(NOON)

    def set_budget(self, budget):
        self.body = {**self.body, "spec": {"keyHashes": [], "budget": {"period": budget.period}}}
        self.client = LLMClient("models", "alice", "uid-alice", "", (), budget=budget)

    def ledger(self):
        return UsageLedger(lambda place: self.body, lambda: self.now)

    def save(self, ledger):
        for one, body in ledger.unsaved():
            total = saved(body, one.period) + one.spent
            self.body = {**self.body, "status": {"usage": document(one.period, total)}}
            ledger.saved(one)

    @property
    def usage(self):
        return self.body["status"]["usage"]


def refused(ledger, client, most):
    with pytest.raises(ApiError) as error:
        ledger.reserve(client, most)
    assert (error.value.status, error.value.code) == (429, "insufficient_quota")
    assert ("x-should-retry", "false") in error.value.headers
    return str(error.value)


def use(ledger, client, most, spent):
    ledger.reserve(client, most)
    ledger.settle(client, most, spent)


def test_of_fifty_requests_at_once_as_many_pass_as_the_budget_has_room_for():
    store = Store(Budget(tokens=100))
    ledger, most = store.ledger(), Spending(1, 10, 60)
    ledger.reserve(store.client, most)
    assert all("100 tokens a month" in refused(ledger, store.client, most) for _ in range(49))
    ledger.settle(store.client, most, Spending(1, 10, 20))
    ledger.reserve(store.client, most)
    refused(ledger, store.client, Spending(1, 1, 0))


def test_a_cost_is_exact_and_kept_below_the_budget():
    store = Store(Budget(cost=Decimal("0.01")))
    ledger, most = store.ledger(), spending(20_000, 10_000, PRICES)
    assert most.cost == Decimal("0.009")
    for _ in range(3):
        use(ledger, store.client, most, spending(1, 1, PRICES))
    assert ledger.spent(store.client).cost == Decimal("0.00000225")
    ledger.reserve(store.client, most)
    assert "0.01 a month" in refused(ledger, store.client, most)


def test_what_several_gateways_and_their_successors_count_adds_up():
    store = Store(Budget(tokens=1000))
    one, two = store.ledger(), store.ledger()
    for ledger in (one, two, one):
        use(ledger, store.client, Spending(1, 0, 100), spending(10, 20, PRICES))
        store.save(ledger)
        store.save(ledger)
    use(two, store.client, Spending(1, 0, 100), Spending(1, 1, 0))
    assert {name: store.usage[name] for name in ("requests", "promptTokens", "completionTokens")} == {
        "requests": 3,
        "promptTokens": 30,
        "completionTokens": 60,
    }
    assert (store.usage["totalTokens"], store.usage["cost"]) == (90, "0.0000405")
    assert store.ledger().spent(store.client).tokens == 90
    assert two.spent(store.client).tokens == 91, "what it has not saved counts as well"


def test_what_is_used_while_it_is_saved_is_saved_the_next_time():
    store = Store(Budget(tokens=1000))
    ledger = store.ledger()
    use(ledger, store.client, Spending(1, 0, 9), Spending(1, 5, 0))
    ((one, _),) = ledger.unsaved()
    use(ledger, store.client, Spending(1, 0, 9), Spending(1, 7, 0))
    ledger.saved(one)
    assert [left.spent for left, _ in ledger.unsaved()] == [Spending(1, 7, 0)]


@pytest.mark.parametrize(("period", "after"), [("Day", 12 * 3600), ("Month", 12 * 3600)])
def test_a_new_period_begins_with_nothing_used(period, after):
    store = Store(Budget(period, tokens=100))
    ledger, most = store.ledger(), Spending(1, 100, 0)
    use(ledger, store.client, most, most)
    store.save(ledger)
    store.now += after - 1
    refused(ledger, store.client, most)
    store.now += 1
    use(ledger, store.client, most, most)
    store.save(ledger)
    assert store.usage["period"] == {"Day": "2026-12-01", "Month": "2026-12"}[period]
    assert store.usage["requests"] == 1


@pytest.mark.parametrize("periods", [("Day", "Month"), ("Month", "Day")])
def test_a_budget_whose_kind_of_period_changes_is_kept_from_then_on(periods):
    store = Store(Budget(periods[0], tokens=100))
    ledger, most = store.ledger(), Spending(1, 60, 0)
    use(ledger, store.client, most, most)
    store.save(ledger)
    use(ledger, store.client, Spending(1, 1, 0), Spending(1, 1, 0))
    store.set_budget(Budget(periods[1], tokens=100))
    for _ in range(2):
        store.save(ledger)
    use(ledger, store.client, most, most)
    store.save(ledger)
    refused(ledger, store.client, most)
    refused(store.ledger(), store.client, most)
    assert store.usage["totalTokens"] == 60


@pytest.mark.parametrize("periods", [("Day", "Month"), ("Month", "Day")])
def test_what_ran_while_the_kind_of_period_changed_is_saved_in_the_new_one(periods):
    store = Store(Budget(periods[0], tokens=100))
    ledger, most, before = store.ledger(), Spending(1, 60, 0), store.client
    ledger.reserve(before, most)
    store.set_budget(Budget(periods[1], tokens=100))
    ledger.settle(before, most, most)
    store.save(ledger)
    assert store.usage["totalTokens"] == 60
    refused(ledger, store.client, most)


@pytest.mark.parametrize(
    "usage",
    [{"period": "2026-11", "cost": "much"}, {"period": "2026-11", "cost": "NaN"}, {"period": 3}, "none", {}],
)
def test_a_status_that_no_gateway_wrote_counts_as_nothing_used(usage):
    store = Store(Budget(tokens=10))
    store.body["status"] = {"usage": usage}
    store.ledger().reserve(store.client, Spending(1, 10, 0))


def test_of_a_client_that_is_deleted_nothing_is_kept():
    store = Store(Budget(tokens=10))
    ledger = store.ledger()
    use(ledger, store.client, Spending(1, 5, 0), Spending(1, 5, 0))
    store.body = llm_object("LLMClient", "alice", {"keyHashes": []})
    store.body["metadata"]["uid"] = "another"
    assert list(ledger.unsaved()) == []
    assert ledger.spent(store.client) == Spending()
