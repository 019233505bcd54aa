"""What no test can exercise, each with the reason. An entry that a run does exercise fails the check, so that
the list stays true.
"""

EXEMPT: dict[str, str] = {}
