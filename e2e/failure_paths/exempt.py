"""What no test can exercise, each with the reason. An entry that a run does exercise fails the check, so that
the list stays true.
"""

EXEMPT = {
    "termination GPUOutOfMemory": (
        "only a GPU whose memory runs out ends a server so; tests/server/runner/gpu/test_device.py provokes "
        "the error with a device that stands in for one, and tests/server/supervisor/test_watch.py passes "
        "such a failure on to the exit code"
    ),
}
