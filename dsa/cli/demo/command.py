"""``dsa demo``: trains embeddings of a hierarchy in the Poincaré ball, from a table on disk."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from dsa.cli.bench.machine import anonymous_bytes
from dsa.cli.demo import picture
from dsa.cli.demo.closure import transitive_closure
from dsa.cli.demo.directory import Run, disk_use, forget_run, load_run, require_fresh, save_run, state_path
from dsa.cli.demo.evaluation import Training, evaluate
from dsa.cli.demo.graph import Graph, build_graph, read_edges, read_mammals
from dsa.cli.demo.interrupt import Interrupt
from dsa.cli.demo.progress import Progress
from dsa.cli.demo.report import format_report
from dsa.cli.demo.settings import default_settings
from dsa.cli.demo.training import open_table, read_positions, train
from dsa.errors import StateWarning
from dsa.optimizers.sparse_riemannian_adam import DiskSparseRiemannianAdam
from dsa.state.directories import directory_argument

__all__ = ["add_arguments", "run"]

_SETTINGS = (
    ("--dim", "dim", int, "numbers per node (10)"),
    ("--k", "k", float, "the ball has curvature -k (1.0)"),
    ("--epochs", "epochs", int, "passes over the edges (300, fewer for large graphs)"),
    ("--lr", "lr", float, "learning rate after the burn-in (by second moment and dim)"),
    ("--eps", "eps", float, "Adam's eps (of the size of one edge's gradient)"),
    ("--seed", "seed", int, "of the first positions and of all sampling (0)"),
    ("--batch-size", "batch_size", int, "edges per step (64 to 1,024, by the number of edges)"),
    ("--negatives", "negatives", int, "negatives per edge after the burn-in (50)"),
    ("--pool", "pool", int, "negatives per batch that its edges share (200, or the batch size if larger)"),
    (
        "--burn-in",
        "burn_in",
        int,
        "epochs at a tenth of the learning rate (80 of 300, a smaller part on large graphs)",
    ),
    ("--burn-in-negatives", "burn_in_negatives", int, "negatives per edge in the burn-in (5)"),
)
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dsa demo``."""
    parser.add_argument(
        "--edges", type=Path, metavar="FILE", help="lines of child, tab, ancestor (WordNet's mammals)"
    )
    parser.add_argument(
        "--columns",
        type=_columns_argument,
        metavar="C,A",
        help="where child and ancestor stand in lines of more columns, such as 1,3",
    )
    parser.add_argument(
        "--closure", action="store_true", help="the edges name direct parents: add all ancestors first"
    )
    for flag, name, kind, text in _SETTINGS:
        parser.add_argument(flag, dest=name, type=kind, help=text)
    parser.add_argument(
        "--second-moment",
        choices=("row", "frame", "coordinate"),
        help="how Adam's v is kept: one number per row, per component of a frame, or per coordinate (row)",
    )
    parser.add_argument(
        "--burn-in-sampling",
        choices=("degree", "uniform"),
        help="draw the burn-in's negatives by their number of descendants, or uniformly (degree)",
    )
    parser.add_argument(
        "--disk-dir",
        type=directory_argument,
        default=Path("dsa-demo"),
        help="where the run lives (./dsa-demo)",
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in the directory, with --epochs for more of them",
    )
    start.add_argument("--fresh", action="store_true", help="replace the run in the directory")
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="write names and vectors")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="the ball (DISK_DIR/ball.png)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON too")
    parser.add_argument(
        "--eval-nodes", type=int, default=20_000, help="most nodes to take MAP and mean rank over (20,000)"
    )


def _columns_argument(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts) or "0" in map(str.strip, parts):
        raise argparse.ArgumentTypeError(f"{text!r} names no two columns: write, say, 1,3")
    first, second = map(int, parts)
    if first == second:
        raise argparse.ArgumentTypeError(f"{text!r} names one column twice: write, say, 1,3")
    return first, second


