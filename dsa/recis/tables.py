"""Tables as RecIS's programs hand them over, and options of theirs that are not computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsa.recis.gradients import weight_of

__all__ = ["Tables", "named_weights", "refuse"]

Tables = Mapping[str, torch.nn.Module | torch.Tensor]


def named_weights(param_dict: Tables) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of tables by name.

    Raises:
        TypeError: it is no dict, or something in it is no table.
    """
    if not isinstance(param_dict, Mapping):
        raise TypeError(
            f"param_dict is a {type(param_dict).__name__}: pass a dict of names and tables, such as "
            "filter_out_sparse_param(model)"
        )
    return [(name, weight_of(name, table)) for name, table in param_dict.items()]


def refuse(name: str, value: object) -> None:
    """Refuse an option that RecIS refuses as well, or that has no use here, unless it is off.

    Raises:
        ValueError: it is on.
    """
    if value:
        raise ValueError(f"{name}={value!r} is not computed: leave it out")
