"""Modules and optimizers that share one state directory: one lock, one journal, one count of steps."""

import gc
import os
import threading
import warnings

import numpy as np
import pytest
import torch
from layers import MEMORY_AND_DISK, backward, row, step, weights

from dsa import DiskEmbedding, DiskSparseAdam, backends, init
from dsa.errors import (
    StateClosedError,
    StateExistsError,
    StateLockedError,
    StateMismatchError,
    StateNotFoundError,
    StateWarning,
    TrainingWarning,
)

both = pytest.mark.parametrize("kind", MEMORY_AND_DISK)


def test_one_directory_one_journal_one_count(make):
    users, items = make.disk(4, 2, name="users"), make.disk(6, 3, name="items")
    optimizer = make.adam([*users.parameters(), *items.parameters()])
    (users(torch.tensor([1])).sum() + items(torch.tensor([5])).sum()).backward()
    optimizer.step()
    names = sorted(file.name for file in make.directory().iterdir())
    assert [name.split("-")[0] for name in names] == [
        "dsa.journal.1",
        "dsa.json",
        "dsa.lock",
        "items",
        "users",
    ]
    assert optimizer.global_step == 1
    assert optimizer.param_names == ["users", "items"]
    np.testing.assert_allclose([row(users, 1)[0], row(items, 5)[0]], -0.1, rtol=1e-6)


def test_the_optimizer_finds_the_directory(make):
    layer = make.disk(4, 2)
    optimizer = DiskSparseAdam(layer.parameters(), lr=0.1)
    make.callback(optimizer.close)
    step(layer, optimizer, [1])
    assert make.records(layer, 4, 2)["t"].tolist() == [0, 1, 0, 0]


def test_ordinary_parameters_join_the_directory_of_the_disk_tables(make):
    disk, plain = make.disk(4, 2, name="disk"), make.plain(5, 3)
    model = torch.nn.ModuleDict({"disk": disk, "plain": plain})
    optimizer = make.adam(model.named_parameters())
    assert optimizer.param_names == ["disk", "plain.weight"]
    (disk(torch.tensor([1])).sum() + plain(torch.tensor([2])).sum()).backward()
    optimizer.step()
    np.testing.assert_allclose([row(disk, 1)[0], row(plain, 2)[0]], -0.1, rtol=1e-6)
    assert make.records("plain.weight", 5, 3, weights=False)["t"].tolist() == [0, 0, 1, 0, 0]
    optimizer.close()
    disk = make.disk(4, 2, name="disk", resume=True)
    optimizer = make.adam([("plain.weight", plain.weight), ("other", disk.weight)], resume=True)
    assert optimizer.param_names == ["plain.weight", "disk"]
    assert optimizer.global_step == 1


@pytest.mark.parametrize("groups", [False, True])
def test_the_directory_is_found_wherever_the_disk_table_stands(make, groups):
    """Without `state_dir`, and with the ordinary parameter first."""
    disk, plain = make.disk(4, 2), make.plain(4, 2)
    params = [plain.weight, disk.weight]
    optimizer = DiskSparseAdam([{"params": each} for each in params] if groups else params, lr=0.1)
    make.callback(optimizer.close)
    assert optimizer.param_names == ["param_0", "embedding"]
    (disk(torch.tensor([1])).sum() + plain(torch.tensor([2])).sum()).backward()
    optimizer.step()
    np.testing.assert_allclose([row(disk, 1)[0], row(plain, 2)[0]], -0.1, rtol=1e-6)


def test_an_ordinary_parameter_needs_a_directory(make):
    with pytest.raises(
        ValueError, match="'param_0' is an ordinary one, whose state needs a place: pass state_dir="
    ):
        DiskSparseAdam(make.plain(4, 2).parameters())


def test_modules_of_one_optimizer_lie_in_one_directory(make):
    first, second = make.disk(4, 2), make.disk(4, 2, where="elsewhere")
    with pytest.raises(ValueError, match=r"lies in another directory.*so that a step is one transaction"):
        DiskSparseAdam([first.weight, second.weight])
    with pytest.raises(ValueError, match=r"state_dir=.* is not .*where the disk embeddings are"):
        DiskSparseAdam([first.weight, make.plain(4, 2).weight], state_dir=make.directory("elsewhere"))
    with pytest.raises(ValueError, match=r"state_dir=.* is not .*where the disk embeddings are"):
        DiskSparseAdam([first.weight], state_dir=make.directory("elsewhere"))


