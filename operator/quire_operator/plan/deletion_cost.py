"""Which pods a scale-down deletes first: the idlest, by Kubernetes' pod-deletion-cost annotation.

Set only while the autoscaler is about to scale down and removed afterwards, because Kubernetes advises
against frequent updates of it. Pure; the load of a pod is what it last reported on /statusz.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire_operator import names
from quire_operator.observed import Body, Observed, is_about_to_scale_down


def costs(observed: Observed, ready: Iterator[Body]) -> Iterator[tuple[Body, str | None]]:
    """The `ready` pods whose annotation has to change, each with its new value; None removes it.

    The cost is the bit length of the number of running requests: it separates idle pods from busy ones and
    changes rarely. Where the operator has no autoscaler, the annotation belongs to other software and is left
    alone.
    """
    autoscaler = observed.child("HorizontalPodAutoscaler") or observed.keda_autoscaler
    if autoscaler is None:
        return
    scales_down = is_about_to_scale_down(autoscaler)
    for pod in ready:
        metadata = pod["metadata"]
        known = (metadata.get("annotations") or {}).get(names.ANNOTATION_DELETION_COST)
        sample = observed.samples.get(str(metadata["uid"]))
        if not scales_down:
            wanted = None
        elif sample is None or sample.requests is None:
            wanted = known
        else:
            wanted = str(sample.requests.bit_length())
        if wanted != known:
            yield pod, wanted
