"""Tables of a model, and the norm of all gradients, under RecIS's names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dsa.optimizers.gradients import clip_grad_norm_, split_parameters

__all__ = ["clip_grad_by_global_norm_", "filter_out_sparse_param", "weight_of"]


def filter_out_sparse_param(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the weights of a model's tables by their names in ``model.named_parameters()``.

    Those of tables on disk, and of torch's modules with ``sparse=True``. The model keeps them: hand
    ``dsa.split_parameters(model)[1]`` to a dense optimizer, not ``model.parameters()``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 2, sparse=True), torch.nn.Linear(2, 1))
        >>> list(filter_out_sparse_param(model))
        ['0.weight']
    """
    tables = {id(parameter) for parameter in split_parameters(model)[0]}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in tables}


def clip_grad_by_global_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    error_if_nonfinite: bool = False,
    sparse_hashtables: Iterable[torch.nn.Module | torch.Tensor] | None = None,
) -> torch.Tensor:
    """Scale gradients, dense and sparse together, so that their total Euclidean norm is at most `max_norm`.

    Args:
        parameters: Parameters with or without gradients.
        max_norm: The largest total norm.
        error_if_nonfinite: Whether a norm that is not finite is an error; nothing is scaled then.
        sparse_hashtables: Tables whose gradients belong to the norm, if `parameters` does not hold them:
            modules or weights. Gradients of equal rows are summed before the norm is taken.

    Returns:
        The total norm before scaling, a tensor without dimensions.

    Raises:
        RuntimeError: the norm is not finite and that is an error.

    Example:
        >>> embedding = torch.nn.Embedding(4, 1, sparse=True)
        >>> embedding(torch.tensor([1, 1, 2])).sum().backward()
        >>> round(clip_grad_by_global_norm_([], 1.0, sparse_hashtables=[embedding]).item(), 4)
        2.2361
    """
    held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    tables = [weight_of(None, table) for table in sparse_hashtables or ()]
    members = list({id(member): member for member in [*held, *tables]}.values())
    return clip_grad_norm_(members, max_norm, error_if_nonfinite=error_if_nonfinite)


def weight_of(name: str | None, table: torch.nn.Module | torch.Tensor) -> torch.Tensor:
    """Return the weight of a table, which may be it.

    Args:
        name: What the table is called, for messages.
        table: A module with a ``weight``, or a weight.

    Raises:
        TypeError: it is neither.
    """
    weight = table if isinstance(table, torch.Tensor) else getattr(table, "weight", None)
    if not isinstance(weight, torch.Tensor):
        what = "a table" if name is None else f"the table {name!r}"
        raise TypeError(
            f"{what} is of type {type(table).__name__}: pass a DiskEmbedding, a torch module with "
            "sparse=True, or the weight of one"
        )
    return weight
