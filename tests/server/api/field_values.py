"""Values on both sides of the bounds that a schema names, for tests that compare the document with the
parsers and with the server.
"""

import json

from jsonschema import Draft202012Validator


def properties(document, path):
    """The fields of a route's request, with every reference replaced by what it names."""
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return inlined(document, schema)["properties"]


def inlined(document, schema):
    """A schema of the document without references."""
    if isinstance(schema, list):
        return [inlined(document, inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inlined(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    return {key: inlined(document, inner) for key, inner in schema.items()}


def accepted(schema):
    """Values at the bounds of a schema, None where absent is fine."""
    if choices := alternatives(schema):
        return [value for choice in choices for value in accepted(choice)]
    if "enum" in schema:
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    if "type" not in schema:
        return [None, 1, "anything"]
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return [value for kind in kinds for value in _OF_KIND[kind](schema)]


def refused(schema):
    """Values just beyond, and of other kinds."""
    strangers = [
        True,
        1,
        1.5,
        -7.25,
        "nonsense",
        "",
        ["nonsense"],
        [[]],
        {"nonsense": 1},
        2**31,
        2**63,
        2**64,
    ]
    strangers += [
        schema[bound] + step for bound, step in (("minimum", -1), ("maximum", 1)) if bound in schema
    ]
    strangers += [schema["exclusiveMinimum"]] if "exclusiveMinimum" in schema else []
    strangers += ["x" * (schema["maxLength"] + 1)] if "maxLength" in schema else []
    if "maxItems" in schema:
        (item, *_) = accepted(schema["items"])
        strangers += [[item] * (schema["maxItems"] + 1)]
    for choice in alternatives(schema):
        strangers += refused(choice)
    validator = Draft202012Validator(schema)
    return [value for value in strangers if not validator.is_valid(value)]


def alternatives(schema):
    """The schemas of which a value has to match one."""
    return schema.get("anyOf", []) + schema.get("oneOf", [])


def name(value):
    """Short, for a test's report."""
    text = json.dumps(value)
    return text if len(text) < 30 else f"{text[:20]}...({len(text)})"


def _needed(schema):
    """The properties that an object has to have, or all where it needs none."""
    properties = schema.get("properties", {})
    required = {*schema.get("required", ()), *schema.get("else", {}).get("required", ())} or set(properties)
    return {key: inner for key, inner in properties.items() if key in required}


def _array(schema):
    (item, *_) = [value for value in accepted(schema["items"]) if value != ""]
    lengths = {schema.get("minItems", 0), min(schema.get("maxItems", 3), 5000)}
    return [[item] * length for length in lengths]


_OF_KIND = {
    "null": lambda schema: [None],
    "boolean": lambda schema: [True, False],
    "integer": lambda schema: [schema["minimum"], schema["maximum"]],
    "number": lambda schema: [schema.get("minimum", 0.25), schema["maximum"]],
    "string": lambda schema: [
        "x" * max(schema.get("minLength", 0), 1),
        "x" * min(schema.get("maxLength", 9), 999),
    ],
    "array": _array,
    "object": lambda schema: [
        {key: accepted(inner)[0] for key, inner in _needed(schema).items()},
        *(
            [{"7": schema["additionalProperties"]["maximum"]}]
            if "pattern" in schema.get("propertyNames", ())
            else []
        ),
    ],
}
