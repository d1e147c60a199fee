"""Recipes: small programs to read and to start from. Each is run by the tests.

Every one has a ``main(directory, ...)`` and runs as ``python -m dsa.examples.NAME [DIRECTORY]``, in a new
temporary directory where none is named:

- `dsa.examples.recommender`: tables on disk and dense layers, two optimizers, one schedule, mixed precision,
  clipping, saving and going on.
- `dsa.examples.node2vec`: node embeddings of a graph from random walks.
- `dsa.examples.knowledge_graph`: heads, tails and negatives from one table.
- `dsa.examples.language_model`: a table of n-grams beside a causal model, on disk in bfloat16, merged back.
- `dsa.examples.resume_after_kill`: a run that may be killed at any instant and ends as if it had not been.
- `dsa.examples.lightning_loop`: what a Lightning trainer does with an optimizer.
- `dsa.examples.accelerate_loop`: what Hugging Face Accelerate does with one.
- `dsa.examples.own_backend`: a storage backend of one's own, in one SQLite file.
"""

from __future__ import annotations

import sys
import tempfile

__all__ = ["directory_given"]


def directory_given() -> str:
    """Return the directory that the command line names, or a new temporary one, and say where that is."""
    if len(sys.argv) > 1:
        return sys.argv[1]
    directory = tempfile.mkdtemp(prefix="dsa-")
    print(f"in {directory}")
    return directory
