"""Every error that Quire's server raises on purpose, in one tree, so that each boundary catches exactly its
own.

    QuireServerError
    ├── RequestError               the client's fault, and no other's (``param`` names the field)
    │   ├── PromptTooLongError     the prompt leaves no room for an answer
    │   └── ChatTemplateError      the model's template refuses these messages, or costs too much
    ├── ConfigError                a flag, a variable or a model that this server cannot serve
    ├── ModelNotFoundError         there is no model where the configuration points
    ├── ModelCorruptError          the model's files contradict each other, their manifest or their format
    ├── AccessDeniedError          whoever holds the model does not give it to us
    ├── DownloadError              the network or the other side failed; later it may work
    ├── DiskError                  the model does not fit on the disk, or cannot be written there
    └── DeviceError                the GPU cannot go on
        └── DeviceMemoryError      its memory does not hold what has to be in it

Every message is one sentence or two: what is wrong, and what to do about it. Raised everywhere, imports
nothing.
"""


class QuireServerError(Exception):
    """Root of the tree."""


class RequestError(QuireServerError):
    """A request that cannot be served as it stands; every other request goes on."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """The prompt alone fills the context, or the whole KV cache."""


class ChatTemplateError(RequestError):
    """The chat template rejected the messages, or went over its time or size."""


class ConfigError(QuireServerError):
    """What the server was told to do is not possible."""


class ModelNotFoundError(QuireServerError):
    """No model at the given path."""


class ModelCorruptError(QuireServerError):
    """A model file is damaged, truncated, hostile, or does not fit the others."""


class AccessDeniedError(QuireServerError):
    """Credentials are missing or not good enough for the model's source."""


class DownloadError(QuireServerError):
    """A transfer failed in a way that may pass; ``retry_after``: seconds that the other side asks for."""

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DiskError(QuireServerError):
    """There is no room for the model, or its disk fails."""


class DeviceError(QuireServerError):
    """A fault of the GPU: what it holds is lost, and the process with it."""


class DeviceMemoryError(DeviceError):
    """The GPU has too little memory, where no request can be given up instead."""
