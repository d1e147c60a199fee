import numpy as np
import pytest

from dsa.cli.demo.graph import build_graph, parse_edges, read_edges, read_mammals
from dsa.errors import GraphError


def edges_of(graph):
    return {
        (graph.names[child], graph.names[ancestor])
        for child, ancestor in zip(graph.children, graph.ancestors, strict=True)
    }


def test_names_become_rows_in_order_of_appearance():
    edges = parse_edges(["cat\tfeline", "feline\tmammal", "dog\tmammal"])
    assert edges.names == ("cat", "feline", "mammal", "dog")
    assert edges.children.tolist() == [0, 1, 3]
    assert edges.ancestors.tolist() == [1, 2, 2]


def test_repeats_and_self_loops_are_dropped_and_counted():
    graph = build_graph(parse_edges(["a\tb", "b\tb", "a\tb", "a\tc", "a\tb"]))
    assert edges_of(graph) == {("a", "b"), ("a", "c")}
    assert (graph.self_loops, graph.duplicates) == (1, 2)


def test_a_node_named_in_a_self_loop_only_is_not_a_node():
    assert build_graph(parse_edges(["a\ta", "b\tc"])).names == ("b", "c")


def test_ancestors_are_sorted_slices():
    graph = build_graph(parse_edges(["b\ta", "c\tb", "c\ta", "d\ta"]))
    found = {graph.names[node]: {graph.names[x] for x in graph.ancestors_of(node)} for node in range(4)}
    assert found == {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"a"}}
    assert all(np.all(np.diff(graph.ancestors_of(node)) > 0) for node in range(4))
    assert graph.descendant_counts()[graph.names.index("a")] == 3


def test_a_file_may_have_windows_line_ends_a_byte_order_mark_and_empty_lines(tmp_path):
    path = tmp_path / "edges.tsv"
    path.write_bytes("\ufeffé\tb\r\n\r\n\nc d\tb\r\n".encode())
    edges = read_edges(path)
    assert edges.names == ("é", "b", "c d")
    assert len(edges.children) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\tb\na\tb\tc\n", r"line 2: 'a\\tb\\tc' has 3 column\(s\): write a child and an ancestor"),
        (b"a b\n", r"line 1: 'a b' has 1 column\(s\)"),
        (b"a\tb\n\n\t\n", r"line 3: '' has an empty name"),
        (b"a\t \n", r"line 1: 'a' has an empty name"),
        (b"a\tb\n\xff\tb\n", r"line 2: .*can't decode.*: save the file as UTF-8"),
        (b"", r"holds no edge between two nodes: write lines"),
        (b"a\ta\n", r"holds no edge between two nodes: write lines"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path, content, message):
    path = tmp_path / "edges.tsv"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=message) as caught:
        read_edges(path)
    assert str(path) in str(caught.value)


def test_a_graph_needs_an_edge():
    with pytest.raises(GraphError, match="no edge between two nodes"):
        build_graph(parse_edges([]))


def test_the_fingerprint_depends_on_names_and_edges_only():
    lines = ["a\tb", "a\tc", "b\tc"]
    graph = build_graph(parse_edges(lines))
    assert build_graph(parse_edges([*lines, "b\tc", "c\tc"])).fingerprint() == graph.fingerprint()
    others = [["a\tb", "a\tc", "c\tb"], ["a\tb", "a\tc"], ["a\tb", "a\td", "b\td"]]
    prints = {build_graph(parse_edges(other)).fingerprint() for other in others}
    assert len(prints | {graph.fingerprint()}) == 4


def test_the_shipped_mammals_are_a_closure():
    graph = build_graph(read_mammals())
    assert (len(graph), graph.edges, graph.self_loops, graph.duplicates) == (1182, 6542, 0, 0)
    ancestors = [set(graph.ancestors_of(node).tolist()) for node in range(len(graph))]
    assert all(ancestors[parent] <= mine for mine in ancestors for parent in mine)
    assert np.count_nonzero(graph.descendant_counts() == 0) == 889
