"""The HTTPRoute and the InferencePool: access through a Gateway, where the spec names one.

Other software installs their CRDs (the Gateway API and its inference extension) and implements them.
"""

from __future__ import annotations

from typing import Any

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.resources.manifest import Manifest, compact, metadata
from quire_operator.spec import LLMDeployment
from quire_operator.spec.schema import InferencePool, Route

_GATEWAYS = "gateway.networking.k8s.io"
_POOLS = "inference.networking.k8s.io"
_API = "/v1"  # the paths that are published: /metrics and /health are for the cluster
_MAX_RULES, _MAX_MATCHES = 16, 64  # of a route, and of a rule without a rewritten prefix


def build(model: LLMDeployment) -> list[Manifest]:
    """The route and the pool, as far as the spec has them."""
    route, pool = model.spec.networking.http_route, model.spec.networking.inference_pool
    if pool is not None and not pool.enabled:
        pool = None
    return [
        *([_pool(model, pool)] if pool is not None else []),
        *([_route(model, route, to_pool=pool is not None)] if route is not None else []),
    ]


def _route(model: LLMDeployment, route: Route, *, to_pool: bool) -> Manifest:
    """Forwards the paths of the API and no others. The Gateway removes a prefix: the server knows none.
    Raises SpecError where a route has no room for all names.
    """
    backend = (
        {"group": _POOLS, "kind": "InferencePool", "name": model.name}
        if to_pool
        else {"kind": "Service", "name": model.name, "port": model.spec.networking.service.port}
    )
    rewrite = {
        "type": "URLRewrite",
        "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": _API}},
    }
    prefix = route.path.rstrip("/")
    matches = _matches(model, route, prefix + _API)
    each = 1 if prefix else _MAX_MATCHES  # a rule that rewrites a prefix has one match
    if len(matches) > each * _MAX_RULES:
        raise SpecError(
            "spec.networking.httpRoute.path",
            f"beside modelHeader a path is rewritten for at most {_MAX_RULES} names, and there are "
            f"{len(matches)} with aliases and adapters: use /, or fewer names",
        )
    rules: list[Manifest] = [
        {
            "matches": matches[first : first + each],
            **({"filters": [rewrite]} if prefix else {}),
            "backendRefs": [backend],
        }
        for first in range(0, len(matches), each)
    ]
    parents = [
        compact({"name": ref.name, "namespace": ref.namespace, "sectionName": ref.section_name})
        for ref in route.parent_refs
    ]
    return {
        "apiVersion": f"{_GATEWAYS}/v1",
        "kind": "HTTPRoute",
        "metadata": metadata(model, model.name),
        "spec": {"parentRefs": parents, **compact({"hostnames": list(route.hostnames)}), "rules": rules},
    }


def _matches(model: LLMDeployment, route: Route, path: str) -> list[dict[str, Any]]:
    """One for all requests, or where a header has the name of their model, one for each name."""
    paths = {"path": {"type": "PathPrefix", "value": path}}
    if not route.model_header:
        return [paths]
    header = {"type": "Exact", "name": route.model_header}
    served = (*model.served_names, *(adapter.name for adapter in model.spec.adapters))
    return [{"headers": [{**header, "value": name}], **paths} for name in served]


def _pool(model: LLMDeployment, pool: InferencePool) -> Manifest:
    picker = pool.endpoint_picker_ref
    return {
        "apiVersion": f"{_POOLS}/v1",
        "kind": "InferencePool",
        "metadata": metadata(model, model.name),
        "spec": {
            "selector": {"matchLabels": names.selector_labels(model.name)},
            "targetPorts": [{"number": names.PORT_HTTP}],
            "endpointPickerRef": {
                "name": picker.name,
                "port": {"number": picker.port},
                "failureMode": pool.failure_mode,
            },
        },
    }
