"""Grammar masks: equal to brute force, and unchanged by drafts, preemption and other rows."""

import json
import random
import re

import numpy as np
import pytest
import torch

from quire_server.core.request import FinishReason, Request
from quire_server.core.sampling_params import Grammar, GrammarKind, SamplingParams
from quire_server.core.step import StartedRow
from quire_server.errors import RequestError
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.structured_outputs import Grammars
from quire_server.text import grammar as texts
from quire_server.text.tokenizer import Tokenizer
from tests.server import tiny_model
from tests.server.runner.in_process import InProcessEngine, load
from tests.server.text.toy import EOS, TOKENS, VOCABULARY, allowed, matcher

PROMPT = (1, 2, 3)
CHOICE = '["ab", "aba", "b", "bab"]'
STOP = TOKENS.index(b"ba")


def compiled(kind, text):
    return Grammar(GrammarKind(kind), texts.compiled(GrammarKind(kind), text))


class Toy:
    """An input batch over the toy vocabulary; each row has a grammar or none."""

    def __init__(self, *forms, **sampling):
        self.grammars = Grammars(lambda: VOCABULARY)
        self.rows = InputBatch(len(forms), 64, 16)
        for row, form in enumerate(forms):
            grammar = None if form is None else compiled(*form)
            params = SamplingParams(16, grammar=grammar, **sampling)
            if grammar is not None:
                self.grammars.admit(str(row), self.grammars.build(grammar))
            self.rows._start(StartedRow(row, str(row), PROMPT, len(PROMPT), (0,), params, 0))

    def write(self, row, answer):
        self.rows.tokens[row, len(PROMPT) : len(PROMPT) + len(answer)] = answer
        return len(PROMPT) + len(answer)

    def offered(self, *entries):
        """The tokens that each entry (row, answer) may continue with, and the failures."""
        lengths = [self.write(row, answer) for row, answer in entries]
        row_ids = np.array([row for row, _ in entries])
        logits = torch.zeros(len(entries), len(TOKENS))
        failures = self.grammars.constrain(logits, self.rows, row_ids, np.array(lengths), [EOS])
        return [set(np.flatnonzero(row.isfinite().numpy()).tolist()) for row in logits], failures


@pytest.mark.parametrize(
    "form", [("choice", CHOICE), ("regex", "(ab|b){1,4}a?"), ("grammar", 'root ::= "a" root "b" | "ab"')]
)
def test_greedy_with_a_grammar_is_the_likeliest_token_that_brute_force_allows(form):
    def oracle(logits, answer):
        """Try every token on a new matcher."""
        seen = matcher(*form)
        assert seen.consume_tokens(answer)
        best = [(float(logits[EOS]), EOS)] if seen.is_accepting() else []
        for token in range(EOS):
            fresh = matcher(*form)
            assert fresh.consume_tokens(answer)
            if fresh.try_consume_tokens([token]) == 1:
                best.append((float(logits[token]), token))
        return max(best)[1]

    toy, answer = Toy(form), []
    torch.manual_seed(1)
    while EOS not in answer and len(answer) < 12:
        logits = torch.randn(1, len(TOKENS))
        expected = oracle(logits[0], answer)
        length = toy.write(0, answer)
        assert toy.grammars.constrain(logits, toy.rows, np.array([0]), np.array([length]), [EOS]) == {}
        assert int(logits.argmax()) == expected
        answer.append(expected)


def test_a_plain_row_keeps_its_logits_beside_one_with_a_grammar():
    offered, failures = Toy(None, ("regex", "a+"), None).offered((0, [7]), (1, []), (2, []))
    assert failures == {}
    assert len(offered[0]) == len(offered[2]) == len(TOKENS)
    assert offered[1] == allowed(matcher("regex", "a+"))


def test_each_draft_has_its_own_mask_and_a_forbidden_draft_only_fails_itself():
    toy = Toy(("choice", CHOICE), ("regex", "b*"))
    a, b = ord("a"), ord("b")
    entries = [(0, []), (0, [a]), (0, [a, b]), (1, []), (1, [b]), (1, [b, a]), (1, [b, a, b])]
    offered, failures = toy.offered(*entries)
    assert failures.keys() == {5}, "the runner decides: that draft was not sampled yet"
    for (row, answer), tokens in zip(entries[:5], offered, strict=False):
        fresh = matcher(*(("choice", CHOICE), ("regex", "b*"))[row])
        fresh.consume_tokens(answer)
        assert tokens == allowed(fresh), (row, answer)
    assert len(offered[5]) == len(offered[6]) == len(TOKENS)  # its token is not used
    assert toy.offered((1, [b, b]))[1] == {}


def test_any_walk_forwards_and_backwards_gives_the_masks_of_a_fresh_matcher():
    random.seed(3)
    form = ("json", '{"type": "array", "items": {"enum": ["yes", "no", 12, {"a": null}]}}')
    toy, answer = Toy(form), []
    for _ in range(300):
        fresh = matcher(*form)
        assert fresh.consume_tokens(answer)
        [offered], failures = toy.offered((0, answer))
        assert failures == {}
        assert offered == allowed(fresh)
        going_on = sorted(offered - {EOS})
        if random.random() < 0.4 or not going_on or len(answer) > 50:
            answer = answer[: random.randrange(len(answer) + 1)]  # rejected drafts
        if going_on and fresh.try_consume_tokens([token := random.choice(going_on)]):
            answer = [*answer, token]
        while not matcher(*form).consume_tokens(answer):
            answer.pop()


