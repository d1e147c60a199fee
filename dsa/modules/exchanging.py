"""Putting modules into the places of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

__all__ = ["carry_over", "exchange"]

# What a module is made of, beside hooks and what users have written onto it.
_OWN: Final = frozenset({"_buffers", "_modules", "_non_persistent_buffers_set", "_parameters", "training"})


def carry_over(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Give a module the mode and the hooks of another, and what it lacks of its attributes.

    The hooks stay in the collections that their handles know, so that removing one works.
    """
    new.train(old.training)
    for name, value in vars(old).items():
        if name not in _OWN and ("hook" in name or not hasattr(new, name)):
            vars(new)[name] = value


def exchange(model: torch.nn.Module, replacements: Mapping[torch.nn.Module, torch.nn.Module]) -> None:
    """Put modules into all places that others have in a model, or into none."""
    places = [
        (parent._modules, name, replacements[child])
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if child is not None and child in replacements
    ]
    before = [(children, name, children[name]) for children, name, _ in places]
    try:
        for children, name, new in places:
            children[name] = new
    except BaseException:  # an interrupt
        for children, name, old in before:
            children[name] = old
        raise
