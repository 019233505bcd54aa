"""What Prometheus scrapes, one subject a file."""
