"""The inference server: OpenAI routes over a paged, continuously batched engine."""

__version__ = "0.1.0"
