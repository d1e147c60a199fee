"""SIGKILL at random moments: what was returned is there, nothing is torn, and going on gives the same bytes.

A sample; ``python -m tests.crash`` runs the full counts.
"""

import os
import random
from dataclasses import replace

import pytest
from campaign import CHANGES, kill_changes, kill_replacements, kill_steps, prepared
from faults import POINTS, Stop, watch
from harness import Child, Figures, Timer, complain, messages
from lives import Life, Plan, profile
from scenarios import CHANGING, STEPPING, steps

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forks")


def by_name(scenarios):
    return pytest.mark.parametrize("scenario", scenarios, ids=[one.name for one in scenarios])


@by_name(STEPPING)
def test_kills_inside_steps(space, scenario):
    figures = kill_steps(space, seed=1, kills=8, per_life=8, scenarios=[scenario])
    complain(figures)
    assert figures.total == 8
    assert figures.reopened >= figures.finished >= 1


@by_name(CHANGING)
def test_kills_inside_changes_of_whole_tables(space, scenario):
    """set_curvature is applied once, never twice, to all tables or none; reproject_all leaves rows of before
    and after.
    """
    figures = kill_changes(space, seed=1, kills=6, scenarios=[scenario])
    complain(figures)
    assert figures.total == 6
    assert set(figures.phases) <= CHANGES
    assert figures.finished >= 1


def test_kills_inside_replacement_and_creation(space):
    """resume=False: the old state whole, or the new one whole, or an error that says how to go on."""
    figures = kill_replacements(space, seed=1, kills=24)
    complain(figures)
    assert figures.total == figures.reopened == 24


def test_every_named_point_is_passed(space):
    """A point that nothing passes would be a kill that never happens."""
    passed = set()
    in_pieces = replace(STEPPING[1], backend="zarr")
    for scenario in (STEPPING[1], STEPPING[5], STEPPING[6], CHANGING[1], in_pieces):
        with prepared(space / "points", scenario) as (reference, directory):
            passed |= set(profile(reference, directory / "profile", frozenset()).points)
    assert passed == POINTS


@pytest.mark.parametrize(
    ("place", "scenario"),
    [
        ("scatter half", STEPPING[6]),
        ("scatter torn", STEPPING[6]),
        ("entry half committed", STEPPING[6]),
        ("replay ends", STEPPING[6]),
        ("kernel half", STEPPING[1]),
        ("kernel torn", STEPPING[1]),
        ("open entry note", STEPPING[1]),
        ("close entry half", STEPPING[1]),
        ("slot half", STEPPING[1]),
    ],
)
def test_the_same_moment_again_and_again(space, place, scenario):
    """The next process dies where the last one did, four times over."""
    figures = Figures()
    with prepared(space / "again", scenario) as (reference, directory):
        Life(reference, directory / "run", figures, lambda: Plan(Stop(place, 3), 5)).run(4)
    complain(figures)
    assert figures.kills[place] + 4 * figures.finished >= 4
    assert figures.finished == 1


def test_without_a_journal_the_harness_finds_torn_steps(space):
    """What the figures above are worth: with durability 'none' the same kills must be noticed."""
    scenario = replace(STEPPING[1], name="no journal", durability="none")
    stops = iter([Stop("kernel torn", 7), *[Stop("kernel half", 4)] * 20])
    figures = Figures()
    with prepared(space / "none", scenario) as (reference, directory):
        Life(reference, directory / "run", figures, lambda: Plan(next(stops), 5)).run(5)
    assert figures.failures["torn"] + figures.failures["lost"] == 1


@pytest.mark.parametrize(
    ("place", "scenario"), [("kernel begins", STEPPING[0]), ("gather begins", STEPPING[4])]
)
def test_a_forgotten_commit_is_found(space, monkeypatch, place, scenario):
    """Nor may a step be lost that had returned: here commits do nothing until the state is closed."""
    from dsa.state.journal import Journal

    figures = Figures()
    scenario = replace(scenario, name="forgetful", ops=steps(0, 20))
    with prepared(space / "forgetful", scenario) as (reference, directory):
        monkeypatch.setattr(Journal, "commit", lambda self: None)
        stops = iter([Stop(place, 11)])
        Life(reference, directory / "run", figures, lambda: Plan(next(stops), 15)).run(1)
    assert sum(figures.failures.values()) == 1


def test_timers_kill_from_outside(space):
    figures = Figures()
    rng = random.Random(3)

    def plan():
        return Plan(Timer(rng.randint(1, 12), rng.uniform(0.0, 0.001)), 30)

    with prepared(space / "timer", STEPPING[0]) as (reference, directory):
        Life(reference, directory / "run", figures, plan).run(4)
    complain(figures)
    assert figures.kills["timer"] == 4


def test_a_child_that_fails_says_why():
    def fail(report):
        report(("begin", 1))
        raise ValueError("for a reason")

    child = Child(fail)
    told = list(messages(child))
    assert child.wait() == 1
    assert told[0] == ("begin", 1)
    assert told[1][:2] == ("failed", "refused")
    assert "for a reason" in told[1][2]
    assert watch.stop is None
