"""`python -m e2e.failure_paths`, the last step of `make test`: prints what was exercised, and fails for what
was not.

It judges a whole run only: a part of the tests exercises a part of the paths.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping

from e2e.failure_paths import declared, recorder
from e2e.failure_paths.exempt import EXEMPT


def main() -> int:
    """The exit code."""
    try:
        recorded = recorder.read(os.environ.get(recorder.VARIABLE, ""))
    except OSError:
        print(f"nothing was recorded: {recorder.VARIABLE} has to name the folder of a whole run (make test)")
        return 2
    text, is_complete = report(declared.records(), recorded, EXEMPT)
    print(text)
    return 0 if is_complete else 1


def report(wanted: set[str], recorded: set[str], exempt: Mapping[str, str]) -> tuple[str, bool]:
    """A table by kind with what is wrong below it, and whether nothing is."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for each in sorted(wanted):
        kinds[each.partition(" ")[0]].append(each)
    lines = ["failure paths    declared   exercised   exempt"]
    for kind, names in kinds.items():
        done, left_out = len(recorded.intersection(names)), len(set(exempt).intersection(names))
        lines.append(f"{kind:<14}{len(names):>11}{done:>12}{left_out:>9}")
    missing = sorted(wanted - recorded - set(exempt))
    lines += [f"no test exercised: {each}" for each in missing]
    stale = sorted(set(exempt) & recorded | set(exempt) - wanted)
    lines += [f"exempt, but exercised or not declared: {each}" for each in stale]
    return "\n".join(lines), not missing and not stale


if __name__ == "__main__":
    sys.exit(main())
