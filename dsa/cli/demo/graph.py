"""Child/ancestor lists: reading, names to rows, and who is an ancestor of whom."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dsa.errors import GraphError

__all__ = [
    "EdgeList",
    "Graph",
    "Nodes",
    "build_graph",
    "parse_edges",
    "read_edges",
    "read_mammals",
]

Nodes = NDArray[np.int64]
"""Node numbers in [0, N); a node's number is its row in the table."""


class EdgeList(NamedTuple):
    """The edges of a file in its order, repeats included.

    names: N names; a node's number is the order of its first appearance.
    children, ancestors: `(E,)` int64.
    self_loops: lines that named one node twice; they aren't among the edges.
    """

    names: tuple[str, ...]
    children: Nodes
    ancestors: Nodes
    self_loops: int = 0


@final
@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes and their ancestors, each edge once, sorted by child and then by ancestor.

    Args:
        names: N names.
        children: `(E,)` int64, ascending.
        ancestors: `(E,)` int64, ascending within a child.
        offsets: `(N + 1,)` int64; where the ancestors of each node begin and end.
        self_loops: Lines that were dropped because they named one node twice.
        duplicates: Lines that were dropped because they repeated an edge.
    """

    names: tuple[str, ...]
    children: Nodes
    ancestors: Nodes
    offsets: Nodes
    self_loops: int = 0
    duplicates: int = 0

    def __len__(self) -> int:
        return len(self.names)

    @property
    def edges(self) -> int:
        """The number of edges E."""
        return len(self.children)

    def descendant_counts(self) -> Nodes:
        """Return how many nodes name each node as an ancestor, `(N,)` int64."""
        return np.bincount(self.ancestors, minlength=len(self)).astype(np.int64)

    def ancestors_of(self, node: int) -> Nodes:
        """Return a view of the ancestors of a node, ascending."""
        return self.ancestors[self.offsets[node] : self.offsets[node + 1]]

    def fingerprint(self) -> str:
        """Return a SHA-256 of names and edges: equal exactly when a table trained on one fits the other."""
        digest = hashlib.sha256("\n".join(self.names).encode())
        digest.update(self.children.astype("<i8").tobytes())
        digest.update(self.ancestors.astype("<i8").tobytes())
        return digest.hexdigest()


def build_graph(edges: EdgeList) -> Graph:
    r"""Sort the edges and drop repeats.

    Raises:
        GraphError: there is no edge.

    Example:
        >>> graph = build_graph(parse_edges(["cat\tmammal", "cat\tanimal", "cat\tmammal"]))
        >>> graph.edges, graph.duplicates, graph.offsets.tolist()
        (2, 1, [0, 2, 2, 2])
    """
    if not len(edges.children):
        raise GraphError("the edge list holds no edge between two nodes: write lines of child, tab, ancestor")
    nodes = len(edges.names)
    keys = np.unique(edges.children * nodes + edges.ancestors)
    children, ancestors = np.divmod(keys, nodes)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(children, minlength=nodes))]).astype(np.int64)
    duplicates = len(edges.children) - len(keys)
    return Graph(edges.names, children, ancestors, offsets, edges.self_loops, duplicates)


def parse_edges(lines: Iterable[str | bytes], source: str = "edges") -> EdgeList:
    """Read lines of child, tab, ancestor. Empty lines are skipped, self-loops dropped and counted.

    Args:
        lines: Text, or UTF-8 bytes.
        source: What error messages call the lines' origin.

    Raises:
        GraphError: a line hasn't two columns, has an empty name, or isn't UTF-8.
    """
    numbers: dict[str, int] = {}
    flat: list[int] = []
    self_loops = 0
    for number, line in enumerate(lines, start=1):
        pair = _columns(line, f"{source}, line {number}")
        if pair is None:
            continue
        if pair[0] == pair[1]:
            self_loops += 1
            continue
        flat.extend([numbers.setdefault(name, len(numbers)) for name in pair])
    pairs = np.array(flat, np.int64).reshape(-1, 2)
    return EdgeList(tuple(numbers), pairs[:, 0].copy(), pairs[:, 1].copy(), self_loops)


def _columns(line: str | bytes, where: str) -> tuple[str, str] | None:
    try:
        text = line.decode("utf-8-sig") if isinstance(line, bytes) else line
    except UnicodeDecodeError as error:
        raise GraphError(f"{where}: {error}: save the file as UTF-8") from error
    columns = text.rstrip("\r\n").split("\t")
    if columns == [""]:
        return None
    if len(columns) != 2:
        raise GraphError(
            f"{where}: {text.rstrip()!r} has {len(columns)} column(s): write a child and an "
            "ancestor separated by one tab"
        )
    if not all(name.strip() for name in columns):
        raise GraphError(
            f"{where}: {text.rstrip()!r} has an empty name: name both the child and the ancestor"
        )
    return columns[0], columns[1]


def read_edges(path: str | Path) -> EdgeList:
    """Read a file of child, tab, ancestor.

    Raises:
        GraphError: a line can't be read, with its number; or the file holds no edge.
        FileNotFoundError: there is no such file.
    """
    with Path(path).open("rb") as lines:
        edges = parse_edges(lines, str(path))
    if not len(edges.children):
        raise GraphError(
            f"{str(path)!r} holds no edge between two nodes: write lines of child, tab, ancestor"
        )
    return edges


def read_mammals() -> EdgeList:
    """Read the closure of WordNet 3.0's mammals that the package ships (1,182 nodes, 6,542 edges)."""
    data = resources.files("dsa.cli.demo") / "data" / "wordnet-mammals-closure.tsv"
    return parse_edges(data.read_text(encoding="utf-8").splitlines(), "wordnet-mammals-closure.tsv")
