"""A small hierarchy for the tests of training and of the command."""

import pytest

from dsa.cli.demo.closure import transitive_closure
from dsa.cli.demo.graph import build_graph, parse_edges


@pytest.fixture(scope="session")
def parent_lines():
    """The direct edges of a ternary tree of 40 nodes, n0 at the root."""
    return [f"n{node}\tn{(node - 1) // 3}" for node in range(1, 40)]


@pytest.fixture(scope="session")
def tree(parent_lines):
    return build_graph(transitive_closure(parse_edges(parent_lines)))
