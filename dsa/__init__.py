"""Training of embedding tables that do not fit in memory: every row's weight and Adam state live on disk."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from dsa import backends, errors
    from dsa.checkpoint import copy_checkpoint, flatten_checkpoint, open_checkpoint
    from dsa.checkpoint.keying import convert_ids
    from dsa.checkpoint.transfer import export_directory as export_checkpoint
    from dsa.checkpoint.transfer import export_directory_weights as export_weights
    from dsa.checkpoint.transfer import migrate
    from dsa.checkpoint.transfer import restore as import_checkpoint
    from dsa.inspection import open_state, summarize
    from dsa.inspection.comparison import diff
    from dsa.inspection.repairs import repair
    from dsa.inspection.verification import verify
    from dsa.kernels.string_ids import hash_strings
    from dsa.modules.conversion import convert_
    from dsa.modules.embedding import DiskEmbedding, DiskEmbeddingBag
    from dsa.modules.materialization import materialize_
    from dsa.optimizers.combined import CombinedOptimizer
    from dsa.optimizers.gradients import clip_grad_norm_, split_parameters
    from dsa.optimizers.prefetch import lookahead
    from dsa.optimizers.sparse_adagrad import DiskSparseAdagrad
    from dsa.optimizers.sparse_adam import DiskSparseAdam
    from dsa.optimizers.sparse_optimizer import DiskSparseOptimizer
    from dsa.optimizers.sparse_riemannian_adam import DiskSparseRiemannianAdam
    from dsa.rules import conventions, init
    from dsa.state.estimation import estimate
    from dsa.state.growth import grow_directory as grow_tables
    from dsa.state.id_policy import IdPolicy

__all__ = [
    "CombinedOptimizer",
    "DiskEmbedding",
    "DiskEmbeddingBag",
    "DiskSparseAdagrad",
    "DiskSparseAdam",
    "DiskSparseOptimizer",
    "DiskSparseRiemannianAdam",
    "IdPolicy",
    "backends",
    "clip_grad_norm_",
    "conventions",
    "convert_",
    "convert_ids",
    "copy_checkpoint",
    "diff",
    "errors",
    "estimate",
    "export_checkpoint",
    "export_weights",
    "flatten_checkpoint",
    "grow_tables",
    "hash_strings",
    "import_checkpoint",
    "init",
    "lookahead",
    "materialize_",
    "migrate",
    "open_checkpoint",
    "open_state",
    "repair",
    "split_parameters",
    "summarize",
    "verify",
]
__version__ = "0.4.0.dev0"

# Module and name of each, imported when it is used first: neither the command line nor a program that looks
# at a state waits for torch. No module has the name of a function here: importing it would hide the function.
_HOMES = {
    "CombinedOptimizer": ("dsa.optimizers.combined", "CombinedOptimizer"),
    "DiskEmbedding": ("dsa.modules.embedding", "DiskEmbedding"),
    "DiskEmbeddingBag": ("dsa.modules.embedding", "DiskEmbeddingBag"),
    "DiskSparseAdagrad": ("dsa.optimizers.sparse_adagrad", "DiskSparseAdagrad"),
    "DiskSparseAdam": ("dsa.optimizers.sparse_adam", "DiskSparseAdam"),
    "DiskSparseOptimizer": ("dsa.optimizers.sparse_optimizer", "DiskSparseOptimizer"),
    "DiskSparseRiemannianAdam": ("dsa.optimizers.sparse_riemannian_adam", "DiskSparseRiemannianAdam"),
    "IdPolicy": ("dsa.state.id_policy", "IdPolicy"),
    "clip_grad_norm_": ("dsa.optimizers.gradients", "clip_grad_norm_"),
    "convert_": ("dsa.modules.conversion", "convert_"),
    "convert_ids": ("dsa.checkpoint.keying", "convert_ids"),
    "copy_checkpoint": ("dsa.checkpoint", "copy_checkpoint"),
    "diff": ("dsa.inspection.comparison", "diff"),
    "estimate": ("dsa.state.estimation", "estimate"),
    "export_checkpoint": ("dsa.checkpoint.transfer", "export_directory"),
    "export_weights": ("dsa.checkpoint.transfer", "export_directory_weights"),
    "grow_tables": ("dsa.state.growth", "grow_directory"),
    "hash_strings": ("dsa.kernels.string_ids", "hash_strings"),
    "flatten_checkpoint": ("dsa.checkpoint", "flatten_checkpoint"),
    "import_checkpoint": ("dsa.checkpoint.transfer", "restore"),
    "lookahead": ("dsa.optimizers.prefetch", "lookahead"),
    "materialize_": ("dsa.modules.materialization", "materialize_"),
    "migrate": ("dsa.checkpoint.transfer", "migrate"),
    "open_checkpoint": ("dsa.checkpoint", "open_checkpoint"),
    "open_state": ("dsa.inspection", "open_state"),
    "repair": ("dsa.inspection.repairs", "repair"),
    "split_parameters": ("dsa.optimizers.gradients", "split_parameters"),
    "summarize": ("dsa.inspection", "summarize"),
    "verify": ("dsa.inspection.verification", "verify"),
}

# Modules that are named without their package.
_MODULES = {
    "conventions": "dsa.rules.conventions",
    "init": "dsa.rules.init",
    "manifolds": "dsa.rules.manifolds",
    "plots": "dsa.inspection.plots",
}


if not _typing.TYPE_CHECKING:  # else every attribute would be one

    def __getattr__(name: str) -> object:
        """Return what is not imported yet: a name of `__all__`, or a module of the package."""
        if name in _HOMES:
            module, attribute = _HOMES[name]
            value = getattr(_importlib.import_module(module), attribute)
            globals()[name] = value
            return value
        if not name.startswith("_"):
            try:
                return _importlib.import_module(_MODULES.get(name, f"dsa.{name}"))
            except ModuleNotFoundError as error:
                if error.name != f"dsa.{name}":
                    raise
        raise AttributeError(f"module 'dsa' has no attribute {name!r}: use one of dsa.__all__")

    def __dir__() -> list[str]:
        """Return the names that there are, imported or not."""
        return sorted({*globals(), *__all__})
