"""Turns a panic of a Rust extension (tokenizers, llguidance) into an ordinary exception.

pyo3 raises a panic as PanicException, which derives from BaseException, so no ``except Exception`` on the
way sees it: neither the boundary of a request nor that of a process. A model's tokenizer.json can provoke
one: its regular expressions backtrack, and the library panics where one gives up.
"""

import contextlib
from collections.abc import Iterator


class RustPanicError(Exception):
    """A Rust extension panicked. What it was called for has no result, and it can be called again."""


@contextlib.contextmanager
def as_errors() -> Iterator[None]:
    """Raise RustPanicError for a panic."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        # The class cannot be imported: each extension has its own.
        if type(error).__name__ != "PanicException":
            raise
        raise RustPanicError(str(error)[:300]) from None
