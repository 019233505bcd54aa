"""Requests with a grammar wait for their matcher beside the loop, and hold up nobody."""

import dataclasses

from quire_server.core.request import FinishReason, Grammar, GrammarKind
from quire_server.engine.messages import Outbox
from tests.server.engine.test_engine import Peer, ask


def with_grammar(name, text="fine", **more):
    request = ask(name, **more)
    grammar = Grammar(GrammarKind.REGEX, text)
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, grammar=grammar))


def test_others_are_answered_while_a_matcher_is_being_built(rig):
    with Peer(rig) as peer:
        peer.send(with_grammar("slow"))
        for number in range(3):
            peer.send(ask(f"plain-{number}"))
            assert peer.answer(f"plain-{number}")[0] == [6, 7, 8]
        rig.runner.grammars.may_build.set()
        assert peer.answer("slow")[0] == [6, 7, 8]
    rig.wait(lambda rig: not rig.runner.grammars.admitted)


def test_who_waits_for_a_matcher_is_counted_apart_from_those_who_wait_for_room(rig):
    def told(deferred):
        stats = (message.stats for message in peer.messages() if isinstance(message, Outbox))
        assert next(one for one in stats if one.deferred == deferred).waiting == 0

    with Peer(rig) as peer:
        peer.send(with_grammar("slow"))
        told(1)
        rig.runner.grammars.may_build.set()
        assert peer.answer("slow")[0] == [6, 7, 8]
        told(0)


def test_a_grammar_that_cannot_be_built_fails_its_request_alone(rig):
    rig.runner.grammars.may_build.set()
    with Peer(rig) as peer:
        peer.send(with_grammar("bad", "error: no such thing"), with_grammar("good"))
        tokens, event = peer.answer("bad")
        assert (tokens, event.finish_reason, event.error) == ([], FinishReason.ERROR, "error: no such thing")
        peer.send(with_grammar("bad"))  # the id is free again
        assert peer.answer("bad")[0] == [6, 7, 8]


def test_a_request_given_up_while_its_matcher_is_built_leaves_nothing_behind(rig):
    with Peer(rig) as peer:
        peer.send(with_grammar("one"), with_grammar("two"))
        peer.send(aborts=("one", "two"))
        peer.send(ask("plain"))
        assert peer.answer("plain")[0] == [6, 7, 8]
        rig.runner.grammars.may_build.set()
        peer.send(with_grammar("one"))
        assert peer.answer("one")[0] == [6, 7, 8]
    rig.wait(lambda rig: not rig.runner.grammars.admitted)
    assert rig.scheduler.num_waiting == 0


def test_a_client_that_leaves_while_its_matcher_is_built_is_forgotten(rig):
    with Peer(rig) as leaving:
        leaving.send(with_grammar("left"))
        with Peer(rig) as peer:
            peer.send(ask("plain"))
            assert peer.answer("plain")[0] == [6, 7, 8]
    rig.runner.grammars.may_build.set()
    with Peer(rig) as peer:
        peer.send(with_grammar("left"))
        assert peer.answer("left")[0] == [6, 7, 8]


def test_a_grammar_without_the_token_that_ends_it_is_refused(rig):
    request = with_grammar("a")
    endless = dataclasses.replace(request.sampling, ignore_eos=True)
    with Peer(rig) as peer:
        peer.send(dataclasses.replace(request, sampling=endless))
        assert "needs the token that ends" in peer.answer("a")[1].error
