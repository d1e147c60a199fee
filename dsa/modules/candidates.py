"""Which embeddings of a model can go to disk, and what keeps others from it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, final

import torch

__all__ = ["Candidate", "find_candidates", "places_of"]

_PLAIN: Final = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_WITH_MEMORY: Final = (torch.nn.Parameter, torch.Tensor)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A weight that goes to disk.

    Args:
        weight: It.
        modules: The embeddings that look rows up in it.
        places: Their names in the model; a module that is in it twice has two.
    """

    weight: torch.Tensor
    modules: tuple[torch.nn.Module, ...]
    places: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first place."""
        return self.places[0]


def places_of(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Return all names of each module of a model, in the order of the model."""
    places: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    return places


def find_candidates(model: torch.nn.Module, min_rows: int, skip: Collection[str]) -> list[Candidate]:
    """Return the weights of a model that are to go to disk.

    Args:
        model: The model.
        min_rows: Rows of the smallest one.
        skip: Names of modules that stay.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: there is none, or one can't go.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}: pass a torch.nn.Module")
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r} is a string: pass a list of names")
    min_rows = operator.index(min_rows)
    places = places_of(model)
    names = {name for each in places.values() for name in each}
    if unknown := sorted(set(skip) - names):
        raise ValueError(f"skip names {unknown}, which are no modules of the model: pass names of modules")
    chosen: dict[int, list[torch.nn.Module]] = {}
    for module, where in places.items():
        if isinstance(module, _PLAIN) and module.num_embeddings >= min_rows and not set(where) & set(skip):
            _require_replaceable(where[0], module)
            chosen.setdefault(id(module.weight), []).append(module)
    if not chosen:
        largest = max((each.num_embeddings for each in places if isinstance(each, _PLAIN)), default=0)
        raise ValueError(
            f"the model has no embedding of at least min_rows={min_rows} rows, its largest has {largest}: "
            "lower min_rows, or leave the model in memory"
        )
    found = [_candidate(modules, places) for modules in chosen.values()]
    for each in found:
        _require_untied(each, places)
    return found


def _candidate(modules: list[torch.nn.Module], places: dict[torch.nn.Module, list[str]]) -> Candidate:
    names = tuple(name for module in modules for name in places[module])
    return Candidate(modules[0].get_parameter("weight"), tuple(modules), names)


def _require_replaceable(name: str, module: torch.nn.Module) -> None:
    plain = torch.nn.Embedding if isinstance(module, torch.nn.Embedding) else torch.nn.EmbeddingBag
    kind = type(module)
    stays = f"skip=[{name!r}]"
    if not name:
        raise ValueError(
            f"the model itself is the {kind.__name__}, and has no place in which to put another: call "
            f"dsa.Disk{plain.__name__}.from_pretrained"
        )
    if kind.forward is not plain.forward or "forward" in vars(module):
        raise ValueError(
            f"{name!r} is a {kind.__name__} with a forward of its own, which would be lost: pass {stays}"
        )
    if set(module._parameters) != {"weight"} or module._modules or module._buffers:
        raise ValueError(
            f"{name!r} holds more than its weight, such as an adapter or a parametrization: remove that "
            f"first, or pass {stays}"
        )
    weight = module.get_parameter("weight")
    if type(weight) is not torch.nn.Parameter or not weight.is_floating_point():
        raise ValueError(
            f"the weight of {name!r} is a {type(weight).__name__} of {weight.dtype}, not rows of "
            f"floating-point numbers: pass {stays}"
        )
    if weight.dtype == torch.float64 and not weight.is_meta:
        raise ValueError(
            f"the weight of {name!r} is float64, of which a table on disk keeps float32: convert it by "
            f".float(), or pass {stays}"
        )
    if weight.grad is not None:
        raise ValueError(
            f"the weight of {name!r} has a gradient, which would be lost: call zero_grad() first"
        )
    if getattr(module, "scale_grad_by_freq", False):
        raise ValueError(
            f"{name!r} has scale_grad_by_freq=True, which does not exist for sparse gradients: set it to "
            f"False, or pass {stays}"
        )


def _require_untied(candidate: Candidate, places: dict[torch.nn.Module, list[str]]) -> None:
    """Refuse a weight that another kind of module uses too, or another parameter over the same memory."""
    for owner, parameter in _owners(places):
        module, attribute = owner
        if module in candidate.modules and attribute == "weight":
            continue
        if parameter is candidate.weight or _memory(parameter) == _memory(candidate.weight) != 0:
            other = ".".join(filter(None, (places[module][0], attribute)))
            raise ValueError(
                f"the weight of {candidate.name!r} is tied to {other!r} of a {type(module).__name__}, which "
                f"computes with all of it: give that a weight of its own, or pass skip=[{candidate.name!r}]"
            )


def _owners(
    places: dict[torch.nn.Module, list[str]],
) -> Iterator[tuple[tuple[torch.nn.Module, str], torch.Tensor]]:
    for module in places:
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield (module, attribute), tensor


def _memory(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory begins; 0 where it has none of its own."""
    if tensor.is_meta or tensor.layout != torch.strided or type(tensor) not in _WITH_MEMORY:
        return 0
    return tensor.untyped_storage().data_ptr()
