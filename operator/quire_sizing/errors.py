"""The error of this package."""


class SizingError(Exception):
    """A model or a load cannot be sized; the message names the key and the remedy."""
