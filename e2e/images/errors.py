"""The one error of this package: a message that says what to do, no traceback."""


class ImageError(Exception):
    """An image could not be built or pushed."""
