"""RecIS's `HashTable` and its hooks, over a table on disk whose rows belong to ids."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch

from dsa.modules.embedding import DiskEmbedding
from dsa.optimizers.id_rows import rows_of_ids
from dsa.optimizers.tensors import to_array
from dsa.rules.init import Initializer, Normal, Uniform, Zeros
from dsa.state.id_policy import IdPolicy, evict_before
from dsa.state.state_directory import StateDirectory

__all__ = ["AdmitHook", "FilterHook", "HashTable", "HashTableFilterHook"]

_FILTER_STEP: Final = 100


@final
class AdmitHook:
    """Which unknown ids get a row in a lookup.

    Args:
        name: ``"ReadOnly"``: none do, and they read as zeros. RecIS has no other one.

    Raises:
        ValueError: another one is named.
    """

    def __init__(self, name: str, params: Mapping[str, Any] | None = None) -> None:
        if name != "ReadOnly" or params:
            raise ValueError(
                f"AdmitHook({name!r}, {params!r}) is not known: pass 'ReadOnly', or min_count= of "
                "dsa.IdPolicy for ids that have to come several times"
            )
        self.name = name


@final
class FilterHook:
    """Which ids lose their rows.

    Args:
        name: ``"GlobalStepFilter"``: those that were not trained for ``filter_step`` steps.
        params: ``{"filter_step": 100}``.

    Raises:
        ValueError: another one is named, or the number is not above 0.
    """

    def __init__(self, name: str, params: Mapping[str, int] | None = None) -> None:
        given = dict(params or {})
        self.filter_step = given.pop("filter_step", _FILTER_STEP)
        if name != "GlobalStepFilter" or given:
            raise ValueError(
                f"FilterHook({name!r}, {params!r}) is not known: pass 'GlobalStepFilter' and filter_step"
            )
        if not self.filter_step > 0:
            raise ValueError(f"filter_step={self.filter_step!r} is out of range: pass a number > 0")
        self.name = name


@final
class HashTable(torch.nn.Module):
    """RecIS's ``HashTable``: rows of a table told by 64-bit ids, given out as they are looked up.

    A lookup in training gives an unknown id a row; in eval mode, under `torch.no_grad` or with
    ``AdmitHook("ReadOnly")`` it reads as zeros. The optimizers of `dsa.recis` train it.

    Args:
        embedding_shape: ``[D]``.
        initializer: First weights: a rule of `dsa.init` without a number of rows, or a number; 0 as in RecIS.
        name: The table's name; another table of that name in the directory is refused.
        filter_hook: Which ids `HashTableFilterHook` drops.
        state_dir: The state directory.
        resume: What to do with state that is there, see `dsa.DiskEmbedding`.
        options: Further ones of `dsa.DiskEmbedding`, such as ``durability``.

    Raises:
        ValueError: an option is out of range.
        StateError: the directory can't be used; see `dsa.errors`.

    Example:
        >>> import tempfile
        >>> table = HashTable([2], state_dir=tempfile.mkdtemp(), initializer=0.5)
        >>> table(torch.tensor([7, -3, 7])).tolist()
        [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
        >>> sorted(table.ids().tolist()), table.delete(torch.tensor([7])), table.ids().tolist()
        ([-3, 7], 1, [-3])
        >>> table.close()
    """

    def __init__(
        self,
        embedding_shape: Sequence[int],
        *,
        initializer: Initializer | float = 0.0,
        name: str = "hashtable",
        filter_hook: FilterHook | None = None,
        state_dir: str | os.PathLike[str],
        resume: bool | None = None,
        **options: Any,  # noqa: ANN401 - DiskEmbedding's
    ) -> None:
        super().__init__()
        if len(embedding_shape) != 1:
            raise ValueError(f"embedding_shape={embedding_shape!r} is not that of a row: pass [D]")
        (dim,) = embedding_shape
        first = initializer
        if not isinstance(first, Normal | Uniform | Zeros):
            first = Zeros(None, dim) if first == 0.0 else Uniform(None, dim, float(first), float(first))
        self.filter_hook = filter_hook
        self.rows = DiskEmbedding(
            None,
            dim,
            init=first,
            name=name,
            ids=IdPolicy(),
            state_dir=state_dir,
            resume=resume,
            **options,
        )

    @property
    def weight(self) -> torch.nn.Parameter:
        """What the optimizers train."""
        return self.rows.weight

    def forward(self, ids: torch.Tensor, admit_hook: AdmitHook | None = None) -> torch.Tensor:
        """Return the rows of ids of any shape, ``(*, D)``; see the class."""
        self.rows.train(self.training and admit_hook is None)
        found: torch.Tensor = self.rows(ids)
        return found

    def insert(self, ids: torch.Tensor, embeddings: torch.Tensor) -> None:
        """Set the rows of ids ``(B,)``, each once, to embeddings ``(B, D)``; unknown ones get a row."""
        self.rows.insert(ids, embeddings)
        self.rows.set_rows(ids, embeddings)

    def ids(self) -> torch.Tensor:
        """Return the ids that have a row, ``(n,)`` int64."""
        return self.rows.ids()

    def ids_map(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids that have a row, and which, ``(n,)`` int64 each."""
        with self._state.use():
            ids = self.rows.ids()
            rows = rows_of_ids(self.rows.weight.table, to_array(ids))
        return ids, torch.from_numpy(rows)

    def embeddings(self) -> torch.Tensor:
        """Return the rows of `ids`, ``(n, D)``: all of them in memory."""
        with torch.no_grad():
            return self.rows.weight[self.rows.ids()]

    def delete(self, ids: torch.Tensor) -> int:
        """Take their rows from ids, which may have none, and return how many had one.

        A row starts anew in every field when another id gets it.
        """
        return self.rows.delete(ids)

    def clear(self) -> None:
        """Take their rows from all ids."""
        self.rows.delete(self.rows.ids())

    def filter(self) -> int:
        """Take their rows from ids that the filter hook names, and return how many."""
        if self.filter_hook is None:
            return 0
        state = self._state
        with state.use():
            state.settle()
            return evict_before(
                state, self.rows.weight.table, state.global_step - self.filter_hook.filter_step
            )

    def close(self) -> None:
        """Close the state directory, for all who share it; closing twice is silent."""
        self.rows.close()

    @property
    def _state(self) -> StateDirectory:
        return self.rows.weight.state


@final
class HashTableFilterHook:
    """Drops, every so many training steps, the ids that the filters of tables name.

    Args:
        tables: The tables; RecIS finds them in a registry of the process.
        filter_interval: Steps between two sweeps; None never sweeps. It may be set anew.

    Raises:
        ValueError: the interval is not above 0.
    """

    def __init__(self, tables: Iterable[HashTable], filter_interval: int | None = _FILTER_STEP) -> None:
        if filter_interval is not None and not filter_interval > 0:
            raise ValueError(
                f"filter_interval={filter_interval!r} is out of range: pass a number > 0, or None"
            )
        self.tables, self.filter_interval = list(tables), filter_interval
        self._steps = 0

    def after_step(self) -> int:
        """Count a training step; sweep if it is time, and return how many ids have lost their row."""
        self._steps += 1
        if self.filter_interval is None or self._steps % self.filter_interval:
            return 0
        return sum(table.filter() for table in self.tables)