def test_many_rows_and_their_drafts_get_the_same_from_several_threads_as_from_one(monkeypatch):
    forms = [
        ("choice", CHOICE),
        ("regex", "(ab|b){1,9}a?"),
        None,
        ("grammar", 'root ::= "a" root "b" | "ab"'),
    ] * 4
    entries = [(row, list(b"babx"[:length])) for row in range(len(forms)) for length in range(5)]
    masks = []
    for num_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        toy = Toy(*forms)
        assert (toy.grammars._threads is not None) == (num_threads > 1)
        masks.append(toy.offered(*entries))
    assert masks[0] == masks[1]
    assert len(masks[0][1]) == 12, "each form forbids a draft"


def test_a_row_whose_certain_tokens_break_the_grammar_fails_alone():
    toy = Toy(("regex", "a+"), ("regex", "b+"))
    offered, failures = toy.offered((0, [ord("x")]), (1, []))
    assert failures.keys() == {0}
    assert offered[1] == allowed(matcher("regex", "b+"))


def test_a_grammar_that_gets_too_complex_fails_its_request_alone():
    hungry = ("regex", ".*a.{200}b")
    toy = Toy(hungry, ("regex", "b+"))
    answer, failures = [], {}
    while not failures and len(answer) < 60:
        answer += [ord("a")]
        offered, failures = toy.offered((0, answer), (1, []))
        assert offered[1] == allowed(matcher("regex", "b+"))
    if failures:
        assert "too complex" in failures[0]


def test_a_stop_token_is_allowed_only_where_the_grammar_may_end():
    toy = Toy(("regex", "(ba|ab)+"), stop_token_ids=(STOP,))
    for answer, may_end in [([], False), ([ord("a")], False), ([ord("a"), ord("b")], True)]:
        [offered], _ = toy.offered((0, answer))
        assert ({STOP, EOS} <= offered, not ({STOP, EOS} & offered)) == (may_end, not may_end)


def test_min_tokens_delays_the_end_only_if_the_grammar_has_other_tokens():
    toy = Toy(("regex", "a{2,5}"), min_tokens=4)
    assert EOS not in toy.offered((0, [ord("a")] * 3))[0][0]
    assert EOS in toy.offered((0, [ord("a")] * 4))[0][0]
    assert Toy(("regex", "aa"), min_tokens=4).offered((0, [ord("a")] * 2))[0] == [{EOS}]


def test_a_grammar_that_cannot_be_built_is_a_request_error():
    with pytest.raises(RequestError, match="regex cannot be followed"):
        Grammars(lambda: VOCABULARY).build(Grammar(GrammarKind.REGEX, "start: /[/"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return load(tiny_model.write(tmp_path_factory.getbasetemp() / "grammars"))


@pytest.fixture(scope="module")
def tokenizer(runner, tmp_path_factory):
    return Tokenizer.load(tmp_path_factory.getbasetemp() / "grammars")


FORMS = [
    ("regex", r"[a-c]{60,90}-\d{2,9}"),
    ("choice", '["yes", "no", "maybe, or maybe not"]'),
    ("json", '{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5}'),
    ("grammar", 'root ::= "(" root ")" | [a-z]{1,3}'),
]


def params(form, seed, **more):
    return SamplingParams(110, seed=seed, grammar=None if form is None else compiled(*form), **more)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_blocks", [512, 9], ids=["room for all", "preempting"])
def test_answers_are_the_same_alone_together_and_preempted(runner, tokenizer, num_blocks):
    prompts = [[index, 5, 6] for index in range(8)]
    each = [params((*FORMS, None)[index % 5], seed=index) for index in range(8)]
    alone = [
        InProcessEngine(runner).generate([prompt], [one])[0]
        for prompt, one in zip(prompts, each, strict=True)
    ]
    engine = InProcessEngine(runner, num_blocks=num_blocks, free_block_reserve=0.0)
    assert engine.generate(prompts, each) == alone
    assert (engine.scheduler.stats.preemptions > 0) == (num_blocks == 9)
    for index, tokens in enumerate(alone):
        if index % 5 < 4:
            assert engine.last[str(index)].finish_reason is FinishReason.STOP
            assert tokens[-1] in runner.model_config.eos_token_ids
    assert re.fullmatch(r"[a-c]{60,90}-\d{2,9}", tokenizer.decode(alone[0]))
    assert tokenizer.decode(alone[1]) in json.loads(FORMS[1][1])


def test_a_request_whose_matcher_is_missing_is_never_answered_without_its_grammar(runner):
    engine = InProcessEngine(runner)
    grammar = compiled("regex", "a")
    engine.scheduler.add(Request("x", (1, 2), SamplingParams(5, grammar=grammar), arrival=0.0))
    step = engine.scheduler.schedule()
    runner.grammars.admit("another", runner.grammars.build(grammar))
    [event] = engine.scheduler.commit(step, runner.run(step))
    assert event.finish_reason is FinishReason.ERROR
    runner.grammars.forget("another")


def test_without_grammars_no_mask_is_computed(runner, monkeypatch):
    monkeypatch.setattr(runner.grammars, "_matchers", {})
    monkeypatch.setattr(np, "flatnonzero", None)
    assert runner.grammars.constrain(None, None, None, None, ()) == {}
