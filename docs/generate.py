"""Writes docs/reference.md from the CRD, so that the page cannot disagree with the API.

Run by `make docs`; `--check` (run by tests) fails when the page is not what the CRD gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CRD = ROOT / "crds" / "llmdeployments.yaml"
PAGE = ROOT / "docs" / "reference.md"
Schema = dict[str, Any]


def rows(schema: Schema, path: str = "") -> Iterator[str]:
    """One table row per field, depth first."""
    required = set(schema.get("required", []))
    for name, field in schema.get("properties", {}).items():
        inner = field.get("items", {}) if field.get("type") == "array" else field
        where = f"{path}{name}{'[]' if inner is not field else ''}"
        notes = [" ".join(field.get("description", "").split())]
        if name in required:
            notes.append("**Required.**")
        if "enum" in inner:
            notes.append("One of " + ", ".join(f"`{value}`" for value in inner["enum"]) + ".")
        default = f"`{field['default']}`" if "default" in field and field.get("type") != "object" else ""
        yield f"| `{where}` | {kind(field)} | {default} | {' '.join(notes).replace('|', chr(92) + '|')} |"
        yield from rows(inner, f"{where}.")


def kind(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if field.get("type") == "array":
        return f"list of {kind(field.get('items', {}))}"
    return str(field.get("type", "any"))


def rules(schema: Schema, path: str = "spec") -> Iterator[str]:
    """The message of every CEL rule, with the field that it stands on."""
    for rule in schema.get("x-kubernetes-validations", []):
        message = rule.get("message") or rule.get("messageExpression", "")
        yield f"- `{path}`: {message}"
    for name, field in schema.get("properties", {}).items():
        yield from rules(field, f"{path}.{name}")
    if "items" in schema:
        yield from rules(schema["items"], f"{path}[]")


def page() -> str:
    crd = yaml.safe_load(CRD.read_text())
    version = crd["spec"]["versions"][0]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    head = "| field | type | default | meaning |\n|---|---|---|---|\n"
    return "\n".join(
        [
            "# API reference",
            "",
            f"`{crd['spec']['group']}/{version['name']}`, kind `{crd['spec']['names']['kind']}`.",
            "Made from `crds/` by `make docs`.",
            "",
            "## spec",
            "",
            head + "\n".join(rows(properties["spec"])),
            "",
            "## What the API server refuses, and says",
            "",
            "\n".join(rules(version["schema"]["openAPIV3Schema"], "LLMDeployment")),
            "",
            "## status",
            "",
            head + "\n".join(rows(properties["status"])),
            "",
        ]
    )


def main(arguments: list[str]) -> int:
    text = page()
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text() == text:
            return 0
        sys.stderr.write("docs/reference.md is not what crds/ gives: run `make docs`\n")
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
