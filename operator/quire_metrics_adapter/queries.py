"""Parses the path and query of a request once, for authorization and for the response.

Pure. Anything that cannot be a Kubernetes name is refused before it is looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from quire_metrics_adapter.discovery import GROUP, RESOURCE, VERSIONS
from quire_metrics_adapter.errors import RefusedError
from quire_metrics_adapter.load_metrics import METRICS

ALL = "*"
MAX_SELECTOR_CHARACTERS = 4096

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True)
class Query:
    """One metric of one LLMDeployment, or (name ALL) of those that the label selector matches."""

    version: str
    namespace: str
    name: str
    metric: str
    label_selector: str = ""


def parse(raw_path: str, parameters: Mapping[str, str]) -> Query:
    """Parses /apis/GROUP/VERSION/namespaces/NAMESPACE/RESOURCE/NAME/METRIC; RefusedError for anything
    else.
    """
    parts = [unquote(part) for part in raw_path.split("/")]
    if len(parts) != 9 or parts[:3] != ["", "apis", GROUP] or parts[4] != "namespaces":
        raise not_found(f"nothing is served at this path; metrics of {RESOURCE} are")
    version, namespace, resource, name, metric = parts[3], *parts[5:]
    if version not in VERSIONS:
        raise not_found(f"{GROUP}/{version} is not served: use {' or '.join(VERSIONS)}")
    if resource != RESOURCE:
        raise not_found(f"there are metrics of {RESOURCE} and of nothing else")
    if not _NAME.fullmatch(namespace) or not (name == ALL or _NAME.fullmatch(name)):
        raise not_found("namespace or name is not one of Kubernetes")
    if metric not in METRICS:
        raise not_found(f"{RESOURCE} have no such metric; there are {', '.join(METRICS)}")
    if parameters.get("metricLabelSelector"):
        raise _bad("metricLabelSelector", "the metrics have no labels: leave it out")
    selector = parameters.get("labelSelector", "")
    if len(selector) > MAX_SELECTOR_CHARACTERS:
        raise _bad("labelSelector", f"more than {MAX_SELECTOR_CHARACTERS} characters")
    return Query(version, namespace, name, metric, selector if name == ALL else "")


def not_found(message: str) -> RefusedError:
    """404: there is nothing that could have a value."""
    return RefusedError(404, "NotFound", message)


def _bad(field: str, message: str) -> RefusedError:
    return RefusedError(400, "BadRequest", f"{field}: {message}")
