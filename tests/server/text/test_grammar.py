"""What a client's text allows, against answers that are right and wrong; and masks by brute force."""

import itertools
import json
import re

import pytest

from quire_server.core.sampling_params import GrammarKind
from quire_server.text import grammar
from tests.server.text.toy import EOS, SPECIAL, TOKENS, VOCABULARY, accepts, allowed, matcher

OBJECT = '{"type": "object"}'
CHOICES = ["a", "ab", 'a"b', "😀", "x\ny", "é", "a\\b", "/", "\0"]
SUM = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"\n'


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("regex", r"\d{2}/\w\s?", ["12/a ", "12/_"], ["٣3/a", "12/é", "1/a"]),
        ("regex", "^abc$", ["abc"], ["xabc", "abcd"]),
        ("regex", 'a\nb\r"#/\\/', ['a\nb\r"#//'], ["a"]),
        ("regex", "", [""], ["a"]),
        ("regex", "a|", ["a", ""], ["b"]),
        ("choice", json.dumps(CHOICES), CHOICES, ["b", "aba", ""]),
        ("json", OBJECT, ["{}", '{"a": [1, {"b":null}]}', '{\n  "a": 1\n}'], ["[]", "{", "{    }"]),
        ("json", '{"type": "string", "pattern": "^a+$"}', ['"aa"'], ['"b"', '""']),
        ("json", '{"type": "array", "items": {"$ref": "#"}}', ["[]", "[[],[[]]]"], ["[1]"]),
        ("grammar", SUM, ["1", "(1+22)+3", "((1))"], ["", "(1", "1+"]),
        ("grammar", 'root ::= "ab" [a-c]{2,3} "x"*', ["abcc", "abccax"], ["ab", "abc"]),
        ("grammar", 'root ::= [\\u00e9\\u4e00-\\u4e02] "\\u00e9" "\\U0001F601"', ["éé😁", "一é😁"], ["aé"]),
        (
            "grammar",
            'root ::= "a\\"b" [^"\\\\\\n] "\\\\" [\\]\\-a] "/"',
            ['a"bx\\]/', 'a"bx\\-/'],
            ['a"b"\\]/'],
        ),
        ("grammar", 'root ::= fooBar foo-bar\nfooBar ::= "1"\nfoo-bar ::= "2"', ["12"], ["1", "11"]),
        ("grammar", 'root ::= "a" # a comment\n  | "b"\n', ["a", "b"], ["ab"]),
        ("grammar", 'root ::= x\nx ::= "a" x | ""', ["", "aaa"], ["b"]),
        ("grammar", 'root ::= root "a" | "a"', ["aaa"], ["", "b"]),
        ("grammar", "root ::= .", ["\n", "é"], ["ab"]),
        ("grammar", 'root ::= ("a" | ) "b"?', ["", "a", "ab", "b"], ["ba"]),
    ],
)
def test_a_grammar_allows_exactly_what_it_describes(kind, text, right, wrong):
    assert [answer for answer in right if not accepts(kind, text, answer)] == []
    assert [answer for answer in wrong if accepts(kind, text, answer)] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no rule named root"),
        ('x ::= "a"', "no rule named root"),
        ("root ::= foo", "foo, which is not defined"),
        ('root ::= "a', "column 10"),
        ("root ::= (", "closing parenthesis"),
        ("root ::= )", "a rule must begin here"),
        ("root ::= *", "repeats nothing"),
        ("root ::= [z-a]", "empty"),
        ("root ::= []", "empty"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "a"{5,2}', "upwards"),
        ('root ::= "a"{99999999}', "10000"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "deeper than 100"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root is there already"),
        ('root ::= "a" (=x)', "is no token"),
        ('start: "a"', "is no token"),
    ],
)
def test_what_is_no_ebnf_is_refused_with_its_place(text, why):
    with pytest.raises(grammar.GrammarError, match=re.escape(why)):
        grammar.compiled(GrammarKind.GRAMMAR, text)


@pytest.mark.parametrize(
    ("kind", "text", "alphabet"),
    [
        ("regex", "(ab|b){1,3}a?", "ab"),
        ("regex", "a{2,4}b?a*", "ab"),
        ("choice", '["ab", "aba", "b", "bab"]', "ab"),
        ("grammar", 'root ::= "a" root "b" | "ab"', "ab"),
    ],
)
def test_a_mask_has_exactly_the_tokens_after_which_the_answer_can_still_be_completed(kind, text, alphabet):
    texts = ["".join(letters) for n in range(9) for letters in itertools.product(alphabet, repeat=n)]
    language = {one.encode() for one in texts if accepts(kind, text, one)}
    prefixes = {one[:length] for one in language for length in range(len(one) + 1)}
    for begun in sorted(prefixes):
        if len(begun) > 2:
            continue  # the language is known to eight letters, and a token adds two
        one = matcher(kind, text)
        assert one.consume_tokens(list(begun))
        expected = {
            token
            for token, piece in enumerate(TOKENS)
            if piece and token < SPECIAL and begun + piece in prefixes
        }
        assert allowed(one) == expected | ({EOS} if begun in language else set()), begun


def test_special_tokens_are_no_text():
    one = matcher("regex", re.escape("<|special|>"))
    assert SPECIAL not in allowed(one)
    assert accepts("regex", re.escape("<|special|>"), "<|special|>")


def test_white_space_between_json_tokens_is_bounded():
    one = matcher("json", OBJECT)
    assert one.consume_tokens(list(b"{\n" + b" " * 31))
    assert {piece for piece in map(TOKENS.__getitem__, allowed(one)) if piece.isspace()} == {b" "}
    assert one.consume_tokens(list(b" "))
    assert {piece[:1] for piece in map(TOKENS.__getitem__, allowed(one))} == {b'"', b"}"}


def test_a_vocabulary_survives_the_pipe():
    assert grammar.Vocabulary.from_json(json.loads(json.dumps(VOCABULARY.to_json()))) == VOCABULARY
