"""The only package that talks to the API server: observe, execute a plan, write the status, record Events."""

from quire_operator.cluster import kinds
from quire_operator.cluster.cache import Cache, Changes, Key, Listing, Object, owner_key, version_of
from quire_operator.cluster.cluster import Cluster
from quire_operator.cluster.connection import Connection
from quire_operator.cluster.demands import DemandWatch
from quire_operator.cluster.errors import (
    ClusterError,
    ConflictError,
    FailedError,
    ForbiddenError,
    NotFoundError,
    PredecessorError,
    QuotaExceededError,
    RejectedError,
    UnreachableError,
)
from quire_operator.cluster.kinds import Kind
from quire_operator.cluster.leases import LeaseClient

__all__ = [
    "Cache",
    "Changes",
    "Cluster",
    "ClusterError",
    "ConflictError",
    "Connection",
    "DemandWatch",
    "FailedError",
    "ForbiddenError",
    "Key",
    "Kind",
    "LeaseClient",
    "Listing",
    "NotFoundError",
    "Object",
    "PredecessorError",
    "QuotaExceededError",
    "RejectedError",
    "UnreachableError",
    "kinds",
    "owner_key",
    "version_of",
]
