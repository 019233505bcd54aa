"""Fault injection: a row per fault, on a real API server with the real workload controllers, through a proxy
that injects the faults.

Each row proves that its fault took effect, that the LLMDeployment then has the children of an undisturbed
run, none twice, and that no pod was replaced. `make chaos` prints the table; the quick rows run in `make
test` as well.
"""
