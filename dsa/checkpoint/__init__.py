"""Checkpoints: whole states as ordinary Zarr v3 groups, verified on every import."""

from dsa.checkpoint.copying import copy_checkpoint
from dsa.checkpoint.export import write_checkpoint
from dsa.checkpoint.reading import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "copy_checkpoint", "open_checkpoint", "write_checkpoint"]
