"""Which replica each policy chooses, and what it learns: pure, with a clock and chance of the test's own."""

import random
from collections import Counter

import pytest

from quire_gateway.llm_route import STRATEGIES, Strategy
from quire_gateway.replica import Endpoint, Replica
from quire_gateway.routing.hash_ring import HashRing
from quire_gateway.routing.prefix_index import PrefixIndex
from quire_gateway.routing.prompt_blocks import BLOCK_BYTES, digests
from quire_gateway.routing.router import RequestFacts
from quire_gateway.routing.strategies import router_for

NOW, SEED = 100.0, 7


def replicas(*uids):
    return [Replica(Endpoint(uid, "10.0.0.1", 8000, 8001)) for uid in uids]


def router_of(strategy, candidates, session_header="x-session-id", **options):
    router = router_for(Strategy(strategy, session_header), random.Random(1), SEED, **options)
    router.keep([one.endpoint.uid for one in candidates])
    return router


def chat(system, question, **others):
    return RequestFacts("tiny", ("system", system, "user", question), **others)


def uid_of(router, facts, candidates):
    return router.pick(facts, candidates, NOW).replica.endpoint.uid


def text(name, kilobytes):
    return f"{name} ".ljust(8, "x") * (128 * kilobytes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_policy_takes_the_only_candidate_and_none_without_one(strategy):
    candidates = replicas("a")
    router = router_of(strategy, candidates)
    assert router.pick(chat("s", "q"), [], NOW) is None
    choice = router.pick(chat("s", "q"), candidates, NOW)
    assert choice.replica is candidates[0]
    router.answered(choice, 0)
    router.learn("a", [1, 2])


def test_round_robin_takes_turns():
    candidates = replicas("a", "b", "c")
    router = router_of("RoundRobin", candidates)
    assert Counter(uid_of(router, RequestFacts(), candidates) for _ in range(9)) == {"a": 3, "b": 3, "c": 3}


def test_chance_reaches_all():
    candidates = replicas("a", "b", "c")
    router = router_of("Random", candidates)
    picks = Counter(uid_of(router, RequestFacts(), candidates) for _ in range(900))
    assert min(picks[uid] for uid in "abc") > 200


def test_the_least_busy_replica_is_chosen_and_ties_are_broken_by_chance():
    a, b, c = candidates = replicas("a", "b", "c")
    router = router_of("LeastLoad", candidates)
    a.in_flight = 1
    picks = Counter(
        (choice.replica.endpoint.uid, choice.reason)
        for choice in (router.pick(RequestFacts(), candidates, NOW) for _ in range(1000))
    )
    assert picks.keys() == {("b", "tie"), ("c", "tie")}
    assert min(picks.values()) > 400
    b.in_flight = 1
    assert router.pick(RequestFacts(), candidates, NOW).reason == "least_load"
    assert router.pick(RequestFacts(), [c], NOW).reason == "only"


def test_of_two_the_less_busy_one_is_chosen_so_the_busiest_of_all_never_is():
    candidates = replicas("a", "b", "c")
    candidates[0].in_flight = 9
    router = router_of("PowerOfTwo", candidates)
    assert {uid_of(router, RequestFacts(), candidates) for _ in range(200)} == {"b", "c"}


@pytest.mark.parametrize(
    "facts", [RequestFacts(user="me"), RequestFacts(headers=((b"x-session-id", b"me"),), user="other")]
)
def test_a_session_stays_while_its_pod_is_there_and_moves_once_when_it_is_gone(facts):
    candidates = replicas("a", "b", "c", "d")
    router = router_of("Session", candidates)
    first = router.pick(facts, candidates, NOW)
    assert first.reason == "new_session"
    first.replica.in_flight = 1000
    assert {uid_of(router, facts, candidates) for _ in range(20)} == {first.replica.endpoint.uid}
    rest = [one for one in candidates if one is not first.replica]
    router.keep([one.endpoint.uid for one in rest])
    assert len({uid_of(router, facts, rest) for _ in range(20)}) == 1


def test_gateways_place_a_session_alike_and_requests_without_one_go_by_load():
    candidates = replicas("a", "b", "c", "d")
    one, other = (router_of("Session", candidates, "X-Chat") for _ in range(2))
    for number in range(50):
        facts = RequestFacts(headers=((b"x-chat", b"%d" % number),))
        assert uid_of(one, facts, candidates) == uid_of(other, facts, candidates)
    assert one.pick(RequestFacts(), candidates, NOW).reason == "least_of_two"


def test_a_ring_moves_only_the_keys_of_the_pod_that_leaves():
    four = {one.endpoint.uid: one for one in replicas("a", "b", "c", "d")}
    three = {uid: one for uid, one in four.items() if uid != "d"}
    ring = HashRing(SEED)
    ring.keep(four)
    chance = random.Random(3)
    keys = [chance.getrandbits(64) for _ in range(2000)]
    before = [ring.home(key, four, 100, NOW).endpoint.uid for key in keys]
    ring.keep(three)
    after = [ring.home(key, three, 100, NOW).endpoint.uid for key in keys]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "d")
    assert min(Counter(before).values()) > 350