def test_a_module_of_another_directory_cannot_be_added(make):
    first, second = make.disk(4, 2), make.disk(4, 2, where="elsewhere")
    optimizer = make.adam(first)
    with pytest.raises(ValueError, match="lies in another directory"):
        optimizer.add_param_group({"params": second.parameters()})
    assert optimizer.param_names == ["embedding"]
    step(first, optimizer, [1])


def test_one_name_for_two_modules(make):
    first = make.disk(4, 2, name="users")
    with pytest.raises(ValueError, match=r"the table name 'users' is taken.*name= of its own"):
        make.disk(4, 2, name="users")
    assert weights(first).shape == (4, 2)


def test_a_name_is_free_again_when_its_module_is_gone(make):
    make.disk(4, 2, name="users")
    items = DiskEmbedding(4, 2, state_dir=make.directory(), name="items", init=init.Zeros(4, 2))
    step(items, DiskSparseAdam(items.parameters(), lr=0.1), [1])
    del items
    gc.collect()
    again = make.disk(4, 2, name="items")
    np.testing.assert_allclose(row(again, 1), -0.1, rtol=1e-6)


def test_an_optimizer_is_built_again_over_the_same_model(make):
    disk, plain = make.disk(4, 2), make.plain(4, 2)
    optimizer = DiskSparseAdam([disk.weight, plain.weight], lr=0.1)
    step(plain, optimizer, [1])
    del optimizer
    gc.collect()
    optimizer = make.adam([disk.weight, plain.weight])
    step(plain, optimizer, [1])
    assert make.records("param_1", 4, 2, weights=False)["t"].tolist() == [0, 2, 0, 0]


def test_a_second_optimizer_over_the_same_ordinary_parameters_is_told_why_not(make):
    plain = make.plain(4, 2)
    make.adam(plain)
    with pytest.raises(ValueError, match=r"'param_0' is taken.*close"):
        make.adam(plain)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"durability": "power"}, "durability"),
        ({"allocate": "sparse"}, "allocate"),
        ({"async_writes": True}, "queue"),
        ({"backend": backends.Memmap(stride="page")}, "stride"),
        ({"resume": False}, "resume"),
    ],
)
def test_whoever_comes_first_chooses(make, option, named):
    first = make.disk(4, 2, name="first")
    with pytest.raises(
        ValueError, match=f"{named}=.* differs from .*leave it out|{named}=.* differs from .*pass the same"
    ):
        make.disk(4, 2, name="second", **option)
    with pytest.raises(ValueError, match="differs from"):
        make.adam([first.weight, make.plain(4, 2).weight], **option)
    with pytest.raises(ValueError, match="differs from"):
        make.adam(first, **option)


def test_whoever_comes_later_may_leave_the_choice_or_repeat_it(make):
    make.disk(4, 2, name="first", durability="power", async_writes=True)
    second = make.disk(4, 2, name="second")
    assert second.weight.table.writer is not None
    third = make.disk(4, 2, name="third", durability="power", async_writes=True)
    optimizer = make.adam(third, durability="power")
    step(third, optimizer, [1])
    assert optimizer.stats()["writer_status"] == "running"


def test_modules_resume_in_any_order(make):
    users, items = make.disk(4, 2, name="users"), make.disk(6, 3, name="items")
    optimizer = make.adam([users.weight, items.weight])
    (users(torch.tensor([1])).sum() + items(torch.tensor([5])).sum()).backward()
    optimizer.step()
    optimizer.close()
    items, users = make.disk(6, 3, name="items", resume=True), make.disk(4, 2, name="users", resume=True)
    optimizer = make.adam([items.weight, users.weight])
    (users(torch.tensor([1])).sum() + items(torch.tensor([5])).sum()).backward()
    optimizer.step()
    np.testing.assert_allclose([row(users, 1)[0], row(items, 5)[0]], -0.2, rtol=1e-6)
    assert optimizer.global_step == 2


def test_a_table_joins_a_resumed_directory_with_a_warning(make):
    layer, optimizer = make.pair("disk", 4, 2)
    step(layer, optimizer, [1])
    optimizer.close()
    layer = make.disk(4, 2, resume=True)
    with pytest.warns(
        StateWarning, match=r"holds no table 'late' but \['embedding'\]: a new one is made"
    ) as seen:
        late = make.disk(3, 5, name="late", resume=True)
    assert len(seen) == 1
    optimizer = make.adam([layer.weight, late.weight])
    (layer(torch.tensor([1])).sum() + late(torch.tensor([2])).sum()).backward()
    optimizer.step()
    optimizer.close()
    layer, late = make.disk(4, 2, resume=True), make.disk(3, 5, name="late", resume=True)
    np.testing.assert_allclose([row(layer, 1)[0], row(late, 2)[0]], [-0.2, -0.1], rtol=1e-6)


