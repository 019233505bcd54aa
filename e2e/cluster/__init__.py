"""A real single-node Kubernetes for this checkout: `python -m e2e.cluster
build|plan|setup|up|down|status`."""
