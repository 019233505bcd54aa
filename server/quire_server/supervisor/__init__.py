"""Pid 1 of the container: starts the health, engine and API processes, watches them, and reports why they
ended.

`children` starts and reaps processes, `watch` decides (pure functions), `main` is the loop. Imports neither
torch nor a web framework, so that it stays small and cannot fail with them.
"""
