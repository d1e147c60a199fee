"""`DiskEmbedding` and `DiskEmbeddingBag`: torch's modules, with their weights on disk."""

from __future__ import annotations

import os
from typing import Any, final

import torch
from torch.nn import functional

from dsa.backends.base import Layout
from dsa.backends.mapping import Allocate
from dsa.modules.bags import Mode, reduced, require_mode
from dsa.modules.disk_module import DiskModule, Source, table_spec_of
from dsa.modules.graph_break import outside_graphs
from dsa.modules.pretrained import pretrained_by_id, pretrained_options, pretrained_source
from dsa.modules.read_only import ReadOnlyEmbedding, ReadOnlyEmbeddingBag, Unknown
from dsa.optimizers.arguments import DEFAULT_BACKEND, DEFAULT_FRACTION, StateDtype, storage_choice
from dsa.optimizers.lookup import look_up
from dsa.optimizers.tensors import ArrayLike
from dsa.rules.init import MatrixLike
from dsa.state.id_policy import IdPolicy
from dsa.state.storage import Durability

__all__ = ["DiskEmbedding", "DiskEmbeddingBag"]


@final
class DiskEmbedding(DiskModule):
    """`torch.nn.Embedding` whose weights, and the optimizer's state for them, live on disk.

    A forward pass reads each distinct row of its batch once. Gradients are sparse; `DiskSparseAdam` finds the
    table through ``model.parameters()``. In eval mode and under `torch.no_grad` nothing is written.

    Args:
        num_embeddings: Rows N. None for rows that belong to ids: any 64-bit integers then are what is looked
            up, a new one gets a row when it is trained, and the table grows.
        embedding_dim: Elements of a row D.
        padding_idx: A row that starts at zero and gets no gradient.
        max_norm: Rows that are looked up with a larger norm are scaled down to it: in training that is
            written, in eval mode not.
        norm_type: The p of that norm.
        scale_grad_by_freq: Refused if true, as by torch for sparse gradients.
        sparse: Refused if false: a gradient of the whole table would not fit.
        device: Where rows and gradients are handed out.
        dtype: Of rows and gradients, whatever the table stores.
        state_dir: The state directory; modules with one directory and different names share it.
        name: The table's name there.
        ids: How ids are treated, where `num_embeddings` is None: see `dsa.IdPolicy`.
        init: The first weights: an array, or a rule of `dsa.init`. None draws from N(0, 1) as torch does,
            seeded by torch's generator, or on a ball uniformly from ±0.001.
        k: Curvature magnitude: 0 is flat, > 0 a ball of curvature -k.
        state: The optimizer to make room for: ``"adam"``, ``"rowwise_adam"`` with one second moment per row,
            ``"catch_up_adam"`` for ``weight_decay_catch_up=True``, ``"adagrad"``, ``"rowwise_adagrad"`` with
            one sum per row, or the name of another update rule.
        state_dtype: How the table is stored: ``"bfloat16"`` halves what the optimizer keeps, rounded at
            random so that its means are right; a dict, such as ``{"w": "bfloat16", "v": "bfloat16"}``,
            chooses for each field, the weight ``w`` among them. None is float32.
        init_max_norm_fraction: Fresh rows on the ball start within this fraction of its radius. Left out, an
            array whose rows are all inside the ball is taken as it is.
        backend: ``"memmap"``, ``"zarr"``, `dsa.backends.Memmap`, `dsa.backends.Zarr` or another layout, see
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
        num_embeddings: int | None,
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
        ids: IdPolicy | None = None,
        init: Source | None = None,
        k: float = 0.0,
        state: str = "adam",
        state_dtype: StateDtype | None = None,
        init_max_norm_fraction: float = DEFAULT_FRACTION,
        backend: str | Layout = DEFAULT_BACKEND,
        allocate: Allocate | None = None,
        durability: Durability | None = None,
        async_writes: bool = False,
        resume: bool | None = None,
    ) -> None:
        _refuse(scale_grad_by_freq, sparse)
        spec = table_spec_of(
            name, num_embeddings, embedding_dim, init, k, state, init_max_norm_fraction, state_dtype
        )
        storage = storage_choice(backend, allocate, durability, async_writes)
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
            ids,
        )

    @outside_graphs
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of `input`, an integer tensor of any shape: ``(*, D)``."""
        found = look_up(self.weight, input, self.padding_idx, self.max_norm, self.norm_type, self.training)
        return functional.embedding(found.inverse, found.values)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: MatrixLike | torch.nn.Embedding,
        freeze: bool = True,
        *,
        row_ids: ArrayLike | None = None,
        **options: Any,  # noqa: ANN401 - the constructor's
    ) -> DiskEmbedding:
        """Make a module from weights that exist: an array, memmap, Zarr array, tensor, or a torch module.

        Args:
            embeddings: ``(N, D)`` weights, read block by block. A module brings its options too.
            freeze: Whether the rows get no gradient.
            row_ids: ``(N,)`` ids: rows belong to these then, as with ``num_embeddings=None``, and ``init=``
                is the rule for others; None tells rows by their numbers. That of ``padding_idx`` is left out.
            options: The constructor's, `state_dir` among them.

        Raises:
            ValueError: there are not as many distinct ids as rows; nothing is made.
        """
        if row_ids is not None:
            module = pretrained_by_id(cls, embeddings, row_ids, options)
        else:
            source = pretrained_source(embeddings)
            brought = pretrained_options(embeddings)
            module = cls(source.rows, source.dim, init=source, **{**brought, **options})
        module.weight.requires_grad_(not freeze)
        return module

    @staticmethod
    def open(
        path: str | os.PathLike[str],
        name: str = "embedding",
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Layout | None = None,
        unknown: Unknown = "zeros",
    ) -> ReadOnlyEmbedding:
        """Return a module that reads a table's rows and writes nothing: for evaluation, serving and workers.

        Args:
            path: The state directory, which another process may be training in.
            name: The table's name.
            max_norm: Rows with a larger norm are handed out scaled down to it.
            norm_type: The p of that norm.
            device: Where rows are handed out.
            dtype: Of the rows.
            backend: See `dsa.open_state`.
            unknown: What an id without a row is, where rows belong to ids: ``"zeros"``, ``"first"`` (the
                weights it would start with) or ``"error"``.

        Raises:
            KeyError: there is no table of that name.
            StateError: the directory can't be read; see `dsa.open_state`.
        """
        return ReadOnlyEmbedding(path, name, max_norm, norm_type, device, dtype, backend, unknown)


