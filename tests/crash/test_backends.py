"""The harness over the Zarr backends: a sample of kills, losses of power, failing operations and interrupts.

``python -m tests.crash --backend zarr`` and ``--backend zstd`` run the full counts.
"""

import os
import random
import sys

import pytest
from campaign import interrupt, kill_changes, kill_replacements, kill_steps, prepared, refuse
from faults import Stop
from harness import Figures, complain
from lives import Life, Plan
from losses import lose_power
from scenarios import CHANGING, ENDURING, STEPPING, over

import dsa.backends.compressed_array

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forks"),
    # An interrupt between `open` and the `with` that closes the file leaves that to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
by_backend = pytest.mark.parametrize("backend", ["zarr", "zstd"])
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the model reads files through /proc")


@by_backend
@pytest.mark.parametrize("number", [1, 5, 7])
def test_kills_inside_steps(space, backend, number):
    figures = kill_steps(space, seed=1, kills=5, per_life=5, scenarios=over(backend, [STEPPING[number]]))
    complain(figures)
    assert figures.total == 5
    assert figures.finished >= 1


@by_backend
@pytest.mark.parametrize("number", [1, 3, 5])
def test_kills_inside_changes_of_whole_tables(space, backend, number):
    figures = kill_changes(space, seed=1, kills=4, scenarios=over(backend, [CHANGING[number]]))
    complain(figures)
    assert figures.total == 4


@by_backend
def test_kills_inside_replacement_and_creation(space, backend):
    figures = kill_replacements(space, seed=1, kills=12, backend=backend)
    complain(figures)
    assert figures.total == figures.reopened == 12


@by_backend
@pytest.mark.parametrize("place", ["scatter half", "scatter torn", "replay ends", "table flush begins"])
def test_the_same_moment_again_and_again(space, backend, place):
    figures = Figures()
    (scenario,) = over(backend, [STEPPING[1]])
    with prepared(space / "again", scenario) as (reference, directory):
        Life(reference, directory / "run", figures, lambda: Plan(Stop(place, 3), 5)).run(4)
    complain(figures)
    assert figures.finished == 1


@pytest.mark.parametrize("passage", [1, 2, 5, 9, 14])
def test_kills_between_the_renames_of_one_drain(space, passage):
    """Some shards and fields are new and the others are not: the journal makes up for it."""
    figures = Figures()
    (scenario,) = over("zstd", [STEPPING[3]])
    with prepared(space / "renames", scenario) as (reference, directory):
        plans = iter([Plan(Stop("rename ends", passage, frozenset({"step"})), 30)] * 2)
        Life(reference, directory / "run", figures, lambda: next(plans)).run(2)
    complain(figures)
    assert figures.kills["rename ends"] >= 1
    assert figures.finished == 1


@needs_linux
@by_backend
@pytest.mark.parametrize("scenario", [STEPPING[7], CHANGING[6]], ids=lambda one: one.name)
def test_losses_of_power(space, backend, scenario):
    (scenario,) = over(backend, [scenario])
    with prepared(space / "power", scenario) as (reference, directory):
        figures = lose_power(reference, directory, random.Random(1), losses=4, draws=3)
    complain(figures)
    assert figures.total == figures.reopened == 12
    assert figures.finished == 1


@needs_linux
@by_backend
def test_losses_of_power_after_syncs_that_failed(space, backend):
    (scenario,) = over(backend, [STEPPING[5]])
    with prepared(space / "power", scenario) as (reference, directory):
        # A recovery of compressed tables is hundreds of syncs, none of which may fail, or it begins anew.
        failing = {"zarr": 0.01, "zstd": 0.005}[backend]
        figures = lose_power(reference, directory, random.Random(2), 4, 2, failing)
    complain(figures)
    assert figures.finished == 1


@needs_linux
def test_without_syncs_of_shards_the_model_finds_torn_ones(space, monkeypatch):
    """What the figures above are worth: a rename of a shard that is not on the device must be noticed."""
    (scenario,) = over("zstd", [STEPPING[5]])
    with prepared(space / "unsynced", scenario) as (reference, directory):
        monkeypatch.setattr(dsa.backends.compressed_array.system, "sync_file", lambda descriptor: None)
        figures = lose_power(reference, directory, random.Random(1), losses=8, draws=4)
    assert sum(figures.failures.values()) > 0


@by_backend
@pytest.mark.parametrize("scenario", ENDURING, ids=[one.name for one in ENDURING])
def test_file_operations_that_fail(space, backend, scenario):
    figures = refuse(space, seed=1, trials=8, scenarios=over(backend, [scenario]))
    complain(figures)
    assert figures.total >= 8


@by_backend
@pytest.mark.parametrize("scenario", ENDURING, ids=[one.name for one in ENDURING])
def test_interrupts_anywhere_in_a_call(space, backend, scenario):
    figures = interrupt(space, seed=1, trials=4, scenarios=over(backend, [scenario]))
    complain(figures)
    assert figures.finished >= 4
    assert figures.total >= 4
