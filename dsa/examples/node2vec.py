"""Node embeddings of a graph in the manner of node2vec: random walks, skip-grams, negative samples.

Both tables lie in one state directory, so that a step changes both or none. While one batch is worked on, the
rows of the next are announced.

References:
    Grover & Leskovec, "node2vec: scalable feature learning for networks", 2016 (walks without bias here).
    Mikolov et al., "Distributed representations of words and phrases", 2013, equation 4.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from dsa import DiskEmbedding, DiskSparseAdam, init, lookahead
from dsa.examples import directory_given

__all__ = ["main"]


class Batch(NamedTuple):
    """Nodes, what was met near them on a walk, and what was drawn at random.

    Args:
        centre: ``(B,)``.
        near: ``(B,)``.
        random: ``(B, 5)``.
    """

    centre: torch.Tensor
    near: torch.Tensor
    random: torch.Tensor


def main(
    directory: str | os.PathLike[str], cliques: int = 200, size: int = 10, dim: int = 32, steps: int = 500
) -> float:
    """Train on a ring of cliques and return the share of nodes whose nearest node is of their own clique."""
    nodes = cliques * size
    node = DiskEmbedding(
        nodes, dim, state_dir=directory, name="node", init=init.Normal(nodes, dim, 0.1, seed=1)
    )
    context = DiskEmbedding(nodes, dim, state_dir=directory, name="context", init=init.Zeros(nodes, dim))
    parameters = [*node.parameters(), *context.parameters()]
    with DiskSparseAdam(parameters, lr=0.05) as optimizer:
        batches = lookahead(walks(cliques, size, steps), optimizer, ids=lambda batch: {"node": batch.centre})
        for batch in batches:
            optimizer.zero_grad()
            skip_gram_loss(node, context, batch).backward()
            optimizer.step()
        return share_of_neighbours(node, size)


def skip_gram_loss(node: DiskEmbedding, context: DiskEmbedding, batch: Batch) -> torch.Tensor:
    """Return the loss of skip-grams with negative samples; the table of contexts is read once."""
    rows = context(torch.cat([batch.near[:, None], batch.random], dim=1))
    likeness = (node(batch.centre)[:, None] * rows).sum(2)
    near, random = likeness[:, 0], likeness[:, 1:]
    return -functional.logsigmoid(near).mean() - functional.logsigmoid(-random).mean()


def walks(cliques: int, size: int, steps: int, starts: int = 64, length: int = 4) -> Iterator[Batch]:
    """Yield batches of random walks: inside a clique, and now and then over to the next one."""
    nodes, draws = cliques * size, torch.Generator().manual_seed(0)
    for _ in range(steps):
        path = [torch.randint(0, nodes, (starts,), generator=draws)]
        for _ in range(length):
            clique = path[-1] // size + (torch.rand(starts, generator=draws) < 0.02)
            path.append(clique % cliques * size + torch.randint(0, size, (starts,), generator=draws))
        random = torch.randint(0, nodes, (starts * length, 5), generator=draws)
        yield Batch(torch.cat(path[:-1]), torch.cat(path[1:]), random)


@torch.no_grad()
def share_of_neighbours(node: DiskEmbedding, size: int, block: int = 1024) -> float:
    """Compare nodes by cosine, block by block."""
    node.eval()
    hits = 0
    everyone = functional.normalize(node(torch.arange(node.num_embeddings)))
    for start in range(0, node.num_embeddings, block):
        ids = torch.arange(start, min(start + block, node.num_embeddings))
        likeness = functional.normalize(node(ids)) @ everyone.T
        likeness[torch.arange(len(ids)), ids] = -1.0
        hits += int((likeness.argmax(1) // size == ids // size).sum())
    return hits / node.num_embeddings


if __name__ == "__main__":
    print(f"nearest node in the same clique: {main(directory_given()):.1%}")
