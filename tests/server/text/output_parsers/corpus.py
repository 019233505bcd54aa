"""What models of each family write, made by hand, and what is meant by it."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = frozenset({"weather", "add", "search.web", "get_time"})


@dataclass(frozen=True)
class Answer:
    """The text and the calls of an answer."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()


OSLO = '{"city": "Oslo"}'
WEATHER = ("weather", OSLO)
SUM = ("add", '{"a": 1, "b": 2.5}')


def _object(name: str, arguments: str, key: str) -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def _both(key: str) -> tuple[str, str]:
    return _object(*WEATHER, key), _object(*SUM, key)


def _values(key: str) -> list[tuple[str, Answer]]:
    """Objects whose arguments have every kind of value, and forms that differ in small things."""
    nested = '{"filter": {"tags": ["a", "b"], "deep": [[{}]]}, "on": true, "off": false, "none": null}'
    quotes = '{"city": "a \\"quoted\\" \\\\ {brace} </tool_call> ]"}'
    rain, lines = '{"city": "Zürich \U0001f327"}', '{"city": "two\\nlines"}'
    return [
        (_object("get_time", "{}", key), Answer("", (("get_time", "{}"),))),
        (_object("search.web", nested, key), Answer("", (("search.web", nested),))),
        (_object("weather", quotes, key), Answer("", (("weather", quotes),))),
        (_object("weather", rain, key), Answer("", (("weather", rain),))),
        (_object("weather", '{"city": "\\u00e9"}', key), Answer("", (("weather", '{"city": "\\u00e9"}'),))),
        (
            _object("weather", '{"city": "two\nlines"}', key),
            Answer("", (("weather", lines),)),
        ),
        (_object("add", '{"a": -1e-3, "b": 0}', key), Answer("", (("add", '{"a": -1e-3, "b": 0}'),))),
        (f'{{"name":"weather","{key}":{OSLO}}}', Answer("", (WEATHER,))),
        (f'{{\n  "name": "weather",\n  "{key}": {{\n    "city": "Oslo"\n  }}\n}}', Answer("", (WEATHER,))),
        (f'{{"{key}": {OSLO}, "name": "weather"}}', Answer("", (WEATHER,))),
        (f'{{"type": "function", "name": "weather", "{key}": {OSLO}}}', Answer("", (WEATHER,))),
        (f'{{"name": "weather", "{key}": {OSLO}, "id": "abc"}}', Answer("", (WEATHER,))),
        (f'{{"name": "weather", "{key}": "{{\\"city\\": \\"Oslo\\"}}"}}', Answer("", (WEATHER,))),
        ('{"name": "get_time"}', Answer("", (("get_time", "{}"),))),
        (f'{{"name": "get_time", "{key}": null}}', Answer("", (("get_time", "{}"),))),
    ]


def _no_objects(key: str) -> list[str]:
    """Objects that are no calls."""
    return [
        _object("unknown", OSLO, key),
        f'{{"name": "weather", "{key}": [1]}}',
        f'{{"name": "weather" "{key}": {{}}}}',
        '{"name": "wea',
        '{"city": "Oslo"}',
        "{}",
        '{"name": 5}',
    ]


def _hermes() -> list[tuple[str, Answer]]:
    first, second = _both("arguments")
    found = [(f"<tool_call>\n{one}\n</tool_call>", answer) for one, answer in _values("arguments")]
    found += [(text := f"<tool_call>\n{one}\n</tool_call>", Answer(text)) for one in _no_objects("arguments")]
    return [
        *found,
        ("It is sunny.", Answer("It is sunny.")),
        ("", Answer("")),
        (f"Let me look.\n<tool_call>\n{first}\n</tool_call>", Answer("Let me look.", (WEATHER,))),
        (
            f"<tool_call>\n{first}\n</tool_call>\n<tool_call>\n{second}\n</tool_call>",
            Answer("", (WEATHER, SUM)),
        ),
        (f"<tool_call>{first}</tool_call><tool_call>{second}</tool_call>", Answer("", (WEATHER, SUM))),
        (f"<tool_call>\n{first}\n</tool_call>\nDone.", Answer("\nDone.", (WEATHER,))),
        (f"<tool_call>\n{first}", Answer("", (WEATHER,))),
        (f"<tool_call>\n{first}\n</tool_call", Answer("\n</tool_call", (WEATHER,))),
        ("a < b and <tool_cal", Answer("a < b and <tool_cal")),
        ("A <tool_call> is a tag.", Answer("A <tool_call> is a tag.")),
    ]


def _llama() -> list[tuple[str, Answer]]:
    first, second = _both("parameters")
    return [
        *_values("parameters"),
        *((one, Answer(one)) for one in _no_objects("parameters")),
        ("It is sunny.", Answer("It is sunny.")),
        ("", Answer("")),
        (f"<|python_tag|>{first}", Answer("", (WEATHER,))),
        (f"{first}; {second}", Answer("", (WEATHER, SUM))),
        (f"{first}\n{second}", Answer("", (WEATHER, SUM))),
        (f"\n\n{first}", Answer("", (WEATHER,))),
        (f"{first} and so on", Answer(" and so on", (WEATHER,))),
        (f"I call {first}", Answer(f"I call {first}")),
    ]


