"""Failures of requests to the API server, as the operator distinguishes them.

ClusterError
├── UnreachableError     no answer, or a temporary failure: retry
├── NotFoundError        404
├── FailedError          500: the API server, or a webhook that it called, failed to handle the request
├── ConflictError        409: changed since it was read; read again and retry
└── RejectedError        the request itself is refused (400, 403, 422): a retry alone does not help
    ├── ForbiddenError       403: a right is missing, or an admission webhook refuses
    └── QuotaExceededError   refused by a ResourceQuota
PredecessorError is raised without a failed request.
"""

from __future__ import annotations

from quire_operator.errors import QuireOperatorError


class ClusterError(QuireOperatorError):
    """Any failure of a request to the API server."""


class UnreachableError(ClusterError):
    """The API server did not answer, or with a temporary failure."""


class FailedError(ClusterError):
    """The API server failed to handle the request: retry, and report it in the status."""


class NotFoundError(ClusterError):
    """There is no such object."""


class ConflictError(ClusterError):
    """The object changed since it was read, or exists already."""


class RejectedError(ClusterError):
    """The API server, or an admission policy, refuses what was sent."""


class ForbiddenError(RejectedError):
    """The operator lacks the right, or an admission webhook refuses."""


class QuotaExceededError(RejectedError):
    """A ResourceQuota of the namespace is used up."""


class PredecessorError(ClusterError):
    """A deleted LLMDeployment of the same name still has children that are being garbage-collected: wait."""


def from_answer(status: int, message: str) -> ClusterError:
    """The error that an HTTP status stands for."""
    if status == 404:
        return NotFoundError(message)
    if status == 409:
        return ConflictError(message)
    if status == 403 and "exceeded quota" in message:
        return QuotaExceededError(message)
    if status == 500:
        return FailedError(message)
    if status == 403:
        return ForbiddenError(message)
    if status in (400, 405, 413, 415, 422):
        return RejectedError(message)
    return UnreachableError(f"HTTP {status}: {message}")
