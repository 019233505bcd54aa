"""The operator: watches LLMDeployments and reconciles their children and status."""
