"""Pid 1 of the container: starts the health, engine and API processes, watches them, and reports how it
ended.

`children` starts and reaps processes, `watch` decides (pure), `main` is the loop. Imports neither torch nor
a web framework: it has to be small and to stay alive.
"""
