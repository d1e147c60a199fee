"""Ctrl-C at lines of the package while tables grow and ids come and go; and threads that do both at once."""

import sys
import threading
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from keyed_tables import DIM, content, opened

import dsa
from dsa import init
from dsa.backends import Zarr
from dsa.state.keyed_rows import delete_ids, insert_ids


class Interrupt:
    """Raises `KeyboardInterrupt` before the n-th line of the package, outside of its kernels."""

    def __init__(self, at):
        self.left, self.struck = at, False

    def __enter__(self):
        self._former = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error):
        sys.settrace(self._former)

    def _enter(self, frame, event, argument):
        path = frame.f_code.co_filename
        if "/dsa/" not in path or "/kernels/" in path or _is_finalizing(frame):
            return None  # what a finalizer raises nobody hears of
        return self._inside

    def _inside(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.struck = True
                raise KeyboardInterrupt
        return self._inside


def _is_finalizing(frame):
    while frame is not None:
        if frame.f_code.co_filename.endswith("weakref.py") or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def struck(line, call):
    """Call something and interrupt it at a line; tell whether it was so long."""
    with Interrupt(line) as interrupt:
        try:
            call()
        except KeyboardInterrupt:
            assert interrupt.struck
    return interrupt.struck


@pytest.mark.parametrize(
    "options",
    [{}, {"async_writes": True}, {"durability": "power"}, {"backend": Zarr(shard_bytes=100_000)}],
    ids=["memmap", "queued", "power", "zarr"],
)
def test_a_growth_that_is_interrupted(tmp_path, options):
    rows, path = 40, tmp_path / "state"
    source = {"word": init.Normal(rows, DIM, 0.1, seed=3)}
    rng = np.random.default_rng(0)
    with dsa.DiskSparseRiemannianAdam(source, k=0.0, disk_dir=path, **options) as optimizer:
        for line in count(1, 29):
            optimizer.step({"word": (rng.integers(0, rows, 5), rng.standard_normal((5, DIM)))})
            before = optimizer.read_rows(range(rows))
            more = struck(line, partial(optimizer.grow, "word", rows + 2))
            assert torch.equal(optimizer.read_rows(range(rows)), before)
            found = len(optimizer._state.tables["word"])
            assert found in (rows, rows + 2)
            optimizer.grow("word", rows + 2)
            rows += 2
            assert torch.equal(optimizer.read_rows(range(rows))[: rows - 2], before)
            assert dsa.open_state(path)["word"].shape[0] == rows
            if not more:
                break
    assert dsa.verify(path).ok


def test_ids_that_come_and_go_while_interrupted(tmp_path):
    state = opened(tmp_path)
    table = state.tables["entity"]

    def change(ids):
        with state.use():
            state.settle()
            insert_ids(state, table, ids)
            delete_ids(state, table, ids[:290])

    for number in count():
        ids = np.arange(300 * number, 300 * number + 300)
        before = content(state)
        more = struck(1 + 41 * number, partial(change, ids))
        with state.use():
            state.settle()
        found = content(state)
        assert before.items() <= found.items()
        assert len(found) - len(before) in (0, 300, 10)
        change(ids)
        assert len(content(state)) == len(before) + 10
        if not more:
            break
    state.close()


def test_threads_train_rows_that_grow_and_ids_that_come_and_go_over_one_directory(tmp_path):
    """Each layer ends as it does alone, and every export has the rows of one step."""
    steps, rate = 30, 0.5
    words = dsa.DiskEmbedding(8, DIM, name="word", init=init.Zeros(8, DIM), state="sgd", state_dir=tmp_path)
    rule = init.Zeros(None, DIM)
    users = dsa.DiskEmbedding(None, DIM, name="user", init=rule, state="sgd", state_dir=tmp_path)
    optimizers = [dsa.DiskSparseOptimizer(each.parameters(), "sgd", lr=rate) for each in (words, users)]
    failed = []

    def train_words():
        for number in range(steps):
            optimizers[0].zero_grad()
            words(torch.arange(8)).sum().backward()
            if number % 5 == 0:
                words.grow(words.num_embeddings + 3_000)
            optimizers[0].step()

    def train_users():
        for number in range(steps):
            optimizers[1].zero_grad()
            loss = users(torch.arange(number, number + 400)).sum()
            users.delete(torch.tensor([number]))
            users.insert(torch.tensor([-1 - number]))
            loss.backward()
            optimizers[1].step()

    def export():
        for number in range(4):
            with torch.no_grad():
                weights = words(torch.arange(8))
            assert (weights == weights[0, 0]).all()
            words.export_checkpoint(tmp_path.with_name(f"{tmp_path.name} export {number}"))

    def guarded(call):
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in (train_words, train_users, export)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    with torch.no_grad():
        assert (words(torch.arange(8)) == -rate * steps).all()
        assert sorted(users.ids().tolist()) == [*range(-steps, 0), *range(steps, 400 + steps - 1)]
        found = users.weight[torch.arange(-steps, 0)]
        assert not found.any(), "no gradient of a deleted id reaches the one that has its row"
        assert (users.weight[torch.arange(steps, 400)] == -rate * steps).all()
    words.close()
    for number in range(4):
        export = tmp_path.with_name(f"{tmp_path.name} export {number}")
        assert dsa.verify(export).ok
        (table,) = (
            each for each in dsa.open_checkpoint(export).content().tables if each.facts.name == "word"
        )
        _, records = next(iter(table.blocks()))
        assert (records["w"][:8] == records["w"][0, 0]).all()
