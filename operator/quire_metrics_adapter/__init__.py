"""The metrics adapter: load of LLMDeployments as `custom.metrics.k8s.io`, for any HorizontalPodAutoscaler."""
