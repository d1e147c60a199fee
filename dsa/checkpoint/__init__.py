"""Checkpoints: whole states as ordinary Zarr v3 groups, verified on every import."""

from dsa.checkpoint.copying import copy_checkpoint
from dsa.checkpoint.delta import OpenedContent, flatten_checkpoint, open_content, write_delta
from dsa.checkpoint.export import write_checkpoint
from dsa.checkpoint.reading import Checkpoint, open_checkpoint
from dsa.checkpoint.weights import write_weights

__all__ = [
    "Checkpoint",
    "OpenedContent",
    "copy_checkpoint",
    "flatten_checkpoint",
    "open_checkpoint",
    "open_content",
    "write_checkpoint",
    "write_delta",
    "write_weights",
]