def test_a_module_on_its_own_leaves_the_other_tables_as_they_are(make):
    users, items = make.disk(4, 2, name="users"), make.disk(6, 3, name="items")
    optimizer = make.adam([users.weight, items.weight])
    (users(torch.tensor([1])).sum() + items(torch.tensor([5])).sum()).backward()
    optimizer.step()
    optimizer.close()
    before = make.records("items", 6, 3).tobytes()
    users = make.disk(4, 2, name="users", resume=True)
    optimizer = make.adam(users)
    step(users, optimizer, [1])
    optimizer.close()
    assert make.records("items", 6, 3).tobytes() == before


def test_what_to_do_with_state_that_is_there(make):
    layer, optimizer = make.pair("disk", 4, 2)
    step(layer, optimizer, [1])
    optimizer.close()
    with pytest.raises(
        StateExistsError, match=r"holds state at step 1.*pass resume=True to continue it or resume=False"
    ):
        make.disk(4, 2)
    with pytest.warns(StateWarning, match="what it held is lost") as seen:
        layer = make.disk(4, 2, resume=False)
    assert seen[0].filename.endswith("layers.py"), "the warning points at the caller"
    assert row(layer, 1) == [0.0, 0.0]
    with pytest.raises(StateNotFoundError, match="there is no state to resume"):
        make.disk(4, 2, where="elsewhere", resume=True)


@both
def test_another_shape_is_refused(make, kind):
    layer, optimizer = make.pair(kind, 100, 8)
    step(layer, optimizer, [1])
    optimizer.close()
    with pytest.raises(StateMismatchError, match="stored as 100 x 8 but 50 x 16 is asked for"):
        make.adam(make.layer(kind, 50, 16, **({"resume": True} if kind == "disk" else {})), resume=True)
    with pytest.raises(StateMismatchError, match="100 x 8 but 100 x 4"):
        make.adam(make.layer(kind, 100, 4, **({"resume": True} if kind == "disk" else {})), resume=True)


def test_closing_by_the_module_closes_for_the_optimizer(make):
    layer, optimizer = make.pair("disk", 4, 2)
    backward(layer, [1])
    layer.close()
    for action in (
        optimizer.step,
        optimizer.flush,
        layer.flush,
        lambda: layer(torch.tensor([1])),
        lambda: optimizer.prefetch([1]),
    ):
        with pytest.raises(StateClosedError, match="was closed: build the module or optimizer again"):
            action()
    assert optimizer.state_dict()["dsa"]["global_step"] == 0
    assert "4, 2" in repr(layer)
    layer.close()
    optimizer.close()
    assert row(make.disk(4, 2, resume=True), 1) == [0.0, 0.0]


def test_an_optimizer_may_go_before_its_module(make):
    layer = make.disk(4, 2)
    step(layer, DiskSparseAdam(layer.parameters(), lr=0.1), [1])
    gc.collect()
    np.testing.assert_allclose(row(layer, 1), -0.1, rtol=1e-6)
    optimizer = make.adam(layer)
    step(layer, optimizer, [1])
    assert optimizer.global_step == 2


def test_a_module_that_is_gone_before_its_optimizer_is_noticed(make):
    optimizer = make.adam(DiskEmbedding(4, 2, state_dir=make.directory()))
    gc.collect()
    with pytest.warns(TrainingWarning, match="'embedding' gets no gradients and nobody but the optimizer"):
        optimizer.step()
    assert optimizer.param_names == ["embedding"]


def test_a_directory_that_was_never_closed_is_told_of_and_complete(make):
    layer = DiskEmbedding(4, 2, state_dir=make.directory(), init=init.Zeros(4, 2))
    step(layer, DiskSparseAdam(layer.parameters(), lr=0.1), [1])
    held = [layer]
    del layer
    with pytest.warns(ResourceWarning, match="was never closed"):
        held.clear()
    np.testing.assert_allclose(row(make.disk(4, 2, resume=True), 1), -0.1, rtol=1e-6)


def test_two_optimizers_over_tables_of_one_directory(make):
    """With rates of their own; each counts a step of the directory."""
    users, items = make.disk(4, 2, name="users"), make.disk(6, 3, name="items")
    optimizers = make.adam(users, 0.1), make.adam(items, 0.5)
    (users(torch.tensor([1])).sum() + items(torch.tensor([5])).sum()).backward()
    for optimizer in optimizers:
        optimizer.step()
    np.testing.assert_allclose([row(users, 1)[0], row(items, 5)[0]], [-0.1, -0.5], rtol=1e-6)
    assert [optimizer.global_step for optimizer in optimizers] == [2, 2]


