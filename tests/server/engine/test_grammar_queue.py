"""Grammars are compiled in other threads; requests that wait for them delay no other request."""

import dataclasses

from quire_server.core.request import FinishReason
from quire_server.core.sampling_params import Grammar, GrammarKind
from quire_server.engine.messages import EngineOutputs
from tests.server.engine.peer import Peer, make_request


def with_grammar(name, text="fine", **more):
    request = make_request(name, **more)
    grammar = Grammar(GrammarKind.REGEX, text)
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, grammar=grammar))


def test_others_are_answered_while_a_matcher_is_being_built(engine):
    with Peer(engine) as peer:
        peer.send(with_grammar("slow"))
        for number in range(3):
            peer.send(make_request(f"plain-{number}"))
            assert peer.answer(f"plain-{number}")[0] == [6, 7, 8]
        engine.runner.grammars.may_build.set()
        assert peer.answer("slow")[0] == [6, 7, 8]
    engine.wait(lambda engine: not engine.runner.grammars.admitted)


def test_a_clients_grammar_waits_for_one_of_another_client_however_many_that_has_sent(engine):
    with Peer(engine) as peer:
        alices = [f"alice-{number}" for number in range(5)]
        peer.send(*(with_grammar(name, name, client="alice") for name in alices))
        peer.send(with_grammar("bob", "bob", client="bob"))
        peer.send(make_request("plain"))
        assert peer.answer("plain")[0] == [6, 7, 8], "all of them have arrived"
        engine.runner.grammars.may_build.set()
        ended = (event for event in peer.events() if event.finish_reason is not None)
        assert {next(ended).request_id for _ in range(6)} == {*alices, "bob"}
    assert engine.runner.grammars.built == ["alice-0", "bob", *alices[1:]]


def test_requests_that_wait_for_a_grammar_are_counted_apart_from_the_waiting_queue(engine):
    def wait_for_deferred(deferred):
        stats = (message.stats for message in peer.messages() if isinstance(message, EngineOutputs))
        assert next(one for one in stats if one.deferred == deferred).waiting == 0

    with Peer(engine) as peer:
        peer.send(with_grammar("slow"))
        wait_for_deferred(1)
        engine.runner.grammars.may_build.set()
        assert peer.answer("slow")[0] == [6, 7, 8]
        wait_for_deferred(0)


def test_a_grammar_that_cannot_be_built_fails_only_its_request(engine):
    engine.runner.grammars.may_build.set()
    with Peer(engine) as peer:
        peer.send(with_grammar("bad", "error: no such thing"), with_grammar("good"))
        tokens, event = peer.answer("bad")
        assert (tokens, event.finish_reason, event.error) == ([], FinishReason.ERROR, "error: no such thing")
        peer.send(with_grammar("bad"))  # the id is free again
        assert peer.answer("bad")[0] == [6, 7, 8]


def test_a_request_aborted_while_its_matcher_is_built_is_removed(engine):
    with Peer(engine) as peer:
        peer.send(with_grammar("one"), with_grammar("two"))
        peer.send(aborts=("one", "two"))
        peer.send(make_request("plain"))
        assert peer.answer("plain")[0] == [6, 7, 8]
        engine.runner.grammars.may_build.set()
        peer.send(with_grammar("one"))
        assert peer.answer("one")[0] == [6, 7, 8]
    engine.wait(lambda engine: not engine.runner.grammars.admitted)
    assert engine.scheduler.num_waiting == 0


def test_requests_of_a_client_that_disconnects_while_a_matcher_is_built_are_removed(engine):
    with Peer(engine) as disconnecting:
        disconnecting.send(with_grammar("left"))
        with Peer(engine) as peer:
            peer.send(make_request("plain"))
            assert peer.answer("plain")[0] == [6, 7, 8]
    engine.runner.grammars.may_build.set()
    with Peer(engine) as peer:
        peer.send(with_grammar("left"))
        assert peer.answer("left")[0] == [6, 7, 8]


def test_a_grammar_with_ignore_eos_is_refused(engine):
    request = with_grammar("a")
    endless = dataclasses.replace(request.sampling, ignore_eos=True)
    with Peer(engine) as peer:
        peer.send(dataclasses.replace(request, sampling=endless))
        assert "needs the token that ends" in peer.answer("a")[1].error
