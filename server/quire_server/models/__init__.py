"""Reads model directories, which are untrusted input, and builds the model that the runner executes."""
