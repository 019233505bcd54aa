"""Benchmarks: ``make bench``, or one section by ``make bench ONLY=batching``."""
