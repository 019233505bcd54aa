"""Everything that the cluster commands can fail with; the message always names the next thing to do.

ClusterError
├── HostError        the machine lacks something (a package, root, room in a path)
├── BuildError       a Go program did not build
├── NotUpError       a running cluster was needed
└── NotReadyError    something started but did not become ready in time
"""


class ClusterError(Exception):
    """Root of this package's errors."""


class HostError(ClusterError):
    """The machine lacks something that a cluster needs."""


class BuildError(ClusterError):
    """A program did not build."""


class NotUpError(ClusterError):
    """There is no running cluster for this checkout."""


class NotReadyError(ClusterError):
    """A part of the cluster started but did not become ready in time."""
