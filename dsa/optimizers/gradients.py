"""Helpers around gradients and parameters of models that hold tables."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dsa.optimizers.disk_parameter import DiskParameter

__all__ = ["clip_grad_norm_", "split_parameters"]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; sparse ones count once per row.

    `torch.nn.utils.clip_grad_norm_` for dense and sparse gradients together: a sparse gradient is coalesced
    first, so that contributions to one row add up before the norm is taken.

    Args:
        parameters: Parameters with or without gradients.
        max_norm: The largest total norm.
        norm_type: The p of the norm; may be ``inf``.
        error_if_nonfinite: Whether a norm that is not finite is an error; nothing is scaled then.

    Returns:
        The total norm before scaling.

    Raises:
        RuntimeError: the norm is not finite and that is an error.

    Example:
        >>> embedding = torch.nn.Embedding(4, 1, sparse=True)
        >>> embedding(torch.tensor([1, 1, 2])).sum().backward()
        >>> round(clip_grad_norm_(embedding.parameters(), max_norm=1.0).item(), 4)
        2.2361
    """
    held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    values = [_values(parameter) for parameter in held if parameter.grad is not None]
    values = [value for value in values if value.numel()]  # the largest of no elements is not defined
    if not values:
        return torch.tensor(0.0)
    device = values[0].device
    norms = [torch.linalg.vector_norm(value.float(), norm_type).to(device) for value in values]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of all gradients is {total.item()}, and error_if_nonfinite=True asks for an error: "
            "skip the batch, or lower the learning rate"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for value in values:
        value.mul_(factor.to(value.device, value.dtype))
    return torch.as_tensor(total)


def split_parameters(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return the parameters of a model that get sparse gradients, tables on disk too, and the dense ones.

    The first list is for `DiskSparseAdam`, the second for any dense optimizer.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 2, sparse=True), torch.nn.Linear(2, 1))
        >>> sparse, dense = split_parameters(model)
        >>> len(sparse), len(dense)
        (1, 2)
    """
    sparse_ids = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }
    parameters = list(model.parameters())
    is_sparse = [
        id(parameter) in sparse_ids or isinstance(parameter, DiskParameter) for parameter in parameters
    ]
    sparse = [parameter for parameter, chosen in zip(parameters, is_sparse, strict=True) if chosen]
    return sparse, [parameter for parameter, chosen in zip(parameters, is_sparse, strict=True) if not chosen]


def _values(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None, "called for parameters with a gradient"
    if not grad.is_sparse:
        return grad.detach()
    parameter.grad = grad.coalesce()
    return parameter.grad._values().detach()
