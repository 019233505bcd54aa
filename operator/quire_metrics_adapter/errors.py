"""The adapter's errors, in one tree. Every layer raises from it; nothing here knows any layer.

AdapterError
├── SettingsError            the process's own environment is wrong: it must not start
├── ForeignApiServiceError   custom.metrics.k8s.io belongs to somebody else: it must end
├── HostileAnswerError       a pod said what cannot be believed
├── ApiError                 the Kubernetes API server refused, or did not answer
│   ├── UnreachableError
│   ├── NotFoundError
│   ├── ConflictError
│   ├── InvalidError
│   └── GoneError            a watch cannot go on from where it was
└── RefusedError             what a caller asked gets a Status with this code and reason
"""

from __future__ import annotations


class AdapterError(Exception):
    """Whatever the adapter raises on purpose."""


class SettingsError(AdapterError):
    """An environment variable is missing or has an unusable value."""


class ForeignApiServiceError(AdapterError):
    """An APIService of custom.metrics.k8s.io names another Service than ours."""


class HostileAnswerError(AdapterError):
    """A pod's answer is too long or no text of metrics."""


class ApiError(AdapterError):
    """Any failure of a request to the API server."""


class UnreachableError(ApiError):
    """The API server did not answer, or not with a decision."""


class NotFoundError(ApiError):
    """There is no such object."""


class ConflictError(ApiError):
    """The object changed since it was read."""


class InvalidError(ApiError):
    """The request makes no sense to the API server."""


class GoneError(ApiError):
    """The resource version is too old: list again."""


class RefusedError(AdapterError):
    """The request gets no value. `code` is the HTTP status, `reason` Kubernetes' word for it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
