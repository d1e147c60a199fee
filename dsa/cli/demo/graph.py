"""Child/ancestor lists: reading, names to rows, and who is an ancestor of whom."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final, NamedTuple, final

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


_SHOWN: Final = 80
_GZIP: Final = b"\x1f\x8b"
_HEADING: Final = re.compile(
    r"#.*|.*(id|name)s?\d*|child(ren)?|parent|ancestor|head|tail|relation|source|target|src|dst|from|to"
    r"|hyponym|hypernym|label|weight",
    re.IGNORECASE,
)
_QUOTES: Final = "\"'"


class EdgeList(NamedTuple):
    """The edges of a file in its order, repeats included.

    names: N names; a node's number is the order of its first appearance.
    children, ancestors: `(E,)` int64.
    self_loops: lines that named one node twice; they aren't among the edges.
    notes: What looks like a mistake in the file, and was taken as it stands.
    """

    names: tuple[str, ...]
    children: Nodes
    ancestors: Nodes
    self_loops: int = 0
    notes: tuple[str, ...] = ()


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


def parse_edges(
    lines: Iterable[str | bytes], source: str = "edges", columns: tuple[int, int] | None = None
) -> EdgeList:
    """Read lines of child, tab, ancestor. Blank lines are skipped, self-loops dropped and counted.

    Args:
        lines: Text, or UTF-8 bytes.
        source: What error messages call the lines' origin.
        columns: Where child and ancestor stand, counted from 1, in lines of more columns; None where there
            are two.

    Raises:
        GraphError: a line hasn't the columns, has an empty name, or isn't UTF-8.
    """
    numbers: dict[str, int] = {}
    seen: list[int] = []  # the line in which a name came first
    flat: list[int] = []
    self_loops = 0
    for number, line in enumerate(lines, start=1):
        pair = _columns(line, f"{source}, line {number}", columns)
        if pair is None:
            continue
        if pair[0] == pair[1]:
            self_loops += 1
            continue
        flat.extend([numbers.setdefault(name, len(numbers)) for name in pair])
        seen.extend([number] * (len(numbers) - len(seen)))
    pairs = np.array(flat, np.int64).reshape(-1, 2)
    notes = _suspicions(list(numbers), seen, np.bincount(pairs.ravel(), minlength=len(numbers)), source)
    return EdgeList(tuple(numbers), pairs[:, 0].copy(), pairs[:, 1].copy(), self_loops, notes)


def _columns(line: str | bytes, where: str, chosen: tuple[int, int] | None) -> tuple[str, str] | None:
    try:
        text = line.decode("utf-8-sig") if isinstance(line, bytes) else line
    except UnicodeDecodeError as error:
        raise GraphError(f"{where}: {error}: save the file as UTF-8") from error
    text = text.rstrip("\r\n")
    if not text.strip():
        if "\t" in text:
            raise GraphError(f"{where}: {text!r} has an empty name: name both the child and the ancestor")
        return None
    columns = text.split("\t")
    if chosen is None and len(columns) != 2:
        raise GraphError(
            f"{where}: {_shown(text)} has {len(columns)} column(s): write a child and an ancestor separated "
            "by one tab, or say where they stand among more by --columns, such as 1,3"
        )
    first, second = (1, 2) if chosen is None else chosen
    if len(columns) < max(first, second):
        raise GraphError(
            f"{where}: {_shown(text)} has {len(columns)} column(s), but columns {first} and {second} are "
            "asked for: choose others by --columns"
        )
    pair = columns[first - 1], columns[second - 1]
    if not all(name.strip() for name in pair):
        raise GraphError(f"{where}: {_shown(text)} has an empty name: name both the child and the ancestor")
    return pair


def _shown(text: str) -> str:
    """Return a line for a message: as it stands, cut where it is long."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... of {len(text):,} characters"


def _suspicions(names: Sequence[str], seen: Sequence[int], counts: Nodes, source: str) -> tuple[str, ...]:
    """Return notes on names that look like a mistake; they are taken as they stand."""
    notes = []
    heading = names[:2]
    if len(heading) == 2 and seen[0] == seen[1] and counts[:2].tolist() == [1, 1]:
        told = [_HEADING.fullmatch(name.strip(f"{_QUOTES} ")) is not None for name in heading]
        if all(told) or heading[0].startswith("#"):
            notes.append(
                f"{source}, line {seen[0]}: {_shown(chr(9).join(heading))} looks like a heading and is taken "
                "as an edge: remove the line if it is none"
            )
    known = set(names)
    pairs = [
        (name, bare, line) for name, line in zip(names, seen, strict=True) if (bare := _bare(name)) != name
    ]
    alike = [each for each in pairs if each[1] in known]
    others = [each for each in pairs if each[1] not in known and each[0].strip() != each[0]]
    for found, what in ((alike, "is another node than"), (others, "has blanks around it and is not")):
        if found:
            name, bare, line = found[0]
            more = f" (and {len(found) - 1:,} more such names)" if len(found) > 1 else ""
            notes.append(f"{source}, line {line}: {_shown(name)} {what} {_shown(bare)}{more}")
    return tuple(notes)


def _bare(name: str) -> str:
    """Return a name without blanks and a pair of quotes around it."""
    name = name.strip()
    quoted = len(name) > 2 and name[0] == name[-1] and name[0] in _QUOTES
    return name[1:-1].strip() if quoted else name


def read_edges(path: str | Path, columns: tuple[int, int] | None = None) -> EdgeList:
    """Read a file of child, tab, ancestor.

    Args:
        path: The file.
        columns: See `parse_edges`.

    Raises:
        GraphError: a line can't be read, with its number; or the file holds no edge.
        FileNotFoundError: there is no such file.
    """
    with Path(path).open("rb") as lines:
        if lines.read(2) == _GZIP:
            raise GraphError(f"{str(path)!r} is packed by gzip: pass what gunzip makes of it")
        lines.seek(0)
        edges = parse_edges(lines, str(path), columns)
    if not len(edges.children):
        raise GraphError(
            f"{str(path)!r} holds no edge between two nodes: write lines of child, tab, ancestor"
        )
    return edges


def read_mammals() -> EdgeList:
    """Read the closure of WordNet 3.0's mammals that the package ships (1,182 nodes, 6,542 edges)."""
    data = resources.files("dsa.cli.demo") / "data" / "wordnet-mammals-closure.tsv"
    return parse_edges(data.read_text(encoding="utf-8").splitlines(), "wordnet-mammals-closure.tsv")
