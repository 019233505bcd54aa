"""KEDA itself beside the operator and the metrics adapter (`make keda`)."""