def test_a_home_without_room_hands_over_to_the_next_on_the_ring():
    candidates = {one.endpoint.uid: one for one in replicas("a", "b", "c", "d")}
    ring = HashRing(SEED)
    ring.keep(candidates)
    home = ring.home(1, candidates, 0, NOW)
    home.in_flight = 8
    other = ring.home(1, candidates, 8, NOW)
    assert other is not home
    assert ring.home(1, candidates, 8, NOW) is other


def test_the_worked_example_python_docker_python():
    """Of two replicas the third prompt goes where the first went, for any chance."""
    python, docker = text("Python", 2), text("Docker", 2)
    for seed in range(30):
        candidates = replicas("one", "two")
        router = router_for(Strategy("Prefix"), random.Random(seed), seed)
        router.keep(["one", "two"])
        first = uid_of(router, chat(python, "What is a list?"), candidates)
        uid_of(router, chat(docker, "What is a layer?"), candidates)
        third = router.pick(chat(python, "What is a dict?"), candidates, NOW)
        assert (third.replica.endpoint.uid, third.reason) == (first, "prefix")
        assert third.num_known == 2


def test_more_than_half_of_a_mixed_trace_hits():
    """Twelve subjects in any order, a third of the prompts about none of them."""
    chance, candidates = random.Random(5), replicas("one", "two")
    router = router_of("Prefix", candidates)
    held = {"one": set(), "two": set()}
    hits = 0
    for number in range(300):
        subject = f"s{chance.randrange(12)}" if number % 3 else f"alone{number}"
        choice = router.pick(chat(text(subject, 3), f"question {number}"), candidates, NOW)
        cache = held[choice.replica.endpoint.uid]
        hits += subject in cache
        cache.add(subject)
        for one in candidates:
            one.in_flight = chance.randrange(4)
    assert hits > 150


def test_a_busy_replica_loses_its_prompts_and_the_prefix_then_is_known_on_two():
    candidates = replicas("a", "b")
    router = router_of("Prefix", candidates)
    facts = chat(text("Python", 4), "q")
    first = router.pick(facts, candidates, NOW).replica
    first.in_flight = 40
    other = router.pick(facts, candidates, NOW)
    assert other.replica is not first
    first.in_flight = 0
    assert router.pick(facts, candidates, NOW).num_known == 4
    match = router.index.match(other.digests)
    assert [match.depth(router.index.bit(uid)) for uid in ("a", "b")] == [4, 4]


def test_a_light_load_takes_no_prompt_from_its_replica():
    candidates = replicas("a", "b", "c", "d")
    router = router_of("Prefix", candidates)
    facts = chat(text("Python", 4), "q")
    first = router.pick(facts, candidates, NOW).replica
    first.in_flight = 1
    assert {uid_of(router, facts, candidates) for _ in range(50)} == {first.endpoint.uid}


