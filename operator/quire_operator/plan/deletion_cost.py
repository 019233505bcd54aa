"""Which pods are to go first when fewer are wanted: the idlest, by Kubernetes' own pod-deletion-cost.

Called by `make_plan`. Written only while the autoscaler is about to shrink, and taken off again afterwards:
the API asks for few writes of it. Pure; loads come from what the pods last said.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire_operator import names
from quire_operator.observed import Body, Observed, is_shrinking


def costs(observed: Observed, ready: Iterator[Body]) -> Iterator[tuple[Body, str | None]]:
    """Those of the `ready` pods whose annotation is to be another one, None for none at all.

    The cost counts the binary digits of the pod's requests: it sets the idle apart from the busy, and changes
    seldom. Without an autoscaler of ours the annotation is somebody else's.
    """
    autoscaler = observed.child("HorizontalPodAutoscaler") or observed.made_by_keda
    if autoscaler is None:
        return
    near = is_shrinking(autoscaler)
    for pod in ready:
        metadata = pod["metadata"]
        known = (metadata.get("annotations") or {}).get(names.ANNOTATION_DELETION_COST)
        sample = observed.samples.get(str(metadata["uid"]))
        if not near:
            wanted = None
        elif sample is None or sample.requests is None:
            wanted = known
        else:
            wanted = str(sample.requests.bit_length())
        if wanted != known:
            yield pod, wanted
