"""A table that is added to a state that trains: wholly, or as if nobody had asked."""

import os
import threading

import pytest
import torch

import dsa


def step(layer, optimizer):
    optimizer.zero_grad()
    layer(torch.arange(5)).sum().backward()
    optimizer.step()


def build(path, name, **options):
    return dsa.DiskEmbedding(50, 4, state_dir=path, name=name, init=dsa.init.Zeros(50, 4), **options)


@pytest.mark.parametrize("error", [OSError(28, "no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_failed_addition_changes_nothing(tmp_path, monkeypatch, error, call):
    first = build(tmp_path / "state", "a")
    optimizer = dsa.DiskSparseAdam(first.parameters(), lr=0.1)
    step(first, optimizer)
    files = sorted(each.name for each in (tmp_path / "state").iterdir())

    def refuse(*given, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(type(error)):
            build(tmp_path / "state", "b")
    assert sorted(each.name for each in (tmp_path / "state").iterdir()) == files
    step(first, optimizer)
    optimizer._portable_state().abandon()
    again = build(tmp_path / "state", "a", resume=True)
    assert again.weight.state.global_step == 2
    assert list(again.weight.state.tables) == ["a"]
    again.close()


def test_beside_a_training_thread(tmp_path):
    first = build(tmp_path / "state", "a")
    optimizer = dsa.DiskSparseAdam(first.parameters(), lr=0.1)
    stop, failures = threading.Event(), []

    def train():
        try:
            while not stop.is_set():
                step(first, optimizer)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    added = [build(tmp_path / "state", f"t{number}", padding_idx=0) for number in range(15)]
    stop.set()
    thread.join()
    assert not failures
    assert len(added) == 15
    optimizer.close()
    with dsa.open_state(tmp_path / "state") as view:
        assert len(view) == 16
