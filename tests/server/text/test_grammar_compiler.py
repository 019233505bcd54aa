"""The compiler of clients' grammars: hostile texts are refused with the field's name, and affect no other
request.
"""

import json
import os
import time

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quire_server.core.sampling_params import GrammarKind
from quire_server.errors import RequestError
from quire_server.text.grammar_compiler import GrammarCompiler, GrammarRequest
from quire_server.text.tokenizer import Tokenizer

LIMIT_SECONDS = 2.0  # of the child; a refusal that takes longer was not made by it


def tokenizer(eos_token_ids):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|end|>")])
    return Tokenizer(library, eos_token_ids)


@pytest.fixture(scope="module")
def compiler():
    made = GrammarCompiler(tokenizer((256,)))
    yield made
    made.close()


def wanted(kind, text):
    return GrammarRequest(
        GrammarKind(kind), text if isinstance(text, str) else json.dumps(text), f"form.{kind}"
    )


def nested(depth, inner, wrap):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def mutual(*names):
    return {name: {"$ref": f"#/$defs/{other}"} for name, other in zip(names, names[::-1], strict=True)}


HOSTILE = {
    "nested 1000 deep": ("json", '{"items":' * 1000 + "{}" + "}" * 1000),
    "nested 5000 deep": ("json", '{"items":' * 5000 + "{}" + "}" * 5000),
    "longer than the limit": ("json", {"enum": ["x" * 70_000]}),
    "a reference to itself": ("json", {"$ref": "#"}),
    "references in a circle": ("json", {"$defs": mutual("a", "b"), "$ref": "#/$defs/a"}),
    "a reference over the network": ("json", {"$ref": "http://127.0.0.1:1/schema.json"}),
    "a reference to a file": ("json", {"$ref": "file:///etc/passwd"}),
    "options of the library": ("json", {"x-guidance": {"lenient": True}}),
    "no such type": ("json", {"type": "text"}),
    "a list": ("json", []),
    "no JSON": ("json", '{"a":'),
    "not a number": ("json", '{"minimum": NaN}'),
    "a lone surrogate": ("json", '{"const": "\\ud800"}'),
    "nothing is allowed": ("json", {"enum": []}),
    "false": ("json", {"type": "object", "properties": {"a": False}, "required": ["a"]}),
    "a keyword that is not supported": ("json", {"not": {"type": "string"}}),
    "uniqueItems": ("json", {"type": "array", "uniqueItems": True}),
    "a format that is not supported": ("json", {"type": "string", "format": "regex"}),
    "conjunctions of alternatives": (
        "json",
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(8)]} for i in range(8)]},
    ),
    "an automaton of 60 million states": ("json", {"type": "integer", "multipleOf": 7919 * 7927}),
    "2000 optional properties": (
        "json",
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}},
    ),
    "a huge number": ("json", {"type": "integer", "minimum": -(10**400)}),
    "not closed": ("regex", "[a"),
    "look-ahead": ("regex", "(?=a)b"),
    "a reference back": ("regex", r"(a)\1"),
    "parentheses 30,000 deep": ("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "a long expression": ("regex", "a" * 70_000),
    "bytes that are no text": ("regex", r"(?-u:\xff)"),
    "an impossible one": ("regex", r"[^\s\S]"),
    "a rule without an end": ("grammar", "root ::= a\na ::= b\nb ::= a"),
    "another grammar's syntax": ("grammar", 'start: "a"\n%import common.INT'),
    "a directive in a literal": ("grammar", 'root ::= "a\n%import common.INT\n"'),
    "parentheses 20,000 deep": ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a NUL between rules": ("grammar", 'root ::= "a" \0'),
}
HARMLESS = {
    "NUL in a regex": ("regex", "\0"),
    "NUL in a schema": ("json", {"properties": {"\0": {"const": "\0"}}, "required": ["\0"]}),
    "NUL in a pattern": ("json", {"type": "string", "pattern": "\0a"}),
    "NUL in a grammar": ("grammar", 'root ::= "\\x00"'),
    "an exponential automaton, built as it is needed": ("regex", "(a|b)*a(a|b){30}"),
    "nested quantifiers": ("regex", "(((((a*)*)*)*)*)*"),
    "a long string": ("json", {"type": "string", "maxLength": 10**9}),
    "many items": ("json", {"type": "array", "items": {"type": "null"}, "minItems": 10**9}),
    "a recursive schema": ("json", {"type": "array", "items": {"$ref": "#"}}),
    "alternatives that double": (
        "json",
        nested(10, {"type": "null"}, lambda one: {"anyOf": [one, {"type": "array", "items": one}]}),
    ),
    "repetitions of repetitions": ("regex", "((a{1000}){1000}){1000}"),
    "ambiguity without end": (
        "grammar",
        "root ::= a1\n"
        + "".join(f'a{i} ::= a{i + 1} a{i + 1} | ""\n' for i in range(1, 40))
        + 'a40 ::= root | ""',
    ),
    "every rule uses the next twice": (
        "grammar",
        "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(9)) + 'a9 ::= "x"',
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_refused_by_the_name_of_its_field_and_the_next_one_compiled(compiler, name):
    begun = time.monotonic()
    with pytest.raises(RequestError) as refused:
        compiler.compile(wanted(*HOSTILE[name]))
    assert time.monotonic() - begun < 5 * LIMIT_SECONDS
    assert refused.value.param == f"form.{HOSTILE[name][0]}"
    assert str(refused.value).startswith(refused.value.param)
    assert len(str(refused.value)) < 600
    assert compiler.compile(wanted("regex", f"after {name}")).text


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_hostile_is_compiled(compiler, name):
    assert compiler.compile(wanted(*HARMLESS[name])).text


def test_a_known_text_needs_no_second_compilation(compiler):
    form = wanted("regex", "again")
    assert compiler.known(form) is None
    compiled = compiler.compile(form)
    assert compiler.known(form) is compiled


def test_the_cache_does_not_tell_what_clients_of_another_scope_have_sent(compiler):
    sound, hostile = wanted("regex", "of one scope"), wanted("json", '{"of one scope":')
    compiler.compile(sound, "key/alice")
    with pytest.raises(RequestError):
        compiler.compile(hostile, "key/alice")
    for scope in ("key/bob", "group/alice", ""):
        assert compiler.known(sound, scope) is None
        assert compiler.known(hostile, scope) is None
    assert compiler.known(sound, "key/alice")
    with pytest.raises(RequestError):
        compiler.known(hostile, "key/alice")


def test_a_refusal_is_kept_for_a_while_so_that_a_repetition_costs_nothing():
    now = [0.0]
    compiler = GrammarCompiler(tokenizer((256,)), clock=lambda: now[0])
    form = wanted(*HOSTILE["an automaton of 60 million states"])
    try:
        with pytest.raises(RequestError) as first:
            compiler.compile(form)
        child = compiler._worker._process
        for ask in (compiler.compile, compiler.known):
            with pytest.raises(RequestError) as again:
                ask(form)
            assert str(again.value) == str(first.value) and again.value.param == form.param
        assert compiler._worker._process is child, "no child was asked"
        now[0] += 301
        assert compiler.known(form) is None
    finally:
        compiler.close()


def test_a_model_without_an_end_cannot_follow_a_grammar():
    with pytest.raises(RequestError, match="no token that ends a text"):
        GrammarCompiler(tokenizer(())).compile(wanted("regex", "a"))


def test_no_process_is_started_before_the_first_grammar():
    before = set(os.listdir("/proc"))
    idle = GrammarCompiler(tokenizer((256,)))
    idle.close()
    children = {pid for pid in set(os.listdir("/proc")) - before if pid.isdigit()}
    assert not any(_is_worker(pid) for pid in children)


def _is_worker(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"grammar_worker" in file.read()
    except OSError:
        return False
