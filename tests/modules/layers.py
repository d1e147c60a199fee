"""Layers, optimizers and their raw state, made the same way for weights in memory and on disk."""

import contextlib

import numpy as np
import torch
from current_files import table_file

from dsa import DiskEmbedding, DiskEmbeddingBag, DiskSparseAdam, init
from dsa.schema import adam_schema

HEADER = 4096
UNOBSERVED = ("dsa.lock",)
MEMORY_AND_DISK = ("memory", "disk")


class Maker(contextlib.ExitStack):
    """Makes layers and optimizers that are closed in the end, whatever happens.

    Args:
        path: Where directories go; the one of `where` is made inside it.
    """

    def __init__(self, path):
        super().__init__()
        self.path = path

    def directory(self, where="state"):
        return self.path / where

    def plain(self, rows, dim, value=0.0, **options):
        """`torch.nn.Embedding` with sparse gradients, every weight `value`."""
        layer = torch.nn.Embedding(rows, dim, sparse=True, **options)
        torch.nn.init.constant_(layer.weight, value)
        return layer

    def disk(self, rows, dim, value=0.0, where="state", kind=DiskEmbedding, **options):
        """`DiskEmbedding` with every weight `value`, or with `init`."""
        if "init" not in options:
            options["init"] = init.Uniform(rows, dim, value, value)
        layer = kind(rows, dim, state_dir=self.directory(where), **options)
        self.callback(layer.close)
        return layer

    def bag(self, rows, dim, value=0.0, where="state", **options):
        return self.disk(rows, dim, value, where, DiskEmbeddingBag, **options)

    def pretrained(self, layer, where="state", kind=DiskEmbedding, **options):
        """A layer on disk with the weights of another."""
        copy = kind.from_pretrained(layer, freeze=False, state_dir=self.directory(where), **options)
        self.callback(copy.close)
        return copy

    def adam(self, params, lr=0.1, where="state", **options):
        """`DiskSparseAdam` over parameters or a module."""
        if isinstance(params, torch.nn.Module):
            params = params.parameters()
        optimizer = DiskSparseAdam(params, lr, state_dir=self.directory(where), **options)
        self.callback(optimizer.close)
        return optimizer

    def layer(self, kind, rows, dim, value=0.0, **options):
        """A layer of one of `MEMORY_AND_DISK`."""
        return {"memory": self.plain, "disk": self.disk}[kind](rows, dim, value, **options)

    def pair(self, kind, rows, dim, value=0.0, lr=0.1, **options):
        """A layer of one of `MEMORY_AND_DISK` and an optimizer of it."""
        layer = self.layer(kind, rows, dim, value)
        return layer, self.adam(layer, lr, **options)

    def records(self, layer_or_name, rows, dim, where="state", **layout):
        """The raw records of a table, read from its file and not by the package."""
        if isinstance(layer_or_name, str):
            return raw_records(self.directory(where), layer_or_name, rows, dim, **layout)
        disk = isinstance(layer_or_name, DiskEmbedding | DiskEmbeddingBag)
        name = layer_or_name.weight.table.name if disk else "param_0"
        return raw_records(self.directory(where), name, rows, dim, weights=disk, **layout)


def raw_records(path, name, rows, dim, weights=True, second_moment_per="element"):
    """All records of a table file."""
    data = np.fromfile(table_file(path, name), np.uint8, offset=HEADER)
    dtype = adam_schema(dim, second_moment_per=second_moment_per, weights=weights).dtype
    return np.ascontiguousarray(data.reshape(rows, -1)[:, : dtype.itemsize]).view(dtype)[:, 0]


def contents(path):
    """Every file of a directory with its time of change, the lock left out."""
    return {
        file.name: (file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(path.iterdir())
        if file.name not in UNOBSERVED
    }


def row(layer, index):
    """One row of a layer's weights as a list."""
    with torch.no_grad():
        return layer(torch.tensor([index]))[0].tolist()


def weights(layer):
    """All weights of a layer, wherever they are."""
    with torch.no_grad():
        return layer(torch.arange(layer.num_embeddings)).clone()


def backward(layer, ids, scale=1.0):
    """Give every element of the rows `ids` the gradient `scale`."""
    (layer(torch.as_tensor(ids)).sum() * scale).backward()


def step(layer, optimizer, ids, scale=1.0):
    """One whole step with the gradient `scale`."""
    optimizer.zero_grad()
    backward(layer, ids, scale)
    optimizer.step()


def fit(layer, optimizer, target, steps, scheduler=None):
    """Steps over all rows towards a target; returns the losses as numbers."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (layer(torch.arange(len(target))) - target).square().sum()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses
