"""The warning about steps that are too long: when it comes, when it does not, and what hides it."""

import numpy as np
import pytest

from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import TrainingWarning
from dsa.optimizers.watch import ClampWatch


def note(watch, *steps):
    for rows, far in steps:
        watch.note(rows, far)


def test_warns_after_a_hundred_steps_and_only_once():
    watch = ClampWatch()
    note(watch, *[(100, 2)] * 99)
    assert not watch.warned
    with pytest.warns(TrainingWarning, match=r"200 of the 10000 rows of the last 100 steps"):
        watch.note(100, 2)
    assert watch.warned
    note(watch, *[(100, 2)] * 300)


@pytest.mark.parametrize("remedy", ["learning rate", "max_step", "second_moment='row'", "burn-in", "eps"])
def test_the_message_names_the_remedies(remedy):
    watch = ClampWatch()
    with pytest.warns(TrainingWarning, match=remedy):
        note(watch, *[(100, 2)] * 100)


def test_one_per_cent_is_not_enough():
    watch = ClampWatch()
    note(watch, *[(100, 1)] * 300)
    assert not watch.warned


def test_old_steps_are_forgotten():
    """A burst of 100 rows in 10,000 is exactly one per cent while it is in the window, and gone after it."""
    watch = ClampWatch()
    note(watch, *[(100, 100 if step == 50 else 0) for step in range(1_000)])
    assert not watch.warned
    with pytest.warns(TrainingWarning, match="101 of the 10000 rows"):
        note(watch, (100, 100), (100, 1))


def test_batches_of_different_sizes_are_weighted_by_their_rows():
    watch = ClampWatch()
    note(watch, *[(10_000, 0), (10, 10)] * 50)
    assert not watch.warned


def test_steps_without_rows_on_a_ball_say_nothing():
    watch = ClampWatch()
    note(watch, *[(0, 0)] * 300)
    note(watch, *[(10, 10)] * 99)
    assert not watch.warned


BATCH = np.arange(4)
PULLS = np.random.default_rng(0).standard_normal((100, 4, 3)).astype(np.float32)
CALM_BATCH = (np.arange(1_000), np.ones((1_000, 1), np.float32))


def ball(path, tables, k=1.0, **options):
    """An optimizer whose rate is far too high for a ball."""
    return DiskSparseRiemannianAdam(tables, lr=5.0, k=k, disk_dir=path, second_moment="coordinate", **options)


def train(optimizer, **others):
    for pull in PULLS:
        optimizer.step({"ball": (BATCH, pull), **others})


def test_an_optimizer_warns(tmp_path):
    with ball(tmp_path, {"ball": init.Normal(10, 3)}) as optimizer:
        with pytest.warns(TrainingWarning, match="400 of the 400 rows of the last 100 steps") as caught:
            train(optimizer)
        assert optimizer.global_step == 100
    assert [warning.filename for warning in caught] == [__file__]


def test_an_optimizer_with_short_steps_does_not(tmp_path):
    with ball(tmp_path, {"ball": init.Normal(10, 3)}, max_step=0.5) as optimizer:
        train(optimizer)


def test_a_flat_table_beside_it_hides_nothing(tmp_path):
    tables = {"flat": init.Zeros(1_000, 1), "ball": init.Normal(10, 3)}
    with (
        ball(tmp_path, tables, {"flat": 0.0, "ball": 1.0}) as optimizer,
        pytest.warns(TrainingWarning, match="400 of the 400 rows of the last 100 steps"),
    ):
        train(optimizer, flat=CALM_BATCH)


def test_steps_are_counted_not_tables(tmp_path):
    """Two tables make two batches a step; the message speaks of steps, and so does the rule."""
    tables = {"left": init.Normal(10, 3, seed=1), "right": init.Normal(10, 3, seed=2)}
    with ball(tmp_path, tables) as optimizer:
        for pull in PULLS[:60]:
            optimizer.step({"left": (BATCH, pull), "right": (BATCH, pull)})
        assert optimizer.global_step == 60
