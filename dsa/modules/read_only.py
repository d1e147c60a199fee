"""Embeddings that read the rows of a table, also beside a process that trains it, and never write or lock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NoReturn, final

import numpy as np
import torch
from torch.nn import functional

from dsa.backends.base import Layout
from dsa.errors import StateClosedError, StateWarning, notify
from dsa.inspection.state_view import StateView, open_state
from dsa.inspection.table_view import TableView
from dsa.modules.bags import Mode, reduced, require_mode
from dsa.modules.graph_break import outside_graphs
from dsa.modules.setting import as_padding
from dsa.modules.tensor_reference import from_tensor, to_tensor
from dsa.optimizers.disk_parameter import usable_seed
from dsa.optimizers.lookup import Lookup, clip_rows, distinct_rows, flat_ids, handed_out
from dsa.state.coalesce import as_ids
from dsa.state.directories import local_directory

__all__ = ["ReadOnlyEmbedding", "ReadOnlyEmbeddingBag", "ReadOnlyModule", "Unknown"]

Unknown = Literal["zeros", "first", "error"]
"""What an id without a row is handed out as, see `dsa.IdPolicy`."""


class ReadOnlyModule(torch.nn.Module):
    """What both share: the directory that is looked at, in each process anew. Abstract."""

    _handed_out_as: torch.Tensor

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str,
        max_norm: float | None,
        norm_type: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        backend: Layout | None,
        unknown: Unknown,
    ) -> None:
        super().__init__()
        # A buffer goes where the model goes; it says where rows go, and what of.
        self.register_buffer("_handed_out_as", usable_seed(device, dtype), persistent=False)
        self.path = str(Path(local_directory(path, "path")).absolute())
        self.name, self.max_norm, self.norm_type = name, max_norm, norm_type
        self._backend = backend
        self._closed = False
        self._view: StateView | None = open_state(self.path, backend=backend)
        try:
            table = self._view[name]
            if "w" not in table.fields:
                raise KeyError(
                    f"table {name!r} holds no weights, they are a parameter in memory: name another table"
                )
        except BaseException:
            self._view.close()
            raise
        self.num_embeddings, self.embedding_dim = table.shape
        self.unknown = unknown
        if table.num_ids is not None:
            self.num_embeddings = table.num_ids
        self.eval()

    @property
    def k(self) -> float:
        """Curvature magnitude of the table; 0 is flat."""
        return self._table().k

    @property
    def global_step(self) -> int:
        """The last step that counts, see `dsa.inspection.StateView.global_step`."""
        return self._state().global_step

    def close(self) -> None:
        """Let the files go; closing twice is silent."""
        self._closed = True
        if self._view is not None:
            self._view.close()

    def _state(self) -> StateView:
        if self._closed:
            raise StateClosedError(
                f"the module that reads table {self.name!r} in {self.path!r} was closed: open it again"
            )
        if self._view is None:  # in a process that it was sent to
            self._view = open_state(self.path, backend=self._backend)
        return self._view

    def _table(self) -> TableView:
        state = self._state()
        table = state[self.name]
        if table.num_ids is not None and self._has_grown(state, table):
            state.close()
            self._view = None
            table = self._state()[self.name]
        return table

    def _has_grown(self, state: StateView, table: TableView) -> bool:
        """Tell whether ids may have rows that a view doesn't have."""
        stored = next(each for each in state.observed.metadata().tables if each["name"] == self.name)
        return bool(stored["backend"]["rows"] != table.rows)

    def _look_up(self, ids: torch.Tensor, padding_idx: int | None = None) -> Lookup:
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"table {self.name!r} in {self.path!r} is open for reading and gets no gradients: call "
                "eval() on this module, or make a DiskEmbedding with resume=True to train it"
            )
        table = self._table()
        if table.num_ids is None:
            unique, inverse = distinct_rows(ids, self.num_embeddings, self.name)
            values = table.weights(unique)
        else:
            wanted = as_ids(flat_ids(ids, self.name), self.name)
            unique, inverse = np.unique(wanted, return_inverse=True)
            values = table.weights_of(unique, self.unknown)
            if padding_idx is not None:
                values[unique == padding_idx] = 0.0
        if self.max_norm is not None:
            clip_rows(values, float(self.max_norm), float(self.norm_type))
        where = self._handed_out_as
        return handed_out(values, unique, inverse.reshape(ids.shape), padding_idx, where.device, where.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_view": None}

    def extra_repr(self) -> str:
        """Return what ``print(module)`` shows between the brackets."""
        return f"{self.num_embeddings}, {self.embedding_dim}, table={self.name!r}, path={self.path!r}"

    def set_rows(self, ids: torch.Tensor, weights: torch.Tensor) -> NoReturn:
        """Refuse to write.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"table {self.name!r} in {self.path!r} is open for reading: make a DiskEmbedding with "
            "resume=True to change it"
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        state = self._state()
        destination[prefix + "_extra_state"] = to_tensor(
            {
                "directory": self.path,
                "identity": state.observed.identity,
                "global_step": state.global_step,
                "tables": [self.name],
            }
        )

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = state_dict.get(prefix + "_extra_state")
        if saved is None:
            missing_keys.append(prefix + "_extra_state")
            return
        try:
            reference = from_tensor(saved)
        except ValueError as error:
            error_msgs.append(str(error))
            return
        state = self._state()
        if reference.get("identity") != state.observed.identity:
            error_msgs.append(
                f"the state dict belongs to another state ({reference.get('directory')!r}) than "
                f"{self.path!r}, which is open for reading"
            )
        elif reference.get("global_step") != (step := state.global_step):
            notify(
                f"the state dict is of step {reference.get('global_step')} and table {self.name!r} in "
                f"{self.path!r} is at step {step}: export a checkpoint with each one that is to be served",
                StateWarning,
            )


@final
class ReadOnlyEmbedding(ReadOnlyModule):
    """A `torch.nn.Embedding` over a table that somebody else may be training. Made by `DiskEmbedding.open`.

    No lock is taken and nothing written. Each lookup reads the rows as the last whole step has left them. It
    has no parameter and gets no gradients; it starts in eval mode, and a lookup in train mode is an error
    unless gradients are off. It can be pickled, and is opened anew in the process that it is sent to.

    Example:
        >>> import tempfile
        >>> from dsa import DiskEmbedding, init
        >>> path = tempfile.mkdtemp()
        >>> trained = DiskEmbedding(1000, 2, init=init.Zeros(1000, 2), state_dir=path)
        >>> served = DiskEmbedding.open(path)
        >>> trained.set_rows(torch.tensor([7]), torch.tensor([[0.5, -0.5]]))
        >>> served(torch.tensor([7]))
        tensor([[ 0.5000, -0.5000]])
        >>> served.close(), trained.close()
        (None, None)
    """

    @outside_graphs
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of `input`, an integer tensor of any shape: ``(*, D)``."""
        found = self._look_up(input)
        return functional.embedding(found.inverse, found.values)


@final
class ReadOnlyEmbeddingBag(ReadOnlyModule):
    """A `torch.nn.EmbeddingBag` of this kind, see `ReadOnlyEmbedding`. Made by `DiskEmbeddingBag.open`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str,
        max_norm: float | None,
        norm_type: float,
        mode: Mode,
        include_last_offset: bool,
        padding_idx: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        backend: Layout | None,
        unknown: Unknown,
    ) -> None:
        super().__init__(path, name, max_norm, norm_type, device, dtype, backend, unknown)
        try:
            require_mode(mode, self.k)
            rows = self.num_embeddings if self._table().num_ids is None else None
            self.padding_idx = as_padding(padding_idx, rows)
        except BaseException:
            self.close()
            raise
        self.mode, self.include_last_offset = mode, include_last_offset

    @outside_graphs
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one reduced row per bag, see `DiskEmbeddingBag.forward`."""
        found = self._look_up(input, self.padding_idx)
        return reduced(found, self.k, offsets, self.mode, per_sample_weights, self.include_last_offset)