@final
class DiskEmbeddingBag(DiskModule):
    """`torch.nn.EmbeddingBag` whose weights, and the optimizer's state for them, live on disk.

    Args:
        num_embeddings: Rows N, or None, see `DiskEmbedding`.
        embedding_dim: Elements of a row D.
        max_norm: See `DiskEmbedding`.
        norm_type: See `DiskEmbedding`.
        scale_grad_by_freq: Refused if true.
        mode: ``"sum"``, ``"mean"`` or ``"max"``. On a ball ``"mean"`` alone, the Möbius gyromidpoint.
        sparse: Refused if false.
        include_last_offset: Whether the last offset is the number of ids.
        padding_idx: A row that starts at zero, is left out of every bag, and gets no gradient.
        device: See `DiskEmbedding`, likewise the further arguments.
        dtype: See `DiskEmbedding`.
        state_dir: See `DiskEmbedding`.
        name: See `DiskEmbedding`.
        ids: See `DiskEmbedding`.
        init: See `DiskEmbedding`.
        k: See `DiskEmbedding`.
        state: See `DiskEmbedding`.
        state_dtype: See `DiskEmbedding`.
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
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Mode = "mean",
        sparse: bool = True,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        state_dir: str | os.PathLike[str],
        name: str = "embedding",
        ids: IdPolicy | None = None,
        init: Source | None = None,
        k: float = 0.0,
        state: str = "adam",
        state_dtype: StateDtype | None = None,
        init_max_norm_fraction: float = DEFAULT_FRACTION,
        backend: str | Layout = DEFAULT_BACKEND,
        allocate: Allocate | None = None,
        durability: Durability | None = None,
        async_writes: bool = False,
        resume: bool | None = None,
    ) -> None:
        _refuse(scale_grad_by_freq, sparse)
        require_mode(mode, k)
        spec = table_spec_of(
            name, num_embeddings, embedding_dim, init, k, state, init_max_norm_fraction, state_dtype
        )
        storage = storage_choice(backend, allocate, durability, async_writes)
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
            ids,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    @outside_graphs
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
        return reduced(found, self.k, offsets, self.mode, per_sample_weights, self.include_last_offset)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: MatrixLike | torch.nn.EmbeddingBag,
        freeze: bool = True,
        *,
        row_ids: ArrayLike | None = None,
        **options: Any,  # noqa: ANN401 - the constructor's
    ) -> DiskEmbeddingBag:
        """Make a module from weights that exist, as `DiskEmbedding.from_pretrained` does."""
        if row_ids is not None:
            module = pretrained_by_id(cls, embeddings, row_ids, options)
        else:
            source = pretrained_source(embeddings)
            brought = pretrained_options(embeddings)
            module = cls(source.rows, source.dim, init=source, **{**brought, **options})
        module.weight.requires_grad_(not freeze)
        return module

    @staticmethod
    def open(
        path: str | os.PathLike[str],
        name: str = "embedding",
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        mode: Mode = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Layout | None = None,
        unknown: Unknown = "zeros",
    ) -> ReadOnlyEmbeddingBag:
        """Return a module that reads a table's bags and writes nothing, see `DiskEmbedding.open`.

        Args:
            path: See `DiskEmbedding.open`.
            name: See `DiskEmbedding.open`.
            max_norm: See `DiskEmbedding.open`.
            norm_type: See `DiskEmbedding.open`.
            mode: See `DiskEmbeddingBag`.
            include_last_offset: See `DiskEmbeddingBag`.
            padding_idx: The row that is left out of every bag.
            device: See `DiskEmbedding.open`.
            dtype: See `DiskEmbedding.open`.
            backend: See `DiskEmbedding.open`.
            unknown: See `DiskEmbedding.open`.

        Raises:
            KeyError: there is no table of that name.
            ValueError: the table's space lacks the mode.
            StateError: the directory can't be read; see `dsa.open_state`.
        """
        return ReadOnlyEmbeddingBag(
            path,
            name,
            max_norm,
            norm_type,
            mode,
            include_last_offset,
            padding_idx,
            device,
            dtype,
            backend,
            unknown,
        )


def _refuse(scale_grad_by_freq: bool, sparse: bool) -> None:
    if scale_grad_by_freq:
        raise ValueError(
            "scale_grad_by_freq=True does not exist for sparse gradients: leave it out, or scale the loss"
        )
    if not sparse:
        raise ValueError("sparse=False would need a gradient as large as the table: leave it out")
