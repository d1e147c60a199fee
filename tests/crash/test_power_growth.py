"""Loss of power, in a model of the device, beside tables that grow, by a call or because ids come."""

import itertools
import random
import sys
from functools import partial

import numpy as np
import pytest
from keyed_tables import DIM, content, opened, train
from power import Device, after_outage

import dsa
from dsa import init
from dsa.backends import Memmap, Zarr
from dsa.state.keyed_rows import delete_ids, find_rows, insert_ids

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the model reads files through /proc")

KINDS = {
    "memmap": {"backend": Memmap()},
    "sparse": {"backend": Memmap(), "allocate": "sparse"},
    "zarr": {"backend": Zarr(shard_bytes=4000)},
    "compressed": {"backend": Zarr(compression="zstd", shard_bytes=4000)},
}
by_kind = pytest.mark.parametrize("kind", KINDS)
ROWS = (30, 31, 300, 1_000)


def build(path, rows, resume=None, **options):
    source = {"word": init.Normal(rows, DIM, 0.1, seed=3)}
    return dsa.DiskSparseRiemannianAdam(source, k=0.0, disk_dir=path, resume=resume, **options)


def step(optimizer, rows, number):
    rng = np.random.default_rng(number)
    optimizer.step({"word": (rng.integers(0, rows, 15), rng.standard_normal((15, DIM)).astype(np.float32))})


def records(optimizer):
    table = optimizer._state.tables["word"]
    return optimizer.global_step, table.backend.read(np.arange(len(table))).tobytes()


class Follower:
    """Takes an image of the device after every sync, and notes between which operations it was."""

    def __init__(self, path):
        path.mkdir(exist_ok=True)
        self.device, self.images, self.done, self.begun = Device(path), [], 0, 0
        self.syncs = itertools.count()
        syncing = self.device._sync_data

        def noted(descriptor, failing):
            syncing(descriptor, failing)
            self.take()

        self.device._sync_data = noted

    def take(self):
        self.images.append((self.device.image(), self.done, self.begun))

    def drawn(self, directory, rng, most):
        """Write what may be left at moments drawn from all, once each."""
        self.device.close()
        chosen = rng.sample(self.images, min(most, len(self.images)))
        for number, (image, done, begun) in enumerate(chosen):
            path = directory / f"image {number}"
            image.draw(rng, path)
            yield path, done, begun


@by_kind
def test_tables_that_grow(space, tmp_path, kind):
    options = {**KINDS[kind], "durability": "power"}
    path = space / f"growing {kind}"
    with build(path, ROWS[0], **options):
        pass
    states, follower = [], Follower(path)
    with follower.device.following(), build(path, ROWS[0], True, **options) as optimizer:
        states.append(records(optimizer))
        calls = []
        for number, (before, rows) in enumerate(itertools.pairwise(ROWS)):
            calls += [partial(step, optimizer, before, 2 * number), partial(optimizer.grow, "word", rows)]
            calls += [partial(step, optimizer, rows, 2 * number + 1)]
        for call in calls:
            follower.begun += 1
            call()
            follower.done += 1
            follower.take()
            states.append(records(optimizer))
    for drawn, done, begun in follower.drawn(tmp_path, random.Random(kind), 16):
        with after_outage():
            rows = dsa.open_state(drawn)["word"].shape[0]
            with build(drawn, rows, True, **options) as optimizer:
                assert records(optimizer) in states[done : begun + 1]
                step(optimizer, rows, 99)
        assert dsa.verify(drawn).ok


@by_kind
def test_ids_that_come_and_go(space, tmp_path, kind):
    options = {**KINDS[kind], "durability": "power"}
    path = space / f"ids {kind}"
    state = opened(path, **options)
    state.close()
    rng = np.random.default_rng(1)

    def act(state):
        table, ids = state.tables["entity"], np.unique(rng.integers(-(2**62), 2**62, 400))
        with state.use():
            state.settle()
            if rng.random() < 0.4:
                known = np.concatenate([ids for ids, _ in table.keys.items()] + [ids[:1]])
                delete_ids(state, table, rng.choice(known, len(known) // 2, replace=False))
                return
            insert_ids(state, table, ids)
        train(state, find_rows(table, ids[:50]), np.ones((50, DIM), np.float32))

    follower = Follower(path)
    with follower.device.following():
        state = opened(path, resume=True, **options)
        states = [content(state)]
        for _ in range(12):
            follower.begun += 1
            act(state)
            follower.done += 1
            follower.take()
            states.append(content(state))
        state.close()
    for drawn, done, begun in follower.drawn(tmp_path, random.Random(kind), 12):
        with after_outage():
            state = opened(drawn, resume=True, **options)
            found = content(state)
            # An insertion and its step are two transactions.
            assert found in states[done : begun + 1] or (
                done < begun and found.keys() == states[begun].keys()
            )
            state.close()
