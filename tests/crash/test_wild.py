"""Samples: drawn configurations that are killed, real interrupts, and outages that may cost something.

``python -m tests.crash --only configurations --only interrupts --only outages`` runs the full counts.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from configurations import Call
from drawing import draw_configuration
from harness import Figures, complain
from interrupts import interrupt_for_real
from outages import CASES, lose_power_unpromised
from wild import Wild, kill_configurations, prepared_wild

import dsa.backends.memmap
import dsa.state.recovery
from dsa.state.journal import Journal

pytestmark = [
    pytest.mark.disk,
    pytest.mark.skipif(sys.platform != "linux", reason="children are forks, and files are in /proc"),
]


def test_kills_of_drawn_configurations(space):
    figures = kill_configurations(space, seed=1, kills=36)
    complain(figures)
    assert figures.total == 36
    assert figures.runs >= 3


def test_every_kind_of_call_is_drawn():
    drawn = [draw_configuration(seed) for seed in range(200)]
    assert {call.kind for each in drawn for call in each.calls} >= {
        *("plain", "prefetched", "curving", "curve", "reproject", "flush", "reopen", "export", "difference"),
        *("beside", "import", "fork", "add", "load", "moments"),
    }
    assert {each.backend for each in drawn} == {"memmap", "zarr", "zstd"}
    assert {each.durability for each in drawn} == {"process", "power", "none"}
    assert {each.threads for each in drawn} == {1, 2, 3, 4}
    sizes = [len(each.ids(call, each.shapes[0])) for each in drawn for call in each.calls]
    assert sum(size > 1024 for size in sizes) > 100
    assert all(each == draw_configuration(each.seed) for each in drawn)


def test_a_forgotten_commit_is_found_in_a_drawn_configuration(space, monkeypatch):
    """What the figures above are worth."""
    calls = tuple(Call("plain", number) for number in range(20))
    drawn = draw_configuration(5, "process")
    configuration = replace(drawn, calls=calls, backend="memmap", async_writes=True, state_dtype=None)
    figures = Figures()
    with prepared_wild(space, configuration) as directory:
        wild = Wild(configuration, directory, figures)
        monkeypatch.setattr(Journal, "commit", lambda self: None)
        wild.run_stopped("gather begins", 25)
    assert sum(figures.failures.values()) == 1


def test_real_interrupts_of_steps_on_cold_rows(space, tmp_path):
    figures = interrupt_for_real(space, Path(tmp_path), seed=1, interrupts=8, threads=4)
    complain(figures)
    assert figures.total >= 8


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("backend", ["memmap", "zarr", "zstd"])
def test_losses_of_power_that_nobody_promised_to_survive(space, backend, queued):
    """Nothing is refused, nothing is silent, and no torn row passes for sound."""
    figures = lose_power_unpromised(space, seed=1, images=6, backend=backend, queued=queued)
    complain(figures)
    assert figures.reopened == figures.total == 6 * len(CASES)
    assert figures.told > 0


def test_what_is_not_told_is_found(space, monkeypatch):
    monkeypatch.setattr(dsa.state.recovery, "notify", lambda *arguments: None)
    figures = lose_power_unpromised(space, 1, 20, cases=["never flushed"])
    assert figures.failures["silent"] > 0


def test_torn_rows_that_pass_for_sound_are_found(space, monkeypatch):
    monkeypatch.setattr(dsa.backends.memmap, "has_stamp", lambda schema: False)
    figures = lose_power_unpromised(space, 1, 20, cases=["never flushed"])
    assert figures.failures["torn"] > 0
