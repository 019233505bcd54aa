"""A hundred random JSON schemas with a model of random weights: every output validates."""

import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from quire_server.core.request import FinishReason
from quire_server.core.sampling_params import Grammar, GrammarKind, SamplingParams
from quire_server.text import grammar as texts
from quire_server.text.tokenizer import Tokenizer
from tests.server import tiny_model
from tests.server.runner.in_process import InProcessEngine, load

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=5)
LENGTHS = st.tuples(st.integers(0, 3), st.integers(3, 12))
SCALARS = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | NAMES
PATTERNS = ["^[a-f]{2,4}$", "^x+$", r"^\d{3}-\d{2}$", "^(yes|no)?$", r"^\w{1,8}\s$"]
FORMATS = ["date", "time", "uuid", "ipv4"]
TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII | re.IGNORECASE
)
CHECKER = jsonschema.FormatChecker(["date", "uuid", "ipv4"])


@CHECKER.checks("time")
def is_time(value):
    """As RFC 3339 has it: jsonschema's own checker is draft 3's, without fractions and offsets."""
    return not isinstance(value, str) or TIME.fullmatch(value) is not None


def bounded(low, high, kind):
    ends = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    closed = ends.map(lambda ends: {"type": kind, "minimum": ends[0], "maximum": ends[1]})
    inside = ends.map(
        lambda ends: {"type": kind, "exclusiveMinimum": ends[0], "exclusiveMaximum": ends[1] + 9}
    )
    return closed | inside


LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.just({"type": ["null", "boolean"]}),
    bounded(-1000, 1000, "integer"),
    bounded(-1000, 1000, "number"),
    st.integers(2, 9).map(lambda n: {"type": "integer", "minimum": 0, "maximum": 10 * n, "multipleOf": n}),
    st.just({"type": "integer", "minimum": 3, "allOf": [{"maximum": 300}]}),
    LENGTHS.map(lambda ends: {"type": "string", "minLength": ends[0], "maxLength": ends[1]}),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(FORMATS).map(lambda name: {"type": "string", "format": name}),
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    st.just({"$ref": "#/$defs/shared"}),
)


def maps(inner):
    """Objects whose keys the output chooses."""
    return st.tuples(inner, st.integers(1, 2)).map(
        lambda parts: {"type": "object", "additionalProperties": parts[0], "maxProperties": parts[1]}
    )


def objects(inner):
    return st.dictionaries(NAMES, inner, max_size=4).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties) or [""])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
                "additionalProperties": False,
            }
        )
    )


def arrays(inner):
    return st.tuples(inner, st.integers(0, 2), st.integers(2, 3)).map(
        lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1], "maxItems": parts[2]}
    )


def tuples(inner):
    return st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )


def choices(inner):
    return st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: objects(inner) | maps(inner) | arrays(inner) | tuples(inner) | choices(inner),
    max_leaves=8,
)


KEYWORDS = {
    *("type", "enum", "const", "anyOf", "allOf", "$ref", "properties", "required", "additionalProperties"),
    *("maxProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern"),
    *("format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


def inner_schemas(schema):
    inside = [schema.get("items"), schema.get("additionalProperties"), *schema.get("prefixItems", ())]
    inside += [*schema.get("properties", {}).values(), *schema.get("anyOf", ()), *schema.get("allOf", ())]
    return [one for one in inside if isinstance(one, dict)]


def keywords(schema):
    yield from schema
    for inner in inner_schemas(schema):
        yield from keywords(inner)


def depth(schema):
    return 1 + max(map(depth, inner_schemas(schema)), default=0)


def varied(schemas, count):
    """`count` of `schemas`: first three with each keyword and ten nested ones, so that none depends on luck.

    Hypothesis draws constants of the modules that are imported, so a seed does not fix what it generates.
    """
    chosen = [one for one in schemas if depth(one) >= 3][:10]
    for keyword in sorted(KEYWORDS):
        chosen += [one for one in schemas if keyword in set(keywords(one))][:3]
    distinct = {json.dumps(one): one for one in [*chosen, *schemas]}
    return list(distinct.values())[:count]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("schemas") / "tiny")


@pytest.fixture(scope="module")
def runner(tiny):
    return load(tiny)


@pytest.mark.deep
def test_an_answer_to_each_of_a_hundred_random_schemas_validates(runner, tiny):
    tokenizer = Tokenizer.load(tiny)
    found = {}

    @seed(11)
    @settings(
        max_examples=400, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(SCHEMAS, st.sampled_from([{"type": "boolean"}, {"enum": ["a", "b"]}, {"type": "null"}]))
    def collect(schema, shared):
        found[json.dumps(schema)] = {**schema, "$defs": {"shared": shared}}

    collect()
    asked = varied(list(found.values()), 100)
    assert len(asked) == 100
    for keyword in KEYWORDS:
        assert sum(keyword in set(keywords(schema)) for schema in asked) >= 3, f"hardly any {keyword}"
    assert sum(depth(schema) >= 3 for schema in asked) >= 10, "too flat"
    forms = [Grammar(GrammarKind.JSON, texts.compiled(GrammarKind.JSON, json.dumps(one))) for one in asked]
    engine = InProcessEngine(runner)
    sampling = [SamplingParams(1500, seed=index, grammar=form) for index, form in enumerate(forms)]
    answers = engine.generate([[1, 2, 3]] * len(asked), sampling)
    for index, (schema, tokens) in enumerate(zip(asked, answers, strict=True)):
        text = tokenizer.decode(tokens)
        assert engine.last[str(index)].finish_reason is FinishReason.STOP, (schema, text)
        validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
        validator.validate(json.loads(text))
