"""Knowledge-graph embedding: heads, tails and negatives are rows of one table on disk.

The three are looked up together: each distinct entity of a batch is read once, its gradients are summed, and
it is updated once, however often it occurs. The relations are few; their table is an ordinary
`torch.nn.Embedding` whose moments go into the same directory.

References:
    Sun et al., "RotatE: knowledge graph embedding by relational rotation in complex space", 2019, equations 2
    and 5 (without self-adversarial weights).
"""

from __future__ import annotations

import os

import torch
from torch.nn import functional

from dsa import DiskEmbedding, DiskSparseAdam, init
from dsa.examples import directory_given

__all__ = ["RotatE", "main"]


class RotatE(torch.nn.Module):
    """Relations that rotate: a tail is its head with every complex coordinate turned by an angle.

    Args:
        directory: The state directory.
        entities: Number of entities.
        relations: Number of relations.
        dim: Complex coordinates of an entity.
    """

    def __init__(self, directory: str | os.PathLike[str], entities: int, relations: int, dim: int) -> None:
        super().__init__()
        self.entity = DiskEmbedding(
            entities, 2 * dim, state_dir=directory, name="entity", init=init.Uniform(entities, 2 * dim, -1, 1)
        )
        self.angle = torch.nn.Embedding(relations, dim, sparse=True)
        torch.nn.init.uniform_(self.angle.weight, -torch.pi, torch.pi)

    def forward(self, head: torch.Tensor, relation: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Return the distance of each candidate from where the relation takes its head.

        Args:
            head: ``(B,)``.
            relation: ``(B,)``.
            candidates: ``(B, C)`` possible tails.

        Returns:
            ``(B, C)``.
        """
        rows = self.entity(torch.cat([head[:, None], candidates], dim=1))
        points = torch.view_as_complex(rows.unflatten(2, (-1, 2)))
        angle = self.angle(relation)
        turned = points[:, :1] * torch.polar(torch.ones_like(angle), angle)[:, None]
        return (turned - points[:, 1:]).abs().sum(2)


def main(
    directory: str | os.PathLike[str],
    entities: int = 5_000,
    relations: int = 4,
    dim: int = 32,
    steps: int = 2_000,
    batch: int = 256,
    negatives: int = 16,
) -> float:
    """Learn relations that step round a ring, and return the mean reciprocal rank of the true tails."""
    torch.manual_seed(0)
    model = RotatE(directory, entities, relations, dim)
    margin = dim / 2
    with DiskSparseAdam(model.named_parameters(), lr=0.05, state_dir=directory) as optimizer:
        for _ in range(steps):
            head, relation, tail = draw_facts(entities, relations, batch)
            wrong = torch.randint(0, entities, (batch, negatives))
            distance = model(head, relation, torch.cat([tail[:, None], wrong], dim=1))
            right, others = distance[:, 0], distance[:, 1:]
            loss = (
                -functional.logsigmoid(margin - right).mean() - functional.logsigmoid(others - margin).mean()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return mean_reciprocal_rank(model, entities, relations)


def draw_facts(entities: int, relations: int, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return heads, relations and tails; relation number r leads r + 1 places on."""
    head = torch.randint(0, entities, (batch,))
    relation = torch.randint(0, relations, (batch,))
    return head, relation, (head + relation + 1) % entities


@torch.no_grad()
def mean_reciprocal_rank(model: RotatE, entities: int, relations: int, facts: int = 64) -> float:
    """Rank every entity as the tail of some facts."""
    model.eval()
    head, relation, tail = draw_facts(entities, relations, facts)
    distance = model(head, relation, torch.arange(entities).expand(facts, -1))
    rank = (distance <= distance.gather(1, tail[:, None])).sum(1)
    return float((1.0 / rank).mean())


if __name__ == "__main__":
    print(f"mean reciprocal rank: {main(directory_given()):.3f}")
