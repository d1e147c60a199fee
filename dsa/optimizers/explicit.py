"""What an optimizer needs that is handed rows and gradients: tables, their batches, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NoReturn

import numpy as np
import torch

from dsa.optimizers.arguments import DEFAULT_FRACTION, StateDtype, as_fraction
from dsa.optimizers.id_rows import read_ids
from dsa.optimizers.stepping import Batch
from dsa.optimizers.tensors import to_array
from dsa.rules.adam import ALIKE, usual_rule
from dsa.rules.init import FromArray, Initializer
from dsa.rules.updates import AnyRule
from dsa.state.coalesce import as_gradient, as_ids, as_rows, coalesce
from dsa.state.id_policy import IdPolicy, admit
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import TableSpec, table_spec
from dsa.state.table import Table, read_weights

__all__ = ["batch_of", "refuse_loading", "refuse_pickling", "refuse_state_dict", "rows_of", "specs_of"]

_PICKLING: Final = (
    "an optimizer whose state lives on disk can't be copied or pickled, because two of them would write to "
    "one directory: copy the closed directory, or build a second optimizer on a directory of its own"
)


def specs_of(
    sources: Mapping[str, Initializer | FromArray],
    rule: AnyRule | None,
    curvatures: Mapping[str, float],
    fraction: float,
    state_dtype: StateDtype | None,
) -> list[TableSpec]:
    """Return what is asked for each table.

    Args:
        sources: First weights by name.
        rule: The update rule; None is what a table has, and for a new one the usual Adam of its space.
        curvatures: Curvature magnitudes by name.
        fraction: See `dsa.state.facts.TableFacts`, as it was given.
        state_dtype: How the fields are stored.

    Raises:
        ValueError: an option is out of range, or the rule does not work in a table's space.
    """
    specs = []
    for name, source in sources.items():
        k = curvatures[name]
        spec = table_spec(
            name,
            source,
            usual_rule(k) if rule is None else rule,
            k=k,
            init_max_norm_fraction=as_fraction(fraction),
            state_dtype=state_dtype,
            keeps_inside=fraction is DEFAULT_FRACTION,
        )
        specs.append(replace(spec, alternatives=ALIKE) if rule is None else spec)
    return specs


def batch_of(
    state: StateDirectory,
    table: Table,
    indices: object,
    grad: object,
    options: object,
    policy: IdPolicy | None,
) -> Batch:
    """Return a table's part in a step, where ids that are new have got rows.

    Args:
        state: The state of the table, held, with nothing pending.
        table: The table.
        indices: ``(B,)`` of an integer dtype.
        grad: ``(B, D)`` of a floating dtype.
        options: The options of the step.
        policy: How ids are treated, where the table's rows belong to ids.

    Raises:
        RowIndexError, RowTypeError, GradientError: they can't be used; nothing has changed.
        DiskSpaceError: there is no room for new ids.
    """
    given = to_array(indices)
    rows = as_rows(given, len(table), table.name) if policy is None else as_ids(given, table.name)
    gradient = as_gradient(to_array(grad), rows, table.dim, table.name)
    if policy is not None:
        rows = admit(state, table, policy, rows)
        rows, gradient = rows[rows >= 0], gradient[rows >= 0]
    return Batch(table, *coalesce(rows, gradient), options)


def rows_of(state: StateDirectory, table: Table, indices: object, policy: IdPolicy | None) -> torch.Tensor:
    """Return the weights of some rows or ids, ``(B, D)`` float32.

    Args:
        state: The state of the table, held, with nothing pending.
        table: The table.
        indices: ``(B,)`` of an integer dtype, in any order.
        policy: What ids without a row are, where the table's rows belong to ids.

    Raises:
        RowIndexError, RowTypeError: the indices can't be used.
        CorruptRowError: a stored row is implausible.
    """
    given = to_array(indices)
    if policy is not None:
        found = read_ids(state, table, policy, as_ids(given, table.name), None, training=False)
        return torch.from_numpy(found.values[found.inverse])
    unique, inverse = np.unique(as_rows(given, len(table), table.name), return_inverse=True)
    return torch.from_numpy(read_weights(table, unique)[inverse])


def refuse_state_dict(self: object) -> NoReturn:
    """Refuse: the state is on disk and does not fit a dictionary."""
    raise NotImplementedError(
        "the state lives on disk and is not a dictionary: call export_checkpoint(url) for a copy that can be "
        "moved, or keep the state directory and open it again with resume=True"
    )


def refuse_loading(self: object, state_dict: object) -> NoReturn:
    """Refuse: the state is on disk and is not a dictionary."""
    raise NotImplementedError(
        "the state lives on disk and can't be loaded from a dictionary: call import_checkpoint(url), or "
        "build the optimizer on the state directory with resume=True"
    )


def refuse_pickling(self: object, protocol: object = None) -> NoReturn:
    """Refuse: there would be two owners of one directory."""
    raise TypeError(_PICKLING)
