"""What the operator survives: a row for every fault, on a real API server with the real controllers of
workloads, through a proxy that makes the faults.

Each row proves that its fault took effect, and then that the LLMDeployment has the children that an
undisturbed run gives it, none twice, and that no pod was replaced. `make chaos` prints the table; what is
quick runs in `make test` as well.
"""
