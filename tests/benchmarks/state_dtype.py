"""What bfloat16 costs and saves: quality over seeds, bytes of a row, and time of a step.

Run by hand: ``python tests/benchmarks/state_dtype.py mammals|recommender|steps [--seeds S]``.

- ``mammals``: the demo's graph and program, MAP after some epochs, in two modes of the second moment.
- ``recommender``: users and items whose inner product says what is clicked; AUC on pairs that were kept out.
- ``steps``: the same steps of tables of several dtypes in memory, in turns, in one process.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from dsa import DiskEmbedding, DiskSparseAdam, DiskSparseRiemannianAdam, estimate, init
from dsa.cli.demo.directory import Run, state_path
from dsa.cli.demo.graph import build_graph, read_mammals
from dsa.cli.demo.metrics import reconstruction, sample_nodes
from dsa.cli.demo.settings import default_settings
from dsa.cli.demo.training import read_positions, train

MOMENTS = {"m": "bfloat16", "v": "bfloat16"}
DTYPES = {"float32": None, "m v bfloat16": MOMENTS, "w m v bfloat16": {"w": "bfloat16", **MOMENTS}}


def show(name, values):
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    print(
        f"{name:<32} {statistics.mean(values):.4f} ± {spread:.4f}  {[round(each, 4) for each in values]}",
        flush=True,
    )


def mammals(seeds, epochs):
    graph = build_graph(read_mammals())
    for mode, narrow in ("row", {"m": "bfloat16"}), ("frame", MOMENTS):
        for dtypes in None, narrow:
            found = []
            for seed in range(seeds):
                given = {"epochs": epochs, "seed": seed, "second_moment": mode}
                settings = default_settings(graph.edges, given)
                bound = 1e-3
                table = init.Uniform(len(graph), settings.dim, -bound, bound, seed=seed)
                with tempfile.TemporaryDirectory() as name:
                    optimizer = DiskSparseRiemannianAdam(
                        {"nodes": table}, lr=settings.lr, eps=settings.eps, k=settings.k,
                        disk_dir=state_path(Path(name)), second_moment=mode, state_dtype=dtypes,
                    )  # fmt: skip
                    with optimizer:
                        train(graph, Run(settings, graph.fingerprint()), Path(name), optimizer)
                        points = read_positions(optimizer, len(graph))
                nodes = sample_nodes(graph, 400, 0)
                found.append(reconstruction(graph, points, settings.k, nodes, 1).mean_average_precision)
            show(
                f"MAP, v per {mode}, {'float32' if dtypes is None else ' '.join(narrow) + ' bfloat16'}", found
            )


def recommender(seeds, steps):
    users, items, dim, batch = 2_000, 1_000, 16, 512
    for label, dtypes in DTYPES.items():
        found = []
        for seed in range(seeds):
            draws = torch.Generator().manual_seed(seed)
            tastes = torch.randn(users, 4, generator=draws), torch.randn(items, 4, generator=draws)

            def pairs(count, draws=draws, tastes=tastes):
                user = torch.randint(0, users, (count,), generator=draws)
                item = torch.randint(0, items, (count,), generator=draws)
                logit = (tastes[0][user] * tastes[1][item]).sum(1)
                return user, item, (torch.rand(count, generator=draws) < torch.sigmoid(logit)).float()

            kept_out = pairs(20_000)
            with tempfile.TemporaryDirectory() as name:
                tables = [
                    DiskEmbedding(rows, dim, init=init.Normal(rows, dim, 0.1, seed=seed + place),
                                  state_dir=name, name=str(rows), state_dtype=dtypes)
                    for place, rows in enumerate((users, items))
                ]  # fmt: skip
                with DiskSparseAdam([table.weight for table in tables], lr=1e-2) as optimizer:
                    for _ in range(steps):
                        user, item, clicked = pairs(batch)
                        score = (tables[0](user) * tables[1](item)).sum(1)
                        loss = torch.nn.functional.binary_cross_entropy_with_logits(score, clicked)
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                    with torch.no_grad():
                        score = (tables[0](kept_out[0]) * tables[1](kept_out[1])).sum(1)
            found.append(auc(score.numpy(), kept_out[2].numpy() > 0.5))
        show(f"AUC, {label}", found)


def auc(scores, positive):
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    count = positive.sum()
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(scores) - count)))


def steps_in_turns(count, rows=200_000, dim=128, batch=2_048):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        optimizers = {
            label: DiskSparseRiemannianAdam(
                {"entity": init.Normal(rows, dim, 0.1, seed=1)},
                k=0.0,
                disk_dir=f"{name}/{place}",
                state_dtype=dtypes,
            )
            for place, (label, dtypes) in enumerate(DTYPES.items())
        }
        draws = np.random.default_rng(0)
        chosen = [draws.choice(rows, batch, replace=False) for _ in range(20)]
        grad = draws.standard_normal((batch, dim)).astype(np.float32)
        for optimizer in optimizers.values():
            for each in chosen:
                optimizer.step({"entity": (each, grad)})
        walls = {label: [] for label in DTYPES}
        cpu = {label: [] for label in DTYPES}
        for turn in range(count):
            for label, optimizer in optimizers.items():
                wall, used = time.perf_counter(), time.process_time()
                optimizer.step({"entity": (chosen[turn % 20], grad)})
                walls[label].append(time.perf_counter() - wall)
                cpu[label].append(time.process_time() - used)
        for label, optimizer in optimizers.items():
            size = estimate(rows, dim, state_dtype=DTYPES[label])
            used, taken = (1e3 * statistics.median(each[label]) for each in (cpu, walls))
            print(
                f"{label:<16} {size.record:>6} bytes a row, a step of {batch:,}: {used:.2f} ms of CPU, "
                f"{taken:.2f} ms"
            )
            optimizer.close()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("mammals", "recommender", "steps"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1_500)
    arguments = parser.parse_args()
    if arguments.what == "mammals":
        mammals(arguments.seeds, arguments.epochs)
    elif arguments.what == "recommender":
        recommender(arguments.seeds, arguments.steps)
    else:
        steps_in_turns(arguments.steps)


if __name__ == "__main__":
    main()
