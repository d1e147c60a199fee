"""A sample of ``python -m tests.blockdev``: power lost and disks failing under training, on real ext4."""

import random
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from device import BlockDevice
from filesystems import SIZE
from harness import Figures, complain
from images import Finding, Moment, judge
from power_losses import lose_power
from references import tuned
from scenarios import Op, steps
from training_runs import POLICIES, Reference, Run, draw_run
from write_failures import Fault, fail_writes, try_fault

pytestmark = pytest.mark.usefixtures("block_devices")

OPEN = "no way out"
"""What policies that don't promise to survive a loss of power may still come to."""


@pytest.fixture(scope="module")
def device(block_devices):
    with BlockDevice(SIZE) as device:
        yield device


@pytest.fixture(scope="module")
def reference(device):
    run = Run(
        "small",
        curvatures={"left": 0.0, "right": 1.0},
        rows={"left": 60, "right": 30},
        dims={"left": 3, "right": 2},
        largest_batch=40,
        ops=(*steps(0, 3), Op("flush"), *steps(4, 2)),
    )
    directory = device.directory / "judged"
    with tuned(run):
        yield Reference(run, directory)
    shutil.rmtree(directory)


@pytest.mark.parametrize("policy", POLICIES)
def test_losses_of_power(device, policy):
    figures = Figures()
    rng = random.Random(f"sample {policy}")
    # Others make what a killed process has left durable late; the campaign kills them too.
    lose_power(device, "ext4", rng, policy, 10, figures, kills=policy == "power")
    assert figures.total == 10
    if policy != "power":
        figures.failures.pop(f"{policy}: {OPEN}", None)
    complain(figures)


def test_steps_that_are_not_durable_are_found(device, monkeypatch):
    """What the figures are worth: a run without journal, judged as one that promises to survive."""
    monkeypatch.setattr("power_losses.judge", judge_as_power)
    figures = Figures()
    for seed in range(6):
        lose_power(device, "ext4", random.Random(seed), "process", 6, figures)
        if figures.failures.keys() & {"process: torn", "process: lost", "process: refused"}:
            return
    raise AssertionError(f"nothing was found in {figures.phases}")


def judge_as_power(finding, reference, moment):
    strict = object.__new__(Reference)
    strict.run, strict.states = replace(reference.run, durability="power"), reference.states
    return judge(finding, strict, moment)


def test_flushes_that_fail(device):
    figures = Figures()
    for number in range(3):
        fault = Fault("flushes", at=2, written=number != 1, times=(1, 3, 1000)[number], heal=2 + number)
        run = replace(draw_run(random.Random(number), "power", ("memmap", "zarr")), ops=steps(0, 6))
        follow(device, run, fault, figures)
    assert figures.kills["disk failed"] == 3
    complain(figures)


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_on_a_disk_that_does_not_fail(device, policy, monkeypatch):
    """The same calls and looks find nothing where nothing fails."""
    monkeypatch.setattr(device, "fail", lambda *arguments: None)
    monkeypatch.setattr(device, "fail_flushes", lambda *arguments: None)
    figures = Figures()
    fail_writes(device, "ext4", random.Random(policy), policy, 2, figures)
    complain(figures)
    assert figures.kills["disk failed where nothing was written"] == 2
    assert {kind.split(": ")[-1] for kind in +figures.phases} == {"whole"}


def follow(device, run, fault, figures):
    directory = device.directory / "reference"
    with tuned(run):
        reference = Reference(run, directory)
        shutil.rmtree(directory)
        try_fault(device, "ext4", reference, fault, random.Random(1), figures)


def torn(reference, index):
    """Return a state of which one row is another state's."""
    state = reference.states[index]
    weights = state.tables["left"]["w"].copy()
    weights[7] += np.float32(1)
    return replace(state, tables={**state.tables, "left": {**state.tables["left"], "w": weights}})


WARNING = ["the machine was restarted: that may have lost steps"]
AT = Moment(made=True, done=5, begun=6, floor=4)


@pytest.mark.parametrize(
    ("policy", "kind", "state", "options", "moment", "verdict"),
    [
        ("power", "opened", 5, {}, AT, "whole"),
        ("power", "opened", 6, {}, AT, "whole"),
        ("power", "opened", 3, {}, AT, "lost"),
        ("power", "opened", -5, {"warned": WARNING}, AT, "torn"),
        ("power", "opened", 5, {"repaired": True}, AT, "refused"),
        ("power", "refused", None, {}, AT, "refused"),
        ("power", "opened", 5, {"exports": {3: False}}, AT, "export lost"),
        ("process", "opened", 4, {}, AT, "whole"),
        ("process", "opened", 2, {}, AT, "silent"),
        ("process", "opened", -5, {}, AT, "silent"),
        ("process", "opened", -5, {"warned": ["table 'left' was stored with k=1.0"]}, AT, "silent"),
        ("process", "opened", -5, {"warned": WARNING}, AT, "told"),
        ("process", "opened", -5, {"repaired": True}, AT, "repaired, told"),
        ("process", "refused", None, {}, AT, "no way out"),
        ("process", "rows", None, {}, AT, "told by rows"),
        ("process", "failed", None, {}, AT, "unexpected error"),
        ("process", "opened", -4, {"warned": WARNING}, Moment(True, 4, 4, 4), "torn"),
        ("none", "opened", 2, {"warned": WARNING}, Moment(True, 4, 4, 4), "lost"),
        ("none", "refused", None, {}, Moment(True, 4, 4, 4), "refused"),
        ("power", "refused", None, {}, Moment(), "not made yet, StateNotFoundError"),
        ("power", "opened", -1, {}, Moment(), "torn"),
    ],
)
def test_verdicts(reference, monkeypatch, policy, kind, state, options, moment, verdict):
    monkeypatch.setattr(reference, "run", replace(reference.run, durability=policy))
    content = None
    if state is not None:
        content = reference.states[state] if state >= 0 else torn(reference, -state)
    finding = Finding(kind, "StateNotFoundError: text", content, **options)
    assert judge(finding, reference, moment).kind == verdict


def test_runs_that_are_drawn_differ():
    runs = [draw_run(random.Random(seed), "process") for seed in range(60)]
    assert {run.backend for run in runs} == {"memmap", "zarr", "zstd"}
    assert {run.async_writes for run in runs} == {run.eager for run in runs} == {True, False}
    kinds = Counter(op.kind for run in runs for op in run.ops)
    assert {"step", "flush", "close", "curve", "export", "import", "grow"} == set(kinds)
