"""Failure paths: which faults, `except` clauses and failure reasons a whole test run has exercised.

`make test` names a folder in the variable FAILURE_PATHS. Tests, and the processes that they start, record
there what happened: a fault that took effect, an `except` clause that ran, a reason that a test read in a
status. `python -m e2e.failure_paths` then compares that with what the code declares, and fails for the rest.
Without the variable nothing is recorded and nothing costs time.
"""
