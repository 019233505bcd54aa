"""The one error of `make up`: a message that says what to do, no traceback."""


class UpError(Exception):
    """A step of `make up` failed."""
