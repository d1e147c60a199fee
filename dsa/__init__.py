"""Training of embedding tables that do not fit in memory: every row's weight and Adam state live on disk."""

from dsa import backends, conventions, errors, init
from dsa.checkpoint import copy_checkpoint, flatten_checkpoint, open_checkpoint
from dsa.embedding import DiskEmbedding, DiskEmbeddingBag
from dsa.estimate import estimate
from dsa.gradients import clip_grad_norm_, split_parameters
from dsa.optimizer import DiskSparseRiemannianAdam
from dsa.prefetch import lookahead
from dsa.sparse_adam import DiskSparseAdam
from dsa.transfer import export_directory as export_checkpoint
from dsa.transfer import migrate
from dsa.transfer import restore as import_checkpoint

__all__ = [
    "DiskEmbedding",
    "DiskEmbeddingBag",
    "DiskSparseAdam",
    "DiskSparseRiemannianAdam",
    "backends",
    "clip_grad_norm_",
    "conventions",
    "copy_checkpoint",
    "errors",
    "estimate",
    "export_checkpoint",
    "flatten_checkpoint",
    "import_checkpoint",
    "init",
    "lookahead",
    "migrate",
    "open_checkpoint",
    "split_parameters",
]
__version__ = "0.4.0.dev0"
