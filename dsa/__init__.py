"""Training of embedding tables that do not fit in memory: every row's weight and Adam state live on disk."""

from dsa import backends, conventions, errors, init
from dsa.estimate import estimate
from dsa.optimizer import DiskSparseRiemannianAdam
from dsa.prefetch import lookahead

__all__ = ["DiskSparseRiemannianAdam", "backends", "conventions", "errors", "estimate", "init", "lookahead"]
__version__ = "0.4.0.dev0"
