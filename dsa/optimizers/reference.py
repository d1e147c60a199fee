"""What a state dict says about state on disk: a small reference instead of the tables."""

from __future__ import annotations

from typing import Any, Final

from dsa.checkpoint import open_content
from dsa.checkpoint.transfer import import_state
from dsa.errors import CheckpointError, StateMismatchError
from dsa.state.state_directory import StateDirectory

__all__ = ["check_reference", "follow_reference", "merged_groups", "reference_to"]

_KEYS: Final = {"directory", "identity", "global_step", "tables"}


def reference_to(state: StateDirectory, tables: list[str]) -> dict[str, Any]:
    """Return plain values that name a state, the step it is at, and some of its tables.

    Where somebody has asked for it, a checkpoint of that step is named as well, and made first.
    """
    kept = None if state.keeper is None else state.keeper(state)
    return {
        "directory": str(state.path),
        "identity": state.identity,
        "global_step": state.global_step,
        "tables": tables,
        **({} if kept is None else {"checkpoint": kept}),
    }


def follow_reference(state: StateDirectory, tables: list[str], reference: dict[str, Any]) -> None:
    """Bring a state to the step that a reference is to, by the checkpoint that it names, if need be.

    Raises:
        StateMismatchError: the reference is to another state, or other tables, or to another step and names
            no checkpoint that can be read.
    """
    kept = reference.get("checkpoint") if isinstance(reference, dict) else None
    if isinstance(kept, dict) and reference.keys() >= _KEYS and _leads_elsewhere(state, reference, kept):
        _import(state, reference, kept)
    check_reference(state, tables, reference)


def _leads_elsewhere(state: StateDirectory, reference: dict[str, Any], kept: dict[str, Any]) -> bool:
    """Tell whether the checkpoint has to be imported: not where the state is what it was made of."""
    step = reference["global_step"]
    if state.global_step == 0 and reference["identity"] != state.identity:
        return True  # a new state, in which there is nothing to be lost
    if reference["identity"] != state.identity:
        return False
    # After going back and on, this step may be another one than that which was exported before.
    return bool(state.global_step != step or state.exports.get(str(kept.get("content_root"))) != step)


def _import(state: StateDirectory, reference: dict[str, Any], kept: dict[str, Any]) -> None:
    url = kept.get("url")
    what = (
        f"the state dict was saved at step {reference['global_step']} but the state in {str(state.path)!r} "
        f"is at step {state.global_step}, and the checkpoint {url!r} that was made with it"
    )
    try:
        opened = open_content(str(url))
    except CheckpointError as error:
        raise StateMismatchError(
            f"{what} can't be used ({error}): import another of that step with import_checkpoint, or load "
            "a state dict whose checkpoint is there"
        ) from error
    if kept.get("content_root") != opened.checkpoint.content_root:
        raise StateMismatchError(
            f"{what} holds something else now: load a state dict whose checkpoint is there"
        )
    import_state(state, opened)


def check_reference(state: StateDirectory, tables: list[str], reference: dict[str, Any]) -> None:
    """Check that a reference is to the open state as it is now.

    Raises:
        StateMismatchError: it is to another state, another step, or other tables.
    """
    where = repr(str(state.path))
    if not isinstance(reference, dict) or not reference.keys() >= _KEYS:
        raise ValueError(f"{reference!r} is no reference to a state: pass what state_dict() returned")
    if reference["identity"] != state.identity:
        raise StateMismatchError(
            f"the state dict belongs to another state ({reference['directory']!r}) than the open one in "
            f"{where}: open the directory that it was saved with"
        )
    if reference["global_step"] != state.global_step:
        raise StateMismatchError(
            f"the state dict was saved at step {reference['global_step']} but the state in {where} is at "
            f"step {state.global_step}: save both together, and roll the state back first, with "
            f"import_checkpoint of the checkpoint of step {reference['global_step']} "
            "(dsa.CombinedOptimizer(checkpoints=...) makes one for each state dict, and goes back to it)"
        )
    if reference["tables"] != tables:
        raise StateMismatchError(
            f"the state dict is about the tables {reference['tables']} but these are {tables}: pass the "
            "parameters in the same order, with the same names"
        )


def merged_groups(groups: object, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return saved parameter groups laid over the optimizer's own, whose further options stay.

    Args:
        groups: The ``"param_groups"`` of a state dict.
        own: The optimizer's groups.

    Raises:
        ValueError: the groups are not alike.
    """
    if not isinstance(groups, list) or len(groups) != len(own):
        count = len(groups) if isinstance(groups, list) else 0
        raise ValueError(f"the state dict has {count} groups, the optimizer {len(own)}: build it alike")
    merged = []
    for saved, group in zip(groups, own, strict=True):
        if not isinstance(saved, dict) or not isinstance(saved.get("params"), list):
            raise ValueError(f"{saved!r} is not a parameter group: pass what state_dict() returned")
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"a group of the state dict has {len(saved['params'])} parameters where the optimizer's has "
                f"{len(group['params'])}: build it alike"
            )
        merged.append({**group, **saved})
    return merged