def test_two_threads_train_two_tables_of_one_directory(make):
    layers = [make.disk(20, 2, name=name) for name in ("users", "items")]
    failures = []

    def train(layer):
        try:
            optimizer = DiskSparseAdam(layer.parameters(), lr=0.1)
            for number in range(50):
                step(layer, optimizer, [number % 20])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for layer in layers:
        assert make.records(layer, 20, 2)["t"].tolist() == [3] * 10 + [2] * 10
    assert DiskSparseAdam(layers[0].parameters()).global_step == 100


forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_fork(function):
    """Run a function in a forked child and return what it says; the child ends without any cleaning up."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: the process may have threads
        child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(function()).encode())
        except BaseException as error:
            os.write(writing, type(error).__name__.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


@forking
def test_a_forked_child_can_neither_use_nor_disturb_the_directory(make):
    layer, optimizer = make.pair("disk", 4, 2)
    backward(layer, [1])
    assert in_fork(optimizer.step) == "StateClosedError"
    assert in_fork(lambda: layer(torch.tensor([1]))) == "StateClosedError"
    assert in_fork(optimizer.close) == "None"
    assert in_fork(layer.close) == "None"
    assert in_fork(lambda: make.disk(4, 2, resume=True)) == "StateLockedError"
    assert issubclass(StateLockedError, BlockingIOError)
    optimizer.step()
    np.testing.assert_allclose(row(layer, 1), -0.1, rtol=1e-6)


@forking
def test_a_child_forked_while_another_thread_holds_the_state_can_close(make):
    layer, optimizer = make.pair("disk", 4, 2)
    holding, done = threading.Event(), threading.Event()

    def hold():
        with layer.weight.state.exclusive:
            holding.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        closing = threading.Thread(
            target=lambda: (optimizer.close(), os.write(writing, b"closed")), daemon=True
        )
        closing.start()
        closing.join(5.0)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    done.set()
    thread.join()
    assert text == "closed"


def test_d25_a_cell_that_is_run_again_is_told_who_holds_the_table_and_how_to_let_go(make):
    embedding = make.disk(4, 2, 0.5)
    optimizer = make.adam(embedding)
    step(embedding, optimizer, [1])
    trained = row(embedding, 1)
    with pytest.raises(ValueError, match=r"is taken .* by a DiskEmbedding of this process.*: call close\(\)"):
        make.disk(4, 2, 0.5)
    with pytest.raises(ValueError, match=r"resume=True differs .* call close\(\) on that"):
        make.disk(4, 2, 0.5, resume=True)
    embedding.close()
    embedding = make.disk(4, 2, 0.5, resume=True)
    assert row(embedding, 1) == trained


def dropped(make, **options):
    """Build and drop a module; a cycle keeps what was dropped until somebody collects it."""
    embedding = DiskEmbedding(4, 2, init=init.Zeros(4, 2), state_dir=make.directory(), **options)
    embedding.set_rows(torch.tensor([1]), torch.ones(1, 2))
    embedding.itself = [embedding]


@pytest.mark.filterwarnings("ignore:the state directory .* was never closed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_d25_what_was_dropped_does_not_block(make):
    gc.disable()
    try:
        dropped(make)
        embedding = make.disk(4, 2, resume=True)
    finally:
        gc.enable()
    assert row(embedding, 1) == [1.0, 1.0]


def test_d25_resume_true_takes_over_what_only_an_optimizer_holds(make):
    embedding = DiskEmbedding(4, 2, init=init.Zeros(4, 2), state_dir=make.directory())
    optimizer = make.adam(embedding)
    step(embedding, optimizer, [1])
    trained = row(embedding, 1)
    del embedding
    again = make.disk(4, 2, resume=True)
    assert row(again, 1) == trained


def test_d25_starting_over_closes_what_only_an_optimizer_holds(make):
    embedding = DiskEmbedding(4, 2, init=init.Zeros(4, 2), state_dir=make.directory())
    optimizer = make.adam(embedding)
    step(embedding, optimizer, [1])
    del embedding
    with pytest.warns(StateWarning, match="resume=False replaces"):
        again = make.disk(4, 2, resume=False)
    assert row(again, 1) == [0.0, 0.0]
    with pytest.raises(StateClosedError):
        optimizer.flush()
