"""An Event about an LLMDeployment as the API server takes it.

Called by the cluster; sends nothing itself.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from quire_operator import names
from quire_operator.cluster import kinds
from quire_operator.cluster.cache import Object
from quire_operator.observed import Body
from quire_operator.status.transitions import Event


def document(body: Body, event: Event, *, instance: str) -> Object:
    """`instance`: which process tells it."""
    metadata = body["metadata"]
    return {
        "apiVersion": kinds.EVENT.api_version,
        "kind": kinds.EVENT.kind,
        "metadata": {
            "name": f"{metadata['name']}.{secrets.token_hex(8)}",
            "namespace": metadata["namespace"],
        },
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": names.GROUP + "/" + names.FIELD_MANAGER,
        "reportingInstance": instance[:128],
        "type": event.kind,
        "reason": event.reason,
        "action": event.action,
        "note": event.note[:1024],
        "regarding": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }
