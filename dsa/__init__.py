"""Training of embedding tables that do not fit in memory: every row's weight and Adam state live on disk."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from dsa import backends, conventions, errors, init
    from dsa.checkpoint import copy_checkpoint, flatten_checkpoint, open_checkpoint
    from dsa.comparison import diff
    from dsa.embedding import DiskEmbedding, DiskEmbeddingBag
    from dsa.estimation import estimate
    from dsa.gradients import clip_grad_norm_, split_parameters
    from dsa.inspection import open_state, summarize
    from dsa.optimizer import DiskSparseRiemannianAdam
    from dsa.prefetch import lookahead
    from dsa.repairs import repair
    from dsa.sparse_adam import DiskSparseAdam
    from dsa.transfer import export_directory as export_checkpoint
    from dsa.transfer import export_directory_weights as export_weights
    from dsa.transfer import migrate
    from dsa.transfer import restore as import_checkpoint
    from dsa.verification import verify

__all__ = [
    "DiskEmbedding",
    "DiskEmbeddingBag",
    "DiskSparseAdam",
    "DiskSparseRiemannianAdam",
    "backends",
    "clip_grad_norm_",
    "conventions",
    "copy_checkpoint",
    "diff",
    "errors",
    "estimate",
    "export_checkpoint",
    "export_weights",
    "flatten_checkpoint",
    "import_checkpoint",
    "init",
    "lookahead",
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
    "DiskEmbedding": ("dsa.embedding", "DiskEmbedding"),
    "DiskEmbeddingBag": ("dsa.embedding", "DiskEmbeddingBag"),
    "DiskSparseAdam": ("dsa.sparse_adam", "DiskSparseAdam"),
    "DiskSparseRiemannianAdam": ("dsa.optimizer", "DiskSparseRiemannianAdam"),
    "clip_grad_norm_": ("dsa.gradients", "clip_grad_norm_"),
    "copy_checkpoint": ("dsa.checkpoint", "copy_checkpoint"),
    "diff": ("dsa.comparison", "diff"),
    "estimate": ("dsa.estimation", "estimate"),
    "export_checkpoint": ("dsa.transfer", "export_directory"),
    "export_weights": ("dsa.transfer", "export_directory_weights"),
    "flatten_checkpoint": ("dsa.checkpoint", "flatten_checkpoint"),
    "import_checkpoint": ("dsa.transfer", "restore"),
    "lookahead": ("dsa.prefetch", "lookahead"),
    "migrate": ("dsa.transfer", "migrate"),
    "open_checkpoint": ("dsa.checkpoint", "open_checkpoint"),
    "open_state": ("dsa.inspection", "open_state"),
    "repair": ("dsa.repairs", "repair"),
    "split_parameters": ("dsa.gradients", "split_parameters"),
    "summarize": ("dsa.inspection", "summarize"),
    "verify": ("dsa.verification", "verify"),
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
                return _importlib.import_module(f"dsa.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"dsa.{name}":
                    raise
        raise AttributeError(f"module 'dsa' has no attribute {name!r}: use one of dsa.__all__")

    def __dir__() -> list[str]:
        """Return the names that there are, imported or not."""
        return sorted({*globals(), *__all__})
