"""`DiskEmbedding` and `DiskEmbeddingBag`: torch's modules, with their weights on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, Self, final

import numpy as np
import torch
from torch.nn import functional

from dsa.arguments import DEFAULT_BACKEND, as_fraction, layout_of_backend
from dsa.backends.mapping import Allocate
from dsa.disk_parameter import DiskParameter, usable_seed
from dsa.errors import StateMismatchError
from dsa.init import FromArray, Initializer, MatrixLike, Normal, Uniform, as_initializer
from dsa.lookup import look_up
from dsa.maintenance import write_weights
from dsa.manifolds import manifold_of
from dsa.options import as_index, as_number
from dsa.portable import Portable
from dsa.pretrained import pretrained_options, pretrained_source
from dsa.reference import check_reference, reference_to
from dsa.replacement import replace_weights
from dsa.schema import adam_schema
from dsa.sharing import join_tables
from dsa.state import StateDirectory
from dsa.storage import Durability, Layout, Queue, StorageChoice, TableSpec
from dsa.tensor_reference import from_tensor, to_tensor

__all__ = ["DiskEmbedding", "DiskEmbeddingBag"]

Source = Initializer | FromArray | MatrixLike
TableState = Literal["adam", "rowwise_adam"]

_STATES: dict[str, tuple[Literal["element", "row"], str]] = {
    "adam": ("element", "coordinate"),
    "rowwise_adam": ("row", "row"),
}


class _DiskModule(Portable, torch.nn.Module):
    """What the two modules share: the table, its parameter, moving, saving, closing. Abstract."""

    weight: DiskParameter

    def __init__(
        self,
        num_embeddings: int,
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
    ) -> None:
        super().__init__()
        if (spec.source.rows, spec.source.dim) != (num_embeddings, embedding_dim):
            raise ValueError(
                f"init gives {spec.source.rows} x {spec.source.dim} but the module is {num_embeddings} x "
                f"{embedding_dim}: make them equal"
            )
        if max_norm is not None and spec.k > 0.0:
            raise ValueError(
                f"max_norm={max_norm!r} is a Euclidean norm and means nothing on a ball (k={spec.k!r}): "
                "leave it out"
            )
        if max_norm is not None and not as_number("max_norm", max_norm) >= 0.0:
            raise ValueError(f"max_norm={max_norm!r} is out of range: pass a number >= 0, or None")
        if not as_number("norm_type", norm_type) > 0.0 and max_norm is not None:
            raise ValueError(f"norm_type={norm_type!r} is the p of no norm: pass a number > 0")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _padding(padding_idx, num_embeddings)
        self.max_norm = max_norm
        self.norm_type = norm_type
        usable_seed(device, dtype)  # before a file is made
        state, (table,) = join_tables(state_dir, [spec], self, resume, storage)
        self.weight = DiskParameter(state, table, device, dtype)
        self._zero_padding()

    @property
    def k(self) -> float:
        """Curvature magnitude of the table; 0 is flat."""
        return self.weight.table.k

    def _portable_state(self) -> StateDirectory:
        return self.weight.state

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

    def _zero_padding(self) -> None:
        """Zero the padding row of a fresh table, as `torch.nn.Embedding` does."""
        table, state = self.weight.table, self.weight.state
        if self.padding_idx is None or table.initializer is None:
            return
        row = np.array([self.padding_idx])
        if table.backend.read(row)["s"][0] == 0:
            write_weights(state, table, row, np.zeros((1, self.embedding_dim), np.float32))

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
                check_reference(self.weight.state, [self.weight.table.name], from_tensor(reference))
            except (StateMismatchError, ValueError) as error:
                error_msgs.append(str(error))

    def _load_weights(self, weights: torch.Tensor, error_msgs: list[str]) -> None:
        shape = (self.num_embeddings, self.embedding_dim)
        if tuple(weights.shape) != shape:
            error_msgs.append(f"the saved weight is {tuple(weights.shape)} but the table is {shape}")
            return
        state = self.weight.state
        with state.use():
            replace_weights(state, self.weight.table, FromArray(weights))


@final
class DiskEmbedding(_DiskModule):
    """`torch.nn.Embedding` whose weights, and the optimizer's state for them, live on disk.

    A forward pass reads each distinct row of its batch once. Gradients are sparse; `DiskSparseAdam` finds the
    table through ``model.parameters()``. In eval mode and under `torch.no_grad` nothing is written.

    Args:
        num_embeddings: Rows N.
        embedding_dim: Elements of a row D.
        padding_idx: A row that starts at zero and gets no gradient.
        max_norm: Rows that are looked up with a larger norm are scaled down to it: in training that is
            written, in eval mode not.
        norm_type: The p of that norm.
        scale_grad_by_freq: Refused if true, as by torch for sparse gradients.
        sparse: Refused if false: a gradient of the whole table would not fit.
        device: Where rows and gradients are handed out.
        dtype: Of rows and gradients; the table itself is float32.
        state_dir: The state directory; modules with one directory and different names share it.
        name: The table's name there.
        init: The first weights: an array, or a rule of `dsa.init`. None draws from N(0, 1) as torch does,
            seeded by torch's generator, or on a ball uniformly from ±0.001.
        k: Curvature magnitude: 0 is flat, > 0 a ball of curvature -k.
        state: What to reserve for the optimizer: ``"adam"``, or ``"rowwise_adam"`` with one second moment per
            row.
        init_max_norm_fraction: Fresh rows on the ball start within this fraction of its radius.
        backend: ``"memmap"``, ``"zarr"``, `dsa.backends.Memmap` or `dsa.backends.Zarr`, see
            `DiskSparseRiemannianAdam`; as the further options, left out it is the default or what the
            directory was opened with.
        allocate: ``"reserve"`` or ``"sparse"``.
        durability: ``"process"``, ``"power"`` or ``"none"``.
        async_writes: Write in a thread.
        resume: None refuses to guess when there is state; True continues it; False replaces it, with a
            warning.

    Raises:
        ValueError: an option is out of range or contradicts another.
        StateError: the directory can't be used; see `dsa.errors`.

    Example:
        >>> import tempfile
        >>> from dsa import init
        >>> embedding = DiskEmbedding(1000, 2, init=init.Zeros(1000, 2), state_dir=tempfile.mkdtemp())
        >>> embedding(torch.tensor([[1, 5], [5, 7]])).shape
        torch.Size([2, 2, 2])
        >>> embedding.close()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        state_dir: str | os.PathLike[str],
        name: str = "embedding",
        init: Source | None = None,
        k: float = 0.0,
        state: TableState = "adam",
        init_max_norm_fraction: float = 0.5,
        backend: str | Layout = DEFAULT_BACKEND,
        allocate: Allocate | None = None,
        durability: Durability | None = None,
        async_writes: bool = False,
        resume: bool | None = None,
    ) -> None:
        _refuse(scale_grad_by_freq, sparse)
        spec = _spec(name, num_embeddings, embedding_dim, init, k, state, init_max_norm_fraction)
        storage = _storage(backend, allocate, durability, async_writes)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            spec,
            state_dir,
            resume,
            storage,
            device,
            dtype,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of `input`, an integer tensor of any shape: ``(*, D)``."""
        found = look_up(self.weight, input, self.padding_idx, self.max_norm, self.norm_type, self.training)
        return functional.embedding(found.inverse, found.values)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: MatrixLike | torch.nn.Embedding,
        freeze: bool = True,
        **options: Any,  # noqa: ANN401 - the constructor's
    ) -> DiskEmbedding:
        """Make a module from weights that exist: an array, memmap, Zarr array, tensor, or a torch module.

        Args:
            embeddings: ``(N, D)`` weights, read block by block. A module brings its options too.
            freeze: Whether the rows get no gradient.
            options: The constructor's, `state_dir` among them.
        """
        source = pretrained_source(embeddings)
        module = cls(source.rows, source.dim, init=source, **{**pretrained_options(embeddings), **options})
        module.weight.requires_grad_(not freeze)
        return module


@final
class DiskEmbeddingBag(_DiskModule):
    """`torch.nn.EmbeddingBag` whose weights, and the optimizer's state for them, live on disk.

    Args:
        num_embeddings: Rows N.
        embedding_dim: Elements of a row D.
        max_norm: See `DiskEmbedding`.
        norm_type: See `DiskEmbedding`.
        scale_grad_by_freq: Refused if true.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Refused if false.
        include_last_offset: Whether the last offset is the number of ids.
        padding_idx: A row that starts at zero, is left out of every bag, and gets no gradient.
        device: See `DiskEmbedding`, likewise the further arguments.
        dtype: See `DiskEmbedding`.
        state_dir: See `DiskEmbedding`.
        name: See `DiskEmbedding`.
        init: See `DiskEmbedding`.
        k: See `DiskEmbedding`.
        state: See `DiskEmbedding`.
        init_max_norm_fraction: See `DiskEmbedding`.
        backend: See `DiskEmbedding`.
        allocate: See `DiskEmbedding`.
        durability: See `DiskEmbedding`.
        async_writes: See `DiskEmbedding`.
        resume: See `DiskEmbedding`.

    Example:
        >>> import tempfile
        >>> from dsa import init
        >>> bag = DiskEmbeddingBag(1000, 2, init=init.Zeros(1000, 2), state_dir=tempfile.mkdtemp())
        >>> bag(torch.tensor([1, 5, 7]), torch.tensor([0, 2])).shape
        torch.Size([2, 2])
        >>> bag.close()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
        sparse: bool = True,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        state_dir: str | os.PathLike[str],
        name: str = "embedding",
        init: Source | None = None,
        k: float = 0.0,
        state: TableState = "adam",
        init_max_norm_fraction: float = 0.5,
        backend: str | Layout = DEFAULT_BACKEND,
        allocate: Allocate | None = None,
        durability: Durability | None = None,
        async_writes: bool = False,
        resume: bool | None = None,
    ) -> None:
        _refuse(scale_grad_by_freq, sparse)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode={mode!r} is not known: use 'sum', 'mean' or 'max'")
        spec = _spec(name, num_embeddings, embedding_dim, init, k, state, init_max_norm_fraction)
        storage = _storage(backend, allocate, durability, async_writes)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            spec,
            state_dir,
            resume,
            storage,
            device,
            dtype,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one reduced row per bag.

        Args:
            input: Ids: 1-D with `offsets`, or 2-D with one bag per row.
            offsets: Where each bag starts in a 1-D `input`.
            per_sample_weights: A factor for each id, of the shape of `input`; for mode ``"sum"``.

        Returns:
            ``(bags, D)``.
        """
        found = look_up(self.weight, input, self.padding_idx, self.max_norm, self.norm_type, self.training)
        return functional.embedding_bag(
            found.inverse,
            found.values,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=found.padding,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: MatrixLike | torch.nn.EmbeddingBag,
        freeze: bool = True,
        **options: Any,  # noqa: ANN401 - the constructor's
    ) -> DiskEmbeddingBag:
        """Make a module from weights that exist, as `DiskEmbedding.from_pretrained` does."""
        source = pretrained_source(embeddings)
        module = cls(source.rows, source.dim, init=source, **{**pretrained_options(embeddings), **options})
        module.weight.requires_grad_(not freeze)
        return module


def _refuse(scale_grad_by_freq: bool, sparse: bool) -> None:
    if scale_grad_by_freq:
        raise ValueError(
            "scale_grad_by_freq=True does not exist for sparse gradients: leave it out, or scale the loss"
        )
    if not sparse:
        raise ValueError("sparse=False would need a gradient as large as the table: leave it out")


def _padding(padding_idx: int | None, rows: int) -> int | None:
    if padding_idx is None:
        return None
    if not -rows <= (index := as_index("padding_idx", padding_idx)) < rows:
        raise ValueError(f"padding_idx={padding_idx!r} is outside the table of {rows} rows: pass a row of it")
    return index % rows


def _spec(
    name: str, rows: int, dim: int, source: Source | None, k: float, state: str, fraction: float
) -> TableSpec:
    if not name:
        raise ValueError("a table's name can't be empty: pass a string")
    if state not in _STATES:
        raise ValueError(f"state={state!r} is not known: use one of {sorted(_STATES)}")
    fraction, k = as_fraction(fraction), as_number("k", k)
    manifold_of(k)
    per, second_moment = _STATES[state]
    first = _default_init(rows, dim, k) if source is None else as_initializer(source)
    return TableSpec(name, adam_schema(dim, second_moment_per=per), first, k, second_moment, fraction)


def _default_init(rows: int, dim: int, k: float) -> Initializer:
    seed = int(torch.randint(2**62, ()).item())
    return Uniform(rows, dim, -1e-3, 1e-3, seed) if k > 0.0 else Normal(rows, dim, seed=seed)


def _storage(
    backend: str | Layout,
    allocate: Allocate | None,
    durability: Durability | None,
    async_writes: bool,
) -> StorageChoice:
    queue = Queue() if async_writes else None
    return StorageChoice(allocate, layout_of_backend(backend), durability, queue)
