"""RecIS's dense AdamWTF: AdamW as TensorFlow Addons has it, for the layers beside the tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final, overload

import numpy as np
import torch

from dsa.optimizers.arguments import ParamGroups
from dsa.optimizers.options import group_options
from dsa.rules.conventions import RECIS_SPARSE_ADAMW_TF, AdamOptions

__all__ = ["AdamWTF"]


@final
class AdamWTF(torch.optim.Optimizer):
    """RecIS's ``AdamWTF`` for dense parameters in memory; decay is not scaled by the learning rate.

    One step of a parameter, t being its count of steps::

        w = w (1 - weight_decay)
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)

    The powers are float32 numbers, as there.

    Args:
        params: As for any torch optimizer.
        lr: Learning rate, >= 0.
        betas: Decays of the moments, each in [0, 1).
        eps: Added to the uncorrected root, > 0.
        weight_decay: What of a weight is taken in each step, >= 0.
        use_nesterov: Refused if true.
        maximize: Ascend instead of descend.

    Raises:
        ValueError: an option is out of range, or a parameter is complex.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = AdamWTF([weight], lr=0.1, weight_decay=0.5)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.4000, 0.4000])
    """

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        use_nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        if use_nesterov:
            raise ValueError(f"use_nesterov={use_nesterov!r} is not computed, as in RecIS: leave it out")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Raises:
            ValueError: an option is out of range, or a parameter is complex.
        """
        _options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex():
                self.param_groups.pop()
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}, and this Adam is "
                    "of real numbers: train torch.view_as_real of it"
                )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step with the gradients at hand.

        Args:
            closure: Computes the loss and its gradients anew.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a gradient is sparse; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                _require_dense(parameter)
        for group in self.param_groups:
            options = _options(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], options)
        return loss


def _options(group: dict[str, Any]) -> AdamOptions:
    decay = RECIS_SPARSE_ADAMW_TF.weight_decay_mode
    return group_options(group, AdamOptions(lr=0.0, weight_decay_mode=decay, beta_powers="float32"))


def _require_dense(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} got a sparse gradient, and AdamWTF takes dense "
            "ones: hand tables to SparseAdamWTF (dsa.split_parameters(model) gives both lists)"
        )


def _update(parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], options: AdamOptions) -> None:
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    m, v = state["exp_avg"], state["exp_avg_sq"]
    grad = -grad if options.maximize else grad
    parameter.mul_(1.0 - options.weight_decay)
    m.mul_(options.beta1).add_(grad, alpha=1.0 - options.beta1)
    v.mul_(options.beta2).addcmul_(grad, grad, value=1.0 - options.beta2)
    count = int(state["step"])
    alpha = options.lr * math.sqrt(1.0 - _power(options.beta2, count)) / (1.0 - _power(options.beta1, count))
    parameter.addcdiv_(m, v.sqrt().add_(options.eps), value=-alpha)


def _power(beta: float, count: int) -> float:
    return float(np.float32(float(np.float32(beta)) ** count))
