import gzip
import re

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
        (b"a\tb\n\n\t\n", r"line 3: '\\t' has an empty name"),
        (b"a\t \n", r"line 1: 'a\\t ' has an empty name"),
        (b"a\tb\t\n", r"line 1: 'a\\tb\\t' has 3 column\(s\): .* --columns, such as 1,3"),
        (b"x" * 100_000, r"line 1: 'x{80}'... of 100,000 characters has 1 column\(s\)"),
        (gzip.compress(b"a\tb\n"), r"is packed by gzip: pass what gunzip"),
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


def test_lines_of_blanks_are_skipped():
    assert parse_edges(["a\tb", "   ", "\u00a0", "c\tb"]).names == ("a", "b", "c")


def test_columns_are_chosen():
    lines = ["cat\thypernym\tfeline", "dog\thypernym\tcanine\textra"]
    assert parse_edges(lines, columns=(1, 3)).names == ("cat", "feline", "dog", "canine")
    turned = parse_edges(lines, columns=(3, 1))
    assert [turned.names[child] for child in turned.children] == ["feline", "canine"]
    with pytest.raises(GraphError, match=r"line 1: .* has 3 column\(s\), but columns 1 and 4 are asked for"):
        parse_edges(lines, columns=(1, 4))


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        (["id1\tid2", "a\tb"], r"line 1: 'id1\\tid2' looks like a heading and is taken as an edge"),
        (["", "# FromNodeId\tToNodeId", "a\tb"], r"line 2: '# From.*looks like a heading"),
        (["child\tparent", "a\tb"], r"line 1: .*looks like a heading"),
        (["dog\ta", '"dog"\ta'], r"""line 2: '"dog"' is another node than 'dog'$"""),
        (["a\tb ", "a\tb"], r"line 1: 'b ' is another node than 'b'$"),
        (["a\u00a0\tb", "a\tb", "b \ta"], r"'a\\xa0' is another node than 'a' \(and 1 more such names\)"),
        (["a \tb"], r"line 1: 'a ' has blanks around it and is not 'a'$"),
    ],
)
def test_what_looks_like_a_mistake_is_noted_and_taken_as_it_stands(lines, note):
    edges = parse_edges(lines)
    (found,) = edges.notes
    assert re.search(note, found)
    assert len(edges.children) == sum(1 for line in lines if line)


def test_names_of_all_kinds_are_no_mistake():
    lines = ["#1\t#2", "#2\t#3", "parent\tchild", "parent\tx", "c d\t'tis", "id1\tid2", 'Q"\tb']
    assert parse_edges(lines).notes == ()
    assert read_mammals().notes == ()


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
