"""The probes of the kubelet, and the status for the operator.

`heartbeat` is the shared memory that the engine writes, `decision` evaluates it (pure functions), `server`
answers the probes in a process of its own. Standard library only: it starts in a fraction of a second,
answers while the model loads, and shares no GIL with an engine that may be stuck.
"""