def test_gateways_that_share_nothing_send_new_prefixes_to_the_same_replicas():
    candidates = replicas(*"abcdefgh")
    one, other = (router_of("Prefix", candidates) for _ in range(2))
    same = sum(
        uid_of(one, chat(text(f"t{number}", 3), "q"), candidates)
        == uid_of(other, chat(text(f"t{number}", 3), "q"), candidates)
        for number in range(100)
    )
    assert same > 90


def test_a_common_system_prompt_sends_not_all_to_one_replica():
    candidates = replicas(*"abcdefgh")
    router = router_of("Prefix", candidates)
    picks = Counter()
    for number in range(400):
        choice = router.pick(chat(text("system", 2), text(f"q{number}", 2)), candidates, NOW)
        picks[choice.replica.endpoint.uid] += 1
        choice.replica.in_flight += 1
    assert max(picks.values()) < 1.5 * 400 / 8


def test_what_a_peer_chose_is_a_match_and_what_was_chosen_is_published():
    candidates = replicas(*"abcdefgh")
    sent = []
    one = router_of("Prefix", candidates, publish=lambda uid, blocks: sent.append((uid, blocks)))
    other = router_of("Prefix", candidates)
    facts = chat(text("Python", 4), "q")
    one.pick(facts, candidates, NOW)
    for uid, blocks in sent:
        other.learn(uid, blocks)
    choice = other.pick(facts, candidates, NOW)
    assert [(choice.replica.endpoint.uid, choice.digests)] == sent
    assert choice.num_known == 4


def test_a_predicted_hit_that_was_none_is_forgotten_and_one_that_was_is_kept():
    candidates = replicas("a", "b")
    router = router_of("Prefix", candidates)
    facts = chat(text("Python", 4), "q")
    router.pick(facts, candidates, NOW)
    hit = router.pick(facts, candidates, NOW)
    router.answered(hit, 900)
    assert router.index.match(hit.digests).masks
    router.answered(hit, 0)
    assert not router.index.match(hit.digests).masks


def test_prompts_share_as_many_digests_as_they_have_kilobytes_in_common():
    one = digests(chat(text("a", 5), "q1"), SEED)
    other = digests(chat(text("a", 3) + text("b", 2), "q1"), SEED)
    common = [x == y for x, y in zip(one, other, strict=True)]
    assert common == [True, True, True, False, False]


@pytest.mark.parametrize(
    "facts",
    [
        RequestFacts("lora", ("user", text("a", 2))),
        RequestFacts("tiny", ("user", text("a", 2)), cache_salt="x"),
        RequestFacts("tiny", ("system", text("a", 2))),
    ],
)
def test_an_adapter_a_salt_and_a_role_have_blocks_of_their_own(facts):
    assert not set(digests(facts, SEED)) & set(digests(RequestFacts("tiny", ("user", text("a", 2))), SEED))


def test_the_seed_of_the_install_changes_all_digests_and_any_text_has_some():
    facts = RequestFacts("tiny", ("user", "short \ud800"))
    assert len(digests(facts, SEED)) == 1
    assert digests(facts, SEED) != digests(facts, SEED + 1)
    assert digests(RequestFacts("tiny"), SEED) == []
    growing = RequestFacts("tiny", ("user", "x" * (BLOCK_BYTES + 300)))
    assert len(digests(growing, SEED)) == 1


def test_the_index_is_bounded_forgets_ends_before_beginnings_and_pods_that_are_gone():
    index = PrefixIndex(max_blocks=10, max_total=16)
    index.keep(["a"])
    index.add("a", range(1, 9))
    index.add("a", range(101, 106))
    assert len(index) == 10
    assert len(index.match(range(1, 9)).masks) == 5
    assert len(index.match(range(101, 106)).masks) == 5
    index.keep(["a", "b"])
    assert len(index) == 8
    index.add("b", range(101, 106))
    index.keep(["b"])
    assert len(index) == 5
    assert list(index.owners(index.match([101]).masks[0])) == ["b"]
    index.add("gone", [1, 2])
    index.keep(["b", "c"])
    assert index.bit("b") != index.bit("c") != 0
    assert index.match([1]).masks == []
    index.keep([])
    assert len(index) == 0 and not index._masks
