"""What the modules on disk share: the table, its parameter, moving, saving, closing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Self

import torch

from dsa.errors import StateMismatchError
from dsa.modules.setting import as_padding, set_rows, zero_padding
from dsa.modules.tensor_reference import from_tensor, to_tensor
from dsa.optimizers import portable
from dsa.optimizers.arguments import DEFAULT_FRACTION, StateDtype, as_fraction, growth_of
from dsa.optimizers.disk_parameter import DiskParameter, usable_seed
from dsa.optimizers.id_rows import all_ids, delete_rows, insert_rows
from dsa.optimizers.options import as_number
from dsa.optimizers.reference import follow_reference, reference_to
from dsa.rules.adagrad import ROW_WISE_ADAGRAD
from dsa.rules.adam import ALIKE, ROW_WISE_ADAM
from dsa.rules.init import FromArray, Initializer, MatrixLike, Normal, Uniform, as_initializer
from dsa.rules.known import RULES
from dsa.rules.manifolds import manifold_of
from dsa.rules.updates import AnyRule
from dsa.state.growth import grow_tables
from dsa.state.id_policy import IdPolicy
from dsa.state.replacement import replace_weights
from dsa.state.sharing import join_tables
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import StorageChoice, TableSpec, table_spec

__all__ = ["DiskModule", "Source", "table_spec_of"]

Source = Initializer | FromArray | MatrixLike

_STATES: Final[dict[str, AnyRule]] = {
    **{rule.name: rule for rule in RULES},
    "rowwise_adam": ROW_WISE_ADAM,
    "rowwise_adagrad": ROW_WISE_ADAGRAD,
}


class DiskModule(torch.nn.Module):
    """What the two modules share: the table, its parameter, moving, saving, closing. Abstract."""

    weight: DiskParameter
    # What libraries ask torch's modules.
    sparse: Final = True
    scale_grad_by_freq: Final = False

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        spec: TableSpec,
        state_dir: str | os.PathLike[str],
        resume: bool | None,
        storage: StorageChoice,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        ids: IdPolicy | None,
    ) -> None:
        super().__init__()
        if ids is not None and num_embeddings is not None:
            raise ValueError(
                f"ids={ids!r} says how ids are treated, but num_embeddings={num_embeddings!r} asks for that "
                "many rows, which belong to none: leave one of them out"
            )
        if (spec.source.rows, spec.source.dim) != (num_embeddings, embedding_dim):
            raise ValueError(
                f"init gives {spec.source.rows} x {spec.source.dim} but the module is {num_embeddings} x "
                f"{embedding_dim}: make them equal"
            )
        self._set_options(num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, spec.facts.k)
        usable_seed(device, dtype)  # before a file is made
        state, (table,) = join_tables(state_dir, [spec], self, resume, storage)
        self.weight = DiskParameter(state, table, device, dtype, policy=ids)
        zero_padding(self.weight, self.padding_idx)

    @classmethod
    def _over(
        cls,
        weight: DiskParameter,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        **others: Any,  # noqa: ANN401 - those of bags
    ) -> Self:
        """Make a module over a table that is open."""
        module = cls.__new__(cls)
        torch.nn.Module.__init__(module)
        rows = len(weight.table) if weight.table.keys is None else None
        dim, k = weight.table.dim, weight.table.k
        module._set_options(rows, dim, padding_idx, max_norm, norm_type, k)
        module.weight = weight
        for name, value in others.items():
            setattr(module, name, value)
        return module

    def _set_options(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        k: float,
    ) -> None:
        if max_norm is not None and k > 0.0:
            raise ValueError(
                f"max_norm={max_norm!r} is a Euclidean norm and means nothing on a ball (k={k!r}): leave "
                "it out"
            )
        if max_norm is not None and not as_number("max_norm", max_norm) >= 0.0:
            raise ValueError(f"max_norm={max_norm!r} is out of range: pass a number >= 0, or None")
        if not as_number("norm_type", norm_type) > 0.0 and max_norm is not None:
            raise ValueError(f"norm_type={norm_type!r} is the p of no norm: pass a number > 0")
        self.embedding_dim = embedding_dim
        self.padding_idx = as_padding(padding_idx, num_embeddings)
        self.max_norm = max_norm
        self.norm_type = norm_type

    @property
    def num_embeddings(self) -> int:
        """Rows N of the table, as many as there are now; where they belong to ids, how many ids have one."""
        table = self.weight.table
        return len(table if table.keys is None else table.keys)

    @property
    def k(self) -> float:
        """Curvature magnitude of the table; 0 is flat."""
        return self.weight.table.k

    def _portable_state(self) -> StateDirectory:
        return self.weight.state

    export_checkpoint = portable.export_checkpoint
    export_weights = portable.export_weights
    import_checkpoint = portable.import_checkpoint
    save_checkpoint = portable.save_checkpoint
    load_checkpoint = portable.load_checkpoint

    def grow(self, rows: int, init: Source | None = None) -> None:
        """Let the table have more rows, which are fresh; those that are there keep weights and moments.

        Files are lengthened, not rewritten, so that it takes milliseconds; a backend that can't makes the
        table anew. Killed at any instant, the table has the rows of before or all of the new ones. Calling
        it again for as many rows does nothing; the next process asks for that many.

        Args:
            rows: Rows N from now on, at least as many as there are.
            init: The first weights of the new rows: an array of those rows, or a rule of `dsa.init` for N
                rows. None goes on with the table's own rule, as if it had had the rows from the start; a
                table that was made of an array has none.

        Raises:
            ValueError: the table would shrink, or `init` is missing or doesn't fit; nothing has changed.
            DiskSpaceError: there is not enough room; nothing has changed.
        """
        state = self.weight.state
        with state.use():
            grow_tables(state, [growth_of(self.weight.table, rows, init)])
            self.weight.follow()

    def flush(self) -> None:
        """Return once the state directory is durable on disk."""
        with self.weight.state.use():
            self.weight.state.flush()

    def close(self) -> None:
        """Close the state directory, for all who share it; closing twice is silent.

        Afterwards only questions are answered: ``state_dict()``, ``repr``, ``k``.
        """
        with self.weight.state.exclusive:
            self.weight.state.close()

    def set_rows(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Set the weights of some rows, all of them or none, in one transaction; their moments stay.

        For all rows there is `load_state_dict`, and ``init=`` when the table is made.

        Args:
            ids: ``(B,)`` of an integer dtype, in any order, each once.
            weights: ``(B, D)`` of a floating dtype, finite, and inside the ball where there is one.

        Raises:
            ValueError: an id comes twice, or the weights can't be these rows'; nothing has changed.
            RowIndexError, RowTypeError: the ids can't be used; nothing has changed.
            StateError: the directory can't be used; see `dsa.errors`.

        Example:
            >>> import tempfile
            >>> from dsa import DiskEmbedding
            >>> embedding = DiskEmbedding(1000, 2, state_dir=tempfile.mkdtemp())
            >>> embedding.set_rows(torch.tensor([7]), torch.tensor([[0.5, -0.5]]))
            >>> embedding.weight[7].tolist()
            [0.5, -0.5]
            >>> embedding.close()
        """
        set_rows(self.weight.state, self.weight.table, ids, weights)

    def ids(self) -> torch.Tensor:
        """Return the ids that have a row, in no order that means anything: ``(n,)`` int64.

        Raises:
            TypeError: rows belong to no ids.
        """
        with self.weight.state.use():
            return torch.from_numpy(all_ids(self.weight.table))

    def insert(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Give rows to ids that have none, whatever the policy says of admission; the others stay.

        Args:
            ids: ``(B,)`` of an integer dtype, in any order.
            weights: ``(B, D)`` first weights of the new ones; None takes those of the rule.

        Raises:
            TypeError: rows belong to no ids.
            ValueError: the weights can't be theirs; nothing has changed.
            DiskSpaceError: there is no room.
        """
        insert_rows(self.weight.state, self.weight.table, self.weight.policy, ids, weights)

    def delete(self, ids: torch.Tensor) -> int:
        """Take their rows from ids, which may have none, and return how many had one.

        Raises:
            TypeError: rows belong to no ids.
        """
        return delete_rows(self.weight.state, self.weight.table, ids)

    def reset_parameters(self) -> None:
        """Refuse to draw all weights again.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"reset_parameters() would draw every row of table {self.weight.table.name!r} again: build the "
            "module with resume=False, or a new directory, and init= for how weights are drawn"
        )

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - as torch's
        if name == "weight" and not isinstance(value, DiskParameter):
            raise TypeError(
                f"the weight of a {type(self).__name__} is on disk and can't be replaced by a "
                f"{type(value).__name__}: set some rows by set_rows(ids, weights), all of them by "
                "load_state_dict({'weight': weights})"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return what ``print(module)`` shows between the brackets."""
        parts = [f"{self.num_embeddings}, {self.embedding_dim}"]
        defaults = {"padding_idx": None, "max_norm": None, "norm_type": 2.0}
        parts += [
            f"{key}={getattr(self, key)}" for key, value in defaults.items() if getattr(self, key) != value
        ]
        if self.k > 0.0:
            parts.append(f"k={self.k:g}")
        return ", ".join(
            [*parts, f"table={self.weight.table.name!r}", f"state_dir={str(self.weight.state.path)!r}"]
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.weight.move(fn)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        reference = reference_to(self.weight.state, [self.weight.table.name])
        destination[prefix + "_extra_state"] = to_tensor(reference)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.weight.state.require_open()
        reference = state_dict.get(prefix + "_extra_state")
        if prefix + "weight" in state_dict:
            self._load_weights(state_dict[prefix + "weight"], error_msgs)
        elif reference is None:
            missing_keys.append(prefix + "_extra_state")
        else:
            try:
                follow_reference(self.weight.state, [self.weight.table.name], from_tensor(reference))
                self.weight.state.loaded_step = self.weight.state.global_step
            except (StateMismatchError, ValueError) as error:
                error_msgs.append(str(error))

    def _load_weights(self, weights: torch.Tensor, error_msgs: list[str]) -> None:
        if self.weight.table.keys is not None:
            error_msgs.append(
                "the saved weight says not to which ids its rows belong: use insert(ids, weights)"
            )
            return
        shape = (self.num_embeddings, self.embedding_dim)
        if tuple(weights.shape) != shape:
            error_msgs.append(f"the saved weight is {tuple(weights.shape)} but the table is {shape}")
            return
        state = self.weight.state
        with state.use():
            replace_weights(state, self.weight.table, FromArray(weights))


def table_spec_of(
    name: str,
    rows: int | None,
    dim: int,
    source: Source | None,
    k: float,
    state: str,
    fraction: float,
    state_dtype: StateDtype | None = None,
) -> TableSpec:
    """Return what a module asks its state directory for.

    Raises:
        ValueError: an option is out of range.
    """
    if not name:
        raise ValueError("a table's name can't be empty: pass a string")
    if state not in _STATES:
        raise ValueError(f"state={state!r} is not known: use one of {sorted(_STATES)}")
    keeps_inside = fraction is DEFAULT_FRACTION
    fraction, k = as_fraction(fraction), as_number("k", k)
    manifold_of(k)
    first = _default_init(rows, dim, k) if source is None else as_initializer(source)
    rule = _STATES[state]
    spec = table_spec(
        name,
        first,
        rule,
        k=k,
        init_max_norm_fraction=fraction,
        state_dtype=state_dtype,
        keeps_inside=keeps_inside,
    )
    return replace(spec, alternatives=ALIKE) if rule in ALIKE else spec


def _default_init(rows: int | None, dim: int, k: float) -> Initializer:
    seed = int(torch.randint(2**62, (), device="cpu").item())
    return Uniform(rows, dim, -1e-3, 1e-3, seed) if k > 0.0 else Normal(rows, dim, seed=seed)
