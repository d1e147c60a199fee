"""Numbers that users pass: checked, not converted from whatever looks like one."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from dsa.rules.conventions import AdamOptions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["as_betas", "as_index", "as_number", "group_options", "plain_options"]

Options = TypeVar("Options", bound="DataclassInstance")


def as_number(name: str, value: object) -> float:
    """Return a number of any type: Python's, numpy's, or a tensor of one element.

    Raises:
        TypeError: it is none. Text and truth values are not, though Python converts both.

    Example:
        >>> as_number("lr", np.float32(0.5))
        0.5
    """
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        good = value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    elif isinstance(value, np.ndarray):
        good = value.size == 1 and value.dtype.kind in "iuf"
    else:
        plain = not isinstance(value, bool | np.bool_ | np.complexfloating | str | bytes | bytearray)
        good = plain and (hasattr(value, "__float__") or hasattr(value, "__index__"))
    if not good:
        raise TypeError(
            f"{name}={value!r} is of type {type(value).__name__}: pass a number (text, as from a YAML file, "
            "has to be converted first)"
        )
    return float(value)  # type: ignore[arg-type]  # looked at above


def as_index(name: str, value: object) -> int:
    """Return an integer of any type, as Python's lists take them for an index.

    Raises:
        TypeError: it is none.

    Example:
        >>> as_index("padding_idx", np.int64(3))
        3
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]  # refused by itself
    except TypeError:
        raise TypeError(f"{name}={value!r} is not a row: pass an integer, or None") from None


def as_betas(betas: object) -> tuple[float, float]:
    """Return the decays of the moments.

    Raises:
        ValueError: they are not two.
        TypeError: one is no number.
    """
    try:
        first, second = _pair(betas)
    except (TypeError, ValueError) as error:
        raise ValueError(f"betas={betas!r} are not two numbers: pass a pair") from error
    return as_number("betas[0]", first), as_number("betas[1]", second)


def _pair(values: Any) -> tuple[object, object]:  # noqa: ANN401 - whatever was passed
    first, second = values
    return first, second


def plain_options(kind: type[Options], group: Mapping[str, Any]) -> Options:
    """Return the options of a step from a parameter group that has each of them under its name.

    Args:
        kind: A dataclass whose fields are numbers, or truth values where their default is one.
        group: The parameter group.

    Raises:
        TypeError: one that is to be a number is none.
        ValueError: one is out of range.
    """
    return kind(
        **{
            each.name: bool(group[each.name])
            if isinstance(each.default, bool)
            else as_number(each.name, group[each.name])
            for each in fields(kind)
        }
    )


def group_options(group: dict[str, Any], fixed: AdamOptions) -> AdamOptions:
    """Return the options of a parameter group.

    Args:
        group: With ``lr``, ``betas``, ``eps`` and ``weight_decay``, and perhaps further options.
        fixed: Those that a group can't change.

    Raises:
        TypeError: one that is to be a number is none.
        ValueError: one is out of range.
    """
    beta1, beta2 = as_betas(group["betas"])
    current = {
        "lr": as_number("lr", group["lr"]),
        "beta1": beta1,
        "beta2": beta2,
        "eps": as_number("eps", group["eps"]),
        "weight_decay": as_number("weight_decay", group["weight_decay"]),
        "weight_decay_mode": group.get("weight_decay_mode", fixed.weight_decay_mode),
        "maximize": bool(group.get("maximize", fixed.maximize)),
    }
    if all(getattr(fixed, name) == value for name, value in current.items()):
        return fixed  # checked already
    return replace(fixed, **current)
