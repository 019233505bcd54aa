"""How gateways save what clients have used: an answer to a save never undoes what the watch has brought."""

import asyncio
import contextlib
import copy

import pytest

from quire_gateway import usage_writer
from quire_gateway.kube_api import ConflictError, KubeError
from quire_gateway.llm_client import key_hash, parse
from quire_gateway.routing_state import RoutingState
from quire_gateway.usage_ledger import Spending, UsageLedger
from quire_gateway.usage_writer import UsageWriter
from tests.gateway.kube_stub import llm_object

KEY = b"Bearer sk-alice"


class Api:
    """An API server with one connection. ``meanwhile``: runs after a write, before its answer is there."""

    def __init__(self, state):
        self.bodies, self.state = {}, state
        self.version = 0
        self.meanwhile = self.before = lambda: None
        self.refused = set()

    def create(self, name, **spec):
        body = llm_object("LLMClient", name, {"keyHashes": [key_hash(KEY)], **spec})
        return self.put(body)

    def put(self, body, *, is_seen=True):
        """Store it; ``is_seen``: the watch has brought it."""
        self.version += 1
        body = copy.deepcopy(body)
        body["metadata"]["resourceVersion"] = str(self.version)
        self.bodies[body["metadata"]["name"]] = body
        if is_seen:
            self.state.clients.put(body)
        return body

    @contextlib.asynccontextmanager
    async def connect(self):
        yield self

    async def send(self, method, path, patch, content_type):
        name = path.split("/")[-2]
        if name in self.refused:
            raise KubeError("422")
        self.before()
        body = self.bodies[name]
        if body["metadata"]["resourceVersion"] != patch["metadata"]["resourceVersion"]:
            raise ConflictError
        written = self.put({**body, "status": patch["status"]}, is_seen=False)
        self.meanwhile()
        return written

    def used(self, name):
        return self.bodies[name].get("status", {}).get("usage", {}).get("requests", 0)


@pytest.fixture
def state():
    return RoutingState()


@pytest.fixture
def api(state):
    return Api(state)


@pytest.fixture
def ledger(state):
    return UsageLedger(state.clients.get, lambda: 1e9)


def use(ledger, body):
    client, spent = parse(body), Spending(1, 2, 3)
    ledger.reserve(client, spent)
    ledger.settle(client, spent, spent)


def save(api, state, ledger):
    asyncio.run(UsageWriter(api, state, ledger).close())


def test_a_client_that_is_suspended_while_its_usage_is_saved_stays_suspended(api, state, ledger):
    body = api.create("alice")
    use(ledger, body)

    def suspend():
        api.meanwhile = lambda: None
        api.put({**api.bodies["alice"], "spec": {**body["spec"], "suspended": True}})

    api.meanwhile = suspend
    save(api, state, ledger)
    assert state.table.clients[key_hash(KEY)].suspended
    use(ledger, body)
    save(api, state, ledger)
    assert api.used("alice") == 2, "it is saved on the version that the watch has brought"


def test_a_client_that_is_deleted_while_its_usage_is_saved_is_gone(api, state, ledger):
    body = api.create("alice")
    use(ledger, body)
    api.meanwhile = lambda: state.clients.remove(body)
    save(api, state, ledger)
    assert key_hash(KEY) not in state.table.clients


def test_what_was_saved_is_known_before_the_watch_brings_it(api, state, ledger):
    body = api.create("alice")
    use(ledger, body)
    save(api, state, ledger)
    assert (api.used("alice"), ledger.spent(parse(body))) == (1, Spending(1, 2, 3))


def test_an_object_that_the_api_server_refuses_keeps_no_other_from_being_saved(api, state, ledger):
    refused, other = api.create("alice"), api.create("bob")
    use(ledger, refused)
    use(ledger, other)
    api.refused.add("alice")
    save(api, state, ledger)
    assert api.used("bob") == 1


def test_at_the_end_what_another_gateway_wrote_is_waited_for(api, state, ledger, monkeypatch):
    monkeypatch.setattr(usage_writer, "_CONFLICT_SECONDS", 0.01)
    body = api.create("alice")
    use(ledger, body)
    other = {"period": "2001-09", "requests": 5}

    def other_gateway():
        api.before = lambda: state.clients.put(api.bodies["alice"])
        api.put({**api.bodies["alice"], "status": {"usage": other}}, is_seen=False)

    api.before = other_gateway
    save(api, state, ledger)
    assert api.used("alice") == 6
