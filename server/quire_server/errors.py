"""The exceptions of Quire's server, in one tree, so that each boundary catches exactly those that it handles.

    QuireServerError
    ├── RequestError               an invalid request of a client (``param`` names the field)
    │   ├── PromptTooLongError     the prompt leaves no room for an answer
    │   └── ChatTemplateError      the model's template refuses these messages, or costs too much
    ├── ConfigError                a flag, a variable or a model that this server cannot serve
    ├── ModelNotFoundError         there is no model where the configuration points
    ├── ModelCorruptError          the model's files contradict each other, their manifest or their format
    ├── AccessDeniedError          the source of the model refuses access
    ├── DownloadError              the network or the source failed; a retry may succeed
    ├── DiskError                  the model does not fit on the disk, or cannot be written there
    ├── CanaryMismatchError        the engine computes other tokens than it should
    ├── RankLostError              a rank of a distributed model ended, stopped, or did something else
    ├── MixedRevisionError         ranks of one model have other programs, models or settings
    └── DeviceError                the GPU cannot go on
        └── DeviceMemoryError      its memory does not hold what has to be in it

Every message is one or two sentences: what is wrong, and what to do about it. Imports nothing.
"""


class QuireServerError(Exception):
    """Root of the tree."""


class RequestError(QuireServerError):
    """A request that cannot be served; other requests are not affected."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """The prompt alone fills the context, or the whole KV cache."""


class ChatTemplateError(RequestError):
    """The chat template rejected the messages, or exceeded its limits of time or size."""


class ConfigError(QuireServerError):
    """The configuration is invalid, or impossible on this machine."""


class ModelNotFoundError(QuireServerError):
    """No model at the given path."""


class ModelCorruptError(QuireServerError):
    """A model file is damaged, truncated, hostile, or does not fit the others."""


class AccessDeniedError(QuireServerError):
    """Credentials are missing or not good enough for the model's source."""


class DownloadError(QuireServerError):
    """A transfer failed temporarily; ``retry_after``: seconds to wait, as requested by the source."""

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DiskError(QuireServerError):
    """There is not enough disk space for the model, or the disk failed."""


class CanaryMismatchError(QuireServerError):
    """The canary is wrong: weights, device or memory are damaged."""


class RankLostError(QuireServerError):
    """A rank of the model ended, stopped, or executed something else; all ranks have to end."""


class MixedRevisionError(QuireServerError):
    """The ranks of the model do not run the same program with the same model and settings."""


class DeviceError(QuireServerError):
    """The GPU failed: its memory is lost, and the process has to end."""


class DeviceMemoryError(DeviceError):
    """The GPU has too little memory, and there is no request to drop instead."""
