"""Who may call what: every route of the API server and of the health server, with every method, Host and key.

The tables say it for each route. A route that the program has and the table has not fails, so that a
new one gets a decision about who may call it.
"""

import contextlib
import http.client
import itertools
from dataclasses import dataclass
from typing import Literal

import pytest

from quire_server.api import pooling_routes
from quire_server.api.auth import PUBLIC_PATHS
from quire_server.api.routes import POOLING_PATHS, router
from quire_server.health import server as health_server
from tests.server.conftest import ADMIN_KEY, KEY


@dataclass(frozen=True)
class Policy:
    """Who may call a route, with which methods, and what a request without a body gets who may."""

    who: Literal["anyone", "key", "admin"]
    methods: frozenset[str]
    answer: int = 200
    example: str = ""  # a path of a route with parameters


READ, SEND = frozenset({"GET", "HEAD"}), frozenset({"POST"})
API = {
    "/": Policy("key", READ),
    "/docs": Policy("key", READ),
    "/docs/{name}": Policy("key", READ, example="/docs/swagger-ui.css"),
    "/openapi.json": Policy("key", READ),
    "/version": Policy("key", READ),
    "/health": Policy("anyone", READ),
    "/metrics": Policy("anyone", READ),
    "/v1/models": Policy("key", READ),
    "/v1/models/{model:path}": Policy("key", READ, example="/v1/models/tiny"),
    "/v1/chat/completions": Policy("key", SEND, answer=400),
    "/v1/completions": Policy("key", SEND, answer=400),
    "/v1/messages": Policy("key", SEND, answer=400),
    "/v1/messages/count_tokens": Policy("key", SEND, answer=400),
    "/v1/responses": Policy("key", SEND, answer=400),
    "/v1/responses/{response_id}": Policy("key", READ | {"DELETE"}, answer=404, example="/v1/responses/x"),
    "/v1/responses/{response_id}/input_items": Policy(
        "key", READ, answer=404, example="/v1/responses/x/input_items"
    ),
    "/v1/responses/{response_id}/cancel": Policy("key", SEND, answer=404, example="/v1/responses/x/cancel"),
    "/tokenize": Policy("key", SEND, answer=400),
    "/detokenize": Policy("key", SEND, answer=400),
    "/reset_prefix_cache": Policy("admin", SEND),
    "/v1/load_lora_adapter": Policy("admin", SEND, answer=404),  # without --adapters-dir
    "/v1/unload_lora_adapter": Policy("admin", SEND, answer=404),
}
HEALTH = {
    path: Policy("anyone", frozenset({"GET"})) for path in ("/startupz", "/readyz", "/livez", "/statusz")
}
# Paths that look like a public one, or like part of another.
NOWHERE = (
    "/nowhere",
    "/v1",
    "/docs/",
    "/health/",
    "//health",
    "/health/..%2fversion",
    "/metrics/x",
)

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
# The first is the server's own. A URL that is put together from any other one has a public path.
HOSTS = ("127.0.0.1", "health", "x/health", "x/health?", "x/health#", "x/../health", "@/health", "\\health")
CREDENTIALS = {
    "none": {},
    "wrong": {"Authorization": "Bearer wrong"},
    "empty": {"Authorization": "Bearer "},
    "of another scheme": {"Authorization": f"Basic {KEY}"},
    "in two headers": {"Authorization": f"Bearer {ADMIN_KEY}", "X-Api-Key": KEY},
    "key": {"Authorization": f"Bearer {KEY}"},
    "admin": {"X-Api-Key": ADMIN_KEY},
}
RANKS = {"anyone": 0, "key": 1, "admin": 2}


def expected(policy: Policy, method: str, credential: str) -> int:
    """The status that the table gives a request: who asks is decided first, then the method."""
    rank = RANKS.get(credential, 0)
    if rank < RANKS[policy.who]:
        return 401 if rank == 0 else 403
    return policy.answer if method in policy.methods else 405


def ask(connection, method, path, host, headers):
    """The status of one request that is sent with exactly this Host."""
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"Host": host, "Content-Length": "0", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    response.read()
    return response.status


def test_every_route_of_the_api_has_a_policy_with_its_methods():
    served: dict[str, set[str]] = {}
    for route in router.routes:
        methods = served.setdefault(route.path, set())
        methods |= route.methods | ({"HEAD"} if "GET" in route.methods else set())
    assert served == {path: set(policy.methods) for path, policy in API.items()}


def test_every_route_of_a_model_that_embeds_texts_needs_a_key_as_those_of_generation_do():
    """Who may ask is decided before the route is looked up: see the table's other paths."""
    assert {route.path: route.methods for route in pooling_routes.router.routes} == dict.fromkeys(
        POOLING_PATHS, {"POST"}
    )
    assert not POOLING_PATHS & PUBLIC_PATHS


def test_every_path_of_the_health_server_has_a_policy():
    assert set(HEALTH) == health_server.PATHS


def check_api(server, path, cases):
    """Each case: a method, a Host, the name of a credential."""
    policy = API.get(path, Policy("key", frozenset(METHODS), answer=404))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        for case in cases:
            method, host, credential = case
            status = ask(connection, method, policy.example or path, host, CREDENTIALS[credential])
            assert status == expected(policy, method, credential), case


@pytest.mark.parametrize("path", [*API, *NOWHERE])
def test_the_api_answers_by_its_table_whatever_the_method_the_host_and_the_key(server, path):
    """Every method with every credential, and each of these with every Host."""
    pairs = itertools.product(enumerate(METHODS), enumerate(CREDENTIALS))
    cases = [(method, HOSTS[(m + c) % len(HOSTS)], one) for (m, method), (c, one) in pairs]
    assert {(method, one) for method, _, one in cases} == set(itertools.product(METHODS, CREDENTIALS))
    assert {(host, one) for _, host, one in cases} == set(itertools.product(HOSTS, CREDENTIALS))
    check_api(server, path, cases)


@pytest.mark.deep
@pytest.mark.parametrize("path", [*API, *NOWHERE])
def test_the_api_answers_by_its_table_in_every_combination(server, path):
    check_api(server, path, itertools.product(METHODS, HOSTS, CREDENTIALS))


@pytest.mark.parametrize("path", [*HEALTH, "/", "/metrics", "/readyz/", "/v1/models"])
def test_the_health_server_answers_by_its_table_whatever_the_method_the_host_and_the_key(server, path):
    policy = HEALTH.get(path, Policy("anyone", frozenset({"GET"}), answer=404))
    for method, host, (credential, headers) in itertools.product(METHODS, HOSTS[:3], CREDENTIALS.items()):
        connection = http.client.HTTPConnection("127.0.0.1", server.health_port, timeout=60)
        with contextlib.closing(connection):
            status = ask(connection, method, path, host, headers)
            assert status == (policy.answer if method in policy.methods else 501), (method, host, credential)
