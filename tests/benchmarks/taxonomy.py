"""A taxonomy of many nodes on the ball, from disk: time, and what the distances have kept of the tree.

Run by hand: ``python tests/benchmarks/taxonomy.py [--nodes N] [--dim D] [--epochs E] [--sampled S]``. A tree
is drawn whose nodes prefer parents with many children; N = 1,100,000 and D = 100 is the size of the published
embedding of NCBI's taxonomy. Trained is as by ``dsa demo --closure``. Of nodes that are drawn it prints

- MAP and mean rank of their ancestors among all nodes (Nickel & Kiela 2017, section 4.1),
- the purity of their nearest neighbours: the share of the ten nearest of all nodes that lie in the same
  subtree at depth two, beside the share that chance would give,
- Spearman's correlation of their depth with their distance to the origin.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from dsa.cli.demo.closure import transitive_closure
from dsa.cli.demo.directory import Run, disk_use, state_path
from dsa.cli.demo.graph import EdgeList, build_graph
from dsa.cli.demo.metrics import reconstruction, sample_nodes
from dsa.cli.demo.settings import default_settings
from dsa.cli.demo.training import open_table, read_positions, train
from dsa.rules.manifolds import PoincareBall

NEAREST, LEVEL = 10, 2


def draw_tree(nodes, seed):
    """Return the parent of each node but the root, ``(N - 1,)``, half of them drawn by their children."""
    draws = np.random.default_rng(seed)
    parents = np.empty(nodes - 1, np.int64)
    uniform, copied = draws.random(nodes - 1), draws.random(nodes - 1) < 0.5
    for child in range(1, nodes):
        place = int(uniform[child - 1] * child)
        # The parent of a node that is drawn is a node drawn by its number of children.
        parents[child - 1] = parents[place - 1] if copied[child - 1] and place else place
    return parents


def depths_and_groups(parents):
    """Return the depth of each node, and the node at depth `LEVEL` above it, -1 where there is none."""
    depth = np.zeros(len(parents) + 1, np.int64)
    group = np.full(len(parents) + 1, -1)
    for child, parent in enumerate(parents.tolist(), start=1):
        depth[child] = depth[parent] + 1
        group[child] = child if depth[child] == LEVEL else group[parent]
    return depth, group


def purity(positions, k, group, nodes):
    """Return the share of nearest nodes of the same group, and that of all nodes."""
    squares = np.einsum("nd,nd->n", positions, positions, dtype=np.float64)
    shares, chances = [], []
    sizes = np.bincount(group[group >= 0], minlength=len(group))
    for node in nodes:
        gaps = squares - 2.0 * (positions @ positions[node]) + squares[node]
        nearness = np.maximum(gaps, 0.0) / (1.0 - k * squares)  # grows with the distance from this node
        nearness[node] = np.inf
        near = np.argpartition(nearness, NEAREST)[:NEAREST]
        shares.append(np.mean(group[near] == group[node]))
        chances.append((sizes[group[node]] - 1) / (len(group) - 1))
    return np.mean(shares), np.mean(chances)


def ranks(numbers):
    """Return the ranks of numbers, equal ones sharing their mean."""
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--sampled", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", help="where the table lies; a temporary directory otherwise")
    arguments = parser.parse_args()

    parents = draw_tree(arguments.nodes, arguments.seed)
    depth, group = depths_and_groups(parents)
    names = tuple(map(str, range(arguments.nodes)))
    graph = build_graph(transitive_closure(EdgeList(names, np.arange(1, arguments.nodes), parents)))
    settings = default_settings(graph.edges, {"dim": arguments.dim, "epochs": arguments.epochs})
    run = Run(settings, graph.fingerprint())
    print(
        f"{len(graph):,} nodes, {graph.edges:,} relations, depth {depth.max()}; {settings.epochs} epochs of "
        f"{settings.steps_per_epoch(graph.edges):,} steps of {settings.batch_size}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=arguments.dir) as place:
        start, cpu = time.perf_counter(), time.process_time()
        with open_table(graph, run, Path(place), None) as optimizer:
            outcome = train(graph, run, Path(place), optimizer)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            positions = read_positions(optimizer, len(graph))
        length, _ = disk_use(state_path(Path(place)))
    print(
        f"{outcome.steps:,} steps in {seconds:.0f} s ({1000 * cpu / outcome.steps:.1f} ms of CPU time each), "
        f"loss {outcome.loss:.3f}; {length / 1e6:.0f} MB on disk"
    )
    chosen = sample_nodes(graph, arguments.sampled, arguments.seed)
    found = reconstruction(graph, positions, settings.k, chosen, torch.get_num_threads())
    grouped = np.flatnonzero(depth > LEVEL)
    some = np.random.default_rng(1).choice(grouped, min(arguments.sampled, len(grouped)), replace=False)
    share, chance = purity(positions, settings.k, group, some)
    origin = np.zeros((1, arguments.dim))
    away = PoincareBall(settings.k).dist(origin, positions[chosen].astype(np.float64))
    correlation = np.corrcoef(ranks(depth[chosen]), ranks(away))[0, 1]
    print(
        f"of {len(chosen):,} nodes: MAP {found.mean_average_precision:.3f}, mean rank {found.mean_rank:.1f}, "
        f"purity of {NEAREST} neighbours {share:.3f} (chance {chance:.3f}), depth correlation "
        f"{correlation:.3f}"
    )


if __name__ == "__main__":
    main()
