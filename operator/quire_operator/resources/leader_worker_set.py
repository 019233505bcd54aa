"""The LeaderWorkerSet: how many groups of pods there are, for a model whose ranks are on several nodes.

Groups are replaced one after the other and never beside their successors, so that no two revisions need room
for the same group. LeaderWorkerSet recreates a group whose pods have restarted or gone; that pods of one
group agree on their revision is checked by the server.
"""

from __future__ import annotations

import hashlib
import json

from quire_operator import names
from quire_operator.resources.manifest import Manifest, compact, metadata
from quire_operator.spec import LLMDeployment

_HASH_LENGTH = 10
_ALL_GROUPS = 1000  # as many as there may be


def build(model: LLMDeployment, leader: Manifest, worker: Manifest) -> Manifest:
    """`leader` and `worker`: the pod templates."""
    described = metadata(model, model.name)
    # Kueue copies it to the pods, which then wait for quota of that queue.
    content = json.dumps([leader, worker], sort_keys=True)
    described["labels"] |= compact({names.LABEL_QUEUE: model.spec.scheduling.queue_name})
    return {
        "apiVersion": names.GROUP_API_VERSION,
        "kind": names.GROUP_KIND,
        "metadata": described,
        "spec": {
            "replicas": model.replicas,
            # Workers look for the leader from the start: no group waits for a leader that waits for it.
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    "maxUnavailable": 1,
                    "maxSurge": 0,
                    # Groups from this index on are updated: none of them while the rollout is paused.
                    "partition": _ALL_GROUPS if model.spec.rollout.paused else 0,
                },
            },
            "leaderWorkerTemplate": {
                "size": model.spec.parallelism.nodes,
                # A pod that restarts while another one has no node does not throw away those that have.
                "restartPolicy": "RecreateGroupAfterStart",
                "leaderTemplate": _hashed(leader, content),
                "workerTemplate": _hashed(worker, content),
            },
        },
    }


def _hashed(template: Manifest, content: str) -> Manifest:
    """The template with a hash of both, by which pods of the newest revision are recognized."""
    annotation = {names.ANNOTATION_TEMPLATE_HASH: hashlib.sha256(content.encode()).hexdigest()[:_HASH_LENGTH]}
    about = template["metadata"]
    return {**template, "metadata": {**about, "annotations": {**about.get("annotations", {}), **annotation}}}
