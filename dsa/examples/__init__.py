"""Recipes: small programs to read and to start from. Each is run by the tests.

Every one has a ``main(directory, ...)`` and runs as ``python -m dsa.examples.NAME DIRECTORY``:

- `dsa.examples.recommender`: tables on disk and dense layers, two optimizers, one schedule, mixed precision,
  clipping, saving and going on.
- `dsa.examples.node2vec`: node embeddings of a graph from random walks.
- `dsa.examples.knowledge_graph`: heads, tails and negatives from one table.
- `dsa.examples.resume_after_kill`: a run that may be killed at any instant and ends as if it had not been.
- `dsa.examples.lightning_loop`: what a Lightning trainer does with an optimizer.
- `dsa.examples.accelerate_loop`: what Hugging Face Accelerate does with one.
- `dsa.examples.own_backend`: a storage backend of one's own, in one SQLite file.
"""
