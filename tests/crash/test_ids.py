"""A stream of ids that come and go, killed: ``python -m tests.crash --only ids`` runs 5,000 steps."""

import sys

import pytest
from harness import complain
from ids import Model, kill_streams

pytestmark = [
    pytest.mark.disk,
    pytest.mark.skipif(sys.platform != "linux", reason="children are forks"),
]


@pytest.mark.parametrize(
    ("backend", "durability"), [("memmap", "process"), ("zarr", "process"), ("zstd", "power")]
)
def test_a_stream_of_ids_that_is_killed_is_that_of_a_dictionary(space, backend, durability):
    figures = kill_streams(space, seed=2, steps=120, backend=backend, durability=durability)
    complain(figures)
    assert figures.finished == 1
    assert figures.total >= 1


def test_the_stream_lets_ids_come_and_go():
    model, rows, seen = Model(1), set(), set()
    for _ in range(300):
        model.advance()
        seen |= set(model.rows)
        rows |= {row for row, _, _ in model.rows.values()}
        assert len(model.rows) <= 170
    assert len(seen) > 5 * len(rows)
