"""SIGKILL inside the step in place: a whole number of steps is there, for readers and for the next process.

A sample; ``python -m tests.crash --only passes`` kills as often as one likes.
"""

import os

import pytest
from harness import Figures, complain
from passes import BACKENDS, kill_at_lines, kill_passes

pytestmark = [
    pytest.mark.disk,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forks"),
]


@pytest.mark.parametrize(("threads", "name"), [(1, "memmap"), (2, "memmap"), (4, "memmap"), (2, "zarr")])
def test_kills_at_random_instants_of_a_large_batch(space, tmp_path, threads, name):
    figures = kill_passes(space, tmp_path, seed=threads, kills=15, threads=threads, backend=BACKENDS[name])
    complain(figures)
    assert figures.total == figures.reopened == 15
    assert figures.phases["rows half-way"] >= 3, "the kills miss the pass"


@pytest.mark.parametrize("name", BACKENDS)
def test_kills_at_lines_of_a_step(space, name):
    """Every thirteenth here; the command takes every one."""
    figures = Figures()
    lines = kill_at_lines(space, figures, BACKENDS[name], stride=13)
    complain(figures)
    assert lines > 200
    assert figures.total == figures.reopened == len(range(1, lines + 1, 13))
    assert figures.kills["open entry"] >= 3
    assert figures.in_progress >= 1
