"""A library that does not fit the code beside it is named with the remedy."""

from pathlib import Path

import pytest
from numpy._core import _multiarray_umath

from quire_kernels.cpu.library import arguments, open_library
from quire_kernels.cpu.native_build import LIBRARY

REMEDY = r"compiled of other sources than these\. Run `python .*native_build\.py`"


def test_a_library_of_other_sources_names_what_it_lacks_and_the_remedy() -> None:
    with pytest.raises(ImportError, match=f"_multiarray_umath.* has no quire_run: it was {REMEDY}"):
        open_library(Path(_multiarray_umath.__file__))


def test_a_kernel_that_an_older_library_does_not_have_is_named_too() -> None:
    library = open_library(LIBRARY)
    assert library is not None
    with pytest.raises(ImportError, match=f"has no quire_later: it was {REMEDY}"):
        library.kernels({"later": arguments("x", "size")})
    assert not hasattr(library.loaded, "no_kernel")


def test_without_a_library_there_is_none(tmp_path: Path) -> None:
    assert open_library(tmp_path / "libquire_cpu.so") is None
