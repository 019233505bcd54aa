"""docs/alerts.md: what is measured, from which value on it is bad, and for each alert what to do.

Written by `docs.generate` from the table of `docs.alerting`. Knows no Prometheus.
"""

from __future__ import annotations

from docs.alerting import FAULTS, MEASURES, Measure

HEAD = """# Alerts

`monitoring.prometheusRule.enabled=true` installs these rules where the Prometheus operator is. Any other
Prometheus reads `charts/quire/files/alerts.yaml` as a rule file, if its scrape sets the labels `namespace`
and `llmdeployment` as the chart's PodMonitors do, and keeps those that the operator gives
(`honor_labels: true`). Severity `warning` stands for a ticket, `critical` for a page. Made by `make docs`.

| measured, for each LLMDeployment | good | warning | critical |
|---|---|---|---|
"""


def page() -> str:
    """The runbook."""

    def shown(measure: Measure, value: float) -> str:
        return (
            f"{value * 100:g} %"
            if measure.unit == "percentunit"
            else f"{value:g} {measure.unit}".removesuffix(" short")
        )

    rows = []
    for m in MEASURES:
        good, bad = ("from", "below") if m.falling else ("up to", "above")
        levels = " | ".join(f"{bad} {shown(m, value)}" for value in (m.warning, m.critical))
        rows.append(f"| [{m.what}](#{m.alert.lower()}) | {good} {shown(m, m.good)} | {levels} |\n")
    text = HEAD + "".join(rows)
    for one in (*MEASURES, *FAULTS):
        what = one.what.replace("{{ $labels.kind }}", "a kind of object")
        text += f"\n## {one.alert}\n\n{what[:1].upper()}{what[1:]}. {one.impact}\n\n"
        text += f"**Find out:** {one.diagnosis}\n\n**What to do:** {one.steps}\n"
    return text