def _mistral() -> list[tuple[str, Answer]]:
    first, second = _both("arguments")
    tag = "[TOOL_CALLS]"
    found = [(f"{tag} [{one}]", answer) for one, answer in _values("arguments")]
    found += [(text := f"{tag} [{one}]", Answer(text)) for one in _no_objects("arguments")]
    return [
        *found,
        ("It is sunny.", Answer("It is sunny.")),
        (f"{tag}[{first}, {second}]", Answer("", (WEATHER, SUM))),
        (f"Look: {tag}[{first}]", Answer("Look:", (WEATHER,))),
        (f"{tag}weather{OSLO}", Answer("", (WEATHER,))),
        (f"{tag}weather[ARGS]{OSLO}", Answer("", (WEATHER,))),
        (f"{tag}weather[CALL_ID]abcdefghi[ARGS]{OSLO}", Answer("", (WEATHER,))),
        (f"{tag}weather{OSLO}{tag}get_time{{}}", Answer("", (WEATHER, ("get_time", "{}")))),
        (f"{tag}unknown{OSLO}", Answer(f"{tag}unknown{OSLO}")),
        (f"{tag} none", Answer(f"{tag} none")),
    ]


def _python_lists() -> list[tuple[str, Answer]]:
    nested = '{"a": [1, [2, 3]], "b": {"x": null}}'
    quoted = '{"city": "a \'quoted\' (bracket]"}'
    return [
        ('[weather(city="Oslo")]', Answer("", (WEATHER,))),
        ("[weather(city='Oslo')]", Answer("", (WEATHER,))),
        ('[weather(city="Oslo"), add(a=1, b=2.5)]', Answer("", (WEATHER, SUM))),
        ("[get_time()]", Answer("", (("get_time", "{}"),))),
        ("[ get_time( ) ]", Answer("", (("get_time", "{}"),))),
        ("\n[get_time()]", Answer("", (("get_time", "{}"),))),
        ("[add(a=-1, b=+2)]", Answer("", (("add", '{"a": -1, "b": 2}'),))),
        (
            "[add(a=[1, (2, 3)], b={'x': None})]",
            Answer("", (("add", nested),)),
        ),
        ("[add(a=True, b=False)]", Answer("", (("add", '{"a": true, "b": false}'),))),
        (
            "[weather(city='a \\'quoted\\' (bracket]')]",
            Answer("", (("weather", quoted),)),
        ),
        ("[weather(city='Zürich')]", Answer("", (("weather", '{"city": "Zürich"}'),))),
        ("[search.web(q='a')]", Answer("", (("search.web", '{"q": "a"}'),))),
        ("[get_time()] Done.", Answer(" Done.", (("get_time", "{}"),))),
        ("[get_time(), nothing(a=1)]", Answer(", nothing(a=1)]", (("get_time", "{}"),))),
    ]


def _no_python_lists() -> list[str]:
    return [
        "It is sunny.",
        "",
        "[]",
        "[1, 2]",
        "[unknown(a=1)]",
        "[weather('Oslo')]",
        "[weather(city=Oslo)]",
        "[weather(city=f())]",
        "[weather(city='Oslo'",
        "[weather(**{})]",
        "[weather]",
        "[weather(city={1, 2})]",
        "[weather(city=1e999)]",
        "[weather(city=b'x')]",
        "[weather(]",
        "[weather(city=__import__('os').system('x'))]",
    ]


def _pythonic() -> list[tuple[str, Answer]]:
    first, second = _both("parameters")
    return [
        *_python_lists(),
        *((one, Answer(one)) for one in _no_python_lists()),
        (first, Answer("", (WEATHER,))),
        (f"{first}; {second}", Answer("", (WEATHER, SUM))),
    ]


def _gemma() -> list[tuple[str, Answer]]:
    first = _both("parameters")[0]
    return [
        *_python_lists(),
        *((one, Answer(one)) for one in _no_python_lists()),
        (first, Answer("", (WEATHER,))),
        (f"```json\n{first}\n```", Answer("", (WEATHER,))),
        ("```tool_code\n[weather(city='Oslo')]\n```", Answer("", (WEATHER,))),
        ("```tool_code\nweather(city='Oslo')\n```", Answer("", (WEATHER,))),
        ("Look:\n```tool_code\nweather(city='Oslo')\n```\nDone.", Answer("Look:\nDone.", (WEATHER,))),
        ("```python\nprint(1)\n```", Answer("```python\nprint(1)\n```")),
    ]


CORPUS: list[tuple[str, str, Answer]] = [
    (form, written, wanted)
    for form, texts in (
        ("Hermes", _hermes()),
        ("Llama", _llama()),
        ("Mistral", _mistral()),
        ("Pythonic", _pythonic()),
        ("Gemma", _gemma()),
    )
    for written, wanted in texts
]
