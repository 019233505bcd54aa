"""Writes the generated pages and files: each from the code that is its source, so that they cannot differ.

docs/reference.md comes from the CRDs, docs/troubleshooting.md from the operator's table of reasons,
docs/api.md from the server's OpenAPI document, docs/server.md from its flags, docs/matrix.md from the
parity matrix of the tests, the tables of docs/kernels.md from bench/results/aot.json, docs/overload.svg and a
table from bench/results/overload.json, docs/sizing.md, docs/parallelism.md and
docs/pools.md from quire_sizing. docs/alerts.md, the chart's
alerts and its dashboard come from one table, `docs.alerting`.

`make docs` runs it in the repository's root; with `--check`, which the tests use, it fails if a file is out
of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from docs import (
    alerting,
    api_pages,
    dashboard,
    flag_pages,
    kernel_tables,
    model_matrix,
    overload_curve,
    parallelism_tables,
    pool_tables,
    runbook,
    size_tables,
)
from quire_operator.status.reasons import REASONS, Reason

DOCS = Path(__file__).parent
CRDS = DOCS.parent / "crds"
CHART = DOCS.parent / "charts" / "quire" / "files"
Schema = dict[str, Any]
TABLE_HEAD = "| field | type | default | meaning |\n|---|---|---|---|\n"


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
    """The message of every CEL rule, with the field that has the rule."""
    for rule in schema.get("x-kubernetes-validations", []):
        message = rule.get("message") or rule.get("messageExpression", "")
        yield f"- `{path}`: {message}"
    for name, field in schema.get("properties", {}).items():
        yield from rules(field, f"{path}.{name}")
    if "items" in schema:
        yield from rules(schema["items"], f"{path}[]")


def crd_of(plural: str) -> Schema:
    found: Schema = yaml.safe_load((CRDS / f"{plural}.yaml").read_text())
    return found


def reference() -> str:
    crd = crd_of("llmdeployments")
    version = crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    profile = crd_of("acceleratorprofiles")["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    sections = [
        "# API reference",
        f"`{crd['spec']['group']}/{version['name']}`, kind `{crd['spec']['names']['kind']}`.\n"
        "Generated from `crds/` by `make docs`.",
        "## spec",
        TABLE_HEAD + "\n".join(rows(schema["properties"]["spec"])),
        "## What the API server refuses, and its messages",
        "\n".join(rules(schema, "LLMDeployment")),
        "## status",
        TABLE_HEAD + "\n".join(rows(schema["properties"]["status"])),
        "## AcceleratorProfile",
        "Cluster-scoped, created by administrators. " + " ".join(profile["description"].split()),
        TABLE_HEAD + "\n".join(rows(profile["properties"]["spec"], "spec.")),
        "\n".join(rules(profile["properties"]["spec"])),
        *gateway_kind("llmroutes", "[Read by the gateway](gateway-routes.md)."),
        *gateway_kind("llmclients", "[Read by the gateway](gateway-routes.md)."),
        *gateway_kind("llmexternalbackends", "[Read by the gateway](external-backends.md)."),
    ]
    return "\n\n".join(sections) + "\n"


def gateway_kind(plural: str, about: str) -> list[str]:
    """The sections of a kind that the gateway reads, and writes the status of."""
    crd = crd_of(plural)
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = schema["properties"]
    sections = [
        f"## {crd['spec']['names']['kind']}",
        " ".join(f"{about} {schema['description']}".split()),
        TABLE_HEAD + "\n".join([*rows(parts["spec"], "spec."), *rows(parts["status"], "status.")]),
        "\n".join(rules(schema, crd["spec"]["names"]["kind"])),
    ]
    return [section for section in sections if section]


TROUBLE_HEAD = """# When something fails

`kubectl get llmdep` shows the reason, `kubectl describe llmdep NAME` the message and the Events, and
`status.lastFailure` keeps the last failure, with the exit code of a container. Each reason has one Event, a
Warning of the same name. The reason of `Degraded` is also the reason of `Ready`, if `Ready` is False
because of it. Generated from the operator's table of reasons by `make docs`.
"""


def troubleshooting() -> str:
    sections = [TROUBLE_HEAD]
    for reason in REASONS.values():
        code = "" if reason.exit_code is None else f" The server ends with exit code {reason.exit_code}."
        stalled = (
            " If it happens twice, it sets `Stalled`: a retry does not help until something is changed."
            if reason.final
            else ""
        )
        sections.append(
            f"## {reason.name}\n\n{sentence(reason.what)}{code}{stalled}\n\n"
            f"**Shown by:** {shown_by(reason)}.\n\n"
            f"**What to do:** {sentence(reason.remedy)}\n"
        )
    return "\n".join(sections)


def shown_by(reason: Reason) -> str:
    places = [f"`{each}`" for each in reason.shown.split(", ") if each]
    kept = ["`status.lastFailure`"] if not places or "Degraded=True" in reason.shown.split(", ") else []
    return f"{', '.join([*places, *kept])}; Event `{reason.name}`"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


PAGES = {
    DOCS / "reference.md": reference,
    DOCS / "troubleshooting.md": troubleshooting,
    DOCS / "api.md": api_pages.page,
    DOCS / "server.md": flag_pages.page,
    DOCS / "matrix.md": model_matrix.page,
    DOCS / "kernels.md": kernel_tables.page,
    DOCS / "sizing.md": size_tables.page,
    DOCS / "parallelism.md": parallelism_tables.page,
    DOCS / "pools.md": pool_tables.page,
    DOCS / "alerts.md": runbook.page,
    DOCS / "overload.md": overload_curve.page,
    DOCS / "overload.svg": overload_curve.picture,
    CHART / "alerts.yaml": alerting.rules_file,
    CHART / "dashboard.json": dashboard.dashboard,
}


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        stale = [page.name for page, text in PAGES.items() if not page.exists() or page.read_text() != text()]
        sys.stderr.writelines(f"{name} is out of date: run `make docs`\n" for name in stale)
        return 1 if stale else 0
    for page, text in PAGES.items():
        page.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
