"""The health of a server as the kubelet and the operator see it.

`heartbeat` is the shared memory that the engine writes, `decision` judges it (pure), `server` answers the
probes in a process of its own. Standard library only: it starts in a fraction of a second, answers while
the model loads, and shares no interpreter lock with an engine that may be stuck.
"""
