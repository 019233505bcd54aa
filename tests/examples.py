"""How many examples hypothesis tries: a third in `make test`, all of them in `make deep`.

Most of what random examples find, the first ones find, and `make deep` runs every night.
"""

import os

_HAS_ALL = os.environ.get("ALL_EXAMPLES") == "true"


def examples(number: int) -> int:
    """So many in `make deep`."""
    return number if _HAS_ALL else max(20, number // 3)
