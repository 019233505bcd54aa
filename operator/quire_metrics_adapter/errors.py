"""The adapter's errors, in one tree. Every layer raises subclasses of AdapterError.

AdapterError
├── SettingsError            the environment is invalid: the process must not start
├── ForeignApiServiceError   custom.metrics.k8s.io is served by another adapter: the process must end
├── HostileAnswerError       a pod's answer is invalid
├── ApiError                 the Kubernetes API server refused, or did not answer
│   ├── UnreachableError
│   ├── NotFoundError
│   ├── ConflictError
│   ├── InvalidError
│   └── GoneError            a watch cannot resume
└── RefusedError             a request is refused with a Status of this code and reason
"""

from __future__ import annotations


class AdapterError(Exception):
    """Base of all errors that the adapter raises deliberately."""


class SettingsError(AdapterError):
    """An environment variable is missing or has an unusable value."""


class ForeignApiServiceError(AdapterError):
    """An APIService of custom.metrics.k8s.io names another Service than ours."""


class HostileAnswerError(AdapterError):
    """A pod's answer is too long or not in the exposition format."""


class ApiError(AdapterError):
    """Any failure of a request to the API server."""


class UnreachableError(ApiError):
    """The API server did not answer, or with a temporary failure."""


class NotFoundError(ApiError):
    """There is no such object."""


class ConflictError(ApiError):
    """The object changed since it was read."""


class InvalidError(ApiError):
    """The API server considers the request invalid."""


class GoneError(ApiError):
    """The resource version is too old: list again."""


class RefusedError(AdapterError):
    """The request gets no value. `code` is the HTTP status, `reason` the Kubernetes reason."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
