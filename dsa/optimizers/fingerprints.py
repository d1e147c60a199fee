"""Do the weights in memory go with the moments on disk?

A table whose weights are a module's parameter is in two places, of which dsa keeps one. Moments that go on
beside other weights train, and train wrongly; so they never do that in silence. When a state is closed, its
description takes a fingerprint of each parameter; before the first step after an opening, that is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dsa.errors import StateMismatchError, StateWarning, notify
from dsa.state.state_directory import StateDirectory
from dsa.state.table import Table

__all__ = ["require_belonging", "vouch"]


def require_belonging(state: StateDirectory, tables: Sequence[Table], positional: Collection[str]) -> None:
    """Look once, before the first step, whether weights in memory are those that the moments are of.

    Args:
        state: The state of the tables.
        tables: The optimizer's.
        positional: Names of tables that were given by the parameters' order alone. There, other weights are
            refused: two parameters may have changed places.

    Raises:
        StateMismatchError: they are not, and the tables have no names of their own; nothing has changed.
    """
    awaiting = [
        table for table in tables if table.awaited is not None and table.held is not None and table.steps
    ]
    if not awaiting:
        vouch(tables)  # without moments there is nothing to go with
        return
    found = {table.name: table.held.fingerprint() for table in awaiting if table.held is not None}
    others = [table for table in awaiting if table.awaited and table.awaited != found[table.name]]
    refused = [table.name for table in others if table.name in positional]
    if refused:
        swapped = {table.awaited for table in awaiting} & {found[name] for name in refused}
        how = "are those of another parameter of the same state" if swapped else "are others"
        raise StateMismatchError(
            f"the weights in memory of {', '.join(refused)} {how} than at step {state.global_step}, when "
            f"the moments in {str(state.path)!r} were stored: pass the parameters in the order of then or, "
            "better, model.named_parameters(); load the weights of that step first; or vouch for them by "
            "load_state_dict of what state_dict() returned at that step"
        )
    if others:
        notify(
            f"the weights in memory of {', '.join(table.name for table in others)} are not those that the "
            f"state in {str(state.path)!r} was closed with at step {state.global_step}, and its moments go "
            "on beside them: load the weights of that step, or import a checkpoint",
            StateWarning,
        )
    unknown = [table.name for table in awaiting if not table.awaited]
    if unknown:
        notify(
            f"nobody can tell whether the weights in memory of {', '.join(unknown)} are those of step "
            f"{state.global_step}, which the moments in {str(state.path)!r} are of: the state was not "
            "closed, or another parameter had them before; load the weights and what the optimizer's "
            "state_dict() returned with them, or import a checkpoint",
            StateWarning,
        )
    vouch(awaiting)


def vouch(tables: Sequence[Table]) -> None:
    """Take the weights in memory for those that the moments are of."""
    for table in tables:
        table.awaited = None
