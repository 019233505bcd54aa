"""The operator: watches LLMDeployments and keeps their children and status true."""