def run(arguments: argparse.Namespace) -> int:
    """Train, evaluate, print.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        DSAError, ValueError, OSError: what the user gave can't be used; the message says why.
    """
    _check_outputs(arguments)
    graph = _load_graph(arguments)
    settings_run, resume = _load_run(arguments, graph)
    print(_headline(graph, settings_run), flush=True)
    try:
        training = _train(arguments.disk_dir, graph, settings_run, resume)
        if training is None:
            return _interrupted(arguments.disk_dir)
        _finish(arguments, graph, settings_run, training)
    except KeyboardInterrupt:
        return _interrupted(arguments.disk_dir)
    return 0


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse before the training what would fail after it."""
    if arguments.eval_nodes < 1:
        raise ValueError(f"eval-nodes is {arguments.eval_nodes!r}: use 1 or more")
    for path in (arguments.save, arguments.picture, arguments.json):
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"the directory of {str(path)!r} doesn't exist: make it first")
    if arguments.picture is not None and not picture.available():
        raise ValueError(f"--picture needs matplotlib, which isn't installed: {picture.REMEDY}")


def _load_graph(arguments: argparse.Namespace) -> Graph:
    if arguments.columns is not None and arguments.edges is None:
        raise ValueError("--columns says where child and ancestor stand in a file: pass --edges, too")
    edges = read_mammals() if arguments.edges is None else read_edges(arguments.edges, arguments.columns)
    for note in edges.notes:
        print(f"note: {note}", flush=True)
    return build_graph(transitive_closure(edges) if arguments.closure else edges)


def _load_run(arguments: argparse.Namespace, graph: Graph) -> tuple[Run, bool | None]:
    """Return the run, and what the optimizer is told about state in the directory."""
    names = [name for _, name, _, _ in _SETTINGS] + ["second_moment", "burn_in_sampling"]
    given = {name: getattr(arguments, name) for name in names}
    if arguments.resume:
        return load_run(arguments.disk_dir, graph, given), True
    if not arguments.fresh:
        require_fresh(arguments.disk_dir)
    settings = default_settings(graph.edges, given)
    return Run(settings, graph.fingerprint()), False if arguments.fresh else None


def _headline(graph: Graph, run: Run) -> str:
    settings = run.settings
    dropped = [(graph.self_loops, "self-loops"), (graph.duplicates, "repeated edges")]
    notes = "".join(f", {count:,} {what} left out" for count, what in dropped if count)
    return (
        f"{len(graph):,} nodes, {graph.edges:,} edges{notes}\n"
        f"dim {settings.dim}, k {settings.k:g}, second moment per {settings.second_moment}, "
        f"lr {settings.lr:g}, eps {settings.eps:g}, {settings.epochs} epochs ({settings.burn_in} of burn-in) "
        f"of {settings.steps_per_epoch(graph.edges):,} steps of {settings.batch_size} edges"
    )


def _train(directory: Path, graph: Graph, run: Run, resume: bool | None) -> Training | None:
    """Train to the end and close the table; None after Ctrl-C."""
    started = time.monotonic()
    with _open(directory, graph, run, resume) as optimizer, Interrupt() as interrupt:
        if not resume:
            save_run(directory, run)
        memory: list[int | None] = []

        def on_step(epoch: int, loss: float) -> None:
            if not memory:
                memory.append(anonymous_bytes())
            progress.step(epoch, loss)

        per_epoch = run.settings.steps_per_epoch(graph.edges)
        with Progress(run.settings.epochs, per_epoch, optimizer.global_step) as progress:
            outcome = train(
                graph, run, directory, optimizer, on_step=on_step, stop=lambda: interrupt.requested
            )
        if not outcome.finished:
            return None
        seconds = time.monotonic() - started
        growth = _growth(memory)
        positions = read_positions(optimizer, len(graph))
    return Training(positions, outcome.steps, outcome.loss, seconds, disk_use(state_path(directory)), growth)


def _open(directory: Path, graph: Graph, run: Run, resume: bool | None) -> DiskSparseRiemannianAdam:
    with contextlib.ExitStack() as stack:
        if resume is False:
            forget_run(directory)
            # --fresh asks for what the warning tells of.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", StateWarning)
        return open_table(graph, run, directory, resume)


def _growth(memory: list[int | None]) -> int | None:
    now = anonymous_bytes()
    return None if not memory or memory[0] is None or now is None else now - memory[0]


def _interrupted(directory: Path) -> int:
    print(
        f"interrupted; the run in {str(directory)!r} can go on: give the command again with --resume "
        "(and without --fresh)"
    )
    return _INTERRUPTED


def _finish(arguments: argparse.Namespace, graph: Graph, run: Run, training: Training) -> None:
    report = evaluate(graph, run.settings, training, arguments.eval_nodes)
    print(format_report(report))
    if arguments.json is not None:
        content: dict[str, Any] = {**report.to_json(), "settings": run.settings.to_json()}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if arguments.save is not None:
        with arguments.save.open("wb") as file:
            np.savez(file, names=np.array(graph.names), vectors=training.positions, k=run.settings.k)
        print(f"names and vectors are in {str(arguments.save)!r}")
    if picture.available():
        path = arguments.picture or arguments.disk_dir / "ball.png"
        picture.draw(graph, training.positions, run.settings.k, path)
        print(f"the picture is in {str(path)!r}")
    else:
        print(f"no picture: matplotlib isn't installed ({picture.REMEDY})")
